"""Tables of results: the methods of one data set in one scenario, their names and scores, and the runs behind them."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from headcount.experiments.recipe import Recipe
from headcount.experiments.records import Record
from headcount.experiments.scores import Row
from headcount.models.heads import HEADS, head_options

METRICS = {
    "instance_accuracy": "Instance accuracy",
    "bag_accuracy": "Bag accuracy",
    "consistency_rate": "Consistency",
    "miou": "mIoU",
    "share_difference": "Share difference",
}
MIN_FAMILY = 4  # methods of one head from which on their common settings are stated once


class TableCell(NamedTuple):
    """A mean and its standard deviation, formatted."""

    mean: str = ""
    deviation: str = ""
    best: bool = False


class ReportMethod(NamedTuple):
    """A table row and its display name."""

    name: str
    row: Row

    @property
    def accuracy(self) -> float:
        return self.row.score("instance_accuracy")[0]

    @property
    def oracle(self) -> bool:
        """Trained on instance labels: an upper bound, never the best method."""
        return self.row.records[0].uses_instance_labels

    @property
    def removes(self) -> bool:
        return self.row.records[0].recipe.removal > 0

    @property
    def note(self) -> str:
        if self.oracle:
            return "trained on instance labels: an upper bound"
        if self.removes:
            return "r chosen by validation loss: " + ", ".join(f"{r.recipe.removal:g}" for r in self.row.records)
        return ""

    @property
    def runs(self) -> Iterator[tuple[str, str]]:
        """Fold (and seed, if there are several) and key of each record."""
        several = len({r.recipe.seed for r in self.row.records}) > 1
        for r in self.row.records:
            yield f"{r.recipe.fold}·{r.recipe.seed}" if several else str(r.recipe.fold), r.key


class RunSummary(NamedTuple):
    """A record in a list of runs."""

    record: Record
    name: str = ""
    chosen: bool = False

    @property
    def seconds(self) -> str:
        seconds = self.record.data.get("provenance", {}).get("seconds")
        return "–" if seconds is None else f"{seconds:,.1f}"

    @property
    def device(self) -> str:
        return str(self.record.data.get("provenance", {}).get("device", "–"))

    def score(self, metric: str) -> str:
        value = self.record.scores.get(metric)
        return "–" if value is None else f"{value:.3f}"


def rank_methods(rows: Sequence[Row], names: Sequence[str] | None = None) -> list[ReportMethod]:
    """Methods by falling accuracy, oracles last; without ``names`` they get those that distinguish these rows."""
    methods = [ReportMethod(name, row) for name, row in zip(names or display_names(rows)[0], rows, strict=True)]
    return sorted(methods, key=lambda m: (m.oracle, -m.accuracy if math.isfinite(m.accuracy) else math.inf, m.name))


def best_method(methods: Sequence[ReportMethod]) -> ReportMethod:
    """The ranked method with the highest instance accuracy among those trained without instance labels."""
    return next((m for m in methods if not m.oracle and math.isfinite(m.accuracy)), methods[0])


def score_cell(row: Row, metric: str, best: bool = False) -> TableCell:
    """Three decimals as in the paper; no deviation for a single run, a dash where the metric is undefined."""
    mean, deviation, runs = row.score(metric)
    if not runs:
        return TableCell("–")
    sign = "+" if metric == "share_difference" else ""
    return TableCell(f"{mean:{sign}.3f}".replace("-", "−"), f"± {deviation:.3f}" if runs > 1 else "", best)


def data_facts(records: Sequence[Record]) -> list[tuple[str, str]]:
    """Term and value of what describes the data; all values where the records of a section differ."""
    data = [r.data["data"] for r in records]
    classes = data[0]["classes"]
    bags = (f"{d['train_bags']:,} training, {d['valid_bags']:,} validation, {d['test_bags']:,} test" for d in data)
    return [
        ("Source", _distinct(d["source"] for d in data)),
        ("Scenario", _distinct(r.recipe.scenario for r in records)),
        ("Bags per fold", _distinct(bags)),
        ("Instances per bag", _distinct(d["bag_size"] for d in data)),
        ("Instance", _distinct(_format_shape(d.get("shape") or ()) for d in data)),
        (f"{len(classes)} classes", ", ".join(classes[:30]) + ("…" if len(classes) > 30 else "")),
        ("Checksum", _distinct(str(d["checksum"])[:12] for d in data)),
    ]


def _format_shape(shape: Sequence[int]) -> str:
    if len(shape) == 3:
        return f"{shape[0]} × {shape[1]} pixels, {'grey' if shape[2] == 1 else 'colour'}"
    return " × ".join(map(str, shape)) + " numbers" if shape else "unknown"


def _distinct(values: Iterable[Any]) -> str:
    return " or ".join(dict.fromkeys(str(v) for v in values))


def display_names(rows: Sequence[Row]) -> tuple[list[str], dict[str, str]]:
    """A name for each row, and for the beginnings of names a remark on the settings they omit. Rows of one family (one label,
    or one head where it has many methods) are distinguished by the recipe fields in which they differ within a table; a method
    has the same name in all tables."""
    short, family, remarks = _short_labels(rows)
    names, defaults = [""] * len(rows), {k: _format_value(v) for k, v in Recipe().values.items()}
    for group in dict.fromkeys(family.values()):
        settings = {i: _settings(row.records[0]) for i, row in enumerate(rows) if family[row.label] == group}
        tables: dict[tuple[str, str], list[dict[str, str]]] = {}
        for i, values in settings.items():
            tables.setdefault((rows[i].source, rows[i].scenario), []).append(values)
        differing = [k for k in next(iter(settings.values())) if any(len({v[k] for v in t}) > 1 for t in tables.values())]
        usual: dict[str, str] = {}
        if len({(rows[i].label, *(values[k] for k in differing)) for i, values in settings.items()}) >= MIN_FAMILY:
            usual = {k: Counter(values[k] for values in settings.values()).most_common(1)[0][0] for k in differing}
            if shared := _format_settings({k: v for k, v in usual.items() if v != defaults.get(k)}):
                remarks[group] = f"{remarks[group]}, {shared}" if group in remarks else f"unless stated: {shared}"
        for i, values in settings.items():
            suffix = _format_settings({k: values[k] for k in differing if values[k] != usual.get(k)})
            name = short[rows[i].label]
            names[i] = f"{name}, {suffix}" if suffix else name
    return names, remarks


def _short_labels(rows: Sequence[Row]) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """By label: a label that shows only the options in which it differs from most methods of its head, and its family;
    by family: a remark on the options left out."""
    short = {row.label: row.label for row in rows}
    family, remarks = dict(short), {}
    for head_name, head in HEADS.items():
        given = {r.label: dict(r.records[0].recipe.options) for r in rows if r.records[0].recipe.head == head_name}
        if len(given) < MIN_FAMILY or "display_name" in vars(head):  # some heads name themselves
            continue
        defaults = head_options(head_name)
        options = {label: {**defaults, **changes} for label, changes in given.items()}
        usual = {k: Counter(values[k] for values in options.values()).most_common(1)[0][0] for k in defaults}
        unusual = {label: {k: v for k, v in values.items() if v != usual[k]} for label, values in options.items()}
        names = {label: head.display_name(values) for label, values in unusual.items()}
        if len(set(names.values())) == len(names):
            short |= names
            family |= dict.fromkeys(names, head.title)
            if shared := ", ".join(f"{k}={v}" for k, v in usual.items() if v != defaults[k]):
                remarks[head.title] = f"unless stated: {shared}"
    return short, family, remarks


def _settings(record: Record) -> dict[str, str]:
    """All that can distinguish two rows of one label: head and options are in the label already, except for heads that are
    given by file, since two files may use one name."""
    in_label = ("fold", "seed", "removal", "head", "options", "source", "scenario")
    values = {k: v for k, v in record.recipe.values.items() if k not in in_label or (k == "head" and ":" in v)}
    values = {"head": "", **values, **{k: v[:8] for k, v in record.fingerprint.items()}}
    return {k: _format_value(v) for k, v in values.items()}


def _format_value(value: Any) -> str:
    return " ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, Mapping) else str(value)


def _format_settings(values: Mapping[str, str]) -> str:
    return ", ".join(f"{field.replace('_', ' ')} {value or 'none'}" for field, value in values.items())
