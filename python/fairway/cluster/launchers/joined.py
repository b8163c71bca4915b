"""Hosts that agents on other machines run: agents join, and are given hosts in order."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from fairway.cluster.agents import (
    LINE_MAX,
    PART_BYTES,
    SERVICE,
    AgentAccepted,
    AgentHeartbeat,
    AgentHello,
    AgentRefused,
    ControllerEnded,
    FromAgent,
    HostEnded,
    HostOutput,
    LeaseRenewed,
    ModulesPart,
    NeedModules,
    RecordsPart,
    StartHost,
    StopHost,
    ToAgent,
    Versions,
    encoded,
    read_message,
)
from fairway.cluster.channels import ChannelNetworks
from fairway.cluster.launchers.launcher import AgentLauncher, AgentRequest
from fairway.cluster.logs import Logs, printable
from fairway.cluster.modules import ModuleArchive
from fairway.errors import AgentError, StartError
from fairway.host.__main__ import HostSettings, tcp_address
from fairway.host.trace import Record

__all__ = ["JoinedHosts", "Joining"]

HELLO_S = 10.0
"""Time within which an agent introduces itself."""
BACKLOG = 1024
UNSENT_MAX = 1 << 20
"""Bytes that an agent may leave unread before its connection is closed."""
ORDERLY = "with status 0"
"""How a host ends whose connection the controller has closed."""
CALL_S = 10.0
RECORDS_MAX = 1 << 30
"""Most bytes of the records of a host that are kept."""
LEAVE_S = 2.0
"""Time that agents have to leave once they know that the controller ends."""


@dataclasses.dataclass(frozen=True)
class Joining:
    """How agents join.

    Attributes:
        addresses: of the gateway, of which an agent tries all.
        token: of role ``host``.
        lease_s: time without a heartbeat after which an agent is gone.
        launcher: starts agents; None where people do.
        modules: what is sent to machines in place of the folders of ``input_path``.
        needs_gpus: whether hosts are for GPUs.
        channels: the setting ``channels``.
        hosts: number of those of the settings; with channels to agree on, all start together.
    """

    addresses: tuple[str, ...]
    token: str
    lease_s: float
    launcher: AgentLauncher | None = None
    modules: tuple[ModuleArchive, ...] = ()
    needs_gpus: bool = False
    channels: str = ""
    hosts: int = 0

    def request(self, settings: Sequence[HostSettings]) -> AgentRequest:
        """Returns the agents to start for hosts of one island."""
        first = settings[0]
        join = ("host", "--join", ",".join(self.addresses), "--island", str(first.island))
        # One that has lost its controller for the time of a lease has been replaced.
        arguments = (*join, "--token-file", "-", "--wait", "0")
        return AgentRequest(first.island, len(settings), first.devices, arguments, self.token)


class _Agent:
    """An agent's connection; used by the loop's thread alone, but for what the lock protects."""

    def __init__(self, writer: asyncio.StreamWriter, hello: AgentHello) -> None:
        self._writer = writer
        self.hello = hello
        self.host: int | None = None
        self.ended: str | None = None

    def send(self, message: ToAgent) -> None:
        """Sends without waiting; an agent that does not read is closed."""
        self._writer.write(encoded(message))
        if self._writer.transport.get_write_buffer_size() > UNSENT_MAX:
            self._writer.transport.abort()


def _machine(agent: _Agent) -> tuple[str, str]:
    """Returns what is the same for agents of one machine; names alone may be those of several."""
    return agent.hello.machine, agent.hello.kernel


class JoinedHosts:
    """The hosts of a run that agents on other machines run.

    Args:
        directory: the run's directory, where the gateway connects agents to a socket.
        joining: how agents join.
        note: called with a sentence when an agent is refused or leaves.
        logs: takes what hosts print.
    """

    start_timeout_s = 600.0
    """Time within which agents have joined and started their hosts."""

    def __init__(
        self, directory: Path, joining: Joining, note: Callable[[str], None], logs: Logs
    ) -> None:
        self.path = directory / f"{SERVICE}.sock"
        self._note = note
        self._logs = logs
        self._joining = joining
        self._launcher = joining.launcher
        self._modules = {one.digest: one.data for one in joining.modules}
        if self._launcher is not None:
            self.start_timeout_s = self._launcher.start_timeout_s
        self._lock = threading.Lock()
        self._closing = False
        self._idle: list[_Agent] = []
        self._agents: dict[int, _Agent] = {}
        """The agent that runs each host, or ran it last."""
        self._started: dict[int, HostSettings] = {}
        """What each host was started with last."""
        self._wanted: dict[int, HostSettings] = {}
        self._failed: dict[int, str] = {}
        """How a launched agent of an island ended before it had joined."""
        self._expected: dict[int, int] = {}
        """Agents of each island that were launched and have not joined yet."""
        self._recorded: dict[int, int] = {}
        """Bytes of the records of each host."""
        self._unexplained: set[int] = set()
        """Hosts that were lost before their agents said how they ended."""
        self._channels = ChannelNetworks(joining.channels)
        self._decoder = msgspec.json.Decoder(FromAgent)
        self._versions = Versions.here()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, daemon=True, name="fairway-agents"
        )
        self._thread.start()
        self._server = self._wait_for(
            asyncio.start_unix_server(self._serve, self.path, limit=LINE_MAX, backlog=BACKLOG)
        )

    @property
    def replaces(self) -> bool:
        """Whether lost hosts are started again by their launcher."""
        return self._launcher is not None

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
        self._soon(self._match)

    def fill(self, island: int) -> None:
        """Launches agents for the hosts of an island that none has been found for.

        Raises:
            StartError: there are not as many machines, or their engine does not answer.
        """
        if self._launcher is None:
            return
        self._wait_for_returning(island, self._joining.lease_s)
        self._wait_for(self._matched())
        self._watch_launcher()
        with self._lock:
            self._failed.pop(island, None)
            wanted = [one for one in self._wanted.values() if one.island == island]
            missing = wanted[self._expected.get(island, 0) :]
            self._expected[island] = self._expected.get(island, 0) + len(missing)
        if not missing:
            return
        try:
            self._launcher.start(self._joining.request(missing))
        except StartError:
            with self._lock:
                self._expected[island] -= len(missing)
                for settings in wanted:
                    self._wanted.pop(settings.host, None)
            raise

    def _wait_for_returning(self, island: int, timeout_s: float) -> None:
        """Waits until agents whose hosts are to end have ended them, or are gone."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with self._lock:
                wanted = [one.host for one in self._wanted.values() if one.island == island]
                agents = [self._agents.get(host) for host in wanted]
                if not any(agent is not None and agent.host is not None for agent in agents):
                    return
            time.sleep(0.02)

    async def _matched(self) -> None:
        self._match()

    def check(self, hosts: Iterable[int] | None = None) -> None:
        """Checks that hosts that were started have not ended, and that their agents come.

        Raises:
            StartError: one has ended; the text has the end of its output.
        """
        self._watch_launcher()
        with self._lock:
            for host in list(self._agents) if hosts is None else hosts:
                agent = self._agents.get(host)
                if host in self._wanted:
                    if why := self._failed.get(self._wanted[host].island):
                        raise StartError(f"host {host} does not start: {why}")
                elif agent is not None and agent.ended is not None:
                    raise StartError(
                        f"host {host} on {agent.hello.machine} ended while starting, {agent.ended}"
                    )

    def _watch_launcher(self) -> None:
        if self._launcher is None:
            return
        for ending in self._launcher.watch():
            with self._lock:
                if self._expected.get(ending.island, 0) > 0:
                    self._expected[ending.island] -= 1
                    self._failed[ending.island] = ending.text

    def missing(self) -> list[int]:
        """Returns the hosts for which no agent has joined."""
        with self._lock:
            return sorted(self._wanted)

    def ending(self, host: int, process_id: int) -> str | None:
        """Returns how a host ended; None if that is not known yet, and noted as soon as it is."""
        with self._lock:
            agent = self._agents.get(host)
            if agent is None:
                return None
            if agent.ended is None:
                self._unexplained.add(host)
                return None
            return f"on {agent.hello.machine} {agent.ended}"

    def stop(self, host: int, process_id: int | None = None) -> None:
        """Ends one host at once, if it is still this process; its agent may be given another."""
        with self._lock:
            agent = self._agents.get(host)
        if agent is not None and agent.host == host:
            self._soon(agent.send, StopHost(process_id))

    def close(self, grace_s: float = 0.0) -> None:
        """Ends all agents, and with them their hosts.

        Args:
            grace_s: more time that agents have to send the last records of their hosts.
        """
        with self._lock:
            if self._closing:
                return
            self._closing = True
        with contextlib.suppress(TimeoutError):
            self._wait_for(self._end(grace_s))
        if self._launcher is not None:
            self._launcher.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CALL_S)
        self._loop.close()

    async def _end(self, grace_s: float) -> None:
        self._server.close()
        for agent in [*self._agents.values(), *self._idle]:
            agent.send(ControllerEnded())
        self._idle.clear()
        serving = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        if serving:
            # Agents that have read it leave; if the gateway closed before, they would join again.
            await asyncio.wait(serving, timeout=LEAVE_S + grace_s)
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)

    def _wait_for(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(CALL_S)

    def _soon(self, call: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # it is closed
            self._loop.call_soon_threadsafe(call, *arguments)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves an agent until its connection or its lease ends."""
        try:
            agent = await self._admit(reader, writer)
            if agent is not None:
                await self._serve_admitted(agent, reader)
        except asyncio.CancelledError:
            pass  # the run ends; asyncio would report it as an error
        finally:
            writer.close()

    async def _admit(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> _Agent | None:
        try:
            async with asyncio.timeout(HELLO_S):
                hello = await read_message(reader, self._decoder)
                if hello is None:
                    return None  # it only looked whether there is a controller
                if not isinstance(hello, AgentHello):
                    raise AgentError("its first message is not a hello")
        except (AgentError, TimeoutError) as error:
            reason = str(error) or f"it sent no hello within {HELLO_S:g} s"
            self._note(f"an agent was refused: {reason}")
            writer.write(encoded(AgentRefused(reason)))
            return None
        agent = _Agent(writer, hello)
        if remedy := self._remedy(hello):
            self._note(f"an agent on {hello.machine} was refused: {remedy}")
            agent.send(AgentRefused(remedy))
            return None
        with self._lock:
            if self._closing:
                return None
            if hello.island is not None and self._expected.get(hello.island, 0) > 0:
                self._expected[hello.island] -= 1
            agent.send(AgentAccepted(self._joining.lease_s))
            self._idle.append(agent)
        self._match()
        return agent

    def _remedy(self, hello: AgentHello) -> str | None:
        """Returns why an agent's machine does not fit, and what to do; None if it does."""
        if remedy := hello.versions.remedy(self._versions):
            return remedy
        if self._joining.needs_gpus and not hello.has_gpu_driver:
            return (
                "it has no driver for NVIDIA GPUs; install it, or use --platform cpu for this "
                "cluster"
            )
        return self._channels.missing(hello)

    async def _serve_admitted(self, agent: _Agent, reader: asyncio.StreamReader) -> None:
        why = "with its agent, whose connection ended"
        try:
            while True:
                async with asyncio.timeout(self._joining.lease_s):
                    message = await read_message(reader, self._decoder)
                match message:
                    case AgentHeartbeat(sent_ns):
                        agent.send(LeaseRenewed(sent_ns, time.monotonic_ns()))
                    case NeedModules(digest, offset) if digest in self._modules:
                        data = self._modules[digest]
                        part = data[offset : offset + PART_BYTES]
                        agent.send(ModulesPart(digest, offset, part, len(data)))
                    case HostEnded():
                        self._ended(agent, message)
                    case HostOutput(host, text) if host == agent.host:
                        self._logs.add(text, self._started[host].island, host)
                    case RecordsPart(host, records) if host == agent.host:
                        self._keep(self._started[host], records)
                    case None:
                        return
        except TimeoutError:
            why = f"with its machine, which has not answered for {self._joining.lease_s:g} s"
        except AgentError as error:
            why = f"with its agent: {error}"
        finally:
            self._gone(agent, why)

    def _keep(self, settings: HostSettings, records: tuple[Record, ...]) -> None:
        """Keeps records where a host of this machine would have written them."""
        if settings.trace is None:
            return
        kept = self._recorded.get(settings.host, 0)
        lines = b"".join(msgspec.json.encode(record) + b"\n" for record in records)
        if kept <= RECORDS_MAX < kept + len(lines):
            self._note(f"host {settings.host} has recorded too much; the rest is left out")
        self._recorded[settings.host] = kept + len(lines)
        if kept + len(lines) <= RECORDS_MAX:
            try:
                with Path(settings.trace).open("ab", buffering=0) as file:
                    file.write(lines)
            except OSError as error:
                self._recorded[settings.host] = RECORDS_MAX + 1
                self._note(f"records of host {settings.host} are lost: {error.strerror}")

    def _match(self) -> None:
        """Gives hosts that wait for an agent to agents that wait for a host."""
        with self._lock:
            if self._closing:
                return
            pairs = self._pairs()
            if not self._channels.are_agreed:
                if len(pairs) < self._joining.hosts:
                    return  # which networks all machines have is known once they are there
                self._note(self._channels.agree([agent.hello for agent, _ in pairs]))
            for agent, settings in pairs:
                del self._wanted[settings.host]
                self._idle.remove(agent)
                agent.host, agent.ended = settings.host, None
                self._agents[settings.host] = agent
                self._started[settings.host] = settings
                there = dataclasses.asdict(self._settings_on(agent, settings))
                agent.send(StartHost(there, tuple(self._modules)))

    def _pairs(self) -> list[tuple[_Agent, HostSettings]]:
        """Returns an agent for each host that waits for one, as far as there are."""
        idle, pairs = list(self._idle), []
        for _, settings in sorted(self._wanted.items()):
            if not idle:
                break
            fits = (one for one in idle if one.hello.island in (None, settings.island))
            # Those that are for this island alone come first: they are for no other host.
            agent = min(fits, key=lambda one: one.hello.island is None, default=None)
            if agent is not None:
                idle.remove(agent)
                pairs.append((agent, settings))
        return pairs

    def _settings_on(self, agent: _Agent, settings: HostSettings) -> HostSettings:
        """Returns the settings of a host on an agent's machine."""
        channels = self._channels.of(agent.hello)
        numbered = tuple((number, rate) for number, (_, rate) in enumerate(channels, 1))
        first = 0
        if not agent.hello.selects_gpus:
            # Its first GPU comes after those of other hosts of that machine.
            beside = [
                self._started[host].devices
                for host, other in self._agents.items()
                if other.host == host and _machine(other) == _machine(agent)
            ]
            first = sum(beside) - settings.devices
        return dataclasses.replace(
            settings,
            address=agent.hello.address,
            data=tcp_address(agent.hello.address),
            channels=channels,
            team_channels=numbered or settings.team_channels,
            first_device=first,
            input_path=(),  # the agent has its own
        )

    def _ended(self, agent: _Agent, message: HostEnded) -> None:
        with self._lock:
            if agent.host != message.host:
                return
            explained = self._conclude(agent, printable(message.how))
            self._idle.append(agent)
        if explained and not message.stopped and not message.how.startswith(ORDERLY):
            self._note(explained)
        self._match()

    def _gone(self, agent: _Agent, why: str) -> None:
        explained = None
        with self._lock:
            if agent in self._idle:
                self._idle.remove(agent)
            if agent.host is not None and agent.ended is None:
                explained = self._conclude(agent, why)
        if explained and not self._closing:
            self._note(explained)

    def _conclude(self, agent: _Agent, how: str) -> str | None:
        """Takes an agent's host from it; returns a sentence on its end if one is due."""
        host, agent.ended, agent.host = agent.host, how, None
        if host is None or host not in self._unexplained:
            return None
        self._unexplained.remove(host)
        return f"host {host} has ended on {agent.hello.machine} {how}"
