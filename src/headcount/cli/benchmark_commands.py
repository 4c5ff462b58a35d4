"""The command benchmark: all methods on natural bags."""

from pathlib import Path
from typing import Annotated

import typer

from headcount.cli.options import split_names

app = typer.Typer()
_TASK = "A task (reviews, amazon, editorials, precincts, landcover, grades, oct), or path/to/file.py, whose code is run; may be repeated. Default: all."
_METHODS = (
    "Names with commas: auto (what fit chooses), any method of fit, commonest, supervised, supervised_forest. Default: all."
)
_DATA = "Folder of the tasks' files; those with a public address are downloaded into it. Default: downloads in the cache."
_ENCODER = "Run only the tasks with texts, with embeddings by this encoder (as for fit) instead of TF-IDF."


@app.command()
def benchmark(
    out: Annotated[Path, typer.Option(help="Folder for the records, TASK/METHOD-SEED.json.")],
    task: Annotated[list[str] | None, typer.Option(help=_TASK)] = None,
    methods: Annotated[str | None, typer.Option(help=_METHODS)] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds; each draws its bags and divides them.")] = 5,
    data: Annotated[Path | None, typer.Option(help=_DATA)] = None,
    encoder: Annotated[str | None, typer.Option(help=_ENCODER)] = None,
    page: Annotated[Path | None, typer.Option(help="Write all tables and figures as one HTML page.")] = None,
) -> None:
    """Compare all methods on natural bags whose instances have known classes.

    Prints a table for each task. The same command resumes; a second call runs nothing.
    """
    from headcount.cli.console import print_message
    from headcount.datasets.tasks import TASKS
    from headcount.experiments.benchmark import BENCHMARK_METHODS, load_benchmark, run_benchmark
    from headcount.reporting.benchmark_page import markdown_tables, write_benchmark

    chosen = split_names(methods) or BENCHMARK_METHODS
    run_benchmark(task or TASKS, chosen, range(seeds), out, folder=data, encoder=encoder, on_progress=print_message)
    records = load_benchmark(out)
    print(markdown_tables(records))
    if page:
        print_message(f"page {write_benchmark(records, page)}")
