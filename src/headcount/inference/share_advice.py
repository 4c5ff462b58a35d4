"""What to know before relying on a table of shares, in lines: what is too sparse, how steady its conclusions are, and whether the
assumption holds that instances of a class look alike in every bag."""

import math
from itertools import combinations

import torch

from headcount.bags import Bags
from headcount.bags.seeds import make_generator
from headcount.bags.splits import subsample_bags
from headcount.errors import HeadcountError
from headcount.inference.share_table import ShareTable
from headcount.majority.homogeneity import assess_homogeneity, prediction_scores
from headcount.models.fitted import FittedModel
from headcount.models.predictions import Predictions
from headcount.readers.dataset import BagDataset

FEW_BAGS, FEW_INSTANCES = 5, 30
_MAX_TESTED, _MAX_NUMBERS = 20_000, 20_000_000  # instances, and features of all, on which the assumption is tested
_COLUMNS, _COMPONENTS = 200, 8  # of random projections of wide features, and of what is tested
_MAX_PAIRS = 5  # of groups that are not told apart


def merging_advice(table: ShareTable, bags: Bags) -> list[str]:
    """Which classes and groups are too sparse to stand by themselves, and which groups are not told apart: a line for each."""
    labelled = bags.target.numpy()[bags.labelled.numpy()]
    wins = (labelled >= labelled.max(1, keepdims=True) - 1e-6).sum(0).tolist() if len(labelled) else []
    counted = [True] * len(wins) if bags.counted is None else bags.counted.tolist()
    few = [(name, n) for name, n, can_win in zip(bags.classes, wins, counted, strict=False) if can_win and n < FEW_BAGS]
    lines = [
        f"{name} wins {n} of {len(labelled):,} labelled bags: merge it with another class, or do not rely on it"
        for name, n in few
    ]
    groups = range(1, len(table.group))
    sparse = [r for r in groups if table.instances[r] < FEW_INSTANCES or table.bags[r] < FEW_BAGS]
    for r in sparse:
        size = f"{table.instances[r]:,} instances in {table.bags[r]:,} bags"
        lines.append(f"{table.group[r]}: only {size}; merge it with another group")
    apart = lambda a, b: ((table.low[a] > table.high[b]) | (table.low[b] > table.high[a])).any()  # noqa: E731
    similar = [pair for pair in combinations([r for r in groups if r not in sparse], 2) if not apart(*pair)]
    for a, b in similar[:_MAX_PAIRS]:
        lines.append(
            f"{table.group[a]} and {table.group[b]}: their intervals overlap for every class; merge them, or do not compare them"
        )
    return lines + [f"and {len(similar) - _MAX_PAIRS:,} more such pairs"] * (len(similar) > _MAX_PAIRS)


def steadiness(table: ShareTable) -> list[str]:
    """How wrong the odds of instances must be for another class to become the largest of a group: a line for each."""
    lines = []
    for name, share, odds in zip(table.group, table.share, table.steady_odds.tolist(), strict=True):
        largest, factor = table.classes[int(share.argmax())], "100 or more" if odds > 100 else f"{odds:.3g}"
        lines.append(
            f"{name}: {largest} is the largest class unless the odds of single instances are wrong by a factor of {factor}"
        )
    return lines


def assess_assumption(model: FittedModel, dataset: BagDataset, predictions: Predictions) -> str:
    """Whether the features of a class are the same in every bag (majority/homogeneity.py), in one line. It is tested on the
    predictions, or, if the model was trained on any of these bags, on principal components of the features."""
    bags, rows = subsample_bags(dataset.bags, min(_MAX_TESTED, max(1000, _MAX_NUMBERS // math.prod(model.preprocessor.shape))))
    scores, tested = prediction_scores(torch.from_numpy(predictions.instance_probabilities)[rows]), "predictions"
    generator = make_generator(0, "homogeneity")
    try:
        if predictions.seen_in_training.any():
            if len(model.preprocessor.shape) > 1:
                raise HeadcountError("the model was trained on bags of these data")
            raw, tested = dataset.content, "features"
            x = (
                model.preprocessor.transform(raw.take(bags.index.numpy()))
                if dataset.schema.fields
                else bags.pool.take(bags.index)
            )
            x = torch.as_tensor(x).double()
            x = x if x.shape[1] <= _COLUMNS else x @ torch.randn(x.shape[1], _COLUMNS, generator=generator, dtype=x.dtype)
            u, size, _ = torch.linalg.svd(x - x.mean(0), full_matrices=False)
            scores = (u * size)[:, :_COMPONENTS]
        result = assess_homogeneity(scores, bags.segments(), bags.target, generator=generator)
    except HeadcountError as e:
        return f"not tested whether instances of a class look alike in every bag: {e}"
    by = f"p = {result.p_value:.3f}, by the {tested} of {len(rows):,} instances"
    if result.p_value > 0.05:
        return f"no sign that instances of a class look different from bag to bag ({by})"
    return f"instances of a class look different from bag to bag ({by}): the shares may be biased"
