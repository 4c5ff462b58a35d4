"""Roles of columns: which one names the bag, which one the label, and so on.

A column has one role. :class:`ColumnRoles` names it; where it does not, a short list of common names decides
(``COMMON_NAMES``), and two candidates for one role are refused. A column with a role is never a feature, so that no label,
truth, id or coordinate gets into a model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from headcount.errors import HeadcountError
from headcount.readers.values import first_duplicate, nfc, preview

# Recognised in upper or lower case, with spaces and dashes read as underscores.
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
    """The columns of a table, by role. A role that is None or empty is recognised by common names (``COMMON_NAMES``).

    Parameters
    ----------
    bag, label, votes
        The bag of each instance and its class, or columns of votes or shares, one per class and named like it.
    path, text, features, categories
        What to learn from: image files, a text, or columns (default: all without a role); columns of numbers that are names.
    group
        Patient, site or county of the bag: never split over folds.
    weight, truth, known, id, x, y
        Of the instance: how many votes it has, its class for scoring only or as supervision, its identifier, coordinates.

    Examples
    --------
    >>> ColumnRoles(bag="street").resolve(["street", "Label", "age", "x", "y"]).to_json()
    {'bag': 'street', 'label': 'Label', 'x': 'x', 'y': 'y'}
    """

    bag: str | None = None
    label: str | None = None
    votes: tuple[str, ...] = ()
    path: str | None = None
    text: str | None = None
    weight: str | None = None
    group: str | None = None
    truth: str | None = None
    known: str | None = None
    x: str | None = None
    y: str | None = None
    id: str | None = None
    features: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for field in fields(self):
            value, is_list = getattr(self, field.name), field.name in _LIST_ROLES
            if is_list and not (isinstance(value, (list, tuple)) and all(isinstance(v, str) for v in value)):
                raise HeadcountError(f"{field.name} names columns, got {value!r}")
            if not (is_list or value is None or isinstance(value, str)):
                raise HeadcountError(f"{field.name} names a column, got {value!r}")
            if value is not None:  # tables have their names normalised likewise
                object.__setattr__(self, field.name, tuple(map(nfc, value)) if is_list else nfc(value))

    def resolve(
        self,
        names: Sequence[str],
        origin: str = "the table",
        label_columns: Iterable[str] = (),
        *,
        instance_kind_known: bool = False,
        optional_roles: Sequence[str] = (),
    ) -> ColumnRoles:
        """Fill in every role that one of the columns ``names`` plays.

        ``label_columns`` are those of a separate label table. With ``instance_kind_known`` no text or path is recognised.
        ``optional_roles`` stay empty where two columns could have them.
        """
        if (duplicate := first_duplicate(names)) is not None:
            raise HeadcountError(f"{origin} has two columns called {duplicate!r}; give each column its own name")
        existing = {*names, *label_columns}
        assigned = self.assigned_columns() + [(role, name) for role in _LIST_ROLES for name in getattr(self, role)]
        for role, name in assigned:
            if name not in existing:
                raise HeadcountError(f"{origin} has no column {name!r} ({role}); it has {preview(names, 12)}")
        taken, recognised = {name for _, name in assigned}, dict[str, Any]()
        for role, common in COMMON_NAMES.items():
            if getattr(self, role) is None:
                candidates = [n for n in names if _lower_case(n) in common and n not in taken]
                ambiguous = role in optional_roles and len(candidates) > 1
                recognised[role] = None if ambiguous else _only_candidate(role, candidates, origin)
        if instance_kind_known or self.features or self.text or self.path:
            recognised |= {role: None for role in ("text", "path") if getattr(self, role) is None}
        elif recognised["text"] and recognised["path"]:
            both = f"text {recognised['text']!r} and images {recognised['path']!r}"
            raise HeadcountError(f"{origin} has {both}; name the column that is the instance with text= or path=")
        if (self.x or recognised.get("x")) is None or (self.y or recognised.get("y")) is None:
            recognised["x"] = recognised["y"] = None  # one of them alone is a feature called x
            if self.x or self.y:
                raise HeadcountError(f"coordinates are two columns; x is {self.x!r} and y is {self.y!r}: name both")
        if self.id is None:
            recognised["id"] = next((n for n in names if is_id_column(n) and n not in taken), None)
        resolved = replace(self, **recognised)
        resolved._check_unique(origin, names)
        return resolved

    def assigned_columns(self) -> list[tuple[str, str]]:
        """(role, column) for the roles that are one column."""
        single = [f.name for f in fields(self) if f.name not in _LIST_ROLES]
        return [(role, name) for role in single if (name := getattr(self, role)) is not None]

    def filled_from(self, other: ColumnRoles) -> ColumnRoles:
        """These roles where they are named, those of ``other`` elsewhere: what a user adds to the roles of a model."""
        return replace(other, **{f.name: value for f in fields(self) if (value := getattr(self, f.name))})

    def _check_unique(self, origin: str, names: Sequence[str]) -> None:
        lists = [(role, name) for role in ("votes", "features") for name in getattr(self, role)]
        role_of: dict[str, str] = {}
        for role, name in [*self.assigned_columns(), *lists]:
            if name in role_of and {role, role_of[name]} != {"bag", "group"}:
                table = origin if name in names else "the label file"
                raise HeadcountError(f"column {name!r} of {table} is named as {role_of[name]} and as {role}; choose one")
            role_of[name] = role

    def to_json(self) -> dict[str, Any]:
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items() if v}


_LIST_ROLES = ("votes", "features", "categories")
NO_ROLES = ColumnRoles()


def find_common_name(role: str, names: Sequence[str], origin: str) -> str | None:
    """The column that has one of the common names of a role."""
    return _only_candidate(role, [n for n in names if _lower_case(n) in COMMON_NAMES[role]], origin)


def _only_candidate(role: str, candidates: list[str], origin: str) -> str | None:
    if len(candidates) > 1:
        either = " or ".join(map(repr, candidates))
        raise HeadcountError(f"{origin}: the {role} may be column {either}; name one with {role}=")
    return candidates[0] if candidates else None


def is_id_column(name: str) -> bool:
    """Whether a column numbers or names rows; it is a feature only on request."""
    return _lower_case(name) in ID_NAMES or name.startswith("__index_level_")  # Arrow's name of a pandas index


def _lower_case(name: str) -> str:
    return name.strip().lower().replace(" ", "_").replace("-", "_")
