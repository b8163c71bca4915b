"""Sends reports to the controller."""

from __future__ import annotations

import socket
import threading

import msgspec

from fairway.host import messages

LENGTH_BYTES = 4
"""Size of the little-endian length of a report, which precedes it."""


class Reporter:
    """Sends reports to the controller; thread-safe."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._encode_into = msgspec.msgpack.Encoder().encode_into
        self._buffer = bytearray()

    def send(self, report: messages.Report | messages.Hello) -> None:
        """Sends one report."""
        with self._lock:
            buffer = self._buffer
            self._encode_into(report, buffer, LENGTH_BYTES)
            buffer[:LENGTH_BYTES] = (len(buffer) - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "little")
            self._connection.sendall(buffer)

    def done(self, ticket: int, reply: messages.HostReply) -> None:
        """Answers a command."""
        self.send(messages.CommandDone(ticket, reply))

    def failed(self, ticket: int, text: str) -> None:
        """Answers a command with an error, given as ``CODE_NAME: message``."""
        self.send(messages.CommandFailed(ticket, text))
