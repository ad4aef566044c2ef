"""The style of plots, and their files.

Text and lines are drawn in one ink: the text colour of an HTML page, and a dark colour on white in files. Other colours
have a medium brightness, so that they are visible on light and dark backgrounds.
"""

import io
import re
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from bench.claims.claim import Plot

BLUE, ORANGE, GREEN, RED, PURPLE, GREY = "#3d84c6", "#e08b2c", "#2f9e74", "#d24b5e", "#8f6fc4", "#8b929c"
MODE_COLOURS = {"continuous": BLUE, "dynamic": ORANGE, "static": RED}
MEMORY_COLOURS = {
    "contiguous": RED,
    "contiguous-power-of-two": ORANGE,
    "contiguous-exact": PURPLE,
    "paged": BLUE,
}
MEMORY_NAMES = tuple(MEMORY_COLOURS)
KIND_COLOURS = {"used": BLUE, "reserved": ORANGE, "internal": RED, "external": GREY}

INK = "#1f2328"
_PNG_DPI = 130
_STYLE: Any = {
    "font.size": 10,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GREY,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "svg.hashsalt": "quire",  # the same data give the same names
    "svg.fonttype": "path",
}
# Names in the SVG and references to them: plots on one page must not share names.
_SVG_NAMES = re.compile(r'(\bid="|href="#|url\(#)')
_SVG_NAMESPACES = re.compile(r'\s+xmlns(:\w+)?="[^"]*"')
_SVG_METADATA = re.compile(r"<metadata>.*?</metadata>", re.DOTALL)


def save(plot: Plot, directory: Path) -> None:
    """Writes NAME.png on white. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    with rc_context(_STYLE):
        _drawn(plot).savefig(directory / f"{plot.name}.png", dpi=_PNG_DPI, facecolor="white")


def inline_svg(plot: Plot) -> str:
    """Returns an `<svg>` element for an HTML page: without background, in the page's ink, with unique names."""
    buffer = io.StringIO()
    with rc_context(_STYLE):
        _drawn(plot).savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = _SVG_METADATA.sub("", svg[svg.index("<svg") :])
    svg = _SVG_NAMESPACES.sub("", svg)
    svg = _SVG_NAMES.sub(rf"\g<1>{plot.name}-", svg)
    return svg.replace(INK, "currentColor").strip()


def _drawn(plot: Plot) -> Figure:
    figure = Figure(figsize=plot.size, layout="constrained")
    FigureCanvasAgg(figure)
    plot.draw(figure)
    return figure


def percent_axis(axes: Axes, label: str) -> None:
    """Makes the vertical axis count percent from 0 to 100."""
    axes.set_ylabel(label)
    axes.set_ylim(0, 100)


def powers_axis(axes: Axes, values: list[int], label: str) -> None:
    """Makes the horizontal axis logarithmic, with ticks at the measured values only."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, [str(value) for value in values])
    axes.minorticks_off()
    axes.set_xlabel(label)
