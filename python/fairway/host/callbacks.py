"""Calls from programs to functions in the client's process (host callbacks).

A program names the client's functions by number; XLA calls a Python function of this host instead,
which sends the operands through the controller and waits for the results.

If a function fails, a program on one device fails with it. One on several would leave the other
devices waiting in a collective, which XLA ends after a while with the whole process. So there the
controller first makes errors of the run's results and of all that derives from them; the program
then goes on with zeros, and no function is called for that run any more.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from fairway import _native
from fairway.host import messages
from fairway.host.elements import dtype_of
from fairway.host.executable import IssuedRun
from fairway.host.objects import CallError, error_text
from fairway.host.programs import ELEMENT_TYPES
from fairway.host.reporter import Reporter
from fairway.host.screening import (
    BUFFER_CALLS,
    functions_of,
    index_of,
    is_client_call,
    target_of,
)
from fairway.plugin import calls

__all__ = ["HostCallbacks", "ProgramCalls"]

FIRST_TAG = 1 << 63
"""Tags from here on are those of calls; the controller's are smaller."""
WAIT_S = 500.0
"""Time within which a function must return in a program over several devices: XLA ends the process
if a device waits for another for 600 s."""
FOREVER_S = 1e8
FAILED_MAX = 1024
"""Runs with failed functions that are remembered, until nothing more of them is on the devices."""
SETTLED_S = 0.2
"""Time within which the end of a run shows, once the next one has begun."""

Spec = tuple[np.dtype[Any], tuple[int, ...]] | None
"""Element type and shape of a result; None for a token."""


@dataclasses.dataclass(frozen=True)
class ClientFunction:
    """A function of the client, as a module calls it.

    Attributes:
        number: the client's number of it.
        results: what it returns.
        is_in_place: it writes its results into arrays that it is given after its operands.
    """

    number: int
    results: tuple[Spec, ...] = ()
    is_in_place: bool = False


def functions_called(module: Any) -> list[ClientFunction]:
    """Returns the functions that a module calls, by their index there."""
    found = [ClientFunction(number) for number in functions_of(module)]

    def visit(operation: Any) -> Any:
        if is_client_call(operation):
            index = index_of(operation)
            assert index is not None, "it was screened"
            results = tuple(_spec(result.type) for result in operation.results)
            is_in_place = target_of(operation) in BUFFER_CALLS
            found[index] = ClientFunction(found[index].number, results, is_in_place)
        return ir.WalkResult.ADVANCE

    if found:
        module.operation.walk(visit)
    return found


def _spec(kind: Any) -> Spec:
    if not isinstance(kind, ir.RankedTensorType):
        return None
    tensor = ir.RankedTensorType(kind)
    return dtype_of(ELEMENT_TYPES[str(tensor.element_type)]), tuple(tensor.shape)


class HostCallbacks:
    """Calls functions of clients.

    Args:
        plane: this host's end of the data plane.
        report: sends reports to the controller.
    """

    def __init__(self, plane: _native.DataPlane, report: Reporter) -> None:
        self._plane = plane
        self._report = report
        self._tags = itertools.count(FIRST_TAG)
        self._failed: collections.deque[int] = collections.deque(maxlen=FAILED_MAX)

    def program(self, module: Any, devices: int) -> ProgramCalls | None:
        """Returns what a program calls; None if it calls nothing."""
        functions = functions_called(module)
        return ProgramCalls(self, functions, devices) if functions else None

    def has_failed(self, run: _Run) -> bool:
        """Returns whether a function has failed in a run, or before in its whole program's run."""
        return run.issued.scope in self._failed

    def call(
        self, client: int, function: ClientFunction, operands: calls.Arrays, wait_s: float
    ) -> list[Any]:
        """Calls a function and waits for its results.

        Raises:
            CallError: it has raised an error, has ended with its process, or returns something
                else than the program expects.
        """
        tag, data = next(self._tags), calls.pack(operands)
        self._plane.expect(tag, _native.CONTROLLER)
        size = sum(size_of(spec) for spec in function.results)
        inline = data if len(data) < _native.INLINE_BYTES else None
        if inline is None:
            self._plane.send(_native.CONTROLLER, tag, data)
        self._report.send(
            messages.ClientCalled(messages.HostCall(client, function.number, tag, size, inline))
        )
        try:
            payload = memoryview(self._plane.take(tag, wait_s))
            results = calls.read_answer(payload)
        except Exception as error:
            raise CallError(error_text(error)) from None
        if isinstance(results, str):
            raise CallError(f"INTERNAL: CpuCallback error calling callback: {results}")
        found = tuple(None if one is None else (one.dtype, one.shape) for one in results)
        if found != function.results:
            raise CallError(
                f"INVALID_ARGUMENT: a host callback has returned {found}; expected "
                f"{function.results}"
            )
        return results

    def lose(self, run: _Run, text: str) -> None:
        """Lets the controller make errors of a run's results; returns when it has."""
        client, first, count, scope = run.issued
        self._failed.append(scope)
        tag = next(self._tags)
        self._plane.expect(tag, _native.CONTROLLER)
        self._report.send(messages.BuffersLost(client, first, count, tag, text))
        self._plane.take(tag, WAIT_S)


def size_of(spec: Spec) -> int:
    """Returns the size of a result in an answer, in bytes."""
    if spec is None:
        return 0
    dtype, shape = spec
    return int(np.prod(shape, dtype=np.int64)) * dtype.itemsize + calls.ALIGNED


class _Run:
    """A run that may call functions.

    Attributes:
        issued: its client and buffers.
        lock: held while its results are made errors.
    """

    __slots__ = ("_output", "_token", "issued", "lock")

    def __init__(self, issued: IssuedRun) -> None:
        self.issued = issued
        self.lock = threading.Lock()
        self._token: Any = None
        self._output: Any = None

    def ends_with(self, token: Any, output: Any) -> None:
        """Notes that the run was enqueued, and ends with a token and an output, if it has any."""
        self._token, self._output = token, output

    def is_over(self) -> bool:
        """Returns whether the run is known to be over; that of a donated output is not."""
        try:
            return self._output is not None and bool(self._output.is_ready())
        except Exception:
            return False

    def wait(self) -> None:
        """Waits until the run is over; one that could not be enqueued is."""
        if self._token is not None:
            with contextlib.suppress(Exception):  # it is raised where the results are used
                self._token.block_until_ready()


class ProgramCalls:
    """The calls of one program.

    Attributes:
        functions: what XLA calls, by index in the module.

    Args:
        callbacks: sends the calls.
        functions: what it calls, by index.
        devices: number of devices of the program, over all its hosts.
    """

    def __init__(
        self,
        callbacks: HostCallbacks,
        functions: Sequence[ClientFunction],
        devices: int,
    ) -> None:
        self._callbacks = callbacks
        self._is_alone = devices == 1
        self._runs: collections.deque[_Run] = collections.deque()
        self._ends: queue.SimpleQueue[_Run | None] | None = None
        self._lock = threading.Lock()
        self.functions = [
            self._in_place(one) if one.is_in_place else self._returning(one) for one in functions
        ]

    @contextlib.contextmanager
    def running(self, issued: IssuedRun) -> Iterator[_Run]:
        """Notes that a run is enqueued, which may call functions from then on."""
        run = _Run(issued)
        with self._lock:
            self._runs.append(run)
        if self._ends is None:
            self._ends = queue.SimpleQueue()
            threading.Thread(target=self._follow, name="fairway-calls", daemon=True).start()
        try:
            yield run
        finally:
            self._ends.put(run)

    def close(self) -> None:
        """Ends with the runs that are enqueued."""
        if self._ends is not None:
            self._ends.put(None)

    def _follow(self) -> None:
        assert self._ends is not None
        while (ended := self._ends.get()) is not None:
            ended.wait()
            with self._lock, contextlib.suppress(ValueError):  # it was seen to be over
                self._runs.remove(ended)

    def _current(self) -> _Run:
        """Returns the run that is on the devices: the oldest that has not ended.

        Runs over several devices are executed one after another.
        """
        with self._lock:
            while len(self._runs) > 1 and self._runs[0].is_over():
                self._runs.popleft()
            return self._runs[0]

    def _settled(self, run: _Run) -> _Run:
        """Returns the run on the devices, once the end of ``run`` would have been seen."""
        deadline = time.monotonic() + SETTLED_S
        while (found := self._current()) is run and time.monotonic() < deadline:
            time.sleep(SETTLED_S / 20)
        return found

    def _returning(self, function: ClientFunction) -> Callable[..., Any]:
        """Returns what XLA calls with operands for results."""
        return lambda *operands: tuple(self._call(function, operands))

    def _in_place(self, function: ClientFunction) -> Callable[..., Any]:
        """Returns what XLA calls with a context, buffers of operands and buffers of results."""

        def call(_context: Any, *buffers: Any) -> tuple[()]:
            arrays = [np.asarray(one) for one in buffers]
            results = self._call(function, arrays)
            for place, result in zip(arrays[len(arrays) - len(results) :], results, strict=True):
                place[...] = result
            return ()

        return call

    def _call(self, function: ClientFunction, operands: calls.Arrays) -> Sequence[Any]:
        """Returns a function's results; zeros once one of this run has failed."""
        run = self._current()
        if self._callbacks.has_failed(run):
            run = self._settled(run)  # zeros are for that run only, not for the next one
            if self._callbacks.has_failed(run):
                return _zeros(function.results)
        wait_s = FOREVER_S if self._is_alone else WAIT_S
        try:
            return self._callbacks.call(run.issued.client, function, operands, wait_s)
        except CallError as error:
            if self._is_alone:
                raise
            self._fail(str(error))
            return _zeros(function.results)

    def _fail(self, text: str) -> None:
        """Makes errors of the results of the run on the devices."""
        run = self._settled(self._current())
        with run.lock:
            if not self._callbacks.has_failed(run):
                self._callbacks.lose(run, text)


def _zeros(specs: Sequence[Spec]) -> tuple[Any, ...]:
    return tuple(None if spec is None else np.zeros(spec[1], spec[0]) for spec in specs)
