"""Reads of small arrays over a connection of their own, in half the round trips.

The stock client waits until the bytes of an array are at the controller, and then fetches them. A
loop that reads each result, as one that generates tokens does, pays for both every time. So small
arrays are asked for by a message that the client has anyway, a copy, to a memory whose name says
under which name the bytes are to be sent; they come on a connection beside the session.
"""

import collections
import socket
import struct
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from .connection import REACHABLE_WITHIN_S, address_of

GREETING = b"fairway readbacks 1\n"
READBACK = struct.Struct("<III")
MEMORY = "fairway_readback_"
"""What the names of such memories begin with."""
BYTES_MAX = 16 << 10
"""Most bytes of an array that is read this way."""
SLOTS = 64
"""Most reads that are under way."""
PLACES_MAX = 4096
"""Most places of arrays that are remembered."""

Array = Any


class Readbacks:
    """Reads small arrays of a client.

    Args:
        client: the client, whose arrays are read.
        target: the controller, as ``grpc://HOST:PORT``.
        key: proves that the connection is this client's.
    """

    def __init__(self, client: object, target: str, key: bytes) -> None:
        self._client = client
        self._target = target
        self._key = key
        self._lock = threading.Lock()
        self._connection: _Connection | None = None
        self._places: dict[tuple[int, Any], Any] = {}
        self._early: dict[int, tuple[weakref.ref[Any], int]] = {}

    def begin(self, array: Array) -> bool:
        """Asks for an array that will be read later; returns whether it is small."""
        number = id(array)
        if number in self._early:
            return True
        if (slot := self._ask(array)) is None:
            return False

        def forget(_: object) -> None:
            del self._early[number]
            self._connected().abandon(slot)

        self._early[number] = weakref.ref(array, forget), slot
        return True

    def read(self, array: Array) -> np.ndarray[Any, Any] | None:
        """Returns the elements of a small array; None of any that has to be read otherwise."""
        _, slot = self._early.pop(id(array), (None, None))
        if slot is None and (slot := self._ask(array)) is None:
            return None
        data = self._connected().wait(slot)
        if data is None:
            return None
        elements = np.frombuffer(data, array.dtype)
        return elements.reshape(array.shape)

    def _ask(self, array: Array) -> int | None:
        """Asks for an array; returns the slot, or None if it has to be read otherwise."""
        if not self._is_small(array):
            return None
        connection = self._connected()
        if (slot := connection.take_slot()) is None:
            return None
        from jaxlib import _jax

        try:
            devices = array.sharding._internal_device_list
            place = self._place(slot, devices)
            copy = _jax.ArrayCopySemantics.ALWAYS_COPY
            _jax.batched_copy_array_to_devices_with_sharding([array], [devices], [place], [copy])
        except Exception:  # it says why where it is read otherwise
            connection.give_back(slot)
            return None
        return slot

    def _is_small(self, array: Array) -> bool:
        dtype = array.dtype
        if not isinstance(dtype, np.dtype) or dtype.kind == "T" or dtype.hasobject:
            return False
        if array.size * dtype.itemsize > BYTES_MAX or not array.is_fully_replicated:
            return False
        return array.sharding._internal_device_list[0].client is self._client

    def _place(self, slot: int, devices: Any) -> Any:
        place = self._places.get((slot, devices))
        if place is None:
            if len(self._places) >= PLACES_MAX:
                self._places.clear()
            place = self._places[slot, devices] = _place_of(f"{MEMORY}{slot}", devices)
        return place

    def _connected(self) -> "_Connection":
        with self._lock:
            if self._connection is None:
                self._connection = _Connection(self._target, self._key)
            return self._connection


def _place_of(memory: str, devices: Any) -> Any:
    """Returns a sharding over devices with a memory that they do not have."""
    from jaxlib import _jax

    names = {"_memory_kind": memory, "memory_kind": memory}
    places = {"_internal_device_list": devices, "device_set": frozenset(devices)}
    return type("Place", (_jax.Sharding,), {**names, **places})()


class _Connection:
    """The connection, from which whichever thread waits receives for all.

    So a thread that reads alone is woken by its bytes, and not by another thread.
    """

    def __init__(self, target: str, key: bytes) -> None:
        self._changed = threading.Condition()
        self._free = collections.deque(range(SLOTS))
        self._values: dict[int, bytes | None] = {}
        self._abandoned: set[int] = set()
        self._is_received = False
        self._received = bytearray()
        self._has_ended = False
        try:
            self._socket = socket.create_connection(address_of(target), REACHABLE_WITHIN_S)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.sendall(GREETING + key)
            self._has_ended = self._socket.recv(1) != b"\1"  # an older controller
            self._socket.settimeout(None)
        except OSError:
            self._has_ended = True

    def take_slot(self) -> int | None:
        """Returns a slot for a read; None if all are taken, or nothing can be read here."""
        with self._changed:
            if self._free or self._has_ended or self._is_received:
                return self._free.popleft() if self._free and not self._has_ended else None
            self._is_received = True
        # Bytes of reads that were abandoned, for which nothing has waited.
        part = None
        try:
            part = self._socket.recv(1 << 16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            pass
        except OSError:
            part = b""
        finally:
            self._take(part)
        with self._changed:
            return self._free.popleft() if self._free and not self._has_ended else None

    def give_back(self, slot: int) -> None:
        """Frees a slot that was not used."""
        with self._changed:
            self._free.append(slot)

    def abandon(self, slot: int) -> None:
        """Frees a slot once its bytes have come, for which nothing waits."""
        with self._changed:
            if slot in self._values:
                del self._values[slot]
                self._free.append(slot)
            else:
                self._abandoned.add(slot)

    def wait(self, slot: int) -> bytes | None:
        """Returns the bytes of a read; None if it has failed."""
        try:
            while True:
                with self._changed:
                    if slot in self._values or self._has_ended:
                        self._free.append(slot)
                        return self._values.pop(slot, None)
                    if self._is_received:
                        self._changed.wait()
                        continue
                    self._is_received = True
                part = None
                try:
                    part = self._socket.recv(1 << 16)
                except OSError:
                    part = b""
                finally:
                    self._take(part)
        except BaseException:  # Ctrl-C
            self.abandon(slot)
            raise

    def _take(self, part: bytes | None) -> None:
        """Adds received bytes, if there are any; completes the reads whose bytes are there."""
        with self._changed:
            self._is_received = False
            self._has_ended |= part == b""
            self._received += part or b""
            received = self._received
            while len(received) >= READBACK.size:
                slot, code, length = READBACK.unpack_from(received)
                end = READBACK.size + length
                if len(received) < end:
                    break
                value = None if code else bytes(received[READBACK.size : end])
                del received[:end]
                if slot in self._abandoned:
                    self._abandoned.discard(slot)
                    self._free.append(slot)
                else:
                    self._values[slot] = value
            self._changed.notify_all()


def read_small_arrays(readbacks: Readbacks) -> None:
    """Lets JAX read small arrays this way."""
    from jax._src import array

    kind: Any = array.ArrayImpl
    read: Callable[[Any], Any] = kind._value.fget
    copy: Callable[[Any], None] = kind.copy_to_host_async

    def value(self: Any) -> Any:
        self._check_if_deleted()
        if self._npy_value is None and (elements := readbacks.read(self)) is not None:
            self._npy_value = elements
        return read(self)

    def copy_to_host_async(self: Any) -> None:
        self._check_if_deleted()
        if self._npy_value is not None or not readbacks.begin(self):
            copy(self)

    kind._value = property(value)
    kind.copy_to_host_async = copy_to_host_async
