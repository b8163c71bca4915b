"""A program for many chips: what lies where, what is computed, what is sent.

It is planned as a whole before it runs, as the multi-TSP system's compiler does: every computation
has its cycles and every vector its links. Then it runs on simulated chips with real numbers.

    program = Program(read_fabric("dragonfly:8"))
    here = program.put(0, numpy.ones((4, 80), numpy.float32))
    there = program.send(here, 5)
    double = program.compute(5, lambda x: 2 * x, [there], (4, 80), cycles=100)
    run = program.run()
    run[double]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fairway import _native
from fairway.errors import RouteError
from fairway.workloads.chip import TICKS_PER_CYCLE, VECTOR_BYTES

__all__ = ["Program", "Run", "Tensor"]

Array = NDArray[Any]
Function = Callable[..., Array]
CYCLES_MAX = 1 << 44
"""Most of one computation: five hours."""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Numbers in a chip's memory.

    Attributes:
        chip: whose.
        address: where, in vectors.
        shape: of the array.
        dtype: of its elements.
        made: what puts it there first, if it is not there from the beginning.
        added: what adds to it, in whatever order.
    """

    chip: int
    address: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    made: tuple[int, ...] = ()
    added: tuple[int, ...] = ()

    @property
    def tasks(self) -> tuple[int, ...]:
        """It is there, all of it, when these are done."""
        return self.made + self.added

    @property
    def nbytes(self) -> int:
        """Bytes, without what fills the last vector."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Run:
    """What came of a program.

    Attributes:
        plan: when everything was.
        outcome: what happened: vectors, corrections, incidents.
        memories: of all chips, at the end.
    """

    plan: _native.Plan
    outcome: dict[str, Any]
    memories: list[bytes]

    def __getitem__(self, tensor: Tensor) -> Array:
        """The numbers of a tensor at the end."""
        start = tensor.address * VECTOR_BYTES
        count = tensor.nbytes // tensor.dtype.itemsize
        found = np.frombuffer(self.memories[tensor.chip], tensor.dtype, count, start)
        return found.reshape(tensor.shape)

    @property
    def seconds(self) -> float:
        """How long it took, simulated."""
        return self.plan.end_ticks / TICKS_PER_CYCLE / self.plan.clock_hz


class Program:
    """Builds a program for the chips of a fabric.

    Args:
        fabric: whose.
        sums: as what tensors are added that come together: ``float32``, ``float16`` or ``int32``.
        timing: cycles a second, bytes of a vector and on a link, ns to pass a vector on, vectors of
            a memory; those of the paper without.
    """

    def __init__(
        self,
        fabric: _native.Fabric,
        sums: str = "float32",
        timing: tuple[float, int, int, int, int] | None = None,
    ) -> None:
        self.fabric = fabric
        self._sums = np.dtype(sums)
        self._timing = timing
        self._tasks: list[Any] = []
        self._functions: dict[int, tuple[Function, list[Tensor], Tensor]] = {}
        self._used = [0] * fabric.endpoints
        self._inputs: list[tuple[Tensor, Array]] = []

    def put(self, chip: int, array: Array) -> Tensor:
        """Has an array in a chip's memory from the beginning."""
        tensor = self._place(chip, array.shape, array.dtype)
        self._inputs.append((tensor, array))
        return tensor

    def empty(self, chip: int, shape: Sequence[int], dtype: Any = np.float32) -> Tensor:
        """Room for an array, zeros at first."""
        return self._place(chip, tuple(shape), np.dtype(dtype))

    def send(self, tensor: Tensor, chip: int) -> Tensor:
        """The same in another chip's memory."""
        if tensor.chip == chip:
            return tensor
        target = self._place(chip, tensor.shape, tensor.dtype)
        task = self._send(tensor, target, tensor.tasks, sums=False)
        return dataclasses.replace(target, made=(task,))

    def add(self, tensor: Tensor, onto: Tensor) -> Tensor:
        """Adds a tensor to one of another chip as it comes, vector by vector.

        Both must be of the type that the program adds and of one shape. What ``onto`` was is gone;
        of several that are added to it each returns it with all that were added before.

        Raises:
            RouteError: they are not alike.
        """
        if tensor.shape != onto.shape or {tensor.dtype, onto.dtype} != {self._sums}:
            raise RouteError(
                f"cannot add {tensor.dtype}{tensor.shape} to {onto.dtype}{onto.shape}; expected "
                f"{self._sums} of one shape"
            )
        task = self._send(tensor, onto, tensor.tasks + onto.made, sums=True)
        return dataclasses.replace(onto, added=(*onto.added, task))

    def add_all(self, tensors: Sequence[Tensor], onto: Tensor) -> Tensor:
        """Adds several at once; in which order they come does not matter."""
        for tensor in tensors:
            onto = self.add(tensor, onto)
        return onto

    def compute(
        self,
        chip: int,
        function: Function,
        inputs: Sequence[Tensor],
        shape: Sequence[int],
        cycles: int,
        dtype: Any = np.float32,
        after: Sequence[Tensor] = (),
    ) -> Tensor:
        """What a function makes of tensors of one chip.

        Args:
            chip: where.
            function: takes arrays and returns one of ``shape`` and ``dtype``.
            inputs: what it takes.
            shape: of what it returns.
            cycles: how long the chip takes.
            dtype: of what it returns.
            after: what must be there besides.

        Raises:
            RouteError: an input is another chip's, or it takes hours.
        """
        for tensor in inputs:
            if tensor.chip != chip:
                raise RouteError(f"chip {chip} cannot compute with what chip {tensor.chip} has")
        if not 0 <= cycles <= CYCLES_MAX:
            raise RouteError(f"a computation of {cycles} cycles; expected at most {CYCLES_MAX}")
        waits = sorted({task for tensor in (*inputs, *after) for task in tensor.tasks})
        number = len(self._tasks)
        self._tasks.append((chip, cycles * TICKS_PER_CYCLE, waits))
        result = dataclasses.replace(
            self._place(chip, tuple(shape), np.dtype(dtype)), made=(number,)
        )
        self._functions[number] = (function, list(inputs), result)
        return result

    def rows(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        """Some rows of a tensor, where they are; rows must fill whole vectors.

        Raises:
            RouteError: a row ends inside a vector.
        """
        row = tensor.nbytes // tensor.shape[0]
        if start * row % VECTOR_BYTES or not 0 <= start < stop <= tensor.shape[0]:
            raise RouteError(f"rows {start} to {stop} of {tensor.shape} are no whole vectors")
        return dataclasses.replace(
            tensor,
            address=tensor.address + start * row // VECTOR_BYTES,
            shape=(stop - start, *tensor.shape[1:]),
        )

    def plan(self) -> _native.Plan:
        """When everything will be, verified.

        Raises:
            RouteError: it cannot be.
        """
        try:
            return self.fabric.route(self._tasks, self._timing)
        except ValueError as error:
            raise RouteError(f"cannot plan the program: {error}") from error

    def run(
        self,
        *,
        noise: tuple[int, float, int] | None = None,
        threads: int = 0,
        progress: Callable[[float], object] | None = None,
    ) -> Run:
        """Plans it and runs it on simulated chips.

        Args:
            noise: seed, how probable it is that a vector has errors on a link, in how many bits.
            threads: how many; as many as there are cores with 0.
            progress: is told which part is over.

        Raises:
            RouteError: it cannot be planned, or a function returns something else than it said;
                what functions raise comes through.
        """
        plan = self.plan()
        memories = [bytearray(used * VECTOR_BYTES) for used in self._used]
        for tensor, array in self._inputs:
            start = tensor.address * VECTOR_BYTES
            memories[tensor.chip][start : start + tensor.nbytes] = array.tobytes()
        reads = {
            number: [(tensor.address, tensor.nbytes) for tensor in inputs]
            for number, (_, inputs, _) in self._functions.items()
        }
        outcome = plan.carry_out(
            [bytes(memory) for memory in memories],
            self._call,
            reads,
            str(self._sums),
            noise=noise,
            threads=threads,
            progress=progress,
        )
        return Run(plan, outcome, outcome.pop("memories"))

    def _call(self, task: int, found: list[bytes]) -> list[tuple[int, bytes]]:
        function, inputs, result = self._functions[task]
        arrays = [
            np.frombuffer(data, tensor.dtype).reshape(tensor.shape)
            for data, tensor in zip(found, inputs, strict=True)
        ]
        array = np.ascontiguousarray(function(*arrays), dtype=result.dtype)
        if array.shape != result.shape:
            raise RouteError(f"task {task} made {array.shape}; expected {result.shape}")
        return [(result.address, array.tobytes())]

    def _place(self, chip: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Tensor:
        if not 0 <= chip < self.fabric.endpoints:
            raise RouteError(f"there is no chip {chip}; there are {self.fabric.endpoints}")
        tensor = Tensor(chip, self._used[chip], shape, dtype)
        self._used[chip] += -(-tensor.nbytes // VECTOR_BYTES)
        return tensor

    def _send(self, source: Tensor, target: Tensor, after: Sequence[int], sums: bool) -> int:
        self._tasks.append(
            (
                source.chip,
                target.chip,
                source.nbytes,
                sorted(set(after)),
                source.address,
                target.address,
                sums,
            )
        )
        return len(self._tasks) - 1
