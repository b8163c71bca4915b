"""Starts agents as actors of a Ray cluster, one for each host.

Ray places, starts and watches agents; what hosts compute and send does not go through it.
"""

from __future__ import annotations

import platform
import socket
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
CONNECT_S = 10.0


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
        self._waits: dict[Any, tuple[int, Any]] = {}
        """Island and actor of each agent, by the call that returns when the agent ends."""
        try:
            _CONNECTION.open(ray, address)
        except (OSError, RuntimeError, ValueError) as error:
            raise StartError(
                f"no Ray cluster answers at {address or 'this machine'}: {error}; expected the "
                "address of a running one, or `ray start --head` first"
            ) from None

    def start(self, request: AgentRequest) -> None:
        """Asks for an actor for each agent, spread over nodes where that is possible.

        They are in no placement group: Ray would place the bundle of a lost node again and hold
        it, with nothing in it, so that the node's successor had no room for the agent's.
        """
        gpus = float(request.devices) if self._is_gpu else 0.0
        for _ in range(request.count):
            actor = (
                self._ray.remote(_AgentActor)
                .options(num_cpus=1.0, num_gpus=gpus, scheduling_strategy="SPREAD")
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
        """Ends all agents."""
        with self._lock:
            waits, self._waits = self._waits, {}
        if waits:
            self._ray.wait(list(waits), num_returns=len(waits), timeout=STOP_S)
        for _, actor in waits.values():
            self._ray.kill(actor)
        _CONNECTION.close(self._ray)


class _Connection:
    """The connection of this process to Ray, which the launchers of its runs share.

    It ends with the last of them: its end takes along all that the process has in Ray. One that the
    process has made itself stays.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._launchers = 0
        self._ours: str | None = None
        """The address, if the launchers made it."""

    def open(self, ray: Any, address: str) -> None:
        """Connects this process for one more launcher, if it is not connected.

        Raises:
            OSError, RuntimeError, ValueError: no cluster answers, or the launchers are connected to
                another one.
        """
        with self._lock:
            if self._ours not in (None, address):
                raise ValueError(
                    f"the runs of this process use {self._ours or 'that of this machine'}, and a "
                    "process is connected to one"
                )
            if not ray.is_initialized():
                _check_listens(address)
                ray.init(
                    address or "auto",
                    namespace="fairway",
                    log_to_driver=False,
                    logging_level="warning",
                )
                self._ours = address
            self._launchers += 1

    def close(self, ray: Any) -> None:
        """Disconnects it after the last launcher."""
        with self._lock:
            self._launchers -= 1
            if self._ours is not None and self._launchers == 0:
                self._ours = None
                ray.shutdown()


_CONNECTION = _Connection()


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


def _check_listens(address: str) -> None:
    """Checks that something listens at an address with a port; Ray would try for over a minute.

    Raises:
        OSError: nothing does.
    """
    host, _, port = address.rpartition("/")[2].rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise StartError(
            f"Ray cannot be loaded: {error}; try `pip install 'fairway[ray]'`"
        ) from None
    return ray
