"""Sockets on which the controller's process answers questions of this user's other processes.

``status.sock`` sends the overview on connecting. ``slices.sock`` and ``islands.sock`` take one
question as a line of JSON and answer it. Only this process's own user is answered.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fairway import _native

__all__ = ["Door", "slice_answers"]

QUESTION_BYTES_MAX = 1 << 16
WAIT_S_MAX = 1.0
"""How long a connection may take to ask or to listen; others wait meanwhile."""


class Door:
    """A Unix socket that answers one connection after another.

    Args:
        path: where it listens.
        answer: makes an answer of a question.
        asks: does a connection ask something, or is it told at once?
    """

    def __init__(self, path: Path, answer: Callable[[Any], Any], *, asks: bool) -> None:
        self._answer = answer
        self._asks = asks
        self._closing = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(16)
        self._listener.settimeout(0.5)
        threading.Thread(target=self._serve, daemon=True, name="fairway-door").start()

    def close(self) -> None:
        """Answers nobody any more."""
        self._closing.set()

    def _serve(self) -> None:
        with self._listener:
            while not self._closing.is_set():
                try:
                    connection, _ = self._listener.accept()
                except TimeoutError:
                    continue
                except OSError:  # no descriptors are left, for now
                    self._closing.wait(0.05)
                    continue
                with connection:
                    if _user_of(connection) == os.geteuid():
                        connection.settimeout(WAIT_S_MAX)
                        self._serve_one(connection)

    def _serve_one(self, connection: socket.socket) -> None:
        try:
            question = self._read(connection) if self._asks else None
            connection.sendall(json.dumps(self._answer(question)).encode())
        except (OSError, ValueError, RecursionError):
            return  # it asks nothing that can be read, or does not listen

    @staticmethod
    def _read(connection: socket.socket) -> Any:
        with connection.makefile("rb") as lines:
            return json.loads(lines.readline(QUESTION_BYTES_MAX))


def _user_of(connection: socket.socket) -> int:
    """The user of the process that connected (``SO_PEERCRED`` in unix(7))."""
    size = struct.calcsize("3i")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    _, user, _ = struct.unpack("3i", credentials)
    return int(user)


def slice_answers(server: _native.Server) -> Callable[[Any], Any]:
    """What answers questions about slices.

    They are ``{"allocate": shape, "client": number, "island": number or none, "memory": bytes or
    none}`` and ``{"release": devices, "client": number}``.
    """

    def answer(question: Any) -> Any:
        try:
            client = int(question["client"])
            if "release" in question:
                server.release(client, [int(number) for number in question["release"]])
                return {}
            shape = [int(extent) for extent in question["allocate"]]
            island, memory = question.get("island"), question.get("memory")
            devices, island = server.allocate(client, shape, island, memory)
        except _native.StatusError as error:
            return {"error": error.args[1]}
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            return {"error": f"the question cannot be understood: {error!r}"}
        return {"devices": devices, "island": island}

    return answer
