"""Hosts that agents on other machines run: agents join, and are given hosts in order."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from fairway.cluster.agents import (
    SERVICE,
    AgentHello,
    AgentRefused,
    FromAgent,
    HostEnded,
    LineReader,
    StartHost,
    StopHost,
    Versions,
    send,
)
from fairway.errors import AgentError, StartError
from fairway.host.__main__ import HostSettings

__all__ = ["JoinedHosts"]

HELLO_S = 10.0
"""Time within which an agent introduces itself."""


class _Agent:
    """An agent's connection."""

    def __init__(self, connection: socket.socket, hello: AgentHello) -> None:
        self.connection = connection
        self.hello = hello
        self.host: int | None = None
        self.ended: str | None = None
        self.gone = False

    def send(self, message: StartHost | StopHost | AgentRefused) -> bool:
        try:
            send(self.connection, message)
        except OSError:
            return False
        return True


class JoinedHosts:
    """The hosts of a run that agents on other machines run.

    Args:
        directory: the run's directory, where the gateway connects agents to a socket.
        note: called with a sentence when an agent joins, is refused or leaves.
    """

    start_timeout_s = 600.0
    """Time within which agents must have joined and started their hosts."""

    def __init__(self, directory: Path, note: Callable[[str], None]) -> None:
        self.path = directory / f"{SERVICE}.sock"
        self._note = note
        self._lock = threading.Lock()
        self._closing = False
        self._idle: list[_Agent] = []
        self._agents: dict[int, _Agent] = {}
        """The agent that runs each host, or ran it last."""
        self._wanted: dict[int, HostSettings] = {}
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self._listener.listen(1024)
        threading.Thread(target=self._accept, daemon=True, name="fairway-agents").start()

    def separate(self, island: int) -> tuple[str, ...]:
        """Returns no namespaces: hosts of other machines have networks of their own."""
        return ()

    def start(self, settings: HostSettings, prefix: Sequence[str] = ()) -> None:
        """Gives a host to the next agent that is there or joins; returns at once.

        Raises:
            StartError: there is a command prefix.
        """
        if prefix:
            raise StartError("hosts that join have no command prefix; start their agents with it")
        self.stop(settings.host)
        with self._lock:
            self._wanted[settings.host] = settings
        self._match()

    def check(self, hosts: Iterable[int] | None = None) -> None:
        """Checks that hosts that were started have not ended.

        Raises:
            StartError: one has ended; the text has the end of its output.
        """
        with self._lock:
            for host in list(self._agents) if hosts is None else hosts:
                agent = self._agents.get(host)
                if agent is not None and host not in self._wanted and agent.ended is not None:
                    raise StartError(
                        f"host {host} on {agent.hello.machine} ended while starting, {agent.ended}"
                    )

    def missing(self) -> list[int]:
        """Returns the hosts for which no agent has joined."""
        with self._lock:
            return sorted(self._wanted)

    def ending(self, host: int, process_id: int) -> str | None:
        """Returns how a host ended; None if it is not known to have ended."""
        with self._lock:
            agent = self._agents.get(host)
            if agent is None or agent.ended is None:
                return None
            return f"on {agent.hello.machine} {agent.ended}"

    def stop(self, host: int, process_id: int | None = None) -> None:
        """Ends one host at once; its agent may be given another one."""
        with self._lock:
            agent = self._agents.get(host)
        if agent is not None and agent.host == host:
            agent.send(StopHost())

    def close(self, grace_s: float = 0.0) -> None:
        """Ends all agents, and with them their hosts."""
        with self._lock:
            self._closing = True
            agents = [*self._agents.values(), *self._idle]
            self._idle.clear()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        for agent in agents:
            with contextlib.suppress(OSError):
                agent.connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while not self._closing:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            serving = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            serving.start()

    def _serve(self, connection: socket.socket) -> None:
        """Serves an agent until its connection ends."""
        with connection:
            connection.settimeout(HELLO_S)
            reader = LineReader(connection, FromAgent)
            try:
                hello = reader.read()
            except (TimeoutError, AgentError):
                return
            if not isinstance(hello, AgentHello):
                return
            if remedy := hello.versions.remedy(Versions.here()):
                self._note(f"an agent on {hello.machine} was refused: {remedy}")
                with contextlib.suppress(OSError):
                    send(connection, AgentRefused(remedy))
                return
            connection.settimeout(None)
            agent = _Agent(connection, hello)
            with self._lock:
                if self._closing:
                    return
                self._idle.append(agent)
            self._match()
            try:
                while (message := reader.read()) is not None:
                    if isinstance(message, HostEnded):
                        self._ended(agent, message)
            except AgentError as error:
                self._note(f"the agent on {hello.machine} is left: {error}")
            self._gone(agent)

    def _match(self) -> None:
        """Gives hosts that wait for an agent to agents that wait for a host."""
        while True:
            with self._lock:
                if self._closing or not self._idle or not self._wanted:
                    return
                host = min(self._wanted)
                settings, agent = self._wanted.pop(host), self._idle.pop(0)
                agent.host, agent.ended = host, None
                self._agents[host] = agent
            address = agent.hello.address
            numeric = f"[{address}]" if ":" in address else address
            settings = dataclasses.replace(settings, address=address, data=f"tcp:{numeric}:0")
            if not agent.send(StartHost(dataclasses.asdict(settings))):
                with self._lock:
                    self._wanted.setdefault(host, settings)

    def _ended(self, agent: _Agent, message: HostEnded) -> None:
        with self._lock:
            if agent.host != message.host:
                return
            agent.ended, agent.host = message.how, None
            self._idle.append(agent)
        self._match()

    def _gone(self, agent: _Agent) -> None:
        with self._lock:
            if agent in self._idle:
                self._idle.remove(agent)
            if agent.host is not None and agent.ended is None:
                agent.ended = "with its agent, whose connection ended"
                agent.host = None
