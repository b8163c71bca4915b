"""The admin socket of a run, on which this user's other processes send requests.

Processes of other users get no answer. A second socket takes requests of other machines, which the
gateway announces by a line with the peer's address, token and role.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from fairway.cluster.admin import (
    AdminAnswer,
    AdminRequest,
    Caller,
    Refused,
    read_request,
    wait_until,
)
from fairway.cluster.reports import Refusals
from fairway.errors import FairwayError

__all__ = ["AdminSocket"]

REQUEST_BYTES_MAX = 1 << 16
CONNECTIONS_MAX = 16
"""Connections that are served at a time; others wait in the backlog."""
BACKLOG = 128
WAIT_S_MAX = 1.0
"""Seconds within which a peer sends its request, and within which it reads the answer."""


class AdminSocket:
    """Answers requests of this user's processes, several at a time.

    Args:
        path: where the socket is made.
        answer: maps a request to its answer. A :class:`FairwayError` that it raises is answered
            with :class:`Refused`. It is called in several threads at a time.
        refusals: report processes of other users.
        is_announced: whether a line comes first that says who the caller is; otherwise it is the
            owner.
    """

    def __init__(
        self,
        path: Path,
        answer: Callable[[AdminRequest, Caller], AdminAnswer],
        refusals: Refusals,
        *,
        is_announced: bool = False,
    ) -> None:
        self._answer = answer
        self._refusals = refusals
        self._is_announced = is_announced
        self._closing = threading.Event()
        self._free = threading.BoundedSemaphore(CONNECTIONS_MAX)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(BACKLOG)
        self._listener.settimeout(0.5)
        threading.Thread(target=self._serve, daemon=True, name="fairway-admin").start()

    def close(self) -> None:
        """Stops serving."""
        self._closing.set()
        self._refusals.close()

    def _serve(self) -> None:
        with self._listener:
            while not self._closing.is_set():
                if not self._free.acquire(timeout=0.5):
                    continue
                if (connection := self._accept()) is None:
                    self._free.release()
                    continue
                serving = threading.Thread(
                    target=self._serve_one, args=(connection,), daemon=True, name="fairway-admin"
                )
                try:
                    serving.start()
                except RuntimeError:  # no threads are left, for now
                    connection.close()
                    self._free.release()

    def _accept(self) -> socket.socket | None:
        try:
            return self._listener.accept()[0]
        except TimeoutError:
            return None
        except OSError:  # no file descriptors are left, for now
            self._closing.wait(0.05)
            return None

    def _serve_one(self, connection: socket.socket) -> None:
        try:
            with connection, contextlib.suppress(OSError):  # the peer sends or reads nothing
                user = _user_of(connection)
                if user != os.geteuid():
                    self._refusals.add(f"refused user {user} of this machine at the admin socket")
                else:
                    answer = self._answer_to(_read_lines(connection, 1 + self._is_announced))
                    connection.settimeout(WAIT_S_MAX)
                    connection.sendall(msgspec.json.encode(answer) + b"\n")
        finally:
            self._free.release()

    def _answer_to(self, text: bytes) -> AdminAnswer:
        caller = Caller()
        if self._is_announced:
            announced, _, text = text.partition(b"\n")
            match announced.decode(errors="replace").split(" "):
                case [_, token, role]:
                    caller = Caller(token, role)
                case _:
                    return Refused("no caller was announced")
        try:
            request = read_request(text)
        except ValueError as error:
            return Refused(f"the request cannot be understood: {error}")
        try:
            return self._answer(request, caller)
        except FairwayError as error:
            return Refused(str(error))
        except OSError as error:
            return Refused(f"the controller cannot do that: {error}")


def _read_lines(connection: socket.socket, lines: int) -> bytes:
    """Reads to the end of a number of lines, or to what is not sent any more.

    Raises:
        OSError: that does not come in time, or is too long.
    """
    deadline = time.monotonic() + WAIT_S_MAX
    text = bytearray()
    while text.count(b"\n") < lines:
        wait_until(connection, deadline)
        part = connection.recv(REQUEST_BYTES_MAX)
        text += part
        if len(text) > REQUEST_BYTES_MAX:
            raise OSError("the request is too long")
        if not part:
            break
    return bytes(text)


def _user_of(connection: socket.socket) -> int:
    """Returns the user of the process that connected (``SO_PEERCRED`` in unix(7))."""
    size = struct.calcsize("3i")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    _, user, _ = struct.unpack("3i", credentials)
    return int(user)
