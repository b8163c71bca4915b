"""Python functions of clients on a host: loading and running them, in order where that matters."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from fairway.host import messages
from fairway.host.colocated.line import Setup, ShardHeader
from fairway.host.colocated.process import CallFailedError, FunctionProcess, ProcessEndedError
from fairway.host.elements import bytes_of, elements_in, name_of
from fairway.host.lines import Lines
from fairway.host.local import LocalHost
from fairway.host.moves import Places
from fairway.host.objects import Called, Failed, Objects, error_text, resolve

__all__ = ["ColocatedFunctions"]

WAITING_MAX = 4096
"""Most runs of a client that have not ended."""
LOADED_BYTES_MAX = 1 << 30
"""Most bytes of the functions of a client."""

_STARTS = ThreadPoolExecutor(1, thread_name_prefix="fairway-colocated")
"""Starts processes, which the kernel ends with the thread that started them."""


@dataclasses.dataclass(frozen=True)
class _Function:
    """A function that a client has loaded.

    Attributes:
        client: the client.
        number: its number.
        name: its name.
        program: its pickle.
        setup: what a process of the client must know.
    """

    client: int
    number: int
    name: str
    program: bytes
    setup: Setup


class _Client:
    """The functions of a client, and the process that runs them while there is one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counting = threading.Lock()
        self._has_left = False
        self._process: FunctionProcess | None = None
        self._numbers = itertools.count()
        self._runs: set[int] = set()
        self._freed: collections.deque[tuple[int, int]] = collections.deque()
        self.functions: dict[int, _Function] = {}

    def process(self, function: _Function) -> FunctionProcess:
        """Returns a process that has loaded a function; starts one if there is none.

        Raises:
            CallFailedError: the function cannot be loaded.
            ProcessEndedError: the process has ended meanwhile.
            OSError: none can be started.
        """
        with self._lock:
            if self._has_left:
                raise Failed("CANCELLED: the client has disconnected")
            if self._process is None or self._process.has_ended:
                self._process = _STARTS.submit(FunctionProcess, function.setup).result()
            if function.number not in self._process.loaded:
                self._process.load(function.number, function.program)
            return self._process

    def begin(self) -> int:
        """Notes a run, and returns its number."""
        with self._counting:
            number = next(self._numbers)
            self._runs.add(number)
            return number

    def finish(self, run: int) -> None:
        """Notes the end of a run."""
        with self._counting:
            self._runs.discard(run)
            self._drop_unused()

    def is_full(self) -> bool:
        """Returns whether no more runs are taken."""
        return len(self._runs) >= WAITING_MAX

    def free(self, executable: int) -> None:
        """Forgets a function once all earlier runs have ended: they may use what it refers to."""
        with self._counting:
            del self.functions[executable]
            self._freed.append((next(self._numbers), executable))
            self._drop_unused()

    def _drop_unused(self) -> None:
        oldest = min(self._runs, default=None) if self._freed else None
        while self._freed and (oldest is None or self._freed[0][0] < oldest):
            _, executable = self._freed.popleft()
            if self._process is not None:
                self._process.drop(executable)

    def end(self) -> None:
        """Ends the process for good; what waits for it fails."""
        self._has_left = True
        if (process := self._process) is not None:
            process.kill()


class ColocatedFunctions:
    """Python functions of clients, which run beside this host.

    Args:
        host: this host.
        objects: its buffers.
    """

    def __init__(self, host: LocalHost, objects: Objects) -> None:
        self._host = host
        self._objects = objects
        self._lines = Lines()
        self._clients: dict[int, _Client] = {}
        self._owners: dict[int, int] = {}

    def load(self, command: messages.LoadColocated) -> None:
        """Loads a function, in another thread."""
        setup = Setup(command.devices, command.own, command.user)
        function = _Function(
            command.client, command.executable, command.name, command.program, setup
        )
        client = self._clients.setdefault(command.client, _Client())
        loaded = sum(len(one.program) for one in client.functions.values())
        if loaded + len(function.program) > LOADED_BYTES_MAX:
            message = f"RESOURCE_EXHAUSTED: functions of over {LOADED_BYTES_MAX >> 20} MiB"
            self._host.report.failed(command.ticket, message)
            return
        client.functions[function.number] = function
        self._owners[function.number] = function.client
        self._lines.submit(("load", function.client), lambda: self._load(command.ticket, function))

    def _load(self, ticket: int, function: _Function) -> None:
        try:
            self._clients[function.client].process(function)
            self._host.report.done(ticket, messages.Success())
        except Exception as error:
            self._host.report.failed(ticket, self._text(function, "cannot be loaded", error))

    def run(self, command: messages.RunColocated) -> None:
        """Runs a function, after earlier runs of its stream; its results are still to come."""
        client = self._clients[command.client]
        function = client.functions[command.executable]
        places = [Places(result) for result in command.results]
        inputs = [self._objects.get(number) for number in command.args]
        future: Future[list[Any]] = Future()
        if client.is_full():
            message = f"RESOURCE_EXHAUSTED: over {WAITING_MAX} runs of functions have not ended"
            future.set_exception(Failed(message))
        else:
            run = client.begin()

            def work() -> None:
                try:
                    future.set_result(self._results(client, function, inputs, places))
                except Exception as error:
                    future.set_exception(Failed(self._text(function, "has failed", error)))
                finally:
                    client.finish(run)

            self._lines.submit((command.client, command.stream), work)
        for number in command.args:
            self._objects.note_use(number, future)
        for index, place in enumerate(places):
            if place.local:
                self._objects.values[command.first_result + index] = Called(future, index)
        if command.completion is not None:
            self._objects.values[command.completion] = _Completion(future)

    def _results(
        self, client: _Client, function: _Function, inputs: list[Any], places: list[Places]
    ) -> list[Any]:
        backend = self._host.backend
        arguments: list[list[ShardHeader]] = []
        parts: list[Any] = []
        for value in inputs:
            array = resolve(value)
            arguments.append([])
            for device, shard in zip(backend.places(array), backend.shards(array), strict=True):
                elements = backend.view(shard)
                kind = name_of(elements.dtype)
                arguments[-1].append(ShardHeader(device, kind, list(elements.shape)))
                parts.append(bytes_of(elements))
        size = sum(place.bytes for place in places)
        process = client.process(function)
        headers, data = process.run(function.number, arguments, parts, size)
        left = iter(data)
        made = []
        for place, shards in zip(places, headers, strict=True):
            found = {
                shard.device: elements_in(next(left), place.dtype, tuple(shard.shape), None)
                for shard in shards
            }
            made.append(self._made(place, found))
        return made

    def _made(self, place: Places, found: dict[int, Any]) -> Any:
        """Returns the array of a result.

        Raises:
            Failed: it is sharded otherwise than the function was specialized for.
        """
        if not place.local:
            return None
        parts = [found.get(device) for device in place.local]
        for part, shape in zip(parts, place.shapes, strict=True):
            if part is None or part.shape != shape:
                raise Failed(
                    "INVALID_ARGUMENT: it returned an array that is sharded otherwise than it was "
                    f"specialized for: {'nothing' if part is None else list(part.shape)} on a "
                    f"device that holds {list(shape)}"
                )
        return place.make(self._host.backend, parts)

    def free(self, executable: int) -> None:
        """Forgets a function."""
        owner = self._clients.get(self._owners.pop(executable, -1))
        if owner is not None:
            owner.free(executable)

    def end(self, client: int) -> None:
        """Ends the process of a client that has disconnected."""
        if (ended := self._clients.pop(client, None)) is not None:
            ended.end()

    def _text(self, function: _Function, what: str, error: Exception) -> str:
        name = f"the colocated function {function.name} on host {self._host.number}"
        if isinstance(error, CallFailedError):
            return f"UNKNOWN: {name} {what}: {error}"
        if isinstance(error, ProcessEndedError):
            return (
                f"UNAVAILABLE: {name} {what}: the process of its client's functions has ended"
                f"{error}; the next run starts another one, without what they had stored"
            )
        code, _, message = error_text(error).partition(": ")
        return f"{code}: {name} {what}: {message}"


class _Completion:
    """The end of a run."""

    def __init__(self, run: Future[list[Any]]) -> None:
        self._run = run

    def block_until_ready(self) -> None:
        """Waits until the run has ended; raises its error."""
        self._run.result()
