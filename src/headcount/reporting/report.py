"""Records in, one HTML file out: tables, figures and example bags, readable offline on any screen."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from headcount.datasets import registry
from headcount.datasets.registry import Source
from headcount.errors import FileError, HeadcountError
from headcount.experiments.records import Record
from headcount.experiments.scores import Row, rows
from headcount.io import atomic_write
from headcount.reporting import results_table as tables
from headcount.reporting.figures import section_figures
from headcount.reporting.render import method_colours, picture_uri, render_template
from headcount.reporting.results_table import ReportMethod, RunSummary, TableCell

_MAX_BYTES = 2_800_000  # a page should open at once on a phone
LoadSource = Callable[[str], Source]
_MAX_SHOWN = 64  # instances of a bag; the paper's bags have as many
_SIDE = 64  # pixels of a picture in the page; larger ones are scaled down
_NEEDED = ("test_index", "test_offsets", "test_label", "test_bag_said", "test_truth", "test_said", "test_confidence")


def cached_source(name: str) -> Source:
    """A source that is available locally: a report must not start a download."""
    if name in registry.SOURCES and not registry.is_available(name):
        raise HeadcountError(f"{name} is not in the cache")
    return registry.load_source(name)


def write_report(
    records: Sequence[Record],
    path: Path | str,
    title: str = "Learning from majority labels",
    load_source: LoadSource = cached_source,
) -> Path:
    """Write the report of these records to ``path`` atomically and return the path."""
    if not records:
        raise HeadcountError("no records to report on; run a study first, or give the folder of a finished one")
    path = Path(path)
    page = render_report(records, title, load_source)
    atomic_write(path, lambda f: f.write(page.encode("utf-8", "backslashreplace")))
    return path


def render_report(records: Sequence[Record], title: str, load_source: LoadSource = cached_source) -> str:
    """The page as a string. Figures are drawn first; the pictures of bags share the remaining bytes."""
    sections = _sections(records)
    overview = {name: [TableCell()] * len(sections) for name in dict.fromkeys(m.name for s in sections for m in s.methods)}
    for column, section in enumerate(sections):
        for m in section.methods:
            overview[m.name][column] = tables.score_cell(m.row, "instance_accuracy", m is section.best)
    drawn = sum(len(p.svg) for s in sections for g in s.groups for p in g.panels)
    budget = max(0, _MAX_BYTES - drawn - 450 * len(records) - 100_000) // len(sections)
    return render_template(
        "report.html",
        title=title,
        metrics=list(tables.METRICS.values()),
        sections=[(s, build_gallery(s.best, load_source, budget)) for s in sections],
        overview=list(overview.items()) if len(sections) > 1 else [],
        provenance=provenance(records),
        count=len(records),
        seeds=len({r.data["recipe"]["seed"] for r in records}) > 1,
    )


def _sections(records: Sequence[Record]) -> list[SimpleNamespace]:
    """What the page shows of each data set in each scenario."""
    table_rows = rows(records)
    row_names, remarks = tables.display_names(table_rows)
    groups: dict[tuple[str, str], list[tuple[Row, str]]] = {}
    for row, name in zip(table_rows, row_names, strict=True):
        groups.setdefault((row.source, row.scenario), []).append((row, name))
    ranked = {key: tables.rank_methods(*zip(*members, strict=True)) for key, members in sorted(groups.items())}
    colours = method_colours(sorted({m.name for methods in ranked.values() for m in methods}))
    compact = sum(map(len, ranked.values())) > 60  # bytes: a panel of curves per method
    sections = []
    for i, ((source, scenario), methods) in enumerate(ranked.items(), 1):
        here = [r for r in records if (r.data["recipe"]["source"], r.data["recipe"]["scenario"]) == (source, scenario)]
        notes = sorted({note for r in here if (note := r.data["data"].get("note"))})
        notes += [f"{n}, {text}" for n, text in remarks.items() if any(m.name.startswith(n) for m in methods)]
        figures = section_figures(methods, here, colours, f"s{i}", compact)
        chosen = {r.key for m in methods for r in m.row.records}
        names = {m.row.records[0].method: m.name for m in methods}
        rank = {method: k for k, method in enumerate(names)}
        ordered = sorted(here, key=lambda r: (rank[r.method], r.recipe.fold, r.recipe.seed, r.recipe.removal))
        best = tables.best_method(methods)
        lines = [
            (m, [tables.score_cell(m.row, k, m is best and k == "instance_accuracy") for k in tables.METRICS]) for m in methods
        ]
        sections.append(SimpleNamespace(
            slug=f"s{i}", source=source, scenario=scenario, notes=notes, methods=methods, best=best, lines=lines,
            facts=tables.data_facts(here), groups=figures,
            runs=[RunSummary(r, names[r.method], r.key in chosen) for r in ordered],
        ))  # fmt: skip
    return sections


def provenance(records: Sequence[Record]) -> dict[str, Any]:
    """What produced these numbers: distinct commits, versions and devices, first and last day, hours of computing."""
    entries = [r.data.get("provenance", {}) for r in records]
    days = sorted({str(p["started"])[:10] for p in entries if p.get("started")})
    return {
        "commits": sorted({str(p["commit"]) for p in entries if p.get("commit")}),
        "versions": sorted({f"{k} {v}" for p in entries for k, v in (p.get("versions") or {}).items()}),
        "devices": sorted({str(p["device"]) for p in entries if p.get("device")}),
        "days": days if len(days) < 3 else [days[0], days[-1]],
        "hours": sum(p.get("seconds") or 0 for p in entries) / 3600,
    }


def build_gallery(method: ReportMethod, load_source: LoadSource = cached_source, budget: int = 1 << 20) -> SimpleNamespace:
    """Three test bags in at most ``budget`` bytes of pictures, or the reason why they cannot be shown; of the first record of
    the method that has its arrays."""
    records = method.row.records
    record = next((r for r in records if r.path.with_suffix(".npz").exists()), records[0])
    gallery = SimpleNamespace(method=method.name, fold=record.recipe.fold, key=record.key, bags=[], missing_reason="")
    try:
        gallery.bags = _example_bags(record, load_source, budget)
    except FileError:  # a failing disk is no property of the record
        raise
    except (HeadcountError, FileNotFoundError) as e:
        gallery.missing_reason = str(e)
    return gallery


def _example_bags(record: Record, load_source: LoadSource, budget: int) -> list[SimpleNamespace]:
    """The bags with the highest, the median and the lowest instance accuracy; fewer if there are fewer bags."""
    arrays = record.readable_arrays()
    if any(name not in arrays for name in _NEEDED):
        raise HeadcountError("the arrays of the run were not kept beside its record")
    source, index = load_source(record.recipe.source), arrays["test_index"]
    if source.checksum != record.data["data"]["checksum"]:
        raise HeadcountError(f"the local {record.recipe.source} is not the data set of the run (checksums differ)")
    if list(source.classes) != record.data["data"]["classes"] or not 0 <= min(index, default=-1) <= max(index) < len(source):
        raise HeadcountError("the record names other classes or instances than its data set has")
    offsets, truth = arrays["test_offsets"], arrays["test_truth"]
    n_bags = len(offsets) - 1
    bag = np.repeat(np.arange(n_bags), np.diff(offsets))
    known = np.bincount(bag[truth >= 0], minlength=n_bags)
    correct = np.bincount(bag[(truth == arrays["test_said"]) & (truth >= 0)], minlength=n_bags)
    order = np.argsort(-correct / np.maximum(known, 1), kind="stable").tolist()
    ranks = {0: "Most accurate bag", n_bags // 2: "Median bag", n_bags - 1: "Least accurate bag"}
    for colours in (0, 128, 32):  # reduce the colours of pictures before dropping them
        bags = [_bag(rank, order[i], arrays, source, colours) for i, rank in sorted(ranks.items())]
        if sum(len(i.picture) for b in bags for v in b.votes for i in v.instances) <= budget:
            return bags
    raise HeadcountError("the pictures would make the page too large; report on fewer records at a time")


def _bag(rank: str, b: int, arrays: dict[str, np.ndarray], source: Source, colours: int) -> SimpleNamespace:
    """A bag as the page shows it: its instances by predicted class, the label first, then the others by votes; within a class
    confidence falls."""
    here, names = slice(*arrays["test_offsets"][b : b + 2].tolist()), (*source.classes, "unknown")  # the last for truth -1
    truth, predicted, index = (arrays[f"test_{k}"][here].astype(int) for k in ("truth", "said", "index"))
    label, bag_prediction = int(arrays["test_label"][b]), int(arrays["test_bag_said"][b])
    confidence = arrays["test_confidence"][here]
    counts, votes = np.bincount(predicted), []
    for k in sorted(np.flatnonzero(counts).tolist(), key=lambda k: (k != label, -counts[k], k)):
        members = np.flatnonzero(predicted[:_MAX_SHOWN] == k)
        instances = [
            SimpleNamespace(
                confidence=float(confidence[i]),
                truth=names[truth[i]],
                wrong=truth[i] not in (-1, k),
                picture=picture_uri(source.data[index[i]], _SIDE, colours) if source.kind == "images" else "",
            )
            for i in members[np.argsort(-confidence[members], kind="stable")]
        ]
        votes.append(SimpleNamespace(name=names[k], count=int(counts[k]), instances=instances))
    n_known = int((truth >= 0).sum())
    side = max(source.data.shape[1:3]) if source.kind == "images" else _SIDE
    return SimpleNamespace(
        rank=rank,
        number=b,
        label=names[label],
        predicted=names[bag_prediction],
        correct=bag_prediction == label,
        size=len(truth),
        shown=min(len(truth), _MAX_SHOWN),
        n_correct=int((predicted == truth).sum()),
        n_known=n_known,
        true_share=float((truth == label).sum() / max(n_known, 1)),
        predicted_share=float((predicted == label).mean()),
        votes=votes,
        tile=side * max(1, round(56 / side)) if side < 48 else 64,  # the width on the page: a multiple of the pixels if small
        pixelated=side < 48,  # small pictures show their pixels
    )
