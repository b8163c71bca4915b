"""Receives the controller's commands.

A frame is its length in four little-endian bytes and an array of commands.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable, Iterator

import msgspec

from fairway.host import messages

RECEIVE_BYTES = 1 << 20
"""Size of the buffer that frames are decoded in; a longer frame has a buffer of its own."""
LENGTH_BYTES = 4
_length_at = struct.Struct("<I").unpack_from


class CommandReceiver:
    """Receives frames of commands.

    Args:
        connection: the controller's end sends frames.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._receive_into = connection.recv_into
        self._decode = msgspec.msgpack.Decoder(list[messages.Command]).decode
        self._usual = self._view = memoryview(bytearray(RECEIVE_BYTES))
        self._end = 0

    def receive(self) -> Iterable[list[messages.Command]] | None:
        """Waits for bytes; returns the commands of each frame that is complete.

        Returns:
            None once the connection has ended.

        Raises:
            ConnectionError: the connection has ended inside a frame, or one is longer than allowed.
            msgspec.DecodeError: a frame is malformed.
        """
        view, begun = self._view, self._end
        received = self._receive_into(view[begun:] if begun else view)
        if received == 0:
            if begun:
                raise ConnectionError(f"the connection ended inside a frame, after {begun} bytes")
            return None
        # Usually a frame arrives alone.
        if not begun and LENGTH_BYTES + _length_at(view)[0] == received:
            return (self._decode(view[LENGTH_BYTES:received]),)
        self._end = begun + received
        return self._frames()

    def _frames(self) -> Iterator[list[messages.Command]]:
        """Yields the commands of each frame that is complete; keeps the rest."""
        begin, end, view, length = 0, self._end, self._view, 0
        while end - begin >= LENGTH_BYTES:
            (length,) = _length_at(view, begin)
            after = begin + LENGTH_BYTES + length
            if after > end:
                break
            yield self._decode(view[begin + LENGTH_BYTES : after])
            begin, length = after, 0
        if begin == 0 and LENGTH_BYTES + length <= len(view):
            return
        self._view = self._buffer_for(length)
        self._view[: end - begin] = view[begin:end]
        self._end = end - begin

    def _buffer_for(self, length: int) -> memoryview:
        """Returns a buffer that a frame of ``length`` bytes fits in."""
        if length > messages.COMMAND_FRAME_LIMIT:
            limit = messages.COMMAND_FRAME_LIMIT
            raise ConnectionError(f"a frame of {length} bytes; at most {limit} are accepted")
        if LENGTH_BYTES + length <= RECEIVE_BYTES:
            return self._usual
        return memoryview(bytearray(LENGTH_BYTES + length))
