"""Messages between a host and the process that runs a client's functions, with bytes behind them.

A message is its length (32 bits, little-endian), its header in MessagePack, which says how many
bytes each part behind it has, and these parts.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec

__all__ = ["Call", "Drop", "Line", "Load", "Message", "Outcome", "Setup", "ShardHeader"]

LENGTH = struct.Struct("<I")
HEADER_BYTES_MAX = 64 << 20
"""Most bytes of a message without its parts."""


class ShardHeader(msgspec.Struct, array_like=True):
    """A shard, whose bytes are a part of the message.

    Attributes:
        device: the local device that it is on.
        dtype: its element type.
        shape: its shape.
    """

    device: int
    dtype: str
    shape: list[int]


class Setup(msgspec.Struct, tag=True):
    """What the process must know before anything else.

    Attributes:
        devices: the number of each device of the cluster.
        own: the number of each device of this host.
        user: the user to become before any function is loaded; None to stay the host's.
    """

    devices: list[int]
    own: list[int]
    user: int | None


class Load(msgspec.Struct, tag=True):
    """Load a function, whose pickle is the only part.

    Attributes:
        call: correlates the outcome.
        executable: number of the function.
    """

    call: int
    executable: int


class Call(msgspec.Struct, tag=True):
    """Call a function.

    Attributes:
        call: correlates the outcome.
        executable: number of the function.
        arguments: the shards of each argument on this host.
    """

    call: int
    executable: int
    arguments: list[list[ShardHeader]]


class Drop(msgspec.Struct, tag=True):
    """Forget a function.

    Attributes:
        executable: number of the function.
    """

    executable: int


class Outcome(msgspec.Struct, tag=True):
    """What a call has come to.

    Attributes:
        call: the call.
        error: the type, message and traceback of what it has raised, if it has failed.
        results: the shards of each result on this host.
    """

    call: int
    error: str | None
    results: list[list[ShardHeader]] = []


Message = Setup | Load | Call | Drop | Outcome


class _Header(msgspec.Struct, array_like=True):
    message: Message
    parts: list[Annotated[int, msgspec.Meta(ge=0)]]


_DECODER = msgspec.msgpack.Decoder(_Header)


class Line:
    """One end of a connection; one thread may send while another receives.

    Args:
        connection: the socket.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._stream = connection.makefile("rb")

    def send(self, message: Message, parts: Sequence[Any] = ()) -> None:
        """Sends a message and its parts.

        Raises:
            OSError: the other end is gone.
        """
        views = [memoryview(part).cast("B") for part in parts]
        header = msgspec.msgpack.encode(_Header(message, [len(view) for view in views]))
        self._connection.sendall(LENGTH.pack(len(header)) + header)
        for view in views:
            self._connection.sendall(view)

    def receive(
        self, check: Callable[[Message, int], None] = lambda _message, _bytes: None
    ) -> tuple[Message, list[bytearray]] | None:
        """Returns the next message and its parts; None once the other end is gone.

        Args:
            check: is called with a message and the bytes of its parts before they are read, and
                raises if they are not wanted.

        Raises:
            msgspec.ValidationError: what was received is no message.
        """
        try:
            (length,) = LENGTH.unpack(self._read(LENGTH.size))
            if length > HEADER_BYTES_MAX:
                raise msgspec.ValidationError(f"a message of {length} bytes")
            header = _DECODER.decode(self._read(length))
            check(header.message, sum(header.parts))
            return header.message, [self._read(size) for size in header.parts]
        except (EOFError, OSError):
            return None

    def close(self) -> None:
        """Ends the connection, also for a thread that receives."""
        with contextlib.suppress(OSError):  # the other end was first
            self._connection.shutdown(socket.SHUT_RDWR)

    def free(self) -> None:
        """Closes the socket, which no thread uses any more."""
        with self._stream, self._connection:
            return

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        done = 0
        while done < size:
            count = self._stream.readinto(view[done:])
            if not count:
                raise EOFError
            done += count
        return data
