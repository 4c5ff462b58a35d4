"""Columns: which one names the bag, which one the label, and so on; and their values as arrays.

A column has one role. :class:`ColumnRoles` names it; where it does not, a short list of common names decides
(``COMMON_NAMES``), and two candidates for one role are refused. A column with a role is never a feature, so that no label,
truth, id or coordinate gets into a model.
"""

import math
import unicodedata
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self

import numpy as np
import pyarrow as pa

from headcount.errors import HeadcountError

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


def nfc(text: str) -> str:
    """Unicode normal form C: a letter and its accent are one character."""
    return unicodedata.normalize("NFC", text)


@dataclass(frozen=True)
class ColumnRoles:
    """The columns of a table, by role; one that is None or empty is recognised by common names (``COMMON_NAMES``).

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
            names = value if is_list else [] if value is None else [value]
            if not (isinstance(names, (list, tuple)) and all(isinstance(v, str) for v in names)):
                raise HeadcountError(f"{field.name} names {'columns' if is_list else 'a column'}, got {value!r}")
            if value is not None:  # tables have their names normalised likewise
                object.__setattr__(self, field.name, tuple(map(nfc, names)) if is_list else nfc(value))

    def resolve(
        self,
        names: Sequence[str],
        origin: str = "the table",
        label_columns: Iterable[str] = (),
        *,
        instance_kind_known: bool = False,
        optional_roles: Sequence[str] = (),
    ) -> Self:
        """Fill in every role that one of the columns ``names`` plays; ``label_columns`` are those of a separate label table.
        With ``instance_kind_known`` no text or path is recognised; ``optional_roles`` stay empty where two columns fit."""
        if (duplicate := first_duplicate(names)) is not None:
            raise HeadcountError(f"{origin} has two columns called {duplicate!r}; give each column its own name")
        assigned = self.assigned_columns(_LIST_ROLES)
        for role, name in assigned:
            if name not in {*names, *label_columns}:
                raise HeadcountError(f"{origin} has no column {name!r} ({role}); it has {preview(names, 12)}")
        taken, recognised = {name for _, name in assigned}, dict[str, Any]()
        for role in COMMON_NAMES:
            if getattr(self, role) is None:
                free = [n for n in names if n not in taken]
                recognised[role] = find_common_name(role, free, origin, optional=role in optional_roles)
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
        role_of: dict[str, str] = {}
        for role, name in resolved.assigned_columns(("votes", "features")):
            if name in role_of and {role, role_of[name]} != {"bag", "group"}:
                table = origin if name in names else "the label file"
                raise HeadcountError(f"column {name!r} of {table} is named as {role_of[name]} and as {role}; choose one")
            role_of[name] = role
        return resolved

    def assigned_columns(self, list_roles: Iterable[str] = ()) -> list[tuple[str, str]]:
        """(role, column) for the roles that are one column, then for ``list_roles``."""
        single = [(f.name, getattr(self, f.name)) for f in fields(self) if f.name not in _LIST_ROLES]
        several = [(role, name) for role in list_roles for name in getattr(self, role)]
        return [(role, name) for role, name in single if name is not None] + several

    def to_json(self) -> dict[str, Any]:
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items() if v}


_LIST_ROLES = ("votes", "features", "categories")
NO_ROLES = ColumnRoles()


def find_common_name(role: str, names: Sequence[str], origin: str, optional: bool = False) -> str | None:
    """The column that has one of the common names of a role; of an ``optional`` one None where two have."""
    candidates = [n for n in names if _lower_case(n) in COMMON_NAMES[role]]
    if len(candidates) > 1 and not optional:
        either = " or ".join(map(repr, candidates))
        raise HeadcountError(f"{origin}: the {role} may be column {either}; name one with {role}=")
    return candidates[0] if len(candidates) == 1 else None


def is_id_column(name: str) -> bool:
    """Whether a column numbers or names rows; it is a feature only on request."""
    return _lower_case(name) in ID_NAMES or name.startswith("__index_level_")  # Arrow's name of a pandas index


def _lower_case(name: str) -> str:
    return name.strip().lower().replace(" ", "_").replace("-", "_")


Codes = tuple[np.ndarray, list[str]]  # (n,) codes, -1 where missing, and the values they stand for


def dictionary_codes(column: pa.ChunkedArray, column_name: str = "a column") -> tuple[np.ndarray, pa.Array]:
    """(n,) codes, -1 where missing, and the values they stand for."""
    try:  # chunks that are encoded together share one dictionary already: to unify it would hash it again for each of them
        column = column.unify_dictionaries() if pa.types.is_dictionary(column.type) else column.dictionary_encode()
    except pa.ArrowException:
        raise HeadcountError(f"{column_name} holds {column.type}; give texts or numbers") from None
    if column.num_chunks == 0:
        return np.zeros(0, np.int64), pa.array([], pa.string())
    codes = np.concatenate([c.indices.cast(pa.int64()).fill_null(-1).to_numpy() for c in column.chunks])
    return codes, column.chunk(0).dictionary


def factorize(column: pa.ChunkedArray, column_name: str = "a column") -> Codes:
    """The values as text, in order of first appearance."""
    codes, dictionary = dictionary_codes(column, column_name)
    names = list(map(clean_name, dictionary.to_pylist()))
    code_of = {name: code for code, name in enumerate(names)}
    codes = np.array([-1 if name is None else code_of[name] for name in names] + [-1])[codes]  # spellings of one name are one
    seen = pa.array(codes, mask=codes < 0).dictionary_encode()
    values = [str(names[code]) for code in seen.dictionary.to_pylist()]
    return seen.indices.fill_null(-1).to_numpy().astype(np.int64), values


def drop_values(code: np.ndarray, values: Sequence[str], dropped: Container[str]) -> Codes:
    """(n,) codes, -1 also for the values that are dropped, and the values that remain."""
    kept = [v for v in values if v not in dropped]
    new_code = {v: k for k, v in enumerate(kept)}
    return np.array([*(new_code.get(v, -1) for v in values), -1])[code], kept


def clean_name(value: Any) -> str | None:
    """A name as a person reads it: 3.0 is 3, no blanks around it, letters composed with their accents (some file systems
    decompose them); an empty text and NaN are None.

    >>> clean_name(3.0), clean_name(" cat "), clean_name(float("nan")), clean_name(""), clean_name("cafe\u0301") == "caf\u00e9"
    ('3', 'cat', None, None, True)
    """
    text = as_text(value)
    return text and nfc(text)


def as_text(value: Any) -> str | None:
    """As :func:`clean_name`, but without normalising the letters: a file is found under its exact name only."""
    if isinstance(value, (float, np.floating)):
        if math.isnan(value):
            return None
        value = int(value) if abs(value) < 1e15 and value == int(value) else float(value)
    if isinstance(value, bytes):
        value = value.decode("utf-8", "backslashreplace")
    text = "" if value is None else str(value).strip()
    return text.encode("utf-8", "backslashreplace").decode() or None


def clean_names(words: np.ndarray) -> np.ndarray:
    """(n,) texts as clean names; an array of anything else is returned as it is."""
    if not len(words) or not (words.dtype.kind in "UT" or all(isinstance(w, str) for w in words)):
        return words
    spellings, code = np.unique(words, return_inverse=True)
    return np.array([clean_name(w) or "" for w in spellings], dtype=object if words.dtype == object else None)[code]


def unify_unicode(words: np.ndarray) -> np.ndarray:
    """(n,) texts with one spelling for each clean name: the clean name where spellings differ, else the spelling itself, so
    that users find the names they gave."""
    if (names := clean_names(words)) is words:
        return words
    spellings, first, code = np.unique(words, return_index=True, return_inverse=True)
    count = Counter(names[first].tolist())
    unified = [str(name) if count[name] > 1 else way for way, name in zip(spellings, names[first], strict=True)]
    return np.array(unified, dtype=object if words.dtype == object else None)[code]


def first_duplicate(names: Iterable[str]) -> str | None:
    """The first name that occurs more than once, None if all differ."""
    return next((name for name, count in Counter(names).items() if count > 1), None)


def note_similar_classes(classes: Iterable[str]) -> list[str]:
    """A line on classes that differ only in capitals or blanks: perhaps one class in two spellings."""
    spellings: dict[str, list[str]] = {}
    for name in classes:
        spellings.setdefault(" ".join(name.lower().split()), []).append(name)
    variants = [" and ".join(map(abbreviate, names)) for names in spellings.values() if len(names) > 1]
    more = f", and {len(variants) - 3:,} more such" if len(variants) > 3 else ""
    line = f"classes that differ only in capitals or blanks: {', '.join(variants[:3])}{more}; if they are one, write them alike"
    return [line] if variants else []


def abbreviate(value: Any) -> str:
    """A value as an error message shows it."""
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def preview(values: Sequence[Any], most: int = 3) -> str:
    """The first few of many, and how many more there are."""
    shown = ", ".join(abbreviate(v) for v in values[:most])
    return shown + (f" and {len(values) - most:,} more" if len(values) > most else "")
