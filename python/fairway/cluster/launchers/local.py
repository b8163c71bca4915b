"""Runs hosts as processes of this machine: the default."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Event

from fairway import children
from fairway.cluster.admin import START_TIMEOUT_S
from fairway.cluster.launchers.network import PrivateNetwork
from fairway.cluster.logs import Logs, Outputs
from fairway.errors import StartError
from fairway.host.__main__ import HostSettings

__all__ = ["LocalHosts"]

ENDING_S = 0.05
"""Time that a process may take to exit after its connections have closed."""
OUTPUT_S = 1.0
"""Time within which the output of an ended process is read; a child of it may keep it open."""
FATAL = re.compile(r"^F\d{4} .*", re.MULTILINE)
"""XLA's message before it aborts its process; a stack trace follows."""


class LocalHosts:
    """The host processes of one run.

    Args:
        logs: takes what hosts print.
    """

    start_timeout_s = START_TIMEOUT_S
    replaces = False
    """Lost hosts stay lost: what has ended them may do so again."""

    def __init__(self, logs: Logs) -> None:
        self._logs = logs
        self._outputs = Outputs()
        self._printed: dict[int, Event] = {}
        """Set once all output of a host's latest process has been read."""
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._settings: dict[int, HostSettings] = {}
        # Hosts end with the thread that started them (PR_SET_PDEATHSIG in prctl(2)), so it must
        # persist.
        self._starter = ThreadPoolExecutor(1, "fairway-starter")
        self._networks: dict[int, PrivateNetwork] = {}

    def separate(self, island: int) -> tuple[str, ...]:
        """Creates a network namespace for an island, replacing the one that it had.

        Returns:
            The namespaces that its hosts must enter.

        Raises:
            NoNamespaceError: the kernel refuses it to this user.
        """
        if island in self._networks:
            self._networks.pop(island).close()
        self._networks[island] = network = self._starter.submit(PrivateNetwork).result()
        return network.paths

    def start(self, settings: HostSettings, prefix: Sequence[str] = ()) -> None:
        """Starts one host, with the words of ``prefix`` before its command; returns at once.

        A previous process of this host is ended first.

        Raises:
            StartError: there is no such command.
        """
        self.stop(settings.host)
        try:
            process = self._starter.submit(
                subprocess.Popen,
                [*prefix, *children.command("fairway.host")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=children.environment(),
                start_new_session=True,
            ).result()
        except OSError as error:
            raise StartError(
                f"cannot start host {settings.host} with {' '.join(prefix)}: {error.strerror}"
            ) from error
        assert process.stdout is not None
        self._printed[settings.host] = self._outputs.follow(
            process.stdout, partial(self._logs.add, island=settings.island, host=settings.host)
        )
        self._processes[settings.host] = process
        self._settings[settings.host] = settings
        assert process.stdin is not None
        # A host that has ended already cannot read the settings; `check` reports why it ended.
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(json.dumps(dataclasses.asdict(settings)).encode() + b"\n")

    def check(self, hosts: Iterable[int] | None = None) -> None:
        """Checks that hosts are running.

        Args:
            hosts: the hosts to check; None checks all.

        Raises:
            StartError: one has ended; the text has the end of its output.
        """
        for host in self._processes if hosts is None else hosts:
            if (code := self._processes[host].poll()) is not None:
                raise StartError(
                    f"host {host} ended with status {code} while starting; its last words:\n"
                    f"{self.last_words(host)}"
                )

    def fill(self, island: int) -> None:
        """Starts what an island's hosts need besides :meth:`start`: nothing."""

    def missing(self) -> list[int]:
        """Returns the hosts that nothing has started: none."""
        return []

    def ending(self, host: int, process_id: int | None = None) -> str | None:
        """Returns how a process of a host ended, with the end of its output.

        Args:
            host: its number.
            process_id: the process; None stands for the latest.

        Returns:
            None if it has not ended, or another process has become the host since.
        """
        process = self._processes.get(host)
        if process is None or process_id not in (None, process.pid):
            return None
        try:  # its connections close shortly before it exits
            code = process.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            return None
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
        words = self.last_words(host)
        if fatal := FATAL.search(self._logs.of_host(host)):
            words = f"{fatal[0]}\n{words}"
        return f"{how}; its last words:\n{words}" if words else how

    def last_words(self, host: int, lines: int = 15) -> str:
        """Returns the last lines of an ended host's output."""
        self._printed[host].wait(OUTPUT_S)
        return "\n".join(self._logs.of_host(host).splitlines()[-lines:])

    def stop(self, host: int, process_id: int | None = None) -> None:
        """Ends one host at once (SIGKILL), even if it is stopped or hangs.

        Args:
            host: the host to end.
            process_id: end it only if it is still this process; None ends any.
        """
        process = self._processes.get(host)
        if process is None or process_id not in (None, process.pid):
            return
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait(5)
        place, _, path = self._settings[host].data.split(",")[0].partition(":")
        if place == "unix":
            Path(path).unlink(missing_ok=True)

    def wait(self, timeout_s: float) -> None:
        """Waits until all hosts have ended by themselves."""
        deadline = time.monotonic() + timeout_s
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))

    def close(self, grace_s: float = 0.0) -> None:
        """Ends all hosts, after ``grace_s`` in which they may exit by themselves."""
        self.wait(grace_s)
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + 5
        for process in self._processes.values():
            process.wait(max(0.1, deadline - time.monotonic()))
        for network in self._networks.values():
            network.close()
        self._outputs.close()
        self._starter.shutdown(wait=False)
