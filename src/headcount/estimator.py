"""MajorityClassifier: instances learned from majority labels, in scikit-learn's manner; BagKFold: folds that split no bag.

Three ways to say who is in which bag:

    fit(X, y, bags=ids)        one id per row; y is the label of the row's bag, the same in all its rows
    fit(list_of_bags, y)       one array per bag, one label per bag
    bags="street" or bags=0    given to the constructor or to fit: a column of a DataFrame, or of an array, that is the bag

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.validation import check_is_fitted, validate_data

from headcount.bags import Bags, Pool
from headcount.data.learned import Learned
from headcount.errors import HeadcountError
from headcount.judging import crossval, shares
from headcount.judging.candidates import candidates
from headcount.judging.sight import sight
from headcount.membership import Membership, as_list, labels_of, without
from headcount.models.fitted import Fitted
from headcount.training.criterion import label_loss
from headcount.training.speed import device_for
from headcount.training.splits import deal

_log = logging.getLogger(__name__)  # a download is said before it happens


@dataclass(frozen=True)
class Shares:
    """The classes' shares in each of B bags, with intervals: (B, C) each, in the order of ``bags``."""

    bags: np.ndarray  # (B,) ids, in order of first appearance
    share: np.ndarray
    low: np.ndarray
    high: np.ndarray


class MajorityClassifier(ClassifierMixin, BaseEstimator):
    """A classifier of instances that is told only which class each bag holds most of.

    ::

        estimator    "tilt" (a network under the tilt), "forest" (a random forest, by EM), a head's name (a network with it), or
                     any scikit-learn classifier with predict_proba (by EM)
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
        random_state an int, a RandomState, or None for 0: results can always be repeated

    Attributes: ``classes_``, ``n_features_in_`` (without the bag column), ``fitted_`` (a :class:`Fitted`, which can be saved),
    ``tilt_`` (what the bags' labels say of instances).
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
        """Learn from bags. ``bags``: ids, or a column of X. ``weight``: how often each instance counts."""
        self.bags_ = bags if isinstance(bags, (str, int)) else self.bags
        x, ids = self._taken(X, bags, fitting=True)
        if y is None:
            raise ValueError("This MajorityClassifier requires y to be passed, but the target y is None.")
        label = labels_of(y, ids, len(x))
        self.classes_, code = np.unique(label, return_inverse=True)
        if len(self.classes_) < 2:
            raise HeadcountError(
                f"all bags have one class, {self.classes_[0]!r}; a majority needs at least two classes"
            )
        self._told_apart = ids.spoken
        held = Bags.of(
            Pool(x[ids.order]), sizes=ids.sizes, labels=code, classes=[str(c) for c in range(len(self.classes_))],
            weight=None if weight is None else np.asarray(weight, dtype=np.float32)[ids.order],
        )  # fmt: skip
        seed, device = self._seed(), device_for(self.device)
        method = "em_forest" if isinstance(self.estimator, str) and self.estimator == "forest" else self.estimator
        own: dict[str, Any] = {"frozen": self.frozen, "weights": self.weights, "size": self.size}
        held, start, eye, _ = sight(held, self.backbone, device, tell=_log.warning, **own)
        how: dict[str, Any] = {"epochs": self.epochs, "options": self.options}
        if eye is None:
            how |= {"backbone": self.backbone, "start": start}
        chosen = candidates(method, held, **how)[0]
        split = crossval.inner(held, np.arange(len(held)), np.zeros(0, int), seed)
        train, valid = held.take(split.train), held.take(split.valid)
        trained = chosen.fit(train, valid, seed=seed, device=device)
        p, _ = crossval.answers(trained.body, valid, Learned(held.pool.kind, shape=held.pool.shape), device)
        self.tilt_ = trained.tilt or label_loss(p, valid)[1]
        names = tuple(map(str, self.classes_))
        names = names if len(set(names)) == len(names) else held.classes
        alike = None
        if ids.spoken and not split.shared:  # validation bags were not learned from: they tell how bags differ
            told = valid.target.double()
            log_p = p.double().clamp_min(1e-30).log()
            alike = shares.overheard(log_p, valid.segments(), told, self.tilt_.prior.double()).alike
        learned, facts = Learned("features" if x.ndim == 2 else "images", shape=x.shape[1:]), {"name": chosen.name}
        self.fitted_ = Fitted(trained.body, names, learned, self.tilt_, alike=alike, facts={"method": facts}, eye=eye)
        return self

    def _seed(self) -> int:
        if self.random_state is None:
            return 0
        if isinstance(self.random_state, (int, np.integer)):
            return int(self.random_state)
        return int(self.random_state.randint(1 << 31))

    # -- asking -------------------------------------------------------------------------------------------------------

    def predict_proba(self, X: Any) -> Any:
        """(N, C) of instances, columns as ``classes_``; for a list of bags a list of arrays."""
        return self._answered(X, lambda p: p)

    def predict(self, X: Any) -> Any:
        """(N,) classes of instances; for a list of bags a list of arrays."""
        return self._answered(X, lambda p: self.classes_[p.argmax(1)])

    def predict_bags(self, X: Any, bags: Any = None) -> np.ndarray:
        """(B,) the class each bag is said to hold most of, bags in order of first appearance."""
        x, ids = self._asked(X, bags)
        return self.classes_[self._shares(x, ids).argmax(1)]

    def predict_shares(self, X: Any, bags: Any = None, level: float = 0.95) -> Shares:
        """The classes' shares in each bag, as its instances make them likely (:meth:`Fitted.shares`)."""
        if not 0 < level < 1:
            raise HeadcountError(f"level lies between 0 and 1, got {level!r}")
        x, ids = self._asked(X, bags)
        held = Bags.of(Pool(x[ids.order]), sizes=ids.sizes, labels=[-1] * len(ids.sizes), classes=len(self.classes_))
        found = self.fitted_.shares(self.fitted_.say(held).alone, held, level=level)
        return Shares(ids.names, *(t.double().numpy() for t in found))

    def score(self, X: Any, y: Any, bags: Any = None) -> float:  # ty: ignore[lost-keyword-for-regular-parameter]
        """The share of bags whose label is said right."""
        x, ids = self._asked(X, bags)
        return float(np.mean(self.classes_[self._shares(x, ids).argmax(1)] == labels_of(y, ids, len(x))))

    # -- inner --------------------------------------------------------------------------------------------------------

    def _answered(self, X: Any, then: Any) -> Any:
        check_is_fitted(self)
        x, ids = self._taken(X, None, fitting=False)
        said = then(self._p(x))
        return np.split(said, np.cumsum(ids.sizes)[:-1]) if ids.listed else said

    def _asked(self, X: Any, bags: Any) -> tuple[np.ndarray, Membership]:
        check_is_fitted(self)
        x, ids = self._taken(X, bags, fitting=False)
        if self._told_apart and not ids.spoken:
            raise HeadcountError(
                "this model was fitted on bags, and nothing says which rows of X are one bag; give bags=, or, inside a "
                "search, a column (MajorityClassifier(bags=...)) or a list of bags"
            )
        return x, ids

    def _p(self, x: np.ndarray) -> np.ndarray:
        held = Bags.of(Pool(x), sizes=[1] * len(x), labels=[-1] * len(x), classes=len(self.classes_))
        return self.fitted_.say(held).instance.numpy()

    def _shares(self, x: np.ndarray, ids: Membership) -> np.ndarray:
        starts = np.concatenate([[0], np.cumsum(ids.sizes)[:-1]])
        return np.add.reduceat(self._p(x)[ids.order], starts) / np.asarray(ids.sizes)[:, None]

    def _taken(self, X: Any, bags: Any, fitting: bool) -> tuple[np.ndarray, Membership]:
        """(N, D) numbers, and who is in which bag."""
        if (listed := as_list(X)) is not None:
            x = np.concatenate(listed)
            x = x if x.ndim == 4 else validate_data(self, x, reset=fitting, dtype=np.float32)
            return x, Membership.of([len(b) for b in listed])
        column = bags if isinstance(bags, (str, int)) and not isinstance(bags, bool) else None
        column = self.bags_ if column is None and bags is None else column
        ids = bags
        if column is not None:
            X, ids = without(X, column)
        x = validate_data(self, X, reset=fitting, dtype=np.float32, ensure_min_samples=2 if fitting else 1)
        return x, Membership.single(len(x)) if ids is None else Membership.among(ids, len(x))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.non_deterministic = False
        return tags


class BagKFold:
    """Folds of whole bags, labels spread evenly: for scikit-learn's searches and ``cross_val_score``.

    ``bags``: ids, or the column of X that is the bag; a list of bags needs neither. ``groups`` are refused: a search hands
    them to the splitter only, and the estimator would see no bags.
    """

    def __init__(self, n_splits: int = 5, *, bags: Any = None, random_state: int = 0) -> None:
        if isinstance(n_splits, bool) or not isinstance(n_splits, (int, np.integer)) or n_splits < 2:
            raise HeadcountError(f"n_splits is a whole number from 2, got {n_splits!r}")
        self.n_splits, self.bags, self.random_state = n_splits, bags, random_state

    def get_n_splits(self, X: Any = None, y: Any = None, groups: Any = None) -> int:
        return self.n_splits

    def split(self, X: Any, y: Any = None, groups: Any = None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Row numbers (for a list: bag numbers) of training and test part."""
        if as_list(X) is not None:
            ids = np.arange(len(X))
        elif isinstance(self.bags, (str, int)):
            ids = without(X, self.bags)[1]
        else:
            ids = self.bags
        if ids is None:
            heard = "groups reach the splitter only, and the estimator would see no bags" if groups is not None else ""
            raise HeadcountError(
                f"{heard or 'BagKFold does not know the bags'}; give the column that is the bag to both, "
                "MajorityClassifier(bags=...) and BagKFold(bags=...), or a list of bags"
            )
        _, first, bag = np.unique(np.asarray(ids), return_index=True, return_inverse=True)
        label = np.zeros(len(bag), int) if y is None else np.unique(np.asarray(y), return_inverse=True)[1]
        if len(label) != len(bag):
            raise HeadcountError(f"{len(bag)} rows have bags and {len(label)} have labels")
        fold = deal(np.eye(label.max() + 1)[label[first]], np.arange(len(first)), self.n_splits, self.random_state)
        for k in range(self.n_splits):
            test = fold[bag] == k
            yield np.flatnonzero(~test), np.flatnonzero(test)


__all__: Sequence[str] = ["BagKFold", "MajorityClassifier", "Shares"]
