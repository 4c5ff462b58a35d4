"""Which columns of a table become features, and as what kind; the others are listed with the reason.

Not used: empty and constant columns, row numbers, texts that differ in nearly every row (an id, or a text that no option
names), copies of the label or of the bag. Refused: a word among numbers, infinite numbers, numbers with a decimal comma, dates
that are not written like 2021-12-31.
"""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from headcount.errors import HeadcountError
from headcount.readers.columns import abbreviate, clean_name, drop_values, factorize, is_id_column, preview
from headcount.readers.dataset import ReadOptions
from headcount.readers.preprocessing import MAX_CATEGORIES, Field, Preprocessor
from headcount.readers.tables import MISSING_VALUES, SourceTable
from headcount.readers.text_encoders import encode_texts, find_encoder
from headcount.readers.transforms import as_float, as_vectors, parse_number, value_type

_FEW_VALUES = 10  # distinct numbers that may still be names
_MAX_DEVIATIONS = 20  # from the mean: more is hardly the same unit
_DATE = re.compile(r"(\d{1,2}[./-]\d{1,2}[./-]\d{4}|\d{1,2}/\d{1,2}/\d{2}|\d{4}[./]\d{1,2}[./]\d{1,2})([ T].*)?")
_SAMPLE_ROWS = 20_000  # compared first; all rows are compared only if these do not differ


def select_features(
    source: SourceTable, label: np.ndarray | None, bag: np.ndarray, options: ReadOptions
) -> tuple[pa.Table, Preprocessor, np.ndarray]:
    """The columns to learn from, converted; their schema; and (n,) rows that are excluded. ``label`` (n,) is the label
    of each row: columns that repeat it are not used, nor are those that have a role."""
    table, roles, origin = source.table, source.roles, source.origin
    role_columns = {name for _, name in roles.assigned_columns()} | {*roles.votes}
    role_columns |= set(filter(is_id_column, table.column_names))
    fields, notes, columns, unused = list[Field](), list[str](), dict[str, pa.ChunkedArray](), dict[str, str]()
    excluded = np.zeros(table.num_rows, bool)
    fitted = {f.name: f for f in options.preprocessor.fields} if options.preprocessor else {}
    for name, fixed_kind in _candidates(source, role_columns, options.preprocessor, options.encoder):
        column = table.column(name)
        kind, reason = (fixed_kind, "") if fixed_kind else _infer_kind(source, name)
        if not fixed_kind and not reason:
            reason = _why_uninformative(column, kind, label, bag, is_named=name in (*roles.features, *roles.categories))
        if reason and name in roles.features:
            raise HeadcountError(f"column {name!r} of {origin} cannot be a feature: {reason}")
        if reason:
            unused[name] = reason
            continue
        is_fixed = bool(fixed_kind) or name in roles.categories
        columns[name] = converted = _convert(source, name, kind, is_fixed, options, excluded)
        if kind == "category" and not pa.types.is_dictionary(converted.type):
            kind = "number"
        if name in fitted:
            fitted[name].check_time_kind(converted, origin)
            notes += _note_unfamiliar_values(converted, fitted[name])
        elif kind == "category" and (n_values := len(factorize(converted)[1])) > MAX_CATEGORIES:
            which = f"the {MAX_CATEGORIES} most frequent are learned, the others count as one"
            notes.append(f"column {name!r} has {n_values:,} values: {which}")
        field = Field(name, kind)
        if kind == "embedding":
            field, columns[field.column] = _encode(converted, field, fitted.get(name), options)
        fields.append(field)
    if not fields:
        reasons = "; ".join(f"{name!r}: {reason}" for name, reason in list(unused.items())[:5])
        reasons = reasons or f"columns are {preview(table.column_names, 12)}"
        raise HeadcountError(f"{origin} has no column to learn from ({reasons}); name some with features=, text= or path=")
    if roles.text and not roles.features and not fitted:
        idle = [n for n in table.column_names if n not in role_columns]
        notes += [f"not used: {preview(idle, 12)}; beside a text, columns are named with features="] if idle else []
    kind = "text" if any(f.is_text for f in fields) else "table"
    if not fitted and any(f.kind == "text" for f in fields):
        notes.append("TF-IDF knows words of the training bags only; an encoder= of sentences (headcount[text]) knows more")
    schema = Preprocessor(kind, tuple(fields), roles=roles)
    headings = {
        "number": "numbers",
        "category": "categories",
        "text": "TF-IDF of text",
        "embedding": "embeddings of text",
        "vector": "lists of numbers",
    }
    names = {heading: [f.name for f in fields if f.kind == kind] for kind, heading in headings.items()}
    lines = [f"features, {heading}: {preview(n, 12)}" for heading, n in names.items() if n]
    lines += [f"not used: column {name!r}, {reason}" for name, reason in unused.items()]
    options.notes.extend(lines + notes)
    return pa.table(columns), schema, excluded


def _candidates(
    source: SourceTable, role_columns: set[str], model: Preprocessor | None, encoder: str | Path | None
) -> list[tuple[str, str | None]]:
    """Columns that may become features, with their kind where it is fixed."""
    roles = source.roles
    if model is not None:
        if missing := [f.name for f in model.fields if f.name not in source]:
            problem = f"{source.origin} lacks {preview(missing, 8)}, which the model was fitted on"
            raise HeadcountError(f"{problem}; add the column, empty where nothing is known, or fit without it")
        return [(f.name, f.kind) for f in model.fields]
    if roles.features or roles.text:
        text_kind = "text" if encoder is None else "embedding"
        if missing := [c for c in roles.categories if c not in (*roles.features, roles.text)]:
            column = f"column {missing[0]!r} of {source.origin}"
            raise HeadcountError(f"{column} is in categories= and not in features=; name it there too")
        return [*([(roles.text, text_kind)] if roles.text else []), *((n, None) for n in roles.features)]
    return [(n, None) for n in source.table.column_names if n not in role_columns]


def _encode(texts: pa.ChunkedArray, field: Field, fitted: Field | None, options: ReadOptions) -> tuple[Field, pa.ChunkedArray]:
    """The field and the embeddings of a text, by the encoder in the options or that of the fitted model, and by no other."""
    encoder = find_encoder(options.encoder or (fitted.encoder if fitted else ""), download=options.download)
    if fitted is not None and encoder.digest != fitted.digest:
        problem = f"encoder {encoder.name!r} has other files than the one the model was fitted with, {fitted.encoder!r}"
        raise HeadcountError(f"{problem}; give that one with encoder=")
    x = encode_texts(texts.to_pylist(), encoder, cache=options.cache)
    options.notes.append(
        f"{encoder.name} makes {x.shape[1]} numbers of each text; long texts in parts, averaged; their principal components are features"
    )
    column = pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), x.shape[1])
    return replace(field, length=x.shape[1], encoder=encoder.name, digest=encoder.digest), pa.chunked_array([column])


def _note_unfamiliar_values(column: pa.ChunkedArray, field: Field) -> list[str]:
    """Notes on values unlike those the model was fitted on: remote numbers, and words and categories it does not know."""
    name = f"column {field.name!r}"
    if field.kind == "number":
        remote = np.abs(field.scaler.deviations(as_float(column)[:, None])[:, 0]) > _MAX_DEVIATIONS
        count = f"{int(remote.sum()):,} of {len(remote):,} values"
        where = f"more than {_MAX_DEVIATIONS} standard deviations from the mean in fitting"
        return [f"{name}: {count} lie {where}; is it the same unit?"] if remote.any() else []
    if field.tfidf is not None:
        unknown, total = field.tfidf.count_oov(column)
        return [f"{name}: {unknown:,} of {total:,} texts have no word of those in fitting"] if unknown else []
    if field.kind != "category":
        return []
    codes, values = factorize(column)
    unseen = np.array([v not in field.categories for v in values] + [False])
    if not unseen.any():
        return []
    truncated = len(field.categories) == MAX_CATEGORIES  # rarer categories were seen, and not kept
    problem = f"are none of the {MAX_CATEGORIES} most frequent in fitting" if truncated else "were not seen in fitting"
    examples = preview([v for v, new in zip(values, unseen, strict=False) if new])
    return [f"{name}: {int(unseen[codes].sum()):,} of {int((codes >= 0).sum()):,} values {problem} ({examples})"]


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _infer_kind(source: SourceTable, name: str) -> tuple[str, str]:
    """The kind of a column, or why it is not used."""
    column = source.table.column(name)
    kind, value = column.type, value_type(column)
    if column.null_count == len(column):
        return "", "it is empty"
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        inner = kind.value_type
        numeric = pa.types.is_floating(inner) or pa.types.is_integer(inner)
        return ("vector", "") if numeric else ("", f"it holds lists of {inner}")
    if name in source.roles.categories:
        return "category", ""
    if _is_text(value):
        column_name, sample = f"column {name!r} of {source.origin}", column.slice(0, _SAMPLE_ROWS)
        values = [v for v in map(clean_name, sample.unique().to_pylist()) if v and v not in MISSING_VALUES]
        comma = [v for v in values if v.count(",") == 1 and np.isfinite(parse_number(v.replace(",", ".")))]
        if len(comma) * 2 > len(values):  # they would be taken for categories, and so would such dates
            raise HeadcountError(f"{column_name} has numbers with a decimal comma ({comma[0]!r}); write a point")
        dates = [v for v in values if _DATE.fullmatch(v)]
        if len(dates) * 2 > len(values):
            problem = f"{column_name} has dates that are not written like 2021-12-31 ({dates[0]!r})"
            raise HeadcountError(f"{problem}; write them so, or name the column in categories=")
        many = len(values) > 50 and len(values) > len(sample) / 2 and not pa.types.is_dictionary(kind)
        if many and np.isfinite(list(map(parse_number, values))).sum() * 2 < len(values):
            return "", "it differs in nearly every row (if it is the text, name it with text=)"
        return "category", ""
    if pa.types.is_integer(value):
        x = as_float(column)
        if len(x) > _FEW_VALUES and np.array_equal(x, np.arange(len(x)) + x[0]):
            return "", "it numbers the rows"
    if pa.types.is_boolean(value) or pa.types.is_primitive(value) or pa.types.is_decimal(value):
        return "number", ""
    return "", f"it holds {value}"


def _why_uninformative(column: pa.ChunkedArray, kind: str, label: np.ndarray | None, bag: np.ndarray, is_named: bool) -> str:
    """Why not to use a column that repeats the label or the bag, or is constant and not named by the user: a network would
    respond arbitrarily to the first other value. Empty if it is neither."""
    if kind not in ("number", "category"):
        return ""
    if label is not None and _is_one_to_one(column, label, kind):
        return "it repeats the label in every row"
    if not pa.types.is_floating(column.type) and _is_one_to_one(column, bag, kind):
        return "it repeats the bag in every row"
    if is_named or len(column) == 1 or any(len(column.slice(0, n).unique()) > 1 for n in (_SAMPLE_ROWS, len(column))):
        return ""
    return "it is the same in every row"


def _is_one_to_one(column: pa.ChunkedArray, codes: np.ndarray, kind: str) -> bool:
    """Whether each code has one value and each value one code, over the rows that have a code."""
    for stop in (_SAMPLE_ROWS, len(column)) if len(column) > _SAMPLE_ROWS else (len(column),):
        rows = np.flatnonzero(codes[:stop] >= 0)
        part = column.slice(0, stop)
        values = factorize(part)[0] if kind == "category" else np.unique(as_float(part), return_inverse=True)[1]
        values = values[rows]
        if len(rows) == 0 or (values < 0).any():
            return False
        pairs = len(np.unique(values.astype(np.int64) * (int(codes.max()) + 2) + codes[rows]))
        if not pairs == len(np.unique(values)) == len(np.unique(codes[rows])) or pairs < 2 or pairs == len(rows):
            return False
    return True


def _convert(
    source: SourceTable, name: str, kind: str, is_fixed: bool, options: ReadOptions, excluded: np.ndarray
) -> pa.ChunkedArray:
    """The column as its kind needs it; rows that cannot be converted are marked in ``excluded``."""
    column, errors = source.table.column(name), options.errors
    if kind == "vector":
        as_vectors(column, f"{name} of {source.origin}")  # errors now rather than when training begins
        return column
    value = value_type(column)
    try:
        if kind in ("text", "embedding"):
            return column.cast(pa.large_string() if pa.types.is_large_string(value) else pa.string())
        if kind == "number" and not _is_text(value):
            x = as_float(column)
            infinite = np.isinf(x)
            advice = "every number must be finite"
            excluded |= errors.report_rows(infinite, lambda r: f"{source.row(r)}: {x[r]} in column {name!r}; {advice}")
            finite = np.where(infinite, np.nan, x)
            return pa.chunked_array([pa.array(finite, from_pandas=True)]) if infinite.any() else column
        codes, values = factorize(column)
    except HeadcountError:
        raise
    except (pa.ArrowException, TypeError, ValueError) as e:
        raise HeadcountError(f"column {name!r} of {source.origin} cannot be used: {e}") from None
    codes, values = drop_values(codes, values, MISSING_VALUES)
    had_missing = int((codes < 0).sum()) > column.null_count  # blanks are no values
    parsed = np.array([*map(parse_number, values), np.nan])
    numeric = np.isfinite(parsed)
    if kind == "category" and not is_fixed:
        has_typos = _FEW_VALUES < numeric.sum() < len(values) < 2 * numeric.sum()  # many numbers and a few words
        kind = "number" if has_typos or (had_missing and numeric.sum() == len(values)) else kind
    if kind == "category":
        dictionary = pa.DictionaryArray.from_arrays(pa.array(codes, mask=codes < 0), pa.array(values, pa.string()))
        return pa.chunked_array([dictionary])
    advice = "correct it or leave it empty"
    advice = advice if options.preprocessor else "correct it, leave it empty, or name the column in categories="
    typo = f"among the numbers of column {name!r}; {advice}"
    message = lambda r: f"{source.row(r)}: {abbreviate(values[codes[r]])} {typo}"  # noqa: E731
    excluded |= errors.report_rows(~numeric[codes] & (codes >= 0), message)
    return pa.chunked_array([pa.array(np.where(numeric, parsed, np.nan)[codes], from_pandas=True)])
