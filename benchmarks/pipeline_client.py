"""One client that runs pipelines on request: worker of ``chained.py``.

Each device is a stage, which adds one to the output of the stage before.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from common import serve_methods
from jax.sharding import SingleDeviceSharding

from fairway import program

ELEMENTS = 1024
"""Elements of a stage's output: 4 KiB."""

Array = Any
Step = Callable[[Array], Array]


def stage(device: jax.Device) -> Step:
    """Compiles a small computation on one device."""
    place = SingleDeviceSharding(device)
    return jax.jit(lambda x: x + 1, in_shardings=place, out_shardings=place)


class Runner:
    """Runs pipelines over all devices: one program each, including transfers between stages."""

    def __init__(self) -> None:
        devices = jax.devices()
        self._depth = len(devices)
        self._start = jax.device_put(np.zeros(ELEMENTS, np.float32), devices[0])
        stages = [stage(device) for device in devices]

        def line(value: Array) -> Array:
            for step in stages:
                value = step(value)
            return value

        self._line = program(line)
        self._ring = program(lambda value: jax.device_put(line(value), devices[0]))
        self._chains = {"apart": self._apart, "in turn": self._in_turn}

    def compile(self) -> None:
        """Compiles all programs."""
        for chain in self._chains.values():
            chain(2).block_until_ready()

    def check(self) -> None:
        """Checks the results of short chains."""
        assert (np.asarray(self._apart(3)) == self._depth).all()
        assert (np.asarray(self._in_turn(3)) == 3 * self._depth).all()

    def round(self, work: str, count: int) -> float:
        """Runs a pipeline many times; returns the seconds until its last result is ready."""
        began = time.perf_counter()
        self._chains[work](count).block_until_ready()
        return time.perf_counter() - began

    def _apart(self, count: int) -> Array:
        """Runs with the same input each time; runs may overlap."""
        for _ in range(count):
            value = self._line(self._start)
        return value

    def _in_turn(self, count: int) -> Array:
        """Runs with the output of the run before as input."""
        value = self._start
        for _ in range(count):
            value = self._ring(value)
        return value


def main() -> None:
    """Serves requests."""
    serve_methods(Runner())


if __name__ == "__main__":
    main()
