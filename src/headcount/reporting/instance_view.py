"""How an instance looks to a person: its picture, its text or its values, and the user's own names for it."""

from __future__ import annotations

import base64
import io
from typing import Any, NamedTuple

import numpy as np

from headcount.readers import BagDataset
from headcount.readers.values import clean_name

_VALUES = 24  # columns of a table that are shown
_TEXT = 600  # characters of a text


class InstanceView(NamedTuple):
    """All strings are data; whoever shows them escapes them."""

    ids: tuple[tuple[str, str], ...]  # (column, value)
    picture: str  # a data: URI, or nothing
    pixelated: bool  # the picture was enlarged: show its pixels
    text: str
    values: tuple[tuple[str, str], ...]


def view_instance(dataset: BagDataset, i: int, side: int = 72, max_text: int = _TEXT) -> InstanceView:
    """Instance i of N, its picture at most ``side`` pixels wide, its text at most so many characters long."""
    row, address = int(dataset.rows[i]), int(dataset.bags.index[i])
    ids = _row(dataset.ids, row)
    picture, crisp, text, values = "", False, "", ()
    if dataset.kind == "images":
        pixels = np.asarray(dataset.content[address])
        picture, crisp = picture_uri(pixels, side), max(pixels.shape[:2]) < side
    elif dataset.schema.fields:
        texts = [f.name for f in dataset.schema.fields if f.kind == "text"]
        text = "\n".join(v for _, v in _row(dataset.content.select(texts), address, max_text))
        values = _row(dataset.content.drop_columns(texts), address)
    return InstanceView(ids, picture, crisp, text, values)


def _row(table: Any, row: int, most: int = 200) -> tuple[tuple[str, str], ...]:
    said = [(name, clean_name(table.column(name)[row].as_py())) for name in table.column_names[:_VALUES]]
    return tuple((name, _short(value, most)) for name, value in said if value is not None)


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def picture_uri(pixels: np.ndarray, side: int, colours: int = 0) -> str:
    """(H, W, channels) uint8 -> a PNG data URI of at most ``side`` pixels; with ``colours``, in a palette of so many."""
    from PIL import Image

    image = Image.fromarray(np.ascontiguousarray(pixels[..., :3] if pixels.shape[-1] >= 3 else pixels[..., 0]))
    if max(image.size) > side:
        image.thumbnail((side, side))
    if colours and image.mode == "RGB":
        image = image.quantize(colours)
    out = io.BytesIO()
    image.save(out, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
