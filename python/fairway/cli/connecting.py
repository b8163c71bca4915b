"""``fairway connect``: clients of this machine on a cluster of another one."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated

import typer

from fairway.cli.consoles import note
from fairway.cli.joining import TokenFile, read_token
from fairway.cluster.remotes import RemoteCluster, check_address
from fairway.cluster.supervisor import client_environment
from fairway.interrupts import Interrupts
from fairway.plugin import BARE

__all__ = ["connect_cluster", "show_environment"]

CHECK_S = 10.0


def show_environment(variables: Mapping[str, str]) -> None:
    """Prints what clients need, as a shell reads it."""
    for name, value in variables.items():
        print(f"export {name}={value}", flush=True)
    note(f"a Python with jax but without Fairway needs PYTHONPATH={BARE} as well")


def connect_cluster(
    address: Annotated[
        str, typer.Argument(help="ADDRESS:PORT of the cluster's gateway (`fairway up --gateway`).")
    ],
    token_file: TokenFile = None,
) -> None:
    """Connect this machine to a cluster of another one, until Ctrl-C.

    Prints the two variables that clients need. Meanwhile `fairway run`, `status`, `islands` and
    `logs` find the cluster as they find those of this machine.
    """
    check_address(address)
    interrupts = Interrupts()
    with RemoteCluster(address, read_token(token_file), interrupts.check) as remote:
        note(f"connected to {address}; clients need:")
        show_environment(client_environment(remote.target))
        note("Ctrl-C ends it")
        lost, next_s = None, time.monotonic() + CHECK_S
        while interrupts.next() is None:
            if time.monotonic() < next_s:
                continue
            before, lost = lost, remote.check()
            if lost is not None and lost != before:
                note(f"{lost}; trying again")
            elif lost is None and before is not None:
                note(f"{address} answers again")
            next_s = time.monotonic() + CHECK_S
