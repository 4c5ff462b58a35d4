"""What pages and figures share: style, inline SVG, templates, number formats, and how instances look.

``base.html`` forbids requests, and all scripts but page.js, whose hash it gives. Every string that a template inserts is data
and is escaped; only the style sheet, the script and figures are inserted as they are. The colours of inline figures are CSS variables (for dark mode), their text is text.
"""

from __future__ import annotations

import base64
import hashlib
import html
import io
import json
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np
import pyarrow as pa
from markupsafe import Markup
from numpy.typing import ArrayLike

from headcount.errors import HeadcountError
from headcount.io import atomic_write
from headcount.readers import BagDataset
from headcount.readers.columns import clean_name

if TYPE_CHECKING:  # matplotlib takes half a second to import: only drawing pays for it
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, RULE, PAPER = "#1c2024", "#5f6770", "#e2e3e0", "#fdfdfb"
# The colour-blind safe palette of Okabe and Ito, without its yellow, which is invisible on white.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#b5609a", "#c98b00", "#3f9fd6", "#7d6223", "#7b828b")
THEME = dict(zip((INK, MUTED, RULE, PAPER), ("--ink", "--muted", "--rule", "--paper"), strict=True))
THEME |= {c: f"--c{i}" for i, c in enumerate(PALETTE)}
_FIXED = {"Counting Network": PALETTE[0], "Counting Network + MPEM": PALETTE[1]}
_DPI = 72  # one pixel is one unit of the drawing
_MAX_COLUMNS = 24  # columns of a table that are shown
_MAX_VALUE, _MAX_TEXT = 200, 600  # characters

STYLE: Any = {
    "figure.dpi": _DPI, "figure.facecolor": "none", "axes.facecolor": "none", "svg.fonttype": "none",
    "font.family": "DejaVu Sans",  # comes with matplotlib and is wider than the fonts that pages replace it with
    "font.size": 11, "text.color": INK, "text.parse_math": False,  # a class may be called "$5"
    "axes.titlesize": 11, "axes.titlelocation": "left", "axes.titlecolor": MUTED, "axes.labelcolor": MUTED,
    "axes.edgecolor": MUTED, "axes.linewidth": 0.8, "axes.spines.top": False, "axes.spines.right": False,
    "axes.spines.left": False, "axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True,
    "grid.color": RULE, "grid.linewidth": 1, "xtick.color": MUTED, "ytick.color": MUTED, "xtick.labelsize": 10.5,
    "ytick.labelsize": 10.5, "xtick.major.size": 3.5, "ytick.major.size": 0, "legend.frameon": False,
    "legend.fontsize": 10.5, "legend.handlelength": 1.2, "legend.borderpad": 0, "legend.borderaxespad": 0.3,
    "path.simplify_threshold": 0.4,
}  # fmt: skip

_TAG = re.compile(r"<[^>]+>")  # only tags are rewritten; the text between them is user data
Margins = tuple[float, float, float, float]
Numbers = Sequence[float] | np.ndarray


def method_colours(labels: Iterable[str]) -> dict[str, str]:
    """A colour for each method: fixed for the two of the paper, the rest of the palette in turn for the others."""
    others = [label for label in dict.fromkeys(labels) if label not in _FIXED]
    return _FIXED | {label: PALETTE[2 + i % (len(PALETTE) - 2)] for i, label in enumerate(others)}


@contextmanager
def panel(width: float, height: float, margins: Margins = (40, 26, 10, 30), columns: int = 1) -> Iterator[tuple[Figure, Any]]:
    """A figure and its axes; all sizes in pixels, margins as left, top, right, bottom."""
    import matplotlib
    from matplotlib.figure import Figure

    left, top, right, bottom = margins
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width / _DPI, height / _DPI))
        axes = figure.subplots(1, columns)
        figure.subplots_adjust(left / width, bottom / height, 1 - right / width, 1 - top / height)
        yield figure, axes


def legend(ax: Axes) -> None:
    """A legend above the panel at the right, where it cannot hide a curve."""
    ax.legend(loc="lower right", bbox_to_anchor=(1, 1.01), ncols=3, columnspacing=1.2)


def limit_ticks(ax: Axes) -> None:
    """At most five intervals on the y axis."""
    ax.locator_params("y", nbins=5, steps=[1, 2, 5, 10])


def finite(values: Numbers) -> np.ndarray:
    array = np.asarray(values, dtype=float)
    return array[np.isfinite(array)]


def truncate(name: str, length: int) -> str:
    return name if len(name) <= length else name[: length - 1] + "…"


def save(figure: Figure, path: Path | str) -> Path:
    """Write a figure atomically in the format of its suffix: .png, .svg or .pdf."""
    path = Path(path)
    fmt = path.suffix.lower().lstrip(".")
    if fmt not in ("png", "svg", "pdf"):
        raise HeadcountError(f"a figure is saved as .png, .svg or .pdf, got {path.name!r}")
    atomic_write(path, lambda f: f.write(_render(figure, fmt, path.stem, facecolor="white")))
    return path


def hover(artist: Artist, *texts: str) -> None:
    """Show a text on hover, or one for each marker of a line."""
    artist.set_gid(f"tips{json.dumps(texts).encode().hex()}")  # no character of a text is mistaken for SVG


def _insert_titles(group: re.Match[str]) -> str:
    texts = [f"<title>{html.escape(text)}</title>" for text in json.loads(bytes.fromhex(group[1]))]
    if len(texts) == 1:
        return f"<g>{texts[0]}{group[2]}"
    titles = iter(texts)
    return "<g>" + re.sub(r"(<use [^>]*)/>", lambda use: f"{use[1]}>{next(titles, '')}</use>", group[2])


def inline_svg(figure: Figure, name: str, label: str) -> Markup:
    """The figure as an SVG element, in which all text is escaped: ``name`` makes its ids unique in a page (they are hashes with
    the name as salt), screen readers read ``label``."""
    text = _render(figure, "svg", name).decode()
    body = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>|<style.*?</style>", "", text[text.index("<svg") :], flags=re.S)
    body = _TAG.sub(lambda tag: _simplify_tag(tag[0]), body)
    body = re.sub(r'(<g[^>]*)>((?:\s*<use [^>]*style="([^"]*)"/>)+)\s*</g>', _hoist_style, body)
    body = re.sub(r'<g id="tips([0-9a-f]+)">(.*?)(?=<g id=|</svg>)', _insert_titles, body, flags=re.S)
    body = _TAG.sub(lambda tag: re.sub(r' id="[\w.]+_\d{1,4}"', "", tag[0]), body)  # numbers, in every figure the same
    body = re.sub(r">\s+<", "><", body)
    width, height = figure.get_size_inches() * _DPI
    box = f'viewBox="0 0 {width:g} {height:g}" style="--width:{width:g}px"'
    head = f'<svg class="plot" role="img" aria-label="{html.escape(label)}" {box}>'
    return Markup(head + body[body.index(">") + 1 :].strip())


def _render(figure: Figure, fmt: str, salt: str, facecolor: str = "none") -> bytes:
    import matplotlib

    out = io.BytesIO()
    dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(fmt)  # same numbers, same bytes
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": salt}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # the reader's fonts draw the text
        figure.savefig(out, format=fmt, dpi=160, facecolor=facecolor, metadata=dates)
    return out.getvalue()


def _simplify_tag(tag: str) -> str:
    """A tag in the colours of the page, without font lists and excess decimals: a third of its size."""
    tag = re.sub(r'font-family: [^;"]*;? ?|transform="rotate\(-0 [^"]*"', "", tag)
    tag = re.sub(r' (?:d|x|y|transform)="[^"]*"', lambda m: re.sub(r"(\d\.\d)\d+", r"\1", m[0]), tag)
    for colour, variable in THEME.items():
        tag = tag.replace(colour, f"var({variable})")
    tag = re.sub(r"\s+", " ", tag.replace("xlink:href", "href")).replace(' "', '"').replace(" >", ">")
    if tag.startswith("<text"):  # the usual text style is in the style sheet of the page
        tag = tag.replace("font-size: 10.5px; ", "").replace("; fill: var(--muted)", "")
    return tag if " C " in tag else tag.replace(" L ", " ")  # points after a move are a line already


def _hoist_style(match: re.Match[str]) -> str:
    """Move the style that all markers of a group share to the group."""
    opening, uses, style = match.groups()
    if uses.count(f'style="{style}"') != uses.count("<use"):
        return match[0]
    return f'{opening} style="{style}">' + uses.replace(f' style="{style}"', "") + "</g>"


def render_template(template: str, **values: Any) -> str:
    environment = jinja2.Environment(
        autoescape=template.endswith(".html"), undefined=jinja2.StrictUndefined, loader=jinja2.FunctionLoader(read_resource),
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters |= {f.__name__: f for f in (percent, percentage_points, score_with_interval, markdown_escape)}
    script = read_resource("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    shared = {"css": Markup(read_resource("report.css")), "script": Markup(script), "script_hash": f"sha256-{digest}"}
    return environment.get_template(template).render(**shared, **values)


def confusion_table(counts: ArrayLike, classes: Sequence[str], label: str) -> Markup:
    """A confusion matrix as an HTML table, with rows for the true classes; screen readers read ``label``."""
    return Markup(render_template("confusion.html", counts=np.asarray(counts).tolist(), classes=classes, label=label))


def read_resource(name: str) -> str:
    return resources.files("headcount.reporting").joinpath(name).read_text("utf-8")


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def percentage_points(difference: float) -> str:
    """
    >>> percentage_points(0.1234), percentage_points(-0.3), percentage_points(-0.0001), percentage_points(float("nan"))
    ('+12.3', '−30.0', '+0.0', '–')
    """
    return "–" if difference != difference else f"{round(100 * difference, 1) + 0.0:+.1f}".replace("-", "−")


def score_with_interval(value: float | None, low: float | None = None, high: float | None = None) -> str:
    """As in "0.900 (0.786 to 0.957)"."""
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


def view_instance(dataset: BagDataset, i: int, side: int = 72, max_text: int = _MAX_TEXT) -> SimpleNamespace:
    """What a page shows of instance i of N: identifiers and values of its columns, its picture of at most ``side`` pixels as a
    data: URI (enlarged small pictures show their pixels), its text of at most ``max_text`` characters."""
    row, address = int(dataset.rows[i]), int(dataset.bags.index[i])
    view = SimpleNamespace(ids=_row_values(dataset.ids, row), picture="", pixelated=False, text="", values=())
    if dataset.kind == "images":
        pixels = np.asarray(dataset.content[address])
        view.picture, view.pixelated = picture_uri(pixels, side), max(pixels.shape[:2]) < side
    elif dataset.schema.fields:
        fields = dataset.schema.fields
        texts = [f.name for f in fields if f.is_text]
        view.text = "\n".join(v for _, v in _row_values(dataset.content.select(texts), address, max_text))
        view.values = _row_values(dataset.content.select([f.name for f in fields if not f.is_text]), address, digits=False)
    return view


def _row_values(table: pa.Table, row: int, max_length: int = _MAX_VALUE, digits: bool = True) -> tuple[tuple[str, str], ...]:
    """``digits``: all of them, as in the user's own columns; else as many as a reader wants."""
    raw = ((name, table.column(name)[row].as_py()) for name in table.column_names[:_MAX_COLUMNS])
    values = ((name, clean_name(value if digits else _round(value))) for name, value in raw)
    return tuple((name, truncate(value, max_length)) for name, value in values if value is not None)


def _round(value: Any) -> Any:
    """Seven significant digits, and all before the point.

    >>> _round(0.30000000000000004), _round(123456789.25), _round("0.30000000000000004")
    (0.3, 123456789.0, '0.30000000000000004')
    """
    return float(f"{value:.7g}" if abs(value) < 1e7 else f"{value:.0f}") if isinstance(value, float) else value


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
