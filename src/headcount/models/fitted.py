"""Fitted: what ``headcount fit`` leaves in a folder, and the only thing the other commands need to know of a model.

    model.safetensors  the arrays: a network's weights, a forest's nodes or a linear model's coefficients (``body.``), what
                       the preparation learned (``learned.``), and the frozen backbone in front of it, if any (``eye.``)
    model.json         everything else, written last: a folder without it is no model
    report.html, MODEL_CARD.md   for people; nothing reads them

    >>> from headcount.models.fitted import Fitted
    >>> fitted = Fitted.load("model")                                                   # doctest: +SKIP
    >>> reading = fitted.read("new.csv")                                                # doctest: +SKIP
    >>> answer = fitted.say(reading.bags(fitted.learned))                               # doctest: +SKIP
    >>> answer.instance.shape, answer.bag.exp().sum(1)                                  # doctest: +SKIP

Loading runs no code and builds nothing larger than the file it reads; whatever is unexpected in it is refused in one line.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from headcount.bags import Bags, Segments, hashing
from headcount.bags.pool import to_feature_array
from headcount.errors import HeadcountError
from headcount.majority import proportions
from headcount.majority import transition as tilt
from headcount.majority.calibration import apply_temperature, log_mean_shares
from headcount.majority.proportions import mean_proportions
from headcount.models import file_checks, serialization
from headcount.models.frozen_backbone import FrozenBackbone
from headcount.models.network import Model, predict, predict_instances
from headcount.models.trees import LinearModel, SklearnModel, Trees
from headcount.readers import BagDataset, read
from headcount.readers.columns import ColumnRoles
from headcount.readers.preprocessing import Preprocessor

MODEL_KEYS = {
    *("format", "kind", "classes", "counted", "temperature", "instance_temperature", "tilt", "alike", "listens"),
    *("preparation", "design", "facts"),
}


class BatchPredictions(NamedTuple):
    """What a fitted model says of bags, on the CPU."""

    instance_probabilities: Tensor  # (N, C) probabilities, in the bag's context where the model listens to it
    bag_log_probabilities: Tensor  # (B, C) log-probabilities of the bag's label
    instance_without_context: Tensor  # (N, C) probabilities of each instance by itself
    seen_in_training: Tensor  # (B,) the model was trained on this bag


@dataclass(frozen=True, eq=False)
class FittedModel:
    """A model, how data are prepared for it, and what is known of how good it is.

    ``temperature``: bag log-probabilities are divided by it and normalised again; chosen on cross-validated bags.
    ``instance_temperature``: the same for instances, under which they explain held-out labels best (majority/criterion.py).
    ``tilt``: P(class | bag's label) and the label frequencies, as estimated from held-out bags; ``tilt.share`` is the
    expected majority share of each class. ``alike``: how alike bags are in their shares, None if nobody could tell;
    ``listens``: whether an instance is answered in the light of the others in its bag (majority/calibration.py decides both on
    held-out bags). ``facts``: plain JSON (method, recipe, data, scores, candidates, versions, ...). ``eye``: a frozen backbone
    that stands before the body: pictures come in, and the body is asked about their features.
    """

    estimator: Model | Trees | LinearModel | SklearnModel
    classes: tuple[str, ...]
    preprocessor: Preprocessor
    transition: tilt.Transition
    counted: tuple[bool, ...] | None = None
    temperature: float = 1.0
    instance_temperature: float = 1.0
    concentration: float | None = None
    use_context: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)
    frozen_backbone: FrozenBackbone | None = None

    @property
    def kind(self) -> str:
        """network, forest or linear; held for a classifier that lives in memory only."""
        return "network" if isinstance(self.estimator, Model) else self.estimator.kind

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.preprocessor.shape))
        return f"Fitted({self.kind}: {len(self.classes)} classes, {self.preprocessor.kind} of {shape})"

    def read(
        self, data: Any, roles: ColumnRoles | None = None, *, need_labels: bool = False, **options: Any
    ) -> BagDataset:
        """Read data as this model's were: its columns, its classes; ``how`` as :func:`headcount.readers.read` takes it."""
        uncounted = (
            [] if self.counted is None else [c for c, on in zip(self.classes, self.counted, strict=True) if not on]
        )
        options = {"classes": self.classes, "uncounted": uncounted, **options}
        return read(data, roles, need_labels=need_labels, preprocessor=self.preprocessor, **options)

    def predict(self, bags: Bags, *, use_context: bool | None = None, batch_instances: int = 8192) -> BatchPredictions:
        """Ask about bags, a part of the instances at a time. Removed instances are answered, and not counted. ``listen``: to
        an instance's bag; the default is what held-out bags decided, in bags that were not trained on: each bag decides for
        itself, whatever else is asked about."""
        if not len(bags):
            raise HeadcountError("no bags to ask about; give at least one")
        if bags.pool.shape != self.preprocessor.shape:
            raise HeadcountError(
                f"the model takes instances of shape {self.preprocessor.shape}, got {bags.pool.shape}; "
                "prepare them with bags(learned=fitted.learned)"
            )
        segments, seen_in_training = bags.segments().to("cpu"), self.seen_in_training(bags)
        if self.frozen_backbone is not None:
            bags = replace(bags, pool=self.frozen_backbone.lazy_features(bags.pool))
        if isinstance(self.estimator, Model) and not self.estimator.head.mean_of_instances:
            output = predict(self.estimator, bags, batch_instances=batch_instances)
            p, bag = output.instance.softmax(1), self._temper_bags(output.bag)
        else:  # a bag of any size is asked in parts
            p = self._instance_probabilities(bags, batch_instances)
            bag = self._temper_bags(
                log_mean_shares(p, segments, None if self.counted is None else torch.tensor(self.counted))
            )
        p = apply_temperature(p, self.instance_temperature)
        if not (self.use_context if use_context is None else use_context):
            return BatchPredictions(p, bag, p, seen_in_training)
        in_context = self.posterior_in_context(p, segments)
        if use_context is None and bool(seen_in_training.any()):  # held-out bags decided, and these were none
            in_context = torch.where(seen_in_training[bags.bag.cpu()][:, None], p, in_context)
        return BatchPredictions(in_context, bag, p, seen_in_training)

    def seen_in_training(self, bags: Bags) -> Tensor:
        """(B,) whether the model was trained on each of these bags, by the prints it keeps of them (bags/hashing.py)."""
        if not len(self._training_hashes):
            return torch.zeros(len(bags), dtype=torch.bool)
        return torch.from_numpy(np.isin(hashing.bag_hashes(bags), self._training_hashes))

    @cached_property
    def _training_hashes(self) -> np.ndarray:
        data = self.metadata.get("data")
        return hashing.hashes_from_hex(data.get("bag_hashes") if isinstance(data, dict) else None)

    def posterior_in_context(self, p: Tensor, segments: Segments) -> Tensor:
        """(N, C) probabilities of instances in the light of the others in their bag, from those of each alone."""
        if self.concentration is None:
            raise HeadcountError("this model was fitted on too few bags to know what a bag tells of its instances")
        return (
            proportions.posterior_in_context(
                p.clamp_min(1e-30).double().log(), segments, self.prior, self.concentration
            )
            .exp()
            .float()
        )

    @property
    def prior(self) -> Tensor:
        """(C,) how frequent the classes are, as estimated; no class is impossible."""
        prior = self.transition.prior.double().clamp_min(1e-6)
        return prior / prior.sum()

    def estimate_shares(
        self, probabilities: Tensor, bags: Bags, *, level: float = 0.9
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(B, C) the class shares of each bag's instances with the ends of an interval, from what was said of each ``alone``.
        Labels are not looked at.

        Where it is known how alike bags are, the shares are those a bag's instances make likely (majority/proportions.py); the mean of
        probabilities alone would lean towards how frequent classes are overall. Otherwise they are that mean.
        """
        segments = bags.segments().to("cpu")
        if self.concentration is None:
            return mean_proportions(probabilities, segments, level)
        return proportions.laplace_proportions(
            probabilities.clamp_min(1e-30).double().log(), segments, self.prior, self.concentration, level=level
        )

    def _instance_probabilities(self, bags: Bags, batch_instances: int) -> Tensor:
        """(N, C) probabilities of instances, each looked at by itself."""
        return torch.cat(
            [self.instance_probabilities(bags.pool.take(part)) for part in bags.index.split(batch_instances)]
        )

    def instance_probabilities(self, x: Tensor) -> Tensor:
        if isinstance(self.estimator, Model):
            return predict_instances(self.estimator, x).softmax(1)
        return torch.from_numpy(self.estimator.predict_proba(to_feature_array(x))).float()

    def _temper_bags(self, log_p: Tensor) -> Tensor:
        return (log_p / self.temperature).log_softmax(1)

    def to(self, device: torch.device | str) -> FittedModel:
        """The same, on a device; only networks have a place to be."""
        eye = None if self.frozen_backbone is None else self.frozen_backbone.to(device)
        return replace(
            self,
            frozen_backbone=eye,
            estimator=self.estimator.to(device) if isinstance(self.estimator, Model) else self.estimator,
        )

    def replace(self, **changes: Any) -> FittedModel:
        return replace(self, **changes)

    # -- on disk ------------------------------------------------------------------------------------------------------

    def save(self, path: Path | str, documents: Mapping[str, str] | None = None, overwrite: bool = False) -> Path:
        """Write the folder, ``papers`` (file name -> text: the report, the card) with it. Only a model is ever replaced, and
        only with ``overwrite``."""
        return serialization.write_folder(Path(path), self.arrays(), self.to_json(), documents or {}, overwrite)

    def arrays(self) -> dict[str, np.ndarray]:
        parts = {
            "body": _state_arrays(self.estimator) if isinstance(self.estimator, Model) else self.estimator.arrays(),
            "learned": self.preprocessor.arrays(),
            "eye": {} if self.frozen_backbone is None else _state_arrays(self.frozen_backbone),
        }
        return {f"{part}.{k}": v for part, held in parts.items() for k, v in held.items()}

    def to_json(self) -> dict[str, Any]:
        if isinstance(self.estimator, Model) and ":" in self.estimator.config.head:
            raise HeadcountError(
                f"a model with a head from a file ({self.estimator.config.head}) cannot be saved: loading runs no code"
            )
        design = vars(self.estimator.config) if isinstance(self.estimator, Model) else None
        if design is not None:
            design = {k: design[k] for k in ("backbone", "backbone_options", "head", "options", "mirror")}
            design = {k: dict(v) if k.endswith("options") else v for k, v in design.items()}
        return {
            "format": serialization.FORMAT,
            "kind": self.kind,
            "classes": list(self.classes),
            "counted": None if self.counted is None else list(self.counted),
            "temperature": self.temperature,
            "instance_temperature": self.instance_temperature,
            "alike": self.concentration,
            "listens": self.use_context,
            "tilt": {"mix": self.transition.mix.tolist(), "labels": self.transition.label_prior.tolist()},
            "preparation": self.preprocessor.to_json(),
            "design": design,
            "facts": self.metadata,
            **(
                {}
                if self.frozen_backbone is None
                else {"eye": {"backbone": self.frozen_backbone.name, "size": self.frozen_backbone.size}}
            ),
        }

    @classmethod
    def load(cls, path: Path | str) -> FittedModel:
        """A folder that ``save`` wrote, or somebody else: nothing in it is trusted."""
        return serialization.one_line_errors(Path(path), lambda: _from_folder(Path(path)))


def _state_arrays(module: nn.Module) -> dict[str, np.ndarray]:
    return {k: v.detach().contiguous().cpu().numpy() for k, v in module.state_dict().items()}


def _from_folder(path: Path) -> FittedModel:
    data, arrays = serialization.read_folder(path)
    file_checks.check_keys(data, MODEL_KEYS | (data.keys() & {"eye"}))
    classes = file_checks.check_names(data["classes"], "classes")
    counted = None if data["counted"] is None else file_checks.check_counted(data["counted"], len(classes))
    preprocessor = Preprocessor.from_parts(data["preparation"], serialization.strip_prefix("learned.", arrays))
    estimator_arrays = serialization.strip_prefix("body.", arrays)
    known = ("body.", "learned.", "eye.") if "eye" in data else ("body.", "learned.")
    if odd := next((k for k in arrays if not k.startswith(known)), None):
        raise HeadcountError(f"model.safetensors holds {odd[:80]!r}, which belongs to nothing")
    frozen_backbone = (
        serialization.frozen_backbone_from_json(
            data["eye"], preprocessor.shape, serialization.strip_prefix("eye.", arrays)
        )
        if "eye" in data
        else None
    )
    shape = preprocessor.shape if frozen_backbone is None else (frozen_backbone.dim,)
    kinds = {"forest": Trees, "linear": LinearModel}
    estimator: Model | Trees | LinearModel
    if data["kind"] in kinds:
        if data["design"] is not None or len(shape) != 1:
            raise HeadcountError(f"a {data['kind']} takes features and has no design")
        estimator = kinds[data["kind"]].from_arrays(estimator_arrays, shape[0], len(classes))
    elif data["kind"] == "network":
        estimator = serialization.network_from_json(data["design"], shape, classes, counted, estimator_arrays)
    else:
        raise HeadcountError(f"kind {str(data['kind'])[:40]!r} is none of network, forest, linear")
    if not isinstance(data["facts"], dict):
        raise HeadcountError("facts must be an object")
    heat = [file_checks.check_number(data[k], k, 1e-6, 1e6) for k in ("temperature", "instance_temperature")]
    concentration = None if data["alike"] is None else file_checks.check_number(data["alike"], "alike", 1e-3, 1e9)
    if not isinstance(data["listens"], bool) or (data["listens"] and concentration is None):
        raise HeadcountError("listens is true or false, and false where alike is null")
    transition = _parse_transition(data["tilt"], len(classes))
    return FittedModel(
        estimator,
        classes,
        preprocessor,
        transition,
        counted,
        *heat,
        concentration,
        data["listens"],
        data["facts"],
        frozen_backbone,
    )


def _parse_transition(data: Any, classes: int) -> tilt.Transition:
    file_checks.check_keys(data, {"mix", "labels"}, "the tilt")
    mix, labels = (
        _probability_rows(data["mix"], (classes, classes)),
        _probability_rows([data["labels"]], (1, classes))[0],
    )
    return tilt.Transition(mix, labels)


def _probability_rows(given: Any, shape: tuple[int, int]) -> Tensor:
    """Rows of probabilities."""
    if not isinstance(given, list) or len(given) != shape[0]:
        raise HeadcountError(f"the tilt needs rows of {shape[1]} numbers")
    for row in given:
        good: Sequence[Any] = row if isinstance(row, list) and len(row) == shape[1] else ()
        if not good or not all(isinstance(v, (int, float)) and not isinstance(v, bool) and 0 <= v <= 1 for v in good):
            raise HeadcountError(f"the tilt needs rows of {shape[1]} numbers from 0 to 1")
        if not math.isclose(sum(good), 1, abs_tol=1e-3):
            raise HeadcountError("a row of the tilt does not add up to one")
    return torch.tensor(given, dtype=torch.float32)
