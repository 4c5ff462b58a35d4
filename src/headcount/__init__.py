"""headcount: learn a classifier for single instances from the majority labels of bags.

>>> import headcount as hc
>>> bags = hc.majority_bags(hc.load_source("digits"), fold=0, protocol=hc.Protocol(bag_size=24, train_bags=40))
>>> bags["train"]
Bags(40 bags, 960 instances, 10 classes, with truth)
"""

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
    "readers.text_encoders": ("encode_texts",),
    "selection.check": ("check",),
    "selection.fit": ("fit",),
    "training.config": ("TrainConfig",),
    "training.loop": ("train",),
    "training.mpem": ("dissenters", "prototypes"),
}
_LAZY = {name: module for module, names in _MODULES.items() for name in names}

__all__ = ["__version__", *_LAZY]  # noqa: PLE0604 - they are names

if TYPE_CHECKING:  # for type checkers and editors, which run nothing: "as" exports a name
    from headcount.bags import Bags as Bags, Pool as Pool, Segments as Segments
    from headcount.datasets.protocol import Protocol as Protocol, majority_bags as majority_bags
    from headcount.datasets.registry import load_source as load_source
    from headcount.errors import HeadcountError as HeadcountError
    from headcount.estimators.majority_classifier import MajorityClassifier as MajorityClassifier
    from headcount.estimators.model_selection import BagKFold as BagKFold, BagScorer as BagScorer
    from headcount.experiments.recipe import Recipe as Recipe
    from headcount.experiments.run import run as run
    from headcount.experiments.study import grid as grid, study as study
    from headcount.models.fitted import FittedModel as FittedModel
    from headcount.models.heads import (
        HEADS as HEADS,
        Head as Head,
        Output as Output,
        SumHead as SumHead,
        build_head as build_head,
    )
    from headcount.models.network import Model as Model, ModelConfig as ModelConfig, build_model as build_model
    from headcount.models.predictions import predict as predict, predict_instances as predict_instances
    from headcount.readers import BagDataset as BagDataset, ColumnRoles as ColumnRoles, read as read
    from headcount.readers.text_encoders import encode_texts as encode_texts
    from headcount.selection.check import check as check
    from headcount.selection.fit import fit as fit
    from headcount.training.config import TrainConfig as TrainConfig
    from headcount.training.loop import train as train
    from headcount.training.mpem import dissenters as dissenters, prototypes as prototypes
else:  # hidden from type checkers, which would otherwise accept any name

    def __getattr__(name: str) -> Any:
        if name not in _LAZY:
            raise AttributeError(f"module 'headcount' has no attribute {name!r}; there are {', '.join(_LAZY)}")
        return getattr(import_module(f"headcount.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return __all__
