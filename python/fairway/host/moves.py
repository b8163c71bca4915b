"""Makes arrays, and transfers their bytes: from the client, to it, and between hosts."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from fairway import _native
from fairway.host import messages
from fairway.host.backend import Backend
from fairway.host.elements import bytes_of, dtype_of, elements_in, is_string, laid_out, region_of
from fairway.host.lines import Lines
from fairway.host.objects import Called, Deferred, Failed, Lazy, Objects, error_text, resolve
from fairway.host.reporter import Reporter
from fairway.host.trace import Trace

SMALL_READ_BYTES = 4096
"""Smaller reads are answered by the thread that takes commands."""
MESSAGE_TIMEOUT_S = 600.0
"""Timeout of a message in flight; the loss of its sender fails it much earlier."""

LARGE_BYTES = 1 << 20
"""Results assembled from messages use pooled memory from this size on."""
INSIDE = 0
"""Channel number for no particular channel, inside an island."""
STRINGS_BYTES_MAX = 1 << 30
"""Most bytes of an array of strings that a function returns."""
READERS = 64
"""Threads that wait for buffers to be computed and read; started on demand."""

Array = Any


class Places:
    """The shards of one array on this host."""

    __slots__ = ("dtype", "index", "local", "memory", "shapes")

    def __init__(self, spec: messages.HostArray) -> None:
        shards = spec.shards
        self.memory = spec.memory
        self.dtype = dtype_of(spec.dtype)
        self.index = {shard.position: index for index, shard in enumerate(shards)}
        self.local = tuple([shard.device for shard in shards])
        self.shapes = [tuple(shard.shape) for shard in shards]

    @property
    def bytes(self) -> int:
        """Most bytes of all shards here; of strings, what is reasonable."""
        if is_string(self.dtype):
            return STRINGS_BYTES_MAX
        return sum(math.prod(shape) for shape in self.shapes) * self.dtype.itemsize

    def make(self, backend: Backend, parts: list[Any]) -> Array:
        """Returns an array of the elements for each shard."""
        if len(set(self.shapes)) == 1:
            return backend.put(self.dtype, self.shapes[0], self.local, self.memory, parts)
        singles = [
            backend.put(self.dtype, shape, (device,), self.memory, [part])
            for shape, device, part in zip(self.shapes, self.local, parts, strict=True)
        ]
        return self.join(backend, singles)

    def join(self, backend: Backend, singles: list[Array]) -> Array:
        """Returns an array that shares the buffers of single-device arrays."""
        return backend.join(self.dtype, self.shapes[0], self.local, self.memory, singles)


class Mover:
    """Executes commands that make and transfer arrays.

    Args:
        backend: this host's devices.
        objects: its buffers.
        plane: its end of the data plane.
        report: sends reports to the controller.
        trace: records transfers, if set.
    """

    def __init__(
        self,
        backend: Backend,
        objects: Objects,
        plane: _native.DataPlane,
        report: Reporter,
        trace: Trace | None,
    ) -> None:
        self._backend = backend
        self._objects = objects
        self._plane = plane
        self._report = report
        self._trace = trace
        self._threads = ThreadPoolExecutor(READERS, thread_name_prefix="fairway-move")
        self._lines = Lines()
        self._arrivals: threading.Thread | None = None

    # Making arrays

    def put(self, command: messages.Put) -> None:
        """Makes an array of bytes that arrive in the command or as messages."""
        places, shards = Places(command.spec), command.shards
        tags = [shard.data for shard in shards if isinstance(shard.data, int)]
        if not tags:
            self._objects.attempt(command.buffer, lambda: self._put_now(places, shards))
            return
        for tag in tags:
            self._plane.expect(tag, _native.CONTROLLER)
        self._objects.values[command.buffer] = _Incoming(
            self._plane, tags, lambda: self._put_now(places, shards)
        )

    def _put_now(self, places: Places, shards: list[messages.ShardUpload]) -> Array:
        parts: list[Any] = [None] * len(places.local)
        for shard in shards:
            data: Any = shard.data
            if isinstance(data, int):
                data = self._plane.take(data, MESSAGE_TIMEOUT_S)
            elements = elements_in(data, places.dtype, tuple(shard.dims), shard.byte_strides)
            for position in shard.positions:
                parts[places.index[position]] = elements
        return places.make(self._backend, parts)

    def assemble_shards(self, command: messages.AssembleShards) -> None:
        """Makes an array that shares the shards of other arrays."""
        places = Places(command.spec)
        sources = [
            (shard.position, self._objects.get(shard.source), shard.shard)
            for shard in command.shards
        ]

        def make() -> Array:
            parts: list[Any] = [None] * len(places.local)
            for position, source, index in sources:
                parts[places.index[position]] = self._backend.shard(resolve(source), index)
            if len(parts) == 1:
                return parts[0]
            return places.join(self._backend, parts)

        named = list(dict.fromkeys(shard.source for shard in command.shards))
        self._objects.share(command.buffer, named)
        self._objects.derive(command.buffer, named, make)

    def copy(self, command: messages.Copy) -> None:
        """Copies shards to other devices or memories of this host."""
        places = Places(command.spec)
        value = self._objects.get(command.source)
        self._objects.derive(
            command.buffer,
            [command.source],
            lambda: self._backend.copy(resolve(value), places.local, places.memory),
        )

    def bitcast(self, command: messages.Bitcast) -> None:
        """Reinterprets the bytes of each shard."""
        places = Places(command.spec)
        value = self._objects.get(command.source)

        def make() -> Array:
            parts = [
                np.array(self._backend.view(shard))  # a copy, not an alias
                .reshape(-1)
                .view(places.dtype)
                .reshape(shape)
                for shard, shape in zip(
                    self._backend.shards(resolve(value)), places.shapes, strict=True
                )
            ]
            return places.make(self._backend, parts)

        self._objects.derive(command.buffer, [command.source], make)

    # Transfers

    def send(self, command: messages.Send) -> None:
        """Sends pieces of shards to other hosts once they are computed.

        Pieces of one client on one channel are sent in the order of these commands.
        """
        value = self._objects.get(command.source)
        order = 0 if self._trace is None else self._trace.next_order()
        # Inside an island each target has a queue of its own: a slow receiver delays no other.
        by_line: dict[tuple[int, int | None], list[messages.ShardSend]] = {}
        for piece in command.pieces:
            line = (piece.channel, piece.target if piece.channel == INSIDE else None)
            by_line.setdefault(line, []).append(piece)
        for line, plan in by_line.items():
            work = partial(self._send_now, value, plan, order)
            use = self._lines.submit((command.client, *line), work)
            self._objects.note_use(command.source, use)

    def _send_now(self, value: Any, plan: list[messages.ShardSend], order: int) -> None:
        for done, piece in enumerate(plan):
            try:
                shard = self._backend.shard(resolve(value), piece.shard)
                elements = self._backend.view(shard)
                begun = time.monotonic_ns(), order
                part = bytes_of(region_of(elements, piece.region.start, piece.region.size))
                self._plane.send(piece.target, piece.tag, part, piece.channel)
                if self._trace is not None:
                    target, channel = piece.target, piece.channel
                    self._trace.move(begun, target, part.nbytes, "out", channel, piece.tag)
            except Exception as error:
                for unsent in plan[done:]:
                    self.send_failure(unsent.target, unsent.tag, error_text(error))
                return

    def send_failure(self, to: int, tag: int, text: str) -> None:
        """Tells the receiver that a message will not be sent."""
        try:
            self._plane.send_failure(to, tag, text)
        except _native.StatusError:
            return  # the receiver is lost

    def receive(self, command: messages.Receive) -> None:
        """Makes an array of messages from other hosts, and relays some of them."""
        places, shards = Places(command.spec), command.shards
        for hop in command.relays:
            self._plane.relay(hop.tag, hop.source, hop.onward, hop.target, hop.channel)
        tags = []
        for shard in shards:
            for piece in shard.pieces:
                self._plane.expect(piece.tag, piece.source)
                tags.append(piece.tag)
        self._objects.values[command.buffer] = _Incoming(
            self._plane, tags, lambda: self._arrived(places, shards)
        )

    def report_arrival(self, command: messages.ReportArrival) -> None:
        """Reports to the controller when a buffer can be used, or has become an error."""
        value = self._objects.get(command.buffer)
        if isinstance(value, Called):
            value.run.add_done_callback(lambda _: self._report_arrived(command.buffer))
            return
        tags = value.tags if isinstance(value, _Incoming) else []
        if self._arrivals is None:
            name = "fairway-arrivals"
            self._arrivals = threading.Thread(target=self._report_arrivals, name=name, daemon=True)
            self._arrivals.start()
        self._plane.watch(command.buffer, tags)

    def _report_arrived(self, buffer: int) -> None:
        with contextlib.suppress(OSError):  # the controller is gone
            self._report.send(messages.Arrived(buffer))

    def _report_arrivals(self) -> None:
        while arrived := self._plane.arrivals():
            try:
                for number in arrived:
                    self._report.send(messages.Arrived(number))
            except OSError:
                return  # the controller is gone

    def relay(self, command: messages.Relay) -> None:
        """Relays messages that this host does not use itself."""
        for hop in command.relays:
            self._plane.relay(hop.tag, hop.source, hop.onward, hop.target, hop.channel)
            self._plane.discard(hop.tag)

    def _arrived(self, places: Places, shards: list[messages.ReceivedShard]) -> Array:
        parts: list[Any] = [None] * len(places.local)
        left = deque(piece for shard in shards for piece in shard.pieces)
        try:
            for shard in shards:
                shape = places.shapes[places.index[shard.positions[0]]]
                elements = self._put_together(places.dtype, shape, shard.pieces, left)
                for position in shard.positions:
                    parts[places.index[position]] = elements
        except Exception:
            for piece in left:  # these are not taken any more
                self._plane.discard(piece.tag)
            raise
        return places.make(self._backend, parts)

    def _take(self, left: deque[messages.ShardPiece]) -> _native.Payload:
        """Takes the next of the messages that are left, in their order."""
        piece = left.popleft()
        begun = time.monotonic_ns(), 0
        payload = self._plane.take(piece.tag, MESSAGE_TIMEOUT_S)
        if self._trace is not None:
            self._trace.move(begun, piece.source, len(payload), "in", tag=piece.tag)
        return payload

    def _put_together(
        self,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        pieces: list[messages.ShardPiece],
        left: deque[messages.ShardPiece],
    ) -> np.ndarray[Any, Any]:
        rank = len(shape)
        if len(pieces) == 1:
            return elements_in(self._take(left), dtype, shape, None)
        size_bytes = math.prod(shape) * dtype.itemsize
        if size_bytes < LARGE_BYTES:
            whole = np.empty(shape, dtype)
        else:
            whole = elements_in(self._plane.memory(size_bytes), dtype, shape, None)
        for piece in pieces:
            start, size = piece.region.start, piece.region.size
            region_of(whole, start, size)[...] = elements_in(
                self._take(left), dtype, tuple(size[-rank:]), None
            )
        return whole

    def read(self, command: messages.Read) -> None:
        """Answers with the bytes of a shard."""
        value = self._objects.get(command.buffer)
        if not isinstance(value, (Deferred, Failed)):
            try:
                if value.is_ready() and self._backend.size(value) < SMALL_READ_BYTES:
                    self._read_now(command, value)
                    return
            except Exception as error:
                self._report.failed(command.ticket, error_text(error))
                return
        self._objects.use(self._threads, command.buffer, lambda: self._read_now(command, value))

    def _read_now(self, command: messages.Read, value: Any) -> None:
        ticket = command.ticket
        try:
            shard = self._backend.shard(resolve(value), command.shard)
            data = bytes_of(laid_out(self._backend.view(shard), command.byte_strides))
            if data.nbytes < _native.INLINE_BYTES:
                self._report.done(ticket, messages.ShardData(bytes(data)))
            else:
                begun = time.monotonic_ns(), 0
                self._plane.send(_native.CONTROLLER, ticket, data)
                if self._trace is not None:
                    self._trace.move(begun, _native.CONTROLLER, data.nbytes, "out")
                self._report.done(ticket, messages.ShardDataSent())
        except Exception as error:
            self._report.failed(ticket, error_text(error))

    def check_ready(self, command: messages.CheckReady) -> None:
        """Answers once the buffers are computed."""
        ticket, numbers = command.ticket, command.buffers
        values = [self._objects.get(number) for number in numbers]
        simple = [value for value in values if not isinstance(value, (Lazy, Failed))]
        try:
            if len(simple) == len(values) and all(_is_ready(value) for value in values):
                self._ready_now(ticket, values)
                return
        except Exception as error:
            self._report.failed(ticket, error_text(error))
            return
        wait = self._threads.submit(self._ready_now, ticket, values)
        for number in numbers:
            self._objects.note_wait(number, wait)

    def _ready_now(self, ticket: int, values: list[Any]) -> None:
        try:
            for value in values:
                if isinstance(value, Failed):
                    raise value
            for value in values:
                value.block_until_ready()
        except Exception as error:
            self._report.failed(ticket, error_text(error))
        else:
            self._report.done(ticket, messages.Success())


class _Incoming(Lazy):
    """An array made of messages; if it is dropped before it is made, its messages are discarded."""

    __slots__ = ("_plane", "_tags")

    def __init__(
        self, plane: _native.DataPlane, tags: list[int], make: Callable[[], Array]
    ) -> None:
        super().__init__(make)
        self._plane = plane
        self._tags = tags

    @property
    def tags(self) -> list[int]:
        """Tags of its messages."""
        return self._tags

    def __del__(self) -> None:
        if self._make is not None:
            for tag in self._tags:
                self._plane.discard(tag)


def _is_ready(value: Any) -> bool:
    ready: Callable[[], bool] | None = getattr(value, "is_ready", None)
    return ready() if ready is not None else False
