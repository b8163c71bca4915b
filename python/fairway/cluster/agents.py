"""What the controller and the agents of hosts on other machines send each other.

An agent connects to the gateway's service :data:`SERVICE`. Each message is a line of JSON whose
``type`` selects it.
"""

from __future__ import annotations

import platform
import socket
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import msgspec

from fairway.errors import AgentError

__all__ = [
    "LINE_MAX",
    "SERVICE",
    "AgentHello",
    "AgentRefused",
    "HostEnded",
    "LineReader",
    "StartHost",
    "StopHost",
    "Versions",
    "send",
]

SERVICE = "agents"
LINE_MAX = 1 << 18
"""Most bytes of a message."""
Text = Annotated[str, msgspec.Meta(max_length=256)]


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


class AgentHello(msgspec.Struct, frozen=True, tag="hello"):
    """An agent is there, and waits for a host to run.

    Attributes:
        machine: name of its machine.
        address: numeric, where other machines reach it.
        process: number of its process.
        versions: of its Python environment.
    """

    machine: Text
    address: Text
    process: int
    versions: Versions


class HostEnded(msgspec.Struct, frozen=True, tag="ended"):
    """The host that an agent ran has ended.

    Attributes:
        host: its number.
        how: how it ended, with the end of its output.
    """

    host: int
    how: Annotated[str, msgspec.Meta(max_length=1 << 16)]


class StartHost(msgspec.Struct, frozen=True, tag="start"):
    """Asks an agent to start a host.

    Attributes:
        settings: as :class:`~fairway.host.__main__.HostSettings` has them. Unix sockets in them are
            the controller's; the agent carries the service of that name.
    """

    settings: dict[str, Any]


class StopHost(msgspec.Struct, frozen=True, tag="stop"):
    """Asks an agent to end its host at once."""


class AgentRefused(msgspec.Struct, frozen=True, tag="refused"):
    """The controller does not want this agent.

    Attributes:
        reason: why, and what to do.
    """

    reason: str


FromAgent = AgentHello | HostEnded
ToAgent = StartHost | StopHost | AgentRefused


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
        try:
            return self._decoder.decode(line)
        except msgspec.MsgspecError as error:
            raise AgentError(
                f"a message between agent and controller is malformed: {error}"
            ) from None


def send(connection: socket.socket, message: FromAgent | ToAgent) -> None:
    """Sends a message.

    Raises:
        OSError: the connection has ended.
    """
    connection.sendall(msgspec.json.encode(message) + b"\n")


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"
