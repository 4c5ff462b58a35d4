"""The application ``headcount``: its commands, from three modules. Nothing heavy is imported before a command runs."""

from __future__ import annotations

from typing import Annotated

import typer

from headcount import __version__
from headcount.cli import experiments, model_commands, own_data
from headcount.cli.messages import run_app

app = typer.Typer(
    name="headcount",
    help="Learn a classifier for single instances from the majority labels of bags.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["--help", "-h"]},
)
app.add_typer(experiments.data_app, name="data")
app.add_typer(own_data.app)
app.add_typer(experiments.app)
app.add_typer(model_commands.app)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False) -> None:
    if version:
        print(f"headcount {__version__}")
        raise typer.Exit()


def main() -> None:
    """Run the command in ``sys.argv`` and exit."""
    run_app(app)
