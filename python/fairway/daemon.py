"""A run: the controller in this process, its hosts as children."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from fairway import _native
from fairway.doors import Door, slice_answers
from fairway.engines.local import LocalHosts
from fairway.errors import StartError
from fairway.host.__main__ import HostSettings
from fairway.registry import new_directory
from fairway.report.timeline import Timeline
from fairway.settings import Settings

__all__ = ["Run", "client_environment"]

START_TIMEOUT_S = 120.0


def client_environment(target: str) -> dict[str, str]:
    """What the environment of a client of ``target`` needs."""
    return {"JAX_PLATFORMS": "proxy", "JAX_BACKEND_TARGET": target}


class Run:
    """Islands that are up, as long as the context lasts.

    Args:
        settings: what to bring up.
        on_progress: called with hosts up and hosts in all, whenever that changes.
        check: called again and again until all are up; what it raises ends the start, and nothing
            is left of it.

    Raises:
        StartError: a host does not start.
        OSError: the address for clients is taken.
        ValueError: the address for clients is malformed or not of this machine alone.
    """

    def __init__(
        self,
        settings: Settings,
        on_progress: Callable[[int, int], None] | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        self.settings = settings
        self._on_progress = on_progress or (lambda up, total: None)
        self._check = check or (lambda: None)
        self._total = sum(island.hosts for island in settings.islands)
        self._services: list[Any] = []
        self._doors: list[Door] = []
        self._closing = threading.Event()
        self._started = False
        self.timeline: Timeline | None = None
        """What ran and moved; there once the run is closed, if it was asked for."""
        self.directory = new_directory()
        self._hosts = LocalHosts(self.directory)
        token = secrets.token_hex(32)
        try:
            self._server = _native.Server(
                [(island.hosts, island.devices) for island in settings.islands],
                settings.listen,
                self.directory,
                token,
                settings.timeout_s,
                settings.slice_index,
                settings.launch_window,
                settings.dispatch == "sequential",
                settings.capture,
            )
        except BaseException:
            shutil.rmtree(self.directory, ignore_errors=True)
            raise
        try:
            self._start_hosts(token)
        except BaseException:
            self.close()
            raise

    @property
    def target(self) -> str:
        """What ``JAX_BACKEND_TARGET`` must be for clients of this run."""
        return f"grpc://{self._server.address}"

    @property
    def environment(self) -> dict[str, str]:
        """What a program's environment needs."""
        return client_environment(self.target)

    def start(self) -> None:
        """Waits until all hosts are up; the context does it otherwise."""
        if self._started:
            return
        try:
            self._wait_until_up()
            status = self.directory / "status.sock"
            self._doors.append(Door(status, lambda _: self.overview(), asks=False))
            slices = self.directory / "slices.sock"
            self._doors.append(Door(slices, slice_answers(self._server), asks=True))
        except BaseException:
            self.close()
            raise
        threading.Thread(target=self._stop_lost_hosts, daemon=True).start()
        self._started = True

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends hosts and controller and removes their sockets."""
        if self._closing.is_set():
            return
        self._closing.set()
        for door in self._doors:
            door.close()
        recorded = self._started and self.settings.timeline
        try:
            self._server.close()
            # Without a controller hosts end by themselves; then they write their last records.
            self._hosts.close(grace_s=2.0 if recorded else 0.0)
            if recorded:
                self._write_timeline(recorded)
        finally:
            shutil.rmtree(self.directory, ignore_errors=True)

    def _write_timeline(self, path: Path) -> None:
        places = [
            (island, rank)
            for island, settings in enumerate(self.settings.islands)
            for rank in range(settings.hosts)
        ]
        records = {
            host: (island, rank, self._trace(host)) for host, (island, rank) in enumerate(places)
        }
        self.timeline = Timeline(records)
        self.timeline.write(path)

    def captured(self) -> list[tuple[int, str | None, str | None]]:
        """The last step of each client that is gone, as text or as the error that it is none."""
        return self._server.captured()

    def overview(self) -> dict[str, Any]:
        """What ``fairway status`` shows."""
        return {
            "target": self.target,
            "process": os.getpid(),
            **self._server.overview(),
        }

    def _start_hosts(self, token: str) -> None:
        """Starts all hosts; none waits for another."""
        settings = self.settings
        flags = (
            f"--xla_cpu_collective_timeout_seconds={max(1, round(settings.timeout_s * 4))} "
            f"--xla_cpu_collective_call_terminate_timeout_seconds=600 {settings.xla_flags}"
        ).strip()
        number = 0
        for island in settings.islands:
            coordinator = self._coordinate(island.hosts) if island.hosts > 1 else None
            for rank in range(island.hosts):
                self._check()
                data = (
                    f"unix:{self.directory}/data-{number}.sock"
                    if settings.data_plane == "unix"
                    else "tcp:127.0.0.1:0"
                )
                self._hosts.start(
                    HostSettings(
                        host=number,
                        rank=rank,
                        hosts=island.hosts,
                        devices=island.devices,
                        platform=settings.platform,
                        coordinator=coordinator,
                        control=str(self.directory / "control.sock"),
                        data=data,
                        token=token,
                        timeout_s=settings.timeout_s,
                        xla_flags=flags,
                        device_memory=settings.device_memory_bytes,
                        trace=str(self._trace(number)) if settings.timeline else None,
                    )
                )
                number += 1

    def _trace(self, host: int) -> Path:
        return self.directory / f"trace-{host}.jsonl"

    def _coordinate(self, hosts: int) -> str:
        """Starts an island's coordination service in this process; returns its address."""
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # read when jaxlib is first imported
        from fairway.host.backend import coordination_service

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._services.append(coordination_service(port, hosts))
        return f"127.0.0.1:{port}"

    def _wait_until_up(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        shown = -1
        while True:
            overview = self._server.overview()
            hosts = [host for island in overview["islands"] for host in island["hosts"]]
            up = sum(host["process"] is not None for host in hosts)
            if up != shown:
                self._on_progress(up, self._total)
                shown = up
            if self._server.is_up():
                return
            if lost := [host["lost"] for host in hosts if host["lost"]]:
                raise StartError(lost[0])
            self._hosts.check()
            self._check()
            if time.monotonic() > deadline:
                raise StartError(
                    f"{up} of {self._total} hosts are up after {START_TIMEOUT_S:.0f} s"
                )
            time.sleep(0.01)

    def _stop_lost_hosts(self) -> None:
        while not self._closing.is_set():
            host = self._server.next_stop(0.2)
            if host is not None:
                self._hosts.stop(host)
