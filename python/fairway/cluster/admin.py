"""Requests to the admin socket of a run: a connection carries one typed request and its answer.

Both are a line of JSON whose ``type`` selects the message, such as ``{"type": "overview"}``.
:class:`~fairway.cluster.listener.AdminSocket` answers them. Requests of other machines come through
the gateway to a second socket, with the role that their token proves.
"""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from fairway.cluster.logs import LogRecord
from fairway.errors import (
    FairwayError,
    IslandError,
    LogError,
    NotRunningError,
    SliceError,
    TokenError,
)

__all__ = [
    "BYTES_MAX",
    "NUMBER_MAX",
    "START_TIMEOUT_S",
    "AddIsland",
    "AdminAnswer",
    "AdminRequest",
    "AllocateSlice",
    "Caller",
    "CreateToken",
    "Done",
    "GetOverview",
    "IslandAdded",
    "ListTokens",
    "LogsRead",
    "OverviewAnswer",
    "ReadLogs",
    "Refused",
    "ReleaseSlice",
    "RemoveIsland",
    "RevokeToken",
    "SliceAllocated",
    "TokenCreated",
    "TokenInfo",
    "TokensListed",
    "add_island",
    "allocate_slice",
    "create_token",
    "list_tokens",
    "overview",
    "read_logs",
    "read_request",
    "release_slice",
    "remote_socket_path",
    "remove_island",
    "revoke_token",
    "socket_path",
    "token_id",
    "wait_until",
]

OVERVIEW_WAIT_S_MAX = 2.0
SLICE_WAIT_S_MAX = 10.0
START_TIMEOUT_S = 120.0
"""Within this time the hosts of an island start, or they fail."""
ISLAND_WAIT_S_MAX = START_TIMEOUT_S + 10.0
TOKEN_WAIT_S_MAX = 10.0
RETRY_S = 0.005

NUMBER_MAX = (1 << 31) - 1
BYTES_MAX = (1 << 63) - 1
LIFETIME_S_MAX = 10 * 365 * 86_400.0
WEIGHT_MAX = 1_000_000
PRIORITY_MAX = 100
Number = Annotated[int, msgspec.Meta(ge=0, le=NUMBER_MAX)]
Extent = Annotated[int, msgspec.Meta(ge=1, le=NUMBER_MAX)]


class GetOverview(msgspec.Struct, frozen=True, tag="overview"):
    """Asks for the state that ``fairway status`` shows; the answer is :class:`OverviewAnswer`."""


class AllocateSlice(msgspec.Struct, frozen=True, tag="allocate_slice"):
    """Asks for virtual devices; the answer is :class:`SliceAllocated`.

    Attributes:
        client: number of the client that they are for.
        shape: extents of their mesh.
        island: the island to use; None leaves it to the resource manager.
        memory_bytes: memory to reserve on each device; None for no reservation.
    """

    client: Number
    shape: list[Number]
    island: Number | None = None
    memory_bytes: Annotated[int, msgspec.Meta(ge=0, le=BYTES_MAX)] | None = None


class ReleaseSlice(msgspec.Struct, frozen=True, tag="release_slice"):
    """Releases virtual devices of a client; the answer is :class:`Done`."""

    client: Number
    devices: list[Number]


class AddIsland(msgspec.Struct, frozen=True, tag="add_island"):
    """Brings an island up; the answer, once its hosts are up, is :class:`IslandAdded`.

    Attributes:
        hosts: number of its hosts.
        devices: number of devices of each host.
    """

    hosts: Extent
    devices: Extent


class RemoveIsland(msgspec.Struct, frozen=True, tag="remove_island"):
    """Takes an island down; the answer is :class:`Done`.

    Attributes:
        island: its number.
        force: at once, even if clients use it; to them it is lost.
    """

    island: Number
    force: bool = False


def token_id(token: str) -> str:
    """Returns the id of a token, ``fairway-ROLE-ID-SECRET-PIN``; an id is returned as it is."""
    parts = token.strip().split("-")
    return parts[2] if len(parts) == 5 else token


class CreateToken(msgspec.Struct, frozen=True, tag="create_token"):
    """Makes a token for other machines; the answer is :class:`TokenCreated`.

    Attributes:
        role: ``admin``, ``client`` or ``host``.
        lifetime_s: how long it is valid; None until it is revoked.
        weight: most that its clients may ask for.
        priority: most that its clients may ask for.
    """

    role: Literal["admin", "client", "host"]
    lifetime_s: Annotated[float, msgspec.Meta(gt=0, le=LIFETIME_S_MAX)] | None = None
    weight: Annotated[int, msgspec.Meta(ge=1, le=WEIGHT_MAX)] = 1
    priority: Annotated[int, msgspec.Meta(ge=-PRIORITY_MAX, le=PRIORITY_MAX)] = 0


class ListTokens(msgspec.Struct, frozen=True, tag="list_tokens"):
    """Asks for the valid tokens, without their secrets; the answer is :class:`TokensListed`."""


class RevokeToken(msgspec.Struct, frozen=True, tag="revoke_token"):
    """Makes a token invalid and closes its connections; the answer is :class:`Done`.

    Attributes:
        token: its id.
    """

    token: Annotated[str, msgspec.Meta(max_length=64)]


class ReadLogs(msgspec.Struct, frozen=True, tag="read_logs"):
    """Asks for what hosts and controller have printed; the answer is :class:`LogsRead`.

    Attributes:
        after: number of the last record that is not wanted.
        island: only of this one; None for all.
        host: only of this one; None for all.
    """

    after: Annotated[int, msgspec.Meta(ge=0)] = 0
    island: Number | None = None
    host: Number | None = None


class OverviewAnswer(msgspec.Struct, frozen=True, tag="overview"):
    """The state that ``fairway status`` shows."""

    overview: dict[str, Any]


class SliceAllocated(msgspec.Struct, frozen=True, tag="slice_allocated"):
    """Numbers of the virtual devices, in row-major order, and the island that they are on."""

    devices: list[int]
    island: int


class IslandAdded(msgspec.Struct, frozen=True, tag="island_added"):
    """The number of the island that is up."""

    island: int


class TokenCreated(msgspec.Struct, frozen=True, tag="token_created"):
    """The token, with its secret."""

    token: str


class TokenInfo(msgspec.Struct, frozen=True):
    """A token without its secret.

    Attributes:
        id: by which it is revoked.
        role: ``admin``, ``client`` or ``host``.
        weight: most that its clients may ask for.
        priority: most that its clients may ask for.
        expires_s: seconds since 1970; None for a token that is valid until it is revoked.
    """

    id: str
    role: str
    weight: int
    priority: int
    expires_s: float | None


class TokensListed(msgspec.Struct, frozen=True, tag="tokens_listed"):
    """The valid tokens."""

    tokens: list[TokenInfo]


class LogsRead(msgspec.Struct, frozen=True, tag="logs_read"):
    """Lines that were printed, in order; more may be there if there are any."""

    records: list[LogRecord]


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The request was carried out."""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The request was malformed, or could not be carried out, for the reason in ``error``."""

    error: str


AdminRequest = (
    GetOverview
    | AllocateSlice
    | ReleaseSlice
    | AddIsland
    | RemoveIsland
    | CreateToken
    | ListTokens
    | RevokeToken
    | ReadLogs
)
CLIENT_REQUESTS = (GetOverview, AllocateSlice, ReleaseSlice)
"""What tokens of role ``client`` may ask for."""
AdminAnswer = (
    OverviewAnswer
    | SliceAllocated
    | IslandAdded
    | TokenCreated
    | TokensListed
    | LogsRead
    | Done
    | Refused
)
Answer = TypeVar(
    "Answer",
    OverviewAnswer,
    SliceAllocated,
    IslandAdded,
    TokenCreated,
    TokensListed,
    LogsRead,
    Done,
)


@dataclass(frozen=True)
class Caller:
    """Who sends a request.

    Attributes:
        token: id of the token by which it came through the gateway; None for a process of the
            owner's on the controller's machine.
        role: ``admin`` or ``client``.
    """

    token: str | None = None
    role: str = "admin"


_requests: msgspec.json.Decoder[AdminRequest] = msgspec.json.Decoder(AdminRequest)
_answers: msgspec.json.Decoder[AdminAnswer] = msgspec.json.Decoder(AdminAnswer)


def read_request(text: bytes) -> AdminRequest:
    """Decodes a request.

    Raises:
        ValueError: it is malformed.
    """
    try:
        return _requests.decode(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def remote_socket_path(directory: Path) -> Path:
    """Returns the path of the socket for requests that come through the gateway."""
    return directory / "remote-admin.sock"


def socket_path(directory: Path) -> Path:
    """Returns the path of the admin socket in a run's directory."""
    return directory / "admin.sock"


def wait_until(connection: socket.socket, deadline: float) -> None:
    """Lets the next operation of a socket wait until a time of :func:`time.monotonic`."""
    connection.settimeout(max(deadline - time.monotonic(), 1e-3))


def overview(directory: Path) -> dict[str, Any]:
    """Returns the state that ``fairway status`` shows of a run.

    Args:
        directory: the run's directory; the same holds for the functions below.

    Raises:
        NotRunningError: the controller does not answer; the same holds for the functions below.
    """
    refusal = NotRunningError
    return _ask(directory, GetOverview(), OverviewAnswer, refusal, OVERVIEW_WAIT_S_MAX).overview


def allocate_slice(directory: Path, request: AllocateSlice) -> SliceAllocated:
    """Allocates virtual devices for a client.

    Raises:
        SliceError: no island has that many devices with that much memory.
    """
    return _ask(directory, request, SliceAllocated, SliceError, SLICE_WAIT_S_MAX)


def release_slice(directory: Path, request: ReleaseSlice) -> None:
    """Releases virtual devices of a client.

    Raises:
        SliceError: they are not the client's.
    """
    _ask(directory, request, Done, SliceError, SLICE_WAIT_S_MAX)


def add_island(directory: Path, request: AddIsland) -> int:
    """Brings an island up and returns its number.

    Raises:
        IslandError: it does not start.
    """
    return _ask(directory, request, IslandAdded, IslandError, ISLAND_WAIT_S_MAX).island


def remove_island(directory: Path, request: RemoveIsland) -> None:
    """Takes an island down.

    Raises:
        IslandError: there is no such island, it is the only one, or slices on it stay.
    """
    _ask(directory, request, Done, IslandError, ISLAND_WAIT_S_MAX)


def create_token(directory: Path, request: CreateToken) -> str:
    """Makes a token for other machines.

    Raises:
        TokenError: the cluster has no gateway.
    """
    return _ask(directory, request, TokenCreated, TokenError, TOKEN_WAIT_S_MAX).token


def list_tokens(directory: Path) -> list[TokenInfo]:
    """Returns the valid tokens.

    Raises:
        TokenError: the cluster has no gateway.
    """
    return _ask(directory, ListTokens(), TokensListed, TokenError, TOKEN_WAIT_S_MAX).tokens


def revoke_token(directory: Path, token: str) -> None:
    """Makes a token invalid and closes its connections.

    Raises:
        TokenError: there is no such token.
    """
    _ask(directory, RevokeToken(token), Done, TokenError, TOKEN_WAIT_S_MAX)


def read_logs(directory: Path, request: ReadLogs) -> list[LogRecord]:
    """Returns some of what hosts and controller have printed, in order; none if there is no more.

    Raises:
        LogError: this token may not read it.
    """
    return _ask(directory, request, LogsRead, LogError, OVERVIEW_WAIT_S_MAX).records


def _ask(
    directory: Path,
    request: AdminRequest,
    answer_type: type[Answer],
    refusal: type[FairwayError],
    timeout_s: float,
) -> Answer:
    """Sends a request and returns its answer, within ``timeout_s`` seconds.

    Raises:
        NotRunningError: the controller does not answer, or with a message of another type.
        FairwayError: it refuses the request; the error is of the type ``refusal``.
    """
    deadline = time.monotonic() + timeout_s
    try:
        with _connect(socket_path(directory), deadline) as connection:
            connection.sendall(msgspec.json.encode(request) + b"\n")
            answer = _answers.decode(_read_all(connection, deadline))
    except (OSError, ValueError, RecursionError) as error:
        raise NotRunningError(f"the controller does not answer: {error}") from error
    if isinstance(answer, Refused):
        raise refusal(answer.error)
    if not isinstance(answer, answer_type):
        raise NotRunningError(f"the controller answers {request!r} with {type(answer).__name__}")
    return answer


def _connect(path: Path, deadline: float) -> socket.socket:
    """Connects; while the backlog is full, which fails at once with a timeout set, it retries."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        while True:
            wait_until(connection, deadline)
            try:
                connection.connect(str(path))
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(RETRY_S)
            else:
                return connection
    except BaseException:
        connection.close()
        raise


def _read_all(connection: socket.socket, deadline: float) -> bytes:
    parts: list[bytes] = []
    while True:
        wait_until(connection, deadline)
        if not (part := connection.recv(1 << 16)):
            return b"".join(parts)
        parts.append(part)
