"""Answers requests to the admin sockets of a run, as far as the caller's role allows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fairway import _native
from fairway.cluster.admin import (
    CLIENT_REQUESTS,
    AddIsland,
    AdminAnswer,
    AdminRequest,
    AllocateSlice,
    Caller,
    CreateToken,
    Done,
    GetOverview,
    IslandAdded,
    ListTokens,
    LogsRead,
    OverviewAnswer,
    ReadLogs,
    ReleaseSlice,
    RemoveIsland,
    RevokeToken,
    SliceAllocated,
    TokenCreated,
    TokenInfo,
    TokensListed,
)
from fairway.cluster.gateways import ControllerGateway
from fairway.cluster.logs import LogRecord, Logs
from fairway.errors import FairwayError, LogError, SliceError, TokenError
from fairway.settings import IslandSettings, Settings

__all__ = ["AdminService"]

ANSWER_CHARACTERS = 1 << 17
"""Most text of an answer with lines that were printed."""


@dataclass(frozen=True)
class AdminService:
    """Carries out requests.

    Attributes:
        overview: returns the state that ``fairway status`` shows.
        server: the controller.
        logs: what was printed.
        gateway: the listener for other machines; None if there is none.
        add_island: brings an island up and returns its number.
        remove_island: takes an island down, at once if the second argument is true.
    """

    overview: Callable[[], dict[str, Any]]
    server: _native.Server
    logs: Logs
    gateway: ControllerGateway | None
    add_island: Callable[[IslandSettings], int]
    remove_island: Callable[[int, bool], None]

    def answer(self, request: AdminRequest, caller: Caller) -> AdminAnswer:
        """Carries out a request.

        Raises:
            FairwayError: it cannot be carried out, or is not for the caller.
        """
        if caller.role != "admin" and not isinstance(request, CLIENT_REQUESTS):
            raise FairwayError(
                f"token {caller.token} has role {caller.role}, and this is for role admin; "
                "`fairway token create --role admin` on the controller's machine makes one"
            )
        match request:
            case GetOverview():
                return OverviewAnswer(self.overview())
            case AllocateSlice():
                self._check_owner(request.client, caller)
                return self._allocate(request)
            case ReleaseSlice():
                self._check_owner(request.client, caller)
                self._release(request)
            case AddIsland():
                asked = IslandSettings(request.hosts, request.devices)
                return IslandAdded(self.add_island(Settings(islands=(asked,)).islands[0]))
            case RemoveIsland():
                self.remove_island(request.island, request.force)
            case CreateToken() | ListTokens() | RevokeToken():
                return self._answer_about_tokens(request)
            case ReadLogs():
                self._check_source(request)
                return LogsRead(_first(self.logs.read(request.after, request.island, request.host)))
        return Done()

    def _check_source(self, request: ReadLogs) -> None:
        """Checks that there are, or were, the island and the host that a request is about.

        Raises:
            LogError: there are not.
        """
        islands = self.overview()["islands"]
        hosts = [host["id"] for island in islands for host in island["hosts"]]
        known = {"island": [island["id"] for island in islands], "host": hosts}
        for kind, number in (("island", request.island), ("host", request.host)):
            if number is not None and number not in known[kind]:
                raise LogError(
                    f"there is no {kind} {number}; expected one of {known[kind]}, as in "
                    "`fairway status`"
                )

    def _check_owner(self, client: int, caller: Caller) -> None:
        """Checks that a client is the caller's.

        Raises:
            SliceError: it is another's.
        """
        if caller.role == "admin":
            return
        clients = self.overview()["clients"]
        if not any(one["id"] == client and one["token"] == caller.token for one in clients):
            raise SliceError(f"client {client} is none of token {caller.token}")

    def _allocate(self, request: AllocateSlice) -> SliceAllocated:
        try:
            devices, island = self.server.allocate(
                request.client, request.shape, request.island, request.memory_bytes
            )
        except _native.StatusError as error:
            raise SliceError(error.args[1]) from None
        return SliceAllocated(devices, island)

    def _release(self, request: ReleaseSlice) -> None:
        try:
            self.server.release(request.client, request.devices)
        except _native.StatusError as error:
            raise SliceError(error.args[1]) from None

    def _answer_about_tokens(self, request: CreateToken | ListTokens | RevokeToken) -> AdminAnswer:
        if self.gateway is None:
            raise TokenError(
                "this cluster has no gateway, so no other machine can connect; "
                "`fairway up --gateway ADDRESS:PORT` opens one"
            )
        match request:
            case CreateToken():
                token = self.gateway.create_token(
                    request.role,
                    request.lifetime_s,
                    weight=request.weight,
                    priority=request.priority,
                    keep=True,
                )
                return TokenCreated(token)
            case ListTokens():
                shown = TokenInfo.__struct_fields__
                every = self.gateway.tokens()
                return TokensListed(
                    [TokenInfo(**{name: one[name] for name in shown}) for one in every]
                )
            case RevokeToken():
                if not self.gateway.revoke_token(request.token):
                    raise TokenError(
                        f"there is no token {request.token!r}; `fairway token list` shows them"
                    )
        return Done()


def _first(records: list[LogRecord]) -> list[LogRecord]:
    """Returns the first of some records, so that an answer is not too long."""
    characters = 0
    for count, record in enumerate(records):
        characters += len(record.text)
        if characters > ANSWER_CHARACTERS:
            return records[: max(1, count)]
    return records
