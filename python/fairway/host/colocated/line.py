"""Messages between a host and the process that runs a client's functions, with bytes behind them.

A message is its length (32 bits, little-endian), its header in MessagePack, which says how many
bytes each part behind it has, and these parts.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from typing import Any

import msgspec

__all__ = ["Drop", "Line", "Load", "Message", "Outcome", "Run", "Setup", "Shard"]

LENGTH = struct.Struct("<I")


class Shard(msgspec.Struct, array_like=True):
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
    """

    devices: list[int]
    own: list[int]


class Load(msgspec.Struct, tag=True):
    """Load a function, whose pickle is the only part.

    Attributes:
        call: correlates the outcome.
        executable: number of the function.
    """

    call: int
    executable: int


class Run(msgspec.Struct, tag=True):
    """Run a function.

    Attributes:
        call: correlates the outcome.
        executable: number of the function.
        arguments: the shards of each argument on this host.
    """

    call: int
    executable: int
    arguments: list[list[Shard]]


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
    results: list[list[Shard]] = []


Message = Setup | Load | Run | Drop | Outcome


class _Header(msgspec.Struct, array_like=True):
    message: Message
    parts: list[int]


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

    def receive(self) -> tuple[Message, list[bytearray]] | None:
        """Returns the next message and its parts; None once the other end is gone."""
        try:
            header = _DECODER.decode(self._read(LENGTH.unpack(self._read(LENGTH.size))[0]))
            return header.message, [self._read(size) for size in header.parts]
        except (EOFError, OSError):
            return None

    def close(self) -> None:
        """Ends the connection, also for a thread that receives."""
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the other end was first

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
