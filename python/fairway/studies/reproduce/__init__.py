"""Reproduction of the papers' figures."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from fairway.errors import ConfigError
from fairway.report.plots import drawing, save

__all__ = ["Figure", "Progress", "check_figures", "write_figure"]

Progress = Callable[[str], None]
"""Callback with a description of the current stage."""


@dataclasses.dataclass(frozen=True)
class Figure:
    """One figure.

    Attributes:
        name: its number in the paper.
        title: what it shows.
        rows: the points, by column name.
        summary: the result, compared with the paper's figure.
    """

    name: str
    title: str
    rows: list[dict[str, Any]]
    summary: str


def write_figure(
    path: Path,
    figure: Figure,
    more: Mapping[str, Any],
    paper: str,
    draw: Callable[[Any, list[dict[str, Any]]], None] | None,
) -> None:
    """Writes ``path`` with ``.json``, and with ``.png`` if ``draw`` is given."""
    record = {"simulated": True, **more, **dataclasses.asdict(figure)}
    path.with_suffix(".json").write_text(json.dumps(record, indent=1))
    if draw is None:
        return
    pyplot = drawing()
    canvas, axes = pyplot.subplots(figsize=(7.5, 4.3), layout="constrained")
    draw(axes, figure.rows)
    axes.set_title(f"{paper} Figure {figure.name}, simulated: {figure.title}", fontsize=9)
    save(canvas, path.with_suffix(".png"))


def check_figures(names: Iterable[str], known: Collection[str]) -> None:
    """Checks the names of figures before any of them is made.

    Raises:
        ConfigError: a figure is unknown.
    """
    for name in names:
        if name not in known:
            raise ConfigError(f"there is no figure {name!r}; there are {', '.join(known)}")
