"""Reads whole programs: IFRT IR as a client's compiler writes it.

The controller understands programs as ``ir::Program`` prints them; this module writes that text
and takes out the code of each function. IFRT IR's bytecode has no versions, so client and host
need the same jaxlib.
"""

from __future__ import annotations

import dataclasses
import re
import string
from collections.abc import Sequence
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from fairway import mpmd
from fairway.host.backend import JAXLIB_VERSION
from fairway.host.programs import ELEMENT_TYPES, RefusedError

ARRAY_TYPE = re.compile(
    r"!ifrt\.array<tensor<((?:\d+x)*)([^>]+(?:<[^>]*>)?)>, "
    r"#ifrt\.sharding_param<([\dx]*) to \[([\d, ]+)\] on ([\dx]+)>, \[([\d, ]+)\]"
    r'(?:, memory_kind = "([^"]*)")?(?:, layout = [^>]*)?>'
)
CONTROL_TYPE = "!ifrt.control"
PLAIN_NAME = set(string.ascii_letters + string.digits + "_.$-")


@dataclasses.dataclass(frozen=True)
class Function:
    """The code of one function of a program.

    Attributes:
        options: names under which its compile options may be found, the best first.
        artifact: portable artifact.
    """

    options: list[str]
    artifact: bytes


def read(program: bytes) -> tuple[str, list[Function]]:
    """Reads a program.

    Returns:
        Its text, and its functions in the order of the text.

    Raises:
        RefusedError: it cannot be read or does what this module does not know.
    """
    with mpmd.context() as context:
        try:
            module = ir.Module.parse(program)
        except ir.MLIRError as error:
            raise RefusedError(
                "FAILED_PRECONDITION: the program cannot be read as IFRT IR, which has no "
                f"versions: client and hosts need the same jaxlib, and this host has "
                f"{JAXLIB_VERSION}; ({str(error).splitlines()[-1]})"
            ) from error
        return _Reader(context, module).read()


class _Reader:
    """One program on its way to text."""

    def __init__(self, context: Any, module: Any) -> None:
        self._context = context
        self._module = module
        self._modules = {
            _symbol(operation): operation
            for operation in module.body.operations
            if operation.operation.name == "builtin.module"
        }
        self._lines: list[str] = []
        self._values: dict[Any, int] = {}
        self._nodes: dict[Any, int] = {}
        self._functions: dict[tuple[str, tuple[int, ...]], str] = {}
        self._code: list[Function] = []

    def read(self) -> tuple[str, list[Function]]:
        main = next(
            operation
            for operation in self._module.body.operations
            if operation.operation.name == "func.func" and _symbol(operation) == "main"
        )
        block = main.regions[0].blocks[0]
        attributes = _dictionaries(main, "arg_attrs", len(block.arguments))
        for argument, given in zip(block.arguments, attributes, strict=True):
            donated = " donated" if "ifrt.donated" in given else ""
            self._lines.append(f"input {self._define(argument)}{donated}")
        results: list[Any] = []
        for operation in block.operations:
            if operation.operation.name == "func.return":
                results = list(operation.operands)
            else:
                self._node(operation.operation)
        self._lines.append(f"return {self._list(results)}")
        name = _symbol(self._module.operation) if self._module.operation.attributes else "main"
        head = [f"program {_name(name)}", *(f"function {f}" for f in self._functions.values())]
        return "\n".join([*head, *self._lines]) + "\n", self._code

    def _define(self, value: Any) -> str:
        number = len(self._values)
        self._values[value] = number
        return f"%{number}: {_array(str(value.type))}"

    def _list(self, values: Sequence[Any]) -> str:
        return "(" + ", ".join(f"%{self._values[value]}" for value in values) + ")"

    def _node(self, operation: Any) -> None:
        read = {"ifrt.Call": self._call, "ifrt.CopyArrays": _move, "ifrt.Reshard": _move}
        if operation.name not in read:
            raise RefusedError(
                f"UNIMPLEMENTED: the program has an operation {operation.name}; "
                f"known are {', '.join(read)}"
            )
        what, detail = read[operation.name](operation)
        is_control = [str(operand.type) == CONTROL_TYPE for operand in operation.operands]
        pairs = list(zip(operation.operands, is_control, strict=True))
        args = self._list([operand for operand, control in pairs if not control])
        after = [self._nodes[operand.owner] for operand, control in pairs if control]
        follows = f" after ({', '.join(f'#{number}' for number in after)})" if after else ""
        made = [value for value in operation.results if str(value.type) != CONTROL_TYPE]
        results = ", ".join(self._define(value) for value in made)
        self._nodes[operation] = len(self._nodes)
        self._lines.append(f"node {results} = {what} {args}{detail}{follows}")

    def _call(self, operation: Any) -> tuple[str, str]:
        attributes = operation.attributes
        callee = str(attributes["callee"]).split("::")[0].removeprefix("@").strip('"')
        devices = tuple(_numbers(attributes["devices"]))
        key = (callee, devices)
        if key not in self._functions:
            twin = sum(1 for other, _ in self._functions if other == callee)
            self._functions[key] = _name(callee if twin == 0 else f"{callee}:{twin}")
            self._code.append(self._function(callee, attributes))
        donated = set(_numbers(attributes["donated_input_indices"]))
        if "io_aliases" in attributes:
            donated |= {_numbers(pair)[0] for pair in ir.ArrayAttr(attributes["io_aliases"])}
        given = ", ".join(str(index) for index in sorted(donated))
        on = f" on [{', '.join(map(str, devices))}]" if not _has_values(operation) else ""
        return f"call {self._functions[key]}", f"{on} donating ({given})" if donated else on

    def _function(self, callee: str, attributes: Any) -> Function:
        options = []
        if "ifrt.compile_options_key" in attributes:
            options.append(ir.StringAttr(attributes["ifrt.compile_options_key"]).value)
        if "ifrt.mesh_name" in attributes:
            mesh = ir.StringAttr(attributes["ifrt.mesh_name"]).value
            options.append(f"{callee}_mesh_{mesh}")
        module = ir.Module.parse(self._modules[callee].operation.get_asm(binary=True))
        artifact = stablehlo.serialize_portable_artifact(
            module, stablehlo.get_current_version(), allow_other_dialects=True
        )
        return Function([*options, callee], artifact)


def _move(operation: Any) -> tuple[str, str]:
    donated = "donated" in operation.attributes and ir.BoolAttr(operation.attributes["donated"])
    return "move", " donating" if donated and donated.value else ""


def _has_values(operation: Any) -> bool:
    values = [*operation.operands, *operation.results]
    return any(str(value.type) != CONTROL_TYPE for value in values)


def _symbol(operation: Any) -> str:
    attributes = operation.attributes
    return ir.StringAttr(attributes["sym_name"]).value if "sym_name" in attributes else "main"


def _dictionaries(function: Any, name: str, count: int) -> list[Any]:
    if name not in function.attributes:
        return [{}] * count
    return [ir.DictAttr(given) for given in ir.ArrayAttr(function.attributes[name])]


def _numbers(attribute: Any) -> list[int]:
    """The numbers of an array attribute, whatever its class."""
    inside = str(attribute).partition("[")[2] or str(attribute).partition(":")[2]
    return [int(number) for number in re.findall(r"\d+", inside.rstrip(">]"))]


def _name(name: str) -> str:
    if name and set(name) <= PLAIN_NAME:
        return f"@{name}"
    special = {*b'"\\/', *range(33)}
    text = "".join(
        f"\\{byte:02x}" if byte in special else chr(byte) for byte in name.encode("utf-8")
    )
    return f'@"{text.encode("latin-1").decode("utf-8")}"'


def _array(kind: str) -> str:
    """An array's type as the program's text has it."""
    found = ARRAY_TYPE.fullmatch(kind)
    if found is None or found[2] not in ELEMENT_TYPES:
        raise RefusedError(f"UNIMPLEMENTED: the program has a value of type {kind}")
    extents, element, tiles, order, axes, devices, memory = found.groups()
    shape = ",".join(extents.rstrip("x").split("x")) if extents else ""
    words = [f"{ELEMENT_TYPES[element]}[{shape}]"]
    counts = [int(count) for count in tiles.split("x") if count]
    if any(count > 1 for count in counts):
        permutation = [int(axis) for axis in order.split(",")]
        tile_of = _tiles(counts, permutation, [int(size) for size in axes.split("x")])
        words.append(f"tiled {'x'.join(map(str, counts))} by {_bracketed(tile_of)}")
    if memory:
        words.append(f"in {_name(memory)}")
    words.append(f"on {_bracketed([int(device) for device in devices.split(',')])}")
    return " ".join(words)


def _bracketed(numbers: list[int]) -> str:
    return f"[{','.join(map(str, numbers))}]"


def _tiles(counts: list[int], permutation: list[int], axes: list[int]) -> list[int]:
    """Tile of each device position of IFRT's ``ShardingParam``.

    Args:
        counts: tiles along each axis of the array.
        permutation: axes of the device grid, the one that varies fastest first.
        axes: sizes of the device grid, the first varying fastest in the device list.
    """
    strides = [1]
    for size in axes[:-1]:
        strides.append(strides[-1] * size)
    order = [0]
    for axis in permutation:  # each further axis varies more slowly than those before
        order = [step * strides[axis] + inner for step in range(axes[axis]) for inner in order]
    tiles = 1
    for count in counts:
        tiles *= count
    copies = len(order) // tiles
    tile_of = [0] * len(order)
    for place, position in enumerate(order):
        tile_of[position] = place // copies
    return tile_of
