"""The application ``headcount``: the commands of four modules, and `data`; an error is one line and exit code 2.

Nothing heavy is imported before a command runs.
"""

import os
import sys
import time
import warnings
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from headcount import __version__
from headcount.cli import benchmark_commands, experiments, model_commands, own_data, share_commands
from headcount.cli.options import with_option_names
from headcount.errors import FileError, HeadcountError, HeadcountWarning, check_choice, format_warning

RESUMABLE = ("fit", "run", "study", "paper", "demo", "data", "benchmark")

_UsageError: Any = typer.BadParameter.__mro__[1]  # its module differs between versions of typer


app = typer.Typer(
    name="headcount",
    help="Learn a classifier for single instances from the majority labels of bags.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["--help", "-h"]},
)
CacheFolder = Annotated[Path | None, typer.Option(help="The cache folder; default $HEADCOUNT_DATA, else ~/.cache/headcount.")]
data_app = typer.Typer(help="List, download and import data sets.", no_args_is_help=True)
for part in (
    own_data.app,
    model_commands.app,
    share_commands.app,
    experiments.app,
    benchmark_commands.app,
):  # the order of the help
    app.add_typer(part)
app.add_typer(data_app, name="data")
cache_app = typer.Typer(
    help="List and clear the cache of data sets, downloads, images, slides and features.", no_args_is_help=True
)
app.add_typer(cache_app, name="cache")


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False) -> None:
    if version:
        print(f"headcount {__version__}")
        raise typer.Exit()


@data_app.command("list")
def data_list() -> None:
    """List the data sets, and which of them are in the cache."""
    from headcount.cli.console import console, print_line
    from headcount.datasets import cache, registry

    print_line(f"cache: {cache.cache_folder()}")
    for name, info in registry.SOURCES.items():
        state = "ready" if registry.is_available(name) else "not in the cache"
        state += f" ({info.note})" if info.note else ""
        shape = "x".join(map(str, info.shape))
        console.print(f"{name:13} {info.count:6} x {shape}, {len(info.classes)} classes: {state}")


@data_app.command("fetch")
def data_fetch(name: Annotated[str, typer.Argument(help="cifar10, svhn, path or oct.")]) -> None:
    """Download a data set from its official address into the cache ($HEADCOUNT_DATA)."""
    from headcount.datasets import registry

    print(registry.load_source(check_choice("data set", name, registry.SOURCES)))


@data_app.command("import")
def data_import(
    name: Annotated[str, typer.Argument(help="cifar10, svhn, path, oct or oct-originals.")],
    file: Annotated[Path, typer.Argument(help="An .npz with images and labels, the training part first.")],
    note: Annotated[str, typer.Option(help="Where it comes from; shown in every report.")] = "",
) -> None:
    """Put a data set obtained elsewhere into the cache."""
    from headcount.datasets import registry

    print(registry.import_npz(name, file, note=note))


@cache_app.command("list")
def cache_list(cache: CacheFolder = None) -> None:
    """List what the cache holds, the longest unused first, with its size and the days since it was used."""
    from headcount.cli.console import print_line
    from headcount.datasets.cache import cache_entries, cache_folder

    folder = cache_folder(cache)
    entries = cache_entries(folder)
    for entry in entries:
        print_line(f"{entry.size / 1e6:10,.1f} MB  {max(0.0, time.time() - entry.used) / 86400:5.0f} days  {entry.name}")
    print_line(f"{sum(entry.size for entry in entries) / 1e6:10,.1f} MB in {len(entries)} entries of {folder}")


@cache_app.command("clear")
def cache_clear(
    names: Annotated[list[str] | None, typer.Argument(help="Entries, as `headcount cache list` names them.")] = None,
    older_than: Annotated[float | None, typer.Option(min=0, help="Entries unused for so many days.")] = None,
    limit: Annotated[float | None, typer.Option(min=0, help="The longest unused, until so many gigabytes are left.")] = None,
    cache: CacheFolder = None,
) -> None:
    """Remove entries of the cache; they are made again when they are needed.

    --limit 0 removes all. What another process is writing stays, and so do files that are not headcount's.
    """
    from headcount.cli.console import print_line
    from headcount.datasets.cache import cache_folder, clear_cache

    if not names and older_than is None and limit is None:
        raise HeadcountError("give names of entries, --older-than or --limit; --limit 0 removes all")
    removed = clear_cache(cache_folder(cache), names or [], older_than, limit)
    for entry in removed:
        print_line(f"removed {entry.name}")
    print_line(f"{sum(entry.size for entry in removed) / 1e6:,.1f} MB are free again")


def main() -> None:
    """Run the command in ``sys.argv`` and exit. A user's mistake is one line and exit code 2, never a traceback."""
    cast(Any, warnings).formatwarning = format_warning
    resumable = "".join(sys.argv[1:2]) in RESUMABLE
    try:
        code = app(prog_name="headcount", standalone_mode=False)  # also as python -m headcount: completion is by this name
        sys.stdout.flush()  # a full disk must be noticed here, not during the interpreter's shutdown
        if code == 130:  # typer's translation of a KeyboardInterrupt
            raise KeyboardInterrupt
    except _UsageError as e:
        needs_help = type(e).__name__ == "NoArgsIsHelpError"
        code = print(e.format_message()) if needs_help else print_error(e.format_message())
    except BrokenPipeError:
        code = 141
    except OSError as e:
        notes, done = getattr(e, "__notes__", []), "what is finished is kept, and the same command resumes the work"
        kept = done if resumable else f"nothing {'else ' * bool(notes)}was written"
        code = print_error("; ".join([str(FileError.from_os_error(e)), *notes, kept]))
    except (HeadcountError, HeadcountWarning) as e:  # warnings are errors with --strict
        code = print_error("; ".join([with_option_names(str(e)), *getattr(e, "__notes__", [])]))
    except (KeyboardInterrupt, ImportError) as e:
        if isinstance(e, ImportError) and not isinstance(e.__context__, KeyboardInterrupt):
            raise  # otherwise it was Ctrl-C while a library was being imported
        code = print_error("interrupted; the same command resumes the work" if resumable else "interrupted", 130)
        # After Ctrl-C inside an eval of text (as libraries use it) CPython would end by a signal; another eval resets that
        eval("0")
    except (typer.Abort, EOFError):
        code = print_error("aborted", 130)
    try:
        sys.stdout.flush()
    except OSError:  # discard what can no longer be written, so that the interpreter does not report it a second time
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code if isinstance(code, int) else 0)


def print_error(message: str, code: int = 2) -> int:
    print(f"headcount: {' '.join(message.split())}", file=sys.stderr)
    return code
