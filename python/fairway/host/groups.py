"""Collectives over groups of devices, as commands describe them."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np

from fairway.host.collectives import LoweredExchange
from fairway.host.messages import Collective, GroupCollective
from fairway.host.moves import Places

__all__ = ["OverGroups"]


@dataclasses.dataclass(frozen=True)
class OverGroups:
    """A collective over groups of devices; the same shard of each group is one member.

    Attributes:
        kind: the collective.
        owners: host of each shard, counted over all groups.
        groups: number of groups.
        differing: number of shards of a group that differ: all or one.
        dtype: type of the elements.
        size: number of elements of a shard before the collective.
    """

    kind: GroupCollective
    owners: tuple[int, ...]
    groups: int
    differing: int
    dtype: np.dtype[Any]
    size: int

    @classmethod
    def read(cls, command: Collective) -> OverGroups:
        """Returns the collective that a command describes."""
        kind, groups = command.kind, command.groups
        hosts = {shard: peer.host for peer in command.sources for shard in peer.shards}
        places = Places(command.made[0].values[0].spec)
        size = math.prod(places.shapes[0])
        if kind is GroupCollective.GATHER:
            size //= groups
        elif kind is GroupCollective.SCATTER:
            size *= groups
        owners = tuple(hosts[shard] for shard in range(len(hosts)))
        return cls(kind, owners, groups, command.differing, places.dtype, size)

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
    return LoweredExchange.of(
        one.kind.name.lower(), list(one.owners), host, contents, columns, elements
    )
