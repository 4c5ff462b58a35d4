"""The paper as cells and as a page: what is printed, which runs remake it, what is missing, and that the page says so."""

from __future__ import annotations

import csv
import hashlib
import io
import math
import re
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from headcount.cli import main, printing
from headcount.datasets import registry
from headcount.datasets.protocol import Protocol, draw_counts
from headcount.errors import HeadcountError, HeadcountWarning
from headcount.experiments import records as files
from headcount.experiments.paper import SCALES, TABLES, Scale, averages, completeness, figure_recipes, table_cells
from headcount.experiments.paper.cells import OURS, printed_values
from headcount.experiments.paper.scales import DATASETS, METHODS, SCENARIOS
from headcount.experiments.recipe import Recipe
from headcount.experiments.records import Record
from headcount.experiments.scores import FIGURE7_REMOVALS, REMOVALS
from headcount.experiments.select import PairedTest, paired_t_test
from headcount.models.heads import find_head
from headcount.reporting import paper_page, paper_plots, paper_tables
from test_report import HOSTILE, Page

CELLS = {"table2": 144, "table3": 120, "table4": 48, "table5": 33, "table6": 48}
FULL, SMOKE = SCALES["full"], SCALES["smoke"]
# small enough to make all its records here, and in every respect a scale
TINY = replace(FULL, name="tiny", folds=(0, 1), removals=(0.5, 1.0))
COUNTS = {"train_bags": 1, "valid_bags": 1, "test_bags": 1, "bag_size": 1}
DATA = {"source": "digits", "checksum": "one", "note": "", "classes": ["a", "b"], **COUNTS}


def pretend(recipe: Recipe, folder: Path | None = None, **changes: object) -> Record:
    """The record a run might have left: its numbers hang on its recipe alone. Arrays only with a folder."""
    key = hashlib.sha256(repr(recipe).encode()).hexdigest()[:16]
    rng = np.random.default_rng(int(key, 16))
    accuracy = round(float(rng.uniform(0.3, 0.9)), 4)
    body = {
        "key": key, "recipe": recipe.values, "text": str(recipe), "data": DATA,
        "fit": {"valid_loss": float(rng.random()), "best_epoch": 1, "epochs": 1},
        "scores": {"instance_accuracy": accuracy, "bag_accuracy": accuracy, "consistency_rate": accuracy},
        "share_difference": rng.uniform(-0.4, 0.3, 20).round(4).tolist(),
        "provenance": {"device": "abacus", "seconds": 7.25, "commit": "0123abc", "started": "2025-02-03T10:00:00"},
    }  # fmt: skip
    arrays = {}
    if recipe.head == "count" and not recipe.removal:
        falling = (1 - 0.3 * np.array(REMOVALS)).tolist()
        curves = dict.fromkeys(("purity", "agreement", "agreement_random"), falling)
        body["sweep"] = {"removal": list(REMOVALS), **curves, "purity": [None, *falling[1:]]}
        before = rng.uniform(0.1, 0.9, 30)
        arrays = {"train_share_before": before} | {f"train_share_after_{r}": before**0.5 for r in FIGURE7_REMOVALS}
    body |= changes
    return files.write_record(folder, body, arrays) if folder else Record(body, Path("nowhere.json"))


def all_recipes(scale: Scale) -> list[Recipe]:
    """Each once; they take seconds to make, and many ask."""
    if scale.name not in _MADE:
        wanted = (r for item in completeness.items() for r in completeness.required_recipes(item, scale))
        _MADE[scale.name] = list(dict.fromkeys(wanted))
    return _MADE[scale.name]


_MADE: dict[str, list[Recipe]] = {}


def pretend_all(recipes: Iterable[Recipe], folder: Path, **changes: object) -> dict[Recipe, Record]:
    scattered = figure_recipes("figure7", TINY)
    return {r: pretend(r, folder if r in scattered else None, **changes) for r in recipes}


def one(table: str, scenario: str, method: str, dataset: str, scale: Scale = FULL):
    return next(
        c for c in table_cells(table, scale) if (c.scenario, c.method, c.dataset) == (scenario, method, dataset)
    )


# -- cells ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("table", "count"), CELLS.items())
def test_every_printed_number_is_a_cell(table, count):
    made = table_cells(table, FULL)
    assert len(made) == count == sum(d != "Average" for _, _, d in printed_values(table))
    assert all(0 <= c.printed.mean <= 1 and c.printed.deviation is not None for c in made)
    assert {c.scenario for c in made} == ({"Various"} if table == "table6" else set(SCENARIOS))


@pytest.mark.parametrize("scale", SCALES.values(), ids=list(SCALES))
def test_every_cell_has_its_runs(scale):
    for table in TABLES:
        for cell in table_cells(table, scale):
            assert cell.recipes
            assert cell.n_runs == len(scale.folds) * (4 if table == "table5" else 1)
            assert len(cell.recipes) == cell.n_runs * (len(scale.removals) if cell.method in OURS else 1)
            assert {r.scenario for r in cell.recipes} == {cell.scenario.lower()}
    recipes = all_recipes(scale)
    assert {r.source for r in recipes} == set(scale.sources.values()) <= set(registry.SOURCES)
    assert all(set(r.needs) <= set(recipes) for r in recipes)
    for head, options in {(r.head, r.options) for r in recipes}:  # those of a small head must fit together, too
        assert isinstance(find_head(head)(24, 9, None, **dict(options)), torch.nn.Module)


def test_full_is_the_paper_s_size():
    assert len(all_recipes(FULL)) == 1380
    assert all(r.changes.keys() <= {*FULL.base.changes, "source", "scenario", "fold", "head", "options", "removal"}
               for r in all_recipes(FULL))  # fmt: skip


def test_two_printed_averages_are_wrong_and_no_third():
    wrong = {(t, *where): a for t in TABLES for where, a in averages(t).items() if a.is_wrong}
    assert {k: (a.printed, round(a.recomputed, 3)) for k, a in wrong.items()} == {
        ("table2", "Various", "Output+Mean"): (0.422, 0.528),
        ("table4", "Various", "Output+Mean"): (0.422, 0.528),  # the same row, printed again
        ("table3", "Small", "Feature+LSE"): (0.164, 0.189),
    }
    assert sum(len(averages(t)) for t in TABLES) == 90


def test_ours_takes_the_smallest_validation_loss_of_each_fold():
    cell = one("table2", "Small", "Ours", "SVHN", TINY)
    loss = {(0, 0.5): 0.2, (0, 1.0): 0.1, (1, 0.5): 0.3, (1, 1.0): 0.3}
    made = {r: pretend(r, fit={"valid_loss": loss[r.fold, r.removal]}) for r in cell.recipes}
    assert [(r.recipe.fold, r.recipe.removal) for r in cell.selected_records(made)] == [(0, 1.0), (1, 0.5)]
    half = {r: v for r, v in made.items() if (r.fold, r.removal) != (1, 1.0)}
    assert [(r.recipe.fold, r.recipe.removal) for r in cell.selected_records(half)] == [(0, 1.0)]
    accuracy = made[next(r for r in cell.recipes if (r.fold, r.removal) == (0, 1.0))].scores["instance_accuracy"]
    assert cell.value(half) == (accuracy, 0.0, 1)
    assert [r.fold for r in cell.missing(half)] == [1]


def test_what_has_not_run_is_missing():
    cell = one("table3", "Large", "MILLET", "OCT")
    mean, deviation, count = cell.value({})
    assert math.isnan(mean)
    assert math.isnan(deviation)
    assert count == 0
    assert cell.missing({}) == list(cell.recipes)
    assert len(completeness.missing_recipes(completeness.items(), FULL, {})) == 1380


def test_a_metric_that_is_undefined_is_not_missing():
    cell = one("table5", "Small", "Feature+Max", "all", TINY)
    made = {r: pretend(r) for r in cell.recipes}
    made[cell.recipes[0]].scores["consistency_rate"] = None
    assert cell.value(made)[2] == cell.n_runs - 1 == 7
    assert not cell.missing(made)


def test_smoke_never_fills_a_full_cell():
    small = {r: pretend(r) for r in all_recipes(SMOKE)}
    assert not small.keys() & set(all_recipes(FULL))
    assert all(c.value(small)[2] == 0 for t in TABLES for c in table_cells(t, FULL))
    assert all(not c.missing(small) for t in TABLES for c in table_cells(t, SMOKE))


# -- tables as text -----------------------------------------------------------------------------------------------------


def test_csv_and_latex():
    wanted = table_cells("table4", TINY)
    made = {r: pretend(r) for r in wanted[0].recipes}
    rows = list(csv.DictReader(io.StringIO(printing.as_csv(wanted, made))))
    assert len(rows) == 48
    mean, deviation, _ = wanted[0].value(made)
    assert rows[0] == {
        "scenario": "Various", "method": "Output+Mean", "dataset": "CIFAR10", "printed_mean": "0.371", "printed_std": "0.024",
        "mean": f"{mean:.4f}", "std": f"{deviation:.4f}", "runs": "2", "runs_wanted": "2",
    }  # fmt: skip
    assert (rows[1]["mean"], rows[1]["runs"]) == ("", "0")
    lines = printing.as_latex(wanted, made).splitlines()
    assert lines[0] == r"\begin{tabular}{llcccc}"
    assert lines[4] == rf"Various & Output+Mean & ${mean:.3f} \pm {deviation:.3f}$ & -- & -- & -- \\"
    assert len(lines) == 4 + 12 + 2
    made.pop(wanted[0].recipes[0])
    mean, _, _ = wanted[0].value(made)  # of one run, which has no standard deviation
    assert (
        printing.as_latex(wanted, made).splitlines()[4]
        == rf"Various & Output+Mean & ${mean:.3f}$ (1/2) & -- & -- & -- \\"
    )
    row = next(csv.DictReader(io.StringIO(printing.as_csv(wanted, made))))
    assert (row["mean"], row["std"], row["runs"]) == (f"{mean:.4f}", "", "1")


@pytest.fixture
def typed(monkeypatch, capsys, tmp_path):
    def typed(*words: str) -> tuple[int, str, str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["headcount", "paper", *words])
        with pytest.raises(SystemExit) as left:
            main.main()
        return (left.value.code, *capsys.readouterr())

    return typed


def test_the_command_lists_shows_and_complains(typed):
    code, out, _ = typed()
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[1:]] == completeness.items()
    assert re.search(r"table2 .* 1320 +0\n", out)
    code, out, _ = typed("table6", "--scale", "smoke")
    assert code == 0
    assert out.count("missing") == 48
    code, out, _ = typed("figure7", "--missing")
    assert code == 0
    assert out.splitlines()[-1].startswith("3 runs missing, about 0.0 hours")
    assert typed("table9")[0] == typed("--scale", "large")[0] == typed("figure3", "--csv")[0] == 2
    code, out, _ = typed("table2", "--latex")
    assert code == 0
    assert out.count("--") == 144


# -- ours against the others ----------------------------------------------------------------------------------------------


def test_paired_is_the_t_test_of_the_differences():
    a, b = [0.51, 0.48, 0.55, 0.50, 0.53], [0.49, 0.47, 0.50, 0.51, 0.50]
    gaps = np.subtract(a, b)
    made = paired_t_test(a, b)
    assert made.n == 5
    assert made.difference == pytest.approx(gaps.mean())
    statistic = abs(gaps.mean() / (gaps.std(ddof=1) / math.sqrt(5)))
    draws = np.random.default_rng(0).standard_t(4, 200_000)
    assert made.p == pytest.approx((np.abs(draws) > statistic).mean(), abs=0.005)
    assert paired_t_test(b, a).p == pytest.approx(made.p)


def test_paired_without_a_test():
    assert paired_t_test([0.5], [0.25]) == PairedTest(0.25, pytest.approx(math.nan, nan_ok=True), 1)
    assert math.isnan(paired_t_test([0.4, 0.6], [0.3, 0.5]).p)  # the differences are one
    assert paired_t_test([], []).n == 0
    with pytest.raises(HeadcountError, match="got 2 and 1"):
        paired_t_test([0.1, 0.2], [0.1])


# -- the page -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[Recipe, Record]:
    return pretend_all(all_recipes(TINY), tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def html(whole, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("page") / "deep" / "paper.html"
    assert paper_page.write_paper(TINY, whole, path) == path
    assert [p.name for p in path.parent.iterdir()] == ["paper.html"]
    return path.read_text("utf-8")


def test_a_whole_page_misses_nothing(html):
    page = Page(html)
    assert "missing" not in html.lower()
    assert "undefined" not in page.text
    for item in completeness.items():
        assert item in page.all("id")
    assert f"{len(all_recipes(TINY)):,} of {len(all_recipes(TINY)):,}" in page.text
    assert html.count('<td class="cell">') == sum(CELLS.values()) + sum(len(averages(t)) for t in TABLES)
    assert "abacus" in page.text
    figures = [attrs for tag, attrs in page.tags if tag == "svg" and attrs.get("role") == "img"]
    assert len(figures) == 1 + 4 + 1 + 12 + 5 + 5
    assert all(attrs["aria-label"] for attrs in figures)


def test_same_records_same_bytes(html, whole):
    assert paper_page.render_paper(TINY, whole) == html


def test_every_value_leads_to_its_runs(html, whole):
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


def test_a_cell_says_what_it_is_made_of(html, whole):
    cell = one("table2", "Various", "MILLET", "SVHN", TINY)
    mean, deviation, _ = cell.value(whole)
    said = f'>{mean:.3f}</a> <span class="deviation">± {deviation:.3f}</span></span>'
    assert f'<a href="#runs-various-millet-svhn"{said}' in html.replace("<b>", "").replace("</b>", "")
    gap = f"{mean - cell.printed.mean:+.3f}".replace("-", "−")
    mark = "▲" if mean > cell.printed.mean else "▼"
    far = abs(mean - cell.printed.mean) > 2 * cell.printed.deviation + 0.0015
    assert (f"{mark} {gap}" in html) == far


def test_marks_need_more_than_two_deviations():
    printed = one("table2", "Various", "MILLET", "SVHN").printed  # 0.560 ± 0.020
    assert paper_tables.deviation_flag(0.60, printed) == paper_tables.deviation_flag(0.52, printed) == ""
    assert (paper_tables.deviation_flag(0.602, printed), paper_tables.deviation_flag(0.518, printed)) == ("▲", "▼")
    perfect = one("table3", "Large", "Output+Mean", "SVHN").printed  # 1.000 ± 0.000
    assert paper_tables.deviation_flag(0.999, perfect) == ""  # rounding
    assert paper_tables.deviation_flag(0.998, perfect) == "▼"


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


def test_pairs_on_the_page(html, whole):
    ours, count = (
        one(t, "Small", m, "PATH", TINY).selected_records(whole)
        for t, m in (("table2", "Ours"), ("table4", "Counting Network"))
    )
    made = paired_t_test(*([r.scores["instance_accuracy"] for r in run] for run in (ours, count)))
    part = html[html.index('id="pairs"') :]
    row = next(r for r in re.findall(r"<tr>.*?</tr>", part, re.S) if "Small" in r and "PATH" in r)
    values = re.findall(r'<td class="number">([^<]*)</td>', row)
    assert values[-3:] == [paper_tables.signed(made.difference), f"{made.p:.3f}", "2"]


def test_pairs_want_the_same_folds(whole):
    given = table_cells("table2", TINY) + table_cells("table4", TINY)
    dashes = ("–", "–", "–")
    nothing = paper_page.comparisons(given, {})
    assert len(nothing) == 12
    assert {(p.ours, p.other, p.against_other, p.against_count) for p in nothing} == {("–", "", dashes, dashes)}
    less = {r: v for r, v in whole.items() if r.head != "count" or r.removal or r.options or r.fold == 0}
    assert {p.against_count for p in paper_page.comparisons(given, less)} == {dashes}
    assert {p.n_others for p in paper_page.comparisons(given, less)} == {11}
    fewer = {r: v for r, v in whole.items() if r.head != "weno" or r.fold == 0}
    assert {p.n_others for p in paper_page.comparisons(given, fewer)} == {10}


def test_an_empty_page_is_the_printed_paper():
    page = Page(paper_page.render_paper(FULL, {}))
    assert page.text.count("missing") == sum(CELLS.values())
    assert page.text.count("Missing: ") == 5
    assert "0 of 1,380" in page.text
    assert (
        "Missing: 120 of 120 runs. Output+Mean, Counting Network on CIFAR10, SVHN, PATH, OCT (Various, Small, Large)."
        in page.text
    )
    assert "says nothing about the methods" not in page.text


def test_a_page_in_between_says_what_is_there(whole):
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


def test_a_lost_array_is_said(whole):
    recipe = figure_recipes("figure7", TINY)[0]
    record = pretend(recipe)
    groups = paper_plots.share_groups(TINY, {recipe: record})
    assert groups[0].text == f"The arrays of run {record.key} were not kept beside its record."


def test_smoke_says_that_it_is_small():
    made = {r: pretend(r) for r in SMOKE.recipes("Counting Network", "PATH", "Various")}
    page = Page(paper_page.render_paper(SMOKE, made))
    assert "a reduced version that allows no conclusions about the methods" in page.text
    assert "PATH: standin9" in page.text


def test_records_of_no_table_are_listed_apart(whole):
    stranger = TINY.base.replace(head="output_mean", options={"form": "nll"})
    record = pretend(stranger)
    page = Page(paper_page.render_paper(TINY, {stranger: record}))
    assert "1 records that belong to no table" in page.text
    assert record.key in page.text
    assert f"0 of {len(all_recipes(TINY)):,}" in page.text


def test_words_are_inert():
    bad, worse = HOSTILE[0], HOSTILE[1]
    recipe = TINY.recipes("Output+Mean", "OCT", "Large")[0]
    stranger = recipe.replace(epochs=7)
    made = {
        recipe: pretend(
            recipe, data={"note": bad}, provenance={"device": worse, "commit": bad, "versions": {"torch": worse}}
        ),
        stranger: pretend(stranger, text=worse),
    }
    html = paper_page.render_paper(TINY, made)
    page = Page(html)
    assert "script" not in {tag for tag, _ in page.tags}
    assert not [k for _, attrs in page.tags for k in attrs if k.startswith("on")]
    assert page.text.count(worse) >= 3
    assert f"oct: {bad}" in page.text
    assert "default-src 'none'" in html
    assert not re.findall(r"https?://|@import", html.replace("http://www.w3.org", ""))


def test_a_full_page_stays_light():
    made = {r: pretend(r) for r in all_recipes(FULL)}
    html = paper_page.render_paper(FULL, made)
    assert len(html.encode()) < 3_000_000
    assert " of 20 runs" not in html  # said of a box that has not all of them
    assert METHODS.keys() <= set(re.findall(r'colspan="6">([^<]*?) <span', html))


def test_two_versions_of_a_data_set_are_not_averaged(tmp_path):
    base = Recipe(source="digits")
    for fold in range(3):
        pretend(base.replace(fold=fold), tmp_path)
    other = pretend(base.replace(fold=0), tmp_path, key="f" * 16, data={**DATA, "checksum": "two"})
    with pytest.warns(HeadcountWarning, match="2 versions of digits.*; the 3 runs on one count, 1 do not"):
        found = completeness.records_by_recipe(tmp_path)
    assert {r.data["data"]["checksum"] for r in found.values()} == {"one"}
    assert len(found) == 3
    other.path.unlink()
    assert len(completeness.records_by_recipe(tmp_path)) == 3


def test_runs_of_another_scale_say_nothing_of_what_one_costs():
    own, other = (all_recipes(scale)[0] for scale in (FULL, SMOKE))
    short = pretend(other, provenance={"seconds": 0.5})
    assert completeness.seconds_per_run(FULL, {other: short}) == completeness.DEFAULT_SECONDS["full"]
    assert completeness.seconds_per_run(FULL, {other: short, own: pretend(own)}) == 7.25
    assert (
        completeness.seconds_per_run(FULL, {own: pretend(own, provenance={})}) == completeness.DEFAULT_SECONDS["full"]
    )


def test_what_the_docs_report_for_figure_6_on_training_bags():
    """From the votes the Counting Network's records keep; the labels of a recipe's bags need no images."""
    root, gaps = Path(__file__).parents[2], []
    for record in files.load_records(root / "results" / "paper"):
        arrays, recipe = record.arrays(), record.recipe
        if "train_said" in arrays:
            rng = np.random.default_rng([recipe.data_seed, recipe.fold, 0, 0])
            counts, label = draw_counts(Protocol(), 10, 400, rng)
            assert counts.max(1) / 64 == pytest.approx(arrays["train_share_before"])
            gaps.append((arrays["train_said"].reshape(400, 64) == label[:, None]).mean(1) - counts.max(1) / 64)
    median, over = np.median(gaps), (np.array(gaps) > 0).mean()
    assert len(gaps) == 5
    text = " ".join((root / "docs" / "explanation" / "paper.md").read_text().split())
    assert f"a median of −{-median:.3f}, with an overestimate in {over:.0%} of the bags".replace("%", " %") in text
