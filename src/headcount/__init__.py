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

# the public names and where they are defined; a module (and torch) is imported when one of its names is first used
_LAZY = {
    "Bags": ("bags", "Bags"),
    "Pool": ("bags", "Pool"),
    "Segments": ("bags", "Segments"),
    "load_source": ("datasets.registry", "load_source"),
    "Protocol": ("datasets.protocol", "Protocol"),
    "majority_bags": ("datasets.protocol", "majority_bags"),
    "read": ("readers", "read"),
    "ColumnRoles": ("readers", "ColumnRoles"),
    "BagDataset": ("readers", "BagDataset"),
    "HEADS": ("models.heads", "HEADS"),
    "Head": ("models.heads", "Head"),
    "SumHead": ("models.heads", "SumHead"),
    "Output": ("models.heads", "Output"),
    "build_head": ("models.heads", "build_head"),
    "Model": ("models.network", "Model"),
    "ModelConfig": ("models.network", "ModelConfig"),
    "build_model": ("models.network", "build_model"),
    "predict": ("models.predictions", "predict"),
    "predict_instances": ("models.predictions", "predict_instances"),
    "FittedModel": ("models.fitted", "FittedModel"),
    "Recipe": ("experiments.recipe", "Recipe"),
    "TrainConfig": ("training.config", "TrainConfig"),
    "train": ("training.loop", "train"),
    "prototypes": ("training.mpem", "prototypes"),
    "dissenters": ("training.mpem", "dissenters"),
    "run": ("experiments.run", "run"),
    "study": ("experiments.study", "study"),
    "grid": ("experiments.study", "grid"),
    "fit": ("selection.fit", "fit"),
    "check": ("selection.check.check", "check"),
    "MajorityClassifier": ("estimators.majority_classifier", "MajorityClassifier"),
    "BagKFold": ("estimators.bag_kfold", "BagKFold"),
    "HeadcountError": ("errors", "HeadcountError"),
}

__all__ = [  # the same names, written out: type checkers and editors run nothing
    "HEADS",
    "BagDataset",
    "BagKFold",
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
    from headcount.estimators.bag_kfold import BagKFold
    from headcount.estimators.majority_classifier import MajorityClassifier
    from headcount.experiments.recipe import Recipe
    from headcount.experiments.run import run
    from headcount.experiments.study import grid, study
    from headcount.models.fitted import FittedModel
    from headcount.models.heads import HEADS, Head, Output, SumHead, build_head
    from headcount.models.network import Model, ModelConfig, build_model
    from headcount.models.predictions import predict, predict_instances
    from headcount.readers import BagDataset, ColumnRoles, read
    from headcount.selection.check.check import check
    from headcount.selection.fit import fit
    from headcount.training.config import TrainConfig
    from headcount.training.loop import train
    from headcount.training.mpem import dissenters, prototypes
else:  # hidden from type checkers, which would otherwise accept any name

    def __getattr__(name: str) -> Any:
        if name not in _LAZY:
            raise AttributeError(f"module 'headcount' has no attribute {name!r}; there are {', '.join(_LAZY)}")
        module, attribute = _LAZY[name]
        return getattr(import_module(f"headcount.{module}"), attribute)


def __dir__() -> list[str]:
    return __all__
