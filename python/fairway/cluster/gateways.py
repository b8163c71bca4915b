"""The controller's listener for other machines: its addresses, services and tokens."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from fairway import _native
from fairway.cluster.interfaces import reachable_addresses

__all__ = ["ControllerGateway"]

EVERYWHERE = ("0.0.0.0", "[::]")


class ControllerGateway:
    """A gateway that is open until it is closed.

    Args:
        address: host and port; port 0 takes any that is free.
        directory: of the run, for the file with the token of hosts.
        refused: called with a sentence on each connection that is refused.

    Raises:
        OSError: the address cannot be listened at.
    """

    def __init__(self, address: str, directory: Path, refused: Callable[[str], None]) -> None:
        self._gateway = _native.Gateway(address, refused)
        self.token_file = directory / "host-token"
        """Where people find the token for agents."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Host and port by which other machines may reach it."""
        place, _, port = self._gateway.address.rpartition(":")
        if place not in EVERYWHERE:
            return (self._gateway.address,)
        found = reachable_addresses()
        return tuple(f"[{one}]:{port}" if ":" in one else f"{one}:{port}" for one in found)

    def offer(self, service: str, role: str, address: str) -> None:
        """Offers a local socket to peers of a role: ``unix:PATH``, or ``tcp:ADDRESS:PORT``."""
        self._gateway.offer(service, role, address)

    def create_token(self, role: str, lifetime_s: float | None) -> str:
        """Makes a token; without a lifetime it is valid until it is revoked."""
        return self._gateway.create_token(role, lifetime_s)

    def revoke_token(self, number: str) -> bool:
        """Makes a token invalid; returns whether it was valid."""
        return self._gateway.revoke_token(number)

    def write_host_token(self, token: str) -> None:
        """Writes a token to the file for people, which is readable by this user alone."""
        descriptor = os.open(self.token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(token + "\n")

    def close(self) -> None:
        """Closes the listener and all of its connections."""
        self._gateway.close()
