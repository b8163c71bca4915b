"""The process that runs a client's functions: ``python -m fairway.host.colocated DESCRIPTOR``."""

from __future__ import annotations

import os
import pwd
import queue
import signal
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NoReturn

from fairway.host.__main__ import die_with_parent
from fairway.host.colocated.line import Call, Drop, Line, Load, Outcome, Setup

if TYPE_CHECKING:
    from fairway.host.colocated.functions import Functions

THREADS = 64
"""Most runs at a time; runs of one stream follow one another."""


class _Worker:
    """Carries out what the host asks for.

    Args:
        line: the connection to the host.
        functions: the functions that are loaded here.
    """

    def __init__(self, line: Line, functions: Functions) -> None:
        self._line = line
        self._functions = functions
        self._outcomes: queue.SimpleQueue[tuple[Outcome, list[Any]]] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="colocated")
        threading.Thread(target=self._report, daemon=True).start()

    def serve(self) -> None:
        """Works until the host closes the connection."""
        while (received := self._line.receive()) is not None:
            message, parts = received
            match message:
                case Load():
                    self._do(message.call, self._load, message, parts)
                case Call():
                    self._threads.submit(self._do, message.call, self._run, message, parts)
                case Drop():
                    self._functions.drop(message.executable)
                case _:
                    raise ValueError(f"a host does not send {message}")

    def _load(self, message: Load, parts: list[bytearray]) -> tuple[Outcome, list[Any]]:
        self._functions.load(message.executable, bytes(parts[0]))
        return Outcome(message.call, None), []

    def _run(self, message: Call, parts: list[bytearray]) -> tuple[Outcome, list[Any]]:
        results, data = self._functions.run(message.executable, message.arguments, parts)
        return Outcome(message.call, None, results), data

    def _do(self, call: int, act: Any, message: Any, parts: list[bytearray]) -> None:
        from fairway.host.colocated.functions import described

        try:
            outcome = act(message, parts)
        except BaseException as error:  # any error must reach the client
            outcome = Outcome(call, described(error)), []
        self._outcomes.put(outcome)

    def _report(self) -> None:
        while True:
            outcome, data = self._outcomes.get()
            try:
                self._line.send(outcome, data)
            except BaseException:  # the host is gone, or a function has closed the connection
                os._exit(1)


def _become(user: int) -> None:
    """Gives up the rights of the host's user, root, for good."""
    try:
        group = pwd.getpwuid(user).pw_gid
    except KeyError:
        group = user  # it has no entry on this machine
    os.setgroups([])
    os.setresgid(group, group, group)
    os.setresuid(user, user, user)
    os.chdir("/")
    die_with_parent()  # a change of the user resets it


def main() -> NoReturn:
    """Serves the host at the other end of a socket, whose descriptor is the argument."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the client
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    line = Line(socket.socket(fileno=descriptor))
    received = line.receive()
    if received is None or not isinstance(received[0], Setup):
        os._exit(1)
    setup = received[0]

    from fairway.host.colocated.devices import Devices  # imports jax
    from fairway.host.colocated.functions import Functions

    devices = Devices(setup.devices, setup.own)
    devices.answer_to_numbers()
    if setup.user is not None:
        _become(setup.user)
    _Worker(line, Functions(devices)).serve()
    os._exit(0)  # threads may be inside functions


if __name__ == "__main__":
    main()
