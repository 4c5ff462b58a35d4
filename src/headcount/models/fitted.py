"""FittedModel: what ``headcount fit`` leaves in a folder: model.safetensors has the arrays of the estimator, of the preprocessor
and of the frozen backbone, model.json everything else; report.html and MODEL_CARD.md are for people, and nothing reads them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headcount.bags import Bags, Segments
from headcount.bags.bags import bag_hashes, hashes_from_hex
from headcount.errors import HeadcountError, check_number
from headcount.majority import proportions
from headcount.majority.calibration import apply_temperature
from headcount.majority.share_intervals import ShareCalibration, ShareModel, estimate_share_intervals
from headcount.majority.transition import Transition
from headcount.models import serialization
from headcount.models.backbones import CustomBackbone
from headcount.models.heads import Head
from headcount.models.network import FrozenBackbone, Model, config_to_json, custom_backbone, network_from_json, parse_network
from headcount.models.predictions import BATCH_INSTANCES, Estimator, Predictions, estimator_probabilities
from headcount.models.trees import ARRAY_MODELS
from headcount.readers.columns import ColumnRoles, preview
from headcount.readers.dataset import BagDataset
from headcount.readers.preprocessing import Preprocessor
from headcount.readers.reader import read

_SCHEMA = {
    **dict.fromkeys(("format", "kind", "classes", "temperature", "instance_temperature", "preprocessor"), Any),
    **{"counted?": [bool], "transition": {"mix": [[float]], "labels": [float]}, "concentration?": float, "use_context": bool},
    "share_model?": {"weight": [float], "spread": [float]},
    "share_calibration?": {"intercept": [float], "slope": float, "scores": [[float]]},
    **{"config?": dict, "frozen_backbone?": dict, "metadata": dict},
}
_BATCH_BYTES = 1 << 26  # of prepared instances that go through the network at once


@dataclass(frozen=True, eq=False)
class FittedModel:
    """An estimator, how data are prepared for it, and what is known of how good it is.

    Attributes
    ----------
    estimator
        A network, trees, a linear model, or a scikit-learn classifier (in memory only).
    preprocessor
        Turns what was read into the estimator's instances.
    transition
        P(class | bag's label) and the label frequencies; ``transition.share`` is the expected majority share of each class.
    counted
        Which classes count in the vote; None is all.
    temperature, instance_temperature
        Log-probabilities of bags and of instances are divided by these, and normalised again.
    concentration
        How similar the shares of bags are; None if there were too few bags to tell.
    use_context
        Whether the rest of a bag is used as context for its instances.
    share_model, share_calibration
        How far estimates of a bag's shares are to be trusted, by the labels of held-out bags, and by known shares of some bags.
    metadata
        Plain JSON: method, recipe, data, scores, versions, ...
    frozen_backbone
        Turns images into the features that the estimator takes, if any.

    Examples
    --------
    >>> model = FittedModel.load("model")                                               # doctest: +SKIP
    >>> predictions = model.predict(model.read("new.csv"))                              # doctest: +SKIP
    >>> predictions.instance_probabilities.shape, predictions.shares.sum(1)             # doctest: +SKIP
    """

    estimator: Estimator
    classes: tuple[str, ...]
    preprocessor: Preprocessor
    transition: Transition
    counted: tuple[bool, ...] | None = None
    temperature: float = 1.0
    instance_temperature: float = 1.0
    concentration: float | None = None
    use_context: bool = False
    share_model: ShareModel | None = None
    share_calibration: ShareCalibration | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    frozen_backbone: FrozenBackbone | None = None

    @property
    def kind(self) -> str:
        """network, forest, boosting or linear; sklearn for a classifier in memory only."""
        return self.estimator.kind

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.preprocessor.shape))
        return f"FittedModel({self.kind}: {len(self.classes)} classes, {self.preprocessor.kind} of {shape})"

    def read(self, data: Any, roles: ColumnRoles | None = None, *, need_labels: bool = False, **options: Any) -> BagDataset:
        """Read data with this model's columns and classes; ``options`` as :func:`headcount.read` takes them. An array (n, columns)
        has the columns of the table that the model was fitted on, in their order."""
        if self.preprocessor.kind == "table" and getattr(data, "ndim", 0) == 2 and not hasattr(data, "columns"):
            data = data.toarray() if hasattr(data, "toarray") else np.asarray(data)
            names = [f.name for f in self.preprocessor.fields]
            if data.shape[1] != len(names):
                raise HeadcountError(f"the array has {data.shape[1]} columns, the model takes {len(names)}: {preview(names)}")
            data = dict(zip(names, data.T, strict=True))
        uncounted = [c for c, counts in zip(self.classes, self.counted or (), strict=False) if not counts]
        options = {"classes": self.classes, "uncounted": uncounted, "min_size": max(1, self.min_bag_size), **options}
        return read(data, roles, need_labels=need_labels, preprocessor=self.preprocessor, **options)

    def predict(
        self, data: Any, *, use_context: bool | None = None, level: float | None = 0.9, batch_instances: int | None = None
    ) -> Predictions:
        """Predict instances, labels and shares of bags. Removed instances get predictions and do not count for their bag.

        Parameters
        ----------
        data
            What :meth:`read` takes or returned, or bags over instances as the preprocessor makes them. Without bags, as in a
            DataFrame that has no such column or an array (n, D), each instance is predicted by itself.
        use_context
            Use the rest of a bag as context for its instances. By default as held-out bags decided, and never in bags that the
            model was trained on: each bag decides for itself, independently of the others.
        level
            Of the intervals of the shares; None leaves shares out (NaN).
        batch_instances
            How many instances go through the estimator at once.
        """
        data = data if isinstance(data, (Bags, BagDataset)) else self.read(data)
        bags = data.to_bags(self.preprocessor) if isinstance(data, BagDataset) else data
        if not len(bags):
            raise HeadcountError("no bags to predict; give at least one")
        if bags.pool.shape != self.preprocessor.shape:
            problem = f"the model takes instances of shape {self.preprocessor.shape}, got {bags.pool.shape}"
            raise HeadcountError(f"{problem}; prepare them with dataset.to_bags(model.preprocessor)")
        if batch_instances is None:
            batch_instances = max(16, min(BATCH_INSTANCES, _BATCH_BYTES // (4 * math.prod(bags.pool.shape))))
        p, bag_log_p = estimator_probabilities(
            self.estimator, bags, self.counted, frozen_backbone=self.frozen_backbone, batch_instances=batch_instances
        )
        p = instance = apply_temperature(p, self.instance_temperature)
        bag = (bag_log_p / self.temperature).log_softmax(1).exp()
        seen = self.seen_in_training(bags)
        if self.use_context if use_context is None else use_context:
            instance = self.posterior_in_context(p, bags.segments().to("cpu"))
            if use_context is None:  # decided on held-out bags, which these are not
                instance = torch.where(torch.from_numpy(seen)[bags.bag.cpu()][:, None], p, instance)
        shares = (torch.full_like(bag, math.nan),) * 3 if level is None else self.estimate_shares(p, bags, level=level)
        return Predictions(self.classes, *(t.numpy() for t in (instance.float(), bag.float(), *shares)), seen)

    def predict_proba(self, data: Any) -> np.ndarray:
        """(n, C) class probabilities of the rows of a DataFrame, array, file, ..., in their order; columns as ``classes``."""
        dataset = data if isinstance(data, BagDataset) else self.read(data)
        return dataset.broadcast(self.predict(dataset, level=None).instance_probabilities, np.nan)

    @property
    def min_bag_size(self) -> int:
        """The k of a model that was fitted with ``private=k``: it reads no smaller bag; 0 for any other model."""
        size = self.metadata.get("min_bag_size")
        return 0 if size is None else check_number("min_bag_size", size, 2, 1 << 30, integer=True)

    def seen_in_training(self, bags: Bags) -> np.ndarray:
        """(B,) whether the model was trained on each of these bags, by the hashes that it keeps of them."""
        data = self.metadata.get("data")
        hashes = hashes_from_hex(data.get("bag_hashes") if isinstance(data, dict) else None)
        return np.isin(bag_hashes(bags), hashes) if len(hashes) else np.zeros(len(bags), dtype=bool)

    def posterior_in_context(self, p: Tensor, segments: Segments) -> Tensor:
        """(N, C) probabilities of instances given the others in their bag, from those without context."""
        if self.concentration is None:
            raise HeadcountError("this model was fitted on too few bags to use a bag as context for its instances")
        return proportions.posterior_in_context(_log(p), segments, self.prior, self.concentration).exp().float()

    @property
    def prior(self) -> Tensor:
        """(C,) how frequent the classes are, as estimated; no class is impossible."""
        prior = self.transition.prior.double().clamp_min(1e-6)
        return prior / prior.sum()

    def estimate_shares(self, p: Tensor, bags: Bags, *, level: float = 0.9) -> tuple[Tensor, Tensor, Tensor]:
        """(B, C) the class shares of each bag and the ends of an interval, from probabilities (N, C) without context.

        The labels of held-out bags say what to trust (majority/share_intervals.py), and known shares correct it; a model without
        held-out bags takes the mean of the probabilities. Labels of these bags are not used.
        """
        segments, calibration = bags.segments().to("cpu"), self.share_calibration
        base = level if calibration is None else 0.9
        trust = self.prior, self.concentration, self.share_model
        estimate = estimate_share_intervals(_log(p), segments, *trust, base)
        return estimate if calibration is None else calibration.apply(estimate, level)

    def to(self, device: torch.device | str) -> FittedModel:
        """The same model with its networks on a device."""
        frozen_backbone = None if self.frozen_backbone is None else self.frozen_backbone.to(device)
        estimator = self.estimator.to(device) if isinstance(self.estimator, Model) else self.estimator
        return replace(self, frozen_backbone=frozen_backbone, estimator=estimator)

    def replace(self, **changes: Any) -> FittedModel:
        """The same model with other fields."""
        return replace(self, **changes)

    def save(self, path: Path | str, documents: Mapping[str, str] | None = None, overwrite: bool = False) -> Path:
        """Write a whole folder or none: a new one, or with ``overwrite`` one that holds a model.

        ``documents``: file name -> text, for the report and the card.
        """
        frozen = {} if self.frozen_backbone is None else serialization.state_arrays(self.frozen_backbone)
        parts = {"estimator": self.estimator.arrays(), "preprocessor": self.preprocessor.arrays(), "frozen_backbone": frozen}
        arrays = {f"{part}.{k}": v for part, values in parts.items() for k, v in values.items()}
        parse = partial(_parse_fitted, backbone=custom_backbone(self.estimator) if isinstance(self.estimator, Model) else None)
        return serialization.write_folder(Path(path), arrays, self.to_json(), parse, documents=documents, overwrite=overwrite)

    def to_json(self) -> dict[str, Any]:
        """What model.json keeps."""
        backbone = self.frozen_backbone
        return {
            "kind": self.kind,
            "classes": list(self.classes),
            "counted": None if self.counted is None else list(self.counted),
            "temperature": self.temperature,
            "instance_temperature": self.instance_temperature,
            "transition": {"mix": self.transition.mix.tolist(), "labels": self.transition.label_prior.tolist()},
            "concentration": self.concentration,
            "use_context": self.use_context,
            "share_model": None if self.share_model is None else asdict(self.share_model),
            "share_calibration": None if self.share_calibration is None else asdict(self.share_calibration),
            "preprocessor": self.preprocessor.to_json(),
            "config": config_to_json(self.estimator) if isinstance(self.estimator, Model) else None,
            "frozen_backbone": None if backbone is None else {"backbone": backbone.name, "size": backbone.size},
            "metadata": self.metadata,
        }

    @classmethod
    def load(cls, path: Path | str, backbone: CustomBackbone | None = None, head: type[Head] | None = None) -> FittedModel:
        """The model in a folder that :meth:`save` wrote. Nothing in the folder is run, and anything unexpected is an error. Of a
        network with a ``backbone`` or a ``head`` of your own give the class; also a function that makes the backbone, or a module."""
        return serialization.load_folder(Path(path), partial(_parse_fitted, backbone=backbone, head=head))


def _log(p: Tensor) -> Tensor:
    return p.clamp_min(1e-30).double().log()


def load_model(path: Path | str) -> FittedModel | Model:
    """The model in a folder, of either kind."""

    def parse(data: dict[str, Any], arrays: dict[str, np.ndarray]) -> FittedModel | Model:
        return parse_network(data, arrays) if data["kind"] == "bare network" else _parse_fitted(data, arrays)

    return serialization.load_folder(Path(path), parse)


def _parse_fitted(
    data: dict[str, Any], arrays: Mapping[str, np.ndarray], *,
    backbone: CustomBackbone | None = None, head: type[Head] | None = None,
) -> FittedModel:  # fmt: skip
    if data["kind"] == "bare network":
        raise HeadcountError("it is a network without a preprocessor; use Model.load")
    serialization.check_fields(data, _SCHEMA)
    parts = serialization.split_arrays(arrays, ("estimator", "preprocessor", "frozen_backbone"))
    classes = serialization.check_names(data["classes"], "classes")
    counted = serialization.check_counted(data["counted"], len(classes))
    preprocessor = Preprocessor.from_parts(data["preprocessor"], parts["preprocessor"])
    frozen_backbone = FrozenBackbone.from_json(data["frozen_backbone"], preprocessor.shape, parts["frozen_backbone"])
    shape = preprocessor.shape if frozen_backbone is None else (frozen_backbone.dim,)
    kind, config = data["kind"], data["config"]
    estimator: Estimator
    if kind == "network":
        estimator = network_from_json(config, shape, classes, counted, parts["estimator"], backbone=backbone, head=head)
    elif backbone is not None:
        raise HeadcountError(f"it is a {str(kind)[:40]} and has no backbone; leave backbone= out")
    elif kind not in tuple(ARRAY_MODELS):  # a list, which has no hash, is an error too
        raise HeadcountError(f"kind {str(kind)[:40]!r} is none of network, {', '.join(ARRAY_MODELS)}")
    elif config is not None or len(shape) != 1:
        raise HeadcountError(f"a {kind} takes features and has no config")
    else:
        estimator = ARRAY_MODELS[kind].from_arrays(parts["estimator"], shape[0], len(classes))
    temperatures = [check_number(k, data[k], 1e-6, 1e6, integer=False) for k in ("temperature", "instance_temperature")]
    concentration, use_context = data["concentration"], data["use_context"]
    if concentration is not None:
        concentration = check_number("concentration", concentration, 1e-3, 1e9, integer=False)
    if use_context and concentration is None:
        raise HeadcountError("use_context is false where concentration is null")
    rows = [*data["transition"]["mix"], data["transition"]["labels"]]
    if list(map(len, rows)) != [len(classes)] * (len(classes) + 1) or not all(0 <= value <= 1 for row in rows for value in row):
        raise HeadcountError(f"the transition needs {len(classes) + 1} rows of {len(classes)} numbers from 0 to 1")
    if not all(math.isclose(sum(row), 1, abs_tol=1e-3) for row in rows):
        raise HeadcountError("a row of the transition does not add up to one")
    table = torch.tensor(rows, dtype=torch.float32)
    transition = Transition(table[:-1], table[-1])
    return FittedModel(
        estimator, classes, preprocessor, transition, counted, *temperatures,
        concentration, use_context, ShareModel.from_json(data["share_model"]),
        ShareCalibration.from_json(data["share_calibration"], len(classes)), data["metadata"], frozen_backbone,
    )  # fmt: skip
