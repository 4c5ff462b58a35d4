"""Which columns of a table become features, and as what; the others are left aside, and it is said why.

Left aside: empty columns, columns that never vary, row numbers, a different text in nearly every row (an id, or a text
nobody named), a copy of the label or of the bag. Refused: a word among numbers, infinite numbers, numbers written with a
decimal comma, dates written otherwise than 2021-12-31.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from headcount.data.columns import Columns, Named
from headcount.data.learned import COMMONEST, Field, Learned, same_clock
from headcount.data.read.found import Asked, short, some
from headcount.data.read.tables import MISSING
from headcount.data.values import numbers, plain, texts, vectors, without
from headcount.errors import HeadcountError

_FEW = 10  # different numbers may still be names
_FAR = 20  # standard deviations: hardly the same measure
_DATE = re.compile(r"(\d{1,2}[./-]\d{1,2}[./-]\d{4}|\d{1,2}/\d{1,2}/\d{2}|\d{4}[./]\d{1,2}[./]\d{1,2})([ T].*)?")
_PEEK = 20_000  # rows that show that two columns differ; only if they do not, all are compared


def plan(
    table: pa.Table,
    roles: Named,
    spoken: Sequence[str],
    label: np.ndarray | None,
    bag: np.ndarray,
    where: str,
    asked: Asked,
) -> tuple[pa.Table, Columns, list[str], np.ndarray]:
    """The feature columns as they will be learned from, how, what to say of it, and (n,) rows that are bad.

    ``spoken``: columns that have a role. ``label`` (n,): each row's label, to find columns that repeat it.
    """
    chosen, aside, bad, notes = [], dict[str, str](), np.zeros(table.num_rows, bool), list[str]()
    learned = {f.name: f for f in asked.learned.fields} if asked.learned else {}
    columns: dict[str, pa.ChunkedArray] = {}
    for name, fixed in _wanted(table, roles, spoken, where, asked.learned):
        kind, why = (fixed, "") if fixed else _kind(table.column(name), name in roles.categories, name, where)
        why = why or ("" if fixed else _copy(table.column(name), kind, label, bag))
        if not (why or fixed or name in (*roles.features, *roles.categories)) and _constant(table.column(name)):
            why = "it says the same in every row"
        if why and name in roles.features:
            raise HeadcountError(f"column {name!r} of {where} cannot be a feature: {why}")
        if why:
            aside[name] = why
            continue
        surely = bool(fixed) or name in roles.categories
        columns[name] = made = _usable(table.column(name), name, kind, surely, where, asked, bad)
        kind = "number" if kind == "category" and not pa.types.is_dictionary(made.type) else kind
        if name in learned:
            same_clock(learned[name], made, where)
            notes += _never_seen(made, learned[name])
        elif kind == "category" and (many := len(texts(made)[1])) > COMMONEST:
            notes.append(
                f"column {name!r} has {many:,} values: the {COMMONEST} commonest are learned, the others are as one"
            )
        chosen.append(Field(name, kind))
    if not chosen:
        said = (
            "; ".join(f"{n!r}: {w}" for n, w in list(aside.items())[:5])
            or f"columns are {some(table.column_names, 12)}"
        )
        raise HeadcountError(f"{where} has no column to learn from ({said}); name some with features=, text= or path=")
    kind = "text" if any(f.kind == "text" for f in chosen) else "table"
    if roles.text and not roles.features and not learned:
        idle = [n for n in table.column_names if n not in spoken]
        notes += [f"not used: {some(idle, 12)}; beside a text, columns are named with features="] if idle else []
    return pa.table(columns), Columns(kind, tuple(chosen), named=roles), [*_said(chosen, aside), *notes], bad


def _wanted(
    table: pa.Table, roles: Named, spoken: Sequence[str], where: str, model: Learned | None
) -> list[tuple[str, str | None]]:
    """Columns that may become features, with their kind where it is fixed."""
    if model is not None:
        lost = [f.name for f in model.fields if f.name not in table.column_names]
        if lost:
            raise HeadcountError(
                f"{where} lacks {some(lost, 8)}, which the model was fitted on; add the column, empty where nothing is known, "
                "or fit without it"
            )
        return [(f.name, f.kind) for f in model.fields]
    if roles.features or roles.text:
        lost = [c for c in roles.categories if c not in (*roles.features, roles.text)]
        if lost:
            raise HeadcountError(
                f"column {lost[0]!r} of {where} is in categories= and not in features=; name it there too"
            )
        text: list[tuple[str, str | None]] = [(roles.text, "text")] if roles.text else []
        return [*text, *((n, None) for n in roles.features)]
    return [(n, None) for n in table.column_names if n not in spoken]


def _never_seen(column: pa.ChunkedArray, field: Field) -> list[str]:
    """What to say of values the model has never met the like of: categories and words are zeros to it, numbers far off."""
    if field.kind == "number":
        with np.errstate(over="ignore", invalid="ignore"):
            off = np.abs(numbers(column) / field.scale - field.centre / field.scale)
        far = f"{int((off > _FAR).sum()):,} of {len(off):,} values lie more than {_FAR} deviations from the mean in fitting"
        return [f"column {field.name!r}: {far}; is it the same unit?"] if (off > _FAR).any() else []
    if field.words is not None:
        lost, among = field.words.strange(column)
        return [f"column {field.name!r}: {lost:,} of {among:,} texts have no word of those in fitting"] if lost else []
    if field.kind != "category":
        return []
    code, values = texts(column)
    strange = np.array([v not in field.categories for v in values] + [False])
    if not strange.any():
        return []
    there = f"{int(strange[code].sum()):,} of {int((code >= 0).sum()):,} values"
    full = len(field.categories) == COMMONEST  # rarer ones were seen, and not kept
    said = f"are none of the {COMMONEST} commonest in fitting" if full else "were not seen in fitting"
    return [f"column {field.name!r}: {there} {said} ({some([v for v, s in zip(values, strange, strict=False) if s])})"]


def _kind(column: pa.ChunkedArray, category: bool, name: str, where: str) -> tuple[str, str]:
    """What a column is taken as, or why it is not."""
    kind = column.type
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    if column.null_count == len(column):
        return "", "it is empty"
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        inner = kind.value_type
        good = pa.types.is_floating(inner) or pa.types.is_integer(inner)
        return ("vector", "") if good else ("", f"it holds lists of {inner}")
    if pa.types.is_string(value) or pa.types.is_large_string(value) or pa.types.is_string_view(value) or category:
        return _category(column, category, name, where)
    if pa.types.is_integer(value):
        x = numbers(column)
        if len(x) > _FEW and np.array_equal(x, np.arange(len(x)) + x[0]):
            return "", "it numbers the rows"
    if pa.types.is_boolean(value) or pa.types.is_primitive(value) or pa.types.is_decimal(value):
        return "number", ""
    return "", f"it holds {value}"


def _category(column: pa.ChunkedArray, category: bool, name: str, where: str) -> tuple[str, str]:
    if not category:
        peek = column.slice(0, _PEEK)
        values = [v for v in map(plain, peek.unique().to_pylist()) if v and v not in MISSING]
        _no_slips(values, name, where)
        free = not pa.types.is_dictionary(column.type)
        if free and len(values) > 50 and len(values) > len(peek) / 2 and sum(map(_is_number, values)) * 2 < len(values):
            return "", "it says something else in nearly every row (if it is the text, name it with text=)"
    return "category", ""


def _constant(column: pa.ChunkedArray) -> bool:
    """Nothing can be learned from it, and a network would make something of the first other value it meets."""
    flat = not pa.types.is_nested(column.type)
    return flat and len(column) > 1 and all(len(column.slice(0, n).unique()) == 1 for n in (_PEEK, len(column)))


def _copy(column: pa.ChunkedArray, kind: str, label: np.ndarray | None, bag: np.ndarray) -> str:
    """Whether a column is the label or the bag under another name."""
    if kind not in ("number", "category"):
        return ""
    for what, codes in (("label", label), ("bag", bag)):
        if (
            codes is not None
            and not (what == "bag" and pa.types.is_floating(column.type))
            and _same(column, codes, kind)
        ):
            return f"it says the same as the {what} in every row"
    return ""


def _same(column: pa.ChunkedArray, codes: np.ndarray, kind: str) -> bool:
    """One value for each code and one code for each value, over the rows that have a code."""
    for stop in (_PEEK, len(column)):
        rows = np.flatnonzero(codes[:stop] >= 0)
        part = column.slice(0, stop)
        values = texts(part)[0] if kind == "category" else np.unique(numbers(part), return_inverse=True)[1]
        values = values[rows]
        if len(rows) == 0 or (values < 0).any():
            return False
        pairs = len(np.unique(values.astype(np.int64) * (int(codes.max()) + 2) + codes[rows]))
        if not pairs == len(np.unique(values)) == len(np.unique(codes[rows])) or pairs < 2 or pairs == len(rows):
            return False
        if stop >= len(column):
            return True
    return True


def _usable(
    column: pa.ChunkedArray, name: str, kind: str, fixed: bool, where: str, asked: Asked, bad: np.ndarray
) -> pa.ChunkedArray:
    """The column as its kind wants it; rows that cannot be are marked in ``bad``."""
    if kind == "vector":
        vectors(column, f"{name} of {where}")  # complaints now rather than when training begins
        return column
    value = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    wordy = pa.types.is_string(value) or pa.types.is_large_string(value) or pa.types.is_string_view(value)
    try:
        if kind == "text":
            return column.cast(pa.large_string() if pa.types.is_large_string(value) else pa.string())
        if kind == "number" and not wordy:
            x = numbers(column)
            wrong = np.isinf(x)
            bad |= asked.bad.rows(
                wrong, lambda r: f"{where} row {r + 1}: {x[r]} in column {name!r}; every number must be finite"
            )
            return pa.chunked_array([pa.array(np.where(wrong, np.nan, x), from_pandas=True)]) if wrong.any() else column
        code, values = texts(column)
    except HeadcountError:  # it has said already what is wrong
        raise
    except (pa.ArrowException, TypeError, ValueError) as e:
        raise HeadcountError(f"column {name!r} of {where} cannot be used: {e}") from None
    code, values, blank = _without_blanks(code, values, column)
    looks = np.array([*map(_is_number, values), False])
    if kind == "category" and not fixed:
        slips = _FEW < looks.sum() < len(values) < 2 * looks.sum()  # many numbers and a few words: not a category
        kind = "number" if slips or (blank and looks.sum() == len(values)) else kind
    if kind == "category":
        dictionary = pa.DictionaryArray.from_arrays(pa.array(code, mask=code < 0), pa.array(values, pa.string()))
        return pa.chunked_array([dictionary])
    return _mostly_numbers(code, values, looks, name, where, asked, bad)


def _without_blanks(
    code: np.ndarray, values: Sequence[str], column: pa.ChunkedArray
) -> tuple[np.ndarray, Sequence[str], bool]:
    """Words for nothing are nothing, also where other words made a text of the column; and whether there were any."""
    left, kept = without(code, values, MISSING)
    blank = len(kept) < len(values) or int((code < 0).sum()) > column.null_count  # blanks are none of the values
    return left, kept, blank


def _mostly_numbers(
    code: np.ndarray, values: Sequence[str], looks: np.ndarray, name: str, where: str, asked: Asked, bad: np.ndarray
) -> pa.ChunkedArray:
    """Words where numbers should be: a slip of the pen, not a category."""
    wrong = ~looks[code] & (code >= 0)
    do = "mend it or leave it empty" if asked.learned else "mend it, leave it empty, or name the column in categories="
    bad |= asked.bad.rows(
        wrong,
        lambda r: f"{where} row {r + 1}: {short(values[code[r]])} among the numbers of column {name!r}; {do}",
    )
    held = np.array([float(v) if n else np.nan for v, n in zip(values, looks[:-1], strict=True)] + [np.nan])
    return pa.chunked_array([pa.array(held[code], from_pandas=True)])


def _is_number(text: str) -> bool:
    try:
        return bool(np.isfinite(float(text))) and "_" not in text
    except ValueError:
        return False


def _no_slips(values: Sequence[str], name: str, where: str) -> None:
    """Refuse numbers and dates that would pass for words."""
    comma = [v for v in values if v.count(",") == 1 and _is_number(v.replace(",", "."))]
    if len(comma) * 2 > len(values):
        raise HeadcountError(
            f"column {name!r} of {where} has numbers with a decimal comma ({comma[0]!r}); write a point"
        )
    dates = [v for v in values if _DATE.fullmatch(v)]
    if len(dates) * 2 > len(values):
        raise HeadcountError(
            f"column {name!r} of {where} has dates that are not written as 2021-12-31 is ({dates[0]!r}); write them so, or "
            "name the column in categories="
        )


def _said(chosen: Sequence[Field], aside: dict[str, str]) -> list[str]:
    said = []
    for kind, many in (
        ("number", "numbers"),
        ("category", "categories"),
        ("text", "text"),
        ("vector", "lists of numbers"),
    ):
        names = [f.name for f in chosen if f.kind == kind]
        if names:
            said.append(f"features, {many}: {some(names, 12)}")
    return said + [f"not used: column {name!r}, {why}" for name, why in aside.items()]
