"""Clusters in Kubernetes: ``fairway manifests``, and ``--on k8s`` of other commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import typer

from fairway.cli.consoles import check_output, note, working
from fairway.cli.islands import IslandOptions, started
from fairway.cli.options import grouped
from fairway.cluster.kubernetes import KubernetesCluster
from fairway.cluster.manifests import as_yaml, cluster_manifests, read_manifests
from fairway.cluster.supervisor import Run
from fairway.errors import ConfigError
from fairway.interrupts import Interrupts
from fairway.settings import Settings

__all__ = ["brought_up", "hold", "print_manifests"]

DEFAULT_NAME = "fairway"
LOOK_S = 2.0
OF_OTHER_ENGINES = ("--on", "--channels")
FILES = (".yaml", ".yml")


@grouped
def print_manifests(
    image: Annotated[
        str, typer.Option(help="Image with Fairway and what hosts need; see deploy/Containerfile.")
    ],
    islands: IslandOptions,
    name: Annotated[str, typer.Option(help="Name of the cluster and its objects.")] = DEFAULT_NAME,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="File for them. [default: standard output]"),
    ] = None,
) -> None:
    """Print the Kubernetes manifests of a cluster, to be edited and applied.

    `fairway up --on k8s:FILE` applies them, waits for the hosts and connects this machine, until
    Ctrl-C. They have the cluster's tokens: keep them secret.
    """
    check_output(out, FILES)
    for option in islands.given():
        if option in OF_OTHER_ENGINES:
            raise ConfigError(
                f"{option} says nothing that manifests of Kubernetes have; leave it out"
            )
    manifests = cluster_manifests(islands.settings(), image, name)
    text = as_yaml(manifests)
    if out is None:
        sys.stdout.write(text)
        return
    with os.fdopen(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(text)
    note(f"wrote {out}, which has the cluster's tokens; keep it secret")


@contextmanager
def brought_up(
    settings: Settings, interrupts: Interrupts, cluster: str | None = None
) -> Iterator[Run | KubernetesCluster]:
    """Brings a cluster up, in Kubernetes or by this process, and takes it down again.

    Raises:
        ConfigError: the manifests cannot be made, or read.
        StartError: hosts do not start.
    """
    if not settings.is_in_kubernetes:
        with started(settings, interrupts, cluster) as run:
            yield run
        return
    given = settings.on.partition(":")[2]
    if given.endswith(FILES):
        manifests = read_manifests(Path(given))
    else:
        name = cluster if cluster is not None else DEFAULT_NAME
        manifests = cluster_manifests(settings, given, name)
    with ExitStack() as starting:
        work = starting.enter_context(working("starting pods"))

        def show(up: int, total: int) -> None:
            work.update(up, total, "starting pods")

        with KubernetesCluster(manifests, note, show, interrupts.check) as there:
            starting.close()
            yield there


def hold(run: Run | KubernetesCluster, interrupts: Interrupts) -> None:
    """Keeps a cluster up until this process is asked to end."""
    if isinstance(run, KubernetesCluster):
        while interrupts.next(LOOK_S) is None:
            run.keep()
        return
    while interrupts.next() is None:
        continue  # SIGCHLD: a host process ended, which `Run` handles
