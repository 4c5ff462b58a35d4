"""What the terminal shows: messages, tables of scores and label issues, and progress bars.

Messages and bars go to stderr, so that stdout can be piped; bars appear only on a terminal.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from headcount.training.distributed import rank

if TYPE_CHECKING:
    from headcount.experiments.study import StudyProgress
    from headcount.models.fitted import FittedModel

_size: tuple[int | None, int | None] = (None, None) if sys.stdout.isatty() else (120, 50)
# without markup, because names and paths may contain [brackets]; of several training processes only the first prints
console = Console(highlight=False, markup=False, width=_size[0], height=_size[1], quiet=rank() > 0)


def print_line(line: str) -> None:
    """Print without wrapping."""
    console.print(line, soft_wrap=True)


def print_message(line: str) -> None:
    """Print to stderr."""
    print(line, file=sys.stderr, flush=True)


def plain_table(*names: str, left: int = 1, no_wrap: bool = True, title: str | None = None) -> Table:
    """A table without lines, of which the first columns are aligned to the left."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for i, name in enumerate(names):
        table.add_column(name, justify="left" if i < left else "right", no_wrap=no_wrap)
    return table


def print_methods(model: FittedModel) -> None:
    """The methods that `fit` compared, the best first."""
    truth = model.metadata["data"]["truth"]
    table = plain_table("method", "held-out loss", "bag accuracy", *["instance accuracy (not used)"] * bool(truth))
    table.add_column()  # remarks: wrapped, and nothing else is cut
    for c in model.metadata["methods"]:
        cells = [_number(c["loss"], 4), _number(c["bag_accuracy"], 3)]
        cells += [_number(c["instance_accuracy"], 3)] if truth else []
        table.add_row(c["title"], *cells, "selected" if c["chosen"] else c["note"] or ("baseline" if c["baseline"] else ""))
    console.print(table)


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def print_scores(scores: dict[str, Any]) -> None:
    """The scores of an evaluation as one table."""
    title = f"{scores['model']} on {scores['data']}, {100 * scores['level']:g} % intervals"
    table = Table("score", "value", "measured on", title=title, title_justify="left")
    if bags := scores.get("bags"):
        calibration = bags["calibration"]
        means = f"mean confidence {100 * calibration['confidence']:.0f} %, accuracy {100 * calibration['accuracy']:.0f} %"
        table.add_row("bag accuracy", _estimate(bags["accuracy"]), f"{bags['bags']:,} labelled bags")
        table.add_row("  most frequent label", f"{bags['chance']:.3f}", "")
        table.add_row("  log loss", f"{bags['log_loss']:.3f}", "")
        table.add_row("  calibration error", f"{calibration['error']:.3f}", means)
    if shares := scores.get("shares"):
        table.add_row("share error", f"{shares['mean_error']:.3f}", f"votes of {shares['bags']:,} bags")
        table.add_row("  largest", f"{shares['largest_error']:.3f}", "")
        table.add_row("  bias of the majority share", f"{shares['majority_lean']:+.3f}", "")
        width = f"mean width {shares['interval_width']:.3f}"
        table.add_row("  coverage of the 90 % interval", f"{shares['inside_90_interval']:.3f}", width)
    if instances := scores.get("instances"):
        table.add_row("instance accuracy", _estimate(instances["accuracy"]), f"truth of {instances['instances']:,} instances")
        table.add_row("  balanced", f"{instances['balanced_accuracy']:.3f}", "")
        table.add_row("  mIoU", f"{instances['miou']:.3f}", "")
        table.add_row("  calibration error", f"{instances['calibration_error']:.3f}", "")
        for name, of_class in instances["classes"].items():
            recall = "none" if of_class["recall"] is None else f"{of_class['recall']:.3f}"
            table.add_row(f"  recall of {name}", recall, f"{of_class['instances']:,}")
    if audit := scores.get("audit"):
        blank = f", {audit['left_blank']} left blank" if audit["left_blank"] else ""
        table.add_row(
            "instance accuracy, audited", _estimate(audit["accuracy"]), f"{audit['labelled']} labelled by hand{blank}"
        )
        for name, precision in audit["precision"].items():
            table.add_row(f"  precision of {name}", _estimate(precision), f"{precision['count']}")
    console.print(table)
    methods = {scores[k]["interval"] for k in ("bags", "instances", "audit") if "interval" in scores.get(k, {})}
    console.print(f"Intervals: {'; '.join(sorted(methods))}.")


def _estimate(e: dict[str, Any]) -> str:
    return "unknown" if e["value"] is None else f"{e['value']:.3f}  ({e['low']:.3f} to {e['high']:.3f})"


def print_label_issues(issues: pa.Table, top: int) -> None:
    """The first ``top`` bags, and how many labels look wrong."""
    wrong = sum(issues.column("looks_wrong").to_pylist())
    mark, p_label, p_suggestion = (Column(name, justify="right") for name in ("", "probability", "probability"))
    title = f"{wrong:,} of {issues.num_rows:,} labelled bags look wrong"
    table = Table(mark, "bag", "label", p_label, "suggestion", p_suggestion, title=title, title_justify="left")
    for r in issues.slice(0, top).to_pylist():
        other = (r["suggestion"], f"{r['p_suggestion']:.3f}") if r["suggestion"] != r["label"] else ("", "")
        table.add_row("!" if r["looks_wrong"] else "", r["bag"], r["label"], f"{r['p_label']:.3f}", *other)
    console.print(table)


@contextmanager
def progress_bar(description: str, total: int | None = None) -> Iterator[Callable[..., None]]:
    """A bar with one task; yields what updates it: description, total, completed, detail."""
    stderr = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[detail]}"))
    hidden = not stderr.is_terminal or rank() > 0
    with Progress(*columns, TimeRemainingColumn(), console=stderr, disable=hidden, transient=True) as bar:
        task = bar.add_task(description, total=total, detail="")
        yield lambda **fields: bar.update(task, **fields)


@contextmanager
def runs_bar() -> Iterator[Callable[[StudyProgress], None]]:
    """Runs of a study: finished, failed, remaining, time left."""
    with progress_bar("runs") as update:

        def on_progress(study: StudyProgress) -> None:
            failed = len(study.failed)
            detail = f"{study.total - study.done - failed} to go" + (f"  {failed} failed" if failed else "")
            update(total=study.total, completed=study.done, detail=detail)

        yield on_progress
