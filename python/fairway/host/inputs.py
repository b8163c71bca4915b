"""Inputs: batches that a function of the user's makes here, ahead of the launches that take them.

A program that is nothing but a call of ``fairway_input`` gives the next batch of an input. XLA gets
it with zeros in place of the call, for what the compiler says of its results. The function runs on
a thread of its own, which puts each part on its device and tells the controller; a launch that
takes a batch comes when all hosts of the island have made it.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
from jaxlib.mlir import ir

from fairway.host.backend import Backend, Executable, dtype_of
from fairway.host.objects import Failed
from fairway.host.programs import Partition, RefusedError, shard_shape
from fairway.host.wire import Reporter
from fairway.shards import TARGET, Description, Shard

__all__ = ["Feed", "Inputs", "find"]

Array = Any
ANY = "*"
"""Allows every module."""
SWITCH_INTERVAL_S = 1e-4
"""How long a function in plain Python may keep the interpreter from the thread that takes commands.

With Python's 5 ms, a tiny computation of another client takes 24 ms beside such a function, with
this 1.8 ms (1.1 ms without any; two shared cores).
"""
TRACEBACK_CHARACTERS = 4000
"""The end of a traceback that a client is told."""


# Reading programs


def find(module: Any) -> Description | None:
    """The input whose next batch a program gives; the call becomes zeros.

    Raises:
        RefusedError: the program does more than that, or the call makes no sense.
    """
    calls: list[Any] = []

    def visit(operation: Any) -> Any:
        if operation.name == "stablehlo.custom_call":
            name = ir.StringAttr(operation.attributes["call_target_name"]).value
            calls.extend([operation] if name == TARGET else [])
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    if not calls:
        return None
    call, *more = calls
    block = call.operation.block
    *_, last = block.operations
    alone = len(list(block.operations)) == 2 and list(last.operands) == list(call.results)
    if more or not alone or len(call.operands):
        raise RefusedError(
            "UNIMPLEMENTED: the next batch of an input is asked for inside a jitted function; "
            "call the input outside of it and hand it the batch"
        )
    try:
        given = ir.DictAttr(call.attributes["mhlo.backend_config"])
        description = Description.read(ir.StringAttr(given["description"]).value)
    except (KeyError, ValueError) as error:
        raise RefusedError(f"INVALID_ARGUMENT: {TARGET} is called otherwise: {error}") from error
    _replace_by_zeros(module, call)
    return description


def _replace_by_zeros(module: Any, call: Any) -> None:
    with module.context, ir.Location.unknown(), ir.InsertionPoint(call):
        for result in call.results:
            result.replace_all_uses_with(_zeros(ir.RankedTensorType(result.type)))
        call.operation.erase()


def _zeros(kind: Any) -> Any:
    element = kind.element_type
    if isinstance(element, ir.ComplexType):  # of which Python's bindings know no constants
        part = _zeros(ir.RankedTensorType.get(kind.shape, ir.ComplexType(element).element_type))
        return ir.Operation.create("stablehlo.complex", [kind], [part, part]).results[0]
    zero = "false" if str(element) == "i1" else 0 if isinstance(element, ir.IntegerType) else "0.0"
    value = {"value": ir.Attribute.parse(f"dense<{zero}> : {kind}")}
    return ir.Operation.create("stablehlo.constant", [kind], attributes=value).results[0]


# What a host makes of a batch


@dataclasses.dataclass(frozen=True)
class Part:
    """What this host makes of one leaf.

    Attributes:
        path: of the leaf.
        dtype: its element type.
        extent: of the whole leaf along its first axis; 1 if it has none.
        box: the part.
        regions: of each device's shard, within the part.
        shard: shape of each.
        memory: memory kind of the result.
    """

    path: str
    dtype: np.dtype[Any]
    extent: int
    box: tuple[slice, ...]
    regions: list[tuple[slice, ...]]
    shard: tuple[int, ...]
    memory: str | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the part."""
        return tuple(axis.stop - axis.start for axis in self.box)

    @property
    def count(self) -> int:
        """How many such parts there are along the first axis."""
        return self.extent // max(self.shape[0], 1) if self.shape else 1


def part_of(
    path: str,
    output: tuple[str, tuple[int, ...], tuple[Partition, bytes], str | None],
    positions: Sequence[int],
) -> Part:
    """What a host makes of a leaf: the smallest part in one piece that holds its devices' shards.

    Along the first axis it is made as long as needed to be one of several equal parts.

    Args:
        path: of the leaf.
        output: element type, shape, partition and memory kind of the result.
        positions: of the host's devices in the sharding.
    """
    dtype, shape, (cut, _), memory = output
    shard = shard_shape(shape, cut)
    counts, tile_of = cut if cut is not None else ([1] * len(shape), [0] * (max(positions) + 1))
    tiles = [np.unravel_index(tile_of[position], counts) if shape else () for position in positions]
    starts = [[int(i) * size for i, size in zip(tile, shard, strict=True)] for tile in tiles]
    lows = [min(axis) for axis in zip(*starts, strict=True)]
    highs = [max(axis) + size for axis, size in zip(zip(*starts, strict=True), shard, strict=True)]
    if shape and shape[0]:
        lows[0], highs[0] = _aligned(lows[0], highs[0], shape[0])
    box = tuple(slice(low, high) for low, high in zip(lows, highs, strict=True))
    regions = [
        tuple(
            slice(at - low, at - low + size)
            for at, low, size in zip(start, lows, shard, strict=True)
        )
        for start in starts
    ]
    return Part(path, dtype_of(dtype), shape[0] if shape else 1, box, regions, shard, memory)


def _aligned(low: int, high: int, extent: int) -> tuple[int, int]:
    """The smallest of several equal parts of ``extent`` that holds ``low`` to ``high``."""
    for size in range(high - low, extent):
        if extent % size == 0 and low // size == (high - 1) // size:
            return low // size * size, low // size * size + size
    return 0, extent


def shard_of(parts: Sequence[Part]) -> Shard:
    """What a function is told to make."""
    most = max(parts, key=lambda part: part.count)
    rows = most.box[0] if most.box else slice(0, 1)
    index = rows.start // max(rows.stop - rows.start, 1)
    return Shard(index, most.count, rows, {part.path: part.box for part in parts})


# Making batches


class Source:
    """An input on this host.

    Args:
        backend: this host's devices.
        host: this host's number over all islands.
        report: tells the controller of each batch.
        description: of the input.
        function: makes an iterator.
        parts: what this host makes of each leaf.
        local: the local devices that its shards go to.
    """

    def __init__(
        self,
        backend: Backend,
        host: int,
        report: Reporter,
        description: Description,
        function: Callable[..., Any],
        parts: list[Part],
        local: tuple[int, ...],
    ) -> None:
        self.description = description
        self.parts = parts
        self.local = local
        self.programs = 0
        """Programs that take its batches."""
        self._backend = backend
        self._host = host
        self._report = report
        self._function = function
        self._changed = threading.Condition()
        self._made: collections.deque[list[Array]] = collections.deque()
        self._room = description.prefetch
        self._taken = 0
        self._count = 0
        self._end: tuple[int, str] | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begins to make batches, once the controller knows of the input."""
        with self._changed:
            if self._thread is None:
                sys.setswitchinterval(SWITCH_INTERVAL_S)
                name = f"fairway-input {self.description.function}"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()

    def hold(self, batches: int) -> None:
        """Makes at least so many batches ahead, for somebody takes them all at once."""
        with self._changed:
            self._room = max(self._room, batches)
            self._changed.notify_all()

    def take(self) -> list[Array]:
        """The next batch: this host's array of each leaf.

        Raises:
            Failed: there is none, here or on another host.
        """
        with self._changed:
            number = self._taken
            self._taken += 1
            self._changed.wait_for(lambda: self._made or self._has_ended(number))
            if self._has_ended(number):
                assert self._end is not None
                raise Failed(self._end[1])
            batch = self._made.popleft()
            self._changed.notify_all()
            return batch

    def end(self, batches: int, error: str) -> None:
        """Gives ``error`` for every batch after the first ``batches``, and makes no more."""
        with self._changed:
            if self._end is None or batches < self._end[0]:
                self._end = batches, error
            while self._made and self._taken + len(self._made) > batches:
                self._made.pop()
            self._changed.notify_all()

    def _has_ended(self, number: int) -> bool:
        return self._end is not None and number >= self._end[0]

    def _run(self) -> None:
        """Makes batches until the function has no more, or nobody wants more."""
        try:
            self._make_all()
            end = f"OUT_OF_RANGE: {self._name} has ended after {self._count} batches"
        except _UnwantedError:
            return
        except Failed as failed:
            end = failed.text
        except BaseException as error:  # whoever waits must hear of it, whatever it is
            told = "".join(traceback.format_exception(error))[-TRACEBACK_CHARACTERS:]
            end = f"UNKNOWN: {self._name} raised {type(error).__name__}: {error}\n{told}"
        self.end(self._count, end)
        self._report.batch(self.description.number, end)

    def _make_all(self) -> None:
        self._wait_for_room()
        for batch in self._function(shard_of(self.parts), **self.description.config):
            arrays = self._place(batch)
            with self._changed:
                self._made.append(arrays)
                self._count += 1
                self._changed.notify_all()
            self._report.batch(self.description.number)
            self._wait_for_room()

    def _wait_for_room(self) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: len(self._made) < self._room or self._has_ended(self._count)
            )
            if self._has_ended(self._count):
                raise _UnwantedError

    @property
    def _name(self) -> str:
        return f"the input {self.description.function} on host {self._host}"

    def _place(self, batch: Any) -> list[Array]:
        """Puts this host's part of a batch on its devices."""
        from jax.tree_util import (
            keystr,
            tree_flatten_with_path,
        )  # which a host needs for nothing else

        leaves = tree_flatten_with_path(batch)[0]
        paths = [keystr(path, simple=True, separator="/") for path, _ in leaves]
        if paths != self.description.paths:
            self._refuse(f"leaves {paths}", f"leaves {self.description.paths}")
        return [self._put(part, leaf) for part, (_, leaf) in zip(self.parts, leaves, strict=True)]

    def _put(self, part: Part, leaf: Any) -> Array:
        elements = np.asarray(leaf)
        if (elements.dtype, elements.shape) != (part.dtype, part.shape):
            self._refuse(
                f"{elements.dtype}{list(elements.shape)} for leaf {part.path!r}",
                f"{part.dtype}{list(part.shape)}, its part {part.box} of each batch",
            )
        regions = (elements[region] for region in part.regions)
        shards = [np.ascontiguousarray(region).reshape(part.shard) for region in regions]
        return self._backend.put(
            part.dtype, part.shard, self.local, part.memory, shards, keeps=False
        )

    def _refuse(self, given: str, wanted: str) -> NoReturn:
        raise Failed(
            f"INVALID_ARGUMENT: {self._name} gave {given} as batch {self._count}; expected {wanted}"
        )


class _UnwantedError(Exception):
    """Nobody takes more batches."""


@dataclasses.dataclass(frozen=True)
class Feed:
    """A program that gives the next batch of an input.

    Attributes:
        source: the input.
        loaded: jaxlib's executable of the same program with zeros.
        name: name of the program.
    """

    source: Source
    loaded: Any
    name: str


class Inputs:
    """All inputs of this host.

    Args:
        backend: this host's devices.
        host: this host's number over all islands.
        report: tells the controller.
        modules: prefixes of the modules that functions may be of; ``*`` is any.
    """

    def __init__(
        self, backend: Backend, host: int, report: Reporter, modules: Sequence[str]
    ) -> None:
        self._backend = backend
        self._host = host
        self._report = report
        self._modules = modules
        self._sources: dict[int, Source] = {}
        self._lock = threading.Lock()

    def open(
        self, description: Description, program: Executable, devices: list[int], outputs: list[Any]
    ) -> Feed:
        """A program that takes the batches of an input, whose source is made unless it is there.

        Args:
            description: of the input.
            program: the same program with zeros.
            devices: the island's numbers of its devices.
            outputs: what the controller is told of each result.

        Raises:
            RefusedError: the function cannot be had, or the input is known as another.
        """
        function = self._function(description.function)
        position = {self._backend.all_devices[n].id: place for place, n in enumerate(devices)}
        mine = [position[self._backend.local_devices[index].id] for index in program.local]
        if len(outputs) != len(description.paths):
            raise RefusedError(f"INVALID_ARGUMENT: an input of {len(outputs)} results has others")
        parts = [
            part_of(path, output, mine)
            for path, output in zip(description.paths, outputs, strict=True)
        ]
        with self._lock:
            source = self._sources.get(description.number)
            if source is None:
                source = Source(
                    self._backend,
                    self._host,
                    self._report,
                    description,
                    function,
                    parts,
                    program.local,
                )
                self._sources[description.number] = source
            elif (source.description, source.parts, source.local) != (
                description, parts, program.local
            ):  # fmt: skip
                raise RefusedError("INVALID_ARGUMENT: another input has this one's number")
            source.programs += 1
        return Feed(source, program.loaded, program.name)

    def close(self, feed: Feed) -> None:
        """A program takes no more batches."""
        with self._lock:
            feed.source.programs -= 1
            if feed.source.programs:
                return
            del self._sources[feed.source.description.number]
        feed.source.end(0, "CANCELLED: the input was freed")

    def end(self, number: int, batches: int, error: str) -> None:
        """Gives an error for every batch of an input after so many."""
        with self._lock:
            source = self._sources.get(number)
        if source is not None:
            source.end(batches, error)

    def _function(self, path: str) -> Callable[..., Any]:
        """Imports a function, if that is allowed."""
        module, _, name = path.partition(":")
        self._check_allowed(module, path)
        try:
            function: Callable[..., Any] = getattr(importlib.import_module(module), name)
        except (ModuleNotFoundError, AttributeError) as error:
            raise RefusedError(
                f"NOT_FOUND: host {self._host} cannot import the input {path}: {error}; hosts find "
                "modules beside the script of `fairway run`, in the setting input_path, and where "
                "Python finds them"
            ) from error
        except BaseException as error:
            told = "".join(traceback.format_exception(error))[-TRACEBACK_CHARACTERS:]
            raise RefusedError(
                f"UNKNOWN: on host {self._host} the module of the input {path} raised "
                f"{type(error).__name__}: {error}\n{told}"
            ) from error
        # What an allowed module merely imported is not allowed with it.
        self._check_allowed(str(getattr(function, "__module__", module)), path)
        if not callable(function):
            raise RefusedError(f"INVALID_ARGUMENT: the input {path} is no function")
        return function

    def _check_allowed(self, module: str, path: str) -> None:
        for allowed in self._modules:
            if allowed in (ANY, module) or module.startswith(f"{allowed}."):
                return
        raise RefusedError(
            f"PERMISSION_DENIED: the input {path} is of module {module}; the setting input_modules "
            f"allows hosts {list(self._modules) or 'none'}; add it there"
        )
