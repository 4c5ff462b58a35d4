"""MajorityClassifier: a scikit-learn classifier of instances that learns from majority labels of bags."""

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.validation import check_is_fitted

from headcount.bags import Bags, Pool
from headcount.bags.seeds import seed_from_random_state
from headcount.bags.splits import train_valid_split
from headcount.bags.validation import find_counts
from headcount.errors import HeadcountError, HeadcountWarning
from headcount.estimators import targets
from headcount.estimators.inputs import BagIds, BagShares, read_rows, resolve_bag_column
from headcount.estimators.model_selection import refuse_instance_scorers
from headcount.estimators.saving import fitted_attributes, unscaled_model
from headcount.majority.calibration import evaluate_criterion
from headcount.models.backbones import CustomBackbone
from headcount.models.fitted import FittedModel
from headcount.models.heads import Head, trust_head
from headcount.models.network import Model
from headcount.models.predictions import Predictions, estimator_probabilities
from headcount.readers.columns import clean_name, clean_names, note_similar_classes
from headcount.readers.preprocessing import Preprocessor
from headcount.readers.transforms import StandardScaler
from headcount.selection.cross_validation import calibrate_on_validation
from headcount.selection.fit import prepare_backbone
from headcount.selection.methods import NetworkOptions, build_methods
from headcount.selection.search import choose_method
from headcount.training.accel import limit_threads, resolve_device

AUTO_FOLDS = 3  # on which "auto" compares methods
_log = logging.getLogger(__name__)  # for downloads, before they start


class MajorityClassifier(ClassifierMixin, BaseEstimator):
    """A classifier of instances that learns from the majority label of each bag.

    There are three ways to give the bags: ids to ``fit(X, y, bags=ids)``; a column of X, named by ``bags`` here or in ``fit``,
    which is then no feature; or a list with one array per bag, with one label per bag. Without bags every row is a bag of its
    own, which is ordinary classification. There is no parameter ``groups``: scikit-learn's searches pass groups to the splitter
    only, so the estimator would see no bags; in a search use a column or a list.

    Parameters
    ----------
    estimator : str or classifier
        "auto" compares several methods on three folds of the bags and keeps the one that held-out bags prefer; for images above 32
        pixels it is "tilt". Or a name that ``headcount fit --method`` knows: "tilt" (a network under the tilt), "em_forest" (a random forest,
        by EM), the name or class of a head (a network with it), or a baseline that is fitted to the bag's label of every instance
        ("forest", "logistic", "noisy_label"); columns are standardised. Or any scikit-learn classifier with ``predict_proba``,
        which is fitted by EM to the columns as they are.
    bags : str or int, optional
        The column of X that holds the bag. Default: ``fit`` is given the bags, or every row is a bag of its own.
    backbone, frozen, weights, size, views, epochs, options, device : optional
        Of networks, as in :func:`headcount.fit`; images are uint8 arrays (N, H, W, channels), or a list of them. On the features
        of a frozen backbone any estimator can be fitted. A search finds single options as ``options__t1``.
    lr, weight_decay, batch_size, patience, optimizer : optional
        Of networks: learning rate, weight decay, bags of a training step, epochs without improvement after which training
        stops, and the optimizer (see :class:`headcount.TrainConfig`). Default: what suits the number and size of the bags.
    class_weight : dict or "balanced", optional
        What it costs not to recognise an instance of each class: :meth:`predict` takes the class with the largest product of weight
        and probability. "balanced": inverse to the estimated class frequencies. Nothing else changes, and it is not saved.
    n_jobs : int, optional
        Threads of the fit and of predictions; -1: all processors. Default: as many as PyTorch uses.
    verbose : int
        1 prints each epoch or round.
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
    method_, losses_ : str, dict
        The method that was fitted, and the losses on held-out bags of those that were compared, none but for "auto".
    history_, best_epoch_ : dict of arrays, int
        The ``train_loss`` and ``valid_loss`` of each epoch or round, and the one that is kept, from 1.
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
        self, estimator: Any = "auto", *, bags: str | int | None = None, backbone: CustomBackbone | str | None = None,
        frozen: bool | None = None, weights: str | None = None, size: int | None = None, views: str | None = None,
        epochs: int | None = None, lr: float | None = None, weight_decay: float | None = None,
        batch_size: int | None = None, patience: int | None = None, optimizer: Any = None,
        options: dict[str, Any] | None = None, class_weight: dict[Any, float] | str | None = None, n_jobs: int | None = None,
        verbose: int = 0, device: str = "auto", random_state: Any = None,
    ) -> None:  # fmt: skip
        self.estimator, self.bags, self.options, self.optimizer, self.device = estimator, bags, options, optimizer, device
        self.backbone, self.frozen, self.weights, self.size, self.views = backbone, frozen, weights, size, views
        self.epochs, self.lr, self.weight_decay, self.batch_size, self.patience = epochs, lr, weight_decay, batch_size, patience
        self.class_weight, self.n_jobs, self.verbose, self.random_state = class_weight, n_jobs, verbose, random_state

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The parameters; ``deep``: also those of the estimator, and the options as ``options__NAME``."""
        options = self.options if deep and isinstance(self.options, dict) else {}
        return super().get_params(deep) | {f"options__{name}": value for name, value in options.items()}

    def set_params(self, **params: Any) -> Self:
        """Set parameters; ``options__NAME`` sets one option and leaves the others as they are."""
        single = {k: params.pop(k) for k in list(params) if k.startswith("options__")}
        super().set_params(**params)
        if single:
            self.options = (self.options or {}) | {k.removeprefix("options__"): v for k, v in single.items()}
        return self

    def fit(self, X: Any, y: Any, bags: Any = None, weight: Any = None) -> Self:
        """Fit the model.

        Parameters
        ----------
        X : array, sparse matrix, DataFrame or list of them
            Instances, or one array of instances per bag; also a ``torch.utils.data.Dataset``, which is read into memory.
        y : array
            The label of each row's bag, or of each bag of a list; None, NaN or -1 (beside two other numbers): unlabelled.
            (n, C): votes for C classes, or their probabilities; the columns of a DataFrame are the classes.
        bags : array, str or int, optional
            The bag of each row, or the column of X that holds it.
        weight : array, optional
            How many times each instance counts in its bag (no ``sample_weight``: it is not two bags); also a list of arrays.
        """
        self.bags_ = resolve_bag_column(self.bags, bags)
        x, ids = read_rows(self, X, bags, fitting=True)
        if y is None:
            raise ValueError("This MajorityClassifier requires y to be passed, but the target y is None.")
        self.classes_, codes = targets.bag_labels(y, ids, len(x))
        targets.class_weights(self.class_weight, self.classes_, np.ones(1))  # a mistake is found before the training
        if len(self.classes_) < 2:
            raise HeadcountError(f"all bags have one class, {self.classes_.tolist()[0]!r}; at least two classes are needed")
        for line in note_similar_classes(list(map(str, self.classes_))):
            warnings.warn(line, HeadcountWarning, stacklevel=2)
        self._bags_given, self._scaler = ids.given, None
        if isinstance(method := trust_head(self.estimator, trusted=False), str):
            targets.check_method(method)
            self._scaler = StandardScaler.fit(x) if x.ndim == 2 else None
        train = self._bags(x, ids, codes, targets.check_weights(weight, ids, len(x)))
        with limit_threads(self.n_jobs):
            self._model = self._fit_model(train)
        names = [str(name) for name in getattr(self, "feature_names_in_", ())]
        self.fitted_ = self._model if x.ndim > 2 else unscaled_model(self._model, self._scaler, x, names, self.bags_)
        self.transition_ = self._model.transition
        self._class_weight = targets.class_weights(self.class_weight, self.classes_, self.transition_.prior.numpy())
        return self

    def _fit_model(self, bags: Bags) -> FittedModel:
        """The model of instances as they are in :meth:`_bags`."""
        seed, device = seed_from_random_state(self.random_state), resolve_device(self.device)
        preprocessor = Preprocessor(bags.pool.kind, shape=bags.pool.shape)
        bags, pretrained, frozen_backbone, _ = prepare_backbone(
            bags, self.backbone, device, frozen=self.frozen, weights=self.weights, size=self.size, views=self.views,
            log=_log.warning,
        )  # fmt: skip
        backbone = self.backbone if frozen_backbone is None else None
        training = {name: getattr(self, name) for name in ("lr", "weight_decay", "patience", "optimizer")}
        training |= {} if self.batch_size is None else {"batch_bags": self.batch_size, "batch_instances": 0}
        training = {name: value for name, value in training.items() if value is not None}
        network = NetworkOptions(backbone, self.views, self.epochs, self.options, pretrained, training)
        methods = build_methods(self.estimator, bags, network=network)
        method, self.losses_ = methods[0], {}  # the others are baselines
        if isinstance(self.estimator, str) and self.estimator == "auto":
            tried = methods if bags.pool.kind != "images" else [m for m in methods if not m.baseline]
            log = (lambda p: print(p.message)) if self.verbose else None
            if len(tried) > 1:
                method, self.losses_ = choose_method(bags, tried, folds=AUTO_FOLDS, seed=seed, device=device, on_progress=log)
        self.method_ = method.name
        split = train_valid_split(bags, np.arange(len(bags)), np.zeros(0, int), seed)
        log = (lambda _, message: print(f"{method.title}: {message}")) if self.verbose else None
        result = method.fit(bags.take(split.train), bags.take(split.valid), seed=seed, device=device, on_progress=log)
        train_loss, valid_loss = np.array(result.curve, float).reshape(-1, 2).T
        self.history_, self.best_epoch_ = {"train_loss": train_loss, "valid_loss": valid_loss}, result.best_epoch
        calibration = calibrate_on_validation(result, bags, split, device, bags_given=self._bags_given)
        names = tuple(clean_name(c) or "" for c in self.classes_)  # as files name them
        names = names if len(set(names)) == len(names) else bags.classes
        metadata = {"method": {"name": method.name, "baseline": result.naive_labels}, "class_values": self.classes_.tolist()}
        model = FittedModel(result.estimator, names, preprocessor, **calibration._asdict())
        return model.replace(metadata=metadata, frozen_backbone=frozen_backbone)

    def predict_proba(self, X: Any, bags: Any = None) -> Any:
        """Class probabilities of instances (N, C), columns as ``classes_``; one array per bag of a list.

        X may lack the bag column. Heads that predict an instance from its whole bag (``headcount heads`` lists them) then see
        each row as a bag of its own.
        """
        return self._map_instances(X, bags, lambda p: p)

    def predict(self, X: Any, bags: Any = None) -> Any:
        """Classes of instances (N,), one array per bag of a list; arguments as for :meth:`predict_proba`."""
        return self._map_instances(X, bags, lambda p: self.classes_[(p * self._class_weight).argmax(1)])

    def predict_bags(self, X: Any, bags: Any = None) -> np.ndarray:
        """Labels of bags (B,), in order of first appearance: the head's own prediction, or else the largest mean probability."""
        x, ids = self._validate_bagged(X, bags)
        return self.classes_[self._predict(x, ids).bag_prediction]

    def predict_shares(self, X: Any, bags: Any = None, level: float = 0.95) -> BagShares:
        """Shares of the classes in each bag, with intervals of this level (:meth:`FittedModel.estimate_shares`)."""
        x, ids = self._validate_bagged(X, bags)
        p = self._predict(x, ids, level)
        return BagShares(ids.names, *(a.astype(float) for a in (p.shares, p.shares_low, p.shares_high)))

    def score(self, X: Any, y: Any, bags: Any = None, sample_weight: Any = None) -> float:  # ty: ignore[incompatible-method-override]
        """Bag accuracy: the fraction of bags whose label :meth:`predict_bags` predicts correctly."""
        return self.score_bags(X, y, bags, sample_weight)

    def score_bags(self, X: Any, y: Any, bags: Any = None, sample_weight: Any = None, *, metric: str = "accuracy") -> float:
        """The score of the labelled bags by a metric of :class:`BagScorer`; ``sample_weight``: of each row, or of each bag of a
        list; a bag has the mean weight of its rows."""
        x, ids = self._validate_bagged(X, bags)
        values, codes = targets.bag_labels(y, ids, len(x), self.classes_)
        same = clean_names(values)[:, None] == clean_names(self.classes_)
        label = np.where(same.any(1), same.argmax(1), -1)[codes]  # -1 for a label that fit has not seen
        labelled = (codes >= 0) & ((label >= 0) | (metric != "criterion"))
        weight = targets.bag_weights(sample_weight, ids, len(x))
        if not labelled.any():
            raise HeadcountError("no bag has a label that the model knows; there is nothing to compare with")
        tested, label = self._bags(x, ids, label).take(labelled), label[labelled]
        with limit_threads(self.n_jobs):
            if metric == "criterion":
                p, _ = estimator_probabilities(self._model.estimator, tested, frozen_backbone=self._model.frozen_backbone)
                value = -evaluate_criterion(p, tested).loss_per_bag
            else:
                predictions = self._model.predict(tested, level=None)
                correct = np.where(label >= 0, predictions.bag_probabilities[np.arange(len(label)), label], 0.0)
                value = predictions.bag_prediction == label if metric == "accuracy" else np.log(np.maximum(correct, 1e-12))
        return float(np.average(value, weights=weight[labelled]))

    def save(self, folder: Path | str, overwrite: bool = False) -> Path:
        """Write ``fitted_``, which :meth:`load` and ``headcount predict`` read; not what any other scikit-learn classifier learned."""
        check_is_fitted(self)
        return self.fitted_.save(folder, overwrite=overwrite)

    @classmethod
    def load(cls, folder: Path | str, backbone: CustomBackbone | None = None, head: type[Head] | None = None) -> Self:
        """A fitted estimator from a folder of :meth:`save` or ``headcount fit``, with its classes and without its parameters; of a
        network with a ``backbone`` or a ``head`` of your own give the class (:meth:`FittedModel.load`)."""
        estimator = cls()
        vars(estimator).update(fitted_attributes(FittedModel.load(folder, backbone=backbone, head=head)))
        return estimator

    def _map_instances(self, X: Any, bags: Any, transform: Callable[[np.ndarray], np.ndarray]) -> Any:
        """A function of the instance probabilities, in the order and the shape of X."""
        check_is_fitted(self)
        if self._bags_given:
            refuse_instance_scorers()
        uses_bags = isinstance(self._model.estimator, Model) and self._model.estimator.instance_depends_on_bag
        x, ids = read_rows(self, X, bags, use="optional" if uses_bags else "ignored")
        values = transform(self._predict(x, ids).instance_probabilities[np.argsort(ids.order)])
        if not ids.from_list:
            return values
        listed = np.split(values, np.cumsum(ids.sizes)[:-1])
        return np.stack(listed) if isinstance(X, np.ndarray) and X.dtype != object else listed

    def _predict(self, x: np.ndarray, ids: BagIds, level: float | None = None) -> Predictions:
        """The model's predictions, rows in the order of ``ids``; shares only with a ``level``."""
        with limit_threads(self.n_jobs):
            return self._model.predict(self._bags(x, ids, [-1] * len(ids.sizes)), level=level)

    def _bags(self, x: np.ndarray, ids: BagIds, labels: Any, weight: np.ndarray | None = None) -> Bags:
        """The rows as bags, whose classes have numbers for names."""
        rows = x if not np.any(np.diff(ids.order) < 0) else x[ids.order]  # sorted rows are not copied
        # standardised float32 for our own methods, the numbers as they are for a classifier of scikit-learn
        rows = rows if self._scaler is None else self._scaler.transform(rows)
        pool = Pool(rows, trusted=x.ndim == 2, keep_float64=x.ndim == 2 and self._scaler is None)
        classes, weight = [str(c) for c in range(len(self.classes_))], None if weight is None else weight[ids.order]
        votes = find_counts(labels, np.asarray(ids.sizes)) if np.ndim(labels) == 2 else None
        return Bags.of(pool, sizes=ids.sizes, labels=labels, classes=classes, weight=weight, votes=votes)

    def _validate_bagged(self, X: Any, bags: Any) -> tuple[np.ndarray, BagIds]:
        check_is_fitted(self)
        x, ids = read_rows(self, X, bags)
        if self._bags_given and not ids.given:
            advice = "give bags= (a Pipeline or a search needs metadata routing), a column or a list"
            raise HeadcountError(f"nothing says which rows of X are one bag; {advice}")
        return x, ids
