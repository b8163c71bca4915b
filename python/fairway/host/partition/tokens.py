"""Tokens, which order the effects of a program, as arrays.

An array of one element orders calls as a token does, and can be an operand or result of any
operation. One without elements would not: XLA removes those.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy, stablehlo

from fairway.host.partition.operations import blocks_of, per_value, shape_of, terminator_of
from fairway.host.screening import is_client_call, symbol

__all__ = ["TOKENS", "as_arrays"]

TOKENS = "fairway.tokens"
"""Attribute of a call: the numbers of its results that were tokens."""

Value = Any


def as_arrays(module: Any) -> None:
    """Replaces all tokens of a module by arrays.

    Arguments and results of its entry function, which clients make and keep, become arrays without
    elements: runs are ordered in any case.
    """
    bit = ir.IntegerType.get_signless(1)
    one = ir.RankedTensorType.get([1], bit)
    calls = []

    def visit(operation: Any) -> Any:
        if is_client_call(operation):
            calls.append(operation)
        _replace(operation, one)
        return ir.WalkResult.ADVANCE

    for function in module.body.operations:
        if function.operation.name == "func.func":
            function.operation.walk(visit)
            if symbol(function) == "main":
                _enter(function.operation, ir.RankedTensorType.get([0], bit))
            _retype(function.operation)
    for call in calls:
        _lay_out(call)


def _replace(operation: Any, kind: Any) -> None:
    """Gives values of an operation that are tokens another type."""
    tokens = [index for index, value in enumerate(operation.results) if _is_token(value)]
    if operation.name == "stablehlo.create_token":
        _become_constant(operation, kind)
        return
    if operation.name == "stablehlo.after_all" and len(operation.operands):
        _become_sum(operation, kind)
        return
    for name in ("sdy.sharding", "in_shardings", "out_shardings"):
        values = operation.operands if name == "in_shardings" else operation.results
        if name in operation.attributes and len(values):
            _shard(operation, name, [_is_token(one) or one.type == kind for one in values])
    if tokens and is_client_call(operation):
        numbers: Any = ir.DenseI64ArrayAttr
        operation.attributes[TOKENS] = numbers.get(tokens)
    for index in tokens:
        operation.results[index].set_type(kind)
    for block in blocks_of(operation):
        for argument in block.arguments:
            if _is_token(argument):
                argument.set_type(kind)


def _shard(operation: Any, name: str, may_be_tokens: list[bool]) -> None:
    """Gives what were tokens, and have a dimension now, a sharding of it."""
    attribute = operation.attributes[name]
    if not sdy.TensorShardingPerValueAttr.isinstance(attribute):
        return
    shardings = list(map(str, sdy.TensorShardingPerValueAttr(attribute).shardings))
    written = [
        sharding.replace(", []", ", [{}]", 1)
        if is_token and "@maximal_mesh" not in sharding  # which stands for no dimensions
        else sharding
        for sharding, is_token in zip(shardings, may_be_tokens, strict=True)
    ]
    if written != shardings:
        operation.attributes[name] = per_value(written)


def _is_token(value: Value) -> bool:
    return bool(stablehlo.TokenType.isinstance(value.type))


def _constant(kind: Any) -> Value:
    zero = np.zeros(list(ir.RankedTensorType(kind).shape), np.bool_)
    elements: Any = ir.DenseElementsAttr
    value = (
        elements.get_splat(kind, ir.BoolAttr.get(False))
        if zero.size
        else elements.get(np.zeros(0, np.uint8), type=ir.IntegerType.get_signless(1), shape=[0])
    )
    return ir.Operation.create(
        "stablehlo.constant", results=[kind], attributes={"value": value}
    ).result


def _become_constant(operation: Any, kind: Any) -> None:
    with ir.InsertionPoint(operation), ir.Location.unknown():
        operation.results[0].replace_all_uses_with(_constant(kind))


def _become_sum(operation: Any, kind: Any) -> None:
    """Replaces the token after several others by one that needs them all."""
    first, *others = operation.operands
    with ir.InsertionPoint(operation), ir.Location.unknown():
        for other in others:
            made = ir.Operation.create("stablehlo.or", results=[kind], operands=[first, other])
            first = made.result
    operation.results[0].replace_all_uses_with(first)


def _enter(main: Any, empty: Any) -> None:
    """Lets the entry function take and return arrays without elements."""
    block = main.regions[0].blocks[0]
    returned = terminator_of(block)
    signature = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value)
    with ir.Location.unknown():
        for argument, before in zip(block.arguments, signature.inputs, strict=True):
            if stablehlo.TokenType.isinstance(before):
                with ir.InsertionPoint.at_block_begin(block):
                    argument.replace_all_uses_with(_constant(argument.type))
                argument.set_type(empty)
        with ir.InsertionPoint(returned):
            for index, before in enumerate(signature.results):
                if stablehlo.TokenType.isinstance(before):
                    returned.operands[index] = _constant(empty)


def _retype(function: Any) -> None:
    """Gives a function the type of its block."""
    block = function.regions[0].blocks[0]
    inputs = [argument.type for argument in block.arguments]
    results = [operand.type for operand in terminator_of(block).operands]
    kind = ir.FunctionType.get(inputs, results)
    function.attributes["function_type"] = ir.TypeAttr.get(kind)


def _lay_out(call: Any) -> None:
    """Gives a call row-major layouts of its operands and results."""
    for name, values in (("operand_layouts", call.operands), ("result_layouts", call.results)):
        layouts = [_row_major(len(shape_of(value))) for value in values]
        call.attributes[name] = ir.ArrayAttr.get(layouts)


def _row_major(rank: int) -> Any:
    elements: Any = ir.DenseElementsAttr
    order = np.arange(rank, dtype=np.int64)[::-1].copy()
    return elements.get(order, type=ir.IndexType.get(), shape=[rank])
