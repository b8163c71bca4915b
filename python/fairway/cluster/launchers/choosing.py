"""Chooses the launcher that settings name."""

from __future__ import annotations

from collections.abc import Callable

from fairway.cluster.launchers.launcher import AgentLauncher
from fairway.cluster.launchers.pods import PodsLauncher
from fairway.cluster.launchers.ray import RayLauncher
from fairway.cluster.launchers.slurm import SlurmLauncher
from fairway.cluster.launchers.ssh import SshLauncher, read_machines
from fairway.cluster.logs import Logs
from fairway.errors import StartError
from fairway.settings import Settings

__all__ = ["open_launcher"]


def open_launcher(
    settings: Settings, logs: Logs, note: Callable[[str], None]
) -> AgentLauncher | None:
    """Returns the launcher of the setting ``on``; None if people start agents.

    Args:
        settings: of the run.
        logs: takes what agents print.
        note: called with what an engine says while it looks for machines.

    Raises:
        ConfigError: the machines cannot be read.
        StartError: the engine is not there.
    """
    kind, _, rest = settings.on.partition(":")
    match kind:
        case "ssh":
            return SshLauncher(read_machines(rest), logs)
        case "slurm":
            hosts = sum(island.hosts for island in settings.islands)
            return SlurmLauncher(rest, hosts, settings.nodes, logs, note)
        case "ray":
            return RayLauncher(rest, settings.platform == "cuda", logs)
        case "pods":
            return PodsLauncher()
        case "k8s":
            raise StartError("a controller in Kubernetes is started by `fairway up --on k8s:IMAGE`")
    return None
