"""Why a class: how much each column of a table contributes to predictions.

The contribution of a column to the prediction of an instance: how far the probability of its class falls, on average, if the
column has the value of another instance, drawn at random. The mean over instances is the permutation importance of the column.
Columns that say the same share their importance, and one may look useless because the other is there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headcount.bags import Bags, Pool
from headcount.majority.calibration import apply_temperature
from headcount.models.fitted import FittedModel
from headcount.models.predictions import Predictions, estimator_probabilities
from headcount.readers import BagDataset

_SAMPLE, _ROWS = 1000, 200_000  # instances for the importance, and predictions that it may take
_LOCAL = 8  # columns of single instances: the most important ones


@dataclass(frozen=True)
class Attribution:
    """Of K columns, the most important first."""

    columns: tuple[str, ...]
    importance: np.ndarray  # (K, 1 + C): over all instances, then over those predicted as each class (NaN: there is none)
    contributions: dict[int, tuple[tuple[str, float], ...]]  # by instance, the largest first


def attribute_columns(
    model: FittedModel, dataset: BagDataset, predictions: Predictions, instances: np.ndarray, *, seed: int = 0
) -> Attribution | None:
    """The importance of the columns, and their contributions to the predictions of some instances; None without columns."""
    blocks, end = {}, 0
    for f in model.preprocessor.fields:
        start, end = end, end + f.width
        if f.kind != "text" and f.width:
            blocks[f.name] = slice(start, end)
    if not blocks:
        return None
    bags, predicted = dataset.to_bags(model.preprocessor), predictions.instance_prediction
    generator = np.random.default_rng([seed, 5021])

    def contributions(rows: np.ndarray, names: list[str], draws: int) -> np.ndarray:
        """(n, names)"""
        x, repeated = bags.pool.take(bags.index[rows]).numpy(), np.repeat(np.arange(len(rows)), draws)
        others = bags.pool.take(bags.index[generator.integers(0, len(bags.index), len(repeated))]).numpy()
        before, columns = _probabilities(model, x)[np.arange(len(rows)), predicted[rows]], []
        for name in names:
            changed = x[repeated]
            changed[:, blocks[name]] = others[:, blocks[name]]
            after = _probabilities(model, changed)[np.arange(len(repeated)), predicted[rows][repeated]]
            columns.append(before - after.reshape(len(rows), draws).mean(1))
        return np.stack(columns, 1)

    most = min(_SAMPLE, max(50, _ROWS // (4 * len(blocks))), len(bags.index))
    sample = np.sort(generator.choice(len(bags.index), most, replace=False))
    of_sample, n_classes = contributions(sample, list(blocks), 4), len(predictions.classes)
    groups = [np.full(most, True), *(predicted[sample] == k for k in range(n_classes))]
    importance = np.stack([of_sample[g].mean(0) if g.any() else np.full(len(blocks), np.nan) for g in groups], 1)
    order = np.argsort(-importance[:, 0], kind="stable")
    columns = [list(blocks)[i] for i in order]
    local = contributions(instances, columns[:_LOCAL], 16)
    ranked = {
        int(i): tuple(sorted(zip(columns, row.tolist(), strict=False), key=lambda pair: -abs(pair[1])))
        for i, row in zip(instances, local, strict=True)
    }
    return Attribution(tuple(columns), importance[order], ranked)


def _probabilities(model: FittedModel, x: np.ndarray) -> np.ndarray:
    """(n, C) of instances without their bags."""
    alone = Bags.of(Pool(x), sizes=[1] * len(x), labels=np.full(len(x), -1), classes=model.classes)
    return apply_temperature(estimator_probabilities(model.estimator, alone)[0], model.instance_temperature).numpy()
