"""One Fairway client that transfers arrays on request: worker of ``transfer.py``."""

from __future__ import annotations

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import serve_methods
from jax.sharding import SingleDeviceSharding

Array = Any
ITEM_BYTES = 4


class Runner:
    """Transfers ``float32`` arrays between two islands' first devices, and to and from a client."""

    def __init__(self) -> None:
        self._source, self._target = jax.devices()[0], jax.devices()[-1]
        self._array: Array = None
        self._host: Array = None

    def prepare(self, size: int) -> None:
        """Makes the array to transfer, and checks that it arrives intact."""
        count = size // ITEM_BYTES
        self._array = None
        self._array = _counting(count, self._source)
        there = jax.device_put(self._array, self._target)
        same = jax.jit(lambda a, b: (a == b).all())(there, _counting(count, self._target))
        assert bool(same), "the array did not arrive as it left"

    def across(self, count: int) -> float:
        """Copies the array to the other island, one copy after another; returns the seconds."""
        began = time.perf_counter()
        for _ in range(count):
            there = jax.device_put(self._array, self._target)
            there.block_until_ready()
            del there
        return time.perf_counter() - began

    def prepare_host(self, size: int) -> None:
        """Makes the bytes to upload."""
        self._host = np.arange(size // ITEM_BYTES, dtype=np.float32)

    def check_host(self) -> None:
        """Checks that an upload is downloaded unchanged."""
        assert (np.asarray(jax.device_put(self._host, self._source)) == self._host).all()

    def up(self, count: int) -> float:
        """Uploads ``count`` times; returns the seconds."""
        began = time.perf_counter()
        for _ in range(count):
            there: Array = jax.device_put(self._host, self._source)
            there.block_until_ready()
        return time.perf_counter() - began

    def down(self, count: int) -> float:
        """Downloads ``count`` times; returns the seconds."""
        # An array caches its download, so each download needs an array of its own.
        arrays: list[Array] = [jax.device_put(self._host, self._source) for _ in range(count)]
        for array in arrays:
            array.block_until_ready()
        began = time.perf_counter()
        while arrays:
            np.asarray(arrays.pop())
        return time.perf_counter() - began


def _counting(count: int, device: jax.Device) -> Array:
    make = jax.jit(
        lambda: jnp.arange(count, dtype=jnp.float32), out_shardings=SingleDeviceSharding(device)
    )
    return make()


def main() -> None:
    """Connects and serves requests."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    serve_methods(Runner())


if __name__ == "__main__":
    main()
