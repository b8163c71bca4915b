"""Collectives over groups of devices, as commands describe them."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np

from fairway.host.collectives import LoweredExchange
from fairway.host.moves import Places, Spec

__all__ = ["KINDS", "Given", "Made", "OverGroups", "Peer"]

Given = list[tuple[list[int], list[int]]]
"""The buffers of each group of arguments, and the numbers of their shards on this host."""
Made = list[tuple[list[tuple[int, Spec]], list[int]]]
"""The same of the results, with their specifications."""
Peer = tuple[int, int, list[int]]
"""A host, the tag of the message to or from it, and the numbers of its shards."""
KINDS: dict[tuple[int, ...], str] = {
    (0, 0, 1): "reduce",
    (0, 0, 2): "gather",
    (0, 0, 3): "scatter",
}
"""Distinguishes collectives from sparse exchanges in the ``kind`` of a command."""


@dataclasses.dataclass(frozen=True)
class OverGroups:
    """A collective over groups of devices; the same shard of each group is one member.

    Attributes:
        kind: ``reduce``, ``gather`` or ``scatter``.
        owners: host of each shard, counted over all groups.
        groups: number of groups.
        differing: number of shards of a group that differ: all or one.
        dtype: type of the elements.
        size: number of elements of a shard before the collective.
    """

    kind: str
    owners: tuple[int, ...]
    groups: int
    differing: int
    dtype: np.dtype[Any]
    size: int

    @classmethod
    def read(
        cls, kind: list[int], ends: list[int], made: Made, sources: list[Peer]
    ) -> OverGroups | None:
        """Returns the collective that a command describes; None if it is a sparse exchange.

        Args:
            kind: see :data:`KINDS`.
            ends: number of shards of a group that differ, and number of groups.
            made: results on this host.
            sources: hosts that contribute shards.
        """
        name = KINDS.get(tuple(kind))
        if name is None:
            return None
        differing, groups, _ = ends
        hosts = {shard: host for host, _, shards in sources for shard in shards}
        ((_, spec),), _ = made[0]
        places = Places(spec)
        size = math.prod(places.shapes[0])
        if name != "reduce":
            size = size // groups if name == "gather" else size * groups
        owners = tuple(hosts[shard] for shard in range(len(hosts)))
        return cls(name, owners, groups, differing, places.dtype, size)

    def part(self, host: int) -> LoweredExchange:
        """Returns a host's part of it."""
        return _part(self, host)


@functools.lru_cache(maxsize=1024)
def _part(one: OverGroups, host: int) -> LoweredExchange:
    count = len(one.owners)
    each = count // one.groups
    contents = [shard if one.differing > 1 else shard // each for shard in range(count)]
    columns = [tuple(range(at, count, each)) for at in range(each)]
    elements = (one.dtype, one.size)
    return LoweredExchange.of(one.kind, list(one.owners), host, contents, columns, elements)
