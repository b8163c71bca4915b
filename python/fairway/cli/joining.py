"""``fairway host``: offers this machine's devices to a controller on another one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from fairway.cli.consoles import note
from fairway.errors import ConfigError
from fairway.interrupts import Interrupts

__all__ = ["join_as_host"]

TOKEN = "FAIRWAY_TOKEN"


def join_as_host(
    join: Annotated[
        str, typer.Option(help="ADDRESS:PORT of the controller, as `up --join` has it.")
    ],
    token_file: Annotated[
        Path | None,
        typer.Option(
            help=f"File with the token. [default: the environment variable {TOKEN}]",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Join a controller on another machine, and run a host of one of its islands.

    The host has as many devices as the controller's islands say. It ends with the controller, or by
    Ctrl-C.
    """
    from fairway.cluster.agent import Agent

    interrupts = Interrupts()
    with Agent(join, _token(token_file), note) as agent:
        note(f"joined {join}; Ctrl-C leaves it")
        agent.serve(interrupts.check)


def _token(file: Path | None) -> str:
    """Returns the token of a file, or of the environment.

    Raises:
        ConfigError: there is none.
    """
    if file is None:
        if not (token := os.environ.get(TOKEN)):
            raise ConfigError(f"no token is given; expected --token-file, or {TOKEN}")
        return token
    try:
        return file.read_text().strip()
    except OSError as error:
        raise ConfigError(f"cannot read the token in {file}: {error.strerror}") from None
