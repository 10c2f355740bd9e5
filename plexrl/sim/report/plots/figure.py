"""From a matplotlib figure to SVG that stands in a page: no state of pyplot's, the same bytes each
time, colours that follow the page's light or dark theme, and no text of anybody's in it.
"""

import io
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from plexrl.errors import InvalidRequestError

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.figure import Figure

INK = "#0a0b0c"
"""Stands for the page's text colour."""
GRID = "#0a0b0d"
"""Stands for the page's faint lines."""
GROUND = "#0a0b0e"
"""Stands for what lies under coloured and black bars."""
PAPER = "#0a0b0f"
"""Stands for the page's ground."""
THEME = {
    INK: "currentColor",
    GRID: "var(--grid)",
    GROUND: "var(--ground)",
    PAPER: "var(--paper)",
}
PIXELS_PER_INCH = 96
FONT_END = 0x0500
"""The font has the Latin, Greek and Cyrillic letters below."""
NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}

SETTINGS: dict[str, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": GRID,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.formatter.useoffset": False,
    "figure.constrained_layout.use": True,
    "figure.facecolor": "none",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.8,
    "savefig.facecolor": "none",
    # Letters as outlines: they are where they were measured, whatever fonts the reader has.
    "svg.fonttype": "path",
    # Names are other people's: a dollar sign in them is no formula.
    "text.parse_math": False,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One entry of a plot's legend."""

    label: str
    colour: str
    dash: tuple[float, ...] | None = None
    """Of a line, in points; absent: an area."""
    pale: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One drawing of a plot."""

    svg: "Markup"
    title: str = ""
    """Above it, where a plot has several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """What a page shows in one frame."""

    name: str
    """Of its element in the page."""
    title: str
    says: str
    """One sentence: what is seen, in which units."""
    pictures: "tuple[Picture, ...]"
    keys: tuple[Key, ...] = ()
    wide: bool = False


def draw(
    name: str,
    size: tuple[float, float],
    paint: "Callable[[Figure], None]",
    *,
    describes: str,
    titles: Mapping[str, str] | None = None,
) -> "Markup":
    """SVG of `size` inches that `paint` has drawn. `describes` is read out in its place; `titles`
    are shown where the pointer rests on the artist of that gid.

    Raises:
        InvalidRequestError: matplotlib or jinja2 is not installed.
    """
    try:
        from matplotlib import style
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing_package(error) from error
    target = io.StringIO()
    # Whatever the reader's matplotlibrc says, the picture is the same.
    with style.context(["default", {**SETTINGS, "svg.hashsalt": name}]):
        figure = Figure(figsize=size)
        FigureCanvasSVG(figure)
        paint(figure)
        figure.savefig(target, format="svg", dpi=2 * PIXELS_PER_INCH, metadata=NO_METADATA)
    return _inlined(target.getvalue(), name, describes, titles or {})


def plain(text: str, length: int = 28) -> str:
    """`text` as far as it has letters in the plots' font, cut to `length`."""
    kept = "".join(
        letter if letter.isprintable() and ord(letter) < FONT_END else "?" for letter in text
    )
    return kept if len(kept) <= length else kept[: length - 1] + "…"


def missing_package(error: ImportError) -> InvalidRequestError:
    """What to do where the report's packages are not there."""
    return InvalidRequestError(
        f"the report needs matplotlib and jinja2 ({error}): pip install 'plexrl[simulator]'"
    )


def _inlined(svg: str, name: str, describes: str, titles: Mapping[str, str]) -> "Markup":
    from markupsafe import Markup, escape

    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.DOTALL)
    # Several pictures share the page, so ids get the picture's name in front.
    svg = re.sub(r'(\bid="|"#|url\(#)', rf"\g<1>{name}-", svg)
    for stand_in, colour in THEME.items():
        svg = svg.replace(stand_in, colour)
    box = re.search(r'viewBox="[^"]*"', svg)
    assert box is not None, "matplotlib's SVG has no viewBox"
    head = f'<svg class="plot" {box[0]} role="img" aria-label="{escape(describes)}">'
    svg = head + svg[svg.index(">") + 1 :]
    for gid, title in titles.items():
        group = f'<g id="{name}-{gid}">'
        svg = svg.replace(group, f"{group}<title>{escape(title)}</title>")
    return Markup(re.sub(r"\n\s*", "\n", svg))
