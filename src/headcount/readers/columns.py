"""Which column is what, and which of them become features: the plan before anything is learned.

A column has one role. ``Named`` says it; where it says nothing, a short list of usual names decides (``USUAL``), and two
candidates for one role are refused. What has a role is never a feature: no label, truth, id or coordinate gets into a model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np

from headcount.errors import HeadcountError
from headcount.readers.preprocessing import Field, Preprocessor, fit_field
from headcount.readers.values import first_duplicate, nfc

# Recognised whatever the case, with spaces and dashes read as underscores.
COMMON_NAMES: dict[str, tuple[str, ...]] = {
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
ID_NAMES = ("id", "instance_id", "tile_id", "row_id")


@dataclass(frozen=True)
class ColumnRoles:
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
            many = field.name in _LIST_ROLES
            good = isinstance(value, (list, tuple)) and all(isinstance(v, str) for v in value) if many else True
            if not good or not (many or value is None or isinstance(value, str)):
                raise HeadcountError(f"{field.name} names {'columns' if many else 'a column'}, got {value!r}")
            if value is not None:  # as tables have them
                object.__setattr__(self, field.name, tuple(map(nfc, value)) if many else nfc(value))

    def resolve(
        self, names: Sequence[str], origin: str = "the table", label_columns: Iterable[str] = (), *,
        instance_kind_known: bool = False, optional_roles: Sequence[str] = (),
    ) -> ColumnRoles:  # fmt: skip
        """The same with every role filled in that a column of ``names`` plays; ``elsewhere`` is the label file's header.
        ``settled``: what the instances are is known. ``unasked``: roles that nobody plays where two columns may."""
        if (twice := first_duplicate(names)) is not None:
            raise HeadcountError(f"{origin} has two columns called {twice!r}; give each column its own name")
        known = {*names, *label_columns}
        for field in fields(self):
            value = getattr(self, field.name)
            for name in value if isinstance(value, tuple) else () if value is None else (value,):
                if name not in known:
                    raise HeadcountError(f"{origin} has no column {name!r} ({field.name}); it has {_listed(names)}")
        taken = {*self.features, *self.votes, *self.categories, *(v for _, v in self.assigned_columns())}
        recognised: dict[str, Any] = {}
        for role, usual in COMMON_NAMES.items():
            if getattr(self, role) is None:
                candidates = [n for n in names if _normalize(n) in usual and n not in taken]
                recognised[role] = (
                    None
                    if role in optional_roles and len(candidates) > 1
                    else _single_candidate(role, candidates, origin)
                )
        if (
            instance_kind_known or self.features or self.text or self.path
        ):  # said what the instances are: nothing else is guessed
            recognised.update({r: None for r in ("text", "path") if getattr(self, r) is None})
        elif recognised["text"] and recognised["path"]:
            both = f"text {recognised['text']!r} and pictures {recognised['path']!r}"
            raise HeadcountError(f"{origin} has {both}; name the column that is the instance with text= or path=")
        if (self.x or recognised.get("x")) is None or (self.y or recognised.get("y")) is None:
            recognised["x"] = recognised["y"] = None  # one of them alone is a feature called x
            if self.x or self.y:
                raise HeadcountError(f"coordinates are two columns; x is {self.x!r} and y is {self.y!r}: name both")
        if self.id is None:
            recognised["id"] = next((n for n in names if is_id_column(n) and n not in taken), None)
        filled = replace(self, **recognised)
        filled._check_unique(origin, names)
        return filled

    def assigned_columns(self) -> list[tuple[str, str]]:
        """(role, column) for the roles that are one column."""
        return [
            (f.name, v) for f in fields(self) if f.name not in _LIST_ROLES and (v := getattr(self, f.name)) is not None
        ]

    def filled_from(self, other: ColumnRoles) -> ColumnRoles:
        """These names where they say something, the other's elsewhere: what a user adds to what a model remembers."""
        return replace(other, **{f.name: v for f in fields(self) if (v := getattr(self, f.name))})

    def _check_unique(self, origin: str, names: Sequence[str]) -> None:
        roles: dict[str, str] = {}
        assigned = [
            *self.assigned_columns(),
            *((role, n) for role in ("votes", "features") for n in getattr(self, role)),
        ]
        for role, name in assigned:
            if name in roles and {role, roles[name]} != {"bag", "group"}:
                place = origin if name in names else "the label file"
                raise HeadcountError(f"column {name!r} of {place} is named as {roles[name]} and as {role}; choose one")
            roles[name] = role

    def to_json(self) -> dict[str, Any]:
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items() if v}


_LIST_ROLES = ("votes", "features", "categories")


@dataclass(frozen=True)
class FeatureSchema:
    """How raw instances become numbers: fields of a table, or nothing to do where they are numbers already."""

    kind: str  # images, features, table or text
    fields: tuple[Field, ...] = ()
    shape: tuple[int, ...] = ()  # of an instance that is numbers already
    roles: ColumnRoles = ColumnRoles()  # as found, so that a model can recognise its columns again

    def fit(self, raw: Any, rows: np.ndarray | None = None) -> Preprocessor:
        """What must be known of the training rows: means, categories, words. ``raw`` is a pyarrow table."""
        if not self.fields:
            return Preprocessor(self.kind, shape=self.shape, roles=self.roles.to_json())
        fitted = tuple(fit_field(field, raw.column(field.name), rows) for field in self.fields)
        width = sum(field.width for field in fitted)
        if width == 0:
            raise HeadcountError("no column is left to learn from: all of them are empty in the training bags")
        return Preprocessor(self.kind, fields=fitted, shape=(width,), roles=self.roles.to_json())


def is_id_column(name: str) -> bool:
    """Columns that number or name rows: never a feature unless somebody asks for it."""
    return _normalize(name) in ID_NAMES or name.startswith(
        "__index_level_"
    )  # how Arrow calls the index of a pandas frame


def _normalize(name: str) -> str:
    return name.strip().lower().replace(" ", "_").replace("-", "_")


def _single_candidate(role: str, candidates: list[str], origin: str) -> str | None:
    if len(candidates) > 1:
        both = " or ".join(map(repr, candidates))
        raise HeadcountError(f"{origin}: the {role} may be column {both}; name one with {role}=")
    return candidates[0] if candidates else None


def _listed(names: Sequence[str], most: int = 12) -> str:
    shown = ", ".join(repr(n) for n in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")
