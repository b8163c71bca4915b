"""Programs for many chips: where tensors are, what is computed, what is sent.

A program is planned as a whole before it runs (statically scheduled), as by the multi-TSP system's
compiler: every computation has its cycles and every vector its links. Then it runs on simulated
chips with real numbers.

    program = Program(read_routed("dragonfly:8"))
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
from fairway.execution import ExecutionOptions
from fairway.studies.workloads.chip import TICKS_PER_CYCLE, VECTOR_BYTES

__all__ = ["ChipProgram", "ChipRun", "Tensor"]

Array = NDArray[Any]
Function = Callable[..., Array]
CYCLES_MAX = 1 << 44
"""Maximum cycles of one computation: five hours."""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """An array in a chip's memory.

    Attributes:
        chip: the chip that holds it.
        address: in vectors.
        shape: of the array.
        dtype: of its elements.
        made: tasks that write it, if it is not an input.
        added: tasks that accumulate onto it, in any order.
    """

    chip: int
    address: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    made: tuple[int, ...] = ()
    added: tuple[int, ...] = ()

    @property
    def tasks(self) -> tuple[int, ...]:
        """Tasks after which it is complete."""
        return self.made + self.added

    @property
    def nbytes(self) -> int:
        """Size in bytes, without padding of the last vector."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class ChipRun:
    """Result of a program.

    Attributes:
        plan: schedule of the program.
        outcome: statistics: vectors, corrections, incidents.
        memories: contents of all chips' memories at the end.
    """

    plan: _native.Plan
    outcome: dict[str, Any]
    memories: list[bytes]

    def __getitem__(self, tensor: Tensor) -> Array:
        """Returns the value of a tensor at the end."""
        start = tensor.address * VECTOR_BYTES
        count = tensor.nbytes // tensor.dtype.itemsize
        found = np.frombuffer(self.memories[tensor.chip], tensor.dtype, count, start)
        return found.reshape(tensor.shape)

    @property
    def seconds(self) -> float:
        """Simulated duration."""
        return self.plan.end_ticks / TICKS_PER_CYCLE / self.plan.clock_hz


class ChipProgram:
    """Builds a program for the chips of a fabric.

    Args:
        fabric: the network of the chips.
        sums: type in which arriving tensors are accumulated: ``float32``, ``float16`` or ``int32``.
        timing: cycles per second, bytes of a vector in memory and on a link, ns to forward a
            vector, vectors of a memory; by default the paper's.
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
        """Places an input array in a chip's memory."""
        tensor = self._place(chip, array.shape, array.dtype)
        self._inputs.append((tensor, array))
        return tensor

    def empty(self, chip: int, shape: Sequence[int], dtype: Any = np.float32) -> Tensor:
        """Allocates an array of zeros."""
        return self._place(chip, tuple(shape), np.dtype(dtype))

    def send(self, tensor: Tensor, chip: int) -> Tensor:
        """Copies a tensor to another chip's memory."""
        if tensor.chip == chip:
            return tensor
        target = self._place(chip, tensor.shape, tensor.dtype)
        task = self._send(tensor, target, tensor.tasks, sums=False)
        return dataclasses.replace(target, made=(task,))

    def add(self, tensor: Tensor, onto: Tensor) -> Tensor:
        """Accumulates a tensor onto one of another chip as it arrives, vector by vector.

        Both must have one shape and the program's accumulation type. The old value of ``onto`` is
        overwritten; of several accumulations each returns it with all previous ones.

        Raises:
            RouteError: shapes or types differ.
        """
        if tensor.shape != onto.shape or {tensor.dtype, onto.dtype} != {self._sums}:
            raise RouteError(
                f"cannot add {tensor.dtype}{tensor.shape} to {onto.dtype}{onto.shape}; expected "
                f"{self._sums} of one shape"
            )
        task = self._send(tensor, onto, tensor.tasks + onto.made, sums=True)
        return dataclasses.replace(onto, added=(*onto.added, task))

    def add_all(self, tensors: Sequence[Tensor], onto: Tensor) -> Tensor:
        """Accumulates several tensors; the order of arrival does not matter."""
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
    ) -> Tensor:
        """Applies a function to tensors of one chip.

        Args:
            chip: where to compute.
            function: takes arrays and returns one of ``shape`` and ``dtype``.
            inputs: arguments of the function.
            shape: of the result.
            cycles: duration on the chip.
            dtype: of the result.

        Raises:
            RouteError: an input is on another chip, or there are too many cycles.
        """
        for tensor in inputs:
            if tensor.chip != chip:
                raise RouteError(f"chip {chip} cannot compute with what chip {tensor.chip} has")
        if not 0 <= cycles <= CYCLES_MAX:
            raise RouteError(f"a computation of {cycles} cycles; expected at most {CYCLES_MAX}")
        waits = sorted({task for tensor in inputs for task in tensor.tasks})
        number = len(self._tasks)
        self._tasks.append((chip, cycles * TICKS_PER_CYCLE, waits))
        result = dataclasses.replace(
            self._place(chip, tuple(shape), np.dtype(dtype)), made=(number,)
        )
        self._functions[number] = (function, list(inputs), result)
        return result

    def rows(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        """Returns a view of some rows of a tensor; rows must fill whole vectors.

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
        """Schedules the program, and verifies the schedule.

        Raises:
            RouteError: the program cannot be scheduled.
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
    ) -> ChipRun:
        """Plans the program and runs it on simulated chips.

        Args:
            noise: seed, probability that a vector has errors on a link, number of wrong bits.
            threads: number of threads; 0 is one per core.
            progress: called with the fraction that is done.

        Raises:
            RouteError: the program cannot be planned, or a function returns another shape than
                declared; errors of functions propagate.
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
        options = ExecutionOptions(self._call, reads, str(self._sums), noise, threads, progress)
        outcome = plan.simulate([bytes(memory) for memory in memories], options)
        return ChipRun(plan, outcome, outcome.pop("memories"))

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
