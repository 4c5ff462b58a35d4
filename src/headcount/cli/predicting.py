"""How every service comes by its answers: the model opened, the data read as its were, one rule of whose bags are listened to.

predict, evaluate, explain, issues and audit say the same of the same instance because all of them ask here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headcount.cli.messages import log_dataset
from headcount.inference.predict import Predictions, predict
from headcount.models.fitted import FittedModel
from headcount.readers import BagDataset, read
from headcount.readers.columns import ColumnRoles
from headcount.reporting.console import print_message
from headcount.training.accel.device import resolve_device

ROLE_NAMES = tuple(ColumnRoles.__dataclass_fields__)
Log = Callable[[str], None]


def load_model(model: Path, device: str = "auto") -> FittedModel:
    """A model's folder, on the device asked for."""
    torch_device = resolve_device(device)
    return FittedModel.load(model).to(torch_device)


def read_for_model(
    fitted: FittedModel | None,
    data: str,
    how: Mapping[str, Any],
    *,
    labels: bool,
    or_truth: bool = False,
    log: Log = print_message,
) -> BagDataset:
    """Read data as the command line says (cli/options.py); what was understood, and what was left out, is told."""
    roles = ColumnRoles(**{k: how[k] for k in ROLE_NAMES if how.get(k) is not None})
    rest: dict[str, Any] = {k: v for k, v in how.items() if k not in ROLE_NAMES and v is not None}
    if fitted is None:
        dataset = read(data, roles, need_labels=labels, **rest)
    else:
        dataset = fitted.read(data, roles, need_labels=labels, truth_suffices=or_truth, **rest)
    log_dataset(dataset, log)
    return dataset


def is_training_data(fitted: FittedModel, reading: BagDataset) -> bool:
    """Whether these are all the bags of the model's data, whatever became of their numbers on the way."""
    data = fitted.metadata.get("data", {})
    same = reading.bag_signature is not None and data.get("bag_signature") == reading.bag_signature
    return same or data.get("fingerprint") == reading.fingerprint


def predict_all(fitted: FittedModel, reading: BagDataset, use_context: bool | None = None, **how: Any) -> Predictions:
    """What every service says of the data, by one rule; and a line if there are bags the model was trained on.

    Whether to listen to a bag was decided on bags never seen, so unasked nobody listens to one that was: each bag by itself
    (:meth:`Fitted.say`), so that no answer depends on what else is in the file.
    """
    predictions = predict(fitted, reading, use_context=use_context, **how)
    n_trained_on, bags = int(predictions.seen_in_training.sum()), len(predictions.seen_in_training)
    if not n_trained_on and not is_training_data(fitted, reading):
        return predictions
    which = (
        f"{n_trained_on:,} of the {bags:,} bags are among those" if 0 < n_trained_on < bags else "these are the bags"
    )
    alone = (
        "; their instances are answered without the bag's context"
        if n_trained_on and use_context is None and fitted.use_context
        else ""
    )
    scores = "; cross-validated scores are in model.json" if fitted.metadata.get("scores") else ""
    print_message(f"{which} the model was trained on, and it may remember their labels: of single instances and shares it may say worse "
        f"things than in new bags, of bags better ones{scores}{alone}")  # fmt: skip
    return predictions
