"""The commands that begin with a person's own data: fit, check, issues. (Those that need a fitted model: model_commands.py.)"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headcount.cli.options import FIT_OPTIONS, Data, Device, HeadOption, reading_arguments, with_option_names, with_options
from headcount.errors import HeadcountError

if TYPE_CHECKING:
    from headcount.models.fitted import FittedModel
    from headcount.models.predictions import Predictions
    from headcount.readers import BagDataset

app = typer.Typer()
MAX_SKIPPED = 20  # lines printed about skipped rows, of which there may be millions
Seed = Annotated[int, typer.Option(min=0, help="Random seed.")]
_METHOD = (
    "auto, or names with commas: tilt, em_forest, em_boosting, count, vote_logistic, forest, boosting, logistic, or a head."
)
_MINUTES = "Time budget in minutes; folds, epochs, then methods are cut to fit. Default: none."
_BACKBONE = "quick, resnet18, mlp or linear; for images also timm:NAME or torchvision:NAME. Default: chosen by the data."
_FROZEN = "extract features once and fit all methods on them, or train the network. Default: frozen if it has weights."
_WEIGHTS = "timm, torchvision: pretrained (default; may download), none, or FILE.safetensors."
_VIEWS = "Augmentation policy: digit (no flips; default for images), image, tissue, none."
_PRIVATE = "The least size of a bag, and of a group in any output; nothing is written about single instances."
_EPOCHS = "Training epochs of networks; default by the number of bags."


# -- what all commands on a person's own data share, so that they agree about every instance --------------------------------


def load_model(folder: Path, device: str = "auto") -> FittedModel:
    """Load a model's folder to a device."""
    from headcount.models.fitted import FittedModel
    from headcount.training.accel import resolve_device

    torch_device = resolve_device(device)
    return FittedModel.load(folder).to(torch_device)


def read_data(
    data: str, options: Mapping[str, Any], model: FittedModel | None = None, *, labels: bool,
    truth_suffices: bool = False, log: Callable[[str], None] | None = None,
) -> BagDataset:  # fmt: skip
    """Read data with the options of options.py, for a model if there is one; log how they were understood and what was skipped."""
    from headcount.cli.console import print_message
    from headcount.readers import ColumnRoles, read

    given = reading_arguments(options)
    roles = ColumnRoles(**{k: given.pop(k) for k in ColumnRoles.__dataclass_fields__ if k in given})
    if model is None:
        dataset = read(data, roles, need_labels=labels, **given)
    else:
        dataset = model.read(data, roles, need_labels=labels, truth_suffices=truth_suffices, **given)
    more = len(dataset.skipped) - MAX_SKIPPED
    skipped = [*dataset.skipped[:MAX_SKIPPED], *([f"{more:,} more"] if more > 0 else [])]
    for line in (*dataset.description, *(f"skipped: {line}" for line in skipped)):
        (log or print_message)(with_option_names(line))
    return dataset


def predict_all(model: FittedModel, dataset: BagDataset, use_context: bool | None = None, **options: Any) -> Predictions:
    """Predict all bags, and print a warning if the model was trained on some of them: without context, by default."""
    from headcount.cli.console import print_message
    from headcount.inference.predict import predict_dataset

    predictions = predict_dataset(model, dataset, use_context=use_context, **options)
    n_trained, n_bags = int(predictions.seen_in_training.sum()), len(predictions.seen_in_training)
    if not n_trained:
        return predictions
    which = f"{n_trained:,} of the {n_bags:,} bags" if n_trained < n_bags else "these bags"
    without = "; their instances are predicted without context" if use_context is None and model.use_context else ""
    scores = "; cross-validated scores are in model.json" if model.metadata.get("scores") else ""
    expect = "bag accuracy will be optimistic; instance predictions and shares may be worse than on new bags"
    print_message(f"the model was trained on {which}: {expect}{scores}{without}")
    return predictions


# -- the commands ------------------------------------------------------------------------------------------


@app.command()
@with_options("read_options", FIT_OPTIONS)
def fit(
    data: Data,
    out: Annotated[Path, typer.Option(help="Folder for the model.")],
    method: Annotated[str, typer.Option(help=_METHOD)] = "auto",
    minutes: Annotated[float | None, typer.Option(help=_MINUTES)] = None,
    folds: Annotated[int, typer.Option(help="Folds of the cross-validation, over groups of bags.")] = 5,
    head: Annotated[str | None, typer.Option(help="A network with this head (see `headcount heads`).")] = None,
    option: HeadOption = None,
    backbone: Annotated[str | None, typer.Option(help=f"For networks: {_BACKBONE}")] = None,
    frozen: Annotated[bool | None, typer.Option("--frozen/--trained", help=f"timm, torchvision: {_FROZEN}")] = None,
    weights: Annotated[str | None, typer.Option(help=_WEIGHTS)] = None,
    size: Annotated[int | None, typer.Option(help="timm, torchvision: resize images to squares of this side.")] = None,
    views: Annotated[str | None, typer.Option(help=_VIEWS)] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help=_EPOCHS)] = None,
    seed: Seed = 0,
    device: Device = "auto",
    private: Annotated[int | None, typer.Option(min=2, help=_PRIVATE)] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing model.")] = False,
    *,
    read_options: dict[str, Any],
) -> None:
    """Fit a model to your own bags.

    Methods are compared by cross-validation on the bags' labels. The same command resumes an interrupted fit.
    """
    from headcount.cli.console import print_line, print_message, print_methods, progress_bar
    from headcount.cli.running import parse_options
    from headcount.io import file_lock
    from headcount.models import library_backbones, serialization
    from headcount.reporting.export import check_output_path
    from headcount.reporting.model_pages import model_card, render_fit_page, summary_lines
    from headcount.selection.fit import check_limits, fit as fit_dataset
    from headcount.selection.methods import resolve_method
    from headcount.training.accel import resolve_device

    resolve_device(device)  # what can be checked without the data is checked before they are read
    resolve_method(method, head)
    check_limits(minutes, folds)
    library_backbones.check_backbone_options(backbone, frozen, weights, size)
    head_options = parse_options(option)
    out = out if out.name else Path(os.path.abspath(out))  # "." has no name for the working folder
    check_output_path("out", out)
    work = out.with_name(out.name + ".work")
    try:
        with file_lock(work / "lock"):
            serialization.check_writable(out, overwrite)
            dataset = read_data(data, {**read_options, "min_size": private}, labels=True, log=print_line)
            with progress_bar("timing a few steps") as update:
                model = fit_dataset(
                    dataset, method, minutes=minutes, folds=folds, head=head, options=head_options, backbone=backbone,
                    frozen=frozen, weights=weights, size=size, cache=read_options["cache"], views=views, epochs=epochs,
                    seed=seed, device=device, work=work, private=private, log=print_line,
                    on_progress=lambda p: update(description=p.message, total=round(p.total), completed=round(p.done)),
                )  # fmt: skip
            page = render_fit_page(model, f"A model from {Path(data).name}")
            model.save(out, {"report.html": page, "MODEL_CARD.md": model_card(model)}, overwrite)
            for unfinished in work.iterdir():  # of fits with other options; the model is complete
                if unfinished.is_dir():
                    shutil.rmtree(unfinished, ignore_errors=True)
                    print_message(f"removed {unfinished}, of an earlier fit")
    except BaseException as e:
        if work.is_dir() and any(work.iterdir()):
            e.add_note(f"the finished folds are in {work}")
        raise
    print_methods(model)
    for line in summary_lines(model):
        print_line(line)
    print_line(f"model in {out}; see {out / 'report.html'}")


@app.command()
@with_options("read_options", FIT_OPTIONS)
def check(
    data: Data, seed: Seed = 0, as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False, *,
    read_options: dict[str, Any],
) -> None:  # fmt: skip
    """Estimate in seconds whether fit can work.

    Can instances be learned from these bags' labels, and what would help? Trains no model and writes nothing.
    """
    from headcount.cli.console import print_line, print_message
    from headcount.selection.check import check as check_dataset

    dataset = read_data(data, read_options, labels=True, log=print_message if as_json else print_line)
    result = check_dataset(dataset, seed)
    if as_json:
        print(json.dumps(result.to_json(), indent=1, allow_nan=False))
    else:
        for line in str(result).splitlines():
            print_line(line)
    bags, instances = result.examined
    print_message(f"examined {instances:,} instances of {bags:,} bags in {result.seconds:.1f} s")


@app.command()
@with_options("read_options", FIT_OPTIONS)
def issues(
    data: Data,
    model: Annotated[Path | None, typer.Option(help="Use this model; default: cross-validated forests.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write all bags, ranked (.csv, .tsv, .parquet).")] = None,
    top: Annotated[int, typer.Option(min=1, help="Number of bags to list.")] = 20,
    folds: Annotated[int | None, typer.Option(min=2, max=50, help="Without a model: folds; default 5.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Without a model: seed of the folds; default 0.")] = None,
    device: Device = "auto", *, read_options: dict[str, Any],
) -> None:  # fmt: skip
    """Rank the bags whose label looks wrong."""
    from headcount.cli.console import print_label_issues, print_message
    from headcount.inference.label_issues import FOLDS, TREES, cross_val_bag_probabilities, find_label_issues
    from headcount.reporting import export

    fit_only = {name: read_options[name] for name in ("features", "categories", "classes", "uncounted")}
    forest_options = {"folds": folds, "seed": seed, **fit_only}
    if model is not None and (ignored := [name for name, value in forest_options.items() if value is not None]):
        raise HeadcountError(f"--{ignored[0]} has no effect with --model; leave out one of the two")
    if out is not None:
        export.require_table("--out", out)
    export.check_outputs(data, model, read_options["labels"], out=out)
    fitted = None if model is None else load_model(model, device)
    dataset = read_data(data, read_options, fitted, labels=True)
    if fitted is None:
        folds = FOLDS if folds is None else folds
        forests = f"{folds} random forests of {TREES} trees"
        print_message(f"out-of-fold predictions of {forests}, trained on the bags' labels as instance labels")
        bag_probabilities = cross_val_bag_probabilities(dataset, folds, seed or 0)
    else:
        predictions = predict_all(fitted, dataset)
        if predictions.seen_in_training.any():
            print_message("it may have learned wrong labels too; without --model the predictions are out of fold")
        bag_probabilities = predictions.bag_probabilities
    table = find_label_issues(dataset.bags, bag_probabilities)
    if out is not None:
        export.write_table(out, [table])
        print_message(f"wrote {out}: {table.num_rows:,} bags")
    print_label_issues(table, top)
