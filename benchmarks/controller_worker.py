"""The processes of ``controller.py``: the server, hosts that compute nothing, and a client.

Each is started as ``controller_worker.py ROLE`` and serves requests by :func:`common.serve`.
"""

from __future__ import annotations

import itertools
import os
import resource
import selectors
import socket
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common import serve

from fairway.host import messages
from fairway.host.frames import CommandReceiver
from fairway.host.reporter import Reporter

TOKEN = "benchmark"
BURST = 64
"""Warm-up launches of the client."""


def processor_s() -> tuple[float, float]:
    """Returns user and system CPU time of this process so far, in seconds."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime, used.ru_stime


class Server:
    """The controller as ``fairway up`` starts it, without hosts."""

    def start(self, hosts: int, directory: str) -> str:
        """Starts the server for one island of ``hosts`` hosts; returns its address for clients."""
        from fairway import _native
        from fairway.cluster.serving import ServerSettings

        self._server = _native.Server(
            ServerSettings(
                [(hosts, 1)], "127.0.0.1:0", [], Path(directory), TOKEN, timeout_s=3600.0
            )
        )
        return f"grpc://{self._server.address}"

    def is_up(self) -> bool:
        """Returns whether all hosts have joined."""
        return bool(self._server.is_up())

    def used(self) -> tuple[float, float]:
        """Returns the CPU time so far."""
        return processor_s()


class Hosts:
    """Hosts that answer at once and compute nothing."""

    def __init__(self) -> None:
        self.launches = self.frees = self.others = self.reports = 0
        self._busy_ns = 0
        self._selector = selectors.DefaultSelector()

    def start(self, hosts: int, directory: str) -> None:
        """Connects them to the controller."""
        for host in range(hosts):
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(str(Path(directory) / "control.sock"))
            reporter = Reporter(connection)
            info = messages.HostInfo(
                process=os.getpid(),
                data_address="unix:/nowhere",
                channels=[],
                jaxlib="none",
                platform="none",
                platform_version="none",
                device_kind="none",
                memories=["device"],
                devices=1,
                device_memory=None,
            )
            reporter.send(messages.Hello(TOKEN, host, info))
            self._selector.register(connection, selectors.EVENT_READ, _Host(connection, reporter))
        threading.Thread(target=self._follow, daemon=True).start()

    def run_time(self, launch_ns: int) -> None:
        """Sets the launch time that hosts claim, which determines the frequency of reports."""
        self._busy_ns = launch_ns

    def counts(self) -> dict[str, int]:
        """Returns the number of commands received and reports sent so far."""
        return {"launch": self.launches, "free": self.frees, "report": self.reports}

    def _follow(self) -> None:
        while True:
            for key, _ in self._selector.select():
                frames = key.data.receiver.receive()
                if frames is None:
                    self._selector.unregister(key.fileobj)
                else:
                    self._take(key.data, itertools.chain.from_iterable(frames))

    def _take(self, host: _Host, commands: Iterable[messages.Command]) -> None:
        for command in commands:
            match command:
                case messages.Launch():
                    self.launches += 1
                    host.unasked += 1
                    if command.acknowledge is not messages.Acknowledge.NO:
                        host.reporter.send(messages.Finished(self._busy_ns * host.unasked))
                        self.reports += 1
                        host.unasked = 0
                case messages.Free():
                    self.frees += 1
                case messages.Compile():
                    reply = messages.ProgramCompiled(_metadata())
                    host.reporter.done(command.ticket, reply)
                case messages.CheckReady():
                    host.reporter.done(command.ticket, messages.Success())
                case _:
                    self.others += 1


class _Host:
    """One host that answers at once."""

    def __init__(self, connection: socket.socket, reporter: Reporter) -> None:
        self.receiver = CommandReceiver(connection)
        self.reporter = reporter
        self.unasked = 0
        """Launches since the last report."""


def _metadata() -> messages.ProgramMetadata:
    """Returns a host's description of a program from one replicated scalar to another."""
    cut = messages.CompiledSharding(None, b"")
    return messages.ProgramMetadata(
        name="step",
        fingerprint=None,
        parameters=[cut],
        parameter_layouts=[[]],
        outputs=[messages.OutputSpec("float32", [], cut, "device")],
        output_layouts=[[]],
        donated=[],
        parameter_count=1,
        memory=None,
        code_bytes=0,
        costs=[],
        input=None,
        collectives=[],
    )


class Client:
    """Stock JAX."""

    def start(self) -> int:
        """Compiles the computation over all devices; returns their number."""
        import jax
        import numpy as np
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        mesh = Mesh(np.array(jax.devices()), ("device",))
        partition: Any = PartitionSpec
        sharding = NamedSharding(mesh, partition())
        self._program = jax.jit(lambda x: x + 1, in_shardings=sharding, out_shardings=sharding)
        self._value = jax.device_put(np.float32(0), sharding)
        self.run(BURST)
        return int(mesh.size)

    def run(self, count: int) -> dict[str, float]:
        """Runs a chain, and waits for its end; returns the times that it used."""
        began, thread, used = time.perf_counter(), time.thread_time(), sum(processor_s())
        value, program = self._value, self._program
        for _ in range(count):
            value = program(value)
        issued = time.thread_time() - thread
        value.block_until_ready()
        wall = time.perf_counter() - began
        return {"wall_s": wall, "thread_s": issued, "process_s": sum(processor_s()) - used}


def main() -> None:
    """Serves in the role of the first argument."""
    roles = {"server": Server, "hosts": Hosts, "client": Client}
    role = roles[sys.argv[1]]()

    def answer(do: str, **values: Any) -> Any:
        return getattr(role, do)(**values)

    serve(answer)
    os._exit(0)


if __name__ == "__main__":
    main()
