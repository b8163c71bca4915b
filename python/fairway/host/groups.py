"""Collectives over groups of devices, as commands describe them."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np

from fairway.host.collectives import Exchange
from fairway.host.moves import Places, Spec

__all__ = ["KINDS", "Given", "Made", "OverGroups", "Peer"]

Given = list[tuple[list[int], list[int]]]
"""The buffers of each group of arguments, and the numbers of this host's shards of them."""
Made = list[tuple[list[tuple[int, Spec]], list[int]]]
"""The same of the results, with what they are."""
Peer = tuple[int, int, list[int]]
"""A host, the message to it or from it, and the numbers of its shards."""
KINDS: dict[tuple[int, ...], str] = {
    (0, 0, 1): "reduce",
    (0, 0, 2): "gather",
    (0, 0, 3): "scatter",
}
"""What tells collectives from rows, as :func:`fairway.host.sparse.direction` reads it."""


@dataclasses.dataclass(frozen=True)
class OverGroups:
    """A collective over groups of devices; the same shard of each group is one member.

    Attributes:
        kind: ``reduce``, ``gather`` or ``scatter``.
        owners: host of each shard, counted over all groups.
        groups: how many there are.
        differing: how many shards of a group differ: all or one.
        dtype: of the elements.
        size: how many of them a shard has before the collective.
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
        """What a command describes, unless it is rows that it exchanges.

        Args:
            kind: see :data:`KINDS`.
            ends: how many shards of a group differ, and how many groups there are.
            made: what this host gets.
            sources: hosts that have something.
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

    def part(self, host: int) -> Exchange:
        """What a host does in it."""
        return _part(self, host)


@functools.lru_cache(maxsize=1024)
def _part(one: OverGroups, host: int) -> Exchange:
    count = len(one.owners)
    each = count // one.groups
    contents = [shard if one.differing > 1 else shard // each for shard in range(count)]
    columns = [tuple(range(at, count, each)) for at in range(each)]
    elements = (one.dtype, one.size)
    return Exchange.of(one.kind, list(one.owners), host, contents, columns, elements)
