"""A client of `across.py`: sums arrays over all islands, with two strategies."""

from __future__ import annotations

import time
from typing import Any

import jax
import numpy as np
from common import serve_methods
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

_partition: Any = PartitionSpec
_psum: Any = jax.lax.psum


class Runner:
    """Executes the benchmark's requests."""

    def prepare(self, elements: int) -> None:
        """Puts float32 arrays on every device, and checks both strategies."""
        self._devices = jax.devices()
        count = len(self._devices)
        cut = _partition("island")
        mesh = Mesh(np.array(self._devices), ("island",))
        ones = np.ones(count * elements, np.float32)
        self._whole = jax.device_put(ones, NamedSharding(mesh, cut))
        self._parts = [jax.device_put(ones[:elements], device) for device in self._devices]
        mapped = jax.shard_map(
            lambda held: _psum(held, "island"),
            mesh=mesh,
            in_specs=cut,
            out_specs=_partition(),
        )
        self._psum = jax.jit(mapped)
        self._add = jax.jit(lambda parts: sum(parts[1:], start=parts[0]))
        for sums in (self._by_psum(), self._by_moves()):
            for one in sums:
                assert np.all(np.asarray(one) == count), "the sum is wrong"

    def _by_psum(self) -> list[jax.Array]:
        return [shard.data for shard in self._psum(self._whole).addressable_shards]

    def _by_moves(self) -> list[jax.Array]:
        places = [SingleDeviceSharding(device) for device in self._devices]
        brought = [[jax.device_put(part, place) for part in self._parts] for place in places]
        return [self._add(parts) for parts in brought]

    def run(self, way: str, times: int) -> float:
        """Returns sums per second."""
        act = {"psum": self._by_psum, "moves": self._by_moves}[way]
        began = time.monotonic()
        for _ in range(times):
            for one in act():
                one.block_until_ready()
        return times / (time.monotonic() - began)


if __name__ == "__main__":
    serve_methods(Runner())
