"""The page of the paper in a real browser: as quiet, whole and narrow as the report's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_browser import test_figures_follow_the_colour_scheme, test_no_messages_and_no_requests, test_page_fits_the_window  # noqa: F401  the same demands as of the report

from headcount.experiments.paper import figure_recipes
from headcount.reporting.paper_page import write_paper
from paper_factory import DATA, TINY, all_recipes, pretend_all
from report_factory import HOSTILE, assert_own_script_only


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All but the fourth data set, so that whole, partial and missing cells stand side by side."""
    folder = tmp_path_factory.mktemp("browser")
    there = [r for r in all_recipes(TINY) if r.source != "oct" and (r.source != "path" or r.fold == 0)]
    made = pretend_all(there, folder, data={**DATA, "note": HOSTILE[0]})
    assert set(figure_recipes("figure7", TINY)) <= made.keys()
    return write_paper(TINY, made, folder / "paper.html")


def test_user_strings_are_escaped(visit: Any) -> None:
    page, _, _ = visit
    assert page.locator("img").count() == 0
    assert_own_script_only(page)
    assert page.get_by_text(HOSTILE[0]).count() == 1


def test_complete_partial_and_missing_cells(visit: Any) -> None:
    page, _, _ = visit
    rows = page.locator("#table2 h3#table2-small + .scroller tbody tr")
    assert rows.count() == 12
    cifar, _, path, octs, average = rows.last.locator("td.cell").all_inner_texts()
    assert "(2/2)" in cifar
    assert "(1/2)" in path
    assert "missing" in octs
    assert average.startswith("–")


def test_all_tables_and_figures_are_shown(visit: Any) -> None:
    page, _, _ = visit
    assert page.locator("main > section").count() == 1 + 5 + 5 + 1
    assert page.locator("#figure7 svg.plot").count() == 12
    assert page.locator("#figure8 svg.plot").count() == page.locator("#figure9 svg.plot").count() == 4
    assert page.locator("#figure8 .blank").all_inner_texts() == ["missing"]
    assert all(box["height"] > 60 for box in (svg.bounding_box() for svg in page.locator("svg.plot").all()))


def test_row_names_stay_visible_while_scrolling(visit: Any) -> None:
    page, _, name = visit
    frame = page.locator("#table2 .scroller").first
    wide, window = frame.evaluate("f => [f.scrollWidth, f.clientWidth]")
    assert (wide > window) == name.startswith("phone")
    frame.evaluate("f => f.scrollLeft = 9999")
    assert 0 <= frame.locator("tbody th").first.bounding_box()["x"] < page.viewport_size["width"] / 2


@pytest.mark.parametrize("where", ["#table2", "#table5", "#table6"])
def test_values_link_to_their_runs(visit: Any, where: str) -> None:
    page, _, _ = visit
    link = page.locator(f"{where} td.cell .ours a").last
    target = link.get_attribute("href")
    link.click()
    found = page.locator(":target")
    assert found.get_attribute("id") == target[1:]
    assert found.locator("code").count() >= 1
    top = found.bounding_box()["y"]
    assert 0 <= top < page.viewport_size["height"]


def test_footnotes_are_linked(visit: Any) -> None:
    page, _, _ = visit
    page.locator("#table2 sup a").first.click()
    assert page.locator("#table2 li:target").inner_text().startswith("Printed as 0.422")
