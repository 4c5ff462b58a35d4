"""What all commands for a fitted model share: the model loaded, the data read as the model needs them, and one way to predict.

Therefore predict, evaluate, explain, issues and audit agree about every instance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headcount.cli.options import LIST_OPTIONS, split_names, with_option_names
from headcount.errors import check_choice
from headcount.inference.predict import predict_dataset
from headcount.models.fitted import FittedModel
from headcount.models.predictions import Predictions
from headcount.readers import BagDataset, read
from headcount.readers.columns import ColumnRoles
from headcount.reporting.console import print_message
from headcount.training.accel import resolve_device

ROLES = tuple(ColumnRoles.__dataclass_fields__)
MAX_SKIPPED = 20  # lines printed about skipped rows, of which there may be millions
CONTEXT = {"auto": None, "on": True, "off": False}


def load_model(folder: Path, device: str = "auto") -> FittedModel:
    """Load a model's folder to a device."""
    torch_device = resolve_device(device)
    return FittedModel.load(folder).to(torch_device)


def read_data(
    data: str,
    options: Mapping[str, Any],
    model: FittedModel | None = None,
    *,
    labels: bool,
    truth_suffices: bool = False,
    log: Callable[[str], None] = print_message,
) -> BagDataset:
    """Read data with the options of options.py, for a model if there is one; log how they were understood."""
    given: dict[str, Any] = {k: split_names(v) if k in LIST_OPTIONS else v for k, v in options.items()}
    given = {k: v for k, v in given.items() if v is not None}
    roles = ColumnRoles(**{k: v for k, v in given.items() if k in ROLES})
    rest: dict[str, Any] = {k: v for k, v in given.items() if k not in ROLES}
    if model is None:
        dataset = read(data, roles, need_labels=labels, **rest)
    else:
        dataset = model.read(data, roles, need_labels=labels, truth_suffices=truth_suffices, **rest)
    log_dataset(dataset, log)
    return dataset


def log_dataset(dataset: BagDataset, log: Callable[[str], None]) -> None:
    """Log how the data were understood, and what was skipped, with the options' names."""
    for line in dataset.description:
        log(with_option_names(line))
    for line in dataset.skipped[:MAX_SKIPPED]:
        log(f"skipped: {with_option_names(line)}")
    if (more := len(dataset.skipped) - MAX_SKIPPED) > 0:
        log(f"skipped: {more:,} more")


def parse_context(context: str) -> bool | None:
    """The value of --context: None is auto."""
    return CONTEXT[check_choice("context", context, CONTEXT)]


def predict_all(model: FittedModel, dataset: BagDataset, use_context: bool | None = None, **options: Any) -> Predictions:
    """Predict all bags, and print a warning if the model was trained on some of them.

    If ``use_context`` is None, a bag's context is used if it helped in cross-validation, and never for a bag that the model was
    trained on. This is decided for each bag by itself, so that no prediction depends on which other bags are in the file.
    """
    predictions = predict_dataset(model, dataset, use_context=use_context, **options)
    n_trained, n_bags = int(predictions.seen_in_training.sum()), len(predictions.seen_in_training)
    if not n_trained:
        return predictions
    which = f"{n_trained:,} of the {n_bags:,} bags" if n_trained < n_bags else "these bags"
    without = "; their instances are predicted without context" if use_context is None else ""
    print_message(
        f"the model was trained on {which}: bag accuracy will be optimistic; instance predictions and shares may be worse than on "
        "new bags"
        + ("; cross-validated scores are in model.json" if model.metadata.get("scores") else "")
        + (without if model.use_context else "")
    )
    return predictions
