"""The executor: carries out the controller's commands in order.

One thread takes the commands. What must wait (for a computation to end, for bytes to arrive, for a
compiler) is finished by other threads; a launch waits for its own inputs only.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import socket
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgpack
import numpy as np

from fairway import _native
from fairway.errors import LaunchOrderError
from fairway.host import programs, wire
from fairway.host.backend import Backend, Executable, collect_garbage, dtype_of
from fairway.host.collectives import Exchange, NotOnlyCollectivesError
from fairway.host.objects import Failed, Lazy, error_text, resolve
from fairway.host.trace import Trace

UNFINISHED_LAUNCHES = 16
"""Launches that devices may have before them. What they have cannot be taken back when its client
dies; and from 33 launches over several devices on, XLA on CPUs deadlocks."""
SMALL_READ_BYTES = 4096
"""Reads below this are answered by the thread that takes commands."""
RECEIVE_BYTES = 1 << 20
MESSAGE_TIMEOUT_S = 600.0
"""How long a message may be under way; the loss of its sender fails it much earlier."""

ANSWERING = {
    "read", "check_ready", "compile", "compile_exchange", "cost_analysis", "program_text"
}  # fmt: skip
"""Commands whose first field names the answer that somebody waits for."""
MAKING = {"put": 1, "gather": 1, "copy": 2, "bitcast": 2, "receive": 1}
"""Commands that make an array, and which field names it."""

Array = Any
Spec = tuple[str, str | None, list[tuple[int, int, list[int]]]]
"""Element type, memory kind, and (position, local device, shard shape) of each shard here."""


class _Places:
    """The shards of one array on this host."""

    __slots__ = ("dtype", "index", "local", "memory", "shapes")

    def __init__(self, spec: Spec) -> None:
        dtype, self.memory, shards = spec
        self.dtype = dtype_of(dtype)
        self.index = {position: index for index, (position, _, _) in enumerate(shards)}
        self.local = tuple(device for _, device, _ in shards)
        self.shapes = [tuple(shape) for _, _, shape in shards]


class Executor:
    """Carries out commands on one host.

    Args:
        backend: this host's devices.
        host: this host's number over all islands.
        plane: this host's end of the data plane.
        connection: connected to the controller; the hello has been sent.
        trace: where runs and transfers are written down, if anywhere.
    """

    def __init__(
        self,
        backend: Backend,
        host: int,
        plane: _native.DataPlane,
        connection: socket.socket,
        trace: Trace | None = None,
    ) -> None:
        self._backend = backend
        self._host = host
        self._trace = trace
        self._plane = plane
        self._connection = connection
        self._report = wire.Reporter(connection)
        self._objects: dict[int, Any] = {}
        self._programs: dict[int, Executable] = {}
        self._uses: dict[int, list[Future[Any]]] = {}
        self._unfinished: collections.deque[Any] = collections.deque()
        self._last_launch = 0
        self._unacknowledged = 0
        self._exchanges: dict[int, Exchange] = {}
        self._exchanger = ThreadPoolExecutor(1, thread_name_prefix="fairway-exchange")
        self._movers = ThreadPoolExecutor(4, thread_name_prefix="fairway-move")
        self._compilers = ThreadPoolExecutor(2, thread_name_prefix="fairway-compile")

    def run(self) -> None:
        """Carries out commands until the controller closes the connection."""
        commands: list[Callable[..., None]] = [getattr(self, f"_{name}") for name in wire.COMMANDS]
        unpacker = msgpack.Unpacker(raw=False, max_buffer_size=0)
        buffer = bytearray(RECEIVE_BYTES)
        view = memoryview(buffer)
        while True:
            received = self._connection.recv_into(buffer)
            if received == 0:
                return
            unpacker.feed(view[:received])
            for command in unpacker:
                try:
                    commands[command[0]](*command[1:])
                except LaunchOrderError:
                    raise
                except Exception as error:  # a command that makes no sense harms itself alone
                    traceback.print_exc()
                    self._excuse(command, error)

    def close(self) -> None:
        """Ends the helping threads."""
        self._exchanger.shutdown(wait=False, cancel_futures=True)
        self._movers.shutdown(wait=False, cancel_futures=True)
        self._compilers.shutdown(wait=False, cancel_futures=True)

    def _excuse(self, command: list[Any], error: Exception) -> None:
        """Whoever waits for a command that failed is told so."""
        name = wire.COMMANDS[command[0]]
        if name in ANSWERING:
            self._report.failed(command[1], error_text(error))
        elif name in MAKING:
            self._objects[command[MAKING[name]]] = Failed(error_text(error))
        elif name == "exchange":
            _, _, _, first, results, *_ = command
            self._poison(list(range(first, first + len(results))), error_text(error))

    # Running programs

    def _launch(
        self,
        sequence: int,
        previous: int,
        acknowledge: int,
        executable: int,
        arguments: list[int],
        first_result: int,
        results: int,
        keep: list[int],
        completion: int,
        client: int,
    ) -> None:
        if previous != self._last_launch or sequence <= previous:
            self._order_broken(sequence, previous)
        self._last_launch = sequence
        self._run(executable, arguments, first_result, results, keep, completion, client)
        self._unacknowledged += 1
        if acknowledge:
            self._report.send(wire.LAUNCHED, self._unacknowledged)
            self._unacknowledged = 0

    def _run(
        self,
        executable: int,
        arguments: list[int],
        first_result: int,
        results: int,
        keep: list[int],
        completion: int,
        client: int,
    ) -> None:
        objects = self._objects
        try:
            program = self._programs[executable]
            inputs = [objects[number] for number in arguments]
            for index, value in enumerate(inputs):
                if isinstance(value, (Lazy, Failed)):
                    inputs[index] = resolve(value)
            if self._uses:
                self._finish_uses(arguments)
            if keep:
                self._copy_kept(inputs, keep)
            outputs = self._hand_over(program, inputs, completion, client)
        except Exception as error:
            failed = Failed(self._launch_error(executable, error))
            for number in range(first_result, first_result + results):
                objects[number] = failed
            if completion:
                objects[completion] = failed
            return
        number = first_result
        for output in outputs:
            objects[number] = output
            number += 1

    def _hand_over(
        self, program: Executable, inputs: list[Array], completion: int, client: int
    ) -> list[Any]:
        """Gives a run to the devices, once they have few others before it."""
        if len(self._unfinished) >= UNFINISHED_LAUNCHES:
            _wait_quietly(self._unfinished.popleft())
        begun = time.monotonic_ns() if self._trace is not None else 0
        raw = program.execute(inputs, with_tokens=True)
        token = raw.consume_token()
        self._unfinished.append(token)
        if completion:
            self._objects[completion] = token
        if self._trace is not None:
            self._trace.run(token, begun, program.local, program.name, client)
        outputs: list[Any] = raw.consume_with_handlers(program.handlers)
        return outputs

    def _launch_error(self, executable: int, error: Exception) -> str:
        if isinstance(error, KeyError):
            return f"NOT_FOUND: this host has no program or buffer {error}"
        program = self._programs.get(executable)
        code, _, message = error_text(error).partition(": ")
        name = program.name if program else f"program {executable}"
        return f"{code}: {name}: {message}" if not isinstance(error, Failed) else error.text

    def _copy_kept(self, inputs: list[Array], keep: list[int]) -> None:
        for index in keep:
            array = inputs[index]
            local = self._local(array)
            inputs[index] = self._backend.copy(array, local, array._sharding.memory_kind)

    def _local(self, array: Array) -> tuple[int, ...]:
        devices = [shard._sharding._device for shard in array._arrays]
        return tuple(self._backend.local_devices.index(device) for device in devices)

    def _finish_uses(self, numbers: list[int]) -> None:
        """Waits until no thread reads these buffers, so that they may be donated."""
        for number in numbers:
            for use in self._uses.pop(number, ()):
                use.result()

    def _order_broken(self, sequence: int, previous: int) -> None:
        message = (
            f"launch {sequence} must follow launch {previous}, but launch "
            f"{self._last_launch} was the last; the hosts of the island have lost their order"
        )
        self._report.send(wire.ORDER_BROKEN, message)
        raise LaunchOrderError(message)

    # Making arrays

    def _put(self, number: int, spec: Spec, shards: list[Any]) -> None:
        places = _Places(spec)
        if all(isinstance(data, bytes) for _, data, _, _ in shards):
            self._attempt(number, lambda: self._put_now(places, shards))
            return
        for _, data, _, _ in shards:
            if isinstance(data, int):
                self._plane.expect(data, _native.CONTROLLER)
        self._objects[number] = Lazy(lambda: self._put_now(places, shards))

    def _put_now(self, places: _Places, shards: list[Any]) -> Array:
        parts: list[Any] = [None] * len(places.local)
        for positions, data, shape, strides in shards:
            if isinstance(data, int):
                data = self._plane.take(data, MESSAGE_TIMEOUT_S)
            elements = _elements(data, places.dtype, tuple(shape), strides)
            for position in positions:
                parts[places.index[position]] = elements
        return self._make(places, parts)

    def _make(self, places: _Places, parts: list[Any]) -> Array:
        if len(set(places.shapes)) == 1:
            return self._backend.put(
                places.dtype, places.shapes[0], places.local, places.memory, parts
            )
        singles = [
            self._backend.put(places.dtype, shape, (device,), places.memory, [part])
            for shape, device, part in zip(places.shapes, places.local, parts, strict=True)
        ]
        return self._join(places, singles)

    def _join(self, places: _Places, singles: list[Array]) -> Array:
        return self._backend.join(
            places.dtype, places.shapes[0], places.local, places.memory, singles
        )

    def _attempt(self, number: int, make: Callable[[], Array]) -> None:
        """Makes an array now; a failure becomes the buffer's state."""
        try:
            self._objects[number] = make()
        except Exception as error:
            self._objects[number] = Failed(error_text(error))

    def _derive(self, number: int, sources: list[Any], make: Callable[[], Array]) -> None:
        """Makes an array of others, at once unless one of them is still to come."""
        if any(isinstance(source, Lazy) for source in sources):
            self._objects[number] = Lazy(make)
        else:
            self._attempt(number, make)

    def _gather(self, number: int, spec: Spec, shards: list[tuple[int, int, int]]) -> None:
        places = _Places(spec)
        sources = [(position, self._get(source), index) for position, source, index in shards]

        def make() -> Array:
            parts: list[Any] = [None] * len(places.local)
            for position, source, index in sources:
                parts[places.index[position]] = self._backend.shard(resolve(source), index)
            if len(parts) == 1:
                return parts[0]
            return self._join(places, parts)

        self._derive(number, [source for _, source, _ in sources], make)

    def _copy(self, source: int, number: int, spec: Spec) -> None:
        places = _Places(spec)
        value = self._get(source)
        self._derive(
            number,
            [value],
            lambda: self._backend.copy(resolve(value), places.local, places.memory),
        )

    def _bitcast(self, source: int, number: int, spec: Spec) -> None:
        places = _Places(spec)
        value = self._get(source)

        def make() -> Array:
            parts = [
                np.ascontiguousarray(self._backend.view(shard))
                .reshape(-1)
                .view(places.dtype)
                .reshape(shape)
                for shard, shape in zip(resolve(value)._arrays, places.shapes, strict=True)
            ]
            return self._make(places, parts)

        self._derive(number, [value], make)

    def _poison(self, numbers: list[int], error: str) -> None:
        for number in numbers:
            self._objects[number] = Failed(error)

    # Moving bytes

    def _get(self, number: int) -> Any:
        try:
            return self._objects[number]
        except KeyError:
            return Failed(f"NOT_FOUND: this host has no buffer {number}")

    def _use(self, number: int, work: Callable[[], None]) -> None:
        """Lets another thread read a buffer; it is not donated or deleted before that ends."""
        future = self._movers.submit(work)
        self._uses[number] = [
            *(use for use in self._uses.get(number, ()) if not use.done()),
            future,
        ]
        if len(self._uses) > 256:
            self._uses = {
                key: left
                for key, uses in self._uses.items()
                if (left := [use for use in uses if not use.done()])
            }

    def _send(self, source: int, pieces: list[Any]) -> None:
        value = self._get(source)
        self._use(source, lambda: self._send_now(value, pieces))

    def _send_now(self, value: Any, plan: list[Any]) -> None:
        for done, (index, start, size, tag, to) in enumerate(plan):
            try:
                shard = self._backend.shard(resolve(value), index)
                elements = self._backend.view(shard)
                begun = time.monotonic_ns()
                part = _bytes(_part(elements, start, size))
                self._plane.send(to, tag, part)
                if self._trace is not None:
                    self._trace.move(begun, to, part.nbytes, "out")
            except Exception as error:
                for _, _, _, unsent, target in plan[done:]:
                    self._send_failure(target, unsent, error_text(error))
                return

    def _send_failure(self, to: int, tag: int, text: str) -> None:
        try:
            self._plane.send_failure(to, tag, text)
        except _native.StatusError:
            return  # the receiver is gone; there is nobody to tell

    def _receive(self, number: int, spec: Spec, shards: list[Any], relays: list[Any]) -> None:
        places = _Places(spec)
        for tag, onward, to in relays:
            self._plane.relay(tag, onward, to)
        tags = []
        for _, pieces in shards:
            for tag, sender, _, _ in pieces:
                self._plane.expect(tag, sender)
                tags.append(tag)
        self._objects[number] = _Incoming(self._plane, tags, lambda: self._arrived(places, shards))

    def _arrived(self, places: _Places, shards: list[Any]) -> Array:
        parts: list[Any] = [None] * len(places.local)
        for positions, pieces in shards:
            shape = places.shapes[places.index[positions[0]]]
            elements = self._put_together(places.dtype, shape, pieces)
            for position in positions:
                parts[places.index[position]] = elements
        return self._make(places, parts)

    def _put_together(
        self, dtype: np.dtype[Any], shape: tuple[int, ...], pieces: list[Any]
    ) -> np.ndarray[Any, Any]:
        rank = len(shape)
        if len(pieces) == 1:
            return _elements(self._plane.take(pieces[0][0], MESSAGE_TIMEOUT_S), dtype, shape, None)
        whole = np.empty(shape, dtype)
        for tag, _, start, size in pieces:
            payload = self._plane.take(tag, MESSAGE_TIMEOUT_S)
            _part(whole, start, size)[...] = _elements(payload, dtype, tuple(size[-rank:]), None)
        return whole

    def _read(self, ticket: int, number: int, index: int, strides: list[int] | None) -> None:
        value = self._get(number)
        if not isinstance(value, (Lazy, Failed)):
            try:
                if value.is_ready() and self._backend.size(value) < SMALL_READ_BYTES:
                    self._read_now(ticket, value, index, strides)
                    return
            except Exception as error:
                self._report.failed(ticket, error_text(error))
                return
        self._use(number, lambda: self._read_now(ticket, value, index, strides))

    def _read_now(self, ticket: int, value: Any, index: int, strides: list[int] | None) -> None:
        try:
            shard = self._backend.shard(resolve(value), index)
            data = _bytes(_laid_out(self._backend.view(shard), strides))
            if data.nbytes < _native.INLINE_BYTES:
                self._report.done(ticket, wire.DATA, bytes(data))
            else:
                begun = time.monotonic_ns()
                self._plane.send(_native.CONTROLLER, ticket, data)
                if self._trace is not None:
                    self._trace.move(begun, _native.CONTROLLER, data.nbytes, "out")
                self._report.send(wire.DATA_SENT, ticket)
        except Exception as error:
            self._report.failed(ticket, error_text(error))

    def _check_ready(self, ticket: int, numbers: list[int]) -> None:
        values = [self._get(number) for number in numbers]
        simple = [value for value in values if not isinstance(value, (Lazy, Failed))]
        try:
            if len(simple) == len(values) and all(_is_ready(value) for value in values):
                self._ready_now(ticket, values)
                return
        except Exception as error:
            self._report.failed(ticket, error_text(error))
            return
        self._movers.submit(self._ready_now, ticket, values)

    def _ready_now(self, ticket: int, values: list[Any]) -> None:
        try:
            arrays = [resolve(value) for value in values]
            for array in arrays:
                array.block_until_ready()
        except Exception as error:
            self._report.failed(ticket, error_text(error))
        else:
            self._report.done(ticket)

    # Forgetting

    def _delete(self, numbers: list[int]) -> None:
        if self._uses:
            self._finish_uses(numbers)
        for number in numbers:
            value = self._objects.get(number)
            if isinstance(value, Lazy):
                self._objects[number] = Failed("INVALID_ARGUMENT: the array has been deleted")
            elif value is not None and not isinstance(value, Failed):
                value.delete()
        collect_garbage()

    def _free(self, numbers: list[int]) -> None:
        pop = self._objects.pop
        for number in numbers:
            pop(number, None)
        if self._uses:
            for number in numbers:
                self._uses.pop(number, None)
        collect_garbage()

    # Programs

    def _compile(
        self,
        ticket: int,
        executable: int,
        program: bytes,
        options: bytes,
        devices: list[int],
        grid: tuple[int, int],
        role: tuple[bool, list[Any]],
    ) -> None:
        job = (ticket, executable, program, options, devices, grid, role)
        if not role[0]:
            self._plane.expect(role[1][1], role[1][0])
        self._compilers.submit(self._compile_now, *job)

    def _compile_now(
        self,
        ticket: int,
        executable: int,
        program: bytes,
        options: bytes,
        devices: list[int],
        grid: tuple[int, int],
        role: tuple[bool, list[Any]],
    ) -> None:
        leads, others = role
        try:
            module = self._backend.parse(program)
            programs.check(module)
            if leads:
                loaded = self._compile_first(program, options, devices, grid, others)
            else:
                loaded = self._load_shared(program, options, devices, grid, others[1])
            signature = programs.Signature(module)
            wrapped, report = programs.describe(self._backend, loaded, signature, len(devices))
            self._programs[executable] = wrapped
            self._report.done(ticket, wire.COMPILED, *report)
        except Exception as error:
            self._report.failed(ticket, error_text(error))

    def _compile_first(
        self, program: bytes, options: bytes, devices: list[int], grid: Any, followers: list[Any]
    ) -> Any:
        try:
            loaded = self._backend.compile(program, options, devices, grid)
            serialized = loaded.serialize() if followers else b""
        except Exception as error:
            for host, tag in followers:
                self._send_failure(host, tag, error_text(error))
            raise
        for host, tag in followers:
            self._plane.send(host, tag, serialized)
        return loaded

    def _load_shared(
        self, program: bytes, options: bytes, devices: list[int], grid: Any, tag: int
    ) -> Any:
        serialized = bytes(self._plane.take(tag, MESSAGE_TIMEOUT_S))
        try:
            return self._backend.deserialize(serialized, options, devices, grid)
        except Exception:  # another kind of processor: what it compiled is of no use here
            return self._backend.compile(program, options, devices, grid)

    def _free_executable(self, executable: int) -> None:
        self._programs.pop(executable, None)
        self._exchanges.pop(executable, None)

    def _cost_analysis(self, ticket: int, executable: int) -> None:
        program = self._programs.get(executable)

        def costs() -> list[tuple[str, float]]:
            found = _loaded(program).cost_analysis()
            return [(str(name), float(value)) for name, value in found.items()]

        self._compilers.submit(self._tell, ticket, wire.COSTS, costs)

    def _program_text(self, ticket: int, executable: int) -> None:
        program = self._programs.get(executable)

        def text() -> str:
            return str(_loaded(program).get_hlo_text())

        self._compilers.submit(self._tell, ticket, wire.TEXT, text)

    def _tell(self, ticket: int, kind: int, find: Callable[[], Any]) -> None:
        try:
            self._report.done(ticket, kind, find())
        except Exception as error:
            self._report.failed(ticket, error_text(error))

    # Programs over several islands

    def _compile_exchange(
        self, ticket: int, executable: int, program: bytes, owners: list[int]
    ) -> None:
        self._compilers.submit(self._compile_exchange_now, ticket, executable, program, owners)

    def _compile_exchange_now(
        self, ticket: int, executable: int, program: bytes, owners: list[int]
    ) -> None:
        try:
            module = self._backend.parse(program)
            exchange = Exchange(module, owners, self._host)
            self._exchanges[executable] = exchange
            memory = self._backend.memory_kinds()[0]
            signature = programs.Signature(module)
            report = programs.describe_exchange(signature, exchange, memory)
            self._report.done(ticket, wire.COMPILED, *report)
        except NotOnlyCollectivesError as error:
            self._report.failed(ticket, f"INVALID_ARGUMENT: {error}")
        except Exception as error:
            self._report.failed(ticket, error_text(error))

    def _exchange(
        self,
        executable: int,
        arguments: list[int],
        first_result: int,
        results: list[Spec],
        first_tag: int,
        client: int,
    ) -> None:
        """Runs beside the launches; exchanges run one after another, in one order on all hosts."""
        values = [self._get(number) for number in arguments]
        exchange = self._exchanges[executable]
        run = self._exchanger.submit(self._exchange_now, exchange, values, first_tag)
        for number in arguments:
            self._uses.setdefault(number, []).append(run)
        for index, spec in enumerate(results):
            self._objects[first_result + index] = Lazy(
                functools.partial(self._exchanged, run, index, _Places(spec))
            )

    def _exchange_now(self, exchange: Exchange, values: list[Any], first_tag: int) -> Any:
        try:
            local = exchange.local
            arguments = [
                {
                    position: self._backend.view(self._backend.shard(resolve(value), index))
                    for index, position in enumerate(local)
                }
                for value in values
            ]
            return exchange.run(self._plane, arguments, first_tag, MESSAGE_TIMEOUT_S)
        except Exception as error:
            failed = Failed(error_text(error))
            with contextlib.suppress(_native.StatusError):
                exchange.abandon(self._plane, first_tag, failed.text)
            return failed

    def _exchanged(self, run: Future[Any], index: int, places: _Places) -> Array:
        outcome = run.result()
        if isinstance(outcome, Failed):
            raise outcome
        return self._make(places, [outcome[index][position] for position in places.index])

    # Other hosts

    def _peers(self, peers: list[tuple[int, str]]) -> None:
        for host, address in peers:
            self._plane.add_peer(host, address)



class _Incoming(Lazy):
    """An array made of messages; if nobody wants it any more, nor are its messages."""

    __slots__ = ("_plane", "_tags")

    def __init__(
        self, plane: _native.DataPlane, tags: list[int], make: Callable[[], Array]
    ) -> None:
        super().__init__(make)
        self._plane = plane
        self._tags = tags

    def __del__(self) -> None:
        if self._make is not None:
            for tag in self._tags:
                self._plane.discard(tag)


def _part(
    elements: np.ndarray[Any, Any], start: list[int], size: list[int]
) -> np.ndarray[Any, Any]:
    """A view of a region, whose last axes are those of ``elements``."""
    rank = elements.ndim
    if rank == 0:
        return elements
    region = zip(start[-rank:], size[-rank:], strict=True)
    return elements[tuple(slice(low, low + extent) for low, extent in region)]


def _elements(
    data: Any, dtype: np.dtype[Any], shape: tuple[int, ...], strides: list[int] | None
) -> np.ndarray[Any, Any]:
    """The elements that lie in ``data``, without a copy."""
    if strides is None:
        if 0 in shape or (dtype == np.bool_ and len(data) == 0):
            return np.zeros(shape, dtype)
        return np.frombuffer(data, dtype).reshape(shape)
    if 0 in shape:
        return np.zeros(shape, dtype)
    return np.ascontiguousarray(np.ndarray(shape, dtype, data, strides=strides)).reshape(shape)


def _bytes(elements: np.ndarray[Any, Any]) -> memoryview:
    """The bytes of elements, row-major."""
    contiguous = np.ascontiguousarray(elements).reshape(-1)
    return contiguous.view(np.uint8).data


def _laid_out(elements: np.ndarray[Any, Any], strides: list[int] | None) -> np.ndarray[Any, Any]:
    """The smallest memory region that holds ``elements`` with these strides."""
    if strides is None or elements.size == 0 or elements.ndim == 0:
        return elements
    order = sorted(range(elements.ndim), key=lambda axis: -strides[axis])
    packed = np.ascontiguousarray(elements.transpose(order))
    expected = [strides[axis] for axis in order]
    if all(
        extent == 1 or stride == wanted
        for extent, stride, wanted in zip(packed.shape, packed.strides, expected, strict=True)
    ):
        return packed
    reach = sum(
        (extent - 1) * stride for extent, stride in zip(elements.shape, strides, strict=True)
    )
    region = np.zeros(reach + elements.itemsize, np.uint8)
    np.ndarray(elements.shape, elements.dtype, region, strides=strides)[...] = elements
    return region


def _loaded(program: Executable | None) -> Any:
    """What jaxlib knows of a program."""
    if program is None:
        raise Failed("UNIMPLEMENTED: a program over several islands is not compiled by XLA")
    return program.loaded


def _is_ready(value: Any) -> bool:
    ready: Callable[[], bool] | None = getattr(value, "is_ready", None)
    return ready() if ready is not None else False


def _wait_quietly(token: Any) -> None:
    """Waits for the end of a run; its error shows where its results are used."""
    try:
        token.block_until_ready()
    except Exception:
        return


def serve(
    backend: Backend,
    host: int,
    plane: _native.DataPlane,
    connection: socket.socket,
    hello: list[Any],
    trace: Trace | None,
) -> None:
    """Says hello and serves until the controller is gone; then ends the process."""
    wire.Reporter(connection).send(*hello)
    executor = Executor(backend, host, plane, connection, trace)
    try:
        executor.run()
    except (ConnectionError, LaunchOrderError):
        pass
    finally:
        if trace is not None:
            trace.close()
        plane.close()
        # Threads may be inside XLA, waiting for a peer that is gone; there is nothing to save.
        os._exit(0)


__all__ = ["Executor", "serve"]
