"""``fairway.slice``: allocates devices by the shape of their mesh.

Source: PATHWAYS §4.1. The devices are virtual: numbers local to this client that the resource
manager maps to physical devices, spreading slices over islands.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from fairway.cluster.admin import (
    BYTES_MAX,
    NUMBER_MAX,
    AllocateSlice,
    ReleaseSlice,
    allocate_slice,
    release_slice,
)
from fairway.cluster.registry import carried_directory
from fairway.errors import NotRunningError, SliceError
from fairway.quantities import parse_size

__all__ = ["Slice", "slice"]


class Slice:
    """Virtual devices of one island.

    Attributes:
        devices: array of devices in the requested shape, for a ``Mesh``.
        island: number of the island they are on.
    """

    def __init__(
        self, directory: Path, client: int, devices: np.ndarray[Any, Any], island: int
    ) -> None:
        self.devices = devices
        self.island = island
        self._directory = directory
        self._client = client

    def free(self) -> None:
        """Releases the devices; arrays on them stay until they are deleted."""
        numbers = [device.id for device in self.devices.flat]
        with _answered():
            release_slice(self._directory, ReleaseSlice(self._client, numbers))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.free()

    def __repr__(self) -> str:
        return f"Slice(shape={self.devices.shape}, island={self.island})"


def slice(
    shape: Sequence[int], *, island: int | None = None, memory: int | str | None = None
) -> Slice:
    """Allocates a slice of devices.

    Args:
        shape: extents of their mesh.
        island: the island to use; None leaves it to the resource manager, which takes the one with
            the fewest slices.
        memory: memory to reserve on each device, in bytes or such as ``"4GiB"``: the slice is
            placed where this much is not reserved by others. Use beyond it is not prevented. Where
            the capacity of devices is unknown, as of CPUs unless ``device_memory`` is set, any
            request fits and no reservation is counted.

    Returns:
        The slice, valid until it is freed or this process ends.

    Raises:
        SliceError: no island has that many devices with that much memory, or this process is not a
            client of Fairway.
        ConfigError: ``memory`` is malformed.

    Example:
        >>> mesh = Mesh(fairway.slice((2, 2)).devices, ("x", "y"))
    """
    first: Any = jax.devices()[0]
    client = getattr(first, "client_number", None)
    if client is None:
        raise SliceError(
            f"slices are of devices of Fairway, but JAX uses {first.platform!r} devices of this "
            "process; run the script with `fairway run`"
        )
    target = os.environ.get("JAX_BACKEND_TARGET", "")
    directory = carried_directory(target) or Path(str(first.controller_directory))
    extents = [int(extent) for extent in shape]
    bytes_each = parse_size("memory", memory) if isinstance(memory, str) else memory
    if not all(1 <= extent <= NUMBER_MAX for extent in extents):
        raise SliceError(f"a slice of shape {extents} has no devices, or too many")
    if island is not None and not 0 <= island <= NUMBER_MAX:
        raise SliceError(f"there is no island {island}")
    if bytes_each is not None and not 0 <= bytes_each <= BYTES_MAX:
        raise SliceError(f"a slice cannot reserve {bytes_each} bytes on each device")
    with _answered():
        answer = allocate_slice(directory, AllocateSlice(client, extents, island, bytes_each))
    every: Any = first.client
    known = {device.id: device for device in every._get_all_devices()}
    devices = np.array([known[number] for number in answer.devices]).reshape(extents)
    return Slice(directory, client, devices, answer.island)


@contextmanager
def _answered() -> Iterator[None]:
    """Raises a :class:`SliceError` where the controller does not answer."""
    try:
        yield
    except NotRunningError as error:
        raise SliceError(f"no answer about slices: {error}") from error
