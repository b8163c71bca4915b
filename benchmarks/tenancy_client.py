"""One JAX process that shares devices with others: worker of ``tenancy.py``.

The same program is a client of Fairway, plain JAX, and one of the processes of multi-controller
JAX; which one is decided by its environment and arguments.
"""

from __future__ import annotations

import argparse
import collections
import functools
import os
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import serve_methods
from jax.sharding import Mesh, NamedSharding, PartitionSpec

SIDE = 16
"""Rows and columns of the matrix on each device."""
BURST = 16
"""Launches between two looks at the clock."""

Array = Any
Step = Callable[[Array], Array]
lax: Any = jax.lax  # parts of it have no types
over_devices: Any = functools.partial(PartitionSpec, "device")


def computation(mesh: Mesh, loops: int) -> Step:
    """A loop of matrix products on the first device, then the mean over all.

    The others wait in the collective, which takes no processor: what a launch costs is one core's
    time, so that where there are two, one is left for clients, as accelerators would leave it.
    """

    def once(_: int, matrix: Array) -> Array:
        return jnp.tanh(matrix @ matrix + 1)  # stays away from zero

    def work(shard: Array) -> Array:
        return lax.fori_loop(0, loops, once, shard)

    def body(shard: Array) -> Array:
        first = lax.axis_index("device") == 0
        return lax.pmean(lax.cond(first, work, lambda same: same, shard), "device")

    spec = over_devices()
    mapped: Step = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec)
    return mapped


def read(array: Array) -> None:
    """Brings the part of the first device here."""
    np.asarray(array.addressable_shards[0].data)


class Tenant:
    """Enqueues computations over all devices.

    Args:
        window: launches of a round that may be unfinished; 0 leaves that to the backend.
        name: of its programs, by which a timeline tells clients apart.
    """

    def __init__(self, window: int, name: str) -> None:
        self._mesh = Mesh(np.array(jax.devices()), ("device",))
        sharding = NamedSharding(self._mesh, over_devices())
        start = np.tile(np.eye(SIDE, dtype=np.float32), (self._mesh.size, 1))
        self._start = jax.make_array_from_callback(
            start.shape, sharding, lambda index: start[index]
        )
        self._window = window
        self._name = name
        self._programs: dict[int, Step] = {}

    def compile(self, loops: int) -> None:
        """Compiles the computation of so many loops, and runs it once."""
        step = computation(self._mesh, loops)
        # The name of a jitted function is that of its program.
        step.__name__ = step.__qualname__ = self._name
        self._programs[loops] = jax.jit(step)
        self._programs[loops](self._start).block_until_ready()

    def round(self, loops: int, count: int) -> float:
        """Runs a chain of launches; returns the seconds until its end is there."""
        program = self._programs[loops]
        began = time.perf_counter()
        value: Any = self._start
        unfinished: collections.deque[Any] = collections.deque()
        for _ in range(count):
            value = program(value)
            if self._window:
                unfinished.append(value)
                if len(unfinished) >= self._window:
                    unfinished.popleft().block_until_ready()
        value.block_until_ready()
        return time.perf_counter() - began

    def enqueue(self, loops: int, seconds: float, ahead: int, reads: bool = False) -> Any:
        """Enqueues without end for some time; returns when it began and ended, in monotonic ns.

        Args:
            loops: which program.
            seconds: for how long.
            ahead: how many launches may be unfinished; 0 leaves that to the backend.
            reads: read the results that are waited for.
        """
        wait = read if reads else jax.block_until_ready
        program = self._programs[loops]
        began = time.monotonic_ns()
        value = self._start
        ends: collections.deque[Any] = collections.deque()
        issued = 0
        while (now := time.monotonic_ns()) - began < seconds * 1e9:
            for _ in range(BURST):
                value = program(value)
            issued += BURST
            if ahead:
                ends.append(value)
                if len(ends) * BURST > ahead:
                    wait(ends.popleft())
        return {"began_ns": began, "ended_ns": now, "issued": issued}

    def ask(self, loops: int, seconds: float) -> Any:
        """Runs one launch and reads its result, again and again; returns how long each took."""
        program = self._programs[loops]
        began = time.monotonic_ns()
        took: list[float] = []
        while (now := time.monotonic_ns()) - began < seconds * 1e9:
            read(program(self._start))
            took.append((time.monotonic_ns() - now) / 1e9)
        return {"began_ns": began, "ended_ns": now, "took_s": took}


def main() -> None:
    """Joins the others if there are any, and serves."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", default="tenant")
    parser.add_argument("--window", type=int, default=0)
    parser.add_argument("--coordinator")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--rank", type=int, default=0)
    given = parser.parse_args()
    if given.coordinator:
        jax.distributed.initialize(given.coordinator, given.processes, given.rank)
    tenant = Tenant(given.window, given.name)
    serve_methods(tenant)
    os._exit(0)  # what is still queued is dropped, not waited for


if __name__ == "__main__":
    main()
