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

from headcount.bags import Bags, Segments, census, prints, tilt
from headcount.bags.census import plainly
from headcount.bags.pool import plain
from headcount.data.columns import Named
from headcount.data.learned import Learned
from headcount.data.read import Reading, read
from headcount.errors import HeadcountError
from headcount.models import distrust, folder
from headcount.models.eye import Eye
from headcount.models.forest import Forest, Held, Linear
from headcount.models.model import Model, say, say_alone

KEYS = {
    *("format", "kind", "classes", "counted", "temperature", "instance_temperature", "tilt", "alike", "listens"),
    *("preparation", "design", "facts"),
}


class Answer(NamedTuple):
    """What a fitted model says of bags, on the CPU."""

    instance: Tensor  # (N, C) probabilities, in the bag's context where the model listens to it
    bag: Tensor  # (B, C) log-probabilities of the bag's label
    alone: Tensor  # (N, C) probabilities of each instance by itself
    met: Tensor  # (B,) the model was trained on this bag


@dataclass(frozen=True, eq=False)
class Fitted:
    """A model, how data are prepared for it, and what is known of how good it is.

    ``temperature``: bag log-probabilities are divided by it and normalised again; chosen on cross-validated bags.
    ``instance_temperature``: the same for instances, under which they explain held-out labels best (training/criterion.py).
    ``tilt``: P(class | bag's label) and the label frequencies, as estimated from held-out bags; ``tilt.share`` is the
    expected majority share of each class. ``alike``: how alike bags are in their shares, None if nobody could tell;
    ``listens``: whether an instance is answered in the light of the others in its bag (judging/shares.py decides both on
    held-out bags). ``facts``: plain JSON (method, recipe, data, scores, candidates, versions, ...). ``eye``: a frozen backbone
    that stands before the body: pictures come in, and the body is asked about their features.
    """

    body: Model | Forest | Linear | Held
    classes: tuple[str, ...]
    learned: Learned
    tilt: tilt.Tilt
    counted: tuple[bool, ...] | None = None
    temperature: float = 1.0
    instance_temperature: float = 1.0
    alike: float | None = None
    listens: bool = False
    facts: dict[str, Any] = field(default_factory=dict)
    eye: Eye | None = None

    @property
    def kind(self) -> str:
        """network, forest or linear; held for a classifier that lives in memory only."""
        return "network" if isinstance(self.body, Model) else type(self.body).__name__.lower()

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.learned.shape))
        return f"Fitted({self.kind}: {len(self.classes)} classes, {self.learned.kind} of {shape})"

    def read(self, data: Any, named: Named | None = None, *, need_labels: bool = False, **how: Any) -> Reading:
        """Read data as this model's were: its columns, its classes; ``how`` as :func:`headcount.data.read.read` takes it."""
        never = [] if self.counted is None else [c for c, on in zip(self.classes, self.counted, strict=True) if not on]
        how = {"classes": self.classes, "uncounted": never, **how}
        return read(data, named, need_labels=need_labels, learned=self.learned, **how)

    def say(self, bags: Bags, *, listen: bool | None = None, batch_instances: int = 8192) -> Answer:
        """Ask about bags, a part of the instances at a time. Removed instances are answered, and not counted. ``listen``: to
        an instance's bag; the default is what held-out bags decided, in bags that were not trained on: each bag decides for
        itself, whatever else is asked about."""
        if not len(bags):
            raise HeadcountError("no bags to ask about; give at least one")
        if bags.pool.shape != self.learned.shape:
            raise HeadcountError(
                f"the model takes instances of shape {self.learned.shape}, got {bags.pool.shape}; "
                "prepare them with bags(learned=fitted.learned)"
            )
        segments, met = bags.segments().to("cpu"), self.met(bags)
        if self.eye is not None:
            bags = replace(bags, pool=self.eye.over(bags.pool))
        if isinstance(self.body, Model) and not self.body.head.mean_of_instances:
            said = say(self.body, bags, batch_instances=batch_instances)
            p, bag = said.instance.softmax(1), self._bag(said.bag)
        else:  # a bag of any size is asked in parts
            p = self._alone(bags, batch_instances)
            bag = self._bag(log_shares(p, segments, None if self.counted is None else torch.tensor(self.counted)))
        p = tempered(p, self.instance_temperature)
        if not (self.listens if listen is None else listen):
            return Answer(p, bag, p, met)
        heard = self.heard(p, segments)
        if listen is None and bool(met.any()):  # held-out bags decided, and these were none
            heard = torch.where(met[bags.bag.cpu()][:, None], p, heard)
        return Answer(heard, bag, p, met)

    def met(self, bags: Bags) -> Tensor:
        """(B,) whether the model was trained on each of these bags, by the prints it keeps of them (bags/prints.py)."""
        if not len(self._prints):
            return torch.zeros(len(bags), dtype=torch.bool)
        return torch.from_numpy(np.isin(prints.prints(bags), self._prints))

    @cached_property
    def _prints(self) -> np.ndarray:
        data = self.facts.get("data")
        return prints.read(data.get("prints") if isinstance(data, dict) else None)

    def heard(self, p: Tensor, segments: Segments) -> Tensor:
        """(N, C) probabilities of instances in the light of the others in their bag, from those of each alone."""
        if self.alike is None:
            raise HeadcountError("this model was fitted on too few bags to know what a bag tells of its instances")
        return census.heard(p.clamp_min(1e-30).double().log(), segments, self.prior, self.alike).exp().float()

    @property
    def prior(self) -> Tensor:
        """(C,) how frequent the classes are, as estimated; no class is impossible."""
        prior = self.tilt.prior.double().clamp_min(1e-6)
        return prior / prior.sum()

    def shares(self, alone: Tensor, bags: Bags, *, level: float = 0.9) -> tuple[Tensor, Tensor, Tensor]:
        """(B, C) the class shares of each bag's instances with the ends of an interval, from what was said of each ``alone``.
        Labels are not looked at.

        Where it is known how alike bags are, the shares are those a bag's instances make likely (bags/census.py); the mean of
        probabilities alone would lean towards how frequent classes are overall. Otherwise they are that mean.
        """
        segments = bags.segments().to("cpu")
        if self.alike is None:
            return plainly(alone, segments, level)
        return census.estimated(alone.clamp_min(1e-30).double().log(), segments, self.prior, self.alike, level=level)

    def _alone(self, bags: Bags, batch_instances: int) -> Tensor:
        """(N, C) probabilities of instances, each looked at by itself."""
        return torch.cat([self._part(bags.pool.take(part)) for part in bags.index.split(batch_instances)])

    def _part(self, x: Tensor) -> Tensor:
        if isinstance(self.body, Model):
            return say_alone(self.body, x).softmax(1)
        return torch.from_numpy(self.body.probabilities(plain(x))).float()

    def _bag(self, log_p: Tensor) -> Tensor:
        return (log_p / self.temperature).log_softmax(1)

    def to(self, device: torch.device | str) -> Fitted:
        """The same, on a device; only networks have a place to be."""
        eye = None if self.eye is None else self.eye.to(device)
        return replace(self, eye=eye, body=self.body.to(device) if isinstance(self.body, Model) else self.body)

    def but(self, **changes: Any) -> Fitted:
        return replace(self, **changes)

    # -- on disk ------------------------------------------------------------------------------------------------------

    def save(self, path: Path | str, papers: Mapping[str, str] | None = None, overwrite: bool = False) -> Path:
        """Write the folder, ``papers`` (file name -> text: the report, the card) with it. Only a model is ever replaced, and
        only with ``overwrite``."""
        return folder.put(Path(path), self.arrays(), self.to_json(), papers or {}, overwrite)

    def arrays(self) -> dict[str, np.ndarray]:
        parts = {
            "body": _state(self.body) if isinstance(self.body, Model) else self.body.arrays(),
            "learned": self.learned.arrays(),
            "eye": {} if self.eye is None else _state(self.eye),
        }
        return {f"{part}.{k}": v for part, held in parts.items() for k, v in held.items()}

    def to_json(self) -> dict[str, Any]:
        if isinstance(self.body, Model) and ":" in self.body.design.head:
            raise HeadcountError(
                f"a model with a head from a file ({self.body.design.head}) cannot be saved: loading runs no code"
            )
        design = vars(self.body.design) if isinstance(self.body, Model) else None
        if design is not None:
            design = {k: design[k] for k in ("backbone", "backbone_options", "head", "options", "mirror")}
            design = {k: dict(v) if k.endswith("options") else v for k, v in design.items()}
        return {
            "format": folder.FORMAT,
            "kind": self.kind,
            "classes": list(self.classes),
            "counted": None if self.counted is None else list(self.counted),
            "temperature": self.temperature,
            "instance_temperature": self.instance_temperature,
            "alike": self.alike,
            "listens": self.listens,
            "tilt": {"mix": self.tilt.mix.tolist(), "labels": self.tilt.labels.tolist()},
            "preparation": self.learned.to_json(),
            "design": design,
            "facts": self.facts,
            **({} if self.eye is None else {"eye": {"backbone": self.eye.name, "size": self.eye.size}}),
        }

    @classmethod
    def load(cls, path: Path | str) -> Fitted:
        """A folder that ``save`` wrote, or somebody else: nothing in it is trusted."""
        return folder.refusing(Path(path), lambda: _loaded(Path(path)))


def _state(module: nn.Module) -> dict[str, np.ndarray]:
    return {k: v.detach().contiguous().cpu().numpy() for k, v in module.state_dict().items()}


def tempered(p: Tensor, temperature: float) -> Tensor:
    """(N, C) the same probabilities, bolder below one and more timid above."""
    return p if temperature == 1 else (p.clamp_min(1e-30).log() / temperature).softmax(1)


def log_shares(p: Tensor, segments: Segments, counted: Tensor | None = None) -> Tensor:
    """(B, C) log of each bag's mean probabilities, among the classes that count: the share, taken as the chance to win."""
    shares = segments.mean(p).clamp_min(1e-30).log()
    return (shares if counted is None else shares.masked_fill(~counted, -torch.inf)).log_softmax(1)


def _loaded(path: Path) -> Fitted:
    said, arrays = folder.get(path)
    distrust.keys(said, KEYS | (said.keys() & {"eye"}))
    classes = distrust.names(said["classes"], "classes")
    counted = None if said["counted"] is None else distrust.counted(said["counted"], len(classes))
    learned = Learned.from_parts(said["preparation"], folder.under("learned.", arrays))
    body_arrays = folder.under("body.", arrays)
    known = ("body.", "learned.", "eye.") if "eye" in said else ("body.", "learned.")
    if odd := next((k for k in arrays if not k.startswith(known)), None):
        raise HeadcountError(f"model.safetensors holds {odd[:80]!r}, which belongs to nothing")
    eye = folder.eye(said["eye"], learned.shape, folder.under("eye.", arrays)) if "eye" in said else None
    shape = learned.shape if eye is None else (eye.dim,)
    kinds = {"forest": Forest, "linear": Linear}
    body: Model | Forest | Linear
    if said["kind"] in kinds:
        if said["design"] is not None or len(shape) != 1:
            raise HeadcountError(f"a {said['kind']} takes features and has no design")
        body = kinds[said["kind"]].from_arrays(body_arrays, shape[0], len(classes))
    elif said["kind"] == "network":
        body = folder.network(said["design"], shape, classes, counted, body_arrays)
    else:
        raise HeadcountError(f"kind {str(said['kind'])[:40]!r} is none of network, forest, linear")
    if not isinstance(said["facts"], dict):
        raise HeadcountError("facts must be an object")
    heat = [distrust.number(said[k], k, 1e-6, 1e6) for k in ("temperature", "instance_temperature")]
    alike = None if said["alike"] is None else distrust.number(said["alike"], "alike", 1e-3, 1e9)
    if not isinstance(said["listens"], bool) or (said["listens"] and alike is None):
        raise HeadcountError("listens is true or false, and false where alike is null")
    found = _tilt(said["tilt"], len(classes))
    return Fitted(body, classes, learned, found, counted, *heat, alike, said["listens"], said["facts"], eye)


def _tilt(said: Any, classes: int) -> tilt.Tilt:
    distrust.keys(said, {"mix", "labels"}, "the tilt")
    mix, labels = _rows(said["mix"], (classes, classes)), _rows([said["labels"]], (1, classes))[0]
    return tilt.Tilt(mix, labels)


def _rows(given: Any, shape: tuple[int, int]) -> Tensor:
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
