"""Host callbacks in a program over islands.

The program calls a function of the client on one of its devices, with whole operands. So the island
of that device calls it, and the others take the results from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy

from fairway.host.partition.axes import IslandSharding
from fairway.host.partition.operations import cloned, per_value, place_of, shape_of
from fairway.host.partition.tokens import TOKENS
from fairway.host.partition.writer import Writer
from fairway.host.screening import RefusedError

__all__ = ["write_client_call"]

Value = Any


def write_client_call(writer: Writer, operation: Any) -> None:
    """Writes a call of a function of the client."""
    cuts = [IslandSharding.whole(len(shape_of(operand))) for operand in operation.operands]
    before = writer.emitter.crossed_bytes
    operands = [writer.taken(v, cut) for v, cut in zip(operation.operands, cuts, strict=True)]
    whole = [IslandSharding.whole(len(shape_of(result))) for result in operation.results]
    effects = "has_side_effect"
    has_effects = (
        effects in operation.attributes and ir.BoolAttr(operation.attributes[effects]).value
    )
    if writer.alone and not has_effects:
        values = _called(writer, operation, operands)  # each island calls it, for itself
    elif writer.alone and len(operation.results) > len(_tokens_of(operation)):
        raise RefusedError(
            f"UNIMPLEMENTED: the program calls a host callback that has effects and results, in a "
            f"loop or branch over several islands that depends on data, at {place_of(operation)}; "
            "run that on the devices of one island"
        )
    else:
        values = _called_by_one(writer, operation, operands)
    if size := writer.emitter.crossed_bytes - before:
        writer.warn(operation, "calls the client with whole arrays, which cross islands", size)
    writer.define_all(operation.results, values, whole)


def _tokens_of(operation: Any) -> set[int]:
    """Returns the numbers of the results of a call that order it with others."""
    if TOKENS not in operation.attributes:
        return set()
    return set(ir.DenseI64ArrayAttr(operation.attributes[TOKENS]))


def _device_of(writer: Writer, operation: Any) -> tuple[int, int]:
    """Returns the island that calls, and which of its devices: the first if none is named."""
    device = 0
    if "sdy.sharding" in operation.attributes:
        attribute = operation.attributes["sdy.sharding"]
        if sdy.TensorShardingPerValueAttr.isinstance(attribute):
            [*_, attribute] = sdy.TensorShardingPerValueAttr(attribute).shardings
        mesh = sdy.TensorShardingAttr(attribute).mesh_or_ref
        if isinstance(mesh, ir.FlatSymbolRefAttr):
            device = writer.meshes[ir.FlatSymbolRefAttr(mesh).value].first_device
    for island, members in enumerate(writer.islands.members):
        if device in members:
            return island, members.index(device)
    return 0, 0


def _called(writer: Writer, operation: Any, operands: Sequence[Value]) -> list[Value]:
    """Writes the call on a device of the island."""
    written = cloned(operation, ir.InsertionPoint.current)
    for index, operand in enumerate(operands):
        written.operands[index] = operand
    _, device = _device_of(writer, operation)
    count = max(1, len(operation.results))
    one = f"#sdy.sharding<mesh<[], device_ids=[{device}]>, []>"
    written.attributes["sdy.sharding"] = per_value([one] * count)
    if TOKENS in written.attributes:
        del written.attributes[TOKENS]
    return list(written.results)


def _called_by_one(writer: Writer, operation: Any, operands: Sequence[Value]) -> list[Value]:
    """Writes the call on one island, whose results the others take."""
    emitter = writer.emitter
    island, _ = _device_of(writer, operation)
    calls = emitter.is_at(writer.islands.axes, island)
    kinds = [
        ir.RankedTensorType.get(shape_of(result), _bits(result)) for result in operation.results
    ]
    chosen = ir.Operation.create("stablehlo.if", results=kinds, operands=[calls], regions=2)
    with ir.InsertionPoint(chosen.regions[0].blocks.append()):
        made = _called(writer, operation, operands)
        made = [_as(writer, value, kind) for value, kind in zip(made, kinds, strict=True)]
        emitter.operation("stablehlo.return", [], made)
    with ir.InsertionPoint(chosen.regions[1].blocks.append()):
        emitter.operation("stablehlo.return", [], list(map(emitter.zeros, kinds)))
    tokens, values = _tokens_of(operation), []
    for index, (result, value) in enumerate(zip(operation.results, chosen.results, strict=True)):
        whole = IslandSharding.whole(len(shape_of(result)))
        if index not in tokens:
            value = emitter.reduce(value, whole, writer.islands.axes, "add")
        values.append(_as(writer, value, result.type))
    return values


def _bits(value: Value) -> Any:
    """Returns the element type in which islands add their results: integers, exact for all bits."""
    element = ir.RankedTensorType(value.type).element_type
    if isinstance(element, ir.ComplexType):
        return element
    width = element.width
    return ir.IntegerType.get_unsigned(max(8, width))


def _as(writer: Writer, value: Value, kind: Any) -> Value:
    """Returns a value with another element type of as many bits; of fewer than 8, converted."""
    source, target = ir.RankedTensorType(value.type), ir.RankedTensorType(kind)
    if source == target:
        return value
    widths = [one.element_type.width for one in (source, target)]
    name = "bitcast_convert" if widths[0] == widths[1] else "convert"
    return writer.emitter.operation(f"stablehlo.{name}", [target], [value]).result
