"""How every service comes by its answers: the model opened, the data read as its were, one rule of whose bags are listened to.

predict, evaluate, explain, issues and audit say the same of the same instance because all of them ask here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headcount.complaints import tell_of
from headcount.data.columns import Named
from headcount.data.read import Reading, read
from headcount.judging.answers import Said, ask
from headcount.models.fitted import Fitted
from headcount.showing.ask_tables import say
from headcount.training.speed import device_for

NAMES = tuple(Named.__dataclass_fields__)
Tell = Callable[[str], None]


def opened(model: Path, device: str = "auto") -> Fitted:
    """A model's folder, on the device asked for."""
    place = device_for(device)
    return Fitted.load(model).to(place)


def read_as(
    fitted: Fitted | None, data: str, how: Mapping[str, Any], *, labels: bool, or_truth: bool = False, tell: Tell = say
) -> Reading:
    """Read data as the command line says (cli_options.py); what was understood, and what was left out, is told."""
    named = Named(**{k: how[k] for k in NAMES if how.get(k) is not None})
    rest: dict[str, Any] = {k: v for k, v in how.items() if k not in NAMES and v is not None}
    if fitted is None:
        found = read(data, named, need_labels=labels, **rest)
    else:
        found = fitted.read(data, named, need_labels=labels, or_truth=or_truth, **rest)
    tell_of(found, tell)
    return found


def seen(fitted: Fitted, reading: Reading) -> bool:
    """Whether these are all the bags of the model's data, whatever became of their numbers on the way."""
    data = fitted.facts.get("data", {})
    same = reading.whose is not None and data.get("whose") == reading.whose
    return same or data.get("fingerprint") == reading.fingerprint


def answered(fitted: Fitted, reading: Reading, listen: bool | None = None, **how: Any) -> Said:
    """What every service says of the data, by one rule; and a line if there are bags the model was trained on.

    Whether to listen to a bag was decided on bags never seen, so unasked nobody listens to one that was: each bag by itself
    (:meth:`Fitted.say`), so that no answer depends on what else is in the file.
    """
    said = ask(fitted, reading, listen=listen, **how)
    met, bags = int(said.met.sum()), len(said.met)
    if not met and not seen(fitted, reading):
        return said
    which = f"{met:,} of the {bags:,} bags are among those" if 0 < met < bags else "these are the bags"
    alone = (
        "; their instances are answered without the bag's context" if met and listen is None and fitted.listens else ""
    )
    scores = "; cross-validated scores are in model.json" if fitted.facts.get("scores") else ""
    say(f"{which} the model was trained on, and it may remember their labels: of single instances and shares it may say worse "
        f"things than in new bags, of bags better ones{scores}{alone}")  # fmt: skip
    return said
