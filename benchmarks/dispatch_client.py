"""One JAX process that runs small computations: worker of ``dispatch.py`` and ``chained.py``.

The same program is a client of Fairway, a client of the null server, plain JAX, and one of the
processes of multi-controller JAX; its environment and arguments decide which.
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
    """Returns an all-reduce of a scalar per device and an addition; the latter on one device."""
    if mesh.size == 1:
        return lambda x: x + 1

    def body(shard: Array) -> Array:
        return lax.psum(shard, "device") + 1

    spec = over_devices()
    mapped: Step = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec)
    return mapped


def fused(step: Step) -> Step:
    """Fuses many computations into one."""
    return lambda x: lax.fori_loop(0, FUSED, lambda _, value: step(value), x)


def chained(op: Step) -> Step:
    """Makes one Fairway program of many computations, each a node of its own."""
    from fairway import program  # plain JAX runs without it

    def chain(value: Array) -> Array:
        for _ in range(FUSED):
            value = op(value)
        return value

    return program(chain)


def start(mesh: Mesh) -> Array:
    """Returns zero on each device."""
    if mesh.size == 1:
        return jax.device_put(np.float32(0), mesh.devices.flat[0])
    sharding = NamedSharding(mesh, over_devices())
    return jax.make_array_from_callback(
        (mesh.size,), sharding, lambda index: np.zeros(mesh.size, np.float32)[index]
    )


def expected(steps: int, devices: int) -> np.float32:
    """Returns the value of each device after ``steps`` computations."""
    value = np.float32(0)
    with np.errstate(over="ignore"):
        for _ in range(steps):
            value = np.float32(devices if devices > 1 else 1) * value + np.float32(1)
    return value


class Runner:
    """Runs chains of computations over all devices.

    Args:
        window: maximum launches in flight; 0 leaves that to the backend. Plain JAX on CPUs
            deadlocks from 33 collectives in flight on.
        with_chained: whether to support chained programs.
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
        """Compiles all programs."""
        for program in self._programs.values():
            program(self._start).block_until_ready()

    def check(self) -> None:
        """Checks the results of short chains."""
        for work, program in self._programs.items():
            last = self._chain(program, 5 if work == "op" else 1)
            wanted = expected(5 if work == "op" else FUSED, self._mesh.size)
            for shard in last.addressable_shards:
                found = np.asarray(shard.data)
                assert (found == wanted).all(), f"{work}: {found}, not {wanted}"

    def round(self, work: str, count: int) -> float:
        """Runs a chain of launches; returns the seconds until its end."""
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
    """Joins the other JAX processes, if any, and serves requests."""
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
