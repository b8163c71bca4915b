"""The network between islands in training: as configured, or as measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fairway._native import StepGraph
from fairway.analysis.topologies import read_topology
from fairway.exchanges import all_gather, all_reduce, reduce_scatter
from fairway.parallel.blocks import AXIS, time_s

__all__ = ["ConfiguredNetwork", "Joined", "Kind", "MeasuredNetwork"]

Kind = Literal["all_reduce", "all_gather", "reduce_scatter"]

REPEATS = 3
NUMBER = 4
"""Bytes of a parameter, where collectives are measured."""

_partition: Any = PartitionSpec


class Joined(Protocol):
    """Adds communication between islands to the step graph that is simulated."""

    @property
    def interconnect(self) -> Any:
        """The interconnect of the step; its first devices are islands."""

    def collective(
        self, step: StepGraph, kind: Kind, members: Sequence[int], size: int, after: Sequence[int]
    ) -> int:
        """Adds a collective of islands on vectors of ``size`` bytes in total."""

    def transfer(
        self, step: StepGraph, source: int, target: int, size: int, after: Sequence[int]
    ) -> int:
        """Adds a transfer of ``size`` bytes from one island to another."""


class ConfiguredNetwork:
    """A configured network: each island sends and receives at a given rate.

    Args:
        islands: number of islands.
        rate: such as ``"10Gbit/s"``.
        latency: of a message, such as ``"100us"``.
    """

    def __init__(self, islands: int, rate: str, latency: str) -> None:
        self.interconnect = read_topology(
            f"elect-flat:{islands},rate={rate},latency={latency}"
        ).interconnect

    def collective(
        self, step: StepGraph, kind: Kind, members: Sequence[int], size: int, after: Sequence[int]
    ) -> int:
        """Adds a collective; its rate depends on concurrent communication."""
        return step.collective(kind, members, size, after)

    def transfer(
        self, step: StepGraph, source: int, target: int, size: int, after: Sequence[int]
    ) -> int:
        """Adds a transfer; its rate depends on concurrent communication."""
        return step.transfer(source, target, size, after)


class MeasuredNetwork:
    """Real islands: each exchange is executed once, and takes its measured time.

    Collectives are serialized, as in training, and so are transfers from one island to another.

    Args:
        islands: devices of each island, the same number on all.
    """

    def __init__(self, islands: Sequence[Sequence[jax.Device]]) -> None:
        count = len(islands)
        self.interconnect = read_topology(f"elect-flat:{count + 1 + count * count}").interconnect
        self._count = count
        self._parted = [
            NamedSharding(Mesh(np.array(devices), (AXIS,)), _partition(AXIS)) for devices in islands
        ]
        self._devices = len(islands[0])
        self._known: dict[tuple[str, int, int], float] = {}

    def collective(
        self, step: StepGraph, kind: Kind, members: Sequence[int], size: int, after: Sequence[int]
    ) -> int:
        """Occupies the network for the measured time."""
        return step.compute(self._count, self._ns(kind, len(members), size), after, name=kind)

    def transfer(
        self, step: StepGraph, source: int, target: int, size: int, after: Sequence[int]
    ) -> int:
        """Occupies the path from the source to the target for the measured time."""
        between = self._count + 1 + source * self._count + target
        return step.compute(between, self._ns("transfer", 2, size), after, name="transfer")

    def _ns(self, kind: str, members: int, size: int) -> int:
        key = (kind, members, size)
        if key not in self._known:
            self._known[key] = self._measure_s(*key)
        return round(1e9 * self._known[key])

    def _measure_s(self, kind: str, members: int, size: int) -> float:
        shardings = self._parted[:members]
        cuts = self._devices * members
        piece = max(1, -(-size // (NUMBER * cuts))) * self._devices

        def zeros(shape: tuple[int, ...], parted: Any) -> Any:
            return jax.device_put(np.zeros(shape, np.float32), parted)

        if kind == "transfer":
            first, second = self._parted[:2]
            moved = zeros((members * piece,), first)
            return time_s(lambda: jax.device_put(moved, second), REPEATS)
        if kind == "all_gather":
            held = [zeros((piece,), parted) for parted in shardings]
            return time_s(lambda: all_gather(held, shardings), REPEATS)
        if kind == "all_reduce":
            whole = [zeros((members * piece,), parted) for parted in shardings]
            return time_s(lambda: all_reduce(whole, shardings), REPEATS)
        behind = [NamedSharding(parted.mesh, _partition(None, AXIS)) for parted in shardings]
        stacked = [zeros((members, piece), one) for one in behind]
        return time_s(lambda: reduce_scatter(stacked, shardings), REPEATS)
