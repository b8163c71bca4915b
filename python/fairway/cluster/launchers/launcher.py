"""The contract of launchers, which start agents on machines; and processes that stay with them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from fairway import children
from fairway.cluster.logs import Logs, Outputs
from fairway.errors import StartError

__all__ = ["LAST_LINES", "AgentEnding", "AgentLauncher", "AgentProcesses", "AgentRequest"]

LAST_LINES = 8
"""Lines of an agent's output that explain its end."""
CLOSE_S = 5.0
"""Time that agents have to end by themselves once their controller has ended."""
TERMINATE_S = 2.0
"""Time that what starts them has to end after SIGTERM."""


@dataclass(frozen=True)
class AgentRequest:
    """Agents to start: all run ``fairway`` with the same arguments.

    Attributes:
        island: that they are for.
        count: how many.
        devices: of each one's host.
        arguments: without secrets, since other users of a machine can read them.
        token: a line for their standard input. Agents end where their standard input does, so that
            none outlives its launcher.
    """

    island: int
    count: int
    devices: int
    arguments: tuple[str, ...]
    token: str


@dataclass(frozen=True)
class AgentEnding:
    """The end of an agent.

    Attributes:
        island: that it was started for.
        text: on which machine and how, with the end of its output.
    """

    island: int
    text: str


class AgentLauncher(Protocol):
    """Starts agents on machines and watches them. It has no part in what their hosts do."""

    start_timeout_s: float
    """Time within which agents join and start their hosts."""

    def start(self, request: AgentRequest) -> None:
        """Starts agents; returns at once.

        Raises:
            StartError: there are not as many machines, or the engine does not answer.
        """

    def watch(self) -> list[AgentEnding]:
        """Returns the agents that have ended since the last call."""

    def stop(self) -> None:
        """Ends all agents."""


class AgentProcesses:
    """Processes of this machine, each of which stays as long as agents elsewhere (ssh, srun).

    Args:
        logs: takes what they print.
    """

    def __init__(self, logs: Logs) -> None:
        self._logs = logs
        self._outputs = Outputs()
        self._lock = threading.Lock()
        self._running: list[_AgentProcess] = []

    def start(
        self,
        island: int,
        where: str,
        words: Sequence[str],
        token: str,
        environment: Mapping[str, str] | None = None,
        heard: Callable[[str], None] | None = None,
    ) -> None:
        """Starts one.

        Args:
            island: that its agents are for.
            where: the machines, for what is said of it.
            words: its command.
            token: a line for its standard input, which then stays open.
            environment: variables besides those of this process.
            heard: called with each line that it prints.

        Raises:
            StartError: there is no such command.
        """
        try:
            process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**children.environment(), **(environment or {})},
                start_new_session=True,  # Ctrl-C is for this process
            )
        except OSError as error:
            raise StartError(f"cannot run {words[0]}: {error.strerror}") from error
        assert process.stdout is not None
        last: deque[str] = deque(maxlen=LAST_LINES)

        def take(line: str) -> None:
            last.append(line)
            self._logs.add(f"{where}: {line}", island)
            if heard is not None:
                heard(line)

        printed = self._outputs.follow(process.stdout, take)
        with self._lock:
            self._running.append(_AgentProcess(island, where, process, last, printed))
        assert process.stdin is not None
        # One that has ended already reads nothing; `watch` says why it has ended. The pipe stays
        # open: where it ends, because this process did, agents end as well.
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(token.encode() + b"\n")
            process.stdin.flush()

    def watch(self) -> list[tuple[AgentEnding, str]]:
        """Returns those that have ended since the last call, with the machines of each."""
        with self._lock:
            ended = [one for one in self._running if one.process.poll() is not None]
            self._running = [one for one in self._running if one not in ended]
        for one in ended:
            one.release()
        return [(AgentEnding(one.island, one.ending()), one.where) for one in ended]

    def stop(self) -> None:
        """Ends all, after the time in which they may end by themselves."""
        with self._lock:
            running, self._running = self._running, []
        # By SIGTERM srun takes its job out of the queue; by SIGKILL it would leave it there.
        steps = (
            (_AgentProcess.release, CLOSE_S),
            (_AgentProcess.terminate, TERMINATE_S),
            (_AgentProcess.kill, TERMINATE_S),
        )
        for end, time_s in steps:
            for one in running:
                end(one)
            deadline = time.monotonic() + time_s
            running = [one for one in running if not one.ends(deadline - time.monotonic())]
        self._outputs.close()


@dataclass(frozen=True, eq=False)
class _AgentProcess:
    island: int
    where: str
    process: subprocess.Popen[bytes]
    last: deque[str]
    printed: threading.Event

    def release(self) -> None:
        """Closes its standard input, by which its agents end."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def terminate(self) -> None:
        self.process.terminate()

    def kill(self) -> None:
        self.process.kill()

    def ends(self, timeout_s: float) -> bool:
        try:
            self.process.wait(max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            return False
        return True

    def ending(self) -> str:
        self.printed.wait(1.0)
        code = self.process.returncode
        how = f"by signal {-code}" if code < 0 else f"with status {code}"
        words = os.linesep.join(self.last)
        return f"the agent on {self.where} has ended {how}" + (f":\n{words}" if words else "")
