"""Fitting: somebody's own bags become a model, with an honest word on how good it is. The service behind ``headcount fit``.

    >>> from headcount.data.read import read
    >>> from headcount.fitting import fit_reading
    >>> fitted = fit_reading(read("data.csv"), minutes=5)                               # doctest: +SKIP
    >>> fitted.save("model")                                                            # doctest: +SKIP

The walk: check, time, split by groups, cross-validate every candidate on bag labels, keep the one held-out bags prefer
(training/criterion.py says by which measure, and why), train it on all bags but a validation part. Truth, where the data bring
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

from headcount.bags import Bags, prints
from headcount.data.cache import home
from headcount.data.read import Reading
from headcount.data.read.lay import as_read
from headcount.errors import MOST_SEED, HeadcountError, number
from headcount.judging import begun, crossval, facts, plans
from headcount.judging.candidates import Trained, candidates, names_in
from headcount.judging.cautions import cautions
from headcount.judging.contest import Contest, Step
from headcount.judging.crossval import Score, Split, Unit
from headcount.judging.sight import Keep, sight
from headcount.models.eye import Eye, featured
from headcount.models.fitted import Fitted
from headcount.training import log
from headcount.training.criterion import by_chance, label_loss
from headcount.training.parallel import alone_only
from headcount.training.speed import device_for

CURVE = 120  # points of the learning curve that are kept


def fit_reading(
    reading: Reading,
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
    watch: Callable[[Step], None] | None = None,
    tell: Callable[[str], None] | None = None,
) -> Fitted:
    """Fit a model to what was read.

    ::

        method    "auto": several are tried and held-out bags choose; a name or names of judging/candidates.py; or an unfitted
                  scikit-learn classifier. Baselines are fitted and shown too, unless time is too short for
                  them; they are kept only by "auto" or where they are named
        folds     of the cross-validation, over groups of bags
        head      a network with this head, instead of ``method``; ``options`` are the head's
        epochs    of networks; None: by the number of bags
        views     changes of pictures that leave a class as it is: digit (None), image, tissue, none
        minutes   for the whole; fewer folds, epochs and candidates are used where it must be, and the report says so
        backbone  of networks; or timm:NAME, torchvision:NAME for pictures, with ``frozen``, ``weights`` (pretrained, none, or
                  FILE.safetensors) and ``size`` as models/vision.py takes them. Frozen, its features are computed once into the
                  ``cache``, and all that is for features is tried on them
        work      a folder for what is finished, so that a fit that was stopped can be taken up
        watch     told how far it is; ``tell`` is told a line now and then
    """
    alone_only("fit", "is one process's work: start it without torchrun, which is for headcount run")
    started, clock = datetime.now(UTC), time.monotonic()
    folds, seed = check_bounds(minutes, folds), number("seed", seed, 0, MOST_SEED, whole=True)
    tell = tell or (lambda line: None)
    laid = as_read(reading).laid.blind()
    check(laid)
    where = device_for(device)
    own: dict[str, Any] = {"frozen": frozen, "weights": weights, "size": size, "views": views}
    seen = sight(reading.laid, backbone, where, keep=_kept(cache, tell, watch), tell=tell, **own)
    given, reading, eye = reading, seen.over(reading), seen.eye
    laid = reading.laid.blind()
    final = crossval.inner(laid, np.arange(len(laid)), np.zeros(0, int), seed)
    train, valid, _, learned = crossval.prepared(reading, final)
    how: dict[str, Any] = {"head": head, "views": views, "epochs": epochs, "options": options}
    found = candidates(method, train, **how, **({"backbone": backbone, "start": seen.start} if eye is None else {}))
    place = begun.place_of(work, reading, found, seed, folds, minutes, where, seen.facts)
    most = len(crossval.splits(laid, folds, seed))
    fewer = [n for n in plans.FEWER if n < most and crossval.splits(laid, n, seed)]
    asked = head is not None or not isinstance(method, str) or method != "auto"
    named = names_in(head or method) if isinstance(method, str) else ["classifier"]
    must = named if asked else []
    spent = 0.0 if eye is None else time.monotonic() - clock
    plan = begun.planned(place, lambda: plans.planned(found, most, train, valid, where, minutes, must, spent, fewer))
    tell(str(plan))
    for note in plan.notes:
        tell(note)
    deadline = math.inf if minutes is None else clock + 60 * minutes - 1.5 * plan.final
    run = Contest(
        reading, laid, {c.name: c for c in found if c.name in plan.names}, plan,
        crossval.splits(laid, plan.folds, seed) if plan.folds else [], seed, where, place, watch, deadline,
    )  # fmt: skip
    units, unfinished = run.cross_validate()
    scores = {name: crossval.score(u, laid) for name, u in units.items()}
    best = run.choose(scores, must)
    trained = run.train(best, train, valid, minutes, clock)
    fitted, context = _fitted(run, trained, learned, scores.get(best.name), units.get(best.name, []))
    if reading.laid.truth is not None:  # everything is decided: now it may be looked at
        scores = {name: crossval.with_truth(s, units[name], reading.laid) for name, s in scores.items()}
        if context is not None:
            inside = crossval.in_context(fitted, units[best.name], reading.laid)
            context["instance_accuracy"] = crossval.with_truth(
                scores[best.name], inside, reading.laid
            ).instance_accuracy
    tried = facts.of_candidates(list(run.candidates.values()), best, scores, units, unfinished)
    said = {
        "method": facts.of_method(best, trained.believed, asked),
        "candidates": tried,
        "scores": next(({k: t[k] for k in facts.SCORES} for t in tried if t["chosen"] and t["loss"] is not None), None),
        "context": context,
        "confusion": scores[best.name].confusion if best.name in scores else None,
        "cautions": cautions(laid, best, trained.believed, scores, final.shared, bool(run.splits)),
        **_about(run, trained, final),
        "created": started.isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - clock, 2),
    }
    if place is not None:
        shutil.rmtree(place, ignore_errors=True)
    if eye is None:
        return _with_prints(fitted.but(facts=said), given)
    return _with_prints(fitted.but(facts={**said, "eye": seen.facts}, learned=given.learn(), eye=eye), given)


def _with_prints(fitted: Fitted, given: Reading) -> Fitted:
    """The same, knowing the bags whose labels it has learned when it meets them again."""
    bags = given.bags(fitted.learned)
    told = prints.prints(bags.take(bags.labelled))
    data = {**fitted.facts["data"], "prints": prints.written(told)}
    return fitted.but(facts={**fitted.facts, "data": data})


def _kept(cache: Path | str | None, tell: Callable[[str], None], watch: Callable[[Step], None] | None) -> Keep:
    """Features are computed once, into the cache."""

    def keep(eye: Eye, bags: Bags) -> Bags:
        tell(f"{eye.name}, frozen, looks at {len(bags.pool):,} pictures once; features are kept in {home(cache)}")
        look = (lambda done, of: watch(Step(f"{eye.name} looks", done, of))) if watch else None
        return featured(eye, bags, cache, look)

    return keep


def check_bounds(minutes: float | None, folds: int) -> int:
    """The folds, if they and the minutes are such as a fit can be bound by."""
    if minutes is not None and not (isinstance(minutes, (int, float)) and math.isfinite(minutes) and minutes > 0):
        raise HeadcountError(f"minutes is a number above zero, got {minutes!r}")
    return number("folds", folds, 2, 100, whole=True)


def check(bags: Bags) -> None:
    """Refuse what nothing can be learned from."""
    told = int(bags.labelled.sum())
    if told < 2:
        raise HeadcountError(f"{told} bag has a label; at least two with different labels are needed")
    if not crossval.differs(bags):
        row = bags.target[bags.labelled][0]
        label = bags.classes[int(row.argmax())]
        raise HeadcountError(
            f"all {told} labelled bags say the same ({label!r}), so nothing tells one class from another; "
            "bags with other labels are needed"
        )


def _fitted(
    run: Contest, trained: Trained, learned: Any, score: Score | None, units: list[Unit]
) -> tuple[Fitted, dict[str, Any] | None]:
    """The model, and what held-out bags said of listening to an instance's bag."""
    bags = run.bags
    counted = None if bags.counted is None else tuple(bags.counted.tolist())
    if score is not None:  # every bag has been answered by a stranger: that tells more than the validation bags alone
        judged, heat = score.judgement, score.temperature
        told = crossval.overheard(score, units, bags)
        made = Fitted(
            trained.body, bags.classes, learned, judged.tilt, counted, heat, judged.instance_temperature,
            told.alike, told.helps,
        )  # fmt: skip
        return made, {**facts.finite(vars(told)), "listens": told.helps}
    held, found = run.reading.bags(learned).blind(), trained.tilt
    found = found or label_loss(crossval.answers(trained.body, held, learned, run.device)[0], held)[1]
    return Fitted(trained.body, bags.classes, learned, found, counted), None


def _about(run: Contest, trained: Trained, final: Split) -> dict[str, Any]:
    parts = {"train": len(final.train), "valid": len(final.valid), "shared": final.shared}
    return {
        "chance_loss": float(by_chance(run.bags.target).mean()),
        "data": facts.of_data(run.reading),
        "splits": {"folds": len(run.splits), **parts},
        "curve": log.thin(trained.curve, CURVE),
        "best_epoch": trained.best,
        "seed": run.seed,
        "effort": run.plan.effort,
        "notes": list(run.plan.notes),
        "versions": facts.versions(),
        "device": str(run.device),
    }
