"""Pages: templates of this folder become one HTML file each, whole and quiet.

What they share stands in ``head.html``: that nothing in them runs or is fetched.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup


def render_template(template: str, **values: Any) -> str:
    """A page of this folder, everything in it escaped but our own style sheet."""
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_file),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"percent": percent, "rate": score_with_interval}
    return environment.get_template(template).render(css=Markup(_file("report.css")), **values)


def percent(share: float) -> str:
    """
    >>> percent(0.256)
    '26 %'
    """
    return f"{100 * share:.0f} %"


def score_with_interval(value: float | None, low: float | None = None, high: float | None = None) -> str:
    """A share with its interval.

    >>> rate(0.9, 0.786, 0.957), rate(None)
    ('0.900 (0.786 to 0.957)', '–')
    """
    if value is None:
        return "–"
    return f"{value:.3f}" if low is None or high is None else f"{value:.3f} ({low:.3f} to {high:.3f})"


def _file(name: str) -> str:
    return resources.files("headcount.reporting").joinpath(name).read_text("utf-8")
