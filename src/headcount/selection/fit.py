"""From a dataset of bags to a fitted model, with an estimate of how good it is. The service behind ``headcount fit``.

Every method is cross-validated on bag labels, and the one that held-out bags prefer (majority/calibration.py) is trained on all bags
except a validation part. Truth, where the data bring it, is used only after every decision, to report the instance accuracy.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from headcount.bags import Bags, Pool
from headcount.bags.bags import bag_hashes, hashes_to_hex
from headcount.bags.splits import has_distinct_labels, make_splits, train_valid_split
from headcount.datasets.cache import cache_folder
from headcount.errors import MAX_SEED, HeadcountError, check_number
from headcount.majority.calibration import fit_transition_loss
from headcount.models import library_backbones
from headcount.models.backbones import CustomBackbone
from headcount.models.fitted import FittedModel
from headcount.models.heads import Head
from headcount.models.library_backbones import PretrainedBackbone
from headcount.models.network import FrozenBackbone
from headcount.models.predictions import LazyFeaturePool, extract_features
from headcount.readers import BagDataset
from headcount.readers.dataset import check_dataset
from headcount.selection import cross_validation, metadata, search, time_budget
from headcount.selection.methods import NetworkOptions, build_methods, resolve_method, split_names
from headcount.selection.search import ModelSearch, SearchProgress
from headcount.training.accel import resolve_device
from headcount.training.augment import FEATURE_VIEWS
from headcount.training.distributed import require_single_process

ExtractFeatures = Callable[[FrozenBackbone, Bags], Bags]  # bags of images -> the same bags over features


def fit(
    dataset: BagDataset, method: Any = "auto", *, minutes: float | None = None, seed: int = 0, device: str = "auto",
    folds: int = 5, head: str | type[Head] | None = None, trusted: bool = False,
    backbone: CustomBackbone | str | None = None, frozen: bool | None = None,
    weights: str | None = None, size: int | None = None, cache: Path | str | None = None, views: str | None = None,
    epochs: int | None = None, options: dict[str, Any] | None = None, work: Path | str | None = None, private: int | None = None,
    on_progress: Callable[[SearchProgress], None] | None = None, log: Callable[[str], None] | None = None,
) -> FittedModel:  # fmt: skip
    """Fit a model of single instances to the bags of a dataset, and estimate how good it is.

    Parameters
    ----------
    dataset : BagDataset
        What :func:`headcount.read` returns.
    method : str or classifier
        "auto" tries several methods and keeps the one that held-out bags prefer. Otherwise a name, several names with commas
        (docs/explanation/methods.md), or an unfitted scikit-learn classifier.
    minutes : float, optional
        Time budget; folds, epochs, then methods are reduced to fit, and ``metadata["notes"]`` says so. Default: none.
    seed, device, folds : int, str, int
        Random seed; "auto", "cpu" or "cuda"; folds of the cross-validation, over groups of bags.
    head, trusted, options : str or class, bool, dict, optional
        A network with this head, instead of ``method``, and the options of the head. A head of your own is its class, or
        "module:Class" or "file.py:Class" with ``trusted=True``, which runs that code; whoever loads the model gives the class.
    backbone, views, epochs : optional
        Of networks: a name, "timm:NAME" or "torchvision:NAME" for images, or a ``torch.nn.Module`` of your own (better: its class,
        so that each fold starts from weights of its own; see :class:`headcount.ModelConfig`); augmentation policy "digit" (no flips, the default), "image",
        "tissue" or "none"; the number of epochs.
    frozen, weights, size, cache : optional
        Of a backbone of timm or torchvision: whether features are computed once (into the folder ``cache``), so that every
        method for features can be tried; "pretrained" (the default), "none", or FILE.safetensors; the side of images.
    work : path, optional
        Folder of finished folds, from which an interrupted fit resumes.
    private : int, optional
        The least number of instances of a bag, and of a group in any output of the model's; commands then write nothing about
        single instances (:doc:`/how-to/privacy`).
    on_progress, log : callable, optional
        Called with a :class:`~headcount.selection.search.SearchProgress`, and with lines of text, now and then.

    Returns
    -------
    FittedModel
        With what is known of the fit in ``metadata``.

    Examples
    --------
    >>> import headcount as hc
    >>> hc.fit(hc.read("data.csv"), minutes=5).save("model")                            # doctest: +SKIP
    """
    require_single_process("fit", "is one process's work: start it without torchrun, which is for headcount run")
    created, started = datetime.now(UTC), time.monotonic()
    folds, seed = check_limits(minutes, folds), check_number("seed", seed, 0, MAX_SEED, integer=True)
    log, method = log or (lambda line: None), resolve_method(method, head, trusted)
    require_two_labels(check_dataset(dataset).bags.blind())
    check_private(private, dataset.bags)
    torch_device, context = resolve_device(device), None
    setup = prepare_backbone(
        dataset.bags, backbone, torch_device, frozen=frozen, weights=weights, size=size, views=views,
        extract=_cached_features(cache, log, on_progress), log=log,
    )  # fmt: skip
    network = NetworkOptions(backbone, views, epochs, options, setup.pretrained)
    if setup.frozen_backbone is not None:  # the networks on its features have the default backbone
        network = replace(network, backbone=None)
    features = setup.apply_to(dataset)
    bags = features.bags.blind()
    final = train_valid_split(bags, np.arange(len(bags)), np.zeros(0, int), seed)
    train, valid, _, preprocessor = cross_validation.prepare_split(features, final)
    methods = build_methods(method, train, network=network)
    # the methods of which one must be kept; none where the choice is free
    requested = split_names(method) if isinstance(method, str) else ["classifier"]
    requested = [] if requested == ["auto"] else requested
    folder = search.resume_folder(
        work, features, methods, seed=seed, folds=folds, minutes=minutes, device=torch_device,
        frozen_backbone=setup.metadata,
    )  # fmt: skip

    def make_plan() -> time_budget.TimePlan:
        most = len(make_splits(bags, folds, seed))
        possible = [n for n in time_budget.REDUCED_FOLDS if n < most and make_splits(bags, n, seed)]
        return time_budget.make_plan(
            methods, most, train, valid, torch_device, minutes=minutes, requested=requested,
            started=started, reduced_folds=possible,
        )  # fmt: skip

    plan = search.load_or_make_plan(folder, make_plan, [m.name for m in methods])
    for line in (str(plan), *plan.notes):
        log(line)
    model_search = ModelSearch(
        lambda split: cross_validation.prepare_split(features, split)[:3], bags, {m.name: m for m in methods if m.name in plan.names}, plan,
        make_splits(bags, plan.folds, seed) if plan.folds else [], seed=seed, device=torch_device, work=folder,
        on_progress=on_progress, end=math.inf if minutes is None else started + 60 * minutes, requested=requested,
    )  # fmt: skip
    results, unfinished = model_search.cross_validate()
    scores = {name: cross_validation.score_method(r, bags) for name, r in results.items()}
    best = model_search.choose(scores)
    result = model_search.train_final(best, train, valid)
    if best.name in scores:
        assessment = cross_validation.assess_held_out_context(scores[best.name], results[best.name], bags)
        calibration = cross_validation.calibrate_on_folds(scores[best.name], assessment, results[best.name], bags)
        context = {**metadata.finite_numbers(vars(assessment)), "use_context": assessment.helps}
    else:  # without cross-validation there are no temperatures
        transition = result.transition
        if transition is None:
            prepared = features.to_bags(preprocessor).blind()
            p, _ = cross_validation.predict_estimator(result.estimator, prepared, torch_device)
            transition = fit_transition_loss(p, prepared)[1]
        calibration = cross_validation.ModelCalibration(transition)
    counted = None if bags.counted is None else tuple(bags.counted.tolist())
    model = FittedModel(result.estimator, bags.classes, preprocessor, counted=counted, **calibration._asdict())
    if features.bags.truth is not None:  # every decision has been made
        scores = {n: cross_validation.add_instance_accuracy(s, results[n], features.bags) for n, s in scores.items()}
        if context is not None:
            score = cross_validation.add_instance_accuracy(scores[best.name], results[best.name], features.bags, model)
            context["instance_accuracy"] = score.instance_accuracy
    rows = metadata.method_rows(list(model_search.methods.values()), best, scores, results, unfinished | model_search.rejected)
    known = metadata.fit_metadata(features, model_search, best, result, final, scores=scores, rows=rows)
    known |= {"context": context, "created": created.isoformat(timespec="seconds")}
    known["seconds"] = round(time.monotonic() - started, 2)
    if setup.frozen_backbone is not None:
        known["frozen_backbone"] = setup.metadata
        model = model.replace(preprocessor=dataset.fit_preprocessor(), frozen_backbone=setup.frozen_backbone)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    prepared = dataset.to_bags(model.preprocessor)  # by their hashes the model recognises the bags it was trained on
    known["data"]["bag_hashes"] = hashes_to_hex(bag_hashes(prepared.take(prepared.labelled)))
    if private is not None:  # a hash confirms a guess of a bag's instances, and lines on skipped rows quote them
        known["data"] |= {"bag_hashes": "", "skipped": []}
        known["min_bag_size"] = private
    return model.replace(metadata=known)


def _cached_features(
    cache: Path | str | None, log: Callable[[str], None], on_progress: Callable[[SearchProgress], None] | None
) -> ExtractFeatures:
    """A function that computes features once, into the cache."""

    def extract(network: FrozenBackbone, bags: Bags) -> Bags:
        def report(done: float, total: float) -> None:
            if on_progress:
                on_progress(SearchProgress(f"features of {network.name}", done, total))

        log(f"computing features of {len(bags.pool):,} images once with {network.name}; kept in {cache_folder(cache)}")
        return extract_features(network, bags, cache, report)

    return extract


class BackboneSetup(NamedTuple):
    """The bags to fit to and the backbone in front of or under the model."""

    bags: Bags  # over features, where the backbone is frozen
    pretrained: PretrainedBackbone | None = None  # a backbone that is trained further
    frozen_backbone: FrozenBackbone | None = None  # on the CPU
    metadata: dict[str, Any] | None = None  # of the frozen backbone

    def apply_to(self, dataset: BagDataset) -> BagDataset:
        """The dataset these bags came from, over the features."""
        if self.frozen_backbone is None or self.metadata is None:
            return dataset
        schema = replace(dataset.schema, kind="features", shape=(self.frozen_backbone.dim,))
        line = "{backbone} (frozen, weights {weights}) computes {features:,} features of each image".format(**self.metadata)
        return replace(dataset, bags=self.bags, schema=schema, description=[*dataset.description, line])


def extract_in_memory(frozen_backbone: FrozenBackbone, bags: Bags) -> Bags:
    return replace(bags, pool=Pool(LazyFeaturePool(bags.pool, frozen_backbone).take(torch.arange(len(bags.pool)))))


def prepare_backbone(
    bags: Bags, backbone: CustomBackbone | str | None, device: torch.device, *, frozen: bool | None = None, weights: str | None = None,
    size: int | None = None, views: str | None = None, extract: ExtractFeatures = extract_in_memory,
    log: Callable[[str], None] | None = None,
) -> BackboneSetup:  # fmt: skip
    """Load a backbone of timm or torchvision. Frozen, its features are computed once by ``extract``, and any method for features
    is fitted to them; otherwise networks start from it. With any other backbone nothing changes."""
    library_backbones.check_backbone_options(backbone, frozen, weights, size)
    if not isinstance(backbone, str) or not library_backbones.is_library_backbone(backbone):
        return BackboneSetup(bags)
    pretrained = library_backbones.load_pretrained(
        backbone, bags.pool.shape, frozen=frozen, weights=weights, size=size, log=log
    )
    if not pretrained.frozen:
        return BackboneSetup(bags, pretrained)
    if views not in FEATURE_VIEWS:
        raise HeadcountError(
            f"views {views!r} augment images, but the features of a frozen backbone are computed once; leave views out, or "
            "train the backbone"
        )
    network = FrozenBackbone.from_pretrained(pretrained, bags.pool.shape).to(device)
    features = extract(network, bags)
    return BackboneSetup(features, None, network.cpu(), {**pretrained.metadata, "features": network.dim})


def check_limits(minutes: float | None, folds: int) -> int:
    """The number of folds."""
    if minutes is not None and not (isinstance(minutes, (int, float)) and math.isfinite(minutes) and minutes > 0):
        raise HeadcountError(f"minutes is a number above zero, got {minutes!r}")
    return check_number("folds", folds, 2, 100, integer=True)


def check_private(private: int | None, bags: Bags) -> None:
    """Refuse bags of fewer instances."""
    if private is not None and int(bags.sizes.min()) < check_number("private", private, 2, 1 << 30, integer=True):
        problem = f"private={private}: the smallest bag has {int(bags.sizes.min())} instances"
        raise HeadcountError(f"{problem}; read with min_size={private} and skip_bad=True, which leaves small bags out")


def require_two_labels(bags: Bags) -> None:
    labelled = int(bags.labelled.sum())
    if labelled < 2:
        raise HeadcountError(f"{labelled} bag has a label; at least two with different labels are needed")
    if not has_distinct_labels(bags):
        label = bags.classes[int(bags.target[bags.labelled][0].argmax())]
        raise HeadcountError(
            f"all {labelled} labelled bags have the same label ({label!r}), so there is nothing to distinguish; bags with other "
            "labels are needed"
        )
