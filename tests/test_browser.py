"""The report in a real browser, at the width of a laptop and of a phone: quiet, whole, and nothing sticks out."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headcount.reporting.report import write_report
from showing_factory import make_study, pictures

CLASSES = ("<img src=x onerror=alert(1)>", "colorectal adenocarcinoma epithelium", "drusen", "9")
QUIET = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
         "--disable-sync", "--no-first-run")  # fmt: skip
SIZES = {"laptop": (1366, 900), "phone": (390, 844)}


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, source = tmp_path_factory.mktemp("browser"), pictures(CLASSES)
    made = make_study(folder / "records", source) + make_study(folder / "records", source, folds=1, scenario="large")
    return write_report(
        made, folder / "report.html", title="Bags, as a browser sees them", load_source=lambda _: source
    )


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    executable = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if executable is None:
        if os.environ.get("HEADCOUNT_REQUIRE_BROWSER") == "1":
            pytest.fail("HEADCOUNT_REQUIRE_BROWSER=1 and no chromium on the path")
        pytest.skip("no chromium on the path")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        launched = play.chromium.launch(executable_path=executable, args=list(QUIET))
        yield launched
        launched.close()


@pytest.fixture(scope="module", params=[("laptop", "light"), ("phone", "light"), ("phone", "dark")], ids="-".join)
def visit(
    request: pytest.FixtureRequest, browser: Any, page_file: Path
) -> Iterator[tuple[Any, dict[str, list[str]], str]]:
    """The page, open, with all that it said and asked for."""
    size, scheme = request.param
    width, height = SIZES[size]
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    page, heard = context.new_page(), {"console": [], "errors": [], "requests": [], "dialogs": []}
    page.on("console", lambda message: heard["console"].append(message.text))
    page.on("pageerror", lambda error: heard["errors"].append(str(error)))
    page.on("request", lambda asked: heard["requests"].append(asked.url))
    page.on("dialog", lambda dialog: (heard["dialogs"].append(dialog.message), dialog.dismiss()))
    page.goto(page_file.as_uri())
    yield page, heard, f"{size}-{scheme}"
    context.close()


def test_quiet_and_alone(visit: Any, page_file: Path) -> None:
    _, heard, _ = visit
    assert heard["console"] == heard["errors"] == heard["dialogs"] == []
    assert [url for url in heard["requests"] if not url.startswith("data:")] == [page_file.as_uri()]


def test_nothing_sticks_out(visit: Any, tmp_path: Path) -> None:
    page, _, name = visit
    page.screenshot(path=tmp_path / f"{name}.png", full_page=True)
    assert (tmp_path / f"{name}.png").stat().st_size > 10_000
    wide, window = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
    assert wide <= window


def test_pictures_load_and_words_are_inert(visit: Any) -> None:
    page, _, _ = visit
    sizes = page.evaluate("[...document.images].map(i => i.naturalWidth)")
    assert len(sizes) > 100
    assert min(sizes) > 0
    assert page.locator("img[onerror], script").count() == 0
    assert page.get_by_text(CLASSES[0]).count() > 0


def test_the_table_is_there(visit: Any) -> None:
    page, _, _ = visit
    table = page.locator("section#s2 table.scores")
    assert table.locator("tbody tr").count() == 3
    assert table.locator("td.best").count() == 1
    assert page.locator("figure svg").count() > 20


def test_a_fold_leads_to_its_record(visit: Any) -> None:
    page, _, _ = visit
    link = page.locator("section#s2 table.scores td.runs a").first
    target = link.get_attribute("href")
    link.click()
    assert page.evaluate("document.querySelector('tr:target').id") == target[1:]


def test_figures_wear_the_page_s_colours(visit: Any) -> None:
    page, _, name = visit
    ink = page.evaluate("getComputedStyle(document.querySelector('svg.plot text')).fill")
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    bright = [sum(map(int, colour[4:-1].split(","))) for colour in (ink, paper)]
    assert (bright[0] > bright[1]) == name.endswith("dark")
