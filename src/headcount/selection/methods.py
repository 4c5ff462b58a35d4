"""Candidates: what ``headcount fit`` tries. Each is a name, and a way from training and validation bags to a body that answers.

    tilt         a network under the tilt (models/heads/tilt.py): for every kind of data
    em_forest    a random forest, by EM under the tilt (training/em.py): tables, texts, features
    count        the Counting Network
    forest       a random forest on the bag's label as every instance's label: a baseline, always shown
    logistic     a logistic regression on the same: a baseline, always shown
    noisy_label  a network on the same: the baseline for pictures

Any head's name is a candidate too, as a network with that head, and any scikit-learn classifier, by EM.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headcount.bags import Bags
from headcount.bags.splits import split_large_bags, subsample_instances
from headcount.errors import HeadcountError, check_choice
from headcount.experiments.recipe import Recipe
from headcount.majority import transition as tilt
from headcount.models.heads import HEADS, check_options, find_head, head_options
from headcount.models.heads.tilt import estimated_transition
from headcount.models.library_backbones import PretrainedBackbone
from headcount.models.network import Model, build_model
from headcount.models.trees import LinearModel, SklearnModel, Trees, from_sklearn, is_savable
from headcount.readers.standard_scaler import StandardScaler
from headcount.selection.network_defaults import network_recipe
from headcount.training import loop
from headcount.training.augment import FEATURE_VIEWS, VIEWS
from headcount.training.em import check_classifier, em

Estimator = Model | Trees | LinearModel | SklearnModel
MethodProgress = Callable[[float, str], None]  # the share done, and a word on how it goes
TABLE_METHODS = ("tilt", "em_forest", "forest", "logistic", "count")
IMAGE_METHODS = ("tilt", "noisy_label")
BASELINES = ("forest", "logistic", "noisy_label")
OPTIONAL_METHODS = ("count",)
FIXED_COST_METHODS = ("forest", "logistic")  # neither epochs nor rounds: they cannot be had by halves
METHODS = tuple(dict.fromkeys([*TABLE_METHODS, *IMAGE_METHODS, *HEADS]))
MAX_FIT_INSTANCES = 50_000  # instances a forest or a logistic regression is shown; more of the same teach it little
N_TREES = 100
INSTANCES_PER_TREE = 10_000  # instances
EM_ROUNDS = 6


@dataclass(frozen=True)
class FitResult:
    """A body, the tilt it found on its way (None: it looked for none), and its learning curve. ``believed``: it learned the
    bag's label of each instance, as baselines do, and EM does whose first round is the best."""

    estimator: Estimator
    transition: tilt.Transition | None
    curve: list[tuple[float, float]]  # training loss (NaN where there is none) and validation loss
    best_epoch: int  # the epoch or round kept, from 1
    naive_labels: bool


@dataclass(frozen=True)
class Method:
    """One way to fit. ``recipe`` for networks, ``classifier`` for the others; ``rounds`` 0: the bag's label is believed.
    ``start``: whose backbone a network has, and the weights it begins with, if they are not its own."""

    name: str
    title: str
    recipe: Recipe | None = None
    classifier: Any = None
    rounds: int = 0
    start: PretrainedBackbone | None = None

    @property
    def baseline(self) -> bool:
        return self.name in BASELINES

    def fit(
        self,
        train: Bags,
        valid: Bags,
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
        epoch_fraction: float = 1.0,
        work: Path | None = None,
        on_progress: MethodProgress | None = None,
    ) -> FitResult:
        """Learn from blind bags. ``effort``: the share of epochs or rounds to spend. ``work``: a folder for checkpoints."""
        if self.recipe is not None:
            return self._fit_network(train, valid, seed, device, epoch_fraction, work, on_progress)
        rounds = -(-self.rounds * epoch_fraction // 1) if self.rounds else 0
        steps = int(rounds) + 1
        tell = (lambda r, loss: on_progress((r + 1) / steps, f"round {r} of {steps - 1}")) if on_progress else None
        few = [subsample_instances(b, MAX_FIT_INSTANCES, seed) for b in (train, valid)]
        done = em(self.classifier, *few, rounds=int(rounds), seed=seed, on_progress=tell)
        classes = len(train.classes)
        body = (
            from_sklearn(done.classifier, classes)
            if is_savable(done.classifier)
            else SklearnModel(done.classifier, classes)
        )
        curve = [(float("nan"), loss) for loss in done.curve]
        return FitResult(
            body,
            done.transition if self.rounds else None,
            curve,
            done.best_round + 1,
            naive_labels=done.best_round == 0,
        )

    def _fit_network(
        self,
        train_bags: Bags,
        valid_bags: Bags,
        seed: int,
        device: Any,
        epoch_fraction: float,
        work: Path | None,
        on_progress: MethodProgress | None,
    ) -> FitResult:
        assert self.recipe is not None
        recipe = self.recipe.replace(seed=seed, epochs=max(1, round(self.recipe.epochs * epoch_fraction)))
        tell = (
            (lambda p: on_progress(p.epoch / recipe.epochs, f"epoch {p.epoch} of {recipe.epochs}"))
            if on_progress
            else None
        )
        if "piece" in dict(recipe.options):
            train_bags, valid_bags = split_large_bags(train_bags), split_large_bags(valid_bags)
        if self.start is None:
            model = build_model(recipe.model_config(train_bags), train_bags, seed=recipe.seed).to(device)
        else:
            config, start = recipe.model_config(train_bags), self.start
            model = build_model(config, train_bags, seed=recipe.seed, mean=start.mean, std=start.std).to(device)
            self.start.load_into(model.backbone)
        done = loop.train(
            model, train_bags.to(device), valid_bags.to(device), recipe.train_config, work_dir=work, on_progress=tell
        )
        if not done.progress.best_epoch:
            raise HeadcountError(f"{self.title}: the validation loss was never a number; leave this method out")
        model = done.model.cpu()
        return FitResult(
            model, estimated_transition(model.head), done.progress.curve, done.progress.best_epoch, self.baseline
        )

    def metadata(self) -> dict[str, Any]:
        """How it learns, for people: parameters that are one word or number (selection/resume.py knows them all)."""
        if self.recipe is not None:
            said = {k: v for k, v in self.recipe.changes.items() if k != "source"}
            return said if self.start is None else {**said, "start": self.start.metadata}
        said = {k: v for k, v in self.classifier.get_params().items() if isinstance(v, (int, float, str, bool))}
        return {"classifier": type(self.classifier).__name__, "rounds": self.rounds, **said}


def methods(
    method: Any,
    bags: Bags,
    *,
    head: str | None = None,
    backbone: str | None = None,
    views: str | None = None,
    epochs: int | None = None,
    options: dict[str, Any] | None = None,
    start: PretrainedBackbone | None = None,
) -> list[Method]:
    """The candidates for such bags. ``method``: "auto", a name, several with commas, or a scikit-learn classifier.
    ``start``: a backbone of somebody else's, which is trained."""
    pictures = bags.pool.kind == "images"
    method = resolve_method(method, head)
    if not isinstance(method, str):
        check_classifier(method)
        if pictures:
            raise HeadcountError(
                f"{type(method).__name__} reads features, and these are pictures; use tilt, or a frozen backbone"
            )
        made = [Method("classifier", f"EM, {type(method).__name__}", classifier=method, rounds=EM_ROUNDS)]
        names = ["forest", "logistic"]
    else:
        made, names = [], _method_names(method, pictures)
    networks = [name for name in names if name in HEADS]
    how = {"backbone": backbone, "views": views, "epochs": epochs, "options": options or {}, "start": start}
    idle = [name for name in ("backbone", "views", "epochs", "options") if how[name] is not None and how[name] != {}]
    if idle and not networks:
        raise HeadcountError(f"{', '.join(idle)}: for networks, and method {method} is none; leave it out")
    if not pictures and views in VIEWS and views not in FEATURE_VIEWS:
        raise HeadcountError(
            f"views {views!r} are for pictures, and these are features; leave views out, or use 'feature'"
        )
    if options:
        check_options(networks[0], options)  # they are the first network's; those that nobody named do without
        named = [n for n in networks[1:] if method != "auto" and n not in BASELINES]
        if deaf := [n for n in named if not set(options) <= set(head_options(n))]:
            raise HeadcountError(
                f"options {', '.join(options)} are {networks[0]}'s, and {deaf[0]} has no such; fit the two one by one, or "
                "leave the options out"
            )
    return made + [_build_method(name, bags, pictures, how) for name in names]


def resolve_method(method: Any, head: str | None = None) -> Any:
    """The method, a head's name being one too, if all its names are there: no data are needed to tell that."""
    if head is not None:
        reject_custom_head(head)
        check_choice("head", head, HEADS)
        if method != "auto":
            raise HeadcountError(
                f"head {head} and method {method} were both given; a head's name is a method: give one"
            )
        return head
    for name in split_names(method) if isinstance(method, str) and method != "auto" else ():
        reject_custom_head(name)
        if check_choice("method", name, ["auto", *METHODS]) == "auto":
            raise HeadcountError(f"method {method}: auto chooses by itself; give it alone, or names without it")
    return method


def split_names(method: str) -> list[str]:
    """Each name of a list with commas, once."""
    return list(dict.fromkeys(m.strip() for m in method.split(",")))


def _method_names(method: str, images: bool) -> list[str]:
    """The methods that were asked for, and the baselines that are always shown."""
    usual = list(IMAGE_METHODS if images else TABLE_METHODS)
    if method == "auto":
        return usual
    asked = split_names(method)
    return [*asked, *(n for n in usual if n in BASELINES and n not in asked)]


def reject_custom_head(name: str) -> None:
    """Refuse a head of one's own where a model is left behind."""
    if ":" in name:
        raise HeadcountError(
            f"{name} is a head of one's own, which run, study and probe take: what is fitted is a model to be saved, and "
            "loading a model never runs code; to fit with it, add the head to HEADS (CONTRIBUTING.md)"
        )


def _build_method(name: str, bags: Bags, images: bool, options: dict[str, Any]) -> Method:
    if name in ("em_forest", "forest", "logistic"):
        if images:
            raise HeadcountError(f"method {name} reads features, and these are pictures; use tilt or another network")
        if name == "logistic":
            return Method(name, "Logistic regression on the bag's label", classifier=logistic_regression())
        title = "EM, random forest" if name == "em_forest" else "Random forest on the bag's label"
        trees = random_forest(len(bags.index))
        return Method(name, title, classifier=trees, rounds=EM_ROUNDS if name == "em_forest" else 0)
    if find_head(name).uses_instance_labels and bags.known is None:
        raise HeadcountError(
            f"method {name} learns from known instance classes, and there are none; name them with known="
        )
    title = "Network on the bag's label" if name == "noisy_label" else f"{find_head(name).title}, network"
    return Method(name, title, recipe=network_recipe(name, bags, **options), start=options["start"])


def random_forest(instances: int = 0) -> Any:
    """A random forest; of many instances each tree sees some."""
    from sklearn.ensemble import RandomForestClassifier

    part = INSTANCES_PER_TREE / max(1, min(instances, MAX_FIT_INSTANCES))
    some = {"max_samples": part} if part < 1 else {}
    return RandomForestClassifier(N_TREES, min_samples_leaf=3, n_jobs=torch.get_num_threads(), **some)


def logistic_regression() -> Any:
    """Logistic regression that standardises its columns, and answers for columns as they come."""
    from sklearn.linear_model import LogisticRegression

    class Logistic(LogisticRegression):
        def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Any:
            scaler = StandardScaler.fit(X, min_deviation=1e-9)
            super().fit(scaler.transform(X, np.float64), y, sample_weight)
            self.coef_ = self.coef_ / scaler.scale_
            self.intercept_ = self.intercept_ - self.coef_ @ scaler.mean_
            return self

    return Logistic(max_iter=300, tol=1e-3)
