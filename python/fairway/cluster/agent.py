"""The agent of a host on another machine: ``fairway host --join ADDRESS``.

It proves its token to the gateway of the controller, waits for the settings of a host, and runs
that host as a process of its own. The sockets of the controller that the host needs are carried:
the host connects to Unix sockets of the agent's. It ends when the controller does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fairway import _native
from fairway.cluster.agents import (
    SERVICE,
    AgentHello,
    AgentRefused,
    HostEnded,
    LineReader,
    StartHost,
    StopHost,
    ToAgent,
    Versions,
    send,
)
from fairway.cluster.launchers.local import LocalHosts
from fairway.cluster.registry import new_directory
from fairway.errors import AgentError
from fairway.host.__main__ import HostSettings

__all__ = ["Agent"]

POLL_S = 0.2
"""Time between two looks at whether the host still runs."""


class Agent:
    """An agent that has joined; use it as a context.

    Args:
        address: host and port of the controller's gateway.
        token: of role ``host``.
        note: called with a sentence on what happens.

    Raises:
        AgentError: the controller does not answer, is another one, or refuses the token.
    """

    def __init__(self, address: str, token: str, note: Callable[[str], None]) -> None:
        self._address = address
        self._note = note
        self._host: int | None = None
        self._carried: set[str] = set()
        try:
            self._remote = _native.Remote(address, token)
            here = self._remote.check(SERVICE)
        except (ValueError, OSError) as error:
            raise AgentError(str(error)) from None
        self._directory = new_directory()
        self._hosts = LocalHosts(self._directory)
        self._connection = socket.socket(socket.AF_UNIX)
        self._reader = LineReader(self._connection, ToAgent)
        try:
            self._connection.connect(self._carry(SERVICE))
            send(self._connection, AgentHello(platform.node(), here, os.getpid(), Versions.here()))
        except OSError as error:
            self.close()
            raise AgentError(f"the controller at {address} is gone: {error.strerror}") from None

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the host and leaves the controller."""
        self._hosts.close()
        self._connection.close()
        self._remote.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def serve(self, check: Callable[[], None]) -> None:
        """Runs hosts until the controller ends.

        Args:
            check: called several times a second; an exception that it raises ends this.

        Raises:
            AgentError: the controller refuses this agent; says why, and what to do.
        """
        self._connection.settimeout(POLL_S)
        while True:
            check()
            self._report_ending()
            try:
                message = self._reader.read()
            except TimeoutError:
                continue
            match message:
                case StartHost(settings):
                    self._start(settings)
                case StopHost() if self._host is not None:
                    self._hosts.stop(self._host)
                case AgentRefused(reason):
                    raise AgentError(f"the controller at {self._address} refuses: {reason}")
                case None:
                    self._note("the controller has ended")
                    return

    def _start(self, given: dict[str, Any]) -> None:
        try:
            settings = HostSettings(**given)
        except TypeError as error:
            raise AgentError(f"the settings of a host cannot be read: {error}") from None
        coordinator = settings.coordinator
        if coordinator is not None and coordinator.startswith("unix:"):
            coordinator = f"unix:{self._carry(Path(coordinator[5:]).stem)}"
        control = self._carry(Path(settings.control).stem)
        settings = dataclasses.replace(settings, control=control, coordinator=coordinator)
        self._host = settings.host
        self._note(f"starting host {settings.host}, rank {settings.rank} of {settings.hosts}")
        self._hosts.start(settings)

    def _report_ending(self) -> None:
        if self._host is None or (how := self._hosts.ending(self._host)) is None:
            return
        host, self._host = self._host, None
        self._note(f"host {host} has ended {how}")
        # A controller that has ended is noticed by what is read next.
        with contextlib.suppress(OSError):
            send(self._connection, HostEnded(host, how))

    def _carry(self, service: str) -> str:
        """Returns the path of a Unix socket whose connections reach a service of the controller."""
        path = self._directory / f"{service}.sock"
        if service not in self._carried:
            self._remote.carry(path, service)
            self._carried.add(service)
        return str(path)
