"""The report in a real browser, at the width of a laptop and of a phone: quiet, whole, and nothing sticks out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headcount.reporting.report import write_report
from report_factory import assert_own_script_only, make_study, pictures

CLASSES = ("<img src=x onerror=alert(1)>", "colorectal adenocarcinoma epithelium", "drusen", "9")


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, source = tmp_path_factory.mktemp("browser"), pictures(CLASSES)
    made = make_study(folder / "records", source) + make_study(folder / "records", source, folds=1, scenario="large")
    return write_report(made, folder / "report.html", title="Bags, as a browser sees them", load_source=lambda _: source)


def test_no_messages_and_no_requests(visit: Any, page_file: Path) -> None:
    _, heard, _ = visit
    assert heard["console"] == heard["errors"] == heard["dialogs"] == []
    assert [url for url in heard["requests"] if not url.startswith("data:")] == [page_file.as_uri()]


def test_page_fits_the_window(visit: Any, tmp_path: Path) -> None:
    page, _, name = visit
    page.screenshot(path=tmp_path / f"{name}.png", full_page=True)
    assert (tmp_path / f"{name}.png").stat().st_size > 10_000
    wide, window = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
    assert wide <= window


def test_pictures_load_and_user_strings_are_escaped(visit: Any) -> None:
    page, _, _ = visit
    sizes = page.evaluate("[...document.images].map(i => i.naturalWidth)")
    assert len(sizes) > 100
    assert min(sizes) > 0
    assert page.locator("img[onerror]").count() == 0
    assert_own_script_only(page)
    assert page.get_by_text(CLASSES[0]).count() > 0


def test_table_and_figures_are_shown(visit: Any) -> None:
    page, _, _ = visit
    table = page.locator("section#s2 table.scores")
    assert table.locator("tbody tr").count() == 3
    assert table.locator("td.best").count() == 1
    assert page.locator("figure svg").count() > 20


def test_fold_links_to_its_record(visit: Any) -> None:
    page, _, _ = visit
    link = page.locator("section#s2 table.scores td.runs a").first
    target = link.get_attribute("href")
    link.click()
    assert page.evaluate("document.querySelector('tr:target').id") == target[1:]


def test_figures_follow_the_colour_scheme(visit: Any) -> None:
    page, _, name = visit
    ink = page.evaluate("getComputedStyle(document.querySelector('svg.plot text')).fill")
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    bright = [sum(map(int, colour[4:-1].split(","))) for colour in (ink, paper)]
    assert (bright[0] > bright[1]) == name.endswith("dark")
