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

from headcount.errors import HeadcountError
from headcount.readers.columns import ColumnRoles, FeatureSchema
from headcount.readers.preprocessing import MAX_CATEGORIES, Field, Preprocessor, check_time_kind
from headcount.readers.raw_data import ReadOptions, abbreviate, preview
from headcount.readers.tables import MISSING_VALUES
from headcount.readers.values import as_float, as_vectors, clean_name, drop_values, factorize

_FEW_VALUES = 10  # different numbers may still be names
_MAX_DEVIATIONS = 20  # standard deviations: hardly the same measure
_DATE = re.compile(r"(\d{1,2}[./-]\d{1,2}[./-]\d{4}|\d{1,2}/\d{1,2}/\d{2}|\d{4}[./]\d{1,2}[./]\d{1,2})([ T].*)?")
_PREVIEW_ROWS = 20_000  # rows that show that two columns differ; only if they do not, all are compared


def select_features(
    table: pa.Table,
    roles: ColumnRoles,
    role_columns: Sequence[str],
    label: np.ndarray | None,
    bag: np.ndarray,
    origin: str,
    options: ReadOptions,
) -> tuple[pa.Table, FeatureSchema, list[str], np.ndarray]:
    """The feature columns as they will be learned from, how, what to say of it, and (n,) rows that are bad.

    ``spoken``: columns that have a role. ``label`` (n,): each row's label, to find columns that repeat it.
    """
    fields, unused, bad, notes = [], dict[str, str](), np.zeros(table.num_rows, bool), list[str]()
    fitted = {f.name: f for f in options.preprocessor.fields} if options.preprocessor else {}
    columns: dict[str, pa.ChunkedArray] = {}
    for name, fixed in _candidates(table, roles, role_columns, origin, options.preprocessor):
        kind, why = (fixed, "") if fixed else _infer_kind(table.column(name), name in roles.categories, name, origin)
        why = why or ("" if fixed else _duplicates_label_or_bag(table.column(name), kind, label, bag))
        if not (why or fixed or name in (*roles.features, *roles.categories)) and _is_constant(table.column(name)):
            why = "it says the same in every row"
        if why and name in roles.features:
            raise HeadcountError(f"column {name!r} of {origin} cannot be a feature: {why}")
        if why:
            unused[name] = why
            continue
        kind_fixed = bool(fixed) or name in roles.categories
        columns[name] = usable = _convert(table.column(name), name, kind, kind_fixed, origin, options, bad)
        kind = "number" if kind == "category" and not pa.types.is_dictionary(usable.type) else kind
        if name in fitted:
            check_time_kind(fitted[name], usable, origin)
            notes += _unfamiliar_values(usable, fitted[name])
        elif kind == "category" and (many := len(factorize(usable)[1])) > MAX_CATEGORIES:
            notes.append(
                f"column {name!r} has {many:,} values: the {MAX_CATEGORIES} commonest are learned, the others are as one"
            )
        fields.append(Field(name, kind))
    if not fields:
        reasons = (
            "; ".join(f"{n!r}: {w}" for n, w in list(unused.items())[:5])
            or f"columns are {preview(table.column_names, 12)}"
        )
        raise HeadcountError(
            f"{origin} has no column to learn from ({reasons}); name some with features=, text= or path="
        )
    kind = "text" if any(f.kind == "text" for f in fields) else "table"
    if roles.text and not roles.features and not fitted:
        idle = [n for n in table.column_names if n not in role_columns]
        notes += [f"not used: {preview(idle, 12)}; beside a text, columns are named with features="] if idle else []
    return (
        pa.table(columns),
        FeatureSchema(kind, tuple(fields), roles=roles),
        [*_describe_features(fields, unused), *notes],
        bad,
    )


def _candidates(
    table: pa.Table, roles: ColumnRoles, role_columns: Sequence[str], origin: str, preprocessor: Preprocessor | None
) -> list[tuple[str, str | None]]:
    """Columns that may become features, with their kind where it is fixed."""
    if preprocessor is not None:
        missing = [f.name for f in preprocessor.fields if f.name not in table.column_names]
        if missing:
            raise HeadcountError(
                f"{origin} lacks {preview(missing, 8)}, which the model was fitted on; add the column, empty where nothing is known, "
                "or fit without it"
            )
        return [(f.name, f.kind) for f in preprocessor.fields]
    if roles.features or roles.text:
        missing = [c for c in roles.categories if c not in (*roles.features, roles.text)]
        if missing:
            raise HeadcountError(
                f"column {missing[0]!r} of {origin} is in categories= and not in features=; name it there too"
            )
        text: list[tuple[str, str | None]] = [(roles.text, "text")] if roles.text else []
        return [*text, *((n, None) for n in roles.features)]
    return [(n, None) for n in table.column_names if n not in role_columns]


def _unfamiliar_values(column: pa.ChunkedArray, field: Field) -> list[str]:
    """What to say of values the model has never met the like of: categories and words are zeros to it, numbers far off."""
    if field.kind == "number":
        off = np.abs(field.scaler.deviations(as_float(column)[:, None])[:, 0])
        far = f"{int((off > _MAX_DEVIATIONS).sum()):,} of {len(off):,} values lie more than {_MAX_DEVIATIONS} deviations from the mean in fitting"
        return [f"column {field.name!r}: {far}; is it the same unit?"] if (off > _MAX_DEVIATIONS).any() else []
    if field.tfidf is not None:
        lost, among = field.tfidf.count_oov(column)
        return [f"column {field.name!r}: {lost:,} of {among:,} texts have no word of those in fitting"] if lost else []
    if field.kind != "category":
        return []
    code, values = factorize(column)
    unseen = np.array([v not in field.categories for v in values] + [False])
    if not unseen.any():
        return []
    there = f"{int(unseen[code].sum()):,} of {int((code >= 0).sum()):,} values"
    full = len(field.categories) == MAX_CATEGORIES  # rarer ones were seen, and not kept
    problem = f"are none of the {MAX_CATEGORIES} commonest in fitting" if full else "were not seen in fitting"
    return [
        f"column {field.name!r}: {there} {problem} ({preview([v for v, s in zip(values, unseen, strict=False) if s])})"
    ]


def _infer_kind(column: pa.ChunkedArray, category: bool, name: str, origin: str) -> tuple[str, str]:
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
        return _infer_category(column, category, name, origin)
    if pa.types.is_integer(value):
        x = as_float(column)
        if len(x) > _FEW_VALUES and np.array_equal(x, np.arange(len(x)) + x[0]):
            return "", "it numbers the rows"
    if pa.types.is_boolean(value) or pa.types.is_primitive(value) or pa.types.is_decimal(value):
        return "number", ""
    return "", f"it holds {value}"


def _infer_category(column: pa.ChunkedArray, category: bool, name: str, origin: str) -> tuple[str, str]:
    if not category:
        peek = column.slice(0, _PREVIEW_ROWS)
        values = [v for v in map(clean_name, peek.unique().to_pylist()) if v and v not in MISSING_VALUES]
        _refuse_decimal_commas_and_dates(values, name, origin)
        free = not pa.types.is_dictionary(column.type)
        if free and len(values) > 50 and len(values) > len(peek) / 2 and sum(map(_is_number, values)) * 2 < len(values):
            return "", "it says something else in nearly every row (if it is the text, name it with text=)"
    return "category", ""


def _is_constant(column: pa.ChunkedArray) -> bool:
    """Nothing can be learned from it, and a network would make something of the first other value it meets."""
    flat = not pa.types.is_nested(column.type)
    return flat and len(column) > 1 and all(len(column.slice(0, n).unique()) == 1 for n in (_PREVIEW_ROWS, len(column)))


def _duplicates_label_or_bag(column: pa.ChunkedArray, kind: str, label: np.ndarray | None, bag: np.ndarray) -> str:
    """Whether a column is the label or the bag under another name."""
    if kind not in ("number", "category"):
        return ""
    for what, codes in (("label", label), ("bag", bag)):
        if (
            codes is not None
            and not (what == "bag" and pa.types.is_floating(column.type))
            and _one_to_one(column, codes, kind)
        ):
            return f"it says the same as the {what} in every row"
    return ""


def _one_to_one(column: pa.ChunkedArray, codes: np.ndarray, kind: str) -> bool:
    """One value for each code and one code for each value, over the rows that have a code."""
    for stop in (_PREVIEW_ROWS, len(column)):
        rows = np.flatnonzero(codes[:stop] >= 0)
        part = column.slice(0, stop)
        values = factorize(part)[0] if kind == "category" else np.unique(as_float(part), return_inverse=True)[1]
        values = values[rows]
        if len(rows) == 0 or (values < 0).any():
            return False
        pairs = len(np.unique(values.astype(np.int64) * (int(codes.max()) + 2) + codes[rows]))
        if not pairs == len(np.unique(values)) == len(np.unique(codes[rows])) or pairs < 2 or pairs == len(rows):
            return False
        if stop >= len(column):
            return True
    return True


def _convert(
    column: pa.ChunkedArray, name: str, kind: str, fixed: bool, origin: str, options: ReadOptions, bad: np.ndarray
) -> pa.ChunkedArray:
    """The column as its kind wants it; rows that cannot be are marked in ``bad``."""
    if kind == "vector":
        as_vectors(column, f"{name} of {origin}")  # complaints now rather than when training begins
        return column
    value = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    wordy = pa.types.is_string(value) or pa.types.is_large_string(value) or pa.types.is_string_view(value)
    try:
        if kind == "text":
            return column.cast(pa.large_string() if pa.types.is_large_string(value) else pa.string())
        if kind == "number" and not wordy:
            x = as_float(column)
            wrong = np.isinf(x)
            bad |= options.errors.report_rows(
                wrong, lambda r: f"{origin} row {r + 1}: {x[r]} in column {name!r}; every number must be finite"
            )
            return pa.chunked_array([pa.array(np.where(wrong, np.nan, x), from_pandas=True)]) if wrong.any() else column
        code, values = factorize(column)
    except HeadcountError:  # it has said already what is wrong
        raise
    except (pa.ArrowException, TypeError, ValueError) as e:
        raise HeadcountError(f"column {name!r} of {origin} cannot be used: {e}") from None
    code, values, blank = _drop_missing_words(code, values, column)
    looks = np.array([*map(_is_number, values), False])
    if kind == "category" and not fixed:
        slips = (
            _FEW_VALUES < looks.sum() < len(values) < 2 * looks.sum()
        )  # many numbers and a few words: not a category
        kind = "number" if slips or (blank and looks.sum() == len(values)) else kind
    if kind == "category":
        dictionary = pa.DictionaryArray.from_arrays(pa.array(code, mask=code < 0), pa.array(values, pa.string()))
        return pa.chunked_array([dictionary])
    return _numbers_with_typos(code, values, looks, name, origin, options, bad)


def _drop_missing_words(
    code: np.ndarray, values: Sequence[str], column: pa.ChunkedArray
) -> tuple[np.ndarray, Sequence[str], bool]:
    """Words for nothing are nothing, also where other words made a text of the column; and whether there were any."""
    left, kept = drop_values(code, values, MISSING_VALUES)
    blank = len(kept) < len(values) or int((code < 0).sum()) > column.null_count  # blanks are none of the values
    return left, kept, blank


def _numbers_with_typos(
    code: np.ndarray,
    values: Sequence[str],
    looks: np.ndarray,
    name: str,
    origin: str,
    options: ReadOptions,
    bad: np.ndarray,
) -> pa.ChunkedArray:
    """Words where numbers should be: a slip of the pen, not a category."""
    wrong = ~looks[code] & (code >= 0)
    do = (
        "mend it or leave it empty"
        if options.preprocessor
        else "mend it, leave it empty, or name the column in categories="
    )
    bad |= options.errors.report_rows(
        wrong,
        lambda r: f"{origin} row {r + 1}: {abbreviate(values[code[r]])} among the numbers of column {name!r}; {do}",
    )
    parsed = np.array([float(v) if n else np.nan for v, n in zip(values, looks[:-1], strict=True)] + [np.nan])
    return pa.chunked_array([pa.array(parsed[code], from_pandas=True)])


def _is_number(text: str) -> bool:
    try:
        return bool(np.isfinite(float(text))) and "_" not in text
    except ValueError:
        return False


def _refuse_decimal_commas_and_dates(values: Sequence[str], name: str, origin: str) -> None:
    """Refuse numbers and dates that would pass for words."""
    comma = [v for v in values if v.count(",") == 1 and _is_number(v.replace(",", "."))]
    if len(comma) * 2 > len(values):
        raise HeadcountError(
            f"column {name!r} of {origin} has numbers with a decimal comma ({comma[0]!r}); write a point"
        )
    dates = [v for v in values if _DATE.fullmatch(v)]
    if len(dates) * 2 > len(values):
        raise HeadcountError(
            f"column {name!r} of {origin} has dates that are not written as 2021-12-31 is ({dates[0]!r}); write them so, or "
            "name the column in categories="
        )


def _describe_features(chosen: Sequence[Field], aside: dict[str, str]) -> list[str]:
    lines = []
    for kind, many in (
        ("number", "numbers"),
        ("category", "categories"),
        ("text", "text"),
        ("vector", "lists of numbers"),
    ):
        names = [f.name for f in chosen if f.kind == kind]
        if names:
            lines.append(f"features, {many}: {preview(names, 12)}")
    return lines + [f"not used: column {name!r}, {why}" for name, why in aside.items()]
