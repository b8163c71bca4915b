"""The cluster that a command is about: of this machine, or reached by its gateway."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from fairway.cli.joining import TokenFile, read_token
from fairway.cluster.registry import choose_cluster, live_runs
from fairway.cluster.remotes import RemoteCluster, is_address
from fairway.errors import NotRunningError

__all__ = ["ClusterOptions"]


@dataclass(frozen=True)
class ClusterOptions:
    """Which cluster."""

    cluster: Annotated[
        str | None,
        typer.Option(
            help="Name of a cluster that `fairway up` started, or ADDRESS:PORT of the gateway of "
            "one on another machine. [default: the only one that is up]",
            show_default=False,
        ),
    ] = None
    token_file: TokenFile = None

    @contextmanager
    def runs(self) -> Iterator[list[dict[str, Any]]]:
        """Yields the overview of each run that can be reached, for as long as the context lasts.

        A cluster of another machine is connected to, unless `fairway connect` does that already and
        no file with a token is given.

        Raises:
            NotRunningError: its controller does not answer, or refuses the token.
        """
        runs = live_runs()
        with ExitStack() as connected:
            name = self.cluster
            if name is not None and is_address(name) and (self.token_file or not _has(runs, name)):
                remote = RemoteCluster(name, read_token(self.token_file))
                connected.enter_context(remote)
                runs = [run for run in live_runs() if run["directory"] == str(remote.directory)]
            yield runs

    @contextmanager
    def directory(self) -> Iterator[Path]:
        """Yields the directory of the cluster, for as long as the context lasts.

        Raises:
            NotRunningError: it is not up.
        """
        with self.runs() as runs:
            found = choose_cluster(runs, self.cluster, os.environ.get("JAX_BACKEND_TARGET"))
            if found is None:
                hint = "; islands of a `fairway run` are its own" if runs else ""
                raise NotRunningError(f"no cluster is up; `fairway up` starts one{hint}")
            yield Path(found["directory"])


def _has(runs: list[dict[str, Any]], address: str) -> bool:
    return any(str(run["cluster"]).endswith(f"@{address}") for run in runs)
