"""Recipe: the frozen value that determines an experiment's numbers. The defaults are the paper's.

A run's key is a hash of the fields that differ from the defaults (and of the data), so a field that is added later leaves old
records valid. Defaults therefore never change once records exist.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from importlib.resources import files
from typing import Any, Self

from headcount.bags import Bags
from headcount.datasets import registry
from headcount.datasets.protocol import FOLDS, RANGES, Protocol, check_corruption
from headcount.errors import HeadcountError, check_bool, check_choice, check_number, to_python_scalar
from headcount.models import library_backbones
from headcount.models.backbones import BACKBONES
from headcount.models.heads import check_options, find_head, head_code
from headcount.models.network import ModelConfig
from headcount.training.config import TrainConfig
from headcount.training.mpem import DISTANCES, PROTOTYPE_BAGS

Options = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Recipe:
    """An experiment: data set, protocol, model and training. Two equal recipes give the same numbers.

    A custom head is only named here, so reading a recipe (for example from a record) never executes its file.

    Parameters
    ----------
    source : str
        Data set: digits, cifar10, svhn, path, oct, or a file (.npz).
    fold : int
        0 to 4.
    scenario, bag_size, train_bags, valid_bags, test_bags, sampler, tie, rounding, overlap
        See :class:`~headcount.datasets.protocol.Protocol`; its seed is ``data_seed``.
    backbone, backbone_options, head, options
        resnet18, quick, mlp, linear, timm:NAME or torchvision:NAME; a name from ``headcount heads`` or path/to/file.py:Class.
    epochs, batch_bags, batch_instances, chunk_instances, optimizer, lr, weight_decay, decay, schedule, warmup, views, selection, patience, seed, precision
        See :class:`~headcount.training.config.TrainConfig`; ``seed`` also determines the initial weights.
    removal : float
        MPEM's r, the fraction of each bag's predicted minority that is left out; 0: without MPEM.
    distance, prototype_bags, drop_before_forward
        MPEM: euclidean or mahalanobis; prototypes from correct or from all bags; whether removed instances skip the backbone too.
    mirror : bool
        Average the prediction over an image and its mirror image.
    trouble : dict
        Corruption of the bags: wrong, unequal, never, merge; see :func:`~headcount.datasets.protocol.check_corruption`.

    Examples
    --------
    >>> Recipe(fold=3).replace(epochs=600)
    Recipe(fold=3, epochs=600)
    >>> Recipe(removal=0.5).needs
    (Recipe(),)
    """

    # the data and its bags
    source: str = "cifar10"
    scenario: str = "various"
    fold: int = 0
    bag_size: int = 64
    train_bags: int = 400
    valid_bags: int = 100
    test_bags: int = 100
    data_seed: int = 42
    sampler: str = "conditional"
    tie: str = "lowest"
    rounding: str = "official"
    overlap: bool = True
    # the model
    backbone: str = "resnet18"
    backbone_options: Options = ()
    head: str = "count"
    options: Options = ()
    # the training
    epochs: int = 1500
    batch_bags: int = 64
    optimizer: str = "adam"
    lr: float = 3e-4
    weight_decay: float = 0.0
    schedule: str = "constant"
    warmup: float = 0.0
    views: str = "none"
    selection: str = "official"
    patience: int = 0
    seed: int = 0
    precision: str = "tf32"
    # MPEM
    removal: float = 0.0
    distance: str = "euclidean"
    prototype_bags: str = "correct"
    drop_before_forward: bool = False
    # added later: the defaults are what was done before
    batch_instances: int = 0
    decay: str = "all"
    mirror: bool = False
    chunk_instances: int = 0
    trouble: Options = ()

    def __post_init__(self) -> None:
        for name in ("options", "backbone_options", "trouble"):
            object.__setattr__(self, name, _sorted_options(getattr(self, name)))
        if not isinstance(self.source, str) or self.source.encode(errors="replace").decode() != self.source:
            raise HeadcountError(f"source is the name of a data set or a file, in UTF-8, got {self.source!r}")
        check_choice("distance", self.distance, DISTANCES)
        check_choice("prototype bags", self.prototype_bags, PROTOTYPE_BAGS)
        if isinstance(self.backbone, str) and library_backbones.is_library_backbone(self.backbone):
            library_backbones.split_name(self.backbone)
        else:
            check_choice("backbone", self.backbone, BACKBONES)
        for name, (low, high) in _RANGES.items():
            integer = isinstance(getattr(Recipe, name), int)
            object.__setattr__(self, name, check_number(name, getattr(self, name), low, high, integer=integer))
        for name, value in {**vars(self.protocol), **vars(self.train_config)}.items():  # checked there; seed: the training's
            object.__setattr__(self, name, value)
        for name in ("drop_before_forward", "mirror"):
            object.__setattr__(self, name, check_bool(name, getattr(self, name)))
        if not isinstance(self.head, str) or ":" not in self.head:
            check_options(self.head, dict(self.options))
        check_corruption(dict(self.trouble))

    @classmethod
    def preset(cls, name: str) -> Self:
        """A published recipe by name: paper, tilt-photographs, tilt-house-numbers, digits.

        >>> Recipe.preset("digits").bag_size
        24
        """
        presets = json.loads(files("headcount.experiments").joinpath("presets.json").read_text())
        return cls.from_dict(presets[check_choice("preset", name, presets)])

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The recipe with these fields, for example from a record; an unknown name is an error."""
        return cls(**_check_names(values))

    def replace(self, **changes: Any) -> Self:
        """The same recipe with these fields changed."""
        return replace(self, **_check_names(changes))

    @property
    def protocol(self) -> Protocol:
        """How the bags are made: what :func:`headcount.majority_bags` takes."""
        return Protocol(seed=self.data_seed, **{f.name: getattr(self, f.name) for f in fields(Protocol) if f.name != "seed"})

    @property
    def train_config(self) -> TrainConfig:
        """How the model is trained: what :func:`headcount.train` takes."""
        return TrainConfig(**{f.name: getattr(self, f.name) for f in fields(TrainConfig)})

    def model_config(self, bags: Bags) -> ModelConfig:
        """The network of this recipe for bags like these: what :func:`headcount.build_model` takes."""
        model = {name: getattr(self, name) for name in ("backbone", "backbone_options", "head", "options", "mirror")}
        return ModelConfig.for_bags(bags, **model)

    @property
    def changes(self) -> dict[str, Any]:
        """The fields that differ from the paper's defaults."""
        return {name: value for name, value in self.values.items() if getattr(self, name) != getattr(Recipe, name)}

    @property
    def values(self) -> dict[str, Any]:
        """All fields, as a record holds them."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: dict(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @property
    def key(self) -> str:
        """Sixteen hexadecimal digits that identify this run."""
        content = {"recipe": self.changes, "source": registry.source_checksum(self.source)}
        content |= {"head": code} if (code := self.code_hash) else {}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def code_hash(self) -> str:
        """A hash of a custom head's file as it is now; empty for a built-in head."""
        return hashlib.sha256(head_code(self.head)).hexdigest() if ":" in self.head else ""

    @property
    def needs(self) -> tuple[Self, ...]:
        """Runs that must have finished before: MPEM removes instances by the votes of the Counting Network of the same fold."""
        if self.removal == 0:
            return ()
        return (self.replace(**{name: getattr(Recipe, name) for name in _MPEM_FIELDS}),)

    @property
    def label(self) -> str:
        """The method's name in tables."""
        return find_head(self.head).display_name(dict(self.options)) + (" + MPEM" if self.removal else "")

    def __repr__(self) -> str:
        return f"Recipe({', '.join(f'{k}={v!r}' for k, v in self.changes.items())})"

    def __str__(self) -> str:
        title = f"{self.label}, {self.source} {self.scenario} fold {self.fold}"
        shown = ("source", "scenario", "fold", "head", "options")
        rest = ", ".join(f"{k}={v}" for k, v in self.changes.items() if k not in shown)
        return f"{title} ({rest})" if rest else title


_MPEM_FIELDS = ("removal", "distance", "prototype_bags", "drop_before_forward")
_RANGES: dict[str, tuple[float, float]] = {"fold": (0, FOLDS - 1), "data_seed": RANGES["seed"], "removal": (0.0, 1.0)}


def _check_names(values: Mapping[str, Any]) -> Mapping[str, Any]:
    names = [f.name for f in fields(Recipe)]
    for name in values:
        check_choice("recipe field", name, names)
    return values


def _sorted_options(given: Any) -> Options:
    try:
        pairs = dict(given).items()
    except (TypeError, ValueError):
        raise HeadcountError(f"options are names with values, got {given!r}") from None
    return tuple(sorted((str(name), _option_value(str(name), value)) for name, value in pairs))


def _option_value(name: str, given: Any) -> Any:
    """A value that JSON can hold."""
    value = to_python_scalar(given)
    if isinstance(value, (list, tuple)):
        return tuple(_option_value(name, v) for v in value)
    if not (value is None or isinstance(value, (str, int)) or (isinstance(value, float) and math.isfinite(value))):
        raise HeadcountError(f"option {name} is a finite number, true, false, a word or a list of these, got {given!r}")
    return value
