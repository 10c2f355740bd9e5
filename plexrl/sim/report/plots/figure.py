"""Renders a matplotlib figure as inline SVG, without pyplot's global state.

Equal figures give equal bytes. Colours follow the page's light or dark theme. Text becomes
outlines.
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
"""Placeholder of the page's text colour."""
GRID = "#0a0b0d"
"""Placeholder of the page's grid colour."""
GROUND = "#0a0b0e"
"""Placeholder of the background of bars."""
PAPER = "#0a0b0f"
"""Placeholder of the page's background."""
THEME = {
    INK: "currentColor",
    GRID: "var(--grid)",
    GROUND: "var(--ground)",
    PAPER: "var(--paper)",
}
PIXELS_PER_INCH = 96
FONT_END = 0x0500
"""First character after the Latin, Greek and Cyrillic letters of the font."""
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
    # Text as outlines has the measured size whatever fonts the reader has.
    "svg.fonttype": "path",
    # A dollar sign in a user's name does not begin a formula.
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
    """Dash pattern of a line, in points; absent: an area."""
    pale: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One drawing of a plot."""

    svg: "Markup"
    title: str = ""
    """Title above the picture, if the plot has several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """One frame of the page."""

    name: str
    """Name of its element in the page."""
    title: str
    says: str
    """The caption: contents and units."""
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
    """SVG of `size` inches, drawn by `paint`. `describes`: text for screen readers. `titles`:
    tooltips of artists, by gid.

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
    # The picture is independent of the user's matplotlibrc.
    with style.context(["default", {**SETTINGS, "svg.hashsalt": name}]):
        figure = Figure(figsize=size)
        FigureCanvasSVG(figure)
        paint(figure)
        figure.savefig(target, format="svg", dpi=2 * PIXELS_PER_INCH, metadata=NO_METADATA)
    return _inline(target.getvalue(), name, describes, titles or {})


def plain(text: str, length: int = 28) -> str:
    """`text` with characters outside the plots' font replaced by `?`, cut to `length`."""
    kept = "".join(
        letter if letter.isprintable() and ord(letter) < FONT_END else "?" for letter in text
    )
    return kept if len(kept) <= length else kept[: length - 1] + "…"


def missing_package(error: ImportError) -> InvalidRequestError:
    """The error for missing report packages."""
    return InvalidRequestError(
        f"the report needs matplotlib and jinja2 ({error}): pip install 'plexrl[simulator]'"
    )


def _inline(svg: str, name: str, describes: str, titles: Mapping[str, str]) -> "Markup":
    from markupsafe import Markup, escape

    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.DOTALL)
    # Several pictures share the page, so ids get the picture's name as a prefix.
    svg = re.sub(r'(\bid="|"#|url\(#)', rf"\g<1>{name}-", svg)
    for placeholder, colour in THEME.items():
        svg = svg.replace(placeholder, colour)
    box = re.search(r'viewBox="[^"]*"', svg)
    assert box is not None, "matplotlib's SVG has no viewBox"
    head = f'<svg class="plot" {box[0]} role="img" aria-label="{escape(describes)}">'
    svg = head + svg[svg.index(">") + 1 :]
    for gid, title in titles.items():
        group = f'<g id="{name}-{gid}">'
        svg = svg.replace(group, f"{group}<title>{escape(title)}</title>")
    return Markup(re.sub(r"\n\s*", "\n", svg))
