"""Words typed at the command line become recipes. Nothing is said twice: of two values none wins silently."""

from __future__ import annotations

import json
import math
from typing import Any

from headcount.errors import HeadcountError
from headcount.experiments.recipe import Recipe
from headcount.experiments.study import grid
from headcount.models.heads import check_options


def build_recipes(
    source: str,
    scenario: str,
    fold: str,
    head: str,
    option: list[str] | None,
    removal: str,
    epochs: int | None,
    bag_size: int | None,
    precision: str | None,
    set_: list[str] | None,
) -> list[Recipe]:
    """The grid that these words span; a comma separates values."""
    axes: dict[str, list[Any]] = {
        "source": source.split(","),
        "scenario": scenario.split(","),
        "fold": [_number("--fold", v, int) for v in fold.split(",")],
        "head": head.split(","),
        "removal": [_number("--removal", v, float) for v in removal.split(",")],
        "options": [parse_options(option)],
    }
    if epochs is not None:
        axes["epochs"] = [epochs]
    if bag_size is not None:
        axes["bag_size"] = [bag_size]
    if precision is not None:
        axes["precision"] = precision.split(",")
    _set(axes, set_ or [])
    recipes = grid(Recipe(), **axes)
    for recipe in recipes:  # a head of one's own is first met here
        check_options(recipe.head, dict(recipe.options))
    return recipes


def _set(axes: dict[str, list[Any]], texts: list[str]) -> None:
    """Add what ``--set`` says: any field that has no option of its own, and the fields that a field has in it."""
    names_given: set[str] = set()
    for text in texts:
        name, values = _split("--set", text)
        field, dot, own = name.partition(".")
        if name.endswith("options") or name == "trouble":
            raise HeadcountError(
                f"--set cannot give {name} as a whole; give --option NAME=VALUE for the head, --set backbone.NAME=VALUE, "
                "--set trouble.NAME=VALUE"
            )
        if name in names_given:
            raise HeadcountError(f"--set {name} is given twice; give it once, with commas between several values")
        if name in axes:
            flag = f"--{name.replace('_', '-')}"
            raise HeadcountError(f"--set {text}: {name} has an option of its own; give {flag} alone")
        names_given.add(name)
        given = [_value(v) for v in values.split(",")]
        if not dot:
            axes[name] = given
            continue
        field = {"backbone": "backbone_options", "trouble": "trouble"}.get(field, field)
        if field not in ("backbone_options", "trouble"):
            raise HeadcountError(f"--set {name}: only backbone and trouble have fields of their own")
        axes[field] = [{**so_far, own: v} for so_far in axes.get(field, [{}]) for v in given]


def _number(flag: str, text: str, kind: type) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise HeadcountError(f"{flag} takes numbers, got {text!r}") from None


def _split(flag: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise HeadcountError(f"{flag} takes NAME=VALUE, got {text!r}")
    return name, value


def parse_options(option: list[str] | None) -> dict[str, Any]:
    """Options of a head, each said once."""
    pairs: dict[str, Any] = {}
    for text in option or []:
        name, value = _split("--option", text)
        if name in pairs:
            raise HeadcountError(f"--option {name} is given twice; give it once")
        pairs[name] = _value(value)
    return pairs


def _value(text: str) -> Any:
    """A number, true or false, or the word itself."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return text
    if isinstance(value, float) and not math.isfinite(value):
        raise HeadcountError(f"{text} is not a number that can be computed with; give a finite one")
    return value if isinstance(value, (bool, int, float)) else text
