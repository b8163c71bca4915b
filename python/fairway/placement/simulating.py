"""Simulates a training step on an interconnect: of a model, or of a placed graph.

Source: SiP-ML §4.2.
"""

from __future__ import annotations

import re
import reprlib
import time
from pathlib import Path

from fairway.analysis.topologies import read_topology
from fairway.errors import PlacementError
from fairway.formats.chakra_steps import rescaled
from fairway.placement import NAMES, STEPS
from fairway.placement.models import MODELS, SAMPLES, V100
from fairway.placement.reading import is_graph, read_graph
from fairway.placement.search import (
    Replication,
    SearchBounds,
    evaluate_strategy,
    search_strategies,
    simulate_graph,
)
from fairway.report.carried import CarriedStep

__all__ = ["is_step", "simulate_step"]


def is_step(what: str) -> bool:
    """Does a text name a training step, rather than a workload of chips and links?"""
    try:
        return what.partition(":")[0] in NAMES or is_graph(Path(what))
    except OSError:  # no name of a file
        return False


def simulate_step(fabric: str, what: str) -> CarriedStep:
    """Simulates one step; returns its metrics and a timeline of its devices.

    Args:
        fabric: such as ``sip-ring:1024``; see :mod:`fairway.analysis.topologies`.
        what: one of :data:`fairway.placement.STEPS`; without a number of copies, the best is found.

    Raises:
        PlacementError: the fabric or model is unknown, or the model does not fit in memory.
        GraphError: a file holds no graph.
    """
    interconnect = read_topology(fabric).interconnect
    begin = time.perf_counter()
    figures: dict[str, float | int | str] = {}
    if is_graph(Path(what)):
        step = read_graph(Path(what))
        if Path(what).is_dir():
            step = rescaled(step, interconnect.devices)
        figures["tasks"] = len(step)
        figures["read in"] = time.perf_counter() - begin
        begin = time.perf_counter()
        carried = simulate_graph(step, interconnect)
    else:
        found = re.fullmatch(r"([a-z0-9]+):(\d{1,9})(?:/(\d{1,9}))?", what)
        if found is None or found[1] not in MODELS:
            raise PlacementError(
                f"there is no step {reprlib.repr(what)}; there are {', '.join(STEPS)}"
            )
        batch = int(found[2])
        if min(int(number) for number in found.groups()[1:] if number) < 1:
            raise PlacementError(
                f"{reprlib.repr(what)} has a batch of {batch} and {found[3] or 'any number of'} "
                "copies; expected at least 1"
            )
        graph = MODELS[found[1]]().graph(V100, SAMPLES)
        bounds = SearchBounds(V100.memory_bytes)
        if found[3] is None:
            strategy = search_strategies(graph, interconnect, [(batch, 1)], bounds)[0]
            copies, width = strategy.copies, strategy.width
        else:
            copies, width = int(found[3]), interconnect.devices
        carried = evaluate_strategy(graph, interconnect, Replication(batch, copies, width), bounds)
        assert carried.graph is not None
        step = carried.graph
        figures["copies"] = copies
        figures["devices of each"] = interconnect.devices // copies
        figures["shards of an operation at most"] = min(width, interconnect.devices // copies)
        figures["lower bound of a copy"] = carried.bound_s
    figures["takes"] = carried.seconds
    busy = sum(carried.busy_s) / len(carried.busy_s) / max(carried.seconds, 1e-12)
    figures["device utilisation"] = f"{busy:.1%}"
    figures["bytes transferred"] = carried.moved_bytes
    if carried.changes:
        figures["circuit reconfigurations"] = carried.changes
    figures["simulated in"] = time.perf_counter() - begin
    return CarriedStep(figures, step, carried.times_s)
