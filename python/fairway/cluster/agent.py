"""The agent of a host on another machine: ``fairway host --join ADDRESS``.

It proves its token to the gateway of the controller, waits for the settings of a host, and runs
that host as a process of its own. The sockets of the controller that the host needs are carried:
the host connects to Unix sockets of the agent's. It ends when the controller or its lease does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fairway import _native
from fairway.cluster.agents import (
    ADDRESSES_MAX,
    HEARTBEATS,
    INTERFACES_MAX,
    OUTPUT_MAX,
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
    LineReader,
    ModulesPart,
    NeedModules,
    NetworkInterface,
    RecordsPart,
    StartHost,
    StopHost,
    ToAgent,
    Versions,
    send,
)
from fairway.cluster.interfaces import interfaces
from fairway.cluster.launchers.local import LocalHosts
from fairway.cluster.logs import Logs
from fairway.cluster.modules import SIZE_MAX, ArchiveCache
from fairway.cluster.records import Clock, RecordReader
from fairway.cluster.registry import new_directory
from fairway.errors import AgentError, ControllerLostError
from fairway.host.__main__ import HostSettings
from fairway.interrupts import run_aside

__all__ = ["Agent", "AgentOptions"]

POLL_S = 0.2
"""Time between two looks at whether the host still runs, and what it has printed."""
SEND_S = 10.0
MESSAGES_AT_A_TIME = 8
"""Most messages with output or records between two heartbeats."""
ARRIVED_S = 5.0
"""Time within which the controller has read the last records."""
CLOCK_S = 0.25
"""Time between two heartbeats where the controller's clock is needed."""
RECORDED_S = 4.0
"""Time that a host has to write its last records once its controller has ended."""
GPUS = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
"""Variables by which engines say which GPUs a process may use."""
GPU_DRIVERS = tuple(map(Path, ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg")))
"""One of them is there where a driver is loaded; the last in the Windows Subsystem for Linux."""
BOOT = Path("/proc/sys/kernel/random/boot_id")
NETWORK = Path("/proc/self/ns/net")


def machine_interfaces() -> tuple[NetworkInterface, ...]:
    """Returns the network interfaces of this machine."""
    return tuple(
        NetworkInterface(
            _plain(one.name), tuple(map(str, one.addresses[:ADDRESSES_MAX])), one.rate_bps
        )
        for one in interfaces()[:INTERFACES_MAX]
    )


def _plain(name: str) -> str:
    """Returns a name in ASCII alone; those of interfaces may have other letters."""
    return name.encode("ascii", "backslashreplace").decode()


def machine_identity() -> tuple[str, int]:
    """Returns the kernel that this machine has booted, and the number of its network namespace."""
    try:
        return BOOT.read_text().strip(), NETWORK.stat().st_ino
    except OSError:
        return "-", 0


@dataclasses.dataclass(frozen=True)
class AgentOptions:
    """What an agent offers.

    Attributes:
        island: the island that it is for; None for any.
        address: numeric, where other machines reach its host; None for the one by which it reaches
            the controller.
    """

    island: int | None = None
    address: str | None = None


class Agent:
    """An agent that has joined; use it as a context.

    Args:
        address: host and port of the controller's gateway, or several with commas between them,
            of which all are tried.
        token: of role ``host``.
        note: called with a sentence on what happens.
        check: called several times a second while this waits; an exception that it raises ends it.
        options: what it offers.

    Raises:
        ControllerLostError: the controller does not answer.
        AgentError: it is another one, or refuses the token.
    """

    def __init__(
        self,
        address: str,
        token: str,
        note: Callable[[str], None],
        check: Callable[[], None],
        options: AgentOptions,
    ) -> None:
        self._check = check
        self._address = address
        self._note = note
        self._host: int | None = None
        self._waiting: StartHost | None = None
        """A host that is started once its modules are here."""
        self._received = bytearray()
        self._cache = ArchiveCache()
        self._carried: set[str] = set()
        try:
            remote = self._remote = _native.Remote(address, token)
            here = run_aside(lambda: remote.check(SERVICE), check)
        except ConnectionError as error:
            raise ControllerLostError(str(error)) from None
        except (ValueError, OSError) as error:
            text = str(error)
            if "there is no service" in text:
                text += "; hosts join clusters of `fairway up --on agents`"
            raise AgentError(text) from None
        self._directory = new_directory()
        self._logs = Logs()
        self._sent = 0
        """Number of the last line that the controller has got."""
        self._hosts = LocalHosts(self._logs)
        self._connection = socket.socket(socket.AF_UNIX)
        self._reader = LineReader(self._connection, ToAgent)
        self._lease_s = float("inf")
        self._renewed_s = time.monotonic()
        self._beaten_s = float("-inf")
        self._clock = Clock()
        self._records: RecordReader | None = None
        """Of the host, if it records what it does."""
        hello = AgentHello(
            _plain(platform.node()),
            options.address or here,
            os.getpid(),
            Versions.here(),
            options.island,
            any(os.environ.get(name) for name in GPUS),
            any(path.exists() for path in GPU_DRIVERS),
            machine_interfaces(),
            *machine_identity(),
        )
        try:
            self._connection.connect(self._carry(SERVICE))
            self._send(hello)
        except OSError as error:
            self.close()
            raise ControllerLostError(
                f"the controller at {address} is gone: {error.strerror}"
            ) from None

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

    def serve(self) -> None:
        """Runs hosts until the controller ends.

        Raises:
            AgentError: the controller refuses this agent; says why, and what to do.
            ControllerLostError: the controller cannot be reached any more.
        """
        while True:
            self._check()
            self._send_what_is_due()
            try:
                message = self._reader.read()
            except TimeoutError:
                if time.monotonic() - self._renewed_s > self._lease_s:
                    raise ControllerLostError(
                        f"the controller at {self._address} has not answered for "
                        f"{self._lease_s:g} s; this machine's host has ended"
                    ) from None
                continue
            self._renewed_s = time.monotonic()
            match message:
                case AgentAccepted(lease_s):
                    self._lease_s = lease_s
                case LeaseRenewed(sent_ns, there_ns):
                    self._clock.add(sent_ns, there_ns, time.monotonic_ns())
                case StartHost():
                    self._waiting = message
                    self._start_waiting()
                case ModulesPart():
                    self._take_modules(message)
                case StopHost(process):
                    self._stop(process)
                case AgentRefused(reason):
                    raise AgentError(f"the controller at {self._address} refuses: {reason}")
                case ControllerEnded():
                    self._note("the controller has ended")
                    self._send_last_records()
                    return
                case None:
                    raise ControllerLostError(
                        f"the connection to the controller at {self._address} is cut"
                    )

    def _send_what_is_due(self) -> None:
        # A controller that has ended is noticed by what is read next.
        with contextlib.suppress(OSError):
            now_s = time.monotonic()
            every_s = self._lease_s / HEARTBEATS
            if self._records is not None:
                every_s = min(every_s, CLOCK_S)
            if now_s - self._beaten_s > every_s:
                self._beaten_s = now_s
                self._send(AgentHeartbeat(time.monotonic_ns()))
            for _ in range(MESSAGES_AT_A_TIME):
                if not (self._send_output() or self._send_records()):
                    break
            self._send_ending()

    def _send_ending(self, *, stopped: bool = False) -> None:
        """Sends how the host has ended, if it has."""
        if self._host is None or (how := self._hosts.ending(self._host)) is None:
            return
        while self._send_output() or self._send_records():
            pass
        host, self._host = self._host, None
        self._note(f"host {host} has ended {how}")
        self._send(HostEnded(host, how, stopped))

    def _stop(self, process_id: int | None) -> None:
        """Ends the host, if it is still this process."""
        if self._waiting is not None:
            self._give_up("before it had started", stopped=True)
            return
        with contextlib.suppress(OSError):
            self._send_ending()  # one that has ended by itself was not stopped
            if self._host is not None:
                self._hosts.stop(self._host, process_id)
                self._send_ending(stopped=True)

    def _send_output(self) -> bool:
        """Sends some of what the host has printed; returns whether there was any."""
        characters, lines = 0, []
        for record in self._logs.read(self._sent):
            characters += len(record.text) + 1
            if characters > OUTPUT_MAX:
                break
            self._sent = record.number
            lines.append(record.text)
        if lines and self._host is not None:
            self._send(HostOutput(self._host, "\n".join(lines)))
        return bool(lines)

    def _send_records(self) -> bool:
        """Sends some of what the host has recorded; returns whether there was any."""
        ahead_ns = self._clock.ahead_ns
        if self._records is None or self._host is None or ahead_ns is None:
            return False
        records = self._records.next(ahead_ns)
        if records:
            self._send(RecordsPart(self._host, records))
        return bool(records)

    def _send_last_records(self) -> None:
        """Waits for the end of the host, which has lost its controller; sends what it recorded."""
        if self._records is None:
            return
        self._hosts.wait(RECORDED_S)
        with contextlib.suppress(OSError):
            while self._send_records():
                pass
            # What is on its way is lost with this process, so it waits until the controller, which
            # has then read it all, closes the connection.
            self._connection.shutdown(socket.SHUT_WR)
            deadline = time.monotonic() + ARRIVED_S
            while time.monotonic() < deadline:
                with contextlib.suppress(TimeoutError):
                    if self._reader.read() is None:
                        return

    def _send(self, message: FromAgent) -> None:
        """Sends a message.

        Raises:
            OSError: the connection has ended.
            ControllerLostError: it takes nothing any more.
        """
        self._connection.settimeout(SEND_S)
        try:
            send(self._connection, message)
        except TimeoutError:
            raise ControllerLostError(
                f"the controller at {self._address} has taken nothing for {SEND_S:g} s"
            ) from None
        finally:
            self._connection.settimeout(POLL_S)

    def _start_waiting(self) -> None:
        """Starts the host that waits, or asks for the next part of what it waits for."""
        assert self._waiting is not None
        for digest in self._waiting.modules:
            if self._cache.find(digest) is None:
                self._send(NeedModules(digest, len(self._received)))
                return
        start, self._waiting = self._waiting, None
        folders = [self._cache.find(digest) for digest in start.modules]
        self._start({**start.settings, "input_path": [str(folder) for folder in folders]})

    def _take_modules(self, part: ModulesPart) -> None:
        """Takes a part of an archive, and unpacks the archive once it is complete."""
        if self._waiting is None:
            return  # the host was stopped meanwhile
        if part.offset != len(self._received) or part.size > SIZE_MAX or not part.data:
            raise AgentError("a part of an archive of modules is not the one that was asked for")
        self._received += part.data
        try:
            if len(self._received) >= part.size:
                data, self._received = bytes(self._received), bytearray()
                self._cache.add(part.digest, data)
            self._start_waiting()
        except OSError as error:
            self._give_up(f"before it had started: cannot keep its modules: {error.strerror}")

    def _give_up(self, how: str, *, stopped: bool = False) -> None:
        """Says that the host that waits does not start."""
        assert self._waiting is not None
        host, self._waiting = int(self._waiting.settings["host"]), None
        self._received.clear()
        with contextlib.suppress(OSError):
            self._send(HostEnded(host, how, stopped))

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
        if settings.trace is not None:
            path = self._directory / f"trace-{settings.host}-{time.monotonic_ns()}.jsonl"
            settings = dataclasses.replace(settings, trace=str(path))
            self._records = RecordReader(path)
        self._host = settings.host
        self._note(f"starting host {settings.host}, rank {settings.rank} of {settings.hosts}")
        self._hosts.start(settings)

    def _carry(self, service: str) -> str:
        """Returns the path of a Unix socket whose connections reach a service of the controller."""
        path = self._directory / f"{service}.sock"
        if service not in self._carried:
            self._remote.carry(path, service)
            self._carried.add(service)
        return str(path)
