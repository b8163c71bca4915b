"""Loops and branches over islands.

Loops without crossings stay loops; one whose body crosses becomes a block of its own that is
launched as often as the loop's count says, or, if that is not known, is computed by every island
alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jaxlib.mlir import ir

from fairway.host.partition.axes import IslandSharding
from fairway.host.partition.loops import trip_count
from fairway.host.partition.operations import (
    LOOP,
    captured_by,
    operands_of,
    per_value,
    terminator_of,
)
from fairway.host.partition.writer import Writer
from fairway.host.screening import RefusedError

__all__ = ["launched", "write_case", "write_while"]

ITERATIONS_MAX = 512
"""Most iterations of a loop whose body crosses; longer ones are computed by every island alone."""

Value = Any


def write_while(writer: Writer, operation: Any) -> None:
    """Writes a loop."""
    cuts = writer.wanted(operation)
    operands = [writer.taken(v, cut) for v, cut in zip(operation.operands, cuts, strict=True)]
    attempt = _Attempt.begin(writer)
    written = _loop(writer, operation, operands, cuts)
    if not attempt.crosses:
        return
    count = None if writer.alone else trip_count(operation, writer.functions)
    attempt.undo(written)
    if count is not None and count <= ITERATIONS_MAX:
        _launched(writer, operation, (operands, cuts), count)
    else:
        _by_every_island(writer, operation, write_while)


def _loop(writer: Writer, operation: Any, operands: list[Value], cuts: list[IslandSharding]) -> Any:
    """Writes a loop, whose regions may turn out to cross."""
    kinds = [writer.local(result, cut) for result, cut in zip(operation.results, cuts, strict=True)]
    written = ir.Operation.create("stablehlo.while", results=kinds, operands=operands, regions=2)
    condition, body = operation.regions
    _region(writer, (written.regions[0], condition), (kinds, cuts), None)
    _region(writer, (written.regions[1], body), (kinds, cuts), cuts)
    writer.annotate(written, operation.results, cuts)
    writer.define_all(operation.results, list(written.results), cuts)
    return written


def _region(
    writer: Writer,
    regions: tuple[Any, Any],
    carried: tuple[list[Any], list[IslandSharding]],
    made: list[IslandSharding] | None,
) -> None:
    """Writes a region of a loop.

    Args:
        writer: writes operations.
        regions: the written region, and the program's.
        carried: types and cuts of its arguments.
        made: cuts of its results; None for a condition, which every island has whole.
    """
    (region, source), (kinds, cuts) = regions, carried
    block = region.blocks.append(*kinds, arg_locs=[ir.Location.unknown()] * len(kinds))
    for argument, own, cut in zip(source.blocks[0].arguments, block.arguments, cuts, strict=True):
        writer.define(argument, own, cut)
    results = [IslandSharding.whole(0)] if made is None else made
    _branch(writer, source.blocks[0], block, results)


def _launched(
    writer: Writer,
    operation: Any,
    carried: tuple[list[Value], list[IslandSharding]],
    count: int,
) -> None:
    """Writes a loop whose body is launched again and again."""
    body = operation.regions[1].blocks[0]
    operands, cuts = carried
    read = captured_by(body)
    captured = [writer.part(value) for value in read]
    outer = dict(writer.known)
    names = [*body.arguments, *read]
    all_cuts = [*cuts, *(part.cut for part in captured)]

    def write(block: Any) -> list[Value]:
        for name, own, cut in zip(names, block.arguments, all_cuts, strict=True):
            writer.define(name, own, cut)
        writer.operations(body)
        returned = terminator_of(body)
        made = [writer.taken(v, cut) for v, cut in zip(returned.operands, cuts, strict=True)]
        return [*made, *list(block.arguments)[len(cuts) :]]

    given = ([*operands, *(part.value for part in captured)], all_cuts)
    results = launched(writer, given, count, write)
    writer.known = outer
    writer.define_all(operation.results, results[: len(cuts)], cuts)


def launched(
    writer: Writer,
    carried: tuple[list[Value], list[IslandSharding]],
    count: int,
    write: Callable[[Any], list[Value]],
) -> list[Value]:
    """Writes a loop whose body is launched again and again; returns its results.

    Args:
        writer: writes operations.
        carried: initial values, and their cuts.
        count: how often it runs.
        write: writes the body into a block and returns what it carries on.
    """
    operands, cuts = carried
    operands = [writer.emitter.pinned(v, cut) for v, cut in zip(operands, cuts, strict=True)]
    kinds = [value.type for value in operands]
    holder = ir.Module.create()
    with ir.InsertionPoint(holder.body):
        function = ir.Operation.create("func.func", regions=1, attributes=_function(kinds))
    body = function.regions[0].blocks.append(*kinds, arg_locs=[ir.Location.unknown()] * len(kinds))
    number = len(writer.loops)
    writer.loops.append(holder)
    with ir.InsertionPoint(body):
        made = [writer.emitter.pinned(v, cut) for v, cut in zip(write(body), cuts, strict=True)]
        writer.emitter.operation("func.return", [], made)
    integer = ir.IntegerType.get_signless(64)
    writer.emitter.crossings += 1
    written = writer.emitter.operation(
        "stablehlo.custom_call",
        kinds,
        operands,
        call_target_name=ir.StringAttr.get(LOOP),
        fairway__loop=ir.IntegerAttr.get(integer, number),
        fairway__count=ir.IntegerAttr.get(integer, count),
    )
    inner = [
        writer.emitter.inner(cut, list(kind.shape)) for kind, cut in zip(kinds, cuts, strict=True)
    ]
    known = [one for one in inner if one]
    if known:
        written.attributes["sdy.sharding"] = per_value(known)
    return list(written.results)


def write_case(writer: Writer, operation: Any) -> None:
    """Writes a choice between branches."""
    cuts = writer.wanted(operation)
    index = writer.taken(operation.operands[0], IslandSharding.whole(0))
    attempt = _Attempt.begin(writer)
    kinds = [writer.local(result, cut) for result, cut in zip(operation.results, cuts, strict=True)]
    written = ir.Operation.create(
        operation.name, results=kinds, operands=[index], regions=len(operation.regions)
    )
    for region, source in zip(written.regions, operation.regions, strict=True):
        block = region.blocks.append()
        _branch(writer, source.blocks[0], block, cuts)
    writer.annotate(written, operation.results, cuts)
    writer.define_all(operation.results, list(written.results), cuts)
    if attempt.crosses:
        attempt.undo(written)
        _by_every_island(writer, operation, write_case)


def _branch(writer: Writer, source: Any, block: Any, cuts: list[IslandSharding]) -> None:
    with ir.InsertionPoint(block):
        writer.operations(source)
        returned = terminator_of(source)
        values = [writer.taken(v, cut) for v, cut in zip(returned.operands, cuts, strict=True)]
        writer.emitter.operation("stablehlo.return", [], values)


def _by_every_island(writer: Writer, operation: Any, write: Callable[[Writer, Any], None]) -> None:
    """Writes an operation with regions that every island computes whole."""
    if writer.alone:
        raise RefusedError(
            f"UNIMPLEMENTED: {operation.name} at {operation.location} communicates between "
            "islands although all of its values are on every island"
        )
    outer, before = dict(writer.known), writer.emitter.crossed_bytes
    for value in dict.fromkeys(operands_of(operation)):
        whole = writer.only_inner(writer.part(value).cut)
        writer.define(value, writer.taken(value, whole), whole)
    size = writer.emitter.crossed_bytes - before
    with writer.everywhere():
        write(writer, operation)
    made = {result: writer.known[result] for result in operation.results}
    writer.known = outer | made
    writer.warn(operation, "is computed by every island, since its regions would communicate", size)


@dataclasses.dataclass(frozen=True)
class _Attempt:
    """An operation with regions that is written to see whether they cross."""

    writer: Writer
    crossings: int
    resharded: dict[Any, Any]
    loops: int

    @property
    def crosses(self) -> bool:
        """Whether anything crosses since the attempt began."""
        return self.writer.emitter.crossings != self.crossings

    @classmethod
    def begin(cls, writer: Writer) -> _Attempt:
        """Begins an attempt."""
        resharded = dict(writer.resharded)
        return cls(writer, writer.emitter.crossings, resharded, len(writer.loops))

    def undo(self, written: Any) -> None:
        """Erases the operation."""
        written.erase()
        self.writer.restore(self.crossings, self.resharded, self.loops)


def _function(kinds: Sequence[Any]) -> dict[str, Any]:
    kind = ir.FunctionType.get(list(kinds), list(kinds))
    return {
        "sym_name": ir.StringAttr.get("body"),
        "function_type": ir.TypeAttr.get(kind),
    }
