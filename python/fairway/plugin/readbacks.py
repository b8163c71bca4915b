"""Reads of small arrays over a connection of their own, in half the round trips.

The stock client waits until the bytes of an array are at the controller, and then fetches them. A
loop that reads each result, as one that generates tokens does, pays for both every time. So small
arrays are asked for by a message that the client has anyway, a copy, to a memory whose name says
under which name the bytes are to be sent; they come on a connection beside the session.
"""

import collections
import contextlib
import itertools
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from .connection import open_stream

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

RECONNECT_S = 1.0
"""Time after the end of a connection before another one is opened."""

Array = Any


class _Request:
    """An array that was asked for.

    Attributes:
        is_over: whether its bytes have come, or it has failed.
        data: its bytes; None if it has failed.
    """

    __slots__ = ("data", "is_over")

    def __init__(self) -> None:
        self.is_over = False
        self.data: bytes | None = None


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
        self._numbers = itertools.count()
        self._places: dict[tuple[int, Any], Any] = {}
        self._early: dict[int, tuple[weakref.ref[Any], tuple[_Connection, _Request]]] = {}

    def begin(self, array: Array) -> bool:
        """Asks for an array that will be read later; returns whether it is small."""
        number = id(array)
        if number in self._early:
            return True
        if (asked := self._ask(array)) is None:
            return False
        self._early[number] = weakref.ref(array, lambda _: self._early.pop(number, None)), asked
        return True

    def read(self, array: Array) -> np.ndarray[Any, Any] | None:
        """Returns the elements of a small array; None of any that has to be read otherwise."""
        _, asked = self._early.pop(id(array), (None, None))
        if asked is None and (asked := self._ask(array)) is None:
            return None
        connection, request = asked
        data = connection.wait(request)
        if data is None:
            return None
        elements = np.frombuffer(data, array.dtype)
        return elements.reshape(array.shape)

    def _ask(self, array: Array) -> "tuple[_Connection, _Request] | None":
        """Asks for an array; None if it has to be read otherwise."""
        if not self._is_small(array):
            return None
        connection, request = self._connected(), _Request()
        if (name := connection.add(request)) is None:
            return None
        from jaxlib import _jax

        devices = array.sharding._internal_device_list
        place = self._place(name, devices)
        copy = _jax.ArrayCopySemantics.ALWAYS_COPY
        _jax.batched_copy_array_to_devices_with_sharding([array], [devices], [place], [copy])
        return connection, request

    def _is_small(self, array: Array) -> bool:
        dtype = array.dtype
        if not isinstance(dtype, np.dtype) or dtype.kind == "T" or dtype.hasobject:
            return False
        if array.size * dtype.itemsize > BYTES_MAX or not array.is_fully_replicated:
            return False
        return array.sharding._internal_device_list[0].client is self._client

    def _place(self, name: int, devices: Any) -> Any:
        place = self._places.get((name, devices))
        if place is None:
            if len(self._places) >= PLACES_MAX:
                self._places.clear()
            place = self._places[name, devices] = _place_of(f"{MEMORY}{name}", devices)
        return place

    def _connected(self) -> "_Connection":
        with self._lock:
            if self._connection is None or self._connection.is_long_over():
                number = next(self._numbers)
                self._connection = _Connection(self._target, self._key, number)
            return self._connection


def _place_of(memory: str, devices: Any) -> Any:
    """Returns a sharding over devices with a memory that they do not have."""
    from jaxlib import _jax

    names = {"_memory_kind": memory, "memory_kind": memory}
    places = {"_internal_device_list": devices, "device_set": frozenset(devices)}
    return type("Place", (_jax.Sharding,), {**names, **places})()


class _Connection:
    """The connection, from which whichever thread waits receives for all.

    So a thread that reads alone is woken by its bytes, and not by another thread. A slot is free
    again when its bytes have come, whether or not its request is still waited for. An exception
    of a signal handler may come at any point: where bytes may be lost by it, the connection ends,
    and reads go the other way until there is a new one.

    Args:
        target: the controller, as ``grpc://HOST:PORT``.
        key: proves that the connection is this client's.
        number: number of the connection; the names of its slots are its own.
    """

    def __init__(self, target: str, key: bytes, number: int) -> None:
        self._changed = threading.Condition()
        self._free = collections.deque(range(number * SLOTS, (number + 1) * SLOTS))
        self._open: dict[int, _Request] = {}
        self._is_received = False
        self._received = bytearray()
        stream = None
        with contextlib.suppress(OSError):
            stream = open_stream(target, GREETING + key)
        # There is none with an older controller, or while the last one is still open.
        self._ended_s: float | None = time.monotonic() if stream is None else None
        self._socket = stream or socket.socket()

    def is_long_over(self) -> bool:
        """Returns whether it is time for another connection."""
        return self._ended_s is not None and time.monotonic() > self._ended_s + RECONNECT_S

    def add(self, request: _Request) -> int | None:
        """Returns the name of a slot for a request; None if nothing can be read here now."""
        with self._changed:
            if self._ended_s is not None:
                return None
            if not self._free and not self._is_received:
                self._receive(socket.MSG_DONTWAIT)  # bytes that nothing has waited for
            if not self._free:
                return None
            name = self._free.popleft()
            self._open[name] = request
            return name

    def wait(self, request: _Request) -> bytes | None:
        """Returns the bytes of a request; None if it has failed."""
        while True:
            with self._changed:
                if request.is_over or self._ended_s is not None:
                    return request.data
                if self._is_received:
                    self._changed.wait()
                    continue
                self._is_received = True
            self._receive(0)

    def _receive(self, flags: int) -> None:
        """Receives bytes, and completes the requests whose bytes are there."""
        try:
            try:
                part = self._socket.recv(1 << 16, flags)
            except BlockingIOError:
                return
            with self._changed:
                self._take(part)
        except BaseException as error:
            self._end()
            if not isinstance(error, OSError):
                raise
        finally:
            with self._changed:
                self._is_received = False
                self._changed.notify_all()

    def _take(self, part: bytes) -> None:
        if not part:
            raise ConnectionError
        self._received += part
        received = self._received
        while len(received) >= READBACK.size:
            name, code, length = READBACK.unpack_from(received)
            end = READBACK.size + length
            if len(received) < end:
                return
            if (request := self._open.pop(name, None)) is not None:
                request.data = None if code else bytes(received[READBACK.size : end])
                request.is_over = True
                self._free.append(name)
            del received[:end]

    def _end(self) -> None:
        with self._changed:
            self._ended_s = time.monotonic()
            self._socket.close()
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
