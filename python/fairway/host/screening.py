"""Screens programs beyond the validity of their StableHLO.

XLA trusts a valid program: a custom call reads and writes as far as its own parameters say,
whatever the shapes of its operands; a recursive function is followed until the stack overflows.
Such a program would crash the host that compiles or runs it, with the arrays of every client.
The process that parses the program rejects it, or makes it safe.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from fairway.plugin.calls import ATTRIBUTE
from fairway.shards import TARGET

__all__ = ["RefusedError", "screen", "symbol"]

ELEMENTS_MAX = 1 << 48
"""Most elements of any array of a program; the limit for clients' arrays as well."""
DEPTH_MAX = 256
"""Most nested regions."""

BUFFER_CALLS = {f"xla_buffer_python_{platform}_callback" for platform in ("cpu", "gpu")}
"""Custom calls that call a function of the client which writes its results in place."""
CLIENT_CALLS = BUFFER_CALLS | {
    f"xla_ffi_{kind}python_{platform}_callback"
    for kind in ("", "partitioned_")
    for platform in ("cpu", "gpu")
}
"""Custom calls that call a function of the client: see :mod:`fairway.host.callbacks`."""

FOREIGN_POINTERS = {
    "InspectSharding": "jax.debug.inspect_array_sharding",
    "CustomSPMDPartitioning": "custom_partitioning",
    "xla_python_cpu_callback": "a host callback",
}
"""Custom calls whose operands are addresses in the process that made them, with their origin."""

LAPACK = {
    "potrf": "nn -> nn .",
    "getrf": "mn -> mn k .",
    "geqrf": "mn -> mn k",
    "geqp3": "mn n -> mn n k",
    "orgqr": "mn r -> mn",
    "ormqr": "pq r mn -> mn",
    "gesdd": "mn -> mn k mm nn .",
    "gesvd": "mn -> mn k mm nn .",
    "gesdd thin": "mn -> mn k mk kn .",
    "gesvd thin": "mn -> mn k mk kn .",
    "syevd": "nn -> nn n .",
    "geev": "nn -> n nn nn .",
    "geev real": "nn -> n n nn nn .",
    "sytrd": "nn -> nn n l l .",
    "gees": "nn -> nn nn n . .",
    "gees real": "nn -> nn nn n n . .",
    "gehrd": "nn -> nn l .",
    "gtsv": "n n n nq -> n n n nq .",
    "trsm": "pp mn -> mn",
}
"""Shapes of operands and results after common batch axes: a letter is an extent,
``.`` a scalar, ``k`` the lesser of ``m`` and ``n``, ``l`` one less than ``n``.

Source: what ``jax.lax.linalg`` of jax 0.10.2 lowers to; a test derives them from it again."""

LAPACK_NAME = re.compile(r"lapack_([sdcz])(\w+)_ffi")
LAPACK_ALIASES = {"heevd": "syevd", "hetrd": "sytrd", "ungqr": "orgqr", "unmqr": "ormqr"}
LEFT, THIN, MODES = ord("L"), ord("S"), {ord("A"), ord("S"), ord("N")}

UNCHANGED = {
    *("LayoutConstraint", "Sharding", "annotate_device_placement"),
    *("xla.sdy.FuncResultSharding", "xla.sdy.PropagationBarrier"),
    *(
        f"mhlo.{name}"
        for name in (
            *("acos", "acosh", "asin", "asinh", "atan", "atanh", "cosh", "erf", "erf_inv"),
            *("sinh", "tan"),
        )
    ),
}
"""Custom calls whose one result has the shape of their one operand."""
OF_SHARDS = {
    *("SPMDFullToShardShape", "SPMDShardToFullShape"),
    *("xla.sdy.GlobalToLocalShape", "xla.sdy.LocalToGlobalShape"),
}
"""Custom calls whose results are their operands with other extents."""

SDY = "xla.sdy."
SDY_PREFIXES = {
    "sharding": "#sdy.sharding",
    "in_shardings": "#sdy.sharding_per_value",
    "out_shardings": "#sdy.sharding_per_value",
    "tuple_results_shardings": "#sdy.sharding_per_value",
    "sharding_rule": "#sdy.op_sharding_rule",
    "manual_axes": "#sdy.manual_axes",
}
"""Prefixes of attributes that XLA parses as Shardy's."""


class RefusedError(Exception):
    """A program that must not be compiled; the text is ``CODE_NAME: message``."""


def screen(module: Any, trusted: Collection[str] = ()) -> None:
    """Rejects a module that could crash its host, and bounds the indices of sparse products.

    O(operations).

    Args:
        module: a parsed module of StableHLO; it is changed in place.
        trusted: targets of custom calls that the owner of the run allows, whatever their shapes.

    Raises:
        RefusedError: names the operation and what is expected.
    """
    calls: dict[str, set[str]] = {}
    custom_calls = []
    check_attributes(module.operation)
    for function in module.body.operations:
        name = symbol(function)
        called = calls.setdefault(name, set())
        if function.operation.name == "func.func":
            check_body(function, name)
        for operation in operations_in(function.operation):
            check_shapes(operation)
            check_attributes(operation)
            if operation.name == "stablehlo.custom_call":
                custom_calls.append(operation)
            for attribute in ("callee", "decomposition", "called_computations"):
                if attribute in operation.attributes:
                    called.update(
                        re.findall(r'@"?([^",\s\]]+)', str(operation.attributes[attribute]))
                    )
    if "main" not in calls:
        raise RefusedError("INVALID_ARGUMENT: the program has no function main")
    check_recursion(calls)
    client_calls = []
    for operation in custom_calls:
        target = target_of(operation)
        if target in CLIENT_CALLS:
            client_calls.append(operation)
        elif target not in trusted:
            check_custom_call(operation, target)
    if client_calls:
        check_client_calls(client_calls, len(functions_of(module)))


def symbol(named: Any) -> str:
    """Returns the name of a function or module; empty if it has none."""
    attributes = named.operation.attributes
    return ir.StringAttr(attributes["sym_name"]).value if "sym_name" in attributes else ""


def check_body(function: Any, name: str) -> None:
    """Rejects a function without a body, since XLA reads its return operation.

    Raises:
        RefusedError: names the function.
    """
    blocks = [block.operations for region in function.operation.regions for block in region]
    count = len(blocks[0]) if len(blocks) == 1 else 0
    if not count or blocks[0][count - 1].operation.name != "func.return":
        raise RefusedError(
            f"INVALID_ARGUMENT: function {name} has no body that ends with func.return"
        )


def operations_in(operation: Any, depth: int = 0) -> Iterator[Any]:
    """Yields all operations nested in an operation.

    Raises:
        RefusedError: they are nested too deep.
    """
    if depth > DEPTH_MAX:
        raise RefusedError(f"INVALID_ARGUMENT: more than {DEPTH_MAX} regions lie in each other")
    for region in operation.regions:
        for block in region:
            for inner in block.operations:
                yield inner.operation
                yield from operations_in(inner.operation, depth + 1)


def check_shapes(operation: Any) -> None:
    """Rejects results with more than ``ELEMENTS_MAX`` elements."""
    for result in operation.results:
        shape = shape_of(result)
        if shape is not None and math.prod(shape) > ELEMENTS_MAX:
            raise RefusedError(
                f"INVALID_ARGUMENT: {operation.name} makes an array of shape {shape}; expected at "
                "most 2^48 elements"
            )


def shape_of(value: Any) -> tuple[int, ...] | None:
    """Returns the extents of an array; None if it is no array, or its shape is dynamic."""
    if not isinstance(value.type, ir.RankedTensorType) or not value.type.has_static_shape:
        return None
    return tuple(value.type.shape)


def check_recursion(calls: dict[str, set[str]]) -> None:
    """Rejects functions that are recursive, directly or through other functions."""
    done: set[str] = set()
    for start in calls:
        path: list[tuple[str, Iterator[str]]] = [(start, iter(calls[start]))]
        active = {start}
        while path and start not in done:
            name, rest = path[-1]
            inner = next((one for one in rest if one in calls and one not in done), None)
            if inner is None:
                path.pop()
                active.discard(name)
                done.add(name)
            elif inner in active:
                raise RefusedError(f"INVALID_ARGUMENT: function {inner} calls itself")
            else:
                active.add(inner)
                path.append((inner, iter(calls[inner])))


def check_attributes(operation: Any) -> None:
    """Rejects attributes that XLA would parse as Shardy's without a check."""
    if "mhlo.frontend_attributes" not in operation.attributes:
        return
    given: Any = operation.attributes["mhlo.frontend_attributes"]
    names: Any = given if isinstance(given, ir.DictAttr) else ()
    for named in names:
        if named.name.startswith(SDY) and isinstance(named.attr, ir.StringAttr):
            check_sdy(named.name.removeprefix(SDY), named.attr.value)


def check_sdy(name: str, text: str) -> None:
    """Checks one such attribute.

    Raises:
        RefusedError: it is not of the kind that its name says.
    """
    if name != "meshes" and name not in SDY_PREFIXES:
        return
    try:
        parsed = ir.Attribute.parse(text)
    except (ir.MLIRError, ValueError):
        parsed = None
    if name == "meshes":
        is_right = isinstance(parsed, ir.DictAttr) and all(
            str(named.attr).startswith("#sdy.mesh") for named in parsed
        )
    else:
        is_right = parsed is not None and str(parsed).startswith(SDY_PREFIXES[name])
    if not is_right:
        raise RefusedError(
            f"INVALID_ARGUMENT: the attribute {SDY}{name} is {text[:80]!r}; expected "
            f"{SDY_PREFIXES.get(name, 'a dictionary of #sdy.mesh')}"
        )


# Custom calls


def functions_of(module: Any) -> list[int]:
    """Returns the client's numbers of the functions that a module calls, by their index there."""
    if ATTRIBUTE not in module.operation.attributes:
        return []
    try:
        return list(ir.DenseI64ArrayAttr(module.operation.attributes[ATTRIBUTE]))
    except ValueError as error:
        raise RefusedError(f"INVALID_ARGUMENT: {ATTRIBUTE} is no list of numbers") from error


def is_client_call(operation: Any) -> bool:
    """Returns whether an operation calls a function of the client."""
    return target_of(operation) in CLIENT_CALLS


def target_of(operation: Any) -> str:
    """Returns the target of a custom call; empty for other operations."""
    if operation.name != "stablehlo.custom_call":
        return ""
    return str(ir.StringAttr(operation.attributes["call_target_name"]).value)


def check_client_calls(operations: Sequence[Any], functions: int) -> None:
    """Rejects calls of functions that the client has not named, or of one with several results.

    XLA reads the function at the index that a call gives, and as many bytes as its results have.

    Raises:
        RefusedError: names the call.
    """
    results: dict[int, list[Any]] = {}
    for operation in operations:
        target, index = target_of(operation), index_of(operation)
        if index is None or not 0 <= index < functions:
            raise RefusedError(
                f"UNIMPLEMENTED: the program calls {target}, a host callback, but names "
                f"{functions} functions of the client for such calls; Fairway's plugin for JAX "
                "names them (it is on the path if `fairway run` starts the program)"
            )
        kinds = [target, *(value.type for value in operation.results)]
        values = [*operation.operands, *operation.results]
        arrays = [one for one in values if not stablehlo.TokenType.isinstance(one.type)]
        if None in map(shape_of, arrays) or results.setdefault(index, kinds) != kinds:
            raise unfit(operation, target, "arrays of known shapes, the same at each call")
        if "partitioned" in target and len(operation.results):
            raise unfit(operation, target, "no results")


def index_of(operation: Any) -> int | None:
    """Returns which of its module's functions a call is for."""
    if "mhlo.backend_config" not in operation.attributes:
        return None
    config = operation.attributes["mhlo.backend_config"]
    if not isinstance(config, ir.DictAttr) or [one.name for one in config] != ["index"]:
        return None
    index = config["index"]
    return int(ir.IntegerAttr(index).value) if isinstance(index, ir.IntegerAttr) else None


def check_custom_call(operation: Any, target: str) -> None:
    """Rejects a custom call that hosts do not know, or whose shapes are inconsistent.

    Raises:
        RefusedError: names the call.
    """
    if target in FOREIGN_POINTERS:
        raise RefusedError(
            f"UNIMPLEMENTED: the program calls {target} ({FOREIGN_POINTERS[target]}), which "
            "reaches into the client's own process; leave it out under Fairway"
        )
    operands = [shape_of(value) for value in operation.operands]
    results = [shape_of(value) for value in operation.results]
    if None in operands or None in results:
        raise unfit(operation, target, "arrays of known shapes")
    if lapack := LAPACK_NAME.fullmatch(target):
        check_lapack(operation, target, *lapack.groups())
    elif target == "cpu_csr_sparse_dense_ffi":
        bound_indices(operation, target)
    elif (fits := KNOWN.get(target)) is None:
        raise RefusedError(
            f"NOT_FOUND: the program calls {target}, a custom call that hosts do not know; the "
            "setting custom_calls allows those that a module registers on hosts"
        )
    elif not fits(operation.operands, operation.results):
        raise unfit(operation, target, "the shapes with which JAX calls it")


def unfit(operation: Any, target: str, expected: str) -> RefusedError:
    """Returns the error of a call with wrong shapes."""
    types = ", ".join(str(value.type) for value in operation.operands)
    results = ", ".join(str(value.type) for value in operation.results)
    return RefusedError(
        f"INVALID_ARGUMENT: the program calls {target} with ({types}) for ({results}); expected "
        f"{expected}"
    )


def is_unchanged(operands: Sequence[Any], results: Sequence[Any]) -> bool:
    """Returns whether one array is returned with its type unchanged."""
    return len(operands) == len(results) == 1 and operands[0].type == results[0].type


def is_of_shards(operands: Sequence[Any], results: Sequence[Any]) -> bool:
    """Returns whether arrays are returned with other extents."""
    return len(operands) == len(results) and all(
        len(shape_of(one) or ()) == len(shape_of(other) or ())
        and one.type.element_type == other.type.element_type
        for one, other in zip(operands, results, strict=True)
    )


def is_ragged(operands: Sequence[Any], results: Sequence[Any]) -> bool:
    """Returns whether it is a ragged exchange: input, output, four vectors of offsets and sizes."""
    if len(operands) != 6 or len(results) != 1 or results[0].type != operands[1].type:
        return False
    taken, given = (shape_of(operand) or () for operand in operands[:2])
    return taken[1:] == given[1:] and len({str(operand.type) for operand in operands[2:]}) == 1


def is_approximate(operands: Sequence[Any], results: Sequence[Any]) -> bool:
    """Returns whether results are parts of the first operands, before as many initial values."""
    return len(operands) == 2 * len(results) and all(
        one.type.element_type == other.type.element_type
        and len(shape_of(one) or ()) == len(shape_of(other) or ())
        and all(a >= b for a, b in zip(shape_of(one) or (), shape_of(other) or (), strict=True))
        for one, other in zip(operands, results, strict=False)
    )


def is_top(operands: Sequence[Any], results: Sequence[Any]) -> bool:
    """Returns whether the results are values and indices of the first elements of each row."""
    if len(operands) != 1 or len(results) != 2:
        return False
    whole, values, indices = (shape_of(one) for one in (*operands, *results))
    if not whole or not values:
        return False
    return values == indices and values[:-1] == whole[:-1] and values[-1] <= whole[-1]


KNOWN: dict[str, Callable[[Sequence[Any], Sequence[Any]], bool]] = {
    **dict.fromkeys(UNCHANGED, is_unchanged),
    **dict.fromkeys(OF_SHARDS, is_of_shards),
    "ragged_all_to_all": is_ragged,
    "ApproxTopK": is_approximate,
    "mhlo.topk": is_top,
    TARGET: lambda *_: True,  # never reaches XLA: see `inputs.find`
    "dce_sink": lambda _, results: not results,
    "xla.sdy.ShardingGroup": lambda _, results: not results,
}
"""Custom calls that XLA implements itself, with the check of their operands and results."""


def check_lapack(operation: Any, target: str, letter: str, routine: str) -> None:
    """Rejects a call whose results are not those that the routine writes."""
    config = config_of(operation)
    routine = LAPACK_ALIASES.get(routine, routine)
    if routine in ("gesdd", "gesvd"):
        if config.get("mode") not in MODES:
            raise unfit(operation, target, "mode A, S or N")
        routine += " thin" if config["mode"] == THIN else ""
    if routine in ("geev", "gees") and letter in "sd":
        routine += " real"
    if routine not in LAPACK:
        raise RefusedError(f"NOT_FOUND: the program calls {target}, which hosts do not know")
    extents = fit(LAPACK[routine], operation)
    if extents is None or not is_consistent(routine, extents, config):
        raise unfit(operation, target, f"shapes like {LAPACK[routine]}")


def config_of(operation: Any) -> dict[str, int]:
    """Returns the integer attributes of a call."""
    for name in ("mhlo.backend_config", "backend_config"):
        if name in operation.attributes and isinstance(operation.attributes[name], ir.DictAttr):
            named = operation.attributes[name]
            integers = (ir.IntegerAttr, ir.BoolAttr)
            return {
                one.name: int(type(one.attr)(one.attr).value)
                for one in named
                if isinstance(one.attr, integers)
            }
    return {}


def fit(pattern: str, operation: Any) -> dict[str, int] | None:
    """Returns extents by letter; None if operands and results do not match the pattern."""
    wanted, _, made = pattern.partition(" -> ")
    words = [*wanted.split(), *made.split()]
    values = [*operation.operands, *operation.results]
    counts = (len(operation.operands), len(operation.results))
    if counts != (len(wanted.split()), len(made.split())):
        return None
    first = shape_of(values[0]) or ()
    batch = first[: len(first) - len(words[0].strip("."))]
    extents: dict[str, int] = {}
    for word, value in sorted(zip(words, values, strict=True), key=lambda pair: needs(pair[0])):
        letters, shape = word.strip("."), shape_of(value) or ()
        if len(shape) != len(batch) + len(letters) or shape[: len(batch)] != batch:
            return None
        for letter, extent in zip(letters, shape[len(batch) :], strict=True):
            if extents.setdefault(letter, derived(letter, extents, extent)) != extent:
                return None
    return extents


def needs(word: str) -> bool:
    """Returns whether extents of a word are derived from those of others."""
    return any(letter in "kl" for letter in word)


def derived(letter: str, extents: dict[str, int], extent: int) -> int:
    """Returns the required value of an extent, or its own value if it is free."""
    if letter == "k":
        return min(extents.get("m", extent), extents.get("n", extent))
    if letter == "l":
        return max(0, extents.get("n", extent + 1) - 1)
    return extent


def is_consistent(routine: str, extents: dict[str, int], config: dict[str, int]) -> bool:
    """Returns whether extents satisfy the constraints that patterns cannot express."""
    match routine:
        case "orgqr":
            return extents["r"] <= extents["n"] <= extents["m"]
        case "ormqr":
            side = extents["m" if config.get("left") else "n"]
            return extents["p"] == side and extents["r"] <= min(extents["p"], extents["q"])
        case "trsm":
            return extents["p"] == extents["m" if config.get("side") == LEFT else "n"]
        case "gehrd":
            low, high = config.get("low", 0), config.get("high", 0)
            return extents["n"] == 0 or 1 <= low <= high <= extents["n"]
    return True


def bound_indices(operation: Any, target: str) -> None:
    """Clamps the indices of a sparse matrix to valid ones, as gathers of JAX do.

    Source: ``jaxlib.cpu_sparse``: elements, starts of rows, columns, and the dense operand.
    """
    operands = list(operation.operands)
    shapes = [shape_of(value) or () for value in (*operands, *operation.results)]
    if len(shapes) != 5 or [len(shape) for shape in shapes[:3]] != [1, 1, 1]:
        raise unfit(operation, target, "three vectors and an array")
    (elements,), (starts,), (columns,), dense, result = shapes
    rows = (starts - 1, *dense[1:])
    if elements != columns or len(dense) not in (1, 2) or result != rows or dense[0] == 0:
        raise unfit(operation, target, "elements, starts of rows, columns and a dense operand")
    for number, most in ((1, elements), (2, dense[0] - 1)):
        operation.operands[number] = clamped(operation, operands[number], most)


def clamped(operation: Any, value: Any, most: int) -> Any:
    """Returns ``value`` clamped to 0 and ``most``, inserted before an operation."""
    dtype = np.dtype(np.int64 if "i64" in str(value.type) else np.int32)
    get: Any = ir.DenseElementsAttr.get
    with ir.InsertionPoint(operation), ir.Location.unknown(operation.context):
        least, greatest = (stablehlo.constant(get(np.array(bound, dtype))) for bound in (0, most))
        return stablehlo.clamp(least, value, greatest)
