"""The controller's listener for other machines: its addresses, services and tokens."""

from __future__ import annotations

import json
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

from fairway import _native
from fairway.cluster.admin import token_id
from fairway.cluster.interfaces import reachable_addresses
from fairway.cluster.reports import Refusals, Reports
from fairway.errors import ConfigError, unreadable

__all__ = ["ControllerGateway", "state_directory"]

EVERYWHERE = ("0.0.0.0", "[::]")
AUTHORITY, TOKENS = "authority.pem", "tokens.json"


def state_directory(cluster: str) -> Path:
    """Returns the folder where a cluster keeps its authority and tokens between starts."""
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "fairway" / cluster


class ControllerGateway:
    """A gateway that is open until it is closed.

    Args:
        address: host and port; port 0 takes any that is free.
        directory: of the run, for the file with the token of hosts.
        state: folder where the authority and tokens are kept; None keeps neither.
        reports: takes sentences on connections that are refused.
        certificate: files of a certificate and its private key, instead of an authority of its own.

    Raises:
        OSError: the address cannot be listened at, or the folder cannot be written.
        ConfigError: what is kept there, or the certificate, cannot be read or used.
    """

    def __init__(
        self,
        address: str,
        directory: Path,
        state: Path | None,
        reports: Reports,
        certificate: tuple[Path, Path] | None = None,
    ) -> None:
        self._state = state
        self._kept: set[str] = set()
        """Ids of the tokens that are valid after a new start, too."""
        authority = _read(state / AUTHORITY) if state is not None else None
        self._refusals = Refusals(reports)
        self._saving = threading.Lock()
        given = None if certificate is None else _given(certificate)
        try:
            self._gateway = _native.Gateway(address, self._refusals.add, authority, given)
        except ValueError as error:
            self._refusals.close()
            where = address if certificate is None else certificate[0]
            raise ConfigError(f"{where}: {error}") from None
        self.token_file = directory / "host-token"
        """Where people find the token for agents."""
        if state is not None:
            self._restore(state)

    def _restore(self, state: Path) -> None:
        state.mkdir(parents=True, exist_ok=True, mode=0o700)
        if (authority := self._gateway.authority) is not None:
            _write(state / AUTHORITY, authority)
        try:
            for entry in json.loads(_read(state / TOKENS) or "[]"):
                self._gateway.keep_token(entry)
                self._kept.add(entry["id"])
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"cannot read {state / TOKENS}: {error}; remove it, and make tokens anew"
            ) from None

    @property
    def addresses(self) -> tuple[str, ...]:
        """Host and port by which other machines may reach it."""
        place, _, port = self._gateway.address.rpartition(":")
        if place not in EVERYWHERE:
            return (self._gateway.address,)
        found = reachable_addresses()
        return tuple(f"[{one}]:{port}" if ":" in one else f"{one}:{port}" for one in found)

    def offer(self, service: str, role: str, address: str) -> None:
        """Offers a Unix socket to peers of a role: ``unix:PATH``.

        At ``announced:PATH`` a line comes first that says who the peer is.
        """
        self._gateway.offer(service, role, address)

    def offer_clients(self, server: _native.Server) -> None:
        """Lets clients of other machines connect to a controller."""
        server.offer(self._gateway, "clients")

    def create_token(
        self,
        role: str,
        lifetime_s: float | None,
        *,
        weight: int = 1,
        priority: int = 0,
        keep: bool = False,
    ) -> str:
        """Makes a token.

        Args:
            role: ``admin``, ``client`` or ``host``.
            lifetime_s: how long it is valid; None until it is revoked.
            weight: most that its clients may ask for.
            priority: most that its clients may ask for.
            keep: whether it is valid after a new start of the controller, too.
        """
        token = self._gateway.create_token(role, lifetime_s, weight, priority)
        if keep:
            self._save(kept={token_id(token)})
        return token

    def tokens(self) -> list[dict[str, Any]]:
        """Returns the valid tokens, with their secrets."""
        return self._gateway.tokens()

    def revoke_token(self, number: str) -> bool:
        """Makes a token invalid and closes its connections; returns whether it was valid.

        Raises:
            OSError: it is invalid now, and would be valid again after a new start.
        """
        try:
            known = self._gateway.revoke_token(number)
        except ValueError:
            return False
        self._save()
        return known

    def _save(self, kept: set[str] | None = None) -> None:
        with self._saving:
            self._kept |= kept or set()
            if self._state is not None:
                entries = [entry for entry in self.tokens() if entry["id"] in self._kept]
                _write(self._state / TOKENS, json.dumps(entries))

    def write_host_token(self, token: str) -> None:
        """Writes a token to the file for people."""
        _write(self.token_file, token + "\n")

    def close(self) -> None:
        """Closes the listener and all of its connections."""
        self._gateway.close()
        self._refusals.close()


def _given(files: tuple[Path, Path]) -> tuple[str, str]:
    """Returns the texts of a certificate and its private key.

    Raises:
        ConfigError: one cannot be read.
    """
    texts = []
    for path in files:
        try:
            texts.append(path.read_text())
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {path}: {unreadable(error)}") from None
    return texts[0], texts[1]


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except FileNotFoundError:
        return None


def _write(path: Path, text: str) -> None:
    """Replaces a file by one that only this user can read."""
    descriptor, partial = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    os.replace(partial, path)
