"""What the terminal shows of scores and doubts. What is said on the way goes to stderr, so that stdout can be piped."""

from __future__ import annotations

import sys
from typing import Any

import pyarrow as pa
from rich.console import Console
from rich.table import Table

# no markup: a name or a path may hold a [bracket]; and in a file or a pipe nothing needs to be squeezed
_width = None if sys.stdout.isatty() else 120


def print_message(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _console() -> Console:
    return Console(highlight=False, markup=False, width=_width)


def _estimate(e: dict[str, Any]) -> str:
    return "unknown" if e["value"] is None else f"{e['value']:.3f}  ({e['low']:.3f} to {e['high']:.3f})"


def print_scores(scores: dict[str, Any]) -> None:
    """One readable table."""
    table = Table(
        title=f"{scores['model']} on {scores['data']}, {100 * scores['level']:g} % intervals", title_justify="left"
    )
    for name in ("score", "value", "from"):
        table.add_column(name)
    for row in _lines(scores):
        table.add_row(*row)
    console = _console()
    console.print(table)
    methods = {scores[k]["interval"] for k in ("bags", "instances", "audit") if "interval" in scores.get(k, {})}
    console.print(f"Intervals: {'; '.join(sorted(methods))}.")


def _lines(scores: dict[str, Any]) -> list[tuple[str, str, str]]:
    rows: list[tuple[str, str, str]] = []
    if bags := scores.get("bags"):
        rows += [
            ("bag accuracy", _estimate(bags["accuracy"]), f"{bags['bags']:,} labelled bags"),
            ("  the commonest label alone", f"{bags['chance']:.3f}", ""),
            ("  log loss", f"{bags['log_loss']:.3f}", ""),
            ("  calibration error", f"{bags['calibration']['error']:.3f}", _claims(bags["calibration"])),
        ]
    if shares := scores.get("shares"):
        rows += [
            ("share error", f"{shares['mean_error']:.3f}", f"votes of {shares['bags']:,} bags"),
            ("  largest", f"{shares['largest_error']:.3f}", ""),
            ("  majority over-estimated by", f"{shares['majority_lean']:+.3f}", ""),
            ("  inside the 90 % interval", f"{shares['inside_90_interval']:.3f}", ""),
        ]
    if own := scores.get("instances"):
        rows += [
            ("instance accuracy", _estimate(own["accuracy"]), f"truth of {own['instances']:,} instances"),
            ("  balanced", f"{own['balanced_accuracy']:.3f}", ""),
            ("  mIoU", f"{own['miou']:.3f}", ""),
            ("  calibration error", f"{own['calibration_error']:.3f}", ""),
        ]
        rows += [(f"  recall of {c}", _part(v["recall"]), f"{v['instances']:,}") for c, v in own["classes"].items()]
    if audit := scores.get("audit"):
        blank = f", {audit['left_blank']} left blank" if audit["left_blank"] else ""
        rows.append(
            ("instance accuracy, audited", _estimate(audit["accuracy"]), f"{audit['labelled']} labelled by hand{blank}")
        )
        rows += [
            (f"  right when it says {c}", _estimate(v), f"{v['count']}") for c, v in audit["right_when_said"].items()
        ]
    return rows


def _part(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"


def _claims(c: dict[str, Any]) -> str:
    return f"{100 * c['said']:.0f} % sure on average, {100 * c['right']:.0f} % right"


def print_label_issues(issues: pa.Table, top: int) -> None:
    """The first few, and how many look wrong."""
    rows = issues.slice(0, top).to_pylist()
    wrong = sum(issues.column("looks_wrong").to_pylist())
    table = Table(title=f"{wrong:,} of {issues.num_rows:,} labelled bags look wrong", title_justify="left")
    for name in ("", "bag", "label", "believed", "rather", "believed "):
        table.add_column(name, justify="right" if "believed" in name or not name else "left")
    for r in rows:
        rather = (r["suggestion"], f"{r['p_suggestion']:.3f}") if r["suggestion"] != r["label"] else ("", "")
        table.add_row("!" if r["looks_wrong"] else "", r["bag"], r["label"], f"{r['p_label']:.3f}", *rather)
    _console().print(table)
