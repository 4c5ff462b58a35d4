"""Invented records of the whole paper at a tiny scale, as its runs might have left them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from headcount.experiments import records as files
from headcount.experiments.paper import ITEMS, SCALES, Scale, figure_recipes, required_recipes, table_cells
from headcount.experiments.recipe import Recipe
from headcount.experiments.records import Record
from headcount.experiments.scores import FIGURE7_REMOVALS, REMOVALS

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
        wanted = (r for item in ITEMS for r in required_recipes(item, scale))
        _MADE[scale.name] = list(dict.fromkeys(wanted))
    return _MADE[scale.name]


_MADE: dict[str, list[Recipe]] = {}


def pretend_all(recipes: Iterable[Recipe], folder: Path, **changes: object) -> dict[Recipe, Record]:
    scattered = figure_recipes("figure7", TINY)
    return {r: pretend(r, folder if r in scattered else None, **changes) for r in recipes}


def one(table: str, scenario: str, method: str, dataset: str, scale: Scale = FULL):
    return next(c for c in table_cells(table, scale) if (c.scenario, c.method, c.dataset) == (scenario, method, dataset))
