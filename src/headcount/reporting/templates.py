"""What all pages share: templates (``base.html`` forbids scripts and requests), number formats, and how instances look.

Every string that a template inserts is data and is escaped; only the style sheet and figures are inserted as they are.
"""

from __future__ import annotations

import base64
import io
import re
from importlib import resources
from typing import Any, NamedTuple

import jinja2
import numpy as np
import pyarrow as pa
from markupsafe import Markup

from headcount.readers import BagDataset
from headcount.readers.values import clean_name
from headcount.reporting.svg import truncate

_MAX_COLUMNS = 24  # columns of a table that are shown
_MAX_VALUE, _MAX_TEXT = 200, 600  # characters


def render_template(template: str, **values: Any) -> str:
    """A page from a template of this folder."""
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(read_resource),
        autoescape=jinja2.select_autoescape(["html"]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"percent": percent, "score": score_with_interval, "markdown": markdown_escape}
    return environment.get_template(template).render(css=Markup(read_resource("report.css")), **values)


def read_resource(name: str) -> str:
    return resources.files("headcount.reporting").joinpath(name).read_text("utf-8")


def percent(share: float) -> str:
    """
    >>> percent(0.256)
    '26 %'
    """
    return f"{100 * share:.0f} %"


def score_with_interval(value: float | None, low: float | None = None, high: float | None = None) -> str:
    """A score and its interval.

    >>> score_with_interval(0.9, 0.786, 0.957), score_with_interval(None)
    ('0.900 (0.786 to 0.957)', '–')
    """
    if value is None:
        return "–"
    return f"{value:.3f}" if low is None or high is None else f"{value:.3f} ({low:.3f} to {high:.3f})"


def markdown_escape(text: str) -> str:
    """User data on one line, inside code marks if it contains anything that Markdown or HTML might interpret.

    >>> markdown_escape("a plain line"), markdown_escape("<b>|x`"), markdown_escape("a*b")
    ('a plain line', '`` <b>¦x` ``', '`` a*b ``')
    """
    text = " ".join(text.replace("|", "¦").split())
    if re.fullmatch(r"[\w ,.:;'\"()%/+–-]*", text):
        return text
    fence = "`" * (1 + max((len(m) for m in re.findall(r"`+", text)), default=1))
    return f"{fence} {text} {fence}"


class InstanceView(NamedTuple):
    """What a page shows of an instance. The strings are data: templates escape them."""

    ids: tuple[tuple[str, str], ...]  # (column, value)
    picture: str  # a data: URI, or empty
    pixelated: bool  # the picture is enlarged: show its pixels
    text: str
    values: tuple[tuple[str, str], ...]


def view_instance(dataset: BagDataset, i: int, side: int = 72, max_text: int = _MAX_TEXT) -> InstanceView:
    """Instance i of N, with a picture of at most ``side`` pixels and a text of at most ``max_text`` characters."""
    row, address = int(dataset.rows[i]), int(dataset.bags.index[i])
    ids = _row_values(dataset.ids, row)
    picture, pixelated, text, values = "", False, "", ()
    if dataset.kind == "images":
        pixels = np.asarray(dataset.content[address])
        picture, pixelated = picture_uri(pixels, side), max(pixels.shape[:2]) < side
    elif dataset.schema.fields:
        texts = [f.name for f in dataset.schema.fields if f.kind == "text"]
        text = "\n".join(v for _, v in _row_values(dataset.content.select(texts), address, max_text))
        values = _row_values(dataset.content.drop_columns(texts), address)
    return InstanceView(ids, picture, pixelated, text, values)


def _row_values(table: pa.Table, row: int, max_length: int = _MAX_VALUE) -> tuple[tuple[str, str], ...]:
    names = table.column_names[:_MAX_COLUMNS]
    values = ((name, clean_name(table.column(name)[row].as_py())) for name in names)
    return tuple((name, truncate(value, max_length)) for name, value in values if value is not None)


def picture_uri(pixels: np.ndarray, side: int, colours: int = 0) -> str:
    """(H, W, channels) uint8 -> a PNG data URI of at most ``side`` pixels, with a palette of ``colours`` if given."""
    from PIL import Image

    image = Image.fromarray(np.ascontiguousarray(pixels[..., :3] if pixels.shape[-1] >= 3 else pixels[..., 0]))
    if max(image.size) > side:
        image.thumbnail((side, side))
    if colours and image.mode == "RGB":
        image = image.quantize(colours)
    out = io.BytesIO()
    image.save(out, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
