"""What the commands do: words from the command line in, tables and files out."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from headcount.cli.recipe_args import parse_options
from headcount.datasets import cache, registry, share_sampler
from headcount.datasets.protocol import Protocol, majority_bags
from headcount.errors import HeadcountError, check_choice
from headcount.experiments import records, select
from headcount.experiments import study as studies
from headcount.experiments.launch import Launcher, in_process, processes
from headcount.experiments.ray_launcher import ray_cluster
from headcount.experiments.recipe import Recipe
from headcount.inference.ray_cluster import check_device
from headcount.io import atomic_write
from headcount.majority import metrics
from headcount.models.heads import HEADS, head_options
from headcount.models.serialization import JSON_FILE
from headcount.reporting.progress import epochs_bar, runs_bar
from headcount.reporting.results_table import display_names
from headcount.training.accel.device import COMPILE, resolve_device
from headcount.training.distributed import rank

# no markup: a name or a path may hold a [bracket]; and in a file or a pipe nothing needs to be squeezed
_wide: dict[str, int] = {} if sys.stdout.isatty() else {"width": 120, "height": 50}
# of several processes at one training only the first speaks
console = Console(highlight=False, markup=False, width=_wide.get("width"), height=_wide.get("height"), quiet=rank() > 0)


# -- running --------------------------------------------------------------------------------------------------------------


def run_recipe(recipe: Recipe, out: Path, device: str, compile: str = "auto") -> None:
    resolve_device(device)  # a typo is told before anything else is said
    check_choice("compile", compile, COMPILE)
    console.print(f"{recipe}\nkey {recipe.key}", soft_wrap=True)
    with epochs_bar(recipe) as watch:
        done = studies.study([recipe], out, device=device, compile=compile, on_run_progress=watch)
    _raise_first_error(done.failed)
    for name, value in done.records[0].scores.items():
        console.print(f"{name:20} {'undefined' if value is None else format(value, '.4f')}")
    console.print(f"record {done.records[0].path}", soft_wrap=True)


def launcher(how: str, side_by_side: int, address: str | None, gpus_each: float, device: str) -> Launcher:
    """What the options of a study ask for; what does not go together is told before anything runs."""
    if check_choice("launcher", how, ("processes", "ray")) == "processes":
        if address is not None or gpus_each:
            raise HeadcountError(
                "--address and --gpus-each are for --launch ray; for runs on this machine give --processes"
            )
        resolve_device(device)
        return in_process if side_by_side == 1 else processes(side_by_side)
    if side_by_side != 1:
        raise HeadcountError(
            "--processes is for --launch processes; on Ray, CPUs and --gpus-each decide how many run at once"
        )
    check_device(device, gpus_each)
    return ray_cluster(address, gpus_each)


def run_study(
    recipes: list[Recipe],
    out: Path,
    device: str,
    side_by_side: int,
    dry_run: bool,
    table: bool = True,
    compile: str = "auto",
    launch: Launcher | None = None,
) -> None:
    check_choice("compile", compile, COMPILE)
    if dry_run:
        for recipe in studies.with_needs(recipes):
            there = "done   " if (out / f"{recipe.key}.json").exists() else "to run "
            console.print(f"{there} {recipe.key} {recipe}", soft_wrap=True)
        return
    launch = launch or launcher("processes", side_by_side, None, 0, device)
    with runs_bar() as watch:
        done = studies.study(recipes, out, launch=launch, device=device, compile=compile, on_progress=watch)
    if done.records and table:
        print_results(select.rows(done.records))
    if done.records:
        console.print(f"{len(done.records)} records in {out}; `headcount report {out}` makes the page", soft_wrap=True)
    if done.failed:
        _report_failures(done.failed, out)


def _report_failures(failed: dict[Recipe, BaseException], out: Path) -> None:
    """Each in a line, how many, and where their tracebacks are. What a person can mend has the last word."""
    for recipe, error in failed.items():
        console.print(f"failed: {recipe}: {studies.error_line(error)}", soft_wrap=True)
    said = (
        f"{len(failed)} run{'s' * (len(failed) > 1)} failed; see {out}/*.failed.json; the same command tries them again"
    )
    for error in failed.values():
        if isinstance(error, (HeadcountError, OSError)):
            if any(out.glob("*.failed.json")):
                console.print(said, soft_wrap=True)
            raise error
    raise HeadcountError(said)


def print_results(rows: Iterable[select.Row]) -> None:
    """The table people came for, one for each source and scenario."""
    rows = sorted(rows, key=_where)
    names, remarks = display_names(rows)
    for (source, scenario), group in groupby(zip(names, rows, strict=True), key=lambda named: _where(named[1])):
        table = Table(box=None, pad_edge=False)
        for name in (f"{source}, {scenario}", "runs", "instance accuracy", "bag accuracy", "consistency"):
            table.add_column(name, justify="right" if table.columns else "left", no_wrap=True)
        for name, row in group:
            cells = [_shown(*row.score(m)) for m in ("instance_accuracy", "bag_accuracy", "consistency_rate")]
            table.add_row(name, str(len(row.records)), *cells)
        console.print(table)
    for who, what in remarks.items():
        console.print(f"{who}, {what}", soft_wrap=True, markup=False, highlight=False)


def _where(row: select.Row) -> tuple[str, str]:
    return row.source, row.scenario


def _shown(mean: float, deviation: float, count: int) -> str:
    return f"{mean:.3f} ± {deviation:.3f}" if count else "–"


def _raise_first_error(failed: dict[Recipe, BaseException]) -> None:
    for recipe, error in failed.items():
        if isinstance(error, (HeadcountError, OSError)):
            raise error
        console.print(f"failed: {recipe}: {studies.error_line(error)}", soft_wrap=True)
    if failed:
        raise next(iter(failed.values()))


def report(folder: Path, out: Path | None, title: str | None) -> None:
    from headcount.reporting.report import write_report

    if (folder / JSON_FILE).is_file():
        raise HeadcountError(
            f"{folder} is a model, and report is for studies; the page of its fit is {folder}/report.html"
        )
    found = records.load_records(folder)
    if not found:
        raise HeadcountError(f"no records in {folder}; give the --out of a study")
    path = write_report(found, out or folder / "report.html", title=title or f"headcount: {folder.resolve().name}")
    console.print(f"{len(found)} records -> {path}", soft_wrap=True)


# -- looking ------------------------------------------------------------------------------------------------------------


def show_bags(source: str, fold: int, protocol: Protocol, picture: Path | None, export: Path | None) -> None:
    if export and export.suffix != ".npz":
        raise HeadcountError(f"bags are exported as .npz, got {export}")
    loaded = registry.load_source(source)
    made = majority_bags(loaded, fold, protocol)
    table = Table(box=None, pad_edge=False)
    for name in ("split", "bags", "instances", "majority share (min / mean / max)", "ties", "labels per class"):
        table.add_column(name, justify="left")
    for split, bags in made.items():
        assert bags.truth is not None
        truth, label, bag = bags.truth.numpy(), bags.label.numpy(), bags.bag.numpy()
        share = metrics.label_share(truth, label, bag)
        votes = metrics.count_votes(truth, bag, len(bags), len(bags.classes))
        tied = (votes == votes.max(1, keepdims=True)).sum(1) > 1
        prior = " ".join(map(str, np.bincount(label, minlength=len(bags.classes))))
        spread = f"{share.min():.3f} / {share.mean():.3f} / {share.max():.3f}"
        table.add_row(split, str(len(bags)), str(len(bag)), spread, f"{tied.mean():.1%}", prior)
        if split == "train" and picture:
            from headcount.reporting import plots

            edges = share_sampler.bin_edges(protocol.scenario, len(bags.classes))
            plots.save(plots.protocol_figure(share, label, tied, bags.classes, edges), picture)
    console.print(
        f"{loaded.name}: {len(loaded)} instances, {len(loaded.classes)} classes; fold {fold}, {protocol.scenario}"
    )
    console.print(table)
    if export:
        arrays = {
            f"{s}_{k}": getattr(b, k).numpy() for s, b in made.items() for k in ("index", "offsets", "label", "truth")
        }
        about = json.dumps({"source": loaded.name, "checksum": loaded.checksum, "fold": fold, **vars(protocol)})
        atomic_write(export, lambda f: np.savez_compressed(f, about=np.array(about), **arrays))


def list_heads(as_json: bool) -> None:
    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "title": head.title,
            "cites": head.cites,
            "options": head_options(name),
            "whole_bag": head.whole_bag,
            "told": head.uses_instance_labels,
            "about": (head.__doc__ or "").strip().splitlines()[0],
        }
        for name, head in HEADS.items()
    ]
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    for row in rows:
        console.print(f"{row['name']}  {row['title']}", style="bold")
        console.print(f"    {row['about']}")
        console.print(f"    options: {', '.join(f'{k}={v}' for k, v in row['options'].items()) or 'none'}")
        console.print(f"    {row['cites']}")


def list_data() -> None:
    console.print(f"cache: {cache.cache_folder()}", soft_wrap=True)
    for name, entry in registry.SOURCES.items():
        there = "ready" if registry.is_available(name) else "not here"
        there += f" ({entry.note})" if entry.note else ""
        console.print(
            f"{name:9} {entry.count:6} x {'x'.join(map(str, entry.shape))}, {len(entry.classes)} classes: {there}"
        )


def probe(head: str | None, option: list[str] | None, seeds: int, epochs: int) -> None:
    """Score one head, or all of them, on the probes; the table is Markdown, so that docs can hold it."""
    from headcount.experiments.sanity_checks import SANITY_CHECKS, recipe_for
    from headcount.experiments.sanity_checks import run_sanity_check as score

    options = parse_options(option)
    recipes = [recipe_for(name, options, epochs) for name in ([head] if head else HEADS)]
    print("| method | " + " | ".join(SANITY_CHECKS) + " |\n" + "|---" * (len(SANITY_CHECKS) + 1) + "|", flush=True)
    for recipe in recipes:
        found = [score(recipe, name, seeds) for name in SANITY_CHECKS]
        cells = [f"{s.instance_accuracy:.3f} ± {s.deviation:.3f} ({s.bag_accuracy:.2f})" for s in found]
        print(f"| {recipe.label} | {' | '.join(cells)} |", flush=True)
