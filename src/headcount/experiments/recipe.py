"""Recipe: the frozen value that decides a number, and nothing else.

The defaults are the paper's: the Counting Network on CIFAR-10 Various, 1,500 epochs of Adam at 3e-4, 64 bags of 64 a step.
A run is its recipe: the key is a hash of the fields that differ from the defaults (and of the data), so a field added later
leaves old records valid. Defaults therefore never change once records exist.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from headcount.bags import Bags
from headcount.datasets import corruption as troubles
from headcount.datasets import protocol, registry
from headcount.errors import HeadcountError, check_bool, check_choice, check_number, to_python_scalar
from headcount.models import library_backbones
from headcount.models.backbones import BACKBONES
from headcount.models.heads import check_options, find_head, head_code
from headcount.models.network import ModelConfig
from headcount.training.config import TrainConfig

Options = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a number. A head of one's own is only named here: a recipe that is read runs nobody's code.

    ::

        source            digits, cifar10, svhn, path, oct, or a file (.npz)
        scenario          various, small or large
        fold              0 to 4
        bag_size          instances in a bag; train_bags, valid_bags, test_bags: how many bags
        data_seed         of the folds and the bags
        sampler           conditional, or official: the released order of random numbers
        tie               lowest, random or reject
        rounding          official or largest_remainder
        overlap           whether bags may share instances
        backbone          resnet18, quick, mlp, linear, timm:NAME or torchvision:NAME; backbone_options are its own
        head              a name of ``headcount heads``, or path/to/file.py:Class; options are its own
        epochs            of training, batch_bags bags a step
        optimizer         adam, adamw or sgd, with lr and weight_decay
        schedule          of the rate: constant, cosine, or twice (down by the middle, again from half); warmup: while it rises
        views             none, noise, crop, flip_crop, image, digit, tissue or feature (docs/explanation/tilt.md)
        selection         the epoch kept: least validation loss, batch by batch (official) or bag by bag (mean), or the last
        patience          epochs without a better one after which training stops; 0: never
        seed              of the weights and of all that training draws
        precision         tf32, fp32 or bf16
        removal           MPEM's r; 0 is without MPEM. distance: euclidean or mahalanobis; prototype_bags: correct or all;
                          drop_before_forward: whether the removed leave the network too
        batch_instances   of a pass over loose instances; 0: as many as batch_bags bags hold
        decay             what weight_decay pulls at: all, or weights (no biases, no batch-norm)
        mirror            whether to answer with the mean over an image and its mirror image
        chunk_instances   in work at once (docs/how-to/size.md); 0: all of a batch
        trouble           wrong: share of wrong labels; unequal: how many times rarer the last class's label is; never: a class
                          that wins no bag; merge: so many training bags of one label become one

    >>> Recipe(fold=3).but(epochs=600)
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
    # how it learns
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
    # MPEM: the share r of each bag's predicted minority that is taken out of the count
    removal: float = 0.0
    distance: str = "euclidean"
    prototype_bags: str = "correct"
    drop_before_forward: bool = False
    # added since; the defaults are what was done before
    batch_instances: int = 0  # of a pass over loose instances; 0: as many as batch_bags bags hold
    decay: str = "all"  # what weight_decay pulls at: all, or weights (no biases, no batch-norm)
    mirror: bool = False  # answer with the mean over an image and its mirror image
    chunk_instances: int = 0  # in work at once; a larger batch, or bag, is taken piece by piece. 0: all of a batch
    trouble: Options = ()  # wrong labels, unequal or missing classes (datasets/corruption.py)

    def __post_init__(self) -> None:
        for f in fields(self):
            object.__setattr__(self, f.name, to_python_scalar(getattr(self, f.name)))
        for name in ("options", "backbone_options", "trouble"):
            object.__setattr__(self, name, _options(getattr(self, name)))
        for name, choices in _CHOICES.items():
            check_choice(name.replace("_", " "), getattr(self, name), choices)
        if not isinstance(self.backbone, str) or not library_backbones.is_library_backbone(self.backbone):
            check_choice("backbone", self.backbone, BACKBONES)
        else:
            library_backbones.split_name(self.backbone)  # somebody else's, by a plain name
        for name, (low, high) in _RANGES.items():
            whole = isinstance(getattr(Recipe, name), int)
            object.__setattr__(self, name, check_number(name, getattr(self, name), low, high, integer=whole))
        for name, value in vars(self.train_config).items():  # checked there
            object.__setattr__(self, name, value)
        for name in ("overlap", "drop_before_forward", "mirror"):
            check_bool(name, getattr(self, name))
        if not isinstance(self.head, str) or ":" not in self.head:
            check_options(self.head, dict(self.options))
        troubles.check_corruption(dict(self.trouble))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Recipe:
        """From a mapping, such as a record's; a name that no field has is an error."""
        known = [f.name for f in fields(cls)]
        for name in values:
            check_choice("recipe field", name, known)
        return cls(**values)

    def replace(self, **changes: Any) -> Recipe:
        """The same recipe with these fields changed."""
        for name in changes:
            check_choice("recipe field", name, [f.name for f in fields(self)])
        return replace(self, **changes)

    @property
    def train_config(self) -> TrainConfig:
        """How the model is trained: what :func:`headcount.train` takes."""
        return TrainConfig(**{f.name: getattr(self, f.name) for f in fields(TrainConfig)})

    def model_config(self, bags: Bags) -> ModelConfig:
        """The network of this recipe for bags like these: what :func:`headcount.build_model` takes."""
        names = ("backbone", "backbone_options", "head", "options", "mirror")
        return ModelConfig.for_bags(bags, **{name: getattr(self, name) for name in names})

    @property
    def changes(self) -> dict[str, Any]:
        """The fields that differ from the paper's defaults."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default}

    @property
    def values(self) -> dict[str, Any]:
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}

    @property
    def key(self) -> str:
        """Sixteen hexadecimal digits that name this run and no other."""
        content = {"recipe": self.changes, "source": registry.source_checksum(self.source)}
        if code := self.code_hash:
            content["head"] = code
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def code_hash(self) -> str:
        """A hash of the file of a head of one's own: it is what its file says today. Nothing for ours."""
        return hashlib.sha256(head_code(self.head)).hexdigest() if ":" in self.head else ""

    @property
    def needs(self) -> tuple[Recipe, ...]:
        """Runs that must have finished: MPEM asks the Counting Network of the same fold whom to remove."""
        if self.removal == 0:
            return ()
        defaults = {f.name: f.default for f in fields(self)}
        own = ("removal", "distance", "prototype_bags", "drop_before_forward")
        return (self.replace(**{name: defaults[name] for name in own}),)

    @property
    def label(self) -> str:
        """What tables call this method."""
        name = find_head(self.head).display_name(dict(self.options))
        return f"{name} + MPEM" if self.removal else name

    def __repr__(self) -> str:
        return f"Recipe({', '.join(f'{k}={v!r}' for k, v in self.changes.items())})"

    def __str__(self) -> str:
        where = f"{self.label}, {self.source} {self.scenario} fold {self.fold}"
        shown = ("source", "scenario", "fold", "head", "options")
        rest = ", ".join(f"{k}={v}" for k, v in self.changes.items() if k not in shown)
        return f"{where} ({rest})" if rest else where


def _options(given: Any) -> Options:
    try:
        pairs = dict(given).items()
    except (TypeError, ValueError):
        raise HeadcountError(f"options are names with values, got {given!r}") from None
    return tuple(sorted((str(k), _kept(str(k), v)) for k, v in pairs))


def _kept(name: str, given: Any) -> Any:
    """A value that a record can hold."""
    value = to_python_scalar(given)
    if isinstance(value, (list, tuple)):
        return tuple(_kept(name, v) for v in value)
    if not (value is None or isinstance(value, (str, int)) or (isinstance(value, float) and math.isfinite(value))):
        raise HeadcountError(f"option {name} is a finite number, true, false, a word or a list of these, got {given!r}")
    return value


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, tuple) else value


_CHOICES = {
    "scenario": protocol.SCENARIOS,
    "sampler": ("conditional", "official"),
    "tie": ("lowest", "random", "reject"),
    "rounding": ("official", "largest_remainder"),
    "distance": ("euclidean", "mahalanobis"),
    "prototype_bags": ("correct", "all"),
}
_RANGES: dict[str, tuple[float, float]] = {
    "fold": (0, protocol.FOLDS - 1),
    **{name: protocol.RANGES[name] for name in ("bag_size", "train_bags", "valid_bags", "test_bags")},
    "data_seed": protocol.RANGES["seed"],
    "removal": (0.0, 1.0),
}
