"""Both sides of ``agents.py``: the controller, alone in its process, and many agents in another."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys
import tempfile
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
from common import serve_methods

from fairway import _native
from fairway.cluster.agents import (
    HEARTBEATS,
    LINE_MAX,
    SERVICE,
    AgentAccepted,
    AgentHeartbeat,
    AgentHello,
    StartHost,
    ToAgent,
    Versions,
    encoded,
    read_message,
)
from fairway.cluster.supervisor import Run
from fairway.errors import AgentError, StartError
from fairway.settings import IslandSettings, Settings

AGENTS_OF_A_SOCKET = 250
"""Agents behind one carried socket, which carries 256 connections at a time."""
RETRY_S = 1.0
"""Time after which an agent that was not admitted tries again, as ``fairway host`` does."""


class Controller:
    """A controller that waits for hosts of agents: its own process, so that its costs are its own.

    Its only host at first goes to an agent that is not counted.
    """

    def __init__(self) -> None:
        import fairway.host.backend  # noqa: F401 - takes half a second at the first launch

        known: dict[str, Any] = {"gateway": "127.0.0.1:0", "data_plane": "tcp"}
        self._run = Run(Settings.parse("1x1x1", on="agents", **known))
        self._adding: threading.Thread | None = None

    def where(self) -> dict[str, Any]:
        """Returns the gateway's address, the token of hosts and the time of a lease."""
        gateway = self._run.gateway
        assert gateway is not None
        token = gateway.token_file.read_text().strip()
        lease_s = self._run.settings.timeout_s
        return {"address": gateway.addresses[0], "token": token, "lease_s": lease_s}

    def costs(self) -> dict[str, float]:
        """Returns CPU time, resident memory and the number of descriptors and threads so far."""
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return {
            "cpu_s": time.process_time(),
            "memory_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
        }

    def launch(self, hosts: int) -> float:
        """Adds an island of this many hosts; returns the time of the beginning, in seconds."""

        def add() -> None:
            with contextlib.suppress(StartError):  # its hosts never come up: it ends with the run
                self._run.add_island(IslandSettings(hosts, 1))

        began_s = time.monotonic()
        self._adding = threading.Thread(target=add)
        self._adding.start()
        return began_s

    def end(self) -> float:
        """Ends the controller; returns the time that this takes, in seconds."""
        began_s = time.monotonic()
        self._run.close()
        if self._adding is not None:
            self._adding.join()
        return time.monotonic() - began_s


class Agents:
    """Agents without hosts: each has a TLS connection, joins, and keeps its lease."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._decoder = msgspec.json.Decoder(ToAgent)
        self._versions = Versions.here()
        self._folder = tempfile.mkdtemp(prefix="fw-")
        self._random = random.Random(1)
        self._joined: list[float] = []
        """When each agent was admitted."""
        self._starts: list[float] = []
        """When each agent read that it is to start a host."""
        self._tries = 0
        self._lost = 0
        self._serving: list[Future[None]] = []
        """Keeps the agents' tasks: the loop alone would not."""

    def know(self, address: str, token: str, lease_s: float) -> None:
        """Takes where the controller is; the agent that is not counted joins."""
        self._remote = _native.Remote(address, token)
        self._period_s = lease_s / HEARTBEATS
        self._sockets = 0
        self.join(1)
        self._wait_for(self._starts, 1, 30.0)
        self._starts.clear()

    def join(self, count: int, at_once: int = 1) -> dict[str, float]:
        """Lets agents join; returns the time that it takes in seconds, and the number of tries.

        Args:
            count: number of agents.
            at_once: most that are connected and not admitted yet.
        """
        self._places = asyncio.Semaphore(at_once)
        paths = []
        for _ in range(-(-count // AGENTS_OF_A_SOCKET)):
            self._sockets += 1
            paths.append(Path(self._folder) / f"{self._sockets}.sock")
            self._remote.carry(paths[-1], SERVICE)
        self._joined.clear()
        self._tries = 0
        began_s = time.monotonic()
        for number in range(count):
            work = self._serve(number, paths[number % len(paths)])
            self._serving.append(asyncio.run_coroutine_threadsafe(work, self._loop))
        self._wait_for(self._joined, count, 120.0)
        return {"join_s": max(self._joined) - began_s, "tries": self._tries}

    def started(self, count: int) -> list[float]:
        """Waits until this many agents are to start a host; returns when each has read it."""
        self._wait_for(self._starts, count, 120.0)
        return sorted(self._starts)

    def lost(self) -> int:
        """Returns how many agents have lost the controller."""
        return self._lost

    def _wait_for(self, times: list[float], count: int, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while len(times) < count:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(times)} of {count} agents after {timeout_s:g} s")
            time.sleep(0.005)

    async def _serve(self, number: int, path: Path) -> None:
        while not await self._serve_once(number, path):
            await asyncio.sleep(RETRY_S)
        self._lost += 1

    async def _serve_once(self, number: int, path: Path) -> bool:
        """Serves until the connection ends; returns whether the agent was admitted at all."""
        await self._places.acquire()
        self._tries += 1
        try:
            reader, writer = await asyncio.open_unix_connection(path, limit=LINE_MAX)
        except OSError:
            self._places.release()
            return False
        hello = AgentHello(f"machine-{number}", "127.0.0.1", 1 + number, self._versions)
        beating: asyncio.Task[None] | None = None
        try:
            writer.write(encoded(hello))
            while (message := await read_message(reader, self._decoder)) is not None:
                if isinstance(message, AgentAccepted):
                    self._joined.append(time.monotonic())
                    beating = asyncio.create_task(self._beat(writer))
                    self._places.release()
                elif isinstance(message, StartHost):
                    self._starts.append(time.monotonic())
        except (AgentError, OSError):
            pass  # refused, in the words of the carrier
        finally:
            writer.close()
            if beating is not None:
                beating.cancel()
            else:
                self._places.release()
        return beating is not None

    async def _beat(self, writer: asyncio.StreamWriter) -> None:
        """Keeps the lease; agents of machines that started together drift apart."""
        await asyncio.sleep(self._random.random() * self._period_s)
        while True:
            writer.write(encoded(AgentHeartbeat()))
            await asyncio.sleep(self._period_s)


if __name__ == "__main__":
    serve_methods({"controller": Controller, "agents": Agents}[sys.argv[1]]())
