"""Scores of a run, the only place where predictions meet instance labels; then means, paired tests and table rows of records."""

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
from torch import Tensor

from headcount.bags import Bags
from headcount.errors import HeadcountError, HeadcountWarning
from headcount.experiments.records import Record
from headcount.majority import metrics
from headcount.majority.calibration import calibrated_probabilities, calibrated_proportions, evaluate_criterion, fit_context
from headcount.majority.proportions import Proportions
from headcount.majority.transition import Transition
from headcount.models.heads import Output
from headcount.training.mpem import dissenters

Arrays = dict[str, np.ndarray]
REMOVALS = tuple(round(0.1 * i, 1) for i in range(1, 11))
FIGURE7_REMOVALS = (0.3, 0.5, 0.8, 1.0)
N_CONTROLS = 10  # repetitions of the random control


def score_test(predictions: Output, test: Bags) -> tuple[dict[str, Any], Arrays]:
    """Scores for the record, and the predictions themselves for the arrays beside it."""
    truth, label, bag, n_classes = _truth(test)
    instance, bag_prediction = predictions.instance.argmax(1).numpy(), predictions.bag.argmax(1).numpy()
    confusion = metrics.confusion_matrix(truth, instance, n_classes)
    share_difference = metrics.share_difference(truth, instance, label, bag)
    data = {
        "scores": {
            "instance_accuracy": metrics.instance_accuracy(truth, instance),
            "bag_accuracy": metrics.bag_accuracy(label, bag_prediction),
            "consistency_rate": _or_none(metrics.consistency_rate(label, bag_prediction, instance, bag, n_classes)),
            "miou": metrics.mean_iou(confusion),
            "miou_usual": metrics.mean_iou(confusion, balanced=False),
            "share_difference": float(np.nanmean(share_difference)),
        },
        "confusion": confusion.tolist(),
        "share_difference": [round(float(v), 4) for v in share_difference],
    }
    arrays = {"test_index": test.index.cpu().numpy(), "test_offsets": test.offsets.cpu().numpy(), "test_label": label}
    small = {"test_bag_said": bag_prediction, "test_truth": truth, "test_said": instance}
    confidence = predictions.instance.softmax(1).amax(1).numpy().astype(np.float32)
    return data, arrays | {k: v.astype(np.int16) for k, v in small.items()} | {"test_confidence": confidence}


def score_transition(
    transition: Transition, predictions: Output, train: Bags, valid: Bags, test: Bags, valid_predictions: Output
) -> dict[str, Any]:
    """The estimated transition beside the true one, and the gain from using the rest of a bag as context. ``valid_predictions``
    are those for the validation bags, to which the calibration is fitted."""
    truth, label, bag, n_classes = _truth(train)
    true_mix = _normalized(metrics.confusion_matrix(label[bag], truth, n_classes))  # a row per label
    truth, _, bag, _ = _truth(test)
    true_shares = _normalized(metrics.count_votes(truth, bag, len(test), n_classes))
    context = fit_context(valid_predictions.instance, valid.blind())
    in_context = calibrated_probabilities(context, predictions.instance, test.blind(), use_context=True)
    labelled = calibrated_proportions(context, predictions.instance, test.blind())
    unlabelled = calibrated_proportions(context, predictions.instance, test.blind(), use_labels=False)
    mean_probability = test.segments().to("cpu").mean(predictions.instance.softmax(1)).numpy()
    criterion = evaluate_criterion(valid_predictions.instance.softmax(1), valid.blind().to("cpu"))
    condition = transition.condition_number
    return {
        "share": [round(float(v), 4) for v in transition.share],
        "true_share": [round(float(v), 4) for v in np.diag(true_mix)],
        "criterion": round(criterion.loss, 5),  # of the validation bags
        "mix_error": _mean_error(transition.mix.cpu().numpy(), true_mix),
        "condition": round(condition, 3) if math.isfinite(condition) else None,
        "temperature": round(context.temperature, 3),
        "context_helps": context.assessment.helps,
        "context_instance_accuracy": metrics.instance_accuracy(truth, in_context.argmax(1).numpy()),
        "shares_error": _mean_error(mean_probability, true_shares),
        "shares_error_in_context": _mean_error(labelled.share.numpy(), true_shares),
        "shares_inside": _coverage(labelled, true_shares),  # 90 % intervals; the test bags' labels are known here
        "shares_error_unlabelled": _mean_error(unlabelled.share.numpy(), true_shares),
        "shares_inside_unlabelled": _coverage(unlabelled, true_shares),
    }


def _normalized(counts: np.ndarray) -> np.ndarray:
    """Rows that sum to one; empty rows stay zero."""
    return counts / np.maximum(counts.sum(1, keepdims=True), 1)


def _mean_error(estimated: np.ndarray, true: np.ndarray) -> float:
    return round(float(np.abs(estimated - true).mean()), 5)


def _coverage(proportions: Proportions, true_shares: np.ndarray) -> float:
    """The fraction of true shares inside their intervals."""
    low, high = proportions.low.numpy() - 1e-6, proportions.high.numpy() + 1e-6
    return round(float(((true_shares >= low) & (true_shares <= high)).mean()), 4)


def score_removal(removed: Tensor, train: Bags) -> dict[str, Any]:
    """How well MPEM removed: purity, agreement (with its random control), the majority's share before and after."""
    truth, label, bag, n_classes = _truth(train)
    mask = removed.cpu().numpy()
    controls = [metrics.random_removal(bag, mask, np.random.default_rng(i)) for i in range(N_CONTROLS)]
    control_rates = [metrics.agreement_rate(truth, label, bag, control, n_classes) for control in controls]
    return {
        "removed": int(mask.sum()),
        "purity": _or_none(metrics.purity(truth, label, bag, mask)),
        "agreement": metrics.agreement_rate(truth, label, bag, mask, n_classes),
        "agreement_random": round(float(np.mean(control_rates)), 6),
        "share_before": round(float(np.nanmean(metrics.label_share(truth, label, bag))), 6),
        "share_after": round(float(np.nanmean(metrics.label_share(truth, label, bag, ~mask))), 6),
    }


def score_removal_sweep(votes: Mapping[str, Tensor], train: Bags) -> tuple[dict[str, Any], Arrays]:
    """What each removal would do to the training bags, by a network's votes: figures 7 to 9 need no further training."""
    truth, label, bag, _ = _truth(train)
    vote, distance = votes["train_said"].long(), votes["train_euclidean_correct"]
    sweep: dict[str, list[Any]] = {"removal": list(REMOVALS)}
    # the share of the label's class, true and as voted: their difference is figure 6 on training bags
    both = {"before": truth, "said": vote.cpu().numpy()}
    arrays = {f"train_share_{k}": metrics.label_share(v, label, bag).astype(np.float32) for k, v in both.items()}
    for removal in REMOVALS:
        removed = dissenters(distance, vote, train.bag, train.label, removal)
        for name, value in score_removal(removed, train).items():
            sweep.setdefault(name, []).append(value if value is None else round(value, 5))
        if removal in FIGURE7_REMOVALS:
            after = metrics.label_share(truth, label, bag, ~removed.cpu().numpy())
            arrays[f"train_share_after_{removal}"] = after.astype(np.float32)
    return {"sweep": sweep}, arrays


def _truth(bags: Bags) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Class and bag of each instance, label of each bag, number of classes."""
    assert bags.truth is not None, "scoring needs truth"
    return bags.truth.cpu().numpy(), bags.label.cpu().numpy(), bags.bag.cpu().numpy(), len(bags.classes)


def _or_none(value: float) -> float | None:
    """JSON has no NaN."""
    return None if math.isnan(value) else value


def best_removal(sweep: Sequence[Record]) -> Record:
    """The r with the smallest validation loss; the smallest r on ties. This is how the paper reports MPEM."""
    return min(sweep, key=lambda r: (r.data["fit"]["valid_loss"], r.recipe.removal))


@dataclass(frozen=True)
class Row:
    """One method on one data set and scenario: a record for each fold (and seed)."""

    label: str
    source: str
    scenario: str
    records: tuple[Record, ...]
    sweeps: tuple[tuple[Record, ...], ...] = ()  # for each of them, the runs at every r from which it was selected

    def score(self, metric: str) -> tuple[float, float, int]:
        """Mean, population standard deviation and number of runs; runs in which the metric is undefined do not count."""
        return mean_and_deviation(r.scores.get(metric) for r in self.records)


def mean_and_deviation(values: Iterable[float | None]) -> tuple[float, float, int]:
    """As the paper prints them: the standard deviation divides by n.

    >>> mean_and_deviation([1.0, 3.0, None])
    (2.0, 1.0, 2)
    """
    defined = [v for v in values if v is not None and not math.isnan(v)]
    if not defined:
        return math.nan, math.nan, 0
    mean = math.fsum(defined) / len(defined)
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in defined) / len(defined)), len(defined)


@dataclass(frozen=True)
class PairedTest:
    """One method against another on the same runs: the mean difference and its standard error, a paired t-test's p."""

    difference: float
    p: float
    n: int
    error: float = math.nan


def paired_t_test(a: Sequence[float], b: Sequence[float]) -> PairedTest:
    """How much ``a`` is above ``b``, fold by fold; p is NaN for fewer than two folds, or if all differences are equal.

    >>> test = paired_t_test([0.50, 0.52, 0.54], [0.48, 0.49, 0.53])
    >>> round(test.difference, 3), round(test.p, 3), test.n
    (0.02, 0.074, 3)
    """
    if len(a) != len(b):
        raise HeadcountError(f"a paired test needs the same folds twice, got {len(a)} and {len(b)} values")
    differences = [x - y for x, y in zip(a, b, strict=True)]
    if not differences:
        return PairedTest(math.nan, math.nan, 0)
    mean = math.fsum(differences) / len(differences)
    if max(differences) - min(differences) <= 1e-9:  # one fold, or differences that are equal up to rounding: no test
        return PairedTest(mean, math.nan, len(differences))
    from scipy.stats import ttest_rel  # takes half a second to import

    error = float(np.std(differences, ddof=1)) / math.sqrt(len(differences))
    return PairedTest(mean, float(ttest_rel(a, b).pvalue), len(differences), error)


def holm(p: Sequence[float]) -> list[float]:
    """p values adjusted for their number by Holm's method; NaN is no test and stays.

    >>> holm([0.01, 0.04, math.nan, 0.03])
    [0.03, 0.06, nan, 0.06]
    """
    adjusted, n_tests = np.empty(len(p)), np.isfinite(p).sum()
    adjusted[np.argsort(p)] = np.maximum.accumulate(np.sort(p) * (n_tests - np.arange(len(p)))).clip(max=1)  # NaN last
    return adjusted.tolist()


def compare_with_best(rows: Sequence[Row]) -> list[PairedTest | None]:
    """Each row's instance accuracy against the best over the folds and seeds that both have, p by Holm over the rows; None for the best. Rows that
    were trained with instance labels are compared, but are never the best."""
    metric = "instance_accuracy"
    values = [{_fold_and_seed(r): r.scores[metric] for r in row.records if r.scores.get(metric) is not None} for row in rows]
    means = [math.nan if row.records[0].uses_instance_labels else row.score(metric)[0] for row in rows]
    if np.isnan(means).all():
        return [None] * len(rows)
    best = int(np.nanargmax(means))
    shared = [sorted(v.keys() & values[best].keys()) for v in values]
    tests = [paired_t_test([v[k] for k in s], [values[best][k] for k in s]) for v, s in zip(values, shared, strict=True)]
    adjusted = holm([test.p for test in tests])  # the best against itself is no test
    return [None if i == best else replace(test, p=adjusted[i]) for i, test in enumerate(tests)]


def rows(records: Iterable[Record]) -> list[Row]:
    """Group records into table rows: folds and seeds go together, and MPEM's removals become one row by `best_removal`. Runs on
    other data, or with another version of a custom head, are another row."""
    groups: dict[tuple, list[Record]] = {}
    for record in records:
        groups.setdefault(record.method, []).append(record)
    table = []
    for group in groups.values():
        by_time = sorted(group, key=lambda r: (str(r.data.get("provenance", {}).get("started")), r.key))
        newest = {r.recipe: r for r in by_time}  # each run once: t1=1 and t1=1.0 are the same recipe under two keys
        if repeated := len(group) - len(newest):
            message = f"{repeated} of {len(group)} records of {group[0].label} repeat a run under another key"
            warnings.warn(f"{message}; the newest of each counts", HeadcountWarning, stacklevel=2)
        members = sorted((r for r in group if r is newest[r.recipe]), key=_fold_and_seed)
        sweeps = tuple(tuple(sweep) for _, sweep in groupby(members, key=_fold_and_seed))
        first, selected = group[0], tuple(best_removal(sweep) for sweep in sweeps)
        table.append(Row(first.label, first.recipe.source, first.recipe.scenario, selected, sweeps))
    return table


def _fold_and_seed(record: Record) -> tuple[int, int]:
    return record.recipe.fold, record.recipe.seed
