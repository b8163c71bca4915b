"""A client of `remote.py`: small operations, and transfers to and from a device."""

from __future__ import annotations

import time

import jax
import numpy as np
from common import serve_methods

SMALL_OPERATIONS = 3000


class RemoteRunner:
    """Executes the benchmark's requests."""

    def prepare(self, mebibytes: int) -> None:
        """Compiles, and makes what is sent."""
        self._device = jax.devices()[0]
        self._step = jax.jit(lambda x: x + 1)
        self._x = self._step(jax.device_put(np.float32(0), self._device))
        self._big = np.ones(mebibytes << 18, np.float32)
        self._fresh = jax.jit(lambda x, number: x + number)
        for work in (self.operations, self.up, self.down):
            work()

    def operations(self) -> float:
        """Returns small operations per second, each of which depends on the one before."""
        began = time.perf_counter()
        for _ in range(SMALL_OPERATIONS):
            self._x = self._step(self._x)
        self._x.block_until_ready()
        return SMALL_OPERATIONS / (time.perf_counter() - began)

    def round_trips(self) -> float:
        """Returns operations per second of which each is waited for."""
        began = time.perf_counter()
        for _ in range(SMALL_OPERATIONS // 10):
            self._x = self._step(self._x)
            self._x.block_until_ready()
        return SMALL_OPERATIONS / 10 / (time.perf_counter() - began)

    def up(self) -> float:
        """Returns bytes per second of transfers to the device."""
        times = []
        for _ in range(4):
            began = time.perf_counter()
            self._there = jax.device_put(self._big, self._device)
            self._there.block_until_ready()
            times.append(time.perf_counter() - began)
        return self._big.nbytes / min(times)

    def down(self) -> float:
        """Returns bytes per second of transfers from the device, each of new values."""
        times = []
        for number in range(4):
            new = self._fresh(self._there, number)
            new.block_until_ready()
            began = time.perf_counter()
            np.asarray(new)
            times.append(time.perf_counter() - began)
        return self._big.nbytes / min(times)


if __name__ == "__main__":
    serve_methods(RemoteRunner())
