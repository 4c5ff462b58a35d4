"""headcount: learn a classifier for single instances from the majority labels of bags.

>>> import headcount as hc
>>> bags = hc.majority_bags(hc.load_source("digits"), fold=0, protocol=hc.Protocol(bag_size=24, train_bags=40))
>>> bags["train"]
Bags(40 bags, 960 instances, 10 classes, with truth)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# the public names by where they are defined; a module (and torch) is imported when one of its names is first used
_MODULES = {
    "bags": ("Bags", "Pool", "Segments"),
    "datasets.protocol": ("Protocol", "majority_bags"),
    "datasets.registry": ("load_source",),
    "errors": ("HeadcountError",),
    "estimators.model_selection": ("BagKFold", "BagScorer"),
    "estimators.majority_classifier": ("MajorityClassifier",),
    "experiments.recipe": ("Recipe",),
    "experiments.run": ("run",),
    "experiments.study": ("grid", "study"),
    "models.fitted": ("FittedModel",),
    "models.heads": ("HEADS", "Head", "Output", "SumHead", "build_head"),
    "models.network": ("Model", "ModelConfig", "build_model"),
    "models.predictions": ("predict", "predict_instances"),
    "readers": ("BagDataset", "ColumnRoles", "read"),
    "selection.check": ("check",),
    "selection.fit": ("fit",),
    "training.config": ("TrainConfig",),
    "training.loop": ("train",),
    "training.mpem": ("dissenters", "prototypes"),
}
_LAZY = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [  # the same names, written out: type checkers and editors run nothing
    "HEADS",
    "BagDataset",
    "BagKFold",
    "BagScorer",
    "Bags",
    "ColumnRoles",
    "FittedModel",
    "Head",
    "HeadcountError",
    "MajorityClassifier",
    "Model",
    "ModelConfig",
    "Output",
    "Pool",
    "Protocol",
    "Recipe",
    "Segments",
    "SumHead",
    "TrainConfig",
    "__version__",
    "build_head",
    "build_model",
    "check",
    "dissenters",
    "fit",
    "grid",
    "load_source",
    "majority_bags",
    "predict",
    "predict_instances",
    "prototypes",
    "read",
    "run",
    "study",
    "train",
]

if TYPE_CHECKING:
    from headcount.bags import Bags, Pool, Segments
    from headcount.datasets.protocol import Protocol, majority_bags
    from headcount.datasets.registry import load_source
    from headcount.errors import HeadcountError
    from headcount.estimators.majority_classifier import MajorityClassifier
    from headcount.estimators.model_selection import BagKFold, BagScorer
    from headcount.experiments.recipe import Recipe
    from headcount.experiments.run import run
    from headcount.experiments.study import grid, study
    from headcount.models.fitted import FittedModel
    from headcount.models.heads import HEADS, Head, Output, SumHead, build_head
    from headcount.models.network import Model, ModelConfig, build_model
    from headcount.models.predictions import predict, predict_instances
    from headcount.readers import BagDataset, ColumnRoles, read
    from headcount.selection.check import check
    from headcount.selection.fit import fit
    from headcount.training.config import TrainConfig
    from headcount.training.loop import train
    from headcount.training.mpem import dissenters, prototypes
else:  # hidden from type checkers, which would otherwise accept any name

    def __getattr__(name: str) -> Any:
        if name not in _LAZY:
            raise AttributeError(f"module 'headcount' has no attribute {name!r}; there are {', '.join(_LAZY)}")
        return getattr(import_module(f"headcount.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return __all__
