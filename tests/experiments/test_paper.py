"""The paper as cells and as a page: what is printed, which runs reproduce it, and what is missing."""

from __future__ import annotations

import csv
import io
import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from headcount.cli import main, printing
from headcount.datasets import registry
from headcount.datasets.protocol import Protocol, draw_counts
from headcount.errors import HeadcountError, HeadcountWarning
from headcount.experiments import records as files
from headcount.experiments.paper import (
    DEFAULT_SECONDS,
    ITEMS,
    OURS,
    SCALES,
    SCENARIOS,
    TABLES,
    averages,
    printed_values,
    records_by_recipe,
    required_recipes,
    seconds_per_run,
    table_cells,
)
from headcount.experiments.recipe import Recipe
from headcount.experiments.scores import PairedTest, paired_t_test
from headcount.models.heads import find_head
from paper_factory import CELLS, DATA, FULL, SMOKE, TINY, all_recipes, one, pretend

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


def test_the_full_scale_is_the_papers():
    assert len(all_recipes(FULL)) == 1380
    assert all(r.changes.keys() <= {*FULL.base.changes, "source", "scenario", "fold", "head", "options", "removal"}
               for r in all_recipes(FULL))  # fmt: skip


def test_exactly_two_printed_averages_are_wrong():
    wrong = {(t, *where): a for t in TABLES for where, a in averages(t).items() if a.is_wrong}
    assert {k: (a.printed, round(a.recomputed, 3)) for k, a in wrong.items()} == {
        ("table2", "Various", "Output+Mean"): (0.422, 0.528),
        ("table4", "Various", "Output+Mean"): (0.422, 0.528),  # the same row, printed again
        ("table3", "Small", "Feature+LSE"): (0.164, 0.189),
    }
    assert sum(len(averages(t)) for t in TABLES) == 90


def test_ours_selects_the_lowest_validation_loss_of_each_fold():
    cell = one("table2", "Small", "Ours", "SVHN", TINY)
    loss = {(0, 0.5): 0.2, (0, 1.0): 0.1, (1, 0.5): 0.3, (1, 1.0): 0.3}
    made = {r: pretend(r, fit={"valid_loss": loss[r.fold, r.removal]}) for r in cell.recipes}
    assert [(r.recipe.fold, r.recipe.removal) for r in cell.selected_records(made)] == [(0, 1.0), (1, 0.5)]
    half = {r: v for r, v in made.items() if (r.fold, r.removal) != (1, 1.0)}
    assert [(r.recipe.fold, r.recipe.removal) for r in cell.selected_records(half)] == [(0, 1.0)]
    accuracy = made[next(r for r in cell.recipes if (r.fold, r.removal) == (0, 1.0))].scores["instance_accuracy"]
    assert cell.value(half) == (accuracy, 0.0, 1)
    assert [r.fold for r in cell.missing(half)] == [1]


def test_runs_without_a_record_are_missing():
    cell = one("table3", "Large", "MILLET", "OCT")
    mean, deviation, count = cell.value({})
    assert math.isnan(mean)
    assert math.isnan(deviation)
    assert count == 0
    assert cell.missing({}) == list(cell.recipes)
    assert len({r for item in ITEMS for r in required_recipes(item, FULL)}) == 1380


def test_a_metric_that_is_undefined_is_not_missing():
    cell = one("table5", "Small", "Feature+Max", "all", TINY)
    made = {r: pretend(r) for r in cell.recipes}
    made[cell.recipes[0]].scores["consistency_rate"] = None
    assert cell.value(made)[2] == cell.n_runs - 1 == 7
    assert not cell.missing(made)


def test_smoke_records_fill_no_full_cell():
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
        "mean": f"{mean:.4f}", "std": f"{deviation:.4f}", "runs": "2", "runs_wanted": "2", "source": "cifar10",
        "sweep": "",
    }  # fmt: skip
    assert (rows[1]["mean"], rows[1]["runs"]) == ("", "0")
    lines = printing.as_latex(wanted, made).splitlines()
    assert lines[0] == r"\begin{tabular}{llcccc}"
    assert lines[4] == rf"Various & Output+Mean & ${mean:.3f} \pm {deviation:.3f}$ & -- & -- & -- \\"
    assert len(lines) == 4 + 12 + 2
    made.pop(wanted[0].recipes[0])
    mean, _, _ = wanted[0].value(made)  # of one run, which has no standard deviation
    assert printing.as_latex(wanted, made).splitlines()[4] == rf"Various & Output+Mean & ${mean:.3f}$ (1/2) & -- & -- & -- \\"
    row = next(csv.DictReader(io.StringIO(printing.as_csv(wanted, made))))
    assert (row["mean"], row["std"], row["runs"]) == (f"{mean:.4f}", "", "1")


def test_smoke_numbers_are_marked():
    """Wherever a table goes, its head, its note and a column say that the numbers are not of CIFAR-10."""
    cells = table_cells("table4", SMOKE)
    made = {r: pretend(r) for r in cells[0].recipes}
    lines = printing.as_latex(cells, made).splitlines()
    assert lines[2] == (
        r"Scenario & Method & digits for CIFAR10 & standin10 for SVHN & standin9 for PATH & standin4 for OCT \\"
    )
    assert "not results on the paper's data sets" in lines[-3]
    assert lines[-3].startswith(r"\multicolumn{6}{l}")
    rows = list(csv.DictReader(io.StringIO(printing.as_csv(cells, made))))
    assert {(r["dataset"], r["source"]) for r in rows} >= {("CIFAR10", "digits"), ("SVHN", "standin10")}
    pooled = printing.as_latex(table_cells("table5", SMOKE), {})
    assert "digits/standin10/standin9/standin4 for all" in pooled
    assert "stand-in" not in printing.as_latex(table_cells("table5", FULL), {})


@pytest.fixture
def typed(monkeypatch, capsys, tmp_path):
    def typed(*words: str) -> tuple[int, str, str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["headcount", "paper", *words])
        with pytest.raises(SystemExit) as left:
            main.main()
        return (left.value.code, *capsys.readouterr())

    return typed


def test_the_command_lists_and_shows(typed):
    code, out, _ = typed()
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[1:]] == ITEMS
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
    code, out, _ = typed("table4", "--matrix")
    assert code == 0
    assert out.count("standard errors") == 3
    assert re.search(r"Output\+Mean +–  0.371 +– +–  0.528", out)


def test_one_row_or_cell_of_a_table(typed, tmp_path):
    """It is shown, exported, listed and run alone."""
    cell = ("table4", "--scale", "smoke", "--row", "Counting Network", "--dataset", "SVHN", "--scenario", "Small")
    code, out, _ = typed(*cell, "--missing")
    assert code == 0
    assert out.splitlines()[-1].startswith("2 runs missing")
    code, _, err = typed(*cell, "--run", "--device", "cpu")
    assert (code, err) == (0, "")
    assert {r.recipe.source for r in files.load_records(tmp_path / "paper-smoke")} == {"standin10"}
    code, out, _ = typed(*cell, "--csv")
    (row,) = csv.DictReader(io.StringIO(out))
    assert (row["method"], row["dataset"], row["scenario"], row["runs"]) == ("Counting Network", "SVHN", "Small", "2")
    code, out, _ = typed("table4", "--scale", "smoke", "--row", "Output+Mean")
    assert code == 0
    assert (out.count("missing"), out.count("Counting Network")) == (12, 0)
    assert "digits for CIFAR10" in out
    for words, says in [
        (("table4", "--row", "Count"), "no method in table4 'Count'; there are Output+Mean"),
        (("table4", "--dataset", "svhn"), "no dataset in table4 'svhn'; there are CIFAR10, SVHN"),
        (("--row", "MILLET"), "choose cells of table2 to table6"),
        (("table2", "--row", "MILLET", "--page", "page.html"), "choose cells of table2 to table6"),
    ]:
        code, _, err = typed(*words)
        assert (code, err.count("\n")) == (2, 1)
        assert says in err


# -- paired tests ----------------------------------------------------------------------------------------------


def test_the_paired_test_is_a_t_test_of_the_differences():
    a, b = [0.51, 0.48, 0.55, 0.50, 0.53], [0.49, 0.47, 0.50, 0.51, 0.50]
    gaps = np.subtract(a, b)
    made = paired_t_test(a, b)
    assert made.n == 5
    assert made.difference == pytest.approx(gaps.mean())
    statistic = abs(gaps.mean() / (gaps.std(ddof=1) / math.sqrt(5)))
    draws = np.random.default_rng(0).standard_t(4, 200_000)
    assert made.p == pytest.approx((np.abs(draws) > statistic).mean(), abs=0.005)
    assert paired_t_test(b, a).p == pytest.approx(made.p)


def test_the_paired_test_of_too_few_values():
    assert paired_t_test([0.5], [0.25]) == PairedTest(0.25, pytest.approx(math.nan, nan_ok=True), 1)
    assert math.isnan(paired_t_test([0.4, 0.6], [0.3, 0.5]).p)  # the differences are one
    assert paired_t_test([], []).n == 0
    with pytest.raises(HeadcountError, match="got 2 and 1"):
        paired_t_test([0.1, 0.2], [0.1])


def test_two_versions_of_a_data_set_are_not_averaged(tmp_path):
    base = Recipe(source="digits")
    for fold in range(3):
        pretend(base.replace(fold=fold), tmp_path)
    other = pretend(base.replace(fold=0), tmp_path, key="f" * 16, data={**DATA, "checksum": "two"})
    with pytest.warns(HeadcountWarning, match="2 versions of digits.*; the 3 runs on one count, 1 do not"):
        found = records_by_recipe(tmp_path)
    assert {r.data["data"]["checksum"] for r in found.values()} == {"one"}
    assert len(found) == 3
    other.path.unlink()
    assert len(records_by_recipe(tmp_path)) == 3


def test_the_cost_of_a_run_is_that_of_its_scale():
    own, other = (all_recipes(scale)[0] for scale in (FULL, SMOKE))
    short = pretend(other, provenance={"seconds": 0.5})
    assert seconds_per_run(FULL, {other: short}) == DEFAULT_SECONDS["full"]
    assert seconds_per_run(FULL, {other: short, own: pretend(own)}) == 7.25
    assert seconds_per_run(FULL, {own: pretend(own, provenance={})}) == DEFAULT_SECONDS["full"]


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
