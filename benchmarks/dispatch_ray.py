"""Ray actors that all-reduce a scalar and add one to it: worker of ``dispatch.py``.

Each actor acts as one device. The driver calls every actor for every computation and waits for none
before the last. Values are Ray objects, each fed to the next computation, as in PATHWAYS §5.1; or,
faster, each actor keeps its own value. Values are reduced over Unix sockets, through the first
actor, which is faster than through Ray.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import serve

ONE = np.float32(1)
SCALAR_BYTES = 4


class Member:
    """One of the actors.

    Args:
        rank: its number; the first reduces.
        count: number of actors.
        path: where the first listens.
    """

    def __init__(self, rank: int, count: int, path: str) -> None:
        self._value = np.float32(0)
        self._listener: socket.socket | None = None
        self._up: socket.socket | None = None
        self._down: list[socket.socket] = []
        self._count = count
        self._path = path
        if rank == 0 and count > 1:
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(path)
            self._listener.listen(count)

    def join(self) -> None:
        """Connects to the first actor, which waits until all others have."""
        if self._count == 1:
            return
        if self._listener is not None:
            self._down = [self._listener.accept()[0] for _ in range(self._count - 1)]
        else:
            up = self._up = socket.socket(socket.AF_UNIX)
            up.connect(self._path)

    def reset(self) -> None:
        """Starts again from zero."""
        self._value = np.float32(0)

    def step(self) -> Any:
        """All-reduces the value and adds one."""
        self._value = self._reduce() + ONE
        return self._value

    def step_from(self, value: Any) -> Any:
        """All-reduces a value passed by Ray and adds one."""
        self._value = value
        return self.step()

    def _reduce(self) -> Any:
        if self._up is not None:
            self._up.sendall(self._value.tobytes())
            return np.frombuffer(self._up.recv(SCALAR_BYTES), np.float32)[0]
        total = self._value
        for other in self._down:
            total = total + np.frombuffer(other.recv(SCALAR_BYTES), np.float32)[0]
        for other in self._down:
            other.sendall(total.tobytes())
        return total


class Runner:
    """Runs chains of computations over actors."""

    def __init__(self) -> None:
        self._ray = importlib.import_module("ray")
        self._ray.init(
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            num_cpus=16,
            object_store_memory=100 << 20,
        )
        self._sockets = tempfile.TemporaryDirectory()
        self._groups = itertools.count()

    def gather(self, actors: int) -> str:
        """Starts actors and checks their results; returns Ray's version."""
        remote = self._ray.remote(num_cpus=0)(Member)
        path = str(Path(self._sockets.name) / f"group-{next(self._groups)}")
        self._members = [remote.remote(rank, actors, path) for rank in range(actors)]
        self._ray.get([member.reset.remote() for member in self._members])
        self._ray.get([member.join.remote() for member in self._members])
        first, second = self._chain("kept", 1)[0], self._chain("kept", 1)[0]
        assert (first, second) == (1, actors + 1), f"{first}, then {second}"
        third = self._chain("objects", 2)[0]
        assert third == actors + 1, str(third)
        return str(self._ray.__version__)

    def round(self, values: str, count: int) -> float:
        """Runs a chain, values kept or as objects; returns the seconds until its end."""
        self._ray.get([member.reset.remote() for member in self._members])
        began = time.perf_counter()
        self._chain(values, count)
        return time.perf_counter() - began

    def dismiss(self) -> None:
        """Ends the actors."""
        for member in self._members:
            self._ray.kill(member)
        self._members = []

    def _chain(self, values: str, count: int) -> list[Any]:
        results = [self._ray.put(np.float32(0)) for _ in self._members]
        for _ in range(count):
            if values == "kept":
                results = [member.step.remote() for member in self._members]
            else:
                pairs = zip(self._members, results, strict=True)
                results = [member.step_from.remote(value) for member, value in pairs]
        last: list[Any] = self._ray.get(results)
        return last


def main() -> None:
    """Starts Ray and serves."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    runner = Runner()
    serve(lambda do, **values: getattr(runner, do)(**values))


if __name__ == "__main__":
    main()
