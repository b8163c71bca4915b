"""Moving arrays between the devices and the host's own memory, to make room for others."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from fairway.host.backend import Backend, collect_garbage
from fairway.host.objects import Failed, Objects, error_text, resolve

Array = Any


class _Part:
    """The elements of one shard, whatever number of arrays share it."""

    __slots__ = ("array", "elements")

    def __init__(self, elements: np.ndarray[Any, Any]) -> None:
        self.elements = elements
        self.array: Array | None = None

    def restored(self, backend: Backend, device: int, memory: str | None) -> Array:
        """A single-device array of the elements; the same one for all who share it."""
        if self.array is None:
            elements = self.elements
            self.array = backend.put(elements.dtype, elements.shape, (device,), memory, [elements])
        return self.array


class Spilled:
    """An array whose elements lie in the host's own memory for the time being."""

    __slots__ = ("_local", "_memory", "_parts")

    def __init__(self, parts: list[_Part], local: tuple[int, ...], memory: str | None) -> None:
        self._parts = parts
        self._local = local
        self._memory = memory

    def restored(self, backend: Backend) -> Array:
        """The array, on its devices again."""
        singles = [
            part.restored(backend, device, self._memory)
            for part, device in zip(self._parts, self._local, strict=True)
        ]
        if len(singles) == 1:
            return singles[0]
        first = self._parts[0].elements
        return backend.join(first.dtype, first.shape, self._local, self._memory, singles)

    def is_ready(self) -> bool:
        """It was computed before it was moved."""
        return True

    def block_until_ready(self) -> None:
        """It was computed before it was moved."""

    def delete(self) -> None:
        """Lets the elements go, which nobody can ask for any more."""
        self._parts = []


class Spiller:
    """Carries out commands that make room on devices.

    Args:
        backend: this host's devices.
        objects: its buffers.
    """

    def __init__(self, backend: Backend, objects: Objects) -> None:
        self._backend = backend
        self._objects = objects

    def spill(self, numbers: list[int]) -> None:
        """Moves buffers to the host's memory; with each come all that share memory with it.

        Waits for what computes them and for whoever reads them or waits for them.
        """
        values = self._objects.values
        self._objects.finish_waits(numbers)
        parts: dict[int, _Part] = {}
        moved = []
        for number in numbers:
            try:
                array = resolve(self._objects.get(number))
                if _has_usual_layout(array):
                    values[number] = self._moved(array, parts)
                    moved.append(array)
            except Exception as error:  # it was an error all along
                values[number] = Failed(error_text(error))
        for array in moved:
            array.delete()
        collect_garbage()

    def _moved(self, array: Array, parts: dict[int, _Part]) -> Spilled:
        backend = self._backend
        mine, local = [], []
        for shard in backend.shards(array):
            elements = backend.view(shard)
            key = shard.unsafe_buffer_pointer() if elements.nbytes else id(shard)
            if key not in parts:
                parts[key] = _Part(np.array(elements))
            mine.append(parts[key])
            local.append(backend.local_devices.index(shard._sharding._device))
        return Spilled(mine, tuple(local), array._sharding.memory_kind)

    def restore(self, numbers: list[int]) -> None:
        """Brings buffers back to their devices; with each come all that share memory with it."""
        for number in numbers:
            value = self._objects.get(number)
            if isinstance(value, Spilled):
                self._objects.attempt(number, functools.partial(value.restored, self._backend))


def _has_usual_layout(array: Array) -> bool:
    """Is it laid out as it will be when it is brought back? Others stay where they are."""
    usual = ",".join(str(axis) for axis in reversed(range(array.ndim)))
    return str(array._pjrt_layout).startswith(f"{{{usual}")
