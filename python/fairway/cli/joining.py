"""``fairway host``: offers this machine's devices to a controller on another one."""

from __future__ import annotations

import ipaddress
import math
import os
import select
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from fairway.cli.consoles import duration, note
from fairway.cli.options import grouped
from fairway.cluster.remotes import check_address
from fairway.errors import AgentError, ConfigError, ControllerLostError, unreadable
from fairway.interrupts import Interrupts

__all__ = ["TOKEN", "TokenFile", "join_as_host", "read_token"]

TOKEN = "FAIRWAY_TOKEN"
STANDARD_INPUT = Path("-")
RETRY_S = 1.0

TokenFile = Annotated[
    Path | None,
    typer.Option(
        help=f"File with the token. [default: the environment variable {TOKEN}]",
        show_default=False,
    ),
]


@dataclass(frozen=True)
class OfferOptions:
    """What a host offers, and to which island."""

    island: Annotated[
        int | None,
        typer.Option(min=0, help="Island that it is for. [default: any]", show_default=False),
    ] = None
    address: Annotated[
        str | None,
        typer.Option(
            help="Numeric address of this machine for other hosts. [default: the one by which it "
            "reaches the controller]",
            show_default=False,
        ),
    ] = None

    def check(self) -> None:
        """Checks the address.

        Raises:
            ConfigError: it is not numeric.
        """
        try:
            ipaddress.ip_address(self.address or "::")
        except ValueError:
            raise ConfigError(
                f"--address is {self.address!r}; expected a numeric address of this machine, such "
                "as 10.0.0.7"
            ) from None


@grouped
def join_as_host(
    join: Annotated[
        str, typer.Option(help="ADDRESS:PORT of the controller, as `up --gateway` has it.")
    ],
    offer: OfferOptions,
    token_file: TokenFile = None,
    wait: Annotated[
        float,
        typer.Option(
            min=0, help="Seconds for which a controller that does not answer is tried again."
        ),
    ] = 60.0,
) -> None:
    """Join a controller on another machine, and run a host of one of its islands.

    The host has as many devices as the controller's islands say. It ends with the controller, or by
    Ctrl-C. Where the token comes from standard input (--token-file -), it ends with that, too.
    """
    check_address(join)
    offer.check()
    interrupts = Interrupts()
    check = interrupts.check
    if token_file == STANDARD_INPUT:
        check = _or_end_of_input(check)
    _serve(join, read_token(token_file), offer, wait, check)


def _serve(
    join: str, token: str, offer: OfferOptions, wait_s: float, check: Callable[[], None]
) -> None:
    """Serves a controller until it ends; joins again where it was lost for less than ``wait_s``.

    Raises:
        AgentError: the controller refuses, or was not found in time.
    """
    from fairway.cluster.agent import Agent, AgentOptions

    lost_s, said = time.monotonic(), ""
    while True:
        try:
            options = AgentOptions(offer.island, offer.address)
            with Agent(join, token, note, check, options) as agent:
                note(f"joined {join}; Ctrl-C leaves it")
                lost_s, said = float("inf"), ""
                agent.serve()
                return
        except ControllerLostError as error:
            if lost_s == float("inf"):
                lost_s = time.monotonic()
            if wait_s > 0 and str(error) != said:
                said = str(error)
                limit = "" if math.isinf(wait_s) else f" for {duration(wait_s)}"
                note(f"{said}; trying again{limit}")
            if time.monotonic() - lost_s >= wait_s:
                raise
        next_s = time.monotonic() + RETRY_S
        while time.monotonic() < next_s:
            check()
            time.sleep(0.05)


def _or_end_of_input(check: Callable[[], None]) -> Callable[[], None]:
    """Returns a check that also ends this process once its standard input has ended."""

    def check_both() -> None:
        check()
        if select.select([sys.stdin], [], [], 0)[0] and not os.read(sys.stdin.fileno(), 1 << 10):
            raise AgentError("standard input has ended, and with it this agent; see --token-file")

    return check_both


def read_token(file: Path | None) -> str:
    """Returns the token of a file, or of the environment.

    Raises:
        ConfigError: there is none.
    """
    if file is None:
        if not (token := os.environ.get(TOKEN)):
            raise ConfigError(f"no token is given; expected --token-file, or {TOKEN}")
        return token
    try:
        return (_line_of_input() if file == STANDARD_INPUT else file.read_text()).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the token in {file}: {unreadable(error)}") from None


def _line_of_input() -> str:
    """Returns the first line of standard input, and reads no more than that."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(sys.stdin.fileno(), 1)):
        line += byte
    return line.decode()
