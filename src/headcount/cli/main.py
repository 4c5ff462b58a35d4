"""The command line. Each command is a few lines over the API; torch is imported only by the commands that need it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headcount import __version__
from headcount.cli import model_commands
from headcount.cli.messages import run_app
from headcount.cli.options import Device
from headcount.cli.own_data_commands import own_data_app
from headcount.errors import HeadcountError

app = typer.Typer(
    name="headcount",
    help="Learn a classifier for single instances from the majority labels of bags.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["--help", "-h"]},
)
data_app = typer.Typer(help="Data sets: what is there, fetch one, import one.", no_args_is_help=True)
app.add_typer(data_app, name="data")
app.add_typer(own_data_app)  # fit and its kin

# -- options that several commands share: a comma makes a list wherever a study can vary it ---------------------------------

Out = Annotated[Path, typer.Option("--out", help="Folder for the records.")]
Source = Annotated[
    str, typer.Option(help="digits, cifar10, svhn, path, oct, or FILE.npz with images or features and labels.")
]
Scenario = Annotated[str, typer.Option(help="various, small or large: how big the majorities are.")]
Fold = Annotated[str, typer.Option(help="0 to 4.")]
Head = Annotated[str, typer.Option(help="A method (see `headcount heads`), or path/to/file.py:Class.")]
HeadOption = Annotated[
    list[str] | None, typer.Option("--option", help="An option of the head, NAME=VALUE; repeat for more.")
]
Removal = Annotated[str, typer.Option(help="MPEM: share of each bag's dissenters to remove; 0 is without MPEM.")]
RecipeField = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Any other recipe field (docs/reference/api.md), NAME=VALUE, backbone.NAME=VALUE or trouble.NAME=VALUE; repeat for more.",
    ),
]
Epochs = Annotated[int | None, typer.Option(help="Epochs of training; default 1500.")]
BagSize = Annotated[int | None, typer.Option(help="Instances in a bag; default 64.")]
Precision = Annotated[
    str | None, typer.Option(help="tf32 (float32, TF32 convolutions; the default), fp32 or bf16. Part of the recipe.")
]
Compile = Annotated[
    str, typer.Option(help="Compile the network: auto (on a GPU), on or off. For speed; not part of the recipe.")
]


@app.callback(invoke_without_command=True)
def _main(version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False) -> None:
    if version:
        print(f"headcount {__version__}")
        raise typer.Exit()


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for records, report.html and summary.json.")] = Path("demo"),
    folds: Annotated[int, typer.Option(min=1, max=5, help="How many folds.")] = 3,
    processes: Annotated[int | None, typer.Option(min=1, help="Runs side by side; default one per core.")] = None,
) -> None:
    """Train the Counting Network with MPEM, its ablations and tilt on real digits from majority labels alone."""
    from headcount.cli import demo as show

    show.run_demo(out, folds, processes)


@app.command()
def run(
    out: Out,
    source: Source = "cifar10",
    scenario: Scenario = "various",
    fold: Fold = "0",
    head: Head = "count",
    option: HeadOption = None,
    removal: Removal = "0",
    epochs: Epochs = None,
    bag_size: BagSize = None,
    precision: Precision = None,
    set_: RecipeField = None,
    device: Device = "auto",
    compile: Compile = "auto",
) -> None:
    """Run one recipe (and what it needs) and print its record. Defaults are the paper's."""
    from headcount.cli import experiment_actions
    from headcount.cli.recipe_args import build_recipes

    recipes = build_recipes(source, scenario, fold, head, option, removal, epochs, bag_size, precision, set_)
    if len(recipes) != 1:
        raise HeadcountError(f"run takes one recipe, these options make {len(recipes)}; use `headcount study`")
    experiment_actions.run_recipe(recipes[0], out, device, compile)


@app.command()
def study(
    out: Out,
    source: Source = "cifar10",
    scenario: Scenario = "various",
    fold: Fold = "0,1,2,3,4",
    head: Head = "count",
    option: HeadOption = None,
    removal: Removal = "0",
    epochs: Epochs = None,
    bag_size: BagSize = None,
    precision: Precision = None,
    set_: RecipeField = None,
    device: Device = "auto",
    compile: Compile = "auto",
    processes: Annotated[int, typer.Option(min=1, help="Runs side by side on this machine.")] = 1,
    launch: Annotated[
        str, typer.Option(help="processes (this machine) or ray (a cluster; see docs/how-to/cluster.md).")
    ] = "processes",
    address: Annotated[
        str | None, typer.Option(help="The Ray cluster: auto, local or host:port; default auto, else local.")
    ] = None,
    gpus_each: Annotated[float, typer.Option(help="Ray: GPUs for each run, such as 1 or 0.5; 0 trains on CPUs.")] = 0,
    dry_run: Annotated[bool, typer.Option(help="Only list what would run.")] = False,
) -> None:
    """Run every combination; commas separate values (--head count,output_mean --fold 0,1,2). Goes on where it stopped."""
    from headcount.cli import experiment_actions
    from headcount.cli.recipe_args import build_recipes

    recipes = build_recipes(source, scenario, fold, head, option, removal, epochs, bag_size, precision, set_)
    launcher = None if dry_run else experiment_actions.launcher(launch, processes, address, gpus_each, device)
    experiment_actions.run_study(recipes, out, device, processes, dry_run, compile=compile, launch=launcher)


@app.command()
def paper(
    item: Annotated[
        str | None, typer.Argument(help="table2 to table6, figure3, figure6 to figure9; all if none.")
    ] = None,
    scale: Annotated[str, typer.Option(help="full, or smoke: a small version of everything.")] = "full",
    out: Annotated[Path | None, typer.Option(help="Folder of the records; default paper-SCALE.")] = None,
    missing: Annotated[
        bool, typer.Option("--missing", help="List what is still to run, and what it would cost.")
    ] = False,
    run: Annotated[bool, typer.Option("--run", help="Run what is missing.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="The table as CSV.")] = False,
    latex: Annotated[bool, typer.Option("--latex", help="The table as LaTeX.")] = False,
    page: Annotated[Path | None, typer.Option(help="Write all tables and figures as one HTML page.")] = None,
    precision: Annotated[
        str | None, typer.Option(help="Of the runs that are shown, listed or run; full has bf16, smoke tf32.")
    ] = None,
    device: Device = "auto",
    compile: Compile = "auto",
    processes: Annotated[int, typer.Option(min=1, help="Runs side by side on this machine.")] = 1,
) -> None:
    """The paper's tables and figures: printed beside ours; list or run what is missing."""
    from headcount.cli import paper_command

    if csv and latex:
        raise HeadcountError("--csv and --latex are two ways to write one table; give one of the two")
    style = "csv" if csv else "latex" if latex else None
    folder = out or Path(f"paper-{scale}")
    run_options = paper_command.RunOptions(device, processes, compile)
    paper_command.paper(
        item,
        scale,
        folder,
        missing=missing,
        run=run,
        style=style,
        page=page,
        precision=precision,
        run_options=run_options,
    )


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="The --out of a study.")],
    out: Annotated[Path | None, typer.Option(help="The page to write; default FOLDER/report.html.")] = None,
    title: Annotated[str | None, typer.Option(help="Its title; default the folder's name.")] = None,
) -> None:
    """Turn records into one self-contained HTML page."""
    from headcount.cli import experiment_actions

    experiment_actions.report(folder, out, title)


@app.command()
def bags(
    source: Source = "digits",
    scenario: Scenario = "various",
    fold: Annotated[int, typer.Option(help="0 to 4.")] = 0,
    bag_size: Annotated[int, typer.Option(help="Instances in a bag; the paper's is 64.")] = 24,
    train_bags: Annotated[int, typer.Option(help="Training bags.")] = 400,
    valid_bags: Annotated[int, typer.Option(help="Validation bags.")] = 100,
    test_bags: Annotated[int, typer.Option(help="Test bags.")] = 100,
    sampler: Annotated[
        str, typer.Option(help="conditional (fast) or official (the released order of draws).")
    ] = "conditional",
    tie: Annotated[str, typer.Option(help="lowest, random or reject.")] = "lowest",
    rounding: Annotated[str, typer.Option(help="official or largest_remainder.")] = "official",
    overlap: Annotated[bool, typer.Option(help="Bags may share instances.")] = True,
    seed: Annotated[int, typer.Option(min=0, max=(1 << 32) - 1, help="Seed of the folds and the bags.")] = 42,
    picture: Annotated[
        Path | None, typer.Option(help="Write the share histogram and label prior (.png, .svg, .pdf).")
    ] = None,
    export: Annotated[Path | None, typer.Option(help="Write addresses and labels (.npz) for other programs.")] = None,
) -> None:
    """Show what the protocol makes of a source: shares, ties, label prior; and export the exact bags."""
    from headcount.cli import experiment_actions
    from headcount.datasets.protocol import Protocol

    protocol = Protocol(scenario, bag_size, train_bags, valid_bags, test_bags, seed, sampler, tie, rounding, overlap)
    experiment_actions.show_bags(source, fold, protocol, picture, export)


@app.command()
def heads(json_: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> None:
    """List the methods, their options and where they come from."""
    from headcount.cli import experiment_actions

    experiment_actions.list_heads(json_)


@app.command()
def probe(
    head: Annotated[str | None, typer.Argument(help="A method, or path/to/file.py:Class; all methods if none.")] = None,
    option: HeadOption = None,
    seeds: Annotated[int, typer.Option(min=1, help="Trainings to average.")] = 3,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of each.")] = 60,
) -> None:
    """Does a method really learn from majorities? Instance accuracy (and bag accuracy) on four small traps."""
    from headcount.cli import experiment_actions

    experiment_actions.probe(head, option, seeds, epochs)


@data_app.command("list")
def data_list() -> None:
    """The data sets and whether they are in the cache."""
    from headcount.cli import experiment_actions

    experiment_actions.list_data()


@data_app.command("fetch")
def data_fetch(name: Annotated[str, typer.Argument(help="cifar10, svhn, path or oct.")]) -> None:
    """Download a data set from its official place into the cache ($HEADCOUNT_DATA)."""
    from headcount.datasets import registry
    from headcount.errors import check_choice

    print(registry.load_source(check_choice("data set", name, registry.SOURCES)))


@data_app.command("import")
def data_import(
    name: Annotated[str, typer.Argument(help="cifar10, svhn, path or oct.")],
    file: Annotated[Path, typer.Argument(help="An .npz with images and labels, train part first.")],
    note: Annotated[str, typer.Option(help="Where it comes from; kept and shown in every report.")] = "",
) -> None:
    """Put a data set obtained elsewhere into the cache."""
    from headcount.datasets import registry

    print(registry.import_npz(name, file, note=note))


model_commands.register(app)  # predict, evaluate, explain, audit, export


def main() -> None:
    run_app(app)


if __name__ == "__main__":
    main()
