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

from headcount.bags import Bags, tilt
from headcount.errors import HeadcountError, choose
from headcount.judging.fewer import in_pieces, thinned
from headcount.judging.networks import recipe_for
from headcount.judging.run import fresh_model
from headcount.models.forest import Forest, Held, Linear, from_sklearn, savable
from headcount.models.heads import HEADS, check_options, find_head, head_options
from headcount.models.model import Model
from headcount.models.vision import Start
from headcount.training.em import check, em
from headcount.training.recipe import Recipe
from headcount.training.train import fit
from headcount.training.views import FEATURE_VIEWS, VIEWS

Body = Model | Forest | Linear | Held
Watch = Callable[[float, str], None]  # the share done, and a word on how it goes
TABLES = ("tilt", "em_forest", "forest", "logistic", "count")
PICTURES = ("tilt", "noisy_label")
BASELINES = ("forest", "logistic", "noisy_label")
OPTIONAL = ("count",)
WHOLE = ("forest", "logistic")  # neither epochs nor rounds: they cannot be had by halves
METHODS = tuple(dict.fromkeys([*TABLES, *PICTURES, *HEADS]))
MOST = 50_000  # instances a forest or a logistic regression is shown; more of the same teach it little
TREES = 100
PER_TREE = 10_000  # instances
ROUNDS = 6


@dataclass(frozen=True)
class Trained:
    """A body, the tilt it found on its way (None: it looked for none), and its learning curve. ``believed``: it learned the
    bag's label of each instance, as baselines do, and EM does whose first round is the best."""

    body: Body
    tilt: tilt.Tilt | None
    curve: list[tuple[float, float]]  # training loss (NaN where there is none) and validation loss
    best: int  # the epoch or round kept, from 1
    believed: bool


@dataclass(frozen=True)
class Candidate:
    """One way to fit. ``recipe`` for networks, ``classifier`` for the others; ``rounds`` 0: the bag's label is believed.
    ``start``: whose backbone a network has, and the weights it begins with, if they are not its own."""

    name: str
    title: str
    recipe: Recipe | None = None
    classifier: Any = None
    rounds: int = 0
    start: Start | None = None

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
        effort: float = 1.0,
        work: Path | None = None,
        watch: Watch | None = None,
    ) -> Trained:
        """Learn from blind bags. ``effort``: the share of epochs or rounds to spend. ``work``: a folder for checkpoints."""
        if self.recipe is not None:
            return self._network(train, valid, seed, device, effort, work, watch)
        rounds = -(-self.rounds * effort // 1) if self.rounds else 0
        steps = int(rounds) + 1
        tell = (lambda r, loss: watch((r + 1) / steps, f"round {r} of {steps - 1}")) if watch else None
        few = [thinned(b, MOST, seed) for b in (train, valid)]
        done = em(self.classifier, *few, rounds=int(rounds), seed=seed, watch=tell)
        classes = len(train.classes)
        body = from_sklearn(done.classifier, classes) if savable(done.classifier) else Held(done.classifier, classes)
        curve = [(float("nan"), loss) for loss in done.curve]
        return Trained(body, done.tilt if self.rounds else None, curve, done.round + 1, believed=done.round == 0)

    def _network(
        self, train: Bags, valid: Bags, seed: int, device: Any, effort: float, work: Path | None, watch: Watch | None
    ) -> Trained:
        assert self.recipe is not None
        recipe = self.recipe.but(seed=seed, epochs=max(1, round(self.recipe.epochs * effort)))
        tell = (lambda p: watch(p.epoch / recipe.epochs, f"epoch {p.epoch} of {recipe.epochs}")) if watch else None
        if "piece" in dict(recipe.options):
            train, valid = in_pieces(train), in_pieces(valid)
        if self.start is None:
            model = fresh_model(recipe, train).to(device)
        else:
            model = fresh_model(recipe, train, self.start.mean, self.start.std).to(device)
            self.start.into(model.backbone)
        done = fit(model, train.to(device), valid.to(device), recipe, work=work, watch=tell)
        if not done.progress.best_epoch:
            raise HeadcountError(f"{self.title}: the validation loss was never a number; leave this method out")
        model = done.model.cpu()
        return Trained(model, model.head.estimate, done.progress.curve, done.progress.best_epoch, self.baseline)

    def facts(self) -> dict[str, Any]:
        """How it learns, for people: parameters that are one word or number (judging/begun.py knows them all)."""
        if self.recipe is not None:
            said = {k: v for k, v in self.recipe.changes.items() if k != "source"}
            return said if self.start is None else {**said, "start": self.start.facts}
        said = {k: v for k, v in self.classifier.get_params().items() if isinstance(v, (int, float, str, bool))}
        return {"classifier": type(self.classifier).__name__, "rounds": self.rounds, **said}


def candidates(
    method: Any,
    bags: Bags,
    *,
    head: str | None = None,
    backbone: str | None = None,
    views: str | None = None,
    epochs: int | None = None,
    options: dict[str, Any] | None = None,
    start: Start | None = None,
) -> list[Candidate]:
    """The candidates for such bags. ``method``: "auto", a name, several with commas, or a scikit-learn classifier.
    ``start``: a backbone of somebody else's, which is trained."""
    pictures = bags.pool.kind == "images"
    method = method_of(method, head)
    if not isinstance(method, str):
        check(method)
        if pictures:
            raise HeadcountError(
                f"{type(method).__name__} reads features, and these are pictures; use tilt, or a frozen backbone"
            )
        made = [Candidate("classifier", f"EM, {type(method).__name__}", classifier=method, rounds=ROUNDS)]
        names = ["forest", "logistic"]
    else:
        made, names = [], _names(method, pictures)
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
    return made + [_candidate(name, bags, pictures, how) for name in names]


def method_of(method: Any, head: str | None = None) -> Any:
    """The method, a head's name being one too, if all its names are there: no data are needed to tell that."""
    if head is not None:
        not_from_a_file(head)
        choose("head", head, HEADS)
        if method != "auto":
            raise HeadcountError(
                f"head {head} and method {method} were both given; a head's name is a method: give one"
            )
        return head
    for name in names_in(method) if isinstance(method, str) and method != "auto" else ():
        not_from_a_file(name)
        if choose("method", name, ["auto", *METHODS]) == "auto":
            raise HeadcountError(f"method {method}: auto chooses by itself; give it alone, or names without it")
    return method


def names_in(method: str) -> list[str]:
    """Each name of a list with commas, once."""
    return list(dict.fromkeys(m.strip() for m in method.split(",")))


def _names(method: str, pictures: bool) -> list[str]:
    """The methods that were asked for, and the baselines that are always shown."""
    usual = list(PICTURES if pictures else TABLES)
    if method == "auto":
        return usual
    asked = names_in(method)
    return [*asked, *(n for n in usual if n in BASELINES and n not in asked)]


def not_from_a_file(name: str) -> None:
    """Refuse a head of one's own where a model is left behind."""
    if ":" in name:
        raise HeadcountError(
            f"{name} is a head of one's own, which run, study and probe take: what is fitted is a model to be saved, and "
            "loading a model never runs code; to fit with it, add the head to HEADS (CONTRIBUTING.md)"
        )


def _candidate(name: str, bags: Bags, pictures: bool, how: dict[str, Any]) -> Candidate:
    if name in ("em_forest", "forest", "logistic"):
        if pictures:
            raise HeadcountError(f"method {name} reads features, and these are pictures; use tilt or another network")
        if name == "logistic":
            return Candidate(name, "Logistic regression on the bag's label", classifier=logistic())
        title = "EM, random forest" if name == "em_forest" else "Random forest on the bag's label"
        trees = forest(len(bags.index))
        return Candidate(name, title, classifier=trees, rounds=ROUNDS if name == "em_forest" else 0)
    if find_head(name).told and bags.known is None:
        raise HeadcountError(
            f"method {name} learns from known instance classes, and there are none; name them with known="
        )
    title = "Network on the bag's label" if name == "noisy_label" else f"{find_head(name).title}, network"
    return Candidate(name, title, recipe=recipe_for(name, bags, **how), start=how["start"])


def forest(instances: int = 0) -> Any:
    """A random forest; of many instances each tree sees some."""
    from sklearn.ensemble import RandomForestClassifier

    part = PER_TREE / max(1, min(instances, MOST))
    some = {"max_samples": part} if part < 1 else {}
    return RandomForestClassifier(TREES, min_samples_leaf=3, n_jobs=torch.get_num_threads(), **some)


def logistic() -> Any:
    """Logistic regression that standardises its columns, and answers for columns as they come."""
    from sklearn.linear_model import LogisticRegression

    class Logistic(LogisticRegression):
        def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Any:
            mean, scale = X.mean(0, dtype=np.float64), X.std(0, dtype=np.float64)
            scale = np.where(scale > 1e-9, scale, 1.0)
            super().fit((X - mean) / scale, y, sample_weight)
            self.coef_ = self.coef_ / scale
            self.intercept_ = self.intercept_ - self.coef_ @ mean
            return self

    return Logistic(max_iter=300, tol=1e-3)
