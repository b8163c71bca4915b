"""SiP-ML's Figure 5 and its claims, simulated: models as published, fabrics of §4.1.

Its profiles are not published, so models are described layer by layer
(:mod:`fairway.placement.models`), with their assumptions. So the ranking of fabrics and their
ratios can be compared with the paper, not training times in minutes. Where results differ, and why:

1. ResNet-50 gains less on optical fabrics. Its 25 million parameters are 51 MB of 16-bit gradients
   here; the paper's public scripts assume 250 MB.
2. Megatron takes 8,600 minutes at least. Its 18 billion parameters need 1.1e17 operations a step, 2
   s on 1,024 V100s at 45 % of their peak; the paper's 1,000 minutes would be 3.5 times that peak.
3. The ring is slower than switches, most at low rates, and so behind an ideal switch of half its
   rate except with pure data parallelism. The all-reduce of gradients crosses every segment with
   twice their size, whatever the number of parts of a copy; in the paper's simulator a shard is
   sent to the next copy once.
4. Faster reconfiguration of switches gains next to nothing, as the paper found at 30 ms: the
   traffic of a step is known in advance, and circuits are configured for all of it.

Source: SiP-ML §4.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fairway.analysis.topologies import read_topology
from fairway.errors import CapacityError
from fairway.placement.graphs import OpGraph
from fairway.placement.models import MODELS, SAMPLES, V100, Model
from fairway.placement.search import (
    PlacementStrategy,
    SearchBounds,
    evaluate_strategy,
    search_strategies,
)
from fairway.report.plots import draw_lines
from fairway.studies.reproduce import Figure, Progress, check_figures, write_figure

__all__ = ["FIGURES", "Figure", "reproduce"]

GPUS = 1024
GIGABITS = tuple(2**power for power in range(7, 14))
SPREAD_MAX = 64
"""Maximum devices of a copy. Assumed, as longer chains of transfers gain nothing for these
models."""
BOUNDS = SearchBounds(V100.memory_bytes, evaluations=30)
DELAYS_US = (25, 100, 1_000, 10_000, 30_000)
"""Reconfiguration delays of circuit switches."""
INTERVALS = 4
"""Minimum interval between reconfigurations, in delays."""
MODEL_FIGURES = {"resnet50": "5a", "transformer": "5b", "megatron": "5c"}
FABRICS = {
    "Elect-Cluster 200": "elect-cluster:{gpus},rate={gbit}Gbit/s,server=200Gbit/s",
    "Elect-Cluster 400": "elect-cluster:{gpus},rate={gbit}Gbit/s,server=400Gbit/s",
    "Elect-Flat": "elect-flat:{gpus},rate={gbit}Gbit/s",
    "SiP-OCS": "sip-ocs:{gpus},rate={gbit}Gbit/s",
    "SiP-Ring": "sip-ring:{gpus},wavelengths={wavelengths},wavelength={each}Gbit/s",
}
OPTICAL = ("SiP-OCS", "SiP-Ring")
DATA_PARALLEL = "Elect-Flat (DP)"


def _interconnect(fabric: str, gbit: float, gpus: int) -> Any:
    # A ring needs at least two wavelengths in each direction: low rates use slower wavelengths.
    wavelengths = max(8, round(gbit / 25))
    given = {"gpus": gpus, "gbit": gbit, "wavelengths": wavelengths, "each": gbit / wavelengths}
    return read_topology(FABRICS[fabric].format(**given)).interconnect


@functools.lru_cache
def _model(name: str) -> tuple[Model, OpGraph]:
    model = MODELS[name]()
    return model, model.graph(V100, SAMPLES)


def best(
    name: str, fabric: str, gbit: float, gpus: int = GPUS, *, spread_max: int = SPREAD_MAX
) -> PlacementStrategy | None:
    """Returns the strategy with the shortest training time; None if none fits in memory."""
    model, graph = _model(name)
    try:
        bounds = dataclasses.replace(BOUNDS, spread_max=spread_max)
        interconnect = _interconnect(fabric, gbit, gpus)
        return search_strategies(graph, interconnect, list(model.curve), bounds)[0]
    except CapacityError:
        return None


def _figure_5(name: str, progress: Progress) -> Figure:
    points = [(gbit, fabric) for gbit in GIGABITS for fabric in (*FABRICS, DATA_PARALLEL)]

    def found(point: tuple[int, str]) -> PlacementStrategy | None:
        gbit, fabric = point
        if fabric == DATA_PARALLEL:
            return best(name, "Elect-Flat", gbit, spread_max=1)
        return best(name, fabric, gbit)

    # The search releases the GIL, so threads suffice to use all cores.
    strategies = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for point, strategy in zip(points, pool.map(found, points), strict=True):
            progress(f"Figure {MODEL_FIGURES[name]}: {name}, {point[1]}, {point[0]} Gbit/s")
            strategies[point] = strategy
    rows = []
    for gbit in GIGABITS:
        row: dict[str, Any] = {"Gbit/s": gbit}
        for fabric in (*FABRICS, DATA_PARALLEL):
            strategy = strategies[gbit, fabric]
            row[fabric] = strategy.total_s / 60 if strategy else None
            row[f"{fabric}: copies"] = strategy.copies if strategy else None
        rows.append(row)
    return Figure(
        MODEL_FIGURES[name], f"minutes to train {name} on {GPUS} GPUs", rows, _claims(rows)
    )


def _claims(rows: list[dict[str, Any]]) -> str:
    """Formats SiP-ML's claims (§4) with the values of these rows."""

    def ratios(slow: str, fast: str, shift: int = 0) -> list[float]:
        pairs = zip(rows, rows[shift:], strict=False)
        return [one[slow] / other[fast] for one, other in pairs if one[slow] and other[fast]]

    def between(values: Sequence[float]) -> str:
        return f"{min(values):.2f} to {max(values):.2f}" if values else "none"

    clusters = ("Elect-Cluster 200", "Elect-Cluster 400")
    fastest = [row[slow] / row[fast] for row in rows[-1:] for slow in clusters for fast in OPTICAL]
    gains = [gain for slow in clusters for fast in OPTICAL for gain in ratios(slow, fast)]
    halves = {fast: between(ratios("Elect-Flat", fast, 1)) for fast in OPTICAL}
    copies = ratios(DATA_PARALLEL, "Elect-Flat")
    alone = (
        f"copies alone take {between(copies)} times what is best on a flat switch"
        if copies
        else "copies alone do not fit"
    )
    return (
        f"(i) optical fabrics take {between(fastest)} times less than clusters at "
        f"{rows[-1]['Gbit/s']} Gbit/s, {between(gains)} at all rates (paper: 1.3 to 9.1); (ii) the "
        f"ring takes {between(ratios('SiP-Ring', 'SiP-OCS'))} times as long as switches (paper: "
        f"about 1); (iii) an ideal switch of half the rate takes {halves['SiP-OCS']} times as long "
        f"as circuit switches, {halves['SiP-Ring']} times as long as the ring (paper: no less); "
        f"(iv) {alone} (paper: up to 2)"
    )


def figure_scale(progress: Progress) -> Figure:
    """Search time for the best strategy, by number of GPUs."""
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
        "seconds to find the best strategy",
        rows,
        f"on {rows[-1]['GPUs']} GPUs a search takes at most {most:.1f} s",
    )


def figure_delays(progress: Progress) -> Figure:
    """Gain of reconfiguring circuits during a step, by reconfiguration delay."""
    strategies = {}
    for name in MODEL_FIGURES:
        progress(f"circuits set once: {name}")
        strategy = best(name, "SiP-OCS", GIGABITS[-1])
        if strategy is not None:
            strategies[name] = strategy
    rows = []
    for delay_us in DELAYS_US:
        row: dict[str, Any] = {"us": delay_us}
        every_us = max(100, INTERVALS * delay_us)
        text = f"{FABRICS['SiP-OCS']},every={every_us}us,delay={delay_us}us"
        interconnect = read_topology(text.format(gpus=GPUS, gbit=GIGABITS[-1])).interconnect
        for name, strategy in strategies.items():
            progress(f"circuits that change in {delay_us} us: {name}")
            graph = _model(name)[1]
            carried = evaluate_strategy(graph, interconnect, strategy.replication, BOUNDS)
            row[name] = strategy.step_s / carried.seconds
        rows.append(row)
    gains = [[row[name] for name in strategies] for row in (rows[0], rows[-1])]
    fast, slow = (f"{min(gain):.3f} to {max(gain):.3f}" for gain in gains)
    return Figure(
        "delays",
        f"times as fast as with circuits that are set once, {GIGABITS[-1]} Gbit/s",
        rows,
        f"a step is {fast} times as fast if switches change within {DELAYS_US[0]} us, and {slow} "
        f"times if that takes {DELAYS_US[-1] / 1000:.0f} ms (paper: set once where it does)",
    )


FIGURES: dict[str, Callable[[Progress], Figure]] = {
    **{number: functools.partial(_figure_5, name) for name, number in MODEL_FIGURES.items()},
    "scale": figure_scale,
    "delays": figure_delays,
}


def reproduce(directory: Path, names: Sequence[str], progress: Progress) -> Iterator[Figure]:
    """Reproduces figures one after another, as JSON and as plots.

    Raises:
        ConfigError: a figure is unknown; raised before any is made.
    """
    check_figures(names, FIGURES)
    directory.mkdir(parents=True, exist_ok=True)
    for name in names:
        figure = FIGURES[name](progress)
        draw = functools.partial(_draw, VALUES.get(name, "minutes to train"))
        write_figure(directory / f"sipml-{name}", figure, {"gpus": GPUS}, "SiP-ML", draw)
        yield figure


VALUES = {"scale": "seconds of the search", "delays": "times as fast as set once"}
"""Quantities of figures that do not show training times."""


def _draw(value: str, axes: Any, rows: list[dict[str, Any]]) -> None:
    across, *names = (name for name in rows[0] if not name.endswith(": copies"))
    draw_lines(axes, rows, across, names, value)
