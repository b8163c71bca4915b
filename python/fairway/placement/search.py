"""Searches for the number of copies of a model, and the devices of each, by training time."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fairway import _native
from fairway.errors import CapacityError, PlacementError
from fairway.placement import PATIENCE
from fairway.placement.graphs import OpGraph

__all__ = [
    "PlacementStrategy",
    "Replication",
    "SearchBounds",
    "SimulatedStep",
    "evaluate_strategy",
    "search_strategies",
    "simulate_graph",
]

QUANTUM_NS = 10_000
"""Target time of a shard. Source: SiP-ML §4.1."""


@dataclasses.dataclass(frozen=True)
class SearchBounds:
    """What bounds a search for placements.

    Attributes:
        memory_bytes: capacity of a device.
        quantum_ns: target time of a shard.
        evaluations: placements of a copy to evaluate, besides those of heuristics.
        seed: the same seed finds the same placement.
        spread_max: maximum devices of a copy; None stops where larger copies gain nothing.
    """

    memory_bytes: int
    quantum_ns: int = QUANTUM_NS
    evaluations: int = 200
    seed: int = 0
    spread_max: int | None = None


@dataclasses.dataclass(frozen=True)
class Replication:
    """A strategy to evaluate.

    Attributes:
        batch: samples of a step, of all copies.
        copies: replicas of the model (data parallelism).
        width: maximum shards of an operation.
        rule: heuristic that places shards; None searches.
    """

    batch: int = 1
    copies: int = 1
    width: int = 1 << 20
    rule: str | None = None


@dataclasses.dataclass(frozen=True)
class PlacementStrategy:
    """A parallelization strategy.

    Attributes:
        batch: samples of a step, of all copies.
        steps: steps of the whole training.
        copies: replicas of the model (data parallelism).
        devices: devices of a copy.
        width: maximum shards of an operation.
        step_s: simulated time of a step.
        estimate_s: predicted time of a copy without network contention.
        bound_s: lower bound over all placements of a copy.
        memory_bytes: peak memory over devices.
        shards: shards of a copy.
        rule: heuristic of its initial placement.
    """

    batch: int
    steps: int
    copies: int
    devices: int
    width: int
    step_s: float
    estimate_s: float
    bound_s: float
    memory_bytes: int
    shards: int
    rule: str

    @property
    def replication(self) -> Replication:
        """What evaluates it again, with a new search for places."""
        return Replication(self.batch, self.copies, self.width)

    @property
    def total_s(self) -> float:
        """Predicted training time."""
        return self.steps * self.step_s


@dataclasses.dataclass(frozen=True)
class SimulatedStep:
    """Result of simulating a step.

    Attributes:
        seconds: makespan.
        busy_s: compute time of each device of a part.
        moved_bytes: bytes transferred between devices of a part, or leaving it.
        changes: circuit reconfigurations.
        events: simulated events (discrete-event simulation).
        places: devices of each operation's shards; empty if nothing was placed.
        estimate_s: predicted time of a copy without network contention; 0 if nothing was placed.
        bound_s: lower bound over all placements of a copy; 0 if nothing was placed.
        graph: of a model that was placed: of one part, or of all devices.
        times_s: start and end of each node.
    """

    seconds: float
    busy_s: list[float]
    moved_bytes: int
    changes: int
    events: int
    places: list[list[int]] = dataclasses.field(default_factory=list)
    estimate_s: float = 0.0
    bound_s: float = 0.0
    graph: _native.StepGraph | None = None
    times_s: list[tuple[float, float]] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, found: dict[str, Any]) -> SimulatedStep:
        """Makes a result of the simulator's output."""
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in found.items() if name in names})


def search_strategies(
    graph: OpGraph,
    interconnect: _native.Interconnect,
    curve: Sequence[tuple[int, int]],
    bounds: SearchBounds,
    *,
    progress: Callable[[int, int], object] | None = None,
    stopped: Callable[[str], object] | None = None,
) -> list[PlacementStrategy]:
    """Finds strategies to train a model on all devices that fit in memory, the fastest first.

    Larger copies take ever longer to place. Unless ``bounds.spread_max`` limits their size, the
    search doubles it, and stops when :data:`fairway.placement.PATIENCE` doublings in a row have
    gained nothing. Differs from the paper, which evaluates all sizes.

    Args:
        graph: the model.
        interconnect: network between the devices.
        curve: batch sizes in samples, and steps to train with each.
        bounds: memory of a device, and budget of the search.
        progress: called with the number of strategies evaluated, and the number known so far.
        stopped: called with the reason if not all sizes of copies were evaluated.

    Raises:
        CapacityError: no strategy fits in memory.
        PlacementError: the model is invalid, or batches and devices have no common divisor.
    """
    known = graph.native()

    def found(largest: int) -> list[PlacementStrategy]:
        with _refused():
            every = interconnect.search_strategies(known, list(curve), bounds, largest, progress)
        strategies = [
            PlacementStrategy(
                batch,
                steps,
                copies,
                interconnect.devices // copies,
                width,
                *times,
                memory,
                shards,
                rule,
            )
            for batch, steps, (copies, width), times, memory, shards, rule in every
        ]
        return sorted(strategies, key=lambda strategy: strategy.total_s)

    if bounds.spread_max:
        strategies = found(bounds.spread_max)
    else:
        strategies = _widened(found, interconnect.devices, stopped)
    if not strategies:
        raise PlacementError(
            "there is no strategy to spread it: batches and devices have no common part"
        )
    return strategies


def _widened(
    found: Callable[[int], list[PlacementStrategy]],
    devices: int,
    stopped: Callable[[str], object] | None,
) -> list[PlacementStrategy]:
    """Returns strategies of the largest size evaluated, doubling it until that gains nothing.

    Raises:
        CapacityError: none fits in memory.
    """
    strategies: list[PlacementStrategy] = []
    full: CapacityError | None = None
    largest, gained = 1, 1
    while True:
        try:
            wider = found(largest)
        except CapacityError as error:
            wider, full = [], error
        if wider and (not strategies or wider[0].total_s < strategies[0].total_s):
            gained = largest
        strategies = wider or strategies
        if largest >= devices:
            break
        if strategies and largest >= gained << PATIENCE:
            if stopped is not None:
                stopped(
                    f"copies on more than {largest} of {devices} devices were not evaluated: none "
                    f"on more than {gained} was faster; --spread-max {devices} evaluates all"
                )
            break
        largest *= 2
    if full is not None and not strategies:
        raise full
    return strategies


def evaluate_strategy(
    graph: OpGraph,
    interconnect: _native.Interconnect,
    strategy: Replication,
    bounds: SearchBounds,
    *,
    whole: bool = False,
) -> SimulatedStep:
    """Places a model by one strategy and simulates its step.

    Args:
        graph: the model.
        interconnect: network between the devices.
        strategy: how the model is replicated and cut.
        bounds: memory of a device, and budget of the search for a placement.
        whole: whether to return the graph of all devices, not that of one part.

    Raises:
        CapacityError: the model does not fit in memory.
        PlacementError: the rule is unknown, or the model is invalid.
    """
    with _refused():
        found = interconnect.evaluate_strategy(graph.native(), strategy, bounds, whole)
    return SimulatedStep.of(found)


def simulate_graph(graph: _native.StepGraph, interconnect: _native.Interconnect) -> SimulatedStep:
    """Simulates a step that is already placed.

    Raises:
        PlacementError: the graph is invalid, or has another number of devices.
    """
    with _refused():
        return SimulatedStep.of(interconnect.flow(graph))


@contextlib.contextmanager
def _refused() -> Iterator[None]:
    """Translates native errors into errors of placement."""
    try:
        yield
    except MemoryError as error:
        raise CapacityError(str(error)) from None
    except (ValueError, OverflowError) as error:
        raise PlacementError(str(error)) from None
