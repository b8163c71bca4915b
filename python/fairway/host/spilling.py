"""Spilling: evicts arrays from the devices to host memory and swaps them in again.

A failed transfer never loses an array. An array that cannot be spilled stays on its devices and is
tried again with the next command; one that cannot be swapped in stays in host memory, the request
that needed it gets an error, and the next request tries again.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import Any

import numpy as np

from fairway.host.backend import Backend, collect_garbage
from fairway.host.objects import Deferred, Failed, Lazy, Objects, error_text

__all__ = ["Spilled", "Spiller"]

_LOG = logging.getLogger(__name__)

PAUSES_S = (0.0, 0.01, 0.05)
"""Pauses before each attempt to swap in while the device has no memory left."""
EXHAUSTED = "RESOURCE_EXHAUSTED"

Array = Any
Address = tuple[int, int, int]
"""Family (:meth:`Objects.family`), device and address.

Host memory that several devices read in place has one address on all of them.
"""
Key = tuple[Address, str, tuple[int, ...]]
"""Address, type and shape, equal for shards that share a part."""


class _Part:
    """The elements of one shard, shared by all arrays that alias it.

    Attributes:
        elements: elements in host memory; None once deleted.
        array: the same on its device, while an array that aliases it is swapped in.
    """

    __slots__ = ("array", "elements")

    def __init__(self, elements: np.ndarray[Any, Any]) -> None:
        self.elements: np.ndarray[Any, Any] | None = elements
        self.array: Array | None = None


class Spilled(Deferred):
    """An array whose elements were spilled to host memory.

    Args:
        backend: this host's devices.
        shape: declared shape; shards of arrays without elements may differ (jaxlib 0.10.2).
        parts: one per shard.
        local: device of each shard.
        memory: memory kind on the devices.
        lock: common to all arrays that may share parts.
    """

    __slots__ = ("_array", "_backend", "_local", "_lock", "_memory", "_parts", "_shape")

    def __init__(
        self,
        backend: Backend,
        shape: tuple[int, ...],
        parts: list[_Part],
        local: tuple[int, ...],
        memory: str | None,
        lock: threading.RLock,
    ) -> None:
        self._backend = backend
        self._shape = shape
        self._parts = parts
        self._local = local
        self._memory = memory
        self._lock = lock
        self._array: Array | None = None

    def get(self) -> Array:
        """Returns the array, swapped in on its devices.

        Raises:
            Failed: it cannot be swapped in now; the elements are kept, and a later call may
                succeed.
        """
        with self._lock:
            for pause_s in PAUSES_S:
                if pause_s:
                    collect_garbage()
                    time.sleep(pause_s)
                try:
                    return self._swap_in()
                except Exception as error:
                    failed = self._failed(error)
                if not failed.text.startswith(EXHAUSTED):
                    break
            raise failed

    def _swap_in(self) -> Array:
        if self._array is None or self._array.is_deleted():
            made = []
            try:
                for part, device in zip(self._parts, self._local, strict=True):
                    if part.array is None or part.array.is_deleted():
                        part.array = self._put(part, device)
                        made.append(part)
                self._array = self._whole([part.array for part in self._parts])
            except Exception:
                for part in made:  # an incomplete array would only occupy memory
                    part.array = None
                raise
        return self._array

    def _put(self, part: _Part, device: int) -> Array:
        elements = part.elements
        if elements is None:
            raise Failed("INVALID_ARGUMENT: the array has been deleted")
        shape = elements.shape
        return self._backend.put(elements.dtype, shape, (device,), self._memory, [elements])

    def _whole(self, singles: list[Array]) -> Array:
        if len(singles) == 1:
            return singles[0]
        first = self._parts[0].elements
        assert first is not None
        return self._backend.join(first.dtype, self._shape, self._local, self._memory, singles)

    def _failed(self, error: Exception) -> Failed:
        if isinstance(error, Failed):
            return error
        code, _, message = error_text(error).partition(": ")
        size = sum(part.elements.nbytes for part in self._parts if part.elements is not None)
        return Failed(
            f"{code}: a spilled array of {size} bytes was not swapped in on local devices "
            f"{list(self._local)}: {message}; it is kept in host memory: delete other arrays "
            "and use it again"
        )

    def keys(self, family: int) -> dict[Key, _Part]:
        """Returns the parts that are on their devices."""
        found = {}
        for part, device in zip(self._parts, self._local, strict=True):
            if part.array is not None and not part.array.is_deleted():
                found[_key(family, part.array, device)] = part
        return found

    def evict(self) -> None:
        """Evicts it from device memory, if it was swapped in on use."""
        with self._lock:
            self._array = None
            for part in self._parts:
                part.array = None

    def is_ready(self) -> bool:
        """Returns True: it was computed before it was spilled."""
        return True

    def block_until_ready(self) -> None:
        """Returns at once: it was computed before it was spilled."""

    def delete(self) -> None:
        """Frees its memory, for all arrays that share it."""
        with self._lock:
            self.evict()
            for part in self._parts:
                part.elements = None


class Spiller:
    """Executes commands that spill and restore arrays.

    Args:
        backend: this host's devices.
        objects: its buffers.
    """

    def __init__(self, backend: Backend, objects: Objects) -> None:
        self._backend = backend
        self._objects = objects
        self._lock = threading.RLock()
        self._owed: set[int] = set()
        """Buffers that could not be spilled yet, tried again with the next command."""

    def spill(self, numbers: list[int]) -> None:
        """Spills buffers to host memory; the command names all that share memory with them.

        Waits until they are computed, and until no thread reads them or waits for them. An array
        that has not been made yet occupies no memory: it is not waited for.
        """
        values = self._objects.values
        wanted = [number for number in sorted({*numbers, *self._owed}) if number in values]
        self._owed.clear()
        self._objects.finish_waits(wanted)
        arrays: dict[int, Array] = {}
        parts: dict[Key, _Part] = {}
        evicted: list[Spilled] = []
        for number in wanted:
            value = values[number]
            if isinstance(value, Spilled):
                parts |= value.keys(self._objects.family(number))
                evicted.append(value)
            elif isinstance(value, Lazy) and not value.done():
                self._owed.add(number)
            elif (array := _computed(value)) is not None:
                arrays[number] = array
        for group in self._groups(arrays):
            try:
                moved = {number: self._moved(number, arrays[number], parts) for number in group}
            except Exception as error:  # they stay on the devices until the next command
                _LOG.warning("%d arrays are not spilled: %s", len(group), error_text(error))
                self._owed.update(group)
                continue
            values.update(moved)
            for number in group:
                _delete(arrays.pop(number))
        for spilled in evicted:
            spilled.evict()
        collect_garbage()

    def _groups(self, arrays: dict[int, Array]) -> list[list[int]]:
        """Returns the arrays that can be spilled, in groups that share memory.

        A group is spilled as a whole or not at all, as freeing the memory of one array frees that
        of others in its group.
        """
        members: dict[Address, list[int]] = {}
        addresses: dict[int, list[Address]] = {}
        for number, array in arrays.items():
            try:
                addresses[number] = self._addresses(number, array)
            except Exception:  # a token, which has no memory
                continue
            for address in addresses[number]:
                members.setdefault(address, []).append(number)
        groups = []
        left = dict.fromkeys(addresses)
        while left:
            group = [left.popitem()[0]]
            for number in group:
                for address in addresses[number]:
                    found = [other for other in members.pop(address, ()) if other in left]
                    for other in found:
                        left.pop(other, None)
                    group += dict.fromkeys(found)
            if all(_has_usual_layout(arrays[number]) for number in group):
                groups.append(group)
        return groups

    def _addresses(self, number: int, array: Array) -> list[Address]:
        backend = self._backend
        family = self._objects.family(number)
        pairs = zip(backend.shards(array), backend.places(array), strict=True)
        return [_address(family, shard, device) for shard, device in pairs]

    def _moved(self, number: int, array: Array, parts: dict[Key, _Part]) -> Spilled:
        backend = self._backend
        family = self._objects.family(number)
        mine = []
        local = backend.places(array)
        for shard, device in zip(backend.shards(array), local, strict=True):
            key = _key(family, shard, device)
            if key not in parts:
                parts[key] = _Part(np.array(backend.view(shard)))
            mine.append(parts[key])
        memory = backend.memory_kind(array)
        return Spilled(backend, tuple(array.aval.shape), mine, local, memory, self._lock)

    def restore(self, numbers: list[int]) -> None:
        """Swaps buffers in again; the command names all that share memory with them.

        If the devices have no memory left, the rest is swapped in on use, or fails the request.
        """
        self._owed.difference_update(numbers)
        for number in numbers:
            value = self._objects.get(number)
            if isinstance(value, Spilled):
                try:
                    self._objects.values[number] = value.get()
                except Failed:
                    return


def _address(family: int, shard: Array, device: int) -> Address:
    return family, device, shard.unsafe_buffer_pointer()


def _key(family: int, shard: Array, device: int) -> Key:
    return _address(family, shard, device), str(shard.aval.dtype), tuple(shard.aval.shape)


def _computed(value: Any) -> Array | None:
    """Returns the array of a buffer once it is computed; None if it has failed or was deleted."""
    try:
        array = value.get() if isinstance(value, Deferred) else value
        if isinstance(array, Failed) or array.is_deleted():
            return None
        array.block_until_ready()
    except Exception:  # the error is raised where the array is used
        return None
    return array


def _delete(array: Array) -> None:
    """Frees the device memory of an array whose elements were spilled."""
    with contextlib.suppress(Exception):  # its memory is freed with the last reference to it
        array.delete()


def _has_usual_layout(array: Array) -> bool:
    """Returns whether the layout is that after a swap in; other arrays are not spilled."""
    usual = ",".join(str(axis) for axis in reversed(range(len(array.aval.shape))))
    return str(array._pjrt_layout).startswith(f"{{{usual}")
