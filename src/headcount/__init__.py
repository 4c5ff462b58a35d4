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

# the front door: a name and the room it lives in; a room (and torch) is opened when somebody asks for it
_DOOR = {
    "Bags": ("bags", "Bags"),
    "Pool": ("bags", "Pool"),
    "Segments": ("bags", "Segments"),
    "load_source": ("data.sources", "load"),
    "Protocol": ("data.protocol", "Protocol"),
    "majority_bags": ("data.protocol", "majority_bags"),
    "read": ("data.read", "read"),
    "Named": ("data.read", "Named"),
    "Reading": ("data.read", "Reading"),
    "HEADS": ("models.heads", "HEADS"),
    "Head": ("models.heads", "Head"),
    "Tally": ("models.heads", "Tally"),
    "Output": ("models.heads", "Output"),
    "build_head": ("models.heads", "build_head"),
    "Model": ("models.model", "Model"),
    "say": ("models.model", "say"),
    "say_alone": ("models.model", "say_alone"),
    "Fitted": ("models.fitted", "Fitted"),
    "Recipe": ("training.recipe", "Recipe"),
    "fit": ("training.train", "fit"),
    "prototypes": ("training.mpem", "prototypes"),
    "dissenters": ("training.mpem", "dissenters"),
    "fresh_model": ("judging.run", "fresh_model"),
    "run": ("judging.run", "run"),
    "study": ("judging.study", "run"),
    "grid": ("judging.study", "grid"),
    "fit_reading": ("fitting", "fit_reading"),
    "check_reading": ("checking", "check_reading"),
    "MajorityClassifier": ("estimator", "MajorityClassifier"),
    "BagKFold": ("bagkfold", "BagKFold"),
    "HeadcountError": ("errors", "HeadcountError"),
}

__all__ = [  # the same names, written out: type checkers and editors run nothing
    "HEADS",
    "BagKFold",
    "Bags",
    "Fitted",
    "Head",
    "HeadcountError",
    "MajorityClassifier",
    "Model",
    "Named",
    "Output",
    "Pool",
    "Protocol",
    "Reading",
    "Recipe",
    "Segments",
    "Tally",
    "__version__",
    "build_head",
    "check_reading",
    "dissenters",
    "fit",
    "fit_reading",
    "fresh_model",
    "grid",
    "load_source",
    "majority_bags",
    "prototypes",
    "read",
    "run",
    "say",
    "say_alone",
    "study",
]

if TYPE_CHECKING:
    from headcount.bagkfold import BagKFold
    from headcount.bags import Bags, Pool, Segments
    from headcount.checking import check_reading
    from headcount.data.protocol import Protocol, majority_bags
    from headcount.data.read import Named, Reading, read
    from headcount.data.sources import load as load_source
    from headcount.errors import HeadcountError
    from headcount.estimator import MajorityClassifier
    from headcount.fitting import fit_reading
    from headcount.judging.run import fresh_model, run
    from headcount.judging.study import grid
    from headcount.judging.study import run as study
    from headcount.models.fitted import Fitted
    from headcount.models.heads import HEADS, Head, Output, Tally, build_head
    from headcount.models.model import Model, say, say_alone
    from headcount.training.mpem import dissenters, prototypes
    from headcount.training.recipe import Recipe
    from headcount.training.train import fit
else:  # unseen by type checkers, to whom every name would be one of ours

    def __getattr__(name: str) -> Any:
        if name not in _DOOR:
            raise AttributeError(f"module 'headcount' has no attribute {name!r}; there are {', '.join(_DOOR)}")
        room, thing = _DOOR[name]
        return getattr(import_module(f"headcount.{room}"), thing)


def __dir__() -> list[str]:
    return __all__
