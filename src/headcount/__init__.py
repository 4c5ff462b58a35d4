"""headcount: learn a classifier for single instances from the majority labels of bags.

>>> import headcount as hc
>>> bags = hc.majority_bags(hc.load_source("digits"), fold=0, protocol=hc.Protocol(bag_size=24, train_bags=40))
>>> bags["train"]
Bags(40 bags, 960 instances, 10 classes, with truth)
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# the front door: a name and the room it lives in; a room (and torch) is opened when somebody asks for it
_DOOR = {
    "Bags": ("bags", "Bags"),
    "Pool": ("bags", "Pool"),
    "Segments": ("bags", "Segments"),
    "load_source": ("data.sources", "load"),
    "Protocol": ("data.protocol", "Protocol"),
    "majority_bags": ("data.protocol", "majority_bags"),
    "HEADS": ("models.heads", "HEADS"),
    "Head": ("models.heads", "Head"),
    "Model": ("models.model", "Model"),
    "say": ("models.model", "say"),
    "say_alone": ("models.model", "say_alone"),
    "Recipe": ("training.recipe", "Recipe"),
    "fit": ("training.train", "fit"),
    "prototypes": ("training.mpem", "prototypes"),
    "dissenters": ("training.mpem", "dissenters"),
    "run": ("judging.run", "run"),
    "study": ("judging.study", "run"),
    "grid": ("judging.study", "grid"),
    "MajorityClassifier": ("estimator", "MajorityClassifier"),
    "BagKFold": ("estimator", "BagKFold"),
    "HeadcountError": ("errors", "HeadcountError"),
}

__all__ = ["__version__", *_DOOR]  # noqa: PLE0604  strings all of them


def __getattr__(name: str) -> Any:
    if name not in _DOOR:
        raise AttributeError(f"module 'headcount' has no attribute {name!r}; there are {', '.join(_DOOR)}")
    room, thing = _DOOR[name]
    return getattr(import_module(f"headcount.{room}"), thing)


def __dir__() -> list[str]:
    return __all__
