"""Admin sockets: the controller's process answers requests of this user's other processes.

``status.sock`` sends the overview on connecting. ``slices.sock`` and ``islands.sock`` take one
request as a line of JSON and answer it. Processes of other users get no answer.
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
"""Timeout of a connection in seconds; connections are served one at a time, so others wait."""


class Door:
    """A Unix socket that serves one connection after another.

    Args:
        path: where it listens.
        answer: maps a request to a response.
        asks: whether a connection sends a request first, or gets the response at once.
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
        """Stops serving."""
        self._closing.set()

    def _serve(self) -> None:
        with self._listener:
            while not self._closing.is_set():
                try:
                    connection, _ = self._listener.accept()
                except TimeoutError:
                    continue
                except OSError:  # no file descriptors are left, for now
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
            return  # the request is malformed, or the peer does not read the response

    @staticmethod
    def _read(connection: socket.socket) -> Any:
        with connection.makefile("rb") as lines:
            return json.loads(lines.readline(QUESTION_BYTES_MAX))


def _user_of(connection: socket.socket) -> int:
    """Returns the user of the process that connected (``SO_PEERCRED`` in unix(7))."""
    size = struct.calcsize("3i")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    _, user, _ = struct.unpack("3i", credentials)
    return int(user)


def slice_answers(server: _native.Server) -> Callable[[Any], Any]:
    """Returns the function that answers requests about slices.

    Requests are ``{"allocate": shape, "client": number, "island": number or none, "memory": bytes
    or none}`` and ``{"release": devices, "client": number}``.
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
