"""How often a model is copied, and on how many devices each copy is spread: what is done first."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fairway import _native
from fairway.errors import CapacityError, PlacementError
from fairway.placement import PATIENCE
from fairway.placement.graphs import OpGraph

__all__ = ["Carried", "Limits", "Way", "carry_out", "carry_out_graph", "spread"]

QUANTUM_NS = 10_000
"""About what a shard takes. Source: SiP-ML §4.1."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """How long to look.

    Attributes:
        evaluations: placements of a copy that are looked at, besides those of rules.
        seed: the same finds the same.
    """

    evaluations: int = 200
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to train.

    Attributes:
        batch: samples of a step, of all copies.
        steps: that it takes.
        copies: of the model.
        devices: of a copy.
        width: into how many shards an operation is cut at most.
        step_s: a step, carried out in virtual time.
        estimate_s: a copy's, when nothing waits to be sent.
        bound_s: no placement of a copy takes less.
        memory_bytes: the most that a device holds.
        shards: of a copy.
        rule: what its placement began with.
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
    def total_s(self) -> float:
        """All steps."""
        return self.steps * self.step_s


@dataclasses.dataclass(frozen=True)
class Carried:
    """What came of a step.

    Attributes:
        seconds: of all of it.
        busy_s: how long each device of a part computes.
        moved_bytes: between devices of a part, or leaving it.
        changes: of circuits.
        events: that were simulated.
        places: of each operation, the devices of its shards; none if nothing was placed.
        estimate_s: a copy's, when nothing waits to be sent; 0 likewise.
        bound_s: no placement of a copy takes less; 0 likewise.
        graph: of a model that was placed: of one part, or of all devices.
        times_s: when each node began, and when it was over.
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
    def of(cls, found: dict[str, Any]) -> Carried:
        """What the simulator found."""
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in found.items() if name in names})


def spread(
    graph: OpGraph,
    interconnect: _native.Interconnect,
    curve: Sequence[tuple[int, int]],
    memory_bytes: int,
    *,
    quantum_ns: int = QUANTUM_NS,
    spread_max: int | None = None,
    limits: Limits = Limits(),
    progress: Callable[[int, int], object] | None = None,
    stopped: Callable[[str], object] | None = None,
) -> list[Way]:
    """Ways to train a model on all devices that fit, the one that is done first in front.

    Larger copies cost ever more to place. Unless ``spread_max`` says how large they may be, the
    search widens them, and stops when :data:`fairway.placement.PATIENCE` doublings in a row have
    gained nothing. Differs from the paper, which looks at all.

    Args:
        graph: the model.
        interconnect: what joins devices.
        curve: samples of a step, and how many steps they take to train.
        memory_bytes: of a device.
        quantum_ns: about what a shard takes.
        spread_max: most devices of a copy; none stops where larger copies gain nothing.
        limits: how long to look for places.
        progress: is called with the number of ways that were evaluated, and of all so far.
        stopped: is called with the reason if not all sizes of copies were evaluated.

    Raises:
        CapacityError: no way fits.
        PlacementError: the model makes no sense.
    """
    known = graph.native()
    devices = interconnect.devices

    def found(largest: int) -> list[Way]:
        with _refused():
            every = interconnect.spread(
                known,
                list(curve),
                memory_bytes,
                quantum_ns,
                largest,
                (limits.evaluations, limits.seed),
                progress,
            )
        ways = [
            Way(batch, steps, copies, devices // copies, width, *times, memory, shards, rule)
            for batch, steps, (copies, width), times, memory, shards, rule in every
        ]
        return sorted(ways, key=lambda way: way.total_s)

    ways = found(spread_max) if spread_max else _widened(found, devices, stopped)
    if not ways:
        raise PlacementError(
            "there is no way to spread it: batches and devices have no common part"
        )
    return ways


def _widened(
    found: Callable[[int], list[Way]], devices: int, stopped: Callable[[str], object] | None
) -> list[Way]:
    """Ways with copies on ever more devices, until that gains nothing.

    Raises:
        CapacityError: none fits.
    """
    ways: list[Way] = []
    full: CapacityError | None = None
    largest, gained = 1, 1
    while True:
        try:
            wider = found(largest)
        except CapacityError as error:
            wider, full = [], error
        if wider and (not ways or wider[0].total_s < ways[0].total_s):
            gained = largest
        ways = wider or ways
        if largest >= devices:
            break
        if ways and largest >= gained << PATIENCE:
            if stopped is not None:
                stopped(
                    f"copies on more than {largest} of {devices} devices were not evaluated: none "
                    f"on more than {gained} was faster; --spread-max {devices} evaluates all"
                )
            break
        largest *= 2
    if full is not None and not ways:
        raise full
    return ways


def carry_out(
    graph: OpGraph,
    interconnect: _native.Interconnect,
    batch: int,
    copies: int,
    memory_bytes: int,
    *,
    quantum_ns: int = QUANTUM_NS,
    limits: Limits = Limits(),
    rule: str | None = None,
    width: int = 1 << 20,
    whole: bool = False,
) -> Carried:
    """One way, carried out in virtual time.

    Args:
        graph: the model.
        interconnect: what joins devices.
        batch: samples of a step, of all copies.
        copies: of the model.
        memory_bytes: of a device.
        quantum_ns: about what a shard takes.
        limits: how long to look for places.
        rule: by which shards are placed; as well as can be found, if nobody says.
        width: into how many shards an operation is cut at most.
        whole: whether the graph of all devices is wanted, not that of one part.

    Raises:
        CapacityError: it does not fit.
        PlacementError: there is no such rule, or the model makes no sense.
    """
    with _refused():
        found = interconnect.carry_out(
            graph.native(),
            batch,
            (copies, width),
            memory_bytes,
            quantum_ns,
            (limits.evaluations, limits.seed),
            rule,
            whole,
        )
    return Carried.of(found)


def carry_out_graph(graph: _native.StepGraph, interconnect: _native.Interconnect) -> Carried:
    """A step whose devices are set, simulated.

    Raises:
        PlacementError: it makes no sense, or is not of as many devices as there are.
    """
    with _refused():
        return Carried.of(interconnect.flow(graph))


@contextlib.contextmanager
def _refused() -> Iterator[None]:
    """What makes no sense is said by an error of ours."""
    try:
        yield
    except MemoryError as error:
        raise CapacityError(str(error)) from None
    except (ValueError, OverflowError) as error:
        raise PlacementError(str(error)) from None
