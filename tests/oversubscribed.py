"""A client that oversubscribes device memory, and checks every result.

It fills every device with arrays of many element types and shardings, and then makes new ones of
them by every kind of operation: functions of one device and of a mesh, with and without donation,
collectives, transfers inside an island and to another, programs over both, constants. NumPy
computes the expected results. Parameters come as JSON: ``seed``, ``seconds``, ``device_bytes``,
``kinds`` (number of element types).
"""

from __future__ import annotations

import functools
import json
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import fairway

Elements = np.ndarray[Any, Any]
KINDS = [
    "float32", "int4", "key", "bfloat16", "int32", "uint8", "bool", "float8_e4m3fn", "complex64",
]  # fmt: skip
FILL = 0.97
"""Part of each device that is filled permanently; the rest is for results."""


def dtype_of(kind: str) -> np.dtype[Any]:
    return np.dtype(np.uint32 if kind == "key" else getattr(ml_dtypes, kind, kind))


class Slot:
    """An array, and its expected elements."""

    def __init__(self, kind: str, array: Any, expected: Elements, place: int) -> None:
        self.kind = kind
        self.array = array
        self.expected = expected
        self.place = place


class Client:
    """All arrays that a client holds.

    Args:
        seed: of all random choices.
        device_bytes: memory of each device.
        kinds: number of element types; each costs compilations.
    """

    def __init__(self, seed: int, device_bytes: int, kinds: int) -> None:
        self.random = np.random.default_rng(seed)
        devices = jax.devices()
        islands = [[d for d in devices if d.island == island] for island in (0, 1)]
        self.meshes = [Mesh(np.array(each), ("x",)) for each in islands]
        self.places: list[Sharding] = [SingleDeviceSharding(device) for device in devices]
        for mesh in self.meshes:
            self.places += [NamedSharding(mesh, P("x")), NamedSharding(mesh, P())]
        self.kinds = KINDS[:kinds]
        self.part = device_bytes // 32
        self.budget = device_bytes
        self.used = dict.fromkeys(devices, 0)
        self.slots: list[Slot] = []

    def fill(self) -> None:
        """Fills every device with arrays of all kinds and shardings, by functions and transfers."""
        turn = 0
        while self.fits(place := turn % len(self.places), FILL) or any(
            self.fits(one, FILL) for one in range(len(self.places))
        ):
            if self.fits(place, FILL):
                slot = self.put(self.kinds[turn % len(self.kinds)], place)
                if turn % 2:
                    self.step(slot)
            turn += 1

    def fits(self, place: int, part: float = 1.0) -> bool:
        """Checks for room for an array, its intermediates, and the array that was read last.

        JAX frees the last one a little later.
        """
        devices = self.places[place].device_set
        return all(self.used[one] + 3 * self.part <= part * self.budget for one in devices)

    def take(self, place: int, sign: int = 1) -> None:
        for device in self.places[place].device_set:
            self.used[device] += sign * self.part

    def elements(self, kind: str, place: int) -> Elements:
        sharding = self.places[place]
        shards = 2 if isinstance(sharding, NamedSharding) and sharding.spec == P("x") else 1
        # Sub-byte types take a byte of each element on a host's devices.
        count = shards * self.part // dtype_of(kind).itemsize
        if kind == "key":
            return self.random.integers(0, 1 << 32, (count // 2, 2), np.uint32)
        return self.random.integers(0, 2, count).astype(dtype_of(kind))

    def put(self, kind: str, place: int) -> Slot:
        expected = self.elements(kind, place)
        self.take(place)
        array = jax.device_put(expected, self.places[place])
        if kind == "key":
            array = wrap(array)
        slot = Slot(kind, array, expected, place)
        self.slots.append(slot)
        return slot

    # Operations on them

    def step(self, slot: Slot) -> None:
        """Runs a function that donates its argument."""
        slot.array = stepped_donated(slot.array)
        slot.expected = step_of(np, slot.expected, slot.kind)

    def copied(self, slot: Slot) -> None:
        """Runs a function that does not donate its argument."""
        if self.fits(slot.place):
            slot.array = stepped(slot.array)
            slot.expected = step_of(np, slot.expected, slot.kind)

    def moved(self, slot: Slot) -> None:
        """Transfers the array to a random sharding, possibly on another island."""
        target = int(self.random.integers(len(self.places)))
        same = len(self.elements(slot.kind, target)) == len(slot.expected)
        if target != slot.place and same and self.fits(target):
            slot.array = jax.device_put(slot.array, self.places[target])
            self.take(slot.place, -1)
            self.take(target)
            slot.place = target

    def turned(self, slot: Slot) -> None:
        """Runs a collective."""
        sharding = self.places[slot.place]
        is_cut = isinstance(sharding, NamedSharding) and sharding.spec == P("x")
        if is_cut and slot.kind in ("float32", "int32", "bool", "uint8") and self.fits(slot.place):
            slot.array = turn(sharding.mesh)(slot.array)  # type: ignore[union-attr]
            slot.expected = np.roll(slot.expected, len(slot.expected) // 2)

    def programmed(self, slot: Slot) -> None:
        """Runs a program over both islands."""
        sharding = self.places[slot.place]
        if isinstance(sharding, NamedSharding) and slot.kind in ("float32", "int32"):
            other = self.places.index(
                next(p for p in self.places[4:] if p.spec == sharding.spec and p != sharding)  # type: ignore[attr-defined]
            )
            if self.fits(slot.place) and self.fits(other):
                slot.array = program(sharding, self.places[other])(slot.array)
                slot.expected = step_of(np, step_of(np, slot.expected, slot.kind), slot.kind)

    def constant(self, slot: Slot) -> None:
        """Runs a function without arguments."""
        if slot.kind != "key" and self.fits(slot.place):
            shape, dtype = slot.expected.shape, slot.expected.dtype
            slot.array = constant(shape, dtype, self.places[slot.place])()
            slot.expected = np.ones(shape, dtype)

    def replaced(self, slot: Slot) -> None:
        """Deletes the array, and uploads another one."""
        slot.array.delete()
        slot.expected = self.elements(slot.kind, slot.place)
        slot.array = jax.device_put(slot.expected, self.places[slot.place])
        if slot.kind == "key":
            slot.array = wrap(slot.array)

    def check(self, slot: Slot) -> None:
        array = jax.random.key_data(slot.array) if slot.kind == "key" else slot.array
        found = np.asarray(array)
        same = found.dtype == slot.expected.dtype and found.shape == slot.expected.shape
        if not same or found.tobytes() != slot.expected.tobytes():
            raise AssertionError(f"{slot.kind} at {self.places[slot.place]} is not what was made")

    def run(self, seconds: float) -> int:
        """Runs random operations; returns how many."""
        ways = [self.step, self.copied, self.moved, self.turned, self.programmed, self.constant,
                self.replaced]  # fmt: skip
        began, turns = time.monotonic(), 0
        while time.monotonic() - began < seconds:
            slot = self.slots[self.random.integers(len(self.slots))]
            way = ways[self.random.integers(len(ways))]
            way(slot)
            turns += 1
            if turns % 2:
                self.check(slot)
            else:
                self.check(self.slots[self.random.integers(len(self.slots))])
        for slot in self.slots:
            self.check(slot)
        return turns


def step_of(numbers: Any, x: Any, kind: str) -> Any:
    """Computes a function that is exact in each element type."""
    if kind == "key":
        return x[::-1]
    if kind == "bool":
        return ~x
    if kind in ("int32", "uint8"):
        return x * x.dtype.type(3) + x.dtype.type(1)
    if kind == "int4":
        return numbers.roll(x, 1)
    return -x


def _step(x: Any) -> Any:
    kind = "key" if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else str(x.dtype)
    return step_of(jnp, x, kind)


wrap = jax.jit(jax.random.wrap_key_data)
stepped = jax.jit(_step)
stepped_donated = jax.jit(_step, donate_argnums=0)


@functools.cache
def turn(mesh: Mesh) -> Any:
    """Rotates: each device sends its part to the next."""

    def permute(x: Any) -> Any:
        return jax.lax.ppermute(x, "x", [(0, 1), (1, 0)])

    return jax.jit(jax.shard_map(permute, mesh=mesh, in_specs=P("x"), out_specs=P("x")))


@functools.cache
def program(here: Sharding, there: Sharding) -> Any:
    near = jax.jit(_step, out_shardings=here)
    far = jax.jit(_step, out_shardings=there)

    @fairway.program
    def both(x: Any) -> Any:
        return near(jax.device_put(far(jax.device_put(x, there)), here))

    return both


@functools.cache
def constant(shape: tuple[int, ...], dtype: np.dtype[Any], place: Sharding) -> Any:
    return jax.jit(lambda: jnp.ones(shape, dtype), out_shardings=place)


def say(word: str, **values: Any) -> None:
    print(word, json.dumps(values), flush=True)


def main() -> None:
    given = json.loads(sys.argv[1])
    client = Client(given["seed"], given["device_bytes"], given["kinds"])
    client.fill()
    jax.block_until_ready([slot.array for slot in client.slots])
    say("ready", held=sum(client.used.values()))
    sys.stdin.readline()
    say("done", turns=client.run(given["seconds"]))


if __name__ == "__main__":
    main()
