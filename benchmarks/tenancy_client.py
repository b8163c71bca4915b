"""One JAX process that shares devices with others: worker of ``tenancy.py``.

The same program is a client of Fairway, plain JAX, and one of the processes of multi-controller
JAX; its environment and arguments decide which.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import paced
from common import serve_methods
from jax.sharding import Mesh, NamedSharding, PartitionSpec

SIDE = 16
"""Rows and columns of the matrix on each device."""
BURST = 16
"""Launches of a Fairway client between two that it waits for."""

Array = Any
Step = Callable[[Array], Array]
lax: Any = jax.lax  # parts of it have no types
over_devices: Any = functools.partial(PartitionSpec, "device")


def computation(mesh: Mesh, micros: int) -> Step:
    """Makes a matrix product on each device, paced on the first, and the mean over all.

    The other devices wait in the collective. A launch uses little CPU time, as if the devices were
    accelerators.
    """

    def hold(shard: Array) -> Array:
        value, began = paced.begin(shard)
        return paced.end(value, began, micros / 1e6)

    def body(shard: Array) -> Array:
        shard = jnp.tanh(shard @ shard + 1)  # stays away from zero
        if micros:
            first = lax.axis_index("device") == 0
            shard = lax.cond(first, hold, lambda same: same, shard)
        return lax.pmean(shard, "device")

    spec = over_devices()
    mapped: Step = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return mapped


def read(array: Array) -> None:
    """Transfers the first device's shard to the client."""
    np.asarray(array.addressable_shards[0].data)


class Ahead:
    """Bounds the calls in flight (flow control): waits rarely, and for old calls only.

    Args:
        most: maximum calls in flight; 0 leaves that to the backend.
        every: calls between two that are waited for.
        wait: waits for a value.
    """

    def __init__(self, most: int, every: int, wait: Callable[[Array], Any]) -> None:
        self._most = most
        self._every = every
        self._wait = wait
        self._ends: collections.deque[Array] = collections.deque()
        self._calls = 0

    def add(self, value: Array) -> None:
        """Records the value of another call; waits if there are too many in flight."""
        self._calls += 1
        if self._most == 0 or self._calls % self._every:
            return
        self._ends.append(value)
        if len(self._ends) * self._every >= self._most:
            self._wait(self._ends.popleft())


class Tenant:
    """Enqueues computations over all devices.

    Args:
        window: maximum launches in flight in a round; 0 leaves that to the backend.
        every: launches of a round between two that are waited for.
        name: name of its programs, which identifies the client in a timeline.
    """

    def __init__(self, window: int, every: int, name: str) -> None:
        self._mesh = Mesh(np.array(jax.devices()), ("device",))
        sharding = NamedSharding(self._mesh, over_devices())
        start = np.tile(np.eye(SIDE, dtype=np.float32), (self._mesh.size, 1))
        self._start = jax.make_array_from_callback(
            start.shape, sharding, lambda index: start[index]
        )
        self._window = window
        self._every = every
        self._name = name
        self._programs: dict[tuple[int, int], Step] = {}

    def load(self) -> None:
        """Makes Fairway's hosts load the custom calls of paced computations."""
        paced.on_hosts(jax.devices())

    def compile(self, micros: int, chain: int = 1) -> None:
        """Compiles the computation of a duration, and runs it once.

        Args:
            micros: duration in microseconds.
            chain: also compiles a program of this many launches, each fed by the last.
        """
        step = computation(self._mesh, micros)
        # The name of a jitted function names its program.
        step.__name__ = step.__qualname__ = self._name
        one: Step = jax.jit(step)
        self._programs[micros, 1] = one
        one(self._start).block_until_ready()
        if chain == 1:
            return

        import fairway  # not needed for plain JAX

        def launches(value: Array) -> Array:
            for _ in range(chain):
                value = one(value)
            return value

        whole = fairway.program(launches)
        self._programs[micros, chain] = whole
        whole(self._start).block_until_ready()

    def round(self, micros: int, count: int, chain: int = 1) -> float:
        """Runs a chain of launches; returns the seconds until its end.

        Args:
            micros: duration that selects the program.
            count: launches.
            chain: launches per call.
        """
        program = self._programs[micros, chain]
        ahead = Ahead(self._window // chain, max(1, self._every // chain), jax.block_until_ready)
        began = time.perf_counter()
        value: Any = self._start
        for _ in range(count // chain):
            value = program(value)
            ahead.add(value)
        value.block_until_ready()
        return time.perf_counter() - began

    def enqueue(
        self, micros: int, seconds: float, ahead: int, chain: int = 1, reads: bool = False
    ) -> Any:
        """Enqueues continuously for some time; returns start and end, in monotonic ns.

        Args:
            micros: duration that selects the program.
            seconds: how long to enqueue.
            ahead: maximum launches in flight; 0 leaves that to the backend.
            chain: launches per call.
            reads: whether to read the results that are waited for.
        """
        wait = read if reads else jax.block_until_ready
        program = self._programs[micros, chain]
        before = Ahead(ahead // chain, max(1, BURST // chain), wait)
        cpu_s = time.process_time()
        began = time.monotonic_ns()
        value = self._start
        issued = 0
        while (now := time.monotonic_ns()) - began < seconds * 1e9:
            value = program(value)
            before.add(value)
            issued += chain
        cpu_s = time.process_time() - cpu_s
        return {"began_ns": began, "ended_ns": now, "issued": issued, "cpu_s": cpu_s}

    def ask(self, micros: int, seconds: float) -> Any:
        """Repeats one launch and the read of its result; returns the latencies."""
        program = self._programs[micros, 1]
        began = time.monotonic_ns()
        took: list[float] = []
        while (now := time.monotonic_ns()) - began < seconds * 1e9:
            read(program(self._start))
            took.append((time.monotonic_ns() - now) / 1e9)
        return {"began_ns": began, "ended_ns": now, "took_s": took}


def stand_back(nice: int) -> None:
    """Lowers the CPU priority of this process.

    Linux may schedule sessions fairly first and apply ``nice`` only within each (autogroups), so
    this process gets its own session with a low priority.
    """
    os.nice(nice)
    os.setsid()
    with contextlib.suppress(OSError):  # no autogroups here
        Path("/proc/self/autogroup").write_text(str(nice))


def main() -> None:
    """Joins the other JAX processes, if any, and serves requests."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", default="tenant")
    parser.add_argument("--window", type=int, default=0)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--nice", type=int, default=0)
    parser.add_argument("--coordinator")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--rank", type=int, default=0)
    given = parser.parse_args()
    if given.nice:
        stand_back(given.nice)
    if given.coordinator:
        jax.distributed.initialize(given.coordinator, given.processes, given.rank)
    tenant = Tenant(given.window, given.every, given.name)
    serve_methods(tenant)
    os._exit(0)  # what is still queued is dropped, not waited for


if __name__ == "__main__":
    main()
