"""The commands for experiments: demo, run, study, paper, report, bags, heads, probe."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from headcount.cli.options import RECIPE_OPTIONS, Compile, Device, HeadOption, RayAddress, Strict, with_options
from headcount.errors import HeadcountError, check_choice

app = typer.Typer()
Processes = Annotated[int, typer.Option(min=1, help="Number of runs at the same time on this machine.")]
RecordsFolder = Annotated[Path, typer.Option("--out", help="Folder for the records.")]
_SOURCE = "digits, cifar10, svhn, path, oct, or FILE.npz with images or features and labels."
_SCENARIO = "Distribution of the majority share: various, small, large, or a range such as 0.3-0.5."


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for records, report.html and summary.json.")] = Path("demo"),
    folds: Annotated[int, typer.Option(min=1, max=5, help="Number of folds.")] = 3,
    processes: Annotated[int | None, typer.Option(min=1, help="Number of runs at the same time; default one per core.")] = None,
) -> None:
    """Train six methods on real digits from majority labels.

    The Counting Network with MPEM, its ablations and tilt; writes a report.
    """
    from headcount.cli.running import run_demo

    run_demo(out, folds, processes)


@app.command()
@with_options("recipe_options", RECIPE_OPTIONS)
def run(out: RecordsFolder, *, recipe_options: dict[str, Any], device: Device = "auto", compile: Compile = "auto") -> None:
    """Train and score one recipe, after those it needs; by default the paper's."""
    from headcount.cli.console import console, print_line, progress_bar
    from headcount.cli.running import build_recipes
    from headcount.experiments.records import error_line
    from headcount.experiments.study import study as run_all
    from headcount.training.accel import COMPILE, resolve_device
    from headcount.training.trainer import TrainProgress

    recipe, *more = build_recipes(recipe_options)
    if more:
        raise HeadcountError(f"run takes one recipe, these options make {1 + len(more)}; use `headcount study`")
    resolve_device(device)  # a mistake is reported before anything is printed
    check_choice("compile", compile, COMPILE)
    print_line(f"{recipe}\nkey {recipe.key}")
    with progress_bar(recipe.label, recipe.epochs) as update:

        def show(progress: TrainProgress) -> None:
            (train, valid), best = progress.curve[-1], f"{progress.best:.4f} at {progress.best_epoch}"
            update(completed=progress.epoch, detail=f"loss {train:.4f}  valid {valid:.4f}  best {best}")

        result = run_all([recipe], out, device=device, compile=compile, on_run_progress=show)
    for failed, error in result.failed.items():
        if not isinstance(error, (HeadcountError, OSError)):
            print_line(f"failed: {failed}: {error_line(error)}")
        raise error
    for name, value in result.records[0].scores.items():
        console.print(f"{name:20} {'undefined' if value is None else format(value, '.4f')}")
    print_line(f"record {result.records[0].path}")


@app.command()
@with_options("recipe_options", RECIPE_OPTIONS | {"fold": RECIPE_OPTIONS["fold"].replace(default="0,1,2,3,4")})
def study(
    out: RecordsFolder,
    *,
    recipe_options: dict[str, Any],
    device: Device = "auto",
    compile: Compile = "auto",
    processes: Processes = 1,
    launch: Annotated[str, typer.Option(help="Where: processes (this machine) or ray (docs/how-to/cluster.md).")] = "processes",
    address: RayAddress = None,
    gpus_each: Annotated[float, typer.Option(help="Ray: GPUs per run, such as 1 or 0.5; 0 trains on CPUs.")] = 0,
    dry_run: Annotated[bool, typer.Option(help="Only list what would run.")] = False,
    strict: Strict = False,
) -> None:
    """Run every combination of the given values.

    Commas separate values: --head count,output_mean --option t1=0.1,1. The same command resumes an interrupted study.
    """
    from headcount.cli.console import print_line
    from headcount.cli.running import build_recipes, make_launcher, run_study
    from headcount.experiments.study import with_needs

    recipes = build_recipes(recipe_options)
    if dry_run:
        for recipe in with_needs(recipes):
            state = "done   " if (out / f"{recipe.key}.json").exists() else "to run "
            print_line(f"{state} {recipe.key} {recipe}")
        return
    run_study(recipes, out, make_launcher(launch, processes, address, gpus_each, device), device, compile)


@app.command()
def paper(
    item: Annotated[str | None, typer.Argument(help="table2 to table6, figure3, figure6 to figure9; default: all.")] = None,
    scale: Annotated[str, typer.Option(help="full, or smoke: a small version of everything.")] = "full",
    out: Annotated[Path | None, typer.Option(help="Folder of the records; default paper-SCALE.")] = None,
    missing: Annotated[bool, typer.Option("--missing", help="List the missing runs and what they would cost.")] = False,
    run: Annotated[bool, typer.Option("--run", help="Run what is missing.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print the table as CSV.")] = False,
    latex: Annotated[bool, typer.Option("--latex", help="Print the table as LaTeX.")] = False,
    matrix: Annotated[bool, typer.Option("--matrix", help="Print it as a matrix, with standard errors.")] = False,
    page: Annotated[Path | None, typer.Option(help="Write all tables and figures as one HTML page.")] = None,
    row: Annotated[str | None, typer.Option(help="Only this method of a table, as the table names it.")] = None,
    dataset: Annotated[str | None, typer.Option(help="Only this data set of a table: CIFAR10, SVHN, PATH or OCT.")] = None,
    scenario: Annotated[str | None, typer.Option(help="Only this scenario of a table: Various, Small or Large.")] = None,
    precision: Annotated[str | None, typer.Option(help="Precision of the runs; default: bf16 (full), tf32 (smoke).")] = None,
    device: Device = "auto",
    compile: Compile = "auto",
    processes: Processes = 1,
    strict: Strict = False,
) -> None:
    """Compare our results with the paper's tables and figures.

    Lists or runs what is missing. One row or cell: paper table4 --row "Counting Network" --dataset SVHN --run.
    """
    from dataclasses import replace

    from headcount.cli import printing
    from headcount.cli.console import print_line
    from headcount.cli.running import available_recipes, make_launcher, run_study
    from headcount.datasets import registry
    from headcount.experiments import paper as tables
    from headcount.experiments.study import with_needs

    if csv + latex + matrix > 1:
        raise HeadcountError("--csv, --latex and --matrix are formats of one table; give one of the three")
    style = "csv" if csv else "latex" if latex else "matrix" if matrix else None
    size, out = tables.SCALES[check_choice("scale", scale, tables.SCALES)], out or Path(f"paper-{scale}")
    items = [item] if item else tables.ITEMS
    if precision is not None:
        size = replace(size, base=size.base.replace(precision=precision))
    if style and item not in tables.TABLES:
        raise HeadcountError(f"only tables can be shown as {style}: {', '.join(tables.TABLES)}")
    if style and missing:
        raise HeadcountError(f"--missing lists runs, --{style} writes a table; give one of the two")
    if (row or dataset or scenario) and (item not in tables.TABLES or page or matrix):
        raise HeadcountError("--row, --dataset, --scenario choose cells of table2 to table6; give one, no --page, no --matrix")
    records = tables.records_by_recipe(out)
    cached = [name for name in registry.SOURCES if registry.is_available(name)] if run or missing else []
    size = tables.substitute_sources(size, {r.source for r in records}, cached)
    cells = tables.table_cells(item, size, method=row, dataset=dataset, scenario=scenario) if item in tables.TABLES else []
    recipes = with_needs(r for c in cells for r in c.recipes)
    recipes = recipes or [r for name in items for r in tables.required_recipes(name, size)]
    if run:
        recipes = available_recipes(recipes)
        run_study(recipes, out, make_launcher("processes", processes, None, 0, device), device, compile, table=False)
        records = tables.records_by_recipe(out)
    if page:
        from headcount.reporting.paper_page import write_paper

        print_line(f"page {write_paper(size, records, page)}")
    if missing:
        printing.list_missing(recipes, size, records)
    elif matrix:
        printing.print_matrix(str(item), cells, records)
    elif style:
        print((printing.as_csv if csv else printing.as_latex)(cells, records), end="")
    elif item in tables.TABLES:
        printing.print_table(item, cells, size, records)
    elif not (run or page):
        printing.list_items(items, size, records)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="The --out of a study.")],
    out: Annotated[Path | None, typer.Option(help="The page to write; default FOLDER/report.html.")] = None,
    title: Annotated[str | None, typer.Option(help="Title of the page; default: the folder's name.")] = None,
    csv: Annotated[bool, typer.Option("--csv", help="Print the results as CSV instead.")] = False,
    latex: Annotated[bool, typer.Option("--latex", help="Print the results as LaTeX instead.")] = False,
    strict: Strict = False,
) -> None:
    """Write an HTML report of a study.

    Or print its table as CSV or LaTeX.
    """
    from headcount.cli.console import print_line
    from headcount.cli.printing import study_csv, study_latex
    from headcount.experiments.records import load_records
    from headcount.experiments.scores import rows
    from headcount.models.serialization import JSON_FILE
    from headcount.reporting.report import write_report

    if (folder / JSON_FILE).is_file():
        raise HeadcountError(f"{folder} is a model, and report is for studies; the page of its fit is {folder}/report.html")
    records = load_records(folder)
    if not records:
        raise HeadcountError(f"no records in {folder}; give the --out of a study")
    if csv or latex:
        if (csv and latex) or out or title:
            raise HeadcountError("--csv and --latex print one table; give one of the two, and neither --out nor --title")
        print((study_csv if csv else study_latex)(rows(records)), end="")
        return
    path = write_report(records, out or folder / "report.html", title=title or f"headcount: {folder.resolve().name}")
    print_line(f"{len(records)} records -> {path}")


@app.command()
def bags(
    source: Annotated[str, typer.Option(help=_SOURCE)] = "digits",
    scenario: Annotated[str, typer.Option(help=_SCENARIO)] = "various",
    fold: Annotated[int, typer.Option(help="Fold of the cross-validation, 0 to 4.")] = 0,
    bag_size: Annotated[int, typer.Option(help="Instances per bag; the paper's is 64.")] = 24,
    train_bags: Annotated[int, typer.Option(help="Training bags.")] = 400,
    valid_bags: Annotated[int, typer.Option(help="Validation bags.")] = 100,
    test_bags: Annotated[int, typer.Option(help="Test bags.")] = 100,
    sampler: Annotated[str, typer.Option(help="conditional (fast) or official (the released order of draws).")] = "conditional",
    tie: Annotated[str, typer.Option(help="Label of a tied bag: lowest, random, or reject (draw again).")] = "lowest",
    rounding: Annotated[str, typer.Option(help="Rounding of shares: official or largest_remainder.")] = "official",
    overlap: Annotated[bool, typer.Option(help="Bags may share instances.")] = True,
    seed: Annotated[int, typer.Option(min=0, max=(1 << 32) - 1, help="Random seed of the folds and the bags.")] = 42,
    picture: Annotated[Path | None, typer.Option(help="Write the share histogram and label prior (.png, .svg, .pdf).")] = None,
    export: Annotated[Path | None, typer.Option(help="Write addresses and labels (.npz) for other programs.")] = None,
) -> None:
    """Sample bags by the paper's protocol; show and export them.

    Prints majority shares, ties and the label prior of each split.
    """
    import numpy as np

    from headcount.cli.console import console
    from headcount.cli.printing import bag_statistics, print_bags
    from headcount.datasets import registry, share_sampler
    from headcount.datasets.protocol import Protocol, majority_bags
    from headcount.io import atomic_write, commit_together
    from headcount.reporting import plots, render

    protocol = Protocol(scenario, bag_size, train_bags, valid_bags, test_bags, seed, sampler, tie, rounding, overlap)
    if export and export.suffix != ".npz":
        raise HeadcountError(f"bags are exported as .npz, got {export}")
    loaded = registry.load_source(source)
    splits = majority_bags(loaded, fold, protocol)
    edges = share_sampler.bin_edges(protocol.scenario, len(loaded.classes))
    names = ("index", "offsets", "label", "truth")
    arrays = {f"{split}_{name}": getattr(part, name).numpy() for split, part in splits.items() for name in names}
    about = json.dumps({"source": loaded.name, "checksum": loaded.checksum, "fold": fold, **vars(protocol)})
    with commit_together():
        if picture:
            render.save(plots.protocol_figure(*bag_statistics(splits["train"]), splits["train"].classes, edges), picture)
        if export:
            atomic_write(export, lambda f: np.savez_compressed(f, about=np.array(about), **arrays))
    console.print(f"{loaded.name}: {len(loaded)} instances, {len(loaded.classes)} classes; fold {fold}, {scenario}")
    print_bags(splits)


@app.command()
def heads(as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False) -> None:
    """List the methods, their options and their citations."""
    from headcount.cli.console import console
    from headcount.models.heads import HEADS, head_options

    rows: list[dict[str, Any]] = []
    for name, head in HEADS.items():
        row = {"name": name, "title": head.title, "cites": head.cites, "options": head_options(name)}
        flags = {"whole_bag": head.depends_on_bag, "uses_instance_labels": head.uses_instance_labels}
        rows.append({**row, **flags, "about": (head.__doc__ or "").strip().splitlines()[0]})
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    for row in rows:
        console.print(f"{row['name']}  {row['title']}", style="bold")
        console.print(f"    {row['about']}")
        console.print(f"    options: {', '.join(f'{k}={v}' for k, v in row['options'].items()) or 'none'}")
        console.print(f"    {row['cites']}")


@app.command()
def probe(
    head: Annotated[str | None, typer.Argument(help="A method, or path/to/file.py:Class; default: all methods.")] = None,
    option: HeadOption = None,
    seeds: Annotated[int, typer.Option(min=1, help="Number of trainings to average.")] = 3,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of each training.")] = 60,
) -> None:
    """Test whether a method learns instances from majority labels.

    Prints instance (and bag) accuracy on four small problems as a Markdown table.
    """
    from headcount.cli.running import parse_options
    from headcount.experiments.sanity_checks import SANITY_CHECKS, run_sanity_check
    from headcount.models.heads import HEADS, check_options, find_head

    options, names = parse_options(option), [head] if head else list(HEADS)
    for name in names:
        check_options(name, options)
    print("| method | " + " | ".join(SANITY_CHECKS) + " |\n" + "|---" * (len(SANITY_CHECKS) + 1) + "|", flush=True)
    for name in names:
        scores = [run_sanity_check(check, name, options, epochs=epochs, seeds=seeds) for check in SANITY_CHECKS]
        cells = [f"{s.instance_accuracy:.3f} ± {s.deviation:.3f} ({s.bag_accuracy:.2f})" for s in scores]
        print(f"| {find_head(name).display_name(options)} | {' | '.join(cells)} |", flush=True)
