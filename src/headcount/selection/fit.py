"""Fitting: somebody's own bags become a model, with an honest word on how good it is. The service behind ``headcount fit``.

    >>> from headcount.readers import read
    >>> from headcount.selection.fit import fit_reading
    >>> fitted = fit_reading(read("data.csv"), minutes=5)                               # doctest: +SKIP
    >>> fitted.save("model")                                                            # doctest: +SKIP

The walk: check, time, split by groups, cross-validate every candidate on bag labels, keep the one held-out bags prefer
(majority/criterion.py says by which measure, and why), train it on all bags but a validation part. Truth, where the data bring
it, is looked at when everything is decided. Finished folds are kept in ``work`` and taken up by the next call.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from headcount.bags import Bags, hashing
from headcount.bags.splits import Split, has_distinct_labels, make_splits, train_valid_split
from headcount.datasets.cache import cache_folder
from headcount.errors import MAX_SEED, HeadcountError, check_number
from headcount.majority.criterion import fit_transition_loss, prior_loss
from headcount.models.fitted import FittedModel
from headcount.models.frozen_backbone import FrozenBackbone, extract_features
from headcount.readers import BagDataset
from headcount.readers.dataset import check_dataset
from headcount.selection import cross_validation, metadata, resume, time_budget
from headcount.selection.backbone_setup import ExtractFeatures, prepare_backbone
from headcount.selection.cross_validation import FoldResult, MethodScore
from headcount.selection.fit_warnings import fit_warnings
from headcount.selection.methods import FitResult, methods, split_names
from headcount.selection.search import ModelSearch, SearchProgress
from headcount.training.accel.device import resolve_device
from headcount.training.checkpoint import thin_curve
from headcount.training.distributed import require_single_process

CURVE_POINTS = 120  # points of the learning curve that are kept


def fit(
    dataset: BagDataset,
    method: Any = "auto",
    *,
    minutes: float | None = None,
    seed: int = 0,
    device: str = "auto",
    folds: int = 5,
    head: str | None = None,
    backbone: str | None = None,
    frozen: bool | None = None,
    weights: str | None = None,
    size: int | None = None,
    cache: Path | str | None = None,
    views: str | None = None,
    epochs: int | None = None,
    options: dict[str, Any] | None = None,
    work: Path | str | None = None,
    on_progress: Callable[[SearchProgress], None] | None = None,
    log: Callable[[str], None] | None = None,
) -> FittedModel:
    """Fit a model to what was read.

    ::

        method    "auto": several are tried and held-out bags choose; a name or names of selection/methods.py; or an unfitted
                  scikit-learn classifier. Baselines are fitted and shown too, unless time is too short for
                  them; they are kept only by "auto" or where they are named
        folds     of the cross-validation, over groups of bags
        head      a network with this head, instead of ``method``; ``options`` are the head's
        epochs    of networks; None: by the number of bags
        views     changes of pictures that leave a class as it is: digit (None), image, tissue, none
        minutes   for the whole; fewer folds, epochs and candidates are used where it must be, and the report says so
        backbone  of networks; or timm:NAME, torchvision:NAME for pictures, with ``frozen``, ``weights`` (pretrained, none, or
                  FILE.safetensors) and ``size`` as models/library_backbones.py takes them. Frozen, its features are computed once into the
                  ``cache``, and all that is for features is tried on them
        work      a folder for what is finished, so that a fit that was stopped can be taken up
        watch     told how far it is; ``tell`` is told a line now and then
    """
    require_single_process("fit", "is one process's work: start it without torchrun, which is for headcount run")
    started, clock = datetime.now(UTC), time.monotonic()
    folds, seed = check_limits(minutes, folds), check_number("seed", seed, 0, MAX_SEED, integer=True)
    log = log or (lambda line: None)
    laid = check_dataset(dataset).bags.blind()
    require_two_labels(laid)
    where = resolve_device(device)
    own: dict[str, Any] = {"frozen": frozen, "weights": weights, "size": size, "views": views}
    seen = prepare_backbone(
        dataset.bags, backbone, where, extract=_feature_cache(cache, log, on_progress), log=log, **own
    )
    given, dataset, eye = dataset, seen.apply_to(dataset), seen.frozen_backbone
    laid = dataset.bags.blind()
    final = train_valid_split(laid, np.arange(len(laid)), np.zeros(0, int), seed)
    train, valid, _, learned = cross_validation.prepare_split(dataset, final)
    how: dict[str, Any] = {"head": head, "views": views, "epochs": epochs, "options": options}
    found = methods(method, train, **how, **({"backbone": backbone, "start": seen.pretrained} if eye is None else {}))
    place = resume.resume_folder(work, dataset, found, seed, folds, minutes, where, seen.metadata)
    most = len(make_splits(laid, folds, seed))
    fewer = [n for n in time_budget.REDUCED_FOLDS if n < most and make_splits(laid, n, seed)]
    asked = head is not None or not isinstance(method, str) or method != "auto"
    named = split_names(head or method) if isinstance(method, str) else ["classifier"]
    must = named if asked else []
    spent = 0.0 if eye is None else time.monotonic() - clock
    plan = resume.load_or_make_plan(
        place, lambda: time_budget.make_plan(found, most, train, valid, where, minutes, must, spent, fewer)
    )
    log(str(plan))
    for note in plan.notes:
        log(note)
    deadline = math.inf if minutes is None else clock + 60 * minutes - 1.5 * plan.final_seconds
    run = ModelSearch(
        dataset, laid, {c.name: c for c in found if c.name in plan.names}, plan,
        make_splits(laid, plan.folds, seed) if plan.folds else [], seed, where, place, on_progress, deadline,
    )  # fmt: skip
    units, unfinished = run.cross_validate()
    scores = {name: cross_validation.score_method(u, laid) for name, u in units.items()}
    best = run.choose(scores, must)
    trained = run.train_final(best, train, valid, minutes, clock)
    fitted, context = _fitted_model(run, trained, learned, scores.get(best.name), units.get(best.name, []))
    if dataset.bags.truth is not None:  # everything is decided: now it may be looked at
        scores = {
            name: cross_validation.add_instance_accuracy(s, units[name], dataset.bags) for name, s in scores.items()
        }
        if context is not None:
            inside = cross_validation.apply_context(fitted, units[best.name], dataset.bags)
            context["instance_accuracy"] = cross_validation.add_instance_accuracy(
                scores[best.name], inside, dataset.bags
            ).instance_accuracy
    tried = metadata.method_rows(list(run.methods.values()), best, scores, units, unfinished)
    said = {
        "method": metadata.method_metadata(best, trained.naive_labels, asked),
        "methods": tried,
        "scores": next(
            ({k: t[k] for k in metadata.SCORE_KEYS} for t in tried if t["chosen"] and t["loss"] is not None), None
        ),
        "context": context,
        "confusion": scores[best.name].confusion if best.name in scores else None,
        "warnings": fit_warnings(laid, best, trained.naive_labels, scores, final.valid_is_train, bool(run.splits)),
        **_run_metadata(run, trained, final),
        "created": started.isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - clock, 2),
    }
    if place is not None:
        shutil.rmtree(place, ignore_errors=True)
    if eye is None:
        return _with_bag_hashes(fitted.replace(metadata=said), given)
    return _with_bag_hashes(
        fitted.replace(
            metadata={**said, "frozen_backbone": seen.metadata},
            preprocessor=given.fit_preprocessor(),
            frozen_backbone=eye,
        ),
        given,
    )


def _with_bag_hashes(fitted: FittedModel, dataset: BagDataset) -> FittedModel:
    """The same, knowing the bags whose labels it has learned when it meets them again."""
    bags = dataset.to_bags(fitted.preprocessor)
    told = hashing.bag_hashes(bags.take(bags.labelled))
    data = {**fitted.metadata["data"], "bag_hashes": hashing.hashes_to_hex(told)}
    return fitted.replace(metadata={**fitted.metadata, "data": data})


def _feature_cache(
    cache: Path | str | None, log: Callable[[str], None], on_progress: Callable[[SearchProgress], None] | None
) -> ExtractFeatures:
    """Features are computed once, into the cache."""

    def keep(eye: FrozenBackbone, bags: Bags) -> Bags:
        log(
            f"{eye.name}, frozen, looks at {len(bags.pool):,} pictures once; features are kept in {cache_folder(cache)}"
        )
        look = (lambda done, of: on_progress(SearchProgress(f"{eye.name} looks", done, of))) if on_progress else None
        return extract_features(eye, bags, cache, look)

    return keep


def check_limits(minutes: float | None, folds: int) -> int:
    """The folds, if they and the minutes are such as a fit can be bound by."""
    if minutes is not None and not (isinstance(minutes, (int, float)) and math.isfinite(minutes) and minutes > 0):
        raise HeadcountError(f"minutes is a number above zero, got {minutes!r}")
    return check_number("folds", folds, 2, 100, integer=True)


def require_two_labels(bags: Bags) -> None:
    """Refuse what nothing can be learned from."""
    told = int(bags.labelled.sum())
    if told < 2:
        raise HeadcountError(f"{told} bag has a label; at least two with different labels are needed")
    if not has_distinct_labels(bags):
        row = bags.target[bags.labelled][0]
        label = bags.classes[int(row.argmax())]
        raise HeadcountError(
            f"all {told} labelled bags say the same ({label!r}), so nothing tells one class from another; "
            "bags with other labels are needed"
        )


def _fitted_model(
    search: ModelSearch, result: FitResult, preprocessor: Any, score: MethodScore | None, units: list[FoldResult]
) -> tuple[FittedModel, dict[str, Any] | None]:
    """The model, and what held-out bags said of listening to an instance's bag."""
    bags = search.bags
    counted = None if bags.counted is None else tuple(bags.counted.tolist())
    if score is not None:  # every bag has been answered by a stranger: that tells more than the validation bags alone
        judged, heat = score.criterion, score.temperature
        told = cross_validation.assess_held_out_context(score, units, bags)
        made = FittedModel(
            result.estimator, bags.classes, preprocessor, judged.transition, counted, heat, judged.instance_temperature,
            told.concentration, told.helps,
        )  # fmt: skip
        return made, {**metadata.finite_numbers(vars(told)), "use_context": told.helps}
    held, found = search.dataset.to_bags(preprocessor).blind(), result.transition
    found = (
        found
        or fit_transition_loss(cross_validation.predict_estimator(result.estimator, held, search.device)[0], held)[1]
    )
    return FittedModel(result.estimator, bags.classes, preprocessor, found, counted), None


def _run_metadata(search: ModelSearch, result: FitResult, final: Split) -> dict[str, Any]:
    parts = {"train": len(final.train), "valid": len(final.valid), "valid_is_train": final.valid_is_train}
    return {
        "prior_loss": float(prior_loss(search.bags.target).mean()),
        "data": metadata.dataset_metadata(search.dataset),
        "splits": {"folds": len(search.splits), **parts},
        "curve": thin_curve(result.curve, CURVE_POINTS),
        "best_epoch": result.best_epoch,
        "seed": search.seed,
        "epoch_fraction": search.plan.epoch_fraction,
        "notes": list(search.plan.notes),
        "versions": metadata.library_versions(),
        "device": str(search.device),
    }
