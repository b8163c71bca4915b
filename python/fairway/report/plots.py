"""Plots to files with matplotlib."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fairway.errors import ConfigError

__all__ = ["draw_lines", "drawing", "save"]

STYLES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "x")


def drawing() -> Any:
    """Returns ``matplotlib.pyplot`` with a headless backend.

    Raises:
        ConfigError: matplotlib is missing.
    """
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ConfigError(
            "plots need matplotlib, which is not installed; try `pip install 'fairway[plots]'`"
        ) from error
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def save(canvas: Any, path: str | os.PathLike[str], dpi: int = 140) -> None:
    """Writes a figure and closes it."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    canvas.savefig(path, dpi=dpi)
    drawing().close(canvas)


def draw_lines(
    axes: Any, rows: list[dict[str, Any]], across: str, names: Iterable[str], value: str
) -> None:
    """Draws a line for each name over ``across``, on logarithmic axes, where rows have a value.

    Args:
        axes: of a plot.
        rows: the points, by column name.
        across: column of the horizontal axis.
        names: columns of the lines.
        value: quantity that the lines show, with its unit.
    """
    for number, name in enumerate(names):
        shown = [row for row in rows if row.get(name) is not None]
        # Overlapping lines are distinguished by dashes and by markers of decreasing size.
        style = "--" if name == "ideal" else STYLES[number % len(STYLES)]
        marker, size = MARKERS[number % len(MARKERS)], max(3, 8 - number)
        places, values = [row[across] for row in shown], [row[name] for row in shown]
        axes.plot(places, values, style, marker=marker, ms=size, mfc="none", label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for axis in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        axis(drawing().FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel(across)
    axes.set_ylabel(value)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
