"""The application ``headcount``: the commands of three modules, and `data`. Nothing heavy is imported before a command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headcount import __version__
from headcount.cli import experiments, model_commands, own_data
from headcount.cli.messages import run_app
from headcount.errors import check_choice

app = typer.Typer(
    name="headcount",
    help="Learn a classifier for single instances from the majority labels of bags.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["--help", "-h"]},
)
data_app = typer.Typer(help="List, download and import data sets.", no_args_is_help=True)
app.add_typer(data_app, name="data")
app.add_typer(own_data.app)
app.add_typer(experiments.app)
app.add_typer(model_commands.app)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False) -> None:
    if version:
        print(f"headcount {__version__}")
        raise typer.Exit()


@data_app.command("list")
def data_list() -> None:
    """List the data sets, and which of them are in the cache."""
    from headcount.cli.running import console, print_line
    from headcount.datasets import cache, registry

    print_line(f"cache: {cache.cache_folder()}")
    for name, info in registry.SOURCES.items():
        state = "ready" if registry.is_available(name) else "not in the cache"
        state += f" ({info.note})" if info.note else ""
        shape = "x".join(map(str, info.shape))
        console.print(f"{name:9} {info.count:6} x {shape}, {len(info.classes)} classes: {state}")


@data_app.command("fetch")
def data_fetch(name: Annotated[str, typer.Argument(help="cifar10, svhn, path or oct.")]) -> None:
    """Download a data set from its official address into the cache ($HEADCOUNT_DATA)."""
    from headcount.datasets import registry

    print(registry.load_source(check_choice("data set", name, registry.SOURCES)))


@data_app.command("import")
def data_import(
    name: Annotated[str, typer.Argument(help="cifar10, svhn, path or oct.")],
    file: Annotated[Path, typer.Argument(help="An .npz with images and labels, the training part first.")],
    note: Annotated[str, typer.Option(help="Where it comes from; shown in every report.")] = "",
) -> None:
    """Put a data set obtained elsewhere into the cache."""
    from headcount.datasets import registry

    print(registry.import_npz(name, file, note=note))


def main() -> None:
    """Run the command in ``sys.argv`` and exit."""
    run_app(app)
