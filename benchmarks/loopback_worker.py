"""One rank of one system: worker of ``loopback.py``.

Requests are lines of JSON over a socket, since ranks that ``mpirun`` starts have no standard input;
between requests the process sleeps. It needs numpy and the packages of its system, nothing else.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import json
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import numpy as np

ALL_REDUCE, ALL_TO_ALL = "all-reduce", "all-to-all"
HOST = "127.0.0.1"
PERIOD = 1021
"""Period of the test data in elements: a prime, so that no two blocks are alike."""

TURNS = 3
"""Repetitions of a collective when it is checked."""

Vector = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True)
class Work:
    """A collective of one size, and its memory.

    Attributes:
        given: input of this rank; an all-reduce leaves its result there.
        result: where the result is.
        call: executes it once.
    """

    given: Vector
    result: Vector
    call: Callable[[], object]


class System(Protocol):
    """Executes collectives on one rank."""

    rank: int
    ranks: int

    def listen(self) -> Any:
        """Returns what the peers must know before they join."""

    def join(self, known: list[Any]) -> None:
        """Joins the peers, given what each of them returned from :meth:`listen`."""

    def versions(self) -> dict[str, str]:
        """Returns versions of third-party packages that are measured."""

    def work(self, collective: str, elements: int) -> Work:
        """Prepares a collective of ``elements`` elements per rank."""

    def barrier(self) -> object:
        """Waits until all ranks have arrived."""

    def close(self) -> None:
        """Leaves the group."""


class Fairway:
    """A team with one channel.

    Args:
        rank: rank of this process.
        ranks: number of ranks.
        folder: folder for sockets.
        timeout_s: deadline for a rank that keeps others waiting.
    """

    def __init__(self, rank: int, ranks: int, folder: str, timeout_s: float) -> None:
        self.rank = rank
        self.ranks = ranks
        self._module = importlib.import_module("fairway.communication.team")
        self._steps = importlib.import_module("fairway.communication.steps")
        self._timeout_s = timeout_s
        channel = self._module.Channel(f"unix:{folder}/rank-{rank}")
        self._listener = self._module.Listener(rank, [channel], "loopback")
        self._parts: dict[tuple[str, int], Any] = {}

    def listen(self) -> Any:
        """Returns the addresses of this rank."""
        return self._listener.addresses

    def join(self, known: list[Any]) -> None:
        """Joins the peers."""
        self._team = self._listener.join(known, self._timeout_s)
        self._barrier = self.work(ALL_REDUCE, 1)

    def versions(self) -> dict[str, str]:
        """Returns none: a report states our build itself."""
        return {}

    def work(self, collective: str, elements: int) -> Work:
        """Prepares a collective; caches what is prepared for a size."""
        kind = self._module.Collective
        make = kind.all_reduce if collective == ALL_REDUCE else kind.all_to_all
        asked = make(self.ranks, elements)
        if (collective, elements) not in self._parts:
            self._parts[collective, elements] = self._team.prepare(self._script(asked))
        vector = self._team.vector(asked, np.float32)
        call = functools.partial(self._team.call, self._parts[collective, elements], vector)
        return Work(vector[:elements], vector[slice(*asked.result(self.rank))], call)

    def _script(self, collective: Any) -> Any:
        """Returns the fastest algorithm under the assumed, unmeasured cost of memory."""
        cost = self._steps.memory_cost(self.ranks)
        return self._steps.alone(collective, np.float32, [cost])

    def barrier(self) -> object:
        """Executes an all-reduce of one element."""
        return self._barrier.call()

    def close(self) -> None:
        """Leaves the team."""
        self._team.close()


class Gloo:
    """Gloo, through torch; for its arguments see :class:`Fairway`."""

    def __init__(self, rank: int, ranks: int, timeout_s: float) -> None:
        self.rank = rank
        self.ranks = ranks
        self._torch = importlib.import_module("torch")
        self._torch.set_num_threads(1)
        self._distributed = importlib.import_module("torch.distributed")
        self._timeout = timedelta(seconds=timeout_s)
        self._store: Any = None

    def listen(self) -> Any:
        """Returns the port of the store, which is on the first rank."""
        if self.rank > 0:
            return None
        self._store = self._open(0)
        return self._store.port

    def join(self, known: list[Any]) -> None:
        """Joins the peers through the store."""
        self._distributed.init_process_group(
            "gloo",
            store=self._store or self._open(known[0]),
            rank=self.rank,
            world_size=self.ranks,
            timeout=self._timeout,
        )

    def _open(self, port: int) -> Any:
        first = self.rank == 0
        return self._distributed.TCPStore(
            HOST, port, self.ranks, first, self._timeout, wait_for_workers=False
        )

    def versions(self) -> dict[str, str]:
        """Returns the version of torch, which includes gloo."""
        return {"torch": self._torch.__version__, "numpy": np.__version__}

    def work(self, collective: str, elements: int) -> Work:
        """Prepares a collective."""
        given = np.empty(elements, np.float32)
        sent = self._torch.from_numpy(given)
        if collective == ALL_REDUCE:
            return Work(given, given, lambda: self._distributed.all_reduce(sent))
        result = np.empty(elements, np.float32)
        received = self._torch.from_numpy(result)
        exchange = self._distributed.all_to_all_single
        return Work(given, result, lambda: exchange(received, sent))

    def barrier(self) -> object:
        """Executes torch's barrier."""
        return self._distributed.barrier()

    def close(self) -> None:
        """Leaves the group."""
        self._distributed.destroy_process_group()


class OpenMpi:
    """Open MPI, through mpi4py; ``mpirun`` assigns the rank."""

    def __init__(self) -> None:
        self._binding = importlib.import_module("mpi4py").__version__
        self._mpi = importlib.import_module("mpi4py.MPI")
        self._world = self._mpi.COMM_WORLD
        self.rank = self._world.Get_rank()
        self.ranks = self._world.Get_size()

    def listen(self) -> Any:
        """Returns nothing: ranks know each other."""
        return None

    def join(self, known: list[Any]) -> None:
        """Does nothing: ``mpirun`` has joined the ranks."""

    def versions(self) -> dict[str, str]:
        """Returns versions of the library and its binding."""
        library = self._mpi.Get_library_version().split(",")[0]
        return {"library": library, "mpi4py": self._binding, "numpy": np.__version__}

    def work(self, collective: str, elements: int) -> Work:
        """Prepares a collective."""
        given = np.empty(elements, np.float32)
        world, in_place = self._world, self._mpi.IN_PLACE
        if collective == ALL_REDUCE:
            return Work(given, given, lambda: world.Allreduce(in_place, given))
        result = np.empty(elements, np.float32)
        return Work(given, result, lambda: world.Alltoall(given, result))

    def barrier(self) -> object:
        """Executes MPI's barrier."""
        return self._world.Barrier()

    def close(self) -> None:
        """Finalizes MPI."""
        self._mpi.Finalize()


def period(rank: int, turn: int) -> Vector:
    """Returns a rank's periodic test data: integers, whose sums are exact in any order."""
    return (np.arange(PERIOD) + PERIOD * rank + turn).astype(np.float32)


def repeated(values: Vector, first: int, count: int) -> Vector:
    """Returns ``count`` elements of periodic values, starting at index ``first``."""
    return np.resize(np.roll(values, -(first % PERIOD)), count)


class Runner:
    """Executes requests on a rank."""

    def __init__(self, system: System) -> None:
        self._system = system

    def listen(self) -> Any:
        """Returns what the peers must know."""
        return self._system.listen()

    def join(self, known: list[Any]) -> dict[str, str]:
        """Joins the peers; returns versions of the packages measured."""
        self._system.join(known)
        return self._system.versions()

    def check(self, collective: str, elements: int) -> None:
        """Executes a collective a few times and checks every element of its results.

        The result is copied, and the input overwritten, as soon as a call has returned: peers must
        not read or write there any more.

        Raises:
            ValueError: an element is wrong.
        """
        rank = self._system.rank
        work = self._system.work(collective, elements)
        work.given[:] = repeated(period(rank, 0), 0, elements)
        for turn in range(TURNS):
            following = repeated(period(rank, turn + 1), 0, elements)
            work.call()
            result = work.result.copy()
            work.given[:] = following
            self._compare(collective, result, turn)

    def _compare(self, collective: str, result: Vector, turn: int) -> None:
        rank, ranks = self._system.rank, self._system.ranks
        periods = [period(other, turn) for other in range(ranks)]
        block = len(result) // ranks
        expected = [repeated(one, rank * block, block) for one in periods]
        if collective == ALL_REDUCE:
            expected = [repeated(np.sum(periods, 0), 0, len(result))]
        at = 0
        for part in expected:
            wrong = np.flatnonzero(result[at : at + len(part)] != part)
            if len(wrong):
                first = wrong[0]
                raise ValueError(
                    f"{collective} of {len(result)} elements is wrong on rank {rank}: element "
                    f"{at + first} is {result[at + first]}, expected {part[first]}"
                )
            at += len(part)

    def time(self, collective: str, elements: int, warm: int, count: int) -> float:
        """Executes a collective several times; returns the mean time in seconds.

        Args:
            collective: its name.
            elements: of a rank's vector.
            warm: warm-up repetitions.
            count: timed repetitions.
        """
        work = self._system.work(collective, elements)
        work.given[:] = 0  # so that repeated sums do not grow
        work.result[:] = 0
        for _ in range(warm):
            work.call()
        self._system.barrier()
        call = work.call
        began = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - began) / count

    def close(self) -> None:
        """Leaves the group of the system."""
        self._system.close()


def main() -> None:
    """Serves until the socket is closed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("system", choices=("fairway", "gloo", "openmpi"))
    parser.add_argument("folder", help="of the socket, which is called 'told'")
    parser.add_argument("timeout_s", type=float)
    parser.add_argument("--rank", type=int, default=0, help="if mpirun does not say it")
    parser.add_argument("--ranks", type=int, default=0, help="likewise")
    given = parser.parse_args()
    with socket.socket(socket.AF_UNIX) as told:
        told.connect(f"{given.folder}/told")
        system: System
        if given.system == "fairway":
            system = Fairway(given.rank, given.ranks, given.folder, given.timeout_s)
        elif given.system == "gloo":
            system = Gloo(given.rank, given.ranks, given.timeout_s)
        else:
            system = OpenMpi()
        runner = Runner(system)
        with told.makefile("rw") as lines:
            print(json.dumps({"rank": system.rank, "process": os.getpid()}), file=lines, flush=True)
            for line in lines:
                request = json.loads(line)
                answer = getattr(runner, request.pop("do"))(**request)
                print(json.dumps(answer), file=lines, flush=True)
        runner.close()


if __name__ == "__main__":
    main()
