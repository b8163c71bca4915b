"""What a controller is started with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from fairway.settings import Settings

__all__ = ["ServerSettings"]


@dataclass(frozen=True)
class ServerSettings:
    """What the controller is started with.

    Attributes:
        islands: hosts, and devices of each host.
        listen: address for clients.
        users: other users of this machine who may be clients.
        directory: of the sockets for hosts.
        token: what hosts prove that they are of this run with.
        timeout_s: time without an answer after which a host is lost.
        slice_index: whether devices tell their island as ``slice_index``.
        launch_window: computations of a client that a host may have enqueued.
        sequential: whether a computation is dispatched only when its arguments are there.
        capture: whether the last step of each client is kept.
        plan: whether collectives of programs are planned.
        encrypt: whether streams between hosts are encrypted.
        client_code: whether all clients may run Python functions as the hosts' user.
    """

    islands: list[tuple[int, int]]
    listen: str
    users: list[int]
    directory: Path
    token: str
    timeout_s: float
    slice_index: bool = False
    launch_window: int = 256
    sequential: bool = False
    capture: bool = False
    plan: bool = False
    encrypt: bool = False
    client_code: bool = False

    @classmethod
    def of(cls, settings: Settings, directory: Path, token: str) -> Self:
        """Returns what the settings of a run say."""
        return cls(
            [(island.hosts, island.devices) for island in settings.islands],
            settings.listen,
            settings.user_numbers,
            directory,
            token,
            settings.timeout_s,
            settings.slice_index,
            settings.launch_window,
            settings.dispatch == "sequential",
            settings.capture,
            settings.plan == "auto",
            settings.encrypts,
            settings.client_code,
        )
