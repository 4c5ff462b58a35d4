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
    >>> from headcount.estimators.majority_classifier import BagKFold, MajorityClassifier
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

from headcount.bags import Bags, Pool
from headcount.bags.splits import train_valid_split
from headcount.errors import HeadcountError, HeadcountWarning, check_choice
from headcount.estimators.bag_kfold import BagKFold
from headcount.estimators.inputs import (
    BagIds,
    as_bag_list,
    bag_column,
    bag_labels,
    check_weights,
    numeric_errors,
    pop_column,
    resolve_bag_column,
    stack_bags,
    to_numpy,
)
from headcount.models.fitted import FittedModel
from headcount.models.frozen_backbone import FrozenBackbone
from headcount.models.heads import HEADS, find_head
from headcount.models.network import Model
from headcount.models.predictions import Predictions
from headcount.models.trees import SklearnModel, Trees
from headcount.readers.columns import ColumnRoles
from headcount.readers.preprocessing import Preprocessor, number_fields
from headcount.readers.raw_data import note_similar_classes
from headcount.readers.standard_scaler import StandardScaler
from headcount.readers.values import clean_name, clean_names
from headcount.seeds import seed_from_random_state
from headcount.selection.backbone_setup import prepare_backbone
from headcount.selection.methods import METHODS, Method, methods, reject_custom_head
from headcount.selection.validation_fit import calibrate_on_validation
from headcount.training.accel.device import resolve_device

_log = logging.getLogger(__name__)  # a download is said before it happens


@dataclass(frozen=True)
class BagShares:
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
        self.bags_ = resolve_bag_column(self.bags, bags)
        x, ids = self._validate_input(X, bags, fitting=True)
        if y is None:
            raise ValueError("This MajorityClassifier requires y to be passed, but the target y is None.")
        label, heavy = bag_labels(y, ids, len(x)), check_weights(weight, ids, len(x))
        self.classes_, code = np.unique(label, return_inverse=True)
        if len(self.classes_) < 2:
            only = self.classes_.tolist()[0]
            raise HeadcountError(f"all bags have one class, {only!r}; a majority needs at least two classes")
        for line in note_similar_classes(list(map(str, self.classes_))):
            warnings.warn(line, HeadcountWarning, stacklevel=2)
        self._bags_given = ids.given
        method = self._resolve_method()
        self._scaler = StandardScaler.fit(x) if isinstance(method, str) and x.ndim == 2 else None
        held = Bags.of(
            self._pool(x[ids.order]), sizes=ids.sizes, labels=code, classes=[str(c) for c in range(len(self.classes_))],
            weight=None if heavy is None else heavy[ids.order],
        )  # fmt: skip
        self._model = self._fit_model(method, held)
        names, bag = getattr(self, "feature_names_in_", None), self.bags_ if isinstance(self.bags_, str) else None
        self.fitted_ = self._model if x.ndim != 2 else _unscaled(self._model, x, self._scaler, names, bag)
        self.transition_ = self._model.transition
        return self

    def _resolve_method(self) -> Any:
        """What to fit: a classifier, or one name."""
        if not isinstance(self.estimator, str):
            return self.estimator
        if self.estimator == "auto" or "," in self.estimator:
            raise HeadcountError(
                f"MajorityClassifier fits one method, got {self.estimator!r}; give one of {', '.join(METHODS)}, or let "
                "headcount.fit_reading compare several"
            )
        reject_custom_head(self.estimator)
        if (
            check_choice("estimator", self.estimator, METHODS) in HEADS
            and find_head(self.estimator).uses_instance_labels
        ):
            raise HeadcountError(
                f"{self.estimator!r} learns from known instance classes, which MajorityClassifier is not told; name them to "
                "headcount.read (Named(known=...)) and give what was read to headcount.fit_reading"
            )
        return self.estimator

    def _fit_model(self, method: Any, bags: Bags) -> FittedModel:
        """The model, asked about instances as they lie in our pools."""
        seed, device = seed_from_random_state(self.random_state), resolve_device(self.device)
        learned = Preprocessor(bags.pool.kind, shape=bags.pool.shape)
        own: dict[str, Any] = {"frozen": self.frozen, "weights": self.weights, "size": self.size}
        bags, start, eye, _ = prepare_backbone(bags, self.backbone, device, log=_log.warning, **own)
        chosen = self._build_method(method, bags, start, eye)
        split = train_valid_split(bags, np.arange(len(bags)), np.zeros(0, int), seed)
        trained = chosen.fit(bags.take(split.train), bags.take(split.valid), seed=seed, device=device)
        names = tuple(clean_name(c) or "" for c in self.classes_)  # as files name them
        names = names if len(set(names)) == len(names) else bags.classes
        told = calibrate_on_validation(trained, bags, split, device, bags_given=self._bags_given)
        facts = {"method": {"name": chosen.name, "baseline": trained.naive_labels}}
        return FittedModel(trained.estimator, names, learned, metadata=facts, frozen_backbone=eye, **told)

    def _build_method(self, method: Any, bags: Bags, start: Any, frozen_backbone: FrozenBackbone | None) -> Method:
        how: dict[str, Any] = {"epochs": self.epochs, "options": self.options}
        if frozen_backbone is None:
            how |= {"backbone": self.backbone, "start": start}
        return methods(method, bags, **how)[0]

    # -- asking -------------------------------------------------------------------------------------------------------

    def predict_proba(self, X: Any, bags: Any = None) -> Any:
        """(N, C) of instances, columns as ``classes_``; for a list of bags a list of arrays. X may lack the bag column: heads
        that judge an instance by its bag (``whole_bag`` in ``headcount heads --json``) then see each row alone."""
        return self._predict_instances(X, bags, lambda p: p)

    def predict(self, X: Any, bags: Any = None) -> Any:
        """(N,) classes of instances; for a list of bags a list of arrays. Bags are to it what they are to predict_proba."""
        return self._predict_instances(X, bags, lambda p: self.classes_[p.argmax(1)])

    def predict_bags(self, X: Any, bags: Any = None) -> np.ndarray:
        """(B,) the label each bag is said to have, in order of first appearance: the head's own word on the bag, or the class
        with the largest mean probability where it has none."""
        x, ids = self._bagged_input(X, bags)
        return self.classes_[self._predict_bags(x, ids).bag_prediction]

    def predict_shares(self, X: Any, bags: Any = None, level: float = 0.95) -> BagShares:
        """The classes' shares in each bag, as its instances make them likely (:meth:`Fitted.shares`)."""
        if not 0 < level < 1:
            raise HeadcountError(f"level lies between 0 and 1, got {level!r}")
        x, ids = self._bagged_input(X, bags)
        p = self._predict_bags(x, ids, level)
        return BagShares(ids.names, *(a.astype(float) for a in (p.shares, p.shares_low, p.shares_high)))

    def score(self, X: Any, y: Any, bags: Any = None) -> float:  # ty: ignore[lost-keyword-for-regular-parameter]
        """The share of bags whose label is said right (:meth:`predict_bags`)."""
        x, ids = self._bagged_input(X, bags)
        label = clean_names(bag_labels(y, ids, len(x)))
        return float(np.mean(clean_names(self.classes_)[self._predict_bags(x, ids).bag_prediction] == label))

    # -- inner --------------------------------------------------------------------------------------------------------

    def _predict_instances(self, X: Any, bags: Any, transform: Any) -> Any:
        check_is_fitted(self)
        body = self._model.estimator
        x, ids = self._validate_input(
            X, bags, bags_needed="where said" if isinstance(body, Model) and body.instance_depends_on_bag else "never"
        )
        predicted = transform(self._predict_bags(x, ids).instance_probabilities[np.argsort(ids.order)])
        return np.split(predicted, np.cumsum(ids.sizes)[:-1]) if ids.from_list else predicted

    def _predict_bags(self, x: np.ndarray, ids: BagIds, level: float | None = None) -> Predictions:
        """What the model predicts of the bags, rows in the order of ``ids``; shares only with a ``level``."""
        unlabelled = [-1] * len(ids.sizes)
        bags = Bags.of(self._pool(x[ids.order]), sizes=ids.sizes, labels=unlabelled, classes=len(self.classes_))
        return self._model.predict(bags, level=level)

    def _bagged_input(self, X: Any, bags: Any) -> tuple[np.ndarray, BagIds]:
        check_is_fitted(self)
        x, ids = self._validate_input(X, bags)
        if self._bags_given and not ids.given:
            raise HeadcountError(
                "this model was fitted on bags, and nothing says which rows of X are one bag; give bags=, or, inside a "
                "search, a column (MajorityClassifier(bags=...)) or a list of bags"
            )
        return x, ids

    def _pool(self, x: np.ndarray) -> Pool:
        """Networks, and forests of ours, get standardised float32; a classifier of scikit-learn's what it was given."""
        if x.ndim != 2:
            return Pool(x)
        if self._scaler is None:
            return Pool(x, trusted=True, keep_float64=True)
        return Pool(self._scaler.transform(x), trusted=True)

    def _validate_input(
        self, X: Any, bags: Any, fitting: bool = False, bags_needed: str = "always"
    ) -> tuple[np.ndarray, BagIds]:
        """(N, D) numbers, and who is in which bag. ``bagged``: who wants to know that, of a column of X."""
        X, bags, ids = to_numpy(X), to_numpy(bags), None
        column = bag_column(bags)
        if bags is not None and column is None:
            ids = bags
        column = self.bags_ if column is None else column
        if (listed := as_bag_list(X)) is not None:
            if ids is not None:
                raise HeadcountError(
                    "X is a list of bags, and bags= gives ids besides; a list says the bags: leave ids out"
                )
            return self._stack_list(listed, column, fitting)
        if column is not None:
            width = None if fitting else self.n_features_in_
            X, found = pop_column(X, column, width, required=bags_needed == "always" and ids is None)
            ids = found if ids is None and bags_needed != "never" else ids  # an instance needs no bag, nor a good id
        with numeric_errors(X):
            x = validate_data(self, X, reset=fitting, dtype=FLOAT_TYPES, ensure_min_samples=2 if fitting else 1)
        return x, BagIds.of_rows(len(x)) if ids is None else BagIds.from_ids(ids, len(x))

    def _stack_list(self, bag_list: list[Any], column: str | int | None, fitting: bool) -> tuple[np.ndarray, BagIds]:
        """A list of bags, as one array."""
        width = None if fitting else getattr(self, "n_features_in_", None)
        known = None if fitting else getattr(self, "feature_names_in_", None)
        x, names = stack_bags(bag_list, column, width, known)
        ids = BagIds.of_list([len(b) for b in bag_list])
        if x.ndim == 4:
            return x, ids
        if names is None or not all(isinstance(n, str) for n in names):
            return validate_data(self, x, reset=fitting, dtype=FLOAT_TYPES), ids
        # scikit-learn knows no names of what is stacked
        with numeric_errors(x, names):
            x = check_array(x, dtype=FLOAT_TYPES, estimator=self, input_name="X")
        if fitting:
            self.n_features_in_, self.feature_names_in_ = x.shape[1], np.asarray(names, dtype=object)
        elif known is None and x.shape[1] != self.n_features_in_:
            raise HeadcountError(f"X has {x.shape[1]} columns, and the model was fitted on {self.n_features_in_}")
        return x, ids

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.non_deterministic = False
        return tags


FLOAT_TYPES = [np.float64, np.float32]  # what X may stay as; everything else becomes the first


__all__: Sequence[str] = ["BagKFold", "BagShares", "MajorityClassifier"]


def _unscaled(
    model: FittedModel, x: np.ndarray, scaler: StandardScaler | None, names: Any, bag: str | None
) -> FittedModel:
    """The model for numbers that are not standardised: a table with columns of these ``names``, if they are known, or features.
    ``scaler``: what standardises x for the model, if anything does."""
    estimator = model.estimator
    if isinstance(estimator, SklearnModel):  # it cannot be saved either
        return model
    if names is None or len(set(names)) < len(names):
        return (
            model if scaler is None else model.replace(estimator=estimator.fold_in_scaler(scaler.mean_, scaler.scale_))
        )
    if scaler is None:
        scaler = StandardScaler.fit(x)
        estimator = estimator.without_float32_rounding() if isinstance(estimator, Trees) else estimator
        estimator = estimator.fold_in_scaler(-scaler.mean_ / scaler.scale_, 1 / scaler.scale_)
    fields = number_fields(x, [str(n) for n in names])
    preprocessor = Preprocessor("table", fields, (x.shape[1],), roles=ColumnRoles(bag=bag))
    return model.replace(preprocessor=preprocessor, estimator=estimator)
