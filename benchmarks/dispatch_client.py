"""One JAX process that runs small computations: worker of ``dispatch.py`` and ``chained.py``.

The same program is a client of Fairway, a client of the null server, plain JAX, and one of the
processes of multi-controller JAX; which one is decided by its environment and arguments.
"""

from __future__ import annotations

import argparse
import collections
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from common import serve_methods
from jax.sharding import Mesh, NamedSharding, PartitionSpec

FUSED = 128
"""Computations inside one program."""

Array = Any
Step = Callable[[Array], Array]
lax: Any = jax.lax  # parts of it have no types
over_devices: Any = functools.partial(PartitionSpec, "device")


def computation(mesh: Mesh) -> Step:
    """All-reduce of one scalar per device, then an addition; on one device, the addition."""
    if mesh.size == 1:
        return lambda x: x + 1

    def body(shard: Array) -> Array:
        return lax.psum(shard, "device") + 1

    spec = over_devices()
    mapped: Step = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec)
    return mapped


def fused(step: Step) -> Step:
    """Many computations as one."""
    return lambda x: lax.fori_loop(0, FUSED, lambda _, value: step(value), x)


def chained(op: Step) -> Step:
    """Many computations as one program of Fairway, each a node of its own."""
    from fairway import program  # plain JAX runs without it

    def chain(value: Array) -> Array:
        for _ in range(FUSED):
            value = op(value)
        return value

    return program(chain)


def start(mesh: Mesh) -> Array:
    """Zero on each device."""
    if mesh.size == 1:
        return jax.device_put(np.float32(0), mesh.devices.flat[0])
    sharding = NamedSharding(mesh, over_devices())
    return jax.make_array_from_callback(
        (mesh.size,), sharding, lambda index: np.zeros(mesh.size, np.float32)[index]
    )


def expected(steps: int, devices: int) -> np.float32:
    """What each device holds after so many computations."""
    value = np.float32(0)
    with np.errstate(over="ignore"):
        for _ in range(steps):
            value = np.float32(devices if devices > 1 else 1) * value + np.float32(1)
    return value


class Runner:
    """Runs chains of computations over all devices.

    Args:
        window: launches that may be unfinished; 0 leaves that to the backend. Plain JAX on CPUs
            deadlocks from 33 unfinished collectives on.
        with_chained: knows chained programs too.
    """

    def __init__(self, window: int, with_chained: bool) -> None:
        self._mesh = Mesh(np.array(jax.devices()), ("device",))
        step = computation(self._mesh)
        self._programs: dict[str, Step] = {"op": jax.jit(step), "fused": jax.jit(fused(step))}
        if with_chained:
            self._programs["chained"] = chained(self._programs["op"])
        self._start = start(self._mesh)
        self._window = window

    def compile(self) -> None:
        """Compiles everything."""
        for program in self._programs.values():
            program(self._start).block_until_ready()

    def check(self) -> None:
        """Compares short chains with what they should give."""
        for work, program in self._programs.items():
            last = self._chain(program, 5 if work == "op" else 1)
            wanted = expected(5 if work == "op" else FUSED, self._mesh.size)
            for shard in last.addressable_shards:
                found = np.asarray(shard.data)
                assert (found == wanted).all(), f"{work}: {found}, not {wanted}"

    def round(self, work: str, count: int) -> float:
        """Runs a chain of launches; returns the seconds until its end is there."""
        began = time.perf_counter()
        self._chain(self._programs[work], count).block_until_ready()
        return time.perf_counter() - began

    def _chain(self, program: Step, count: int) -> Array:
        if self._window:
            return self._bounded_chain(program, count)
        value = self._start
        for _ in range(count):
            value = program(value)
        return value

    def _bounded_chain(self, program: Step, count: int) -> Array:
        value = self._start
        unfinished: collections.deque[Any] = collections.deque()
        for _ in range(count):
            value = program(value)
            unfinished.append(value)
            if len(unfinished) >= self._window:
                unfinished.popleft().block_until_ready()
        return value


def main() -> None:
    """Joins the others if there are any, and serves."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--window", type=int, default=0)
    parser.add_argument("--chained", action="store_true")
    parser.add_argument("--coordinator")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--rank", type=int, default=0)
    given = parser.parse_args()
    if given.coordinator:
        jax.distributed.initialize(given.coordinator, given.processes, given.rank)
    runner = Runner(given.window, given.chained)
    serve_methods(runner)


if __name__ == "__main__":
    main()
