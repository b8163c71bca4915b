"""What joins islands while a model is trained: a network that is given, or as it is measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fairway._native import StepGraph
from fairway.exchanges import all_gather, all_reduce, reduce_scatter
from fairway.parallel.blocks import AXIS, time_s
from fairway.placement.fabrics import read_interconnect

__all__ = ["Joined", "Kind", "Measured", "Said"]

Kind = Literal["all_reduce", "all_gather", "reduce_scatter"]

REPEATS = 3
NUMBER = 4
"""Bytes of a parameter, where collectives are measured."""

_partition: Any = PartitionSpec


class Joined(Protocol):
    """What islands communicate, as nodes of a step that is simulated."""

    @property
    def interconnect(self) -> Any:
        """The fabric of the step; its first devices are islands."""

    def collective(
        self, step: StepGraph, kind: Kind, members: Sequence[int], size: int, after: Sequence[int]
    ) -> int:
        """Adds a collective of islands on vectors of ``size`` bytes, when all are put together."""

    def transfer(
        self, step: StepGraph, source: int, target: int, size: int, after: Sequence[int]
    ) -> int:
        """Adds a transfer of ``size`` bytes from one island to another."""


class Said:
    """A network of which is given what each island sends, and receives.

    Args:
        islands: how many.
        rate: such as ``"10Gbit/s"``.
        latency: of a message, such as ``"100us"``.
    """

    def __init__(self, islands: int, rate: str, latency: str) -> None:
        self.interconnect = read_interconnect(f"elect-flat:{islands},rate={rate},latency={latency}")

    def collective(
        self, step: StepGraph, kind: Kind, members: Sequence[int], size: int, after: Sequence[int]
    ) -> int:
        """Its rate follows from what else is communicated meanwhile."""
        return step.collective(kind, members, size, after)

    def transfer(
        self, step: StepGraph, source: int, target: int, size: int, after: Sequence[int]
    ) -> int:
        """Likewise."""
        return step.transfer(source, target, size, after)


class Measured:
    """Islands that are there: each exchange is carried out, and takes what it took then.

    Collectives go one after another, as they do in training, and so do transfers between two.

    Args:
        islands: devices of each, as many on all.
    """

    def __init__(self, islands: Sequence[Sequence[jax.Device]]) -> None:
        count = len(islands)
        self.interconnect = read_interconnect(f"elect-flat:{count + 1 + count * count}")
        self._count = count
        self._parted = [
            NamedSharding(Mesh(np.array(devices), (AXIS,)), _partition(AXIS)) for devices in islands
        ]
        self._devices = len(islands[0])
        self._known: dict[tuple[str, int, int], float] = {}

    def collective(
        self, step: StepGraph, kind: Kind, members: Sequence[int], size: int, after: Sequence[int]
    ) -> int:
        """Keeps the network busy for as long as it took."""
        return step.compute(self._count, self._ns(kind, len(members), size), after, name=kind)

    def transfer(
        self, step: StepGraph, source: int, target: int, size: int, after: Sequence[int]
    ) -> int:
        """Keeps the path from the source to the target busy."""
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
