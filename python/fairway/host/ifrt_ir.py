"""Reads whole programs: IFRT IR as a client's compiler writes it.

The controller reads programs as ``ir::Program`` prints them; this module writes that text
and extracts the code of each function. IFRT IR's bytecode has no versions, so client and host
need the same jaxlib.
"""

from __future__ import annotations

import dataclasses
import re
import string
from typing import Any

from jaxlib.mlir import ir

from fairway.host.programs import ELEMENT_TYPES
from fairway.host.screening import RefusedError
from fairway.mpmd import SPARSE_CALL

ARRAY_TYPE = re.compile(
    r"!ifrt\.array<tensor<((?:\d+x)*)([^>]+(?:<[^>]*>)?)>, "
    r"#ifrt\.sharding_param<([\dx]*) to \[([\d, ]+)\] on ([\dx]+)>, \[([\d, ]+)\]"
    r'(?:, memory_kind = "([^"]*)")?(?:, layout = [^>]*)?>'
)
CONTROL_TYPE = "!ifrt.control"
SPARSE = re.compile(r"dispatch bins \d+ credit \d+ round \d+|collect|reduce|gather|scatter")
PLAIN_NAME = set(string.ascii_letters + string.digits + "_.$-")


@dataclasses.dataclass(eq=False)
class Function:
    """The code of one function of a program, on one list of devices.

    Attributes:
        name: its name in the program.
        devices: numbers of its devices.
        options: keys of its compile options, in order of preference.
        module: its code.
    """

    name: str
    devices: tuple[int, ...]
    options: list[str]
    module: Any


@dataclasses.dataclass(eq=False)
class IfrtNode:
    """A node: one call, one sparse exchange or, with neither, one transfer.

    Attributes:
        function: the called function.
        args: values that it reads.
        results: values that it makes.
        donated: arguments that it donates.
        after: nodes that must precede it.
        sparse: kind and parameters of the exchange, as the controller reads them.
    """

    function: Function | None
    args: list[int]
    results: list[int]
    donated: list[int]
    after: list[IfrtNode]
    sparse: str | None = None


@dataclasses.dataclass
class IfrtProgram:
    """A parsed program.

    Attributes:
        name: its name.
        types: type of each value, as the controller reads it.
        inputs: number of arguments; they are the first values.
        donated: arguments that a run donates.
        nodes: nodes in a topological order.
        results: the values that are returned.
    """

    name: str
    types: list[str]
    inputs: int
    donated: set[int]
    nodes: list[IfrtNode]
    results: list[int]

    def functions(self) -> list[Function]:
        """Returns the functions that the nodes call, in the order of first use."""
        return list(dict.fromkeys(node.function for node in self.nodes if node.function))

    def text(self) -> str:
        """Returns the program's text, as the controller reads it."""
        numbers = {value: value for value in range(self.inputs)}
        lines = [f"program {quoted(self.name)}"]
        lines += [f"function {quoted(function.name)}" for function in self.functions()]
        for value in range(self.inputs):
            donated = " donated" if value in self.donated else ""
            lines.append(f"input %{value}: {self.types[value]}{donated}")
        places = {node: place for place, node in enumerate(self.nodes)}
        for node in self.nodes:
            numbers |= {value: len(numbers) + i for i, value in enumerate(node.results)}
            lines.append(self._line(node, numbers, places))
        lines.append(f"return {_values(self.results, numbers)}")
        return "\n".join(lines) + "\n"

    def _line(self, node: IfrtNode, numbers: dict[int, int], places: dict[IfrtNode, int]) -> str:
        made = ", ".join(f"%{numbers[value]}: {self.types[value]}" for value in node.results)
        given = ", ".join(map(str, node.donated))
        if node.sparse is not None:
            kind, _, numbers_of = node.sparse.partition(" ")
            what = f"{kind} {_values(node.args, numbers)} {numbers_of}".rstrip()
        elif node.function is None:
            what = f"move {_values(node.args, numbers)}{' donating' if node.donated else ''}"
        else:
            what = f"call {quoted(node.function.name)} {_values(node.args, numbers)}"
            if not node.args and not node.results:
                what += f" on {_bracketed(list(node.function.devices))}"
            what += f" donating ({given})" if given else ""
        after = ", ".join(f"#{places[earlier]}" for earlier in node.after)
        return f"node {made} = {what}{f' after ({after})' if after else ''}"


def read(serialized: bytes, context: Any) -> IfrtProgram:
    """Reads a program.

    Args:
        serialized: IFRT IR's bytecode, which a :class:`fairway.host.checking.Checker` has written.
        context: an MLIR context with IFRT; see :func:`fairway.mpmd.context`.

    Raises:
        RefusedError: it has an operation or a type that is not supported.
    """
    with context:
        return _Reader(ir.Module.parse(serialized)).read()


class _Reader:
    """Reads one program."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._modules = {
            symbol(operation): operation
            for operation in module.body.operations
            if operation.operation.name == "builtin.module"
        }
        self._types: list[str] = []
        self._values: dict[Any, int] = {}
        self._nodes: dict[Any, IfrtNode] = {}
        self._functions: dict[tuple[str, tuple[int, ...]], Function] = {}
        self._exchanges: dict[str, str | None] = {}

    def read(self) -> IfrtProgram:
        main = _main(self._module.body)
        block = main.regions[0].blocks[0]
        attributes = _dictionaries(main, "arg_attrs", len(block.arguments))
        inputs = [self._define(argument) for argument in block.arguments]
        donated = {value for value in inputs if "ifrt.donated" in attributes[value]}
        results: list[int] = []
        for operation in block.operations:
            if operation.operation.name == "func.return":
                results = [self._values[value] for value in operation.operands]
            else:
                self._read_node(operation.operation)
        nodes = list(self._nodes.values())
        name = symbol(self._module.operation)
        return IfrtProgram(name, self._types, len(inputs), donated, nodes, results)

    def _define(self, value: Any) -> int:
        number = self._values[value] = len(self._types)
        self._types.append(_array(str(value.type)))
        return number

    def _read_node(self, operation: Any) -> None:
        sparse = self._sparse(operation)
        known = {
            "ifrt.Call": self._call if sparse is None else _nothing,
            "ifrt.CopyArrays": _move,
            "ifrt.Reshard": _move,
        }
        if operation.name not in known:
            raise RefusedError(
                f"UNIMPLEMENTED: the program has an operation {operation.name}; "
                f"known are {', '.join(known)}"
            )
        function, donated = known[operation.name](operation)
        args, after = [], []
        for operand in operation.operands:
            if str(operand.type) == CONTROL_TYPE:
                after.append(self._nodes[operand.owner])
            else:
                args.append(self._values[operand])
        made = [value for value in operation.results if str(value.type) != CONTROL_TYPE]
        results = [self._define(value) for value in made]
        self._nodes[operation] = IfrtNode(function, args, results, donated, after, sparse)

    def _sparse(self, operation: Any) -> str | None:
        """Returns the exchange that a call is, if its function consists of one; else None."""
        if operation.name != "ifrt.Call":
            return None
        callee = _callee(operation)
        if callee not in self._exchanges:
            self._exchanges[callee] = _described(self._modules[callee])
        return self._exchanges[callee]

    def _call(self, operation: Any) -> tuple[Function, list[int]]:
        attributes = operation.attributes
        callee = _callee(operation)
        devices = tuple(_numbers(attributes["devices"]))
        key = (callee, devices)
        if key not in self._functions:
            twins = sum(1 for other, _ in self._functions if other == callee)
            name = callee if twins == 0 else f"{callee}:{twins}"
            self._functions[key] = self._function(name, callee, devices, attributes)
        donated = set(_numbers(attributes["donated_input_indices"]))
        if "io_aliases" in attributes:
            donated |= {_numbers(pair)[0] for pair in ir.ArrayAttr(attributes["io_aliases"])}
        return self._functions[key], sorted(donated)

    def _function(
        self, name: str, callee: str, devices: tuple[int, ...], attributes: Any
    ) -> Function:
        options = []
        if "ifrt.compile_options_key" in attributes:
            options.append(ir.StringAttr(attributes["ifrt.compile_options_key"]).value)
        if "ifrt.mesh_name" in attributes:
            mesh = ir.StringAttr(attributes["ifrt.mesh_name"]).value
            options.append(f"{callee}_mesh_{mesh}")
        module = ir.Module.parse(self._modules[callee].operation.get_asm(binary=True))
        return Function(name, devices, [*options, callee], module)


def _callee(operation: Any) -> str:
    return str(operation.attributes["callee"]).split("::")[0].removeprefix("@").strip('"')


def _described(module: Any) -> str | None:
    """Returns the sparse exchange that a function is, as the controller reads it; else None."""
    main = _main(module.regions[0].blocks[0])
    call, *_ = main.regions[0].blocks[0].operations
    if call.operation.name != "stablehlo.custom_call":
        return None
    if ir.StringAttr(call.attributes["call_target_name"]).value != SPARSE_CALL:
        return None
    text = ir.StringAttr(call.attributes["backend_config"]).value
    if not SPARSE.fullmatch(text):
        raise RefusedError(f"INVALID_ARGUMENT: {text!r} is no sparse exchange")
    return text


def _main(body: Any) -> Any:
    """Returns the entry function of a module, given its body."""
    return next(
        operation
        for operation in body.operations
        if operation.operation.name == "func.func" and symbol(operation) == "main"
    )


def _nothing(_: Any) -> tuple[None, list[int]]:
    """Returns no function and no donated arguments, for an exchange."""
    return None, []


def _move(operation: Any) -> tuple[None, list[int]]:
    attributes = operation.attributes
    if "donated" not in attributes or not ir.BoolAttr(attributes["donated"]).value:
        return None, []
    return None, list(range(len(operation.operands)))


def symbol(operation: Any) -> str:
    """Returns the name of a function or module; ``main`` if it has none."""
    attributes = operation.attributes
    return ir.StringAttr(attributes["sym_name"]).value if "sym_name" in attributes else "main"


def _dictionaries(function: Any, name: str, count: int) -> list[Any]:
    if name not in function.attributes:
        return [{}] * count
    return [ir.DictAttr(given) for given in ir.ArrayAttr(function.attributes[name])]


def _numbers(attribute: Any) -> list[int]:
    """Returns the numbers of an array attribute of any class."""
    inside = str(attribute).partition("[")[2] or str(attribute).partition(":")[2]
    return [int(number) for number in re.findall(r"\d+", inside.rstrip(">]"))]


def quoted(name: str) -> str:
    """Returns a name in the quoting that the controller reads."""
    if name and set(name) <= PLAIN_NAME:
        return f"@{name}"
    special = {*b'"\\/', *range(33)}
    raw = b"".join(
        f"\\{byte:02x}".encode() if byte in special else bytes([byte]) for byte in name.encode()
    )
    return f'@"{raw.decode()}"'


def _values(values: list[int], numbers: dict[int, int]) -> str:
    return f"({', '.join(f'%{numbers[value]}' for value in values)})"


def _bracketed(numbers: list[int]) -> str:
    return f"[{','.join(map(str, numbers))}]"


def _array(kind: str) -> str:
    """Returns an array's type in the syntax of the program's text."""
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
        words.append(f"in {quoted(memory)}")
    words.append(f"on {_bracketed([int(device) for device in devices.split(',')])}")
    return " ".join(words)


def _tiles(counts: list[int], permutation: list[int], axes: list[int]) -> list[int]:
    """Returns the tile of each device position of IFRT's ``ShardingParam``.

    Args:
        counts: tiles along each axis of the array.
        permutation: axes of the device grid, the fastest varying first.
        axes: sizes of the device grid, the first varying fastest in the device list.
    """
    strides = [1]
    for size in axes[:-1]:
        strides.append(strides[-1] * size)
    order = [0]
    for axis in permutation:  # each further axis varies more slowly than the previous ones
        order = [step * strides[axis] + inner for step in range(axes[axis]) for inner in order]
    tiles = 1
    for count in counts:
        tiles *= count
    copies = len(order) // tiles
    tile_of = [0] * len(order)
    for place, position in enumerate(order):
        tile_of[position] = place // copies
    return tile_of
