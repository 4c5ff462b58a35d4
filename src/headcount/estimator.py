"""MajorityClassifier: instances learned from majority labels, in scikit-learn's manner.

Three ways to say who is in which bag:

    fit(X, y, bags=ids)        one id per row; y is the label of the row's bag, the same in all its rows
    fit(list_of_bags, y)       one array per bag, one label per bag
    bags="street" or bags=0    given to the constructor or to fit: a column of a DataFrame, or of an array, that is the bag.
                               It is no feature: it is taken off, of the bags in a list too

Plain ``fit(X, y)`` takes every row for a bag of its own: ordinary classification. ``groups`` is no parameter, and on purpose:
scikit-learn's searches hand groups to the splitter only, so the estimator would silently see no bags. Inside a search use a
column or a list of bags, which reach ``fit`` and ``score`` alike:

    >>> import numpy as np
    >>> from sklearn.linear_model import LogisticRegression
    >>> from sklearn.model_selection import GridSearchCV
    >>> from headcount.estimator import BagKFold, MajorityClassifier
    >>> g = np.random.default_rng(0)
    >>> bag = np.repeat(np.arange(20), 5)
    >>> truth = np.where(g.random(100) < 0.7, bag % 2, g.integers(0, 2, 100))
    >>> X = np.column_stack([bag, truth + 0.3 * g.normal(size=100)])
    >>> model = MajorityClassifier(LogisticRegression(), bags=0)
    >>> search = GridSearchCV(model, {"estimator__C": [0.1, 10]}, cv=BagKFold(4, bags=0)).fit(X, bag % 2)
    >>> float((search.predict(X) == truth).mean()) > 0.9
    True
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_array
from sklearn.utils.validation import check_is_fitted, validate_data

from headcount.bagkfold import BagKFold
from headcount.bags import Bags, Pool
from headcount.data.learned import Learned
from headcount.data.read.found import said_alike
from headcount.data.standard import Standard
from headcount.data.values import as_names, plain
from headcount.errors import HeadcountError, HeadcountWarning, choose
from headcount.judging import crossval
from headcount.judging.candidates import METHODS, Candidate, candidates, not_from_a_file
from headcount.judging.sight import sight
from headcount.judging.validated import validated
from headcount.membership import (
    Membership,
    as_list,
    column_of,
    column_to_fit,
    labels_of,
    numbers_of,
    stacked,
    unwrapped,
    weights_of,
    without,
)
from headcount.models.eye import Eye
from headcount.models.fitted import Answer, Fitted
from headcount.models.heads import HEADS, find_head
from headcount.models.model import Model
from headcount.models.rebased import outward
from headcount.training.seeds import seed_of
from headcount.training.speed import device_for

_log = logging.getLogger(__name__)  # a download is said before it happens


@dataclass(frozen=True)
class Shares:
    """The classes' shares in each of B bags, with intervals: (B, C) each, in the order of ``bags``."""

    bags: np.ndarray  # (B,) ids, in order of first appearance; of a list of bags their numbers
    share: np.ndarray
    low: np.ndarray
    high: np.ndarray


class MajorityClassifier(ClassifierMixin, BaseEstimator):
    """A classifier of instances that is told only which class each bag holds most of.

    ::

        estimator    any scikit-learn classifier with predict_proba (by EM; it gets the numbers as they are given), or one name
                     of those ``headcount fit --method`` knows, with the same meaning: "tilt" (a network under the tilt),
                     "em_forest" (a random forest, by EM), a head's name (a network with it), and the baselines that believe
                     the bag's label of every instance, "forest", "logistic" and "noisy_label"; all on standardised columns
        bags         the column of X that is the bag: a name, or a number. None: ``fit`` is told, or every row is a bag of one
        backbone     of networks: mlp, linear; for pictures (lists of uint8 arrays (n, H, W, channels)) quick, resnet18, and
                     timm:NAME or torchvision:NAME (headcount[vision]), with the next three
        frozen       True: features of it are computed once, and any estimator learns on them; False: a network that is trained.
                     None: frozen, unless weights are "none"
        weights      None or "pretrained" (the library may download them), "none", or FILE.safetensors
        size         pictures become squares of this side
        epochs       of networks; None: as many as the number of bags suggests
        options      of the head
        device       auto, cpu or cuda
        random_state an int, a RandomState or Generator, or None for 0: results can always be repeated

    Attributes: ``classes_``; ``n_features_in_`` (without the bag column) and, of DataFrames, ``feature_names_in_``; neither is
    there for pictures; ``fitted_`` (a :class:`Fitted`, which can be saved); ``tilt_`` (what the bags' labels say of instances).
    """

    def __init__(
        self,
        estimator: Any = "tilt",
        *,
        bags: str | int | None = None,
        backbone: str | None = None,
        frozen: bool | None = None,
        weights: str | None = None,
        size: int | None = None,
        epochs: int | None = None,
        options: dict[str, Any] | None = None,
        device: str = "auto",
        random_state: Any = None,
    ) -> None:
        self.estimator = estimator
        self.bags = bags
        self.backbone = backbone
        self.frozen = frozen
        self.weights = weights
        self.size = size
        self.epochs = epochs
        self.options = options
        self.device = device
        self.random_state = random_state

    # -- fitting ------------------------------------------------------------------------------------------------------

    def fit(self, X: Any, y: Any, bags: Any = None, weight: Any = None) -> MajorityClassifier:
        """Learn from bags. ``bags``: ids, or a column of X. ``weight``: how often each instance counts; for a list of bags a
        list of arrays, or one number per row."""
        self.bags_ = column_to_fit(self.bags, bags)
        x, ids = self._taken(X, bags, fitting=True)
        if y is None:
            raise ValueError("This MajorityClassifier requires y to be passed, but the target y is None.")
        label, heavy = labels_of(y, ids, len(x)), weights_of(weight, ids, len(x))
        self.classes_, code = np.unique(label, return_inverse=True)
        if len(self.classes_) < 2:
            only = self.classes_.tolist()[0]
            raise HeadcountError(f"all bags have one class, {only!r}; a majority needs at least two classes")
        for line in said_alike(list(map(str, self.classes_))):
            warnings.warn(line, HeadcountWarning, stacklevel=2)
        self._told_apart = ids.spoken
        method = self._method()
        self._standard = Standard.of(x) if isinstance(method, str) and x.ndim == 2 else None
        held = Bags.of(
            self._pool(x[ids.order]), sizes=ids.sizes, labels=code, classes=[str(c) for c in range(len(self.classes_))],
            weight=None if heavy is None else heavy[ids.order],
        )  # fmt: skip
        self._inner = self._learned(method, held)
        names, bag = getattr(self, "feature_names_in_", None), self.bags_ if isinstance(self.bags_, str) else None
        self.fitted_ = self._inner if x.ndim != 2 else outward(self._inner, x, self._standard, names, bag)
        self.tilt_ = self._inner.tilt
        return self

    def _method(self) -> Any:
        """What to fit: a classifier, or one name."""
        if not isinstance(self.estimator, str):
            return self.estimator
        if self.estimator == "auto" or "," in self.estimator:
            raise HeadcountError(
                f"MajorityClassifier fits one method, got {self.estimator!r}; give one of {', '.join(METHODS)}, or let "
                "headcount.fit_reading compare several"
            )
        not_from_a_file(self.estimator)
        if choose("estimator", self.estimator, METHODS) in HEADS and find_head(self.estimator).told:
            raise HeadcountError(
                f"{self.estimator!r} learns from known instance classes, which MajorityClassifier is not told; name them to "
                "headcount.read (Named(known=...)) and give what was read to headcount.fit_reading"
            )
        return self.estimator

    def _learned(self, method: Any, held: Bags) -> Fitted:
        """The model, asked about instances as they lie in our pools."""
        seed, device = seed_of(self.random_state), device_for(self.device)
        learned = Learned(held.pool.kind, shape=held.pool.shape)
        own: dict[str, Any] = {"frozen": self.frozen, "weights": self.weights, "size": self.size}
        held, start, eye, _ = sight(held, self.backbone, device, tell=_log.warning, **own)
        chosen = self._chosen(method, held, start, eye)
        split = crossval.inner(held, np.arange(len(held)), np.zeros(0, int), seed)
        trained = chosen.fit(held.take(split.train), held.take(split.valid), seed=seed, device=device)
        names = tuple(plain(c) or "" for c in self.classes_)  # as files name them
        names = names if len(set(names)) == len(names) else held.classes
        told = validated(trained, held, split, device, apart=self._told_apart)
        facts = {"method": {"name": chosen.name, "baseline": trained.believed}}
        return Fitted(trained.body, names, learned, facts=facts, eye=eye, **told)

    def _chosen(self, method: Any, held: Bags, start: Any, eye: Eye | None) -> Candidate:
        how: dict[str, Any] = {"epochs": self.epochs, "options": self.options}
        if eye is None:
            how |= {"backbone": self.backbone, "start": start}
        return candidates(method, held, **how)[0]

    # -- asking -------------------------------------------------------------------------------------------------------

    def predict_proba(self, X: Any, bags: Any = None) -> Any:
        """(N, C) of instances, columns as ``classes_``; for a list of bags a list of arrays. X may lack the bag column: heads
        that judge an instance by its bag (``whole_bag`` in ``headcount heads --json``) then see each row alone."""
        return self._answered(X, bags, lambda p: p)

    def predict(self, X: Any, bags: Any = None) -> Any:
        """(N,) classes of instances; for a list of bags a list of arrays. Bags are to it what they are to predict_proba."""
        return self._answered(X, bags, lambda p: self.classes_[p.argmax(1)])

    def predict_bags(self, X: Any, bags: Any = None) -> np.ndarray:
        """(B,) the label each bag is said to have, in order of first appearance: the head's own word on the bag, or the class
        with the largest mean probability where it has none."""
        x, ids = self._asked(X, bags)
        return self.classes_[self._said(x, ids)[1].bag.argmax(1).numpy()]

    def predict_shares(self, X: Any, bags: Any = None, level: float = 0.95) -> Shares:
        """The classes' shares in each bag, as its instances make them likely (:meth:`Fitted.shares`)."""
        if not 0 < level < 1:
            raise HeadcountError(f"level lies between 0 and 1, got {level!r}")
        x, ids = self._asked(X, bags)
        held, said = self._said(x, ids)
        found = self._inner.shares(said.alone, held, level=level)
        return Shares(ids.names, *(t.double().numpy() for t in found))

    def score(self, X: Any, y: Any, bags: Any = None) -> float:  # ty: ignore[lost-keyword-for-regular-parameter]
        """The share of bags whose label is said right (:meth:`predict_bags`)."""
        x, ids = self._asked(X, bags)
        label = as_names(labels_of(y, ids, len(x)))
        return float(np.mean(as_names(self.classes_)[self._said(x, ids)[1].bag.argmax(1).numpy()] == label))

    # -- inner --------------------------------------------------------------------------------------------------------

    def _answered(self, X: Any, bags: Any, then: Any) -> Any:
        check_is_fitted(self)
        body = self._inner.body
        x, ids = self._taken(X, bags, bagged="where said" if isinstance(body, Model) and body.by_bag else "never")
        said = then(self._said(x, ids)[1].instance[np.argsort(ids.order)].numpy())
        return np.split(said, np.cumsum(ids.sizes)[:-1]) if ids.listed else said

    def _said(self, x: np.ndarray, ids: Membership) -> tuple[Bags, Answer]:
        """The bags, rows in the order of ``ids``, and what the model says of them."""
        nothing = [-1] * len(ids.sizes)
        held = Bags.of(self._pool(x[ids.order]), sizes=ids.sizes, labels=nothing, classes=len(self.classes_))
        return held, self._inner.say(held)

    def _asked(self, X: Any, bags: Any) -> tuple[np.ndarray, Membership]:
        check_is_fitted(self)
        x, ids = self._taken(X, bags)
        if self._told_apart and not ids.spoken:
            raise HeadcountError(
                "this model was fitted on bags, and nothing says which rows of X are one bag; give bags=, or, inside a "
                "search, a column (MajorityClassifier(bags=...)) or a list of bags"
            )
        return x, ids

    def _pool(self, x: np.ndarray) -> Pool:
        """Networks, and forests of ours, get standardised float32; a classifier of scikit-learn's what it was given."""
        if x.ndim != 2:
            return Pool(x)
        if self._standard is None:
            return Pool(x, trusted=True, exact=True)
        return Pool(self._standard.apply(x), trusted=True)

    def _taken(self, X: Any, bags: Any, fitting: bool = False, bagged: str = "always") -> tuple[np.ndarray, Membership]:
        """(N, D) numbers, and who is in which bag. ``bagged``: who wants to know that, of a column of X."""
        X, bags, ids = unwrapped(X), unwrapped(bags), None
        column = column_of(bags)
        if bags is not None and column is None:
            ids = bags
        column = self.bags_ if column is None else column
        if (listed := as_list(X)) is not None:
            if ids is not None:
                raise HeadcountError(
                    "X is a list of bags, and bags= gives ids besides; a list says the bags: leave ids out"
                )
            return self._stacked(listed, column, fitting)
        if column is not None:
            width = None if fitting else self.n_features_in_
            X, found = without(X, column, width, need=bagged == "always" and ids is None)
            ids = found if ids is None and bagged != "never" else ids  # an instance needs no bag, nor a good id
        with numbers_of(X):
            x = validate_data(self, X, reset=fitting, dtype=NUMBERS, ensure_min_samples=2 if fitting else 1)
        return x, Membership.single(len(x)) if ids is None else Membership.among(ids, len(x))

    def _stacked(self, listed: list[Any], column: str | int | None, fitting: bool) -> tuple[np.ndarray, Membership]:
        """A list of bags, as one array."""
        width = None if fitting else getattr(self, "n_features_in_", None)
        known = None if fitting else getattr(self, "feature_names_in_", None)
        x, names = stacked(listed, column, width, known)
        ids = Membership.of([len(b) for b in listed])
        if x.ndim == 4:
            return x, ids
        if names is None or not all(isinstance(n, str) for n in names):
            return validate_data(self, x, reset=fitting, dtype=NUMBERS), ids
        # scikit-learn knows no names of what is stacked
        with numbers_of(x, names):
            x = check_array(x, dtype=NUMBERS, estimator=self, input_name="X")
        if fitting:
            self.n_features_in_, self.feature_names_in_ = x.shape[1], np.asarray(names, dtype=object)
        elif known is None and x.shape[1] != self.n_features_in_:
            raise HeadcountError(f"X has {x.shape[1]} columns, and the model was fitted on {self.n_features_in_}")
        return x, ids

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.non_deterministic = False
        return tags


NUMBERS = [np.float64, np.float32]  # what X may stay as; everything else becomes the first


__all__: Sequence[str] = ["BagKFold", "MajorityClassifier", "Shares"]
