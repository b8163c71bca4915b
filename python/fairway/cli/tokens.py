"""``fairway token``: what admits other machines to a cluster with a gateway."""

from __future__ import annotations

import re
import time
from typing import Annotated, Literal

import typer
from rich.table import Table

from fairway.cli.clusters import ClusterOptions
from fairway.cli.consoles import duration, note, results
from fairway.cli.options import grouped
from fairway.cluster import admin
from fairway.errors import ConfigError

__all__ = ["token_app"]

LIFETIME = re.compile(r"(\d{1,6})(s|min|h|d)")
SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86_400}

token_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Make, list or revoke the tokens by which other machines connect to a cluster.",
)


@token_app.command("create")
@grouped
def create(
    role: Annotated[
        Literal["client", "host", "admin"],
        typer.Option(
            help="client: run programs. host: offer devices. admin: change the cluster, and run "
            "programs."
        ),
    ],
    cluster: ClusterOptions,
    lifetime: Annotated[
        str | None,
        typer.Option(
            help="How long it is valid, such as 30min, 12h or 90d. [default: until it is revoked]",
            show_default=False,
        ),
    ] = None,
    weight: Annotated[
        int, typer.Option(min=1, max=admin.WEIGHT_MAX, help="Most that its clients may ask for.")
    ] = 1,
    priority: Annotated[
        int,
        typer.Option(
            min=-admin.PRIORITY_MAX,
            max=admin.PRIORITY_MAX,
            help="Most that its clients may ask for.",
        ),
    ] = 0,
) -> None:
    """Make a token, and print it: whatever has it may connect."""
    lifetime_s = None if lifetime is None else _seconds(lifetime)
    with cluster.directory() as directory:
        request = admin.CreateToken(role, lifetime_s, weight, priority)
        print(admin.create_token(directory, request))
    note("keep it secret; give it to the other machine as a file, or as FAIRWAY_TOKEN")


@token_app.command("list")
@grouped
def show(cluster: ClusterOptions) -> None:
    """Show the valid tokens, without their secrets."""
    with cluster.directory() as directory:
        tokens = admin.list_tokens(directory)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("token", "role", "weight", "priority", "valid for"):
        table.add_column(name)
    for token in tokens:
        left = "until revoked" if token.expires_s is None else _left(token.expires_s)
        table.add_row(token.id, token.role, str(token.weight), str(token.priority), left)
    results().print(table)


@token_app.command("revoke")
@grouped
def revoke(
    token: Annotated[
        str, typer.Argument(help="Its id in `fairway token list`, or the token itself.")
    ],
    cluster: ClusterOptions,
) -> None:
    """Make a token invalid, and close the connections that it has made."""
    number = admin.token_id(token)
    with cluster.directory() as directory:
        admin.revoke_token(directory, number)
    note(f"token {number} is revoked")


def _seconds(text: str) -> float:
    """Reads a lifetime.

    Raises:
        ConfigError: it is malformed, or too long.
    """
    found = LIFETIME.fullmatch(text)
    seconds = float(found[1]) * SECONDS[found[2]] if found else 0.0
    if not 0 < seconds <= admin.LIFETIME_S_MAX:
        raise ConfigError(
            f"--lifetime is {text!r}; expected a time such as 30min, 12h or 90d, at most 10 years"
        )
    return seconds


def _left(expires_s: float) -> str:
    return duration(expires_s - time.time())
