"""The processes of ``controller.py``: the server, hosts that compute nothing, and a client.

Each is started as ``controller_worker.py ROLE`` and serves requests by :func:`common.serve`.
"""

from __future__ import annotations

import os
import resource
import selectors
import socket
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgpack
from common import serve

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

        islands: list[tuple[int, int, list[float]]] = [(hosts, 1, [])]
        self._server = _native.Server(
            islands,
            "127.0.0.1:0",
            [],
            Path(directory),
            TOKEN,
            3600.0,
            False,
            256,
            False,
            False,
            False,
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
        self._pack = msgpack.Packer(use_bin_type=True).pack

    def start(self, hosts: int, directory: str) -> None:
        """Connects them to the controller."""
        for host in range(hosts):
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(str(Path(directory) / "control.sock"))
            about = ("none", "none", "none", "none", ["device"], 1, 0)
            self._send(connection, 0, TOKEN, host, os.getpid(), "unix:/nowhere", [], *about)
            unpacker = msgpack.Unpacker(raw=False, max_buffer_size=0)
            state = {"unpacker": unpacker, "unasked": 0}
            self._selector.register(connection, selectors.EVENT_READ, state)
        threading.Thread(target=self._follow, daemon=True).start()

    def run_time(self, launch_ns: int) -> None:
        """Sets the launch time that hosts claim, which determines the frequency of reports."""
        self._busy_ns = launch_ns

    def counts(self) -> dict[str, int]:
        """Returns the number of commands received and reports sent so far."""
        return {"launch": self.launches, "free": self.frees, "report": self.reports}

    def _follow(self) -> None:
        buffer = bytearray(1 << 20)
        view = memoryview(buffer)
        while True:
            for key, _ in self._selector.select():
                received = key.fileobj.recv_into(buffer)  # type: ignore[union-attr]
                if received == 0:
                    self._selector.unregister(key.fileobj)
                    continue
                key.data["unpacker"].feed(view[:received])
                self._take(key.fileobj, key.data)

    def _take(self, connection: Any, state: dict[str, Any]) -> None:
        for command in state["unpacker"]:
            kind = command[0]
            if kind == 0:
                self.launches += 1
                state["unasked"] += 1
                if command[3]:
                    self._send(connection, 1, self._busy_ns * state["unasked"])
                    self.reports += 1
                    state["unasked"] = 0
            elif kind == 10:
                self.frees += 1
            elif kind == 12:
                self._send(connection, 2, command[1], (2, *_compiled()))
            elif kind == 8:
                self._send(connection, 2, command[1], (0,))
            else:
                self.others += 1

    def _send(self, connection: Any, *report: Any) -> None:
        packed = self._pack(report)
        connection.sendall(struct.pack("<I", len(packed)) + packed)


def _compiled() -> tuple[Any, ...]:
    """Returns a host's description of a program from one replicated scalar to another."""
    cut = (None, b"")
    result: tuple[Any, ...] = ("float32", [], cut, "device")
    return ("step", None, [cut], [[]], [result], [[]], [], 1, None, 0, [], None)


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
