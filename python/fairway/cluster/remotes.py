"""A controller on another machine, reached as if it were on this one."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from typing import Self

from fairway import _native
from fairway.cluster.admin import socket_path
from fairway.cluster.registry import carry, new_directory
from fairway.errors import ConfigError, NotRunningError
from fairway.interrupts import run_aside

__all__ = ["RemoteCluster", "check_address", "is_address"]

ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s:,@]+):\d{1,5}")


def is_address(cluster: str) -> bool:
    """Returns whether a text is ``ADDRESS:PORT`` of a gateway, and not the name of a cluster."""
    return all(ADDRESS.fullmatch(one) for one in cluster.split(","))


def check_address(address: str) -> None:
    """Checks that a text is the address of a gateway.

    Raises:
        ConfigError: it is not.
    """
    if not is_address(address):
        raise ConfigError(
            f"{address!r} is no address of a gateway; expected ADDRESS:PORT, such as 10.0.0.1:7000"
        )


class RemoteCluster:
    """A connection to another machine's controller, as long as the context lasts.

    Meanwhile this user's commands find the cluster as they find those of this machine, and clients
    connect to a loopback port. Every connection goes by TLS, and is made anew.

    Args:
        address: of its gateway.
        token: of role ``client`` or ``admin``.
        check: called several times a second while this waits; an exception that it raises ends it.

    Attributes:
        target: the value of ``JAX_BACKEND_TARGET`` for clients.
        directory: where the admin socket is carried.

    Raises:
        NotRunningError: the controller does not answer, is another one, or refuses the token.
        ConfigError: the token is none.
    """

    def __init__(self, address: str, token: str, check: Callable[[], None] = lambda: None) -> None:
        self.address = address
        try:
            remote = self._remote = _native.Remote(address, token)
            run_aside(lambda: remote.check("admin"), check)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        except OSError as error:
            raise NotRunningError(str(error)) from None
        self.directory = new_directory()
        try:
            self.target = f"grpc://{self._remote.carry_tcp('clients')}"
            carry(self.directory, self.target, address)
            self._remote.carry(socket_path(self.directory), "admin")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def check(self) -> str | None:
        """Returns why the controller cannot be reached now; None if it can."""
        try:
            self._remote.check("admin")
        except OSError as error:
            return str(error)
        return None

    def close(self) -> None:
        """Ends all connections."""
        self._remote.close()
        shutil.rmtree(self.directory, ignore_errors=True)
