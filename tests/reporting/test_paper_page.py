"""The page of the paper: complete, partial and empty, with every value linked to its runs."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from headcount.cli import printing
from headcount.experiments.paper import (
    COARSE,
    DATASETS,
    ITEMS,
    METHODS,
    SCENARIOS,
    TABLES,
    averages,
    figure_recipes,
    substitute_sources,
    table_cells,
)  # fmt: skip
from headcount.experiments.recipe import Recipe
from headcount.experiments.records import Record
from headcount.experiments.scores import paired_t_test
from headcount.reporting import paper_page, paper_tables
from headcount.reporting.results_table import TableCell
from paper_factory import CELLS, DATA, FULL, SMOKE, TINY, all_recipes, one, pretend, pretend_all
from report_factory import HOSTILE, Page


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[Recipe, Record]:
    return pretend_all(all_recipes(TINY), tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def html(whole, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("page") / "deep" / "paper.html"
    assert paper_page.write_paper(TINY, whole, path) == path
    assert [p.name for p in path.parent.iterdir()] == ["paper.html"]
    return path.read_text("utf-8")


def test_complete_page(html):
    page = Page(html)
    assert "missing" not in html.lower()
    assert "undefined" not in page.text
    for item in ITEMS:
        assert item in page.all("id")
    assert f"{len(all_recipes(TINY)):,} of {len(all_recipes(TINY)):,}" in page.text
    assert html.count('<td class="cell">') == sum(CELLS.values()) + sum(len(averages(t)) for t in TABLES)
    assert "abacus" in page.text
    figures = [attrs for tag, attrs in page.tags if tag == "svg" and attrs.get("role") == "img"]
    assert len(figures) == 1 + 4 + 1 + 12 + 5 + 5
    assert all(attrs["aria-label"] for attrs in figures)


def test_page_is_deterministic(html, whole):
    assert paper_page.render_paper(TINY, whole) == html


def test_values_link_to_their_runs(html, whole):
    page = Page(html)
    ids = page.all("id")
    assert len(ids) == len(set(ids))
    inside = [a[1:] for a in page.all("href") if a.startswith("#")] + re.findall(r"url\(#([^)]*)\)", html)
    assert set(inside) <= set(ids)
    assert html.count('class="line ours"><a href="#runs-') == sum(CELLS.values())
    assert {r.key for r in whole.values()} == set(re.findall(r"<code>([0-9a-f]{16})</code>", html))
    assert html.count("<td>● <b>") == len(SCENARIOS) * len(DATASETS) * len(TINY.folds)  # what "Ours" chose
    line = html[html.index('id="runs-large-weno-path"') :]
    recipes = TINY.recipes("WENO", "PATH", "Large")
    assert re.findall(r"<code>(\w+)", line)[:2] == [whole[r].key for r in recipes]


def test_cell_shows_value_deviation_and_runs(html, whole):
    cell = one("table2", "Various", "MILLET", "SVHN", TINY)
    mean, deviation, _ = cell.value(whole)
    said = f'>{mean:.3f}</a> <span class="deviation">± {deviation:.3f}</span></span>'
    assert f'<a href="#runs-various-millet-svhn"{said}' in html.replace("<b>", "").replace("</b>", "")
    gap = f"{mean - cell.printed.mean:+.3f}".replace("-", "−")
    mark = "▲" if mean > cell.printed.mean else "▼"
    errors = paper_tables.difference_in_errors(cell, whole)
    assert (f"{mark} {gap}" in html) == (abs(errors) > 2)
    short = f"<b>{mean:.3f}</b><br><i>{paper_tables.signed(errors, 1)}</i>{cell.printed.mean:.3f}</td>"
    assert short in html


def planted(cell, values: list[float]) -> dict[Recipe, Record]:
    return {r: pretend(r, scores={cell.metric: v}) for r, v in zip(cell.recipes, values, strict=False)}


def test_differences_are_in_standard_errors_of_two_means():
    """Five folds each: the root of the sum of both squared errors, a sample deviation over the root of five. With fewer, Student's
    pooled variance, which also serves a single fold."""
    cell = one("table2", "Various", "MILLET", "SVHN")  # 0.560 ± 0.020
    five = [0.50, 0.51, 0.52, 0.53, 0.54]
    ours, printed = np.std(five, ddof=1) / math.sqrt(5), 0.020 * math.sqrt(5 / 4) / math.sqrt(5)
    errors = paper_tables.difference_in_errors(cell, planted(cell, five))
    assert errors == pytest.approx((0.52 - 0.56) / math.hypot(ours, printed), rel=1e-3)
    single = paper_tables.difference_in_errors(cell, planted(cell, five[:1]))
    assert single == pytest.approx((0.50 - 0.56) / (0.020 * math.sqrt(5 / 4) * math.sqrt(1 + 1 / 5)), rel=1e-3)
    pooled = np.sqrt((np.var(five[:3]) * 3 + 0.020**2 * 5) / 6)
    three = paper_tables.difference_in_errors(cell, planted(cell, five[:3]))
    assert three == pytest.approx((0.51 - 0.56) / (pooled * math.sqrt(1 / 3 + 1 / 5)), rel=1e-3)
    perfect = one("table3", "Large", "Output+Mean", "SVHN")  # 1.000 ± 0.000: only what rounding explains is near
    assert abs(paper_tables.difference_in_errors(perfect, planted(perfect, [0.9996] * 5))) < 2
    assert paper_tables.difference_in_errors(perfect, planted(perfect, [0.998] * 5)) < -3
    assert math.isnan(paper_tables.difference_in_errors(cell, {}))
    pooled_cell = one("table5", "Various", "MILLET", "all")
    assert math.isnan(paper_tables.difference_in_errors(pooled_cell, planted(pooled_cell, five)))


@pytest.mark.parametrize(
    ("errors", "flag", "agreement"), [(1.9, "", "near"), (-2.5, "▼", "apart"), (3.1, "▲", "far"), (math.nan, "", "")]
)
def test_flags_need_more_than_two_standard_errors(errors, flag, agreement):
    entry = paper_tables.PaperEntry(TableCell("0.5"), TableCell("0.4"), errors=errors)
    assert (entry.flag, entry.agreement) == (flag, agreement)


def test_a_coarse_sweep_is_marked_until_it_is_whole():
    cell = one("table2", "Small", "Ours", "SVHN")
    loss = {r: abs(r.removal - 0.18) + r.fold for r in cell.recipes}  # 0.2 would be chosen, 0.1 is the coarse choice
    every = {r: pretend(r, fit={"valid_loss": loss[r]}) for r in cell.recipes}
    some = {r: record for r, record in every.items() if r.removal in COARSE or r.removal == 0.2}
    del some[next(r for r in some if (r.fold, r.removal) == (4, 1.0))]
    assert [r.recipe.removal for r in cell.selected_records(some)] == [0.1] * 4
    assert {r.recipe.removal for r in cell.selected_records(every)} == {0.2}
    assert (cell.is_coarse(some), cell.is_coarse(every)) == (True, False)
    html = paper_page.render_paper(FULL, some)
    assert "(4/5, coarse r)" in cells_of(html, "table2", "Small", "Ours")[1]
    assert "coarse r)" not in paper_page.render_paper(FULL, every)
    assert "(4/5, coarse r)" in printing.as_latex([cell], some)
    assert printing.as_csv([cell], some).splitlines()[1].endswith(",coarse")


def cells_of(html: str, table: str, scenario: str, method: str) -> list[str]:
    """The insides of a row's cells, the average last."""
    rest = html[html.index(f'id="{table}-{scenario.lower()}"') :]
    rest = rest[rest.index(f'<th scope="row">{method}</th>') :]
    return re.findall(r'<td class="cell">(.*?)</td>', rest, re.S)[:5]


def test_averages_and_footnotes(html, whole):
    page = Page(html)
    assert html.count("<s>0.422</s>") == 2
    assert html.count("<s>0.164</s>") == 1
    assert page.text.count("Printed as 0.422, but its four cells average 0.528") == 2
    row = [one("table2", "Large", "Ours", d, TINY).value(whole)[0] for d in DATASETS]
    average = cells_of(html, "table2", "Large", "Ours")[4]
    assert f"{sum(row) / 4:.3f}" in average
    assert "0.748" in average
    wrong = cells_of(html, "table4", "Various", "Output+<wbr>Mean")[4]
    row = [one("table4", "Various", "Output+Mean", d, TINY).value(whole)[0] for d in DATASETS]
    assert paper_tables.signed(sum(row) / 4 - 0.52775) in wrong  # from what the cells give, not from the misprint
    notes = {t: len(re.findall(f'<li id="{t}-note', html)) for t in TABLES}
    assert notes == {"table2": 1, "table3": 4, "table4": 2, "table5": 0, "table6": 1}
    assert "multiple of 0.002" in page.text


def test_paired_comparisons(html, whole):
    ours, count = (
        one(t, "Small", m, "PATH", TINY).selected_records(whole)
        for t, m in (("table2", "Ours"), ("table4", "Counting Network"))
    )
    made = paired_t_test(*([r.scores["instance_accuracy"] for r in run] for run in (ours, count)))
    part = html[html.index('id="pairs"') :]
    row = next(r for r in re.findall(r"<tr>.*?</tr>", part, re.S) if "Small" in r and "PATH" in r)
    values = re.findall(r'<td class="number">([^<]*)</td>', row)
    assert values[-3:] == [paper_tables.signed(made.difference), f"{made.p:.3f}", "2"]


def test_comparisons_need_common_folds(whole):
    given = table_cells("table2", TINY) + table_cells("table4", TINY)
    dashes = ("–", "–", "–")
    nothing = paper_tables.comparisons(given, {})
    assert len(nothing) == 12
    assert {(p.ours, p.other, p.against_other, p.against_count) for p in nothing} == {("–", "", dashes, dashes)}
    less = {r: v for r, v in whole.items() if r.head != "count" or r.removal or r.options or r.fold == 0}
    assert {p.against_count for p in paper_tables.comparisons(given, less)} == {dashes}
    assert {p.n_others for p in paper_tables.comparisons(given, less)} == {11}
    fewer = {r: v for r, v in whole.items() if r.head != "weno" or r.fold == 0}
    assert {p.n_others for p in paper_tables.comparisons(given, fewer)} == {10}


def test_page_without_records_shows_printed_values():
    page = Page(paper_page.render_paper(FULL, {}))
    assert page.text.count("missing") == sum(CELLS.values())
    assert page.text.count("Missing: ") == 5
    assert "0 of 1,380" in page.text
    assert (
        "Missing: 120 of 120 runs. Output+Mean, Counting Network on CIFAR10, SVHN, PATH, OCT (Various, Small, Large)."
        in page.text
    )
    assert "says nothing about the methods" not in page.text


def test_partial_page_lists_missing_runs(whole):
    few = [r for r in whole if (r.source, r.scenario, r.fold) == ("cifar10", "various", 0)]
    few += [r for r in whole if r.head == "millet" and r.scenario == "various" and r.fold == 0]
    html = paper_page.render_paper(TINY, {r: whole[r] for r in few})
    page = Page(html)
    made = cells_of(html, "table2", "Various", "MILLET")
    assert all("(1/2)" in cell for cell in made[:4])
    assert made[4].startswith('<span class="line">–</span>')  # an average of parts is none
    assert "0 of 144" in page.text
    assert not re.search(r'class="line ours"><a[^>]*><b>', html)
    assert "Mean of the available data sets: CIFAR10" in page.text
    assert "Counting Network on CIFAR10 (Various (fold 1)); SVHN, PATH, OCT (Various)" in page.text
    assert "were not kept" not in page.text


def test_missing_arrays_are_reported(whole):
    recipe = figure_recipes("figure7", TINY)[0]
    record = pretend(recipe)
    groups = paper_page.share_groups(TINY, {recipe: record})
    assert groups[0].text == f"The arrays of run {record.key} were not kept beside its record."


def test_smoke_page_has_a_banner():
    made = {r: pretend(r) for r in SMOKE.recipes("Counting Network", "PATH", "Various")}
    page = Page(paper_page.render_paper(SMOKE, made))
    assert "a reduced version that allows no conclusions about the methods" in page.text
    assert "PATH: standin9" in page.text


def test_unrelated_records_are_listed(whole):
    unrelated = TINY.base.replace(head="output_mean", options={"form": "nll"})
    record = pretend(unrelated)
    page = Page(paper_page.render_paper(TINY, {unrelated: record}))
    assert "1 records that belong to no table" in page.text
    assert record.key in page.text
    assert f"0 of {len(all_recipes(TINY)):,}" in page.text


def test_user_strings_are_escaped():
    bad, worse = HOSTILE[0], HOSTILE[1]
    recipe = TINY.recipes("Output+Mean", "OCT", "Large")[0]
    unrelated = recipe.replace(epochs=7)
    made = {
        recipe: pretend(recipe, data={"note": bad}, provenance={"device": worse, "commit": bad, "versions": {"torch": worse}}),
        unrelated: pretend(unrelated, text=worse),
    }
    html = paper_page.render_paper(TINY, made)
    page = Page(html)
    assert [attrs for tag, attrs in page.tags if tag == "script"] == [{}]  # the page's own
    assert not [k for _, attrs in page.tags for k in attrs if k.startswith("on")]
    assert page.text.count(worse) >= 3
    assert f"oct: {bad}" in page.text
    assert "default-src 'none'" in html
    assert not re.findall(r"https?://|@import", html.replace("http://www.w3.org", ""))


def test_full_page_is_small():
    made = {r: pretend(r) for r in all_recipes(FULL)}
    html = paper_page.render_paper(FULL, made)
    assert len(html.encode()) < 3_000_000
    assert " of 20 runs" not in html  # said of a box that has not all of them
    assert METHODS.keys() <= set(re.findall(r'colspan="6">([^<]*?) <span', html))


@pytest.mark.parametrize("checksum", [paper_tables.RECROPPED_SVHN, "official"])
def test_recropped_svhn_is_marked(checksum):
    """In the head of every column with its values, in figure 3 and in a note."""
    recipes = [r for s in SCENARIOS for r in TINY.recipes("Counting Network", "SVHN", s)]
    html = paper_page.render_paper(TINY, {r: pretend(r, data={**DATA, "checksum": checksum}) for r in recipes})
    marked = checksum == paper_tables.RECROPPED_SVHN
    tables = len(SCENARIOS) * 3 + 1  # tables 2 to 4 have a block for each scenario, table 6 has one
    assert html.count('>SVHN<span class="note">re-cropped<') == (2 * tables if marked else 0)  # in short and in full
    assert html.count('>Various<span class="note">SVHN re-cropped<') == 2 * marked  # table 5 pools the data sets
    assert html.count("<figcaption>SVHN (re-cropped)<") == marked
    assert html.count(paper_tables.RECROPPED_NOTE) == marked


def test_originals_of_oct_take_its_column_only_when_they_are_alone():
    """By the records first, then by the cache; their column says what they are, in the page, in tables and in exports."""

    def of(*available):
        return substitute_sources(TINY, *available).sources["OCT"]

    assert [of({"oct-originals"}), of(set(), {"oct-originals"}), of({"oct-originals"}, {"oct"})] == ["oct-originals"] * 3
    assert [of(set()), of({"oct", "oct-originals"}), of({"oct"}, {"oct-originals"}), of({"cifar10"})] == ["oct"] * 4
    scale = substitute_sources(TINY, {"oct-originals"})
    cell = one("table4", "Large", "Counting Network", "OCT", scale)
    made = {r: pretend(r) for r in cell.recipes}
    html = paper_page.render_paper(scale, made)
    assert html.count('<span class="note">46,453 originals<') == 2 * (3 * len(SCENARIOS) + 1)
    assert '>Large<span class="note">OCT 46,453 originals<' in html
    note = "OCT: 46,453 of OCT2017's originals, scaled to 28 x 28; not OCTMNIST"
    assert note in Page(html).text
    latex = printing.as_latex([cell], made)
    assert note in latex
    assert "oct-originals for OCT" in latex
    assert "stand-in" not in latex
    assert one("table4", "Large", "Counting Network", "OCT").value(made)[2] == 0


@pytest.mark.parametrize("error", [-0.2, 0.2])
def test_the_page_says_whether_figure_6_is_reproduced(error):
    recipes = [r for s in SCENARIOS for r in TINY.recipes("Output+Mean", "SVHN", s)]
    text = Page(paper_page.render_paper(TINY, {r: pretend(r, share_difference=[error] * 3) for r in recipes})).text
    assert ("not reproduced" in text) == (error < 0)
    assert f"above zero in {3 * (error > 0)} of the 3 data sets and scenarios that have runs" in text
