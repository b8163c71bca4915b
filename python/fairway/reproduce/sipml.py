"""SiP-ML's Figure 5 and its claims, simulated: models as described in public, fabrics of §4.1.

Its profiles are published nowhere, so models are described layer by layer
(:mod:`fairway.placement.models`), which says what is assumed. So who wins where, and by what, can
be compared with the paper, not how many minutes training takes.

Source: SiP-ML §4.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fairway.placement.fabrics import read_interconnect
from fairway.placement.graphs import OpGraph
from fairway.placement.models import MODELS, V100, Model
from fairway.placement.search import Limits, Way, spread
from fairway.report.plots import draw_lines
from fairway.reproduce import Figure, Progress, check_figures, write_figure

__all__ = ["FIGURES", "Figure", "reproduce"]

GPUS = 1024
GIGABITS = tuple(2**power for power in range(7, 14))
BATCHES = tuple(2**power for power in range(16))
"""Samples of a copy for which models are described."""
SPREAD_MAX = 64
"""Most devices of a copy. Assumed, as longer chains of transfers gain nothing for these models."""
LIMITS = Limits(evaluations=30)
LATENCY = "1us"
OPTICAL = {"resnet50": "5a", "transformer": "5b", "megatron": "5c"}
FABRICS = {
    "Elect-Cluster 200": "elect-cluster:{gpus},rate={gbit}Gbit/s,server=200Gbit/s",
    "Elect-Cluster 400": "elect-cluster:{gpus},rate={gbit}Gbit/s,server=400Gbit/s",
    "Elect-Flat": "elect-flat:{gpus},rate={gbit}Gbit/s",
    "SiP-OCS": "sip-ocs:{gpus},rate={gbit}Gbit/s",
    "SiP-Ring": "sip-ring:{gpus},wavelengths={wavelengths},wavelength={each}Gbit/s",
}
DATA_PARALLEL = "Elect-Flat (DP)"


def _interconnect(fabric: str, gbit: float, gpus: int) -> Any:
    # Fewer than two wavelengths each way are no ring: what is slow has slower ones.
    wavelengths = max(8, round(gbit / 25))
    given = {"gpus": gpus, "gbit": gbit, "wavelengths": wavelengths, "each": gbit / wavelengths}
    return read_interconnect(FABRICS[fabric].format(**given))


@functools.lru_cache
def _model(name: str) -> tuple[Model, OpGraph]:
    model = MODELS[name]()
    return model, model.graph(V100, BATCHES)


def best(
    name: str, fabric: str, gbit: float, gpus: int = GPUS, *, spread_max: int = SPREAD_MAX
) -> Way | None:
    """The way to train a model that is done first; none if none fits."""
    from fairway.errors import PlacementError

    model, graph = _model(name)
    try:
        return spread(
            graph,
            _interconnect(fabric, gbit, gpus),
            list(model.curve),
            V100.memory_bytes,
            spread_max=spread_max,
            limits=LIMITS,
        )[0]
    except PlacementError:
        return None


def _figure_5(name: str, progress: Progress) -> Figure:
    rows = []
    for gbit in GIGABITS:
        row: dict[str, Any] = {"Gbit/s": gbit}
        for fabric in FABRICS:
            progress(f"Figure {OPTICAL[name]}: {name}, {fabric}, {gbit} Gbit/s")
            way = best(name, fabric, gbit)
            row[fabric] = way.total_s / 60 if way else None
            row[f"{fabric}: copies"] = way.copies if way else None
        way = best(name, "Elect-Flat", gbit, spread_max=1)
        row[DATA_PARALLEL] = way.total_s / 60 if way else None
        rows.append(row)
    gains = [
        row[slow] / row[fast]
        for row in rows
        for slow in ("Elect-Cluster 200", "Elect-Cluster 400")
        for fast in ("SiP-OCS", "SiP-Ring")
        if row[slow] and row[fast]
    ]
    last = rows[-1]
    over_copies = last[DATA_PARALLEL] and last[DATA_PARALLEL] / last["Elect-Flat"]
    halves = [
        half["Elect-Flat"] / row[fast]
        for half, row in itertools.pairwise(rows)
        for fast in ("SiP-OCS", "SiP-Ring")
        if half["Elect-Flat"] and row[fast]
    ]
    copies = f"{over_copies:.2f}" if over_copies else "that does not fit"
    return Figure(
        OPTICAL[name],
        f"minutes to train {name} on {GPUS} GPUs",
        rows,
        f"optical fabrics take {min(gains):.2f} to {max(gains):.2f} times less than clusters "
        f"(paper: 1.3 to 9.1 over all models); copies alone take {copies} times what is best on a "
        f"flat switch of {last['Gbit/s']} Gbit/s (paper: up to 2); an ideal switch of half the "
        f"rate takes {min(halves):.2f} to {max(halves):.2f} times as long as "
        "optical ones (paper: no less)",
    )


def figure_scale(progress: Progress) -> Figure:
    """What it takes to find the best way, as GPUs grow."""
    rows = []
    for gpus in (8, 32, 128, 512, 1024, 2048, 4096, 8192):
        row: dict[str, Any] = {"GPUs": gpus}
        for fabric in ("Elect-Flat", "Elect-Cluster 400", "SiP-OCS", "SiP-Ring"):
            progress(f"cost of the search: {fabric}, {gpus} GPUs")
            begin = time.perf_counter()
            best("transformer", fabric, 2048, gpus)
            row[fabric] = time.perf_counter() - begin
        rows.append(row)
    most = max(value for name, value in rows[-1].items() if name != "GPUs")
    return Figure(
        "scale",
        "seconds to find the best way",
        rows,
        f"on {rows[-1]['GPUs']} GPUs a search takes at most {most:.1f} s",
    )


FIGURES: dict[str, Callable[[Progress], Figure]] = {
    **{number: functools.partial(_figure_5, name) for name, number in OPTICAL.items()},
    "scale": figure_scale,
}


def reproduce(directory: Path, names: Sequence[str], progress: Progress) -> Iterator[Figure]:
    """Makes figures one after another, as JSON and as plots.

    Raises:
        ConfigError: a figure is not known, before any is made.
    """
    check_figures(names, FIGURES)
    directory.mkdir(parents=True, exist_ok=True)
    for name in names:
        figure = FIGURES[name](progress)
        write_figure(directory / f"sipml-{name}", figure, {"gpus": GPUS}, "SiP-ML", _draw)
        yield figure


def _draw(axes: Any, rows: list[dict[str, Any]]) -> None:
    across, *names = (name for name in rows[0] if not name.endswith(": copies"))
    draw_lines(axes, rows, across, names)
