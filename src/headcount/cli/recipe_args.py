"""Options of the command line become recipes. Of two values for one field neither wins silently: that is an error."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from headcount.errors import HeadcountError
from headcount.experiments.recipe import Recipe
from headcount.experiments.study import grid
from headcount.models.heads import check_options


def build_recipes(options: Mapping[str, Any]) -> list[Recipe]:
    """The grid that the recipe options of options.py span; commas separate values."""
    axes: dict[str, list[Any]] = {
        "source": options["source"].split(","),
        "scenario": options["scenario"].split(","),
        "fold": [_number("--fold", v, int) for v in options["fold"].split(",")],
        "head": options["head"].split(","),
        "removal": [_number("--removal", v, float) for v in options["removal"].split(",")],
        "options": [parse_options(options["option"])],
    }
    axes |= {name: [options[name]] for name in ("epochs", "bag_size") if options[name] is not None}
    if options["precision"] is not None:
        axes["precision"] = options["precision"].split(",")
    _add_fields(axes, options["set"] or [])
    recipes = grid(Recipe(), **axes)
    for recipe in recipes:
        check_options(recipe.head, dict(recipe.options))
    return recipes


def _add_fields(axes: dict[str, list[Any]], texts: list[str]) -> None:
    """Add the values of ``--set``: fields without an option of their own, and fields inside backbone and trouble."""
    names_given: set[str] = set()
    for text in texts:
        name, values = _split("--set", text)
        field, dot, inner = name.partition(".")
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
        parsed = [_value(v) for v in values.split(",")]
        if not dot:
            axes[name] = parsed
            continue
        field = {"backbone": "backbone_options", "trouble": "trouble"}.get(field, field)
        if field not in ("backbone_options", "trouble"):
            raise HeadcountError(f"--set {name}: only backbone and trouble have fields of their own")
        axes[field] = [{**others, inner: v} for others in axes.get(field, [{}]) for v in parsed]


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
    """Options of a head as a dictionary."""
    pairs: dict[str, Any] = {}
    for text in option or []:
        name, value = _split("--option", text)
        if name in pairs:
            raise HeadcountError(f"--option {name} is given twice; give it once")
        pairs[name] = _value(value)
    return pairs


def _value(text: str) -> Any:
    """A number, true or false, or the text itself."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return text
    if isinstance(value, float) and not math.isfinite(value):
        raise HeadcountError(f"{text} is not a number that can be computed with; give a finite one")
    return value if isinstance(value, (bool, int, float)) else text
