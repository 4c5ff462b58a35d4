"""The methods that ``headcount fit`` tries: each has a name and a way from training and validation bags to an estimator.

The name of any head is a method (a network with that head), and so is any scikit-learn classifier, by EM. Baselines take the bag's
label for the label of each instance and are always shown: forest, boosting, logistic, and noisy_label (a network) for images.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from headcount.bags import Bags, splits
from headcount.bags.splits import split_large_bags, subsample_instances
from headcount.errors import HeadcountError, check_choice
from headcount.majority.transition import Transition
from headcount.models.backbones import BACKBONES, CustomBackbone, backbone_name
from headcount.models.heads import HEADS, TRUSTED_HEADS, Head, check_options, find_head, head_code, head_options, trust_head
from headcount.models.heads.base import SumHead
from headcount.models.library_backbones import PretrainedBackbone, state_digest
from headcount.models.network import ModelConfig, build_model
from headcount.models.predictions import Estimator
from headcount.models.trees import SklearnModel, from_sklearn, is_savable
from headcount.selection import classifiers
from headcount.selection.classifiers import CLASSIFIERS, MAX_FIT_INSTANCES
from headcount.training import loop
from headcount.training.augment import FEATURE_VIEWS, VIEWS
from headcount.training.config import TrainConfig
from headcount.training.em import check_classifier, em

MethodProgress = Callable[[float, str], None]  # the fraction done, and a message
TABLE_METHODS = ("tilt", *(name for name in CLASSIFIERS if name != "vote_logistic"), "count")  # what auto tries
IMAGE_METHODS = ("tilt", "tilt_mlp", "noisy_label")
MAX_MLP_SIDE = 32  # of images whose pixels a perceptron sees as features: with few of them it is better than convolutions
# no epochs or rounds to reduce
FIXED_COST_METHODS = tuple(n for n, (_, _, by_em) in CLASSIFIERS.items() if not by_em and n in TABLE_METHODS)
BASELINES = (*FIXED_COST_METHODS, "noisy_label")
OPTIONAL_METHODS = ("count", "em_boosting", "boosting")
METHODS = tuple(dict.fromkeys([*TABLE_METHODS, *CLASSIFIERS, *IMAGE_METHODS, *HEADS]))
MIN_EPOCHS_TO_REPEAT = 10  # a shorter training says little about a teacher
CHUNK_INSTANCES = 16_384  # of a large bag, processed at once
MLP_OPTIONS = {"hidden": 128, "layers": 2, "dropout": 0.3}


@dataclass(frozen=True)
class NetworkOptions:
    """What a user may choose about networks; None: chosen by the bags. ``options`` are the head's."""

    backbone: CustomBackbone | str | None = None
    views: str | None = None
    epochs: int | None = None
    options: dict[str, Any] | None = None
    pretrained: PretrainedBackbone | None = None  # a library's backbone that is trained further
    training: dict[str, Any] | None = None  # fields of TrainConfig


@dataclass(frozen=True)
class FitResult:
    """A fitted estimator. ``naive_labels``: fitted to the bag's label of each instance, as baselines are, and EM in round 0."""

    estimator: Estimator
    transition: Transition | None  # as estimated during training, if it was
    curve: list[tuple[float, float]]  # training loss (NaN where there is none) and validation loss
    best_epoch: int  # the epoch or round that is kept, from 1
    naive_labels: bool
    saw_validation: bool = False  # fitted to the validation bags too: they cannot calibrate it


@dataclass(frozen=True)
class Method:
    """One way to fit: a network by its two configurations, or a ``classifier`` by EM (``rounds`` 0: on the bags' labels)."""

    name: str
    title: str
    model_config: ModelConfig | None = None
    train_config: TrainConfig | None = None
    pretrained: PretrainedBackbone | None = None  # the network's backbone starts from these weights
    classifier: Any = None
    rounds: int = 0

    @property
    def baseline(self) -> bool:
        """Whether the method takes the bag's label for the label of each instance."""
        return self.name in BASELINES

    def fit(
        self, train: Bags, valid: Bags, *, seed: int = 0, device: torch.device | str = "cpu", epoch_fraction: float = 1.0,
        work: Path | None = None, on_progress: MethodProgress | None = None,
    ) -> FitResult:  # fmt: skip
        """Fit to blind bags, with this fraction of the epochs or rounds. ``work``: a folder for checkpoints."""
        if self.train_config is not None:
            epochs = max(1, round(self.train_config.epochs * epoch_fraction))
            config = replace(self.train_config, seed=seed, epochs=epochs)
            return self._fit_network(train, valid, config, device=device, work=work, on_progress=on_progress)
        rounds = int(-(-self.rounds * epoch_fraction // 1))
        log = (lambda r, _: on_progress((r + 1) / (rounds + 1), f"round {r} of {rounds}")) if on_progress else None
        samples = [subsample_instances(bags, MAX_FIT_INSTANCES, seed) for bags in (train, valid)]
        if hasattr(self.classifier, "fit_bags"):
            linear, loss = self.classifier.fit_bags(*samples)
            return FitResult(linear, None, [(math.nan, loss)], 1, naive_labels=False, saw_validation=True)
        result = em(self.classifier, *samples, rounds=rounds, seed=seed, on_progress=log)
        estimator = (from_sklearn if is_savable(result.classifier) else SklearnModel)(result.classifier, len(train.classes))
        transition, curve = result.transition if self.rounds else None, [(math.nan, loss) for loss in result.curve]
        return FitResult(estimator, transition, curve, result.best_round + 1, naive_labels=result.best_round == 0)

    def _fit_network(
        self, train: Bags, valid: Bags, config: TrainConfig,
        *, device: torch.device | str, work: Path | None, on_progress: MethodProgress | None,
    ) -> FitResult:  # fmt: skip
        assert self.model_config is not None
        if "piece" in dict(self.model_config.options):
            train, valid = split_large_bags(train), split_large_bags(valid)
        constants = {} if self.pretrained is None else {"mean": self.pretrained.mean, "std": self.pretrained.std}
        shape = train.pool.shape  # of features, it may differ from fold to fold: each has its own categories
        model = build_model(replace(self.model_config, shape=shape), train, seed=config.seed, **constants).to(device)
        if self.pretrained is not None:
            self.pretrained.load_into(model.backbone)
        log = (lambda p: on_progress(p.epoch / config.epochs, f"epoch {p.epoch} of {config.epochs}")) if on_progress else None
        result = loop.train(model, train.to(device), valid.to(device), config, work_dir=work, on_progress=log)
        progress = result.progress
        if config.epochs >= MIN_EPOCHS_TO_REPEAT and 0 < progress.best_epoch <= self._teacher_start() * config.epochs:
            options = {**dict(self.model_config.options), "teach": 0.0, "form": "one"}
            simpler = replace(self, model_config=replace(self.model_config, options=tuple(options.items())))
            work = None if work is None else work / "without teacher"
            again = simpler._fit_network(train, valid, config, device=device, work=work, on_progress=on_progress)
            if again.curve[again.best_epoch - 1][1] < progress.best:
                return again
        if not progress.best_epoch:
            raise HeadcountError(f"{self.title}: the validation loss was never a number; leave this method out")
        model = result.model.cpu()
        transition = getattr(model.head, "transition", None)  # where it estimates one
        return FitResult(model, transition, progress.curve, progress.best_epoch, naive_labels=self.baseline)

    def _teacher_start(self) -> float:
        """The fraction of its epochs after which tilt's teacher may be removed, if no later epoch is better; 0: never."""
        assert self.model_config is not None
        options = dict(self.model_config.options)
        chosen = self.model_config.head != "tilt" or len(self.model_config.shape) > 1 or "teach" in options or "form" in options
        return 0.0 if chosen else options.get("start", 0.3)

    def metadata(self) -> dict[str, Any]:
        """The parameters that are plain JSON (selection/search.py compares all of them)."""
        if self.model_config is not None and self.train_config is not None:
            network = {k: getattr(self.model_config, k) for k in ("head", "options", "backbone_options")}
            network["backbone"] = backbone_name(backbone := self.model_config.backbone)
            if isinstance(backbone, torch.nn.Module):
                network["backbone_sha256"] = state_digest(backbone.state_dict())
            if code := head_code(self.model_config.head):  # a search does not resume with another head of the same name
                network["head_code"] = hashlib.sha256(code).hexdigest()
            pretrained = {} if self.pretrained is None else {"pretrained": self.pretrained.metadata}
            return {**network, **asdict(self.train_config), **pretrained}
        parameters = {k: v for k, v in self.classifier.get_params().items() if isinstance(v, (int, float, str, bool))}
        return {"classifier": type(self.classifier).__name__, "rounds": self.rounds, **parameters}


def build_methods(method: Any, bags: Bags, *, network: NetworkOptions | None = None) -> list[Method]:
    """The methods to try: those of ``method``, and the baselines. The training bags determine the configuration of networks;
    ``network``: what the user chose about them."""
    images, chosen = bags.pool.kind == "images", network or NetworkOptions()
    method, custom = resolve_method(method), list[Method]()
    if isinstance(method, str):
        names = list(IMAGE_METHODS if images else TABLE_METHODS)
        if images and (max(bags.pool.shape[:2]) > MAX_MLP_SIDE or chosen.backbone or chosen.views or chosen.pretrained):
            names.remove("tilt_mlp")
        if method != "auto":
            requested = split_names(method)
            names = [*requested, *(n for n in names if n in BASELINES and n not in requested)]
    else:
        check_classifier(method)
        if images:
            name = type(method).__name__
            raise HeadcountError(f"{name} reads features, and these are images; use tilt, or a frozen backbone")
        custom = [Method("classifier", f"EM, {type(method).__name__}", classifier=method, rounds=classifiers.EM_ROUNDS)]
        names = ["forest", "logistic"]
    _check_network_options(method, [name for name in names if name in HEADS or name in TRUSTED_HEADS], chosen, images)
    return custom + [_build_method(name, bags, chosen) for name in names]


def _check_network_options(method: Any, heads: list[str], chosen: NetworkOptions, images: bool) -> None:
    """Refuse options that no network would use. The head's options belong to the first network."""
    given = [name for name in ("backbone", "views", "epochs", "options") if getattr(chosen, name) not in (None, {})]
    given += list(chosen.training or {})
    if given and not heads:
        raise HeadcountError(f"{', '.join(given)}: for networks, and method {method} is none; leave it out")
    if not images and chosen.views in VIEWS and chosen.views not in FEATURE_VIEWS:
        raise HeadcountError(
            f"views {chosen.views!r} are for images, and these are features; leave views out, or use 'feature'"
        )
    if chosen.options:
        check_options(heads[0], chosen.options)
        for name in heads[1:]:
            requested = method != "auto" and name not in BASELINES
            if requested and not set(chosen.options) <= set(head_options(name)):
                raise HeadcountError(
                    f"options {', '.join(chosen.options)} belong to {heads[0]}, and {name} has none of these names; fit the "
                    "two one by one, or leave the options out"
                )


def resolve_method(method: Any, head: str | type[Head] | None = None, trusted: bool = False) -> Any:
    """The method after its names are checked, which needs no data. A head may be given as a class; code of a custom one that is
    given by name runs only if it is ``trusted``."""
    if head is not None:
        if method != "auto":
            raise HeadcountError(f"head {head} and method {method} were both given; a head's name is a method: give one")
        method = trust_head(head, trusted)
        reject_custom_head(method)
        return check_choice("head", method, [*HEADS, *TRUSTED_HEADS])
    method = trust_head(method, trusted=False)
    for name in split_names(method) if isinstance(method, str) and method != "auto" else ():
        reject_custom_head(trust_head(name, trusted))
        if check_choice("method", name, ["auto", *METHODS, *TRUSTED_HEADS]) == "auto":
            raise HeadcountError(f"method {method}: auto chooses by itself; give it alone, or names without it")
    return method


def split_names(method: str) -> list[str]:
    """The names of a list with commas, without duplicates."""
    return list(dict.fromkeys(m.strip() for m in method.split(",")))


def reject_custom_head(name: str) -> None:
    if ":" in name and name not in TRUSTED_HEADS:
        raise HeadcountError(
            f"{name} is a custom head, which run, study and probe take: a fitted model is saved, and loading a model never runs "
            "code; to fit with it in Python, give its class, head=Class, or trusted=True"
        )


def _build_method(name: str, bags: Bags, chosen: NetworkOptions) -> Method:
    if name in CLASSIFIERS:
        if bags.pool.kind == "images":
            raise HeadcountError(f"method {name} reads features, and these are images; use tilt or another network")
        title, make_classifier, by_em = CLASSIFIERS[name]
        return Method(name, title, classifier=make_classifier(len(bags.index)), rounds=classifiers.EM_ROUNDS if by_em else 0)
    if name == "tilt_mlp":
        network = replace(chosen, backbone=chosen.backbone or "mlp", views=chosen.views or "none")
        return replace(_build_method("tilt", bags, network), name=name, title="Tilt, multilayer perceptron")
    if find_head(name).uses_instance_labels and bags.known is None:
        raise HeadcountError(f"method {name} learns from known instance classes, and there are none; name them with known=")
    title = "Network on the bag's label" if name == "noisy_label" else f"{find_head(name).title}, network"
    model_config, train_config = network_configs(name, bags, chosen)
    return Method(name, title, model_config, train_config, chosen.pretrained)


def network_configs(head: str, bags: Bags, chosen: NetworkOptions) -> tuple[ModelConfig, TrainConfig]:
    """A network with this head for these bags: enough steps to learn from them, few enough to wait for."""
    images, sizes = bags.pool.kind == "images", bags.sizes.double()
    step_instances = 512 if images else 1024
    batch_bags = int(min(max(2, min(step_instances / float(sizes.mean()), len(bags) / 4)), 64))
    steps = max(-(-len(bags) // batch_bags), len(bags.index) / step_instances)  # of an epoch
    # enough epochs for 1500 (500) steps, at least 20 or those of 4000 steps, at most 100 (80)
    fewest = int(min(20, max(3, -(-4000 // steps))))
    epochs = int(min(max(fewest, -(-(1500 if images else 500) // steps)), 100 if images else 80))
    backbone, backbone_options = _default_backbone(bags, chosen)
    chunked = not images and float(sizes.max()) > 4 * CHUNK_INSTANCES and issubclass(find_head(head), SumHead)
    has_weights = chosen.pretrained is not None and chosen.pretrained.state is not None
    options = _tilt_defaults(bags) if head == "tilt" else {}
    if chosen.options and set(chosen.options) <= set(head_options(head)):  # else they belong to another head
        options = {**options, **chosen.options}
    options, backbone_options = tuple(options.items()), tuple(backbone_options.items())
    model_config = ModelConfig.for_bags(bags, head=head, options=options, backbone=backbone, backbone_options=backbone_options)
    train_config = TrainConfig(
        epochs=chosen.epochs if chosen.epochs is not None else epochs, batch_bags=batch_bags,
        batch_instances=step_instances, chunk_instances=CHUNK_INSTANCES if chunked else 0, optimizer="adamw",
        lr=(1e-4 if has_weights else 1e-3) if images else 2e-3,  # pretrained weights change slowly
        weight_decay=0.05 if images else 0.5, decay="weights", schedule="cosine", warmup=0.05, selection="mean",
        views=chosen.views or ("digit" if images else "feature"),
    )  # fmt: skip
    return model_config, replace(train_config, **(chosen.training or {}))


def _default_backbone(bags: Bags, chosen: NetworkOptions) -> tuple[CustomBackbone | str, dict[str, Any]]:
    """The backbone chosen, or the default one, with options for instances like these."""
    if chosen.backbone is not None and not isinstance(chosen.backbone, str):
        return chosen.backbone, {}
    if chosen.pretrained is not None:
        return chosen.pretrained.name, chosen.pretrained.options
    images = bags.pool.kind == "images"
    side = min(bags.pool.shape[:2]) if images else 0
    small = images and 8 <= side <= 64  # a quarter of the time (benchmarks/pictures.py)
    name = chosen.backbone or ("quick" if small else "resnet18" if images else "mlp")
    stem = "small" if side <= 20 else "pool" if side <= 64 else "paper"
    width = {"width": 32 if side <= 20 else 64}
    defaults = {"quick": width, "resnet18": {"stem": stem, **width}, "mlp": MLP_OPTIONS}
    return check_choice("backbone", name, BACKBONES), defaults.get(name, {})


def _tilt_defaults(bags: Bags) -> dict[str, Any]:
    largest = int(bags.sizes.max())
    if largest == 1:  # bag labels are instance labels: there is no vote and nothing to estimate
        return {"bag": 0.0, "teach": 0.0}
    if largest > splits.MAX_BAG_SIZE and bags.pool.kind != "images":  # without the vote, pieces of a bag serve as well
        return {"over": "instances", "bag": 0.0, "piece": len(bags) / len(split_large_bags(bags))}
    return {}
