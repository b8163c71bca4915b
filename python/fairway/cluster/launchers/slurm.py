"""Starts agents by Slurm's ``srun``: in the allocation of this shell, or in their own."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable

from fairway.cluster.launchers.launcher import AgentEnding, AgentProcesses, AgentRequest
from fairway.cluster.logs import Logs
from fairway.errors import StartError

__all__ = ["SlurmLauncher"]

JOB, NODES = "SLURM_JOB_ID", "SLURM_JOB_NODELIST"
"""Environment variables that ``salloc`` and ``sbatch`` set."""
QUEUE_S = 86_400.0
"""Time that an allocation may wait in the queue."""
ALLOCATED_S = 300.0
"""Time within which the agents of an allocation start."""
SCONTROL_S = 30.0


class SlurmLauncher:
    """Starts agents with ``srun``.

    In an allocation there is one for each agent, on its nodes in order, as many on each as it takes
    for all hosts; a lost one is started on another node if one is free. Elsewhere there is one for
    each island, which waits in the queue for nodes.

    Args:
        options: more options for ``srun``, such as ``--partition=gpu --gres=gpu:4``.
        hosts: of all islands.
        nodes: for all islands; None for one for each host. Used outside of an allocation only.
        logs: takes what agents print.
        note: called with what srun says while a job waits for nodes.

    Raises:
        StartError: there is no Slurm here, or it does not answer.
    """

    def __init__(
        self,
        options: str,
        hosts: int,
        nodes: int | None,
        logs: Logs,
        note: Callable[[str], None],
    ) -> None:
        if shutil.which("srun") is None:
            raise StartError("there is no srun here; expected a machine of a Slurm cluster")
        self._note = note
        self._options = shlex.split(options)
        self._job = os.environ.get(JOB)
        self._lock = threading.Lock()
        self._processes = AgentProcesses(logs)
        self._of_node = -(-hosts // nodes) if nodes else 1
        self._free: list[str] = []
        """Nodes of the allocation, each as often as agents may still be started there."""
        if self._job is not None:
            names = _node_names(os.environ.get(NODES, ""))
            each = -(-hosts // len(names))
            self._free = [slot for name in names for slot in [name] * each]
        self.start_timeout_s = QUEUE_S if self._job is None else ALLOCATED_S

    def start(self, request: AgentRequest) -> None:
        """Starts agents of an island.

        Raises:
            StartError: the allocation has too few nodes.
        """
        island, count = request.island, request.count
        words = ["srun", f"--job-name=fairway-{island}", "--kill-on-bad-exit=0"]
        agent = [*self._options, sys.executable, "-P", "-m", "fairway", *request.arguments]
        if self._job is None:
            nodes = -(-count // self._of_node)
            words += [f"--ntasks={count}", f"--nodes={nodes}"]
            words += [f"--ntasks-per-node={-(-count // nodes)}"]
            self._processes.start(
                island,
                f"nodes of island {island}",
                [*words, *agent],
                request.token,
                heard=self._hear,
            )
            return
        with self._lock:
            if len(self._free) < count:
                raise StartError(
                    f"island {island} needs {count} more nodes, and {len(self._free)} of the "
                    f"allocation {self._job} are free"
                )
            names, self._free = self._free[:count], self._free[count:]
        words += [f"--jobid={self._job}", "--overlap", "--nodes=1", "--ntasks=1"]
        for name in names:
            on = [*words, f"--nodelist={name}", *agent]
            self._processes.start(island, name, on, request.token)

    def _hear(self, line: str) -> None:
        """Passes on why a job waits; errors are reported with the end of srun."""
        if line.startswith("srun: ") and not line.startswith("srun: error"):
            self._note(line)

    def watch(self) -> list[AgentEnding]:
        """Returns the agents that have ended since the last call; their nodes are free again."""
        ended = self._processes.watch()
        if self._job is not None:
            with self._lock:
                self._free += [name for _, name in ended]
        return [ending for ending, _ in ended]

    def stop(self) -> None:
        """Ends all agents, and the allocations that were made for them."""
        self._processes.stop()


def _node_names(nodes: str) -> list[str]:
    """Returns the names of a list such as ``m[1-4]``.

    Raises:
        StartError: Slurm does not answer.
    """
    words = ["scontrol", "show", "hostnames", nodes]
    try:
        found = subprocess.run(
            words, capture_output=True, text=True, timeout=SCONTROL_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        raise StartError(f"cannot read the nodes of the allocation: {said.strip()}") from None
    return found.stdout.split()
