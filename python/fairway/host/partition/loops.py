"""How often a loop runs, where the program itself says so."""

from __future__ import annotations

from typing import Any

from jaxlib.mlir import ir

from fairway.host.partition.operations import maker_of, terminator_of

__all__ = ["trip_count"]


def trip_count(loop: Any, functions: dict[str, Any]) -> int | None:
    """Returns how often a loop's body runs, if it counts from one constant to another; else None.

    Args:
        loop: a ``stablehlo.while``, as JAX makes it of ``scan`` and ``fori_loop``.
        functions: functions of the program, by name.
    """
    compared = maker_of(terminator_of(loop.regions[0].blocks[0]).operands[0])
    if getattr(compared, "name", None) != "stablehlo.compare":
        return None
    if "LT" not in str(compared.attributes["comparison_direction"]):
        return None
    counter, bound = compared.operands
    last = _constant(bound)
    arguments = list(loop.regions[0].blocks[0].arguments)
    if last is None or counter not in arguments:
        return None
    index = arguments.index(counter)
    first = _constant(loop.operands[index])
    step = _step(loop, index, functions)
    if first is None or step is None or step <= 0:
        return None
    return max(0, -(-(last - first) // step))


def _step(loop: Any, index: int, functions: dict[str, Any]) -> int | None:
    """Returns the constant that a body adds to a carried counter."""
    body = loop.regions[1].blocks[0]
    argument, value = body.arguments[index], terminator_of(body).operands[index]
    owner = maker_of(value)
    if getattr(owner, "name", None) == "func.call":
        name = ir.FlatSymbolRefAttr(owner.attributes["callee"]).value
        block = functions[name].regions[0].blocks[0]
        results = list(owner.results)
        inner = terminator_of(block).operands[results.index(value)]
        arguments = [
            own
            for own, given in zip(block.arguments, owner.operands, strict=True)
            if given == argument
        ]
        return _added(inner, arguments)
    return _added(value, [argument])


def _added(value: Any, arguments: list[Any]) -> int | None:
    owner = maker_of(value)
    if getattr(owner, "name", None) != "stablehlo.add":
        return None
    one, other = owner.operands
    if one in arguments:
        return _constant(other)
    return _constant(one) if other in arguments else None


def _constant(value: Any) -> int | None:
    """Returns the integer that a scalar value is, if it is a constant."""
    owner = maker_of(value)
    if getattr(owner, "name", None) not in ("stablehlo.constant", "sdy.constant"):
        return None
    elements: Any = ir.DenseElementsAttr
    known = elements(owner.attributes["value"])
    if not known.is_splat:
        return None
    splat = known.get_splat_value()
    return int(ir.IntegerAttr(splat).value) if isinstance(splat.type, ir.IntegerType) else None
