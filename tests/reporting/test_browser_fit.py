"""A fit's report in a real browser: whole and quiet, and class, file and column names with HTML in them are only words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headcount.readers import read
from headcount.reporting.model_pages import model_card, render_fit_page, summary_lines
from headcount.selection import classifiers
from headcount.selection.fit import fit
from report_factory import assert_own_script_only

EVIL = "<img src=x onerror=alert(1)>"
SCRIPT = "</style><script>alert(2)</script>"
CLASSES = (EVIL, "a|b `c` {{ 7*7 }}", "plain")


@pytest.fixture(scope="module")
def fitted():
    g = np.random.default_rng(0)
    table: dict[str, list[Any]] = {"bag": [], "label": [], "truth": [], SCRIPT: [], "b": []}
    for b in range(18):
        for i in range(4 + b % 2):
            y = b % 3 if i < 3 else int(g.integers(3))
            values = (f"bag {EVIL} {b}", CLASSES[b % 3], CLASSES[y], float(g.normal(3 * y)), float(g.normal()))
            for column, value in zip(table.values(), values, strict=True):
                column.append(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(classifiers, "N_TREES", 5)
        patch.setattr(classifiers, "EM_ROUNDS", 1)
        return fit(read(table), "em_forest,tilt", folds=2, epochs=3)


@pytest.fixture(scope="module")
def page_file(fitted, tmp_path_factory):
    path = tmp_path_factory.mktemp("fit") / "report.html"
    path.write_text(render_fit_page(fitted, f"A model from {SCRIPT}"))
    return path


@pytest.fixture(scope="module", params=[(1366, 900), (390, 844)], ids=["laptop", "phone"])
def visit(request: pytest.FixtureRequest, browser: Any, page_file: Path):
    width, height = request.param
    context = browser.new_context(viewport={"width": width, "height": height})
    page, heard = context.new_page(), {"console": [], "errors": [], "requests": [], "dialogs": []}
    page.on("console", lambda message: heard["console"].append(message.text))
    page.on("pageerror", lambda error: heard["errors"].append(str(error)))
    page.on("request", lambda asked: heard["requests"].append(asked.url))
    page.on("dialog", lambda dialog: (heard["dialogs"].append(dialog.message), dialog.dismiss()))
    page.goto(page_file.as_uri())
    yield page, heard
    context.close()


def test_no_messages_and_no_requests(visit, page_file):
    _, heard = visit
    assert heard["console"] == heard["errors"] == heard["dialogs"] == []
    assert [url for url in heard["requests"] if not url.startswith("data:")] == [page_file.as_uri()]


def test_user_strings_are_escaped(visit):
    page, _ = visit
    assert page.locator("img[onerror]").count() == 0
    assert_own_script_only(page)
    assert page.get_by_text(EVIL).count() > 0
    assert page.get_by_text("{{ 7*7 }}").count() > 0
    assert page.get_by_text(SCRIPT).count() > 0
    assert SCRIPT in page.title()


def test_page_fits_the_window_and_is_complete(visit):
    page, _ = visit
    wide, window = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
    assert wide <= window
    assert page.locator("#candidates tbody tr").count() == 5
    assert page.locator("#candidates td.best").count() == 1
    headings = ["Methods compared", "Calibration", "Confusion matrix", "Learning curve", "Bag sizes"]
    assert page.locator("#figures h3").all_inner_texts() == headings
    assert page.locator("figure .frame > *").count() == len(headings)
    assert page.get_by_text("cannot be known from bag labels").count() == 1


def test_warnings_are_ranked_by_weight(visit):
    page, _ = visit
    lines = page.locator("#scores .caution")
    kinds = [
        {"caution serious": 0, "caution": 1, "caution remark": 2}[c] for c in lines.evaluate_all("e => e.map(x => x.className)")
    ]
    assert kinds == sorted(kinds)
    assert "only 18 labelled bags" in lines.nth(kinds.index(1)).inner_text()
    assert "cannot be known" in lines.last.inner_text()
    assert kinds[-1] == 2


def test_baselines_are_marked(visit, fitted):
    page, _ = visit
    notes = {row["title"]: row["baseline"] for row in fitted.metadata["methods"]}
    assert set(notes.values()) == {True, False}
    for row in page.locator("#candidates tbody tr").all():
        text = row.locator("th").inner_text()
        assert ("baseline" in text.lower().split("\n", 1)[-1]) == notes[text.split("\n")[0]]


@pytest.mark.parametrize("way", ["click", "keyboard"])
def test_tables_are_sorted(visit, way):
    page, _ = visit
    page.reload()
    table = page.locator("#candidates table")

    def losses():
        texts = [t.split()[0] for t in table.locator("tbody td:nth-child(2)").all_inner_texts()]
        return [float(t) for t in texts]

    head = table.locator("thead th").nth(1)
    ascending = losses()
    assert ascending == sorted(ascending)
    for order in ("descending", "ascending"):
        head.click() if way == "click" else head.locator("button").press("Enter")
        assert head.get_attribute("aria-sort") == order
        assert losses() == (ascending if order == "ascending" else ascending[::-1])
    table.locator("thead th").first.locator("button").click()
    names = [t.split("\n")[0] for t in table.locator("tbody th").all_inner_texts()]
    assert names == sorted(names, key=str.lower)
    assert head.get_attribute("aria-sort") is None
    behind = table.locator("thead th").nth(2)
    for _ in range(2):  # what is not known comes last in both directions
        behind.click()
        assert table.locator("tbody td:nth-child(3)").last.inner_text() == "–"


def test_values_are_shown_on_hover(visit, fitted):
    page, _ = visit
    page.reload()
    counts, tip = fitted.metadata["confusion"], page.locator("#tip")
    assert tip.is_hidden()
    cell = page.locator("figure", has_text="true labels in rows").locator("[data-tip]").first
    cell.scroll_into_view_if_needed()
    cell.hover()
    shown = tip.inner_text()
    assert (
        shown == f"{CLASSES[0]}, predicted {CLASSES[0]}: {counts[0][0]}, {100 * counts[0][0] / sum(counts[0]):.1f} % of the row"
    )
    box, width = tip.bounding_box(), page.evaluate("innerWidth")
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= width
    page.mouse.move(1, 1)
    assert tip.is_hidden()
    dots = page.locator("figure", has_text="expected calibration error").locator("[data-tip]")
    assert dots.count() == len(fitted.metadata["calibration"]["table"])
    curve = page.locator("figure", has_text="Loss of the final training").locator("[data-tip]")
    assert curve.count() == len([v for *_, v in fitted.metadata["curve"] if v is not None])


def test_sizes_and_percentages(fitted):
    """Bags of one size had a chart with a single bar, and "46%" stood beside "96.3 %"."""
    alike = {"sizes": {"least": 4, "median": 4.0, "most": 4}, "size_counts": {"edges": [4, 5], "counts": [18]}}
    pages = [
        render_fit_page(fitted.replace(metadata={**fitted.metadata, "data": {**fitted.metadata["data"], **d}}), "t")
        for d in ({}, alike)
    ]
    texts = [re.sub(r"<style.*?</style>|<svg.*?</svg>", "", page, flags=re.S) for page in pages]
    assert ["Bag sizes" in text for text in texts] == [True, False]
    assert ["<dd>4 to 5, median 4.5</dd>" in texts[0], "<dd>4</dd>" in texts[1]] == [True, True]
    assert not re.findall(r"\d%(?![\w;\"])", texts[0])


def test_model_card_escapes_user_strings(fitted):
    card = model_card(fitted)
    for line in card.splitlines():
        if EVIL in line or "{{" in line:
            assert line.lstrip("*| ").startswith("``")
    row = next(line for line in card.splitlines() if "{{" in line and line.startswith("|"))
    assert row.count("|") == 4  # a bar in a name makes no new cell
    assert len(summary_lines(fitted)) >= 4
