"""A process that runs a client's Python functions, as its host sees it."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from fairway import children
from fairway.host.colocated.line import Call, Drop, Line, Load, Message, Outcome, Setup, ShardHeader
from fairway.host.objects import Failed

__all__ = ["CallFailedError", "FunctionProcess", "ProcessEndedError"]

Answer = tuple[list[list[ShardHeader]], list[bytearray]]
"""The shards of each result, and their bytes."""


class CallFailedError(Exception):
    """A function has raised; the text is what and where."""


class ProcessEndedError(Exception):
    """The process of a client's functions has ended."""


class FunctionProcess:
    """A process that runs a client's functions.

    Args:
        setup: what it must know.

    Raises:
        Failed: this process may not start one of that user.
    """

    def __init__(self, setup: Setup) -> None:
        _check_user(setup.user)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            self._child = subprocess.Popen(
                [*children.command("fairway.host.colocated"), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                env={**_environment(setup.user), "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"},
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # what it forks ends with it
            )
        self._line = Line(ours)
        self._calls = itertools.count(1)
        self._lock = threading.Lock()
        self._open: dict[int, tuple[Future[Answer], int]] = {}
        self._outgoing: queue.SimpleQueue[tuple[Message, Sequence[Any]] | None]
        self._outgoing = queue.SimpleQueue()
        self.loaded: set[int] = set()
        self.has_ended = False
        self._outgoing.put((setup, ()))
        sending = threading.Thread(target=self._send, name="fairway-colocated-out", daemon=True)
        for thread in (
            sending,
            threading.Thread(target=self._receive, args=(sending,), daemon=True),
            threading.Thread(target=self._watch, daemon=True),
        ):
            thread.start()

    def load(self, executable: int, program: bytes) -> None:
        """Loads a function.

        Raises:
            CallFailedError: it cannot be loaded.
            ProcessEndedError: the process has ended.
        """
        self._call(lambda call: Load(call, executable), [program], 0).result()
        self.loaded.add(executable)

    def run(
        self,
        executable: int,
        arguments: list[list[ShardHeader]],
        parts: Sequence[Any],
        result_bytes: int,
    ) -> Answer:
        """Runs a function, and returns its results, which have at most ``result_bytes``.

        Raises:
            CallFailedError: it has raised.
            ProcessEndedError: the process has ended.
        """
        return self._call(
            lambda call: Call(call, executable, arguments), parts, result_bytes
        ).result()

    def drop(self, executable: int) -> None:
        """Forgets a function, after what was asked for before."""
        self.loaded.discard(executable)
        self._outgoing.put((Drop(executable), ()))

    def kill(self) -> None:
        """Ends the process, and what it has forked; its runs fail."""
        with self._lock, contextlib.suppress(ProcessLookupError):
            if not self.has_ended:  # or its number may be another's
                os.killpg(self._child.pid, signal.SIGKILL)
                self._line.close()

    def _call(
        self, make: Callable[[int], Message], parts: Sequence[Any], result_bytes: int
    ) -> Future[Answer]:
        future: Future[Answer] = Future()
        with self._lock:
            if self.has_ended:
                raise ProcessEndedError
            call = next(self._calls)
            self._open[call] = future, result_bytes
            self._outgoing.put((make(call), parts))
        return future

    def _watch(self) -> None:
        """Waits for the end of the process; what it has forked may have the connection, too."""
        with contextlib.suppress(ChildProcessError):  # it was waited for already
            os.waitid(os.P_PID, self._child.pid, os.WEXITED | os.WNOWAIT)
        self.kill()

    def _send(self) -> None:
        while (taken := self._outgoing.get()) is not None:
            message, parts = taken
            try:
                self._line.send(message, parts)
            except OSError:
                return  # the thread that receives notices, too

    def _check(self, message: Message, size: int) -> None:
        """Fails unless a message is the outcome of an open call: the sender runs any code."""
        if not isinstance(message, Outcome) or message.call not in self._open:
            raise ValueError(f"unexpected: {message}")
        if size > self._open[message.call][1]:
            raise ValueError(f"{size} bytes of results")

    def _receive(self, sending: threading.Thread) -> None:
        reason = ""
        try:
            while (received := self._line.receive(self._check)) is not None:
                outcome, parts = received
                assert isinstance(outcome, Outcome), "checked"
                future, _ = self._open.pop(outcome.call)
                if outcome.error is None:
                    future.set_result((outcome.results, parts))
                else:
                    future.set_exception(CallFailedError(outcome.error))
        except Exception as error:  # code of the client's has written to the connection
            reason = f", since it sent what is no outcome ({type(error).__name__})"
        self.kill()
        with self._lock:
            status = self._child.wait()
            self.has_ended = True
            left, self._open = self._open, {}
        for future, _ in left.values():
            future.set_exception(ProcessEndedError(_how_it_ended(status) + reason))
        self._outgoing.put(None)
        sending.join()
        self._line.free()


def _check_user(user: int | None) -> None:
    """Fails unless this process may start one of another user.

    Raises:
        Failed: it may not.
    """
    if user is not None and os.geteuid() != 0:
        raise Failed(
            "PERMISSION_DENIED: hosts run functions of their own user only; that user allows "
            "others by the setting client_code"
        )


def _environment(user: int | None) -> dict[str, str]:
    """Returns the environment of a process; that of another user gets nothing that is private."""
    own = children.environment()
    if user is None:
        return own
    return {name: own[name] for name in ("PATH", "PYTHONPATH", "LANG", "TZ") if name in own}


def _how_it_ended(status: int) -> str:
    return f" by signal {-status}" if status < 0 else f" with status {status}"
