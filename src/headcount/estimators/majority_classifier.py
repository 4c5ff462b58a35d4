"""MajorityClassifier: a scikit-learn classifier of instances that learns from majority labels of bags."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_array
from sklearn.utils.validation import check_is_fitted, validate_data

from headcount.bags import Bags, Pool
from headcount.bags.splits import train_valid_split
from headcount.errors import HeadcountError, HeadcountWarning, check_choice
from headcount.estimators import inputs
from headcount.estimators.inputs import BagIds
from headcount.models.fitted import FittedModel
from headcount.models.heads import HEADS, find_head
from headcount.models.network import Model
from headcount.models.predictions import Predictions
from headcount.models.trees import SklearnModel, Trees
from headcount.readers.columns import ColumnRoles, clean_name, clean_names, note_similar_classes
from headcount.readers.preprocessing import Preprocessor, number_fields
from headcount.readers.transforms import StandardScaler
from headcount.seeds import seed_from_random_state
from headcount.selection.cross_validation import calibrate_on_validation
from headcount.selection.fit import prepare_backbone
from headcount.selection.methods import METHODS, NetworkOptions, build_methods, reject_custom_head
from headcount.training.accel import resolve_device

BagColumn = Literal["required", "optional", "ignored"]  # whether X must have the column, if one is named
FLOAT_TYPES = [np.float64, np.float32]  # kept as they are; everything else becomes the first
_log = logging.getLogger(__name__)  # for downloads, before they start


@dataclass(frozen=True)
class BagShares:
    """The shares of the classes in each of B bags, with intervals: (B, C) each, in the order of ``bags``."""

    bags: np.ndarray  # (B,) ids in order of first appearance; numbers, for a list of bags
    share: np.ndarray
    low: np.ndarray
    high: np.ndarray


class MajorityClassifier(ClassifierMixin, BaseEstimator):
    """A classifier of instances that learns from the majority label of each bag.

    There are three ways to give the bags: ids to ``fit(X, y, bags=ids)``; a column of X, named by ``bags`` here or in ``fit``,
    which is then no feature; or a list with one array per bag, with one label per bag. Without bags every row is a bag of its
    own, which is ordinary classification. There is no parameter ``groups``: scikit-learn's searches pass groups to the splitter
    only, so the estimator would see no bags; in a search use a column or a list.

    Parameters
    ----------
    estimator : str or classifier
        A name that ``headcount fit --method`` knows: "tilt" (a network under the tilt), "em_forest" (a random forest, by EM), the
        name of a head (a network with it), or a baseline that is fitted to the bag's label of every instance ("forest",
        "logistic", "noisy_label"); columns are standardised. Or any scikit-learn classifier with ``predict_proba``, which is
        fitted by EM to the columns as they are.
    bags : str or int, optional
        The column of X that holds the bag. Default: ``fit`` is given the bags, or every row is a bag of its own.
    backbone, frozen, weights, size, epochs, options, device : optional
        Of networks, as in :func:`headcount.fit`; images are lists of uint8 arrays (n, H, W, channels). On the features of a
        frozen backbone any estimator can be fitted.
    random_state : int, RandomState, Generator or None
        None is 0: results are always reproducible.

    Attributes
    ----------
    classes_ : ndarray
        The classes.
    transition_ : Transition
        P(class | bag's label) and the label frequencies, as estimated.
    fitted_ : FittedModel
        The model, which can be saved.
    n_features_in_, feature_names_in_
        As in scikit-learn, without the bag column; absent for images.

    Examples
    --------
    >>> bag = np.repeat(np.arange(20), 5)
    >>> X = np.random.default_rng(0).normal(bag[:, None] % 2, 0.3)
    >>> MajorityClassifier("logistic").fit(X, bag % 2, bags=bag).predict([[0.0], [1.0]])
    array([0, 1])
    """

    def __init__(
        self, estimator: Any = "tilt", *, bags: str | int | None = None, backbone: str | None = None,
        frozen: bool | None = None, weights: str | None = None, size: int | None = None, epochs: int | None = None,
        options: dict[str, Any] | None = None, device: str = "auto", random_state: Any = None,
    ) -> None:  # fmt: skip
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

    def fit(self, X: Any, y: Any, bags: Any = None, weight: Any = None) -> MajorityClassifier:
        """Fit the model.

        Parameters
        ----------
        X : array, DataFrame or list of them
            Instances, or one array of instances per bag.
        y : array
            The label of each row's bag, or of each bag of a list.
        bags : array, str or int, optional
            The bag of each row, or the column of X that holds it.
        weight : array, optional
            The weight of each instance in its bag; for a list of bags also a list of arrays.
        """
        self.bags_ = inputs.resolve_bag_column(self.bags, bags)
        x, ids = self._validate_input(X, bags, fitting=True)
        if y is None:
            raise ValueError("This MajorityClassifier requires y to be passed, but the target y is None.")
        label, weights = inputs.bag_labels(y, ids, len(x)), inputs.check_weights(weight, ids, len(x))
        self.classes_, codes = np.unique(label, return_inverse=True)
        if len(self.classes_) < 2:
            classes = self.classes_.tolist()
            raise HeadcountError(f"all bags have one class, {classes[0]!r}; a majority needs at least two classes")
        for line in note_similar_classes(list(map(str, self.classes_))):
            warnings.warn(line, HeadcountWarning, stacklevel=2)
        self._bags_given, self._scaler = ids.given, None
        if isinstance(self.estimator, str):
            _check_method(self.estimator)
            self._scaler = StandardScaler.fit(x) if x.ndim == 2 else None
        train = Bags.of(
            self._pool(x[ids.order]), sizes=ids.sizes, labels=codes, classes=[str(c) for c in range(len(self.classes_))],
            weight=None if weights is None else weights[ids.order],
        )  # fmt: skip
        self._model = self._fit_model(train)
        self.fitted_ = self._unscaled_model(x) if x.ndim == 2 else self._model
        self.transition_ = self._model.transition
        return self

    def _fit_model(self, bags: Bags) -> FittedModel:
        """The model of instances as they are in :meth:`_pool`."""
        seed, device = seed_from_random_state(self.random_state), resolve_device(self.device)
        preprocessor = Preprocessor(bags.pool.kind, shape=bags.pool.shape)
        bags, pretrained, frozen_backbone, _ = prepare_backbone(
            bags, self.backbone, device, frozen=self.frozen, weights=self.weights, size=self.size, log=_log.warning
        )
        backbone = self.backbone if frozen_backbone is None else None
        network = NetworkOptions(backbone, epochs=self.epochs, options=self.options, pretrained=pretrained)
        method = build_methods(self.estimator, bags, network=network)[0]
        split = train_valid_split(bags, np.arange(len(bags)), np.zeros(0, int), seed)
        result = method.fit(bags.take(split.train), bags.take(split.valid), seed=seed, device=device)
        calibration = calibrate_on_validation(result, bags, split, device, bags_given=self._bags_given)
        names = tuple(clean_name(c) or "" for c in self.classes_)  # as files name them
        names = names if len(set(names)) == len(names) else bags.classes
        metadata = {"method": {"name": method.name, "baseline": result.naive_labels}}
        model = FittedModel(result.estimator, names, preprocessor, **calibration._asdict())
        return model.replace(metadata=metadata, frozen_backbone=frozen_backbone)

    def _unscaled_model(self, x: np.ndarray) -> FittedModel:
        """The model for numbers (N, D) that are not standardised: for a table, if the columns have names, or for features."""
        model, scaler, estimator = self._model, self._scaler, self._model.estimator
        if isinstance(estimator, SklearnModel):  # it cannot be saved either
            return model
        names = [str(name) for name in getattr(self, "feature_names_in_", ())]
        if not names or len(set(names)) < len(names):
            if scaler is not None:
                estimator = estimator.fold_in_scaler(scaler.mean_, scaler.scale_)
            return model.replace(estimator=estimator)
        if scaler is None:
            scaler = StandardScaler.fit(x)
            estimator = estimator.without_float32_rounding() if isinstance(estimator, Trees) else estimator
            estimator = estimator.fold_in_scaler(-scaler.mean_ / scaler.scale_, 1 / scaler.scale_)
        roles = ColumnRoles(bag=self.bags_ if isinstance(self.bags_, str) else None)
        preprocessor = Preprocessor("table", number_fields(x, names), (x.shape[1],), roles=roles)
        return model.replace(preprocessor=preprocessor, estimator=estimator)

    def predict_proba(self, X: Any, bags: Any = None) -> Any:
        """Class probabilities of instances (N, C), columns as ``classes_``; one array per bag of a list.

        X may lack the bag column. Heads that predict an instance from its whole bag (``headcount heads`` lists them) then see
        each row as a bag of its own.
        """
        return self._map_instances(X, bags, lambda p: p)

    def predict(self, X: Any, bags: Any = None) -> Any:
        """Classes of instances (N,), one array per bag of a list; arguments as for :meth:`predict_proba`."""
        return self._map_instances(X, bags, lambda p: self.classes_[p.argmax(1)])

    def predict_bags(self, X: Any, bags: Any = None) -> np.ndarray:
        """Labels of bags (B,), in order of first appearance: the head's own prediction, or else the largest mean probability."""
        x, ids = self._validate_bagged(X, bags)
        return self.classes_[self._predict(x, ids).bag_prediction]

    def predict_shares(self, X: Any, bags: Any = None, level: float = 0.95) -> BagShares:
        """Shares of the classes in each bag, with intervals of this level (:meth:`FittedModel.estimate_shares`)."""
        if not 0 < level < 1:
            raise HeadcountError(f"level lies between 0 and 1, got {level!r}")
        x, ids = self._validate_bagged(X, bags)
        p = self._predict(x, ids, level)
        return BagShares(ids.names, *(a.astype(float) for a in (p.shares, p.shares_low, p.shares_high)))

    def score(self, X: Any, y: Any, bags: Any = None) -> float:  # ty: ignore[lost-keyword-for-regular-parameter]
        """Bag accuracy: the fraction of bags whose label :meth:`predict_bags` predicts correctly."""
        x, ids = self._validate_bagged(X, bags)
        label = clean_names(inputs.bag_labels(y, ids, len(x)))
        return float(np.mean(clean_names(self.classes_)[self._predict(x, ids).bag_prediction] == label))

    def _map_instances(self, X: Any, bags: Any, transform: Callable[[np.ndarray], np.ndarray]) -> Any:
        """A function of the instance probabilities, in the order of X."""
        check_is_fitted(self)
        uses_bags = isinstance(self._model.estimator, Model) and self._model.estimator.instance_depends_on_bag
        x, ids = self._validate_input(X, bags, bag_column="optional" if uses_bags else "ignored")
        values = transform(self._predict(x, ids).instance_probabilities[np.argsort(ids.order)])
        return np.split(values, np.cumsum(ids.sizes)[:-1]) if ids.from_list else values

    def _predict(self, x: np.ndarray, ids: BagIds, level: float | None = None) -> Predictions:
        """The model's predictions, rows in the order of ``ids``; shares only with a ``level``."""
        labels = [-1] * len(ids.sizes)
        bags = Bags.of(self._pool(x[ids.order]), sizes=ids.sizes, labels=labels, classes=len(self.classes_))
        return self._model.predict(bags, level=level)

    def _pool(self, x: np.ndarray) -> Pool:
        """Standardised float32 for our own methods, the numbers as they are for a classifier of scikit-learn."""
        if x.ndim != 2:
            return Pool(x)
        if self._scaler is None:
            return Pool(x, trusted=True, keep_float64=True)
        return Pool(self._scaler.transform(x), trusted=True)

    def _validate_bagged(self, X: Any, bags: Any) -> tuple[np.ndarray, BagIds]:
        check_is_fitted(self)
        x, ids = self._validate_input(X, bags)
        if self._bags_given and not ids.given:
            raise HeadcountError(
                "this model was fitted on bags, and nothing says which rows of X are one bag; give bags=, or, inside a "
                "search, a column (MajorityClassifier(bags=...)) or a list of bags"
            )
        return x, ids

    def _validate_input(
        self, X: Any, bags: Any, fitting: bool = False, bag_column: BagColumn = "required"
    ) -> tuple[np.ndarray, BagIds]:
        """(N, D) numbers and the bag of each row."""
        X, bags = inputs.to_numpy(X), inputs.to_numpy(bags)
        column = inputs.bag_column(bags)
        ids = bags if column is None else None
        column = self.bags_ if column is None else column
        if (bag_list := inputs.as_bag_list(X)) is not None:
            if ids is not None:
                raise HeadcountError("X is a list of bags, and bags= gives ids besides; leave the ids out")
            return self._stack_list(bag_list, column, fitting)
        if column is not None:
            width, required = None if fitting else self.n_features_in_, bag_column == "required" and ids is None
            X, values = inputs.pop_column(X, column, width, required=required)
            ids = values if ids is None and bag_column != "ignored" else ids
        with inputs.numeric_errors(X):
            x = validate_data(self, X, reset=fitting, dtype=FLOAT_TYPES, ensure_min_samples=2 if fitting else 1)
        return x, BagIds.from_ids(ids, len(x))

    def _stack_list(self, bag_list: list[Any], column: str | int | None, fitting: bool) -> tuple[np.ndarray, BagIds]:
        width = None if fitting else getattr(self, "n_features_in_", None)
        known = None if fitting else getattr(self, "feature_names_in_", None)
        x, names = inputs.stack_bags(bag_list, column, width, known)
        ids = BagIds.of_list(bag_list)
        if x.ndim == 4:
            return x, ids
        if names is None or not all(isinstance(n, str) for n in names):
            return validate_data(self, x, reset=fitting, dtype=FLOAT_TYPES), ids
        with inputs.numeric_errors(x, names):  # the stacked array has lost its names, so scikit-learn cannot check them
            x = check_array(x, dtype=FLOAT_TYPES, estimator=self, input_name="X")
        if fitting:
            self.n_features_in_, self.feature_names_in_ = x.shape[1], np.asarray(names, dtype=object)
        elif known is None and x.shape[1] != self.n_features_in_:
            raise HeadcountError(f"X has {x.shape[1]} columns, and the model was fitted on {self.n_features_in_}")
        return x, ids


def _check_method(name: str) -> None:
    if name == "auto" or "," in name:
        raise HeadcountError(
            f"MajorityClassifier fits one method, got {name!r}; give one of {', '.join(METHODS)}, or let headcount.fit "
            "compare several"
        )
    reject_custom_head(name)
    if check_choice("estimator", name, METHODS) in HEADS and find_head(name).uses_instance_labels:
        raise HeadcountError(
            f"{name!r} learns from known instance classes, which MajorityClassifier does not take; give the data to "
            "headcount.read with ColumnRoles(known=...), and the dataset to headcount.fit"
        )
