"""Scales: the paper at full size, and a small version of all of it that runs in minutes on two cores.

``full``   the paper's four data sets, five folds, 1,500 epochs, every removal.
``smoke``  digits and three generated stand-ins, two folds, few epochs: it tests the pipeline and does not compare methods.
           Its recipes differ, so the records of the two never mix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headcount.experiments.recipe import Recipe
from headcount.experiments.scores import REMOVALS

DATASETS = ("CIFAR10", "SVHN", "PATH", "OCT")
SCENARIOS = ("Various", "Small", "Large")

# name in tables -> how the recipe differs from the Counting Network's
METHODS: dict[str, dict[str, Any]] = {
    "Output+Mean": {"head": "output_mean"},
    "Feature+Mean": {"head": "feature_mean"},
    "Feature+Max": {"head": "feature_max"},
    "Feature+P-norm": {"head": "feature_pnorm"},
    "Feature+LSE": {"head": "feature_lse"},
    "Feature+Attention": {"head": "attention"},
    "AdditiveMIL": {"head": "additive"},
    "AdditiveTransMIL": {"head": "additive_trans"},
    "MILLET": {"head": "millet"},
    "MCTformer+": {"head": "mctformer"},
    "WENO": {"head": "weno"},
    "Counting Network w/o Count": {"options": {"t1": 1.0}},
    "Counting Network": {},
}


@dataclass(frozen=True)
class Scale:
    """The size at which the paper is reproduced."""

    name: str
    base: Recipe
    sources: Mapping[str, str]  # the paper's data set -> ours
    folds: tuple[int, ...]
    removals: tuple[float, ...]  # those from which "Ours" selects
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # options of heads that are made smaller, by head

    def recipes(self, method: str, dataset: str, scenario: str, removal: float = 0.0) -> tuple[Recipe, ...]:
        """One recipe for each fold."""
        changes = dict(METHODS[method])
        head = changes.get("head", "count")
        changes["options"] = {**changes.get("options", {}), **self.options.get(head, {})}
        recipe = self.base.replace(source=self.sources[dataset], scenario=scenario.lower(), removal=removal, **changes)
        return tuple(recipe.replace(fold=fold) for fold in self.folds)

    def sweep(self, dataset: str, scenario: str) -> tuple[Recipe, ...]:
        """Every removal on every fold: those from which "Ours" selects."""
        return tuple(r for removal in self.removals for r in self.recipes("Counting Network", dataset, scenario, removal))


SCALES = {
    "full": Scale(
        name="full",
        base=Recipe(precision="bf16"),
        sources={"CIFAR10": "cifar10", "SVHN": "svhn", "PATH": "path", "OCT": "oct"},
        folds=(0, 1, 2, 3, 4),
        removals=REMOVALS,
    ),
    "smoke": Scale(
        name="smoke",
        base=Recipe(
            bag_size=12,
            train_bags=40,
            valid_bags=10,
            test_bags=10,
            batch_bags=20,
            epochs=6,
            lr=3e-3,
            backbone="mlp",
            backbone_options=(("hidden", 24), ("layers", 1)),
        ),
        sources={"CIFAR10": "digits", "SVHN": "standin10", "PATH": "standin9", "OCT": "standin4"},
        folds=(0, 1),
        removals=(0.5, 1.0),
        options={  # at their default widths these three would take nine tenths of the time
            "additive_trans": {"attn": "exact", "width": 32, "heads": 2},
            "mctformer": {"layers": 1, "width": 24, "heads": 2},
            "weno": {"width": 32, "student_width": 64},
        },
    ),
}
