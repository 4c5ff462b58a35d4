"""Which column is what, and which of them become features: the plan before anything is learned.

A column has one role. ``Named`` says it; where it says nothing, a short list of usual names decides (``USUAL``), and two
candidates for one role are refused. What has a role is never a feature: no label, truth, id or coordinate gets into a model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np

from headcount.data.learned import Field, Learned, learn_field
from headcount.data.values import again, composed
from headcount.errors import HeadcountError

# Recognised whatever the case, with spaces and dashes read as underscores.
USUAL: dict[str, tuple[str, ...]] = {
    "bag": ("bag", "bag_id", "slide_id", "slide", "precinct", "product", "product_id"),
    "label": ("label", "bag_label", "majority", "winner"),
    "path": ("path", "image", "image_path", "file", "filename"),
    "text": ("text",),
    "weight": ("weight", "instance_weight"),
    "group": ("group", "patient", "patient_id", "case_id", "site", "county"),
    "truth": ("truth", "instance_label", "true_label"),
    "known": ("known", "known_label"),
    "x": ("x", "x_coord", "coord_x"),
    "y": ("y", "y_coord", "coord_y"),
}
IDS = ("id", "instance_id", "tile_id", "row_id")


@dataclass(frozen=True)
class Named:
    """The user's own names for the columns; None and () mean: recognise it.

    >>> Named(bag="street").found(["street", "Label", "age", "x", "y"]).to_json()
    {'bag': 'street', 'label': 'Label', 'x': 'x', 'y': 'y'}
    """

    bag: str | None = None
    label: str | None = None
    votes: tuple[str, ...] = ()  # one column of votes or shares per class; the columns name the classes
    path: str | None = None  # pictures, one file per row
    text: str | None = None
    weight: str | None = None  # votes of an instance
    group: str | None = None  # patient, site, county: never split over folds
    truth: str | None = None  # the instance's own class, for scoring only
    known: str | None = None  # the instance's own class, given as supervision
    x: str | None = None
    y: str | None = None
    id: str | None = None  # the instance's own name, once in a bag
    features: tuple[str, ...] = ()  # none named: every column that has no role
    categories: tuple[str, ...] = ()  # numbers that are names, such as postal codes

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            many = field.name in _MANY
            good = isinstance(value, (list, tuple)) and all(isinstance(v, str) for v in value) if many else True
            if not good or not (many or value is None or isinstance(value, str)):
                raise HeadcountError(f"{field.name} names {'columns' if many else 'a column'}, got {value!r}")
            if value is not None:  # as tables have them
                object.__setattr__(self, field.name, tuple(map(composed, value)) if many else composed(value))

    def found(
        self, names: Sequence[str], where: str = "the table", elsewhere: Iterable[str] = (), *,
        settled: bool = False, unasked: Sequence[str] = (),
    ) -> Named:  # fmt: skip
        """The same with every role filled in that a column of ``names`` plays; ``elsewhere`` is the label file's header.
        ``settled``: what the instances are is known. ``unasked``: roles that nobody plays where two columns may."""
        if (twice := again(names)) is not None:
            raise HeadcountError(f"{where} has two columns called {twice!r}; give each column its own name")
        known = {*names, *elsewhere}
        for field in fields(self):
            value = getattr(self, field.name)
            for name in value if isinstance(value, tuple) else () if value is None else (value,):
                if name not in known:
                    raise HeadcountError(f"{where} has no column {name!r} ({field.name}); it has {_listed(names)}")
        taken = {*self.features, *self.votes, *self.categories, *(v for _, v in self.single())}
        told: dict[str, Any] = {}
        for role, usual in USUAL.items():
            if getattr(self, role) is None:
                may = [n for n in names if _plain(n) in usual and n not in taken]
                told[role] = None if role in unasked and len(may) > 1 else _one(role, may, where)
        if settled or self.features or self.text or self.path:  # said what the instances are: nothing else is guessed
            told.update({r: None for r in ("text", "path") if getattr(self, r) is None})
        elif told["text"] and told["path"]:
            both = f"text {told['text']!r} and pictures {told['path']!r}"
            raise HeadcountError(f"{where} has {both}; name the column that is the instance with text= or path=")
        if (self.x or told.get("x")) is None or (self.y or told.get("y")) is None:
            told["x"] = told["y"] = None  # one of them alone is a feature called x
            if self.x or self.y:
                raise HeadcountError(f"coordinates are two columns; x is {self.x!r} and y is {self.y!r}: name both")
        if self.id is None:
            told["id"] = next((n for n in names if is_id(n) and n not in taken), None)
        filled = replace(self, **told)
        filled._each_once(where, names)
        return filled

    def single(self) -> list[tuple[str, str]]:
        """(role, column) for the roles that are one column."""
        return [(f.name, v) for f in fields(self) if f.name not in _MANY and (v := getattr(self, f.name)) is not None]

    def over(self, other: Named) -> Named:
        """These names where they say something, the other's elsewhere: what a user adds to what a model remembers."""
        return replace(other, **{f.name: v for f in fields(self) if (v := getattr(self, f.name))})

    def _each_once(self, where: str, names: Sequence[str]) -> None:
        roles: dict[str, str] = {}
        said = [*self.single(), *((role, n) for role in ("votes", "features") for n in getattr(self, role))]
        for role, name in said:
            if name in roles and {role, roles[name]} != {"bag", "group"}:
                place = where if name in names else "the label file"
                raise HeadcountError(f"column {name!r} of {place} is named as {roles[name]} and as {role}; choose one")
            roles[name] = role

    def to_json(self) -> dict[str, Any]:
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items() if v}


_MANY = ("votes", "features", "categories")


@dataclass(frozen=True)
class Columns:
    """How raw instances become numbers: fields of a table, or nothing to do where they are numbers already."""

    kind: str  # images, features, table or text
    fields: tuple[Field, ...] = ()
    shape: tuple[int, ...] = ()  # of an instance that is numbers already
    named: Named = Named()  # as found, so that a model can recognise its columns again

    def learn(self, raw: Any, rows: np.ndarray | None = None) -> Learned:
        """What must be known of the training rows: means, categories, words. ``raw`` is a pyarrow table."""
        if not self.fields:
            return Learned(self.kind, shape=self.shape, named=self.named.to_json())
        learned = tuple(learn_field(field, raw.column(field.name), rows) for field in self.fields)
        width = sum(field.width for field in learned)
        if width == 0:
            raise HeadcountError("no column is left to learn from: all of them are empty in the training bags")
        return Learned(self.kind, fields=learned, shape=(width,), named=self.named.to_json())


def is_id(name: str) -> bool:
    """Columns that number or name rows: never a feature unless somebody asks for it."""
    return _plain(name) in IDS or name.startswith("__index_level_")  # how Arrow calls the index of a pandas frame


def _plain(name: str) -> str:
    return name.strip().lower().replace(" ", "_").replace("-", "_")


def _one(role: str, candidates: list[str], where: str) -> str | None:
    if len(candidates) > 1:
        both = " or ".join(map(repr, candidates))
        raise HeadcountError(f"{where}: the {role} may be column {both}; name one with {role}=")
    return candidates[0] if candidates else None


def _listed(names: Sequence[str], most: int = 12) -> str:
    shown = ", ".join(repr(n) for n in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")
