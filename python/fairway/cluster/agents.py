"""What the controller and the agents of hosts on other machines send each other.

An agent connects to the gateway's service :data:`SERVICE`. Each message is a line of JSON whose
``type`` selects it. An agent holds a lease, which each answer to its heartbeats renews: when the
lease ends, the agent ends its host, and the controller has taken that host for lost.
"""

from __future__ import annotations

import asyncio
import ipaddress
import platform
import socket
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import msgspec

from fairway.errors import AgentError
from fairway.host.trace import Nanoseconds, Record
from fairway.quantities import RATES_BPS

__all__ = [
    "ADDRESSES_MAX",
    "HEARTBEATS",
    "INTERFACES_MAX",
    "LINE_MAX",
    "OUTPUT_MAX",
    "PART_BYTES",
    "SERVICE",
    "AgentAccepted",
    "AgentHeartbeat",
    "AgentHello",
    "AgentRefused",
    "ControllerEnded",
    "HostEnded",
    "HostOutput",
    "LeaseRenewed",
    "LineReader",
    "ModulesPart",
    "NeedModules",
    "NetworkInterface",
    "RecordsPart",
    "StartHost",
    "StopHost",
    "Versions",
    "encoded",
    "read_message",
    "send",
]

SERVICE = "agents"
LINE_MAX = 1 << 18
"""Most bytes of a message."""
HEARTBEATS = 4
"""Heartbeats of an agent within its lease."""
PART_BYTES = 1 << 17
"""Bytes of an archive in a message, where they take a third more."""
OUTPUT_MAX = 1 << 14
"""Most characters of output in a message."""
INTERFACES_MAX, ADDRESSES_MAX = 64, 16
"""Most interfaces of a machine, and addresses of an interface, that an agent tells."""
Text = Annotated[str, msgspec.Meta(pattern="^[!-~]{1,255}$")]
"""Without spaces, control characters and the like: it is shown on terminals."""
Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]


class Versions(msgspec.Struct, frozen=True):
    """What must be the same on all machines of a cluster.

    Attributes:
        fairway: version of Fairway.
        python: version of Python, without its last part.
        jaxlib: version of jaxlib.
    """

    fairway: Text
    python: Text
    jaxlib: Text

    @classmethod
    def here(cls) -> Versions:
        """Returns the versions of this process."""
        return cls(
            _installed("fairway"),
            ".".join(platform.python_version_tuple()[:2]),
            _installed("jaxlib"),
        )

    def remedy(self, wanted: Versions) -> str | None:
        """Returns what to install for ``wanted``; None if nothing differs."""
        for name in ("fairway", "jaxlib", "python"):
            mine, theirs = getattr(self, name), getattr(wanted, name)
            if mine != theirs:
                how = (
                    f"pip install {name}=={theirs}" if name != "python" else f"use Python {theirs}"
                )
                return f"it has {name} {mine} and the controller {theirs}; {how}"
        return None


class NetworkInterface(msgspec.Struct, frozen=True):
    """A network interface of a machine.

    Attributes:
        name: such as ``eth0``.
        addresses: with the length of the network's prefix, such as ``10.0.0.7/24``.
        rate_bps: bits per second in each direction; None if its driver does not say.
    """

    name: Text
    addresses: Annotated[tuple[Text, ...], msgspec.Meta(max_length=ADDRESSES_MAX)]
    rate_bps: Annotated[float, msgspec.Meta(ge=RATES_BPS[0], le=RATES_BPS[1])] | None

    def __post_init__(self) -> None:
        """Checks the addresses.

        Raises:
            ValueError: one is malformed.
        """
        for address in self.addresses:
            ipaddress.ip_interface(address)


Interfaces = Annotated[tuple[NetworkInterface, ...], msgspec.Meta(max_length=INTERFACES_MAX)]


class AgentHello(msgspec.Struct, frozen=True, tag="hello"):
    """An agent is there, and waits for a host to run.

    Attributes:
        machine: name of its machine.
        address: numeric, where other machines reach it.
        process: number of its process.
        versions: of its Python environment.
        island: the island that it is for; None for any.
        selects_gpus: whether its environment names the GPUs that it may use.
        has_gpu_driver: whether its machine has a driver for GPUs.
        interfaces: of its machine.
        kernel: that its machine has booted; tells machines apart whose names are the same.
        network: number of its network namespace.
    """

    machine: Text
    address: Text
    process: int
    versions: Versions
    island: Count | None = None
    selects_gpus: bool = False
    has_gpu_driver: bool = False
    interfaces: Interfaces = ()
    kernel: Text = "-"
    network: int = 0


class AgentHeartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """An agent is still there; the answer is :class:`LeaseRenewed`.

    Attributes:
        sent_ns: by the agent's monotonic clock.
    """

    sent_ns: Nanoseconds = 0


class HostEnded(msgspec.Struct, frozen=True, tag="ended"):
    """The host that an agent ran has ended.

    Attributes:
        host: its number.
        how: how it ended, with the end of its output.
        stopped: whether it ended because the controller had it stopped.
    """

    host: Count
    how: Annotated[str, msgspec.Meta(max_length=1 << 16)]
    stopped: bool = False


class HostOutput(msgspec.Struct, frozen=True, tag="output"):
    """What the host of an agent has printed.

    Attributes:
        host: its number.
        text: whole lines, if they are not longer than a message.
    """

    host: Count
    text: Annotated[str, msgspec.Meta(max_length=OUTPUT_MAX)]


class RecordsPart(msgspec.Struct, frozen=True, tag="records"):
    """Computations and transfers of the host of an agent, by the controller's clock.

    Attributes:
        host: its number.
        records: in the order in which they ended.
    """

    host: Count
    records: tuple[Record, ...]


class NeedModules(msgspec.Struct, frozen=True, tag="need"):
    """An agent wants a part of an archive; the answer is :class:`ModulesPart`.

    Attributes:
        digest: of the archive.
        offset: of the part.
    """

    digest: Digest
    offset: Count


class AgentAccepted(msgspec.Struct, frozen=True, tag="accepted"):
    """An agent has joined.

    Attributes:
        lease_s: time without an answer after which its lease ends.
    """

    lease_s: float


class LeaseRenewed(msgspec.Struct, frozen=True, tag="renewed"):
    """The lease of an agent begins anew.

    Attributes:
        sent_ns: that of the heartbeat.
        there_ns: by the controller's monotonic clock.
    """

    sent_ns: Nanoseconds = 0
    there_ns: Nanoseconds = 0


class ControllerEnded(msgspec.Struct, frozen=True, tag="bye"):
    """The controller ends as it was asked to, and its agents with it."""


class StartHost(msgspec.Struct, frozen=True, tag="start"):
    """Asks an agent to start a host.

    Attributes:
        settings: as :class:`~fairway.host.__main__.HostSettings` has them. Unix sockets in them are
            the controller's; the agent carries the service of that name.
        modules: archives of modules, in the order in which they are searched.
    """

    settings: dict[str, Any]
    modules: tuple[Digest, ...] = ()


class ModulesPart(msgspec.Struct, frozen=True, tag="part"):
    """A part of an archive of modules.

    Attributes:
        digest: of the archive.
        offset: of the part.
        data: its bytes.
        size: bytes of the archive.
    """

    digest: Digest
    offset: Count
    data: Annotated[bytes, msgspec.Meta(max_length=PART_BYTES)]
    size: Count


class StopHost(msgspec.Struct, frozen=True, tag="stop"):
    """Asks an agent to end its host at once.

    Attributes:
        process: only if this is still its process; None for any.
    """

    process: int | None = None


class AgentRefused(msgspec.Struct, frozen=True, tag="refused"):
    """The controller does not want this agent.

    Attributes:
        reason: why, and what to do.
    """

    reason: str


FromAgent = AgentHello | AgentHeartbeat | NeedModules | HostEnded | HostOutput | RecordsPart
ToAgent = (
    AgentAccepted
    | LeaseRenewed
    | StartHost
    | ModulesPart
    | StopHost
    | AgentRefused
    | ControllerEnded
)


class LineReader:
    """Reads messages from a connection.

    Args:
        connection: blocking; its timeout is that of :meth:`read`.
        messages: union of the messages to expect.
    """

    def __init__(self, connection: socket.socket, messages: Any) -> None:
        self._connection = connection
        self._decoder = msgspec.json.Decoder(messages)
        self._buffer = bytearray()

    def read(self) -> Any:
        """Returns the next message; None at the end of the connection.

        Raises:
            TimeoutError: none has come in time; what has come is kept.
            AgentError: it is no message, or too long.
        """
        while b"\n" not in self._buffer:
            if len(self._buffer) > LINE_MAX:
                raise AgentError("a message between agent and controller is too long")
            try:
                part = self._connection.recv(1 << 16)
            except TimeoutError:
                raise
            except OSError:
                return None
            if not part:
                return None
            self._buffer += part
        line, _, rest = bytes(self._buffer).partition(b"\n")
        self._buffer[:] = rest
        return _decoded(self._decoder, line)


async def read_message(reader: asyncio.StreamReader, decoder: msgspec.json.Decoder[Any]) -> Any:
    """Returns the next message; None at the end of the connection.

    Args:
        reader: with a limit of :data:`LINE_MAX`.
        decoder: of the messages to expect.

    Raises:
        AgentError: it is no message, or too long.
    """
    try:
        line = await reader.readline()
    except ValueError:
        raise AgentError("a message between agent and controller is too long") from None
    except OSError:
        return None
    return _decoded(decoder, line) if line.endswith(b"\n") else None


def _decoded(decoder: msgspec.json.Decoder[Any], line: bytes) -> Any:
    try:
        return decoder.decode(line)
    except (ValueError, RecursionError) as error:
        raise AgentError(f"a message between agent and controller is malformed: {error}") from None


def encoded(message: FromAgent | ToAgent) -> bytes:
    """Returns a message as a line."""
    return msgspec.json.encode(message) + b"\n"


def send(connection: socket.socket, message: FromAgent | ToAgent) -> None:
    """Sends a message.

    Raises:
        OSError: the connection has ended.
    """
    connection.sendall(encoded(message))


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"
