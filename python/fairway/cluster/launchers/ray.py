"""Starts agents as actors of a Ray cluster: a placement group for each island, an actor for a host.

Ray places, starts and watches agents; what hosts compute and send does not go through it.
"""

from __future__ import annotations

import platform
import subprocess
import sys
import threading
from collections import deque
from typing import Any

from fairway import children
from fairway.cluster.launchers.launcher import LAST_LINES, AgentEnding, AgentRequest
from fairway.cluster.logs import Logs
from fairway.errors import StartError

__all__ = ["RayLauncher"]

START_S = 300.0
"""Time within which Ray finds room for an island and starts its agents."""
STOP_S = 5.0


class RayLauncher:
    """Starts agents on a Ray cluster.

    Args:
        address: of the cluster, as :func:`ray.init` takes it; empty for the one of this machine or
            of the Ray job that this process is part of.
        is_gpu: whether hosts need GPUs; otherwise each needs a CPU.
        logs: takes what agents print.

    Raises:
        StartError: Ray is not installed, or its cluster does not answer.
    """

    start_timeout_s = START_S

    def __init__(self, address: str, is_gpu: bool, logs: Logs) -> None:
        self._ray = ray = _import_ray()
        self._logs = logs
        self._is_gpu = is_gpu
        self._lock = threading.Lock()
        self._groups: list[Any] = []
        self._waits: dict[Any, tuple[int, Any]] = {}
        """Island and actor of each agent, by the call that returns when the agent ends."""
        try:
            if not ray.is_initialized():
                ray.init(
                    address or "auto",
                    namespace="fairway",
                    log_to_driver=False,
                    logging_level="warning",
                )
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise StartError(
                f"no Ray cluster answers at {address or 'this machine'}: {error}; expected the "
                "address of a running one, or `ray start --head` first"
            ) from None

    def start(self, request: AgentRequest) -> None:
        """Asks for room for the agents, spread over nodes where that is possible."""
        ray = self._ray
        cpus, gpus = 1.0, float(request.devices) if self._is_gpu else 0.0
        room = {"CPU": cpus} | ({"GPU": gpus} if gpus else {})
        group = ray.util.placement_group([room] * request.count, strategy="SPREAD")
        self._groups.append(group)
        for bundle in range(request.count):
            place = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=bundle
            )
            actor = (
                ray.remote(_AgentActor)
                .options(num_cpus=cpus, num_gpus=gpus, scheduling_strategy=place)
                .remote()
            )
            ended = actor.run.remote(request.arguments, request.token)
            with self._lock:
                self._waits[ended] = request.island, actor

    def watch(self) -> list[AgentEnding]:
        """Returns the agents that have ended since the last call; nodes that are lost count."""
        with self._lock:
            waits = list(self._waits)
        if not waits:
            return []
        ready, _ = self._ray.wait(waits, num_returns=len(waits), timeout=0)
        return [self._ending(wait) for wait in ready]

    def _ending(self, wait: Any) -> AgentEnding:
        with self._lock:
            island, _ = self._waits.pop(wait)
        try:
            text = str(self._ray.get(wait))
        except Exception as error:  # Ray's own, of many kinds, and each says which node or why
            text = f"an agent of Ray is lost: {str(error).strip().splitlines()[0]}"
        self._logs.add(text, island)
        return AgentEnding(island, text)

    def stop(self) -> None:
        """Ends all agents, and gives their room back."""
        with self._lock:
            waits, self._waits = self._waits, {}
        if waits:
            self._ray.wait(list(waits), num_returns=len(waits), timeout=STOP_S)
        for _, actor in waits.values():
            self._ray.kill(actor)
        for group in self._groups:
            self._ray.util.remove_placement_group(group)
        self._ray.shutdown()


class _AgentActor:
    """An agent as a child of a Ray worker, so that it ends with the worker."""

    def run(self, arguments: tuple[str, ...], token: str) -> str:
        """Runs an agent to its end; returns how it ended, with its last lines."""
        agent = subprocess.Popen(
            [sys.executable, "-P", "-m", "fairway", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=children.environment(),
            text=True,
        )
        assert agent.stdin is not None
        assert agent.stdout is not None
        # The pipe stays open: where it ends, because the worker did, the agent ends as well.
        agent.stdin.write(token + "\n")
        agent.stdin.flush()
        last = deque(agent.stdout, maxlen=LAST_LINES)
        code = agent.wait()
        return f"the agent on {platform.node()} has ended with status {code}:\n{''.join(last)}"


def _import_ray() -> Any:
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise StartError(
            f"Ray cannot be loaded: {error}; try `pip install 'fairway[ray]'`"
        ) from None
    return ray
