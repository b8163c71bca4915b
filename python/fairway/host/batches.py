"""Fuses successive small calls on the same devices into one launch.

A launch costs its host several microseconds, and a collective wakes a thread for each device;
smaller work is better done in one launch. Barriers separate the functions, so that the compiler
cannot fuse across them and every value is the same as if they had been launched one by one.

Source: PATHWAYS §5.1, which names batching several small computations as what would remove most of
its overhead.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from jaxlib.mlir import ir

from fairway.host.backend import BORDERS
from fairway.host.ifrt_ir import Function, IfrtNode, IfrtProgram, symbol

__all__ = ["batch"]

SMALL_WORK = 1 << 16
"""Limit for a small function: elements of results, and multiplications in products.

Assumed: about what one core does in the time that a launch takes.
"""
BATCH_OPERATIONS = 4096
"""Most operations of one batch; compilers take long over more."""
LONELY = {"stablehlo.while", "stablehlo.custom_call", "stablehlo.optimization_barrier"}
"""Operations that keep a function out of batches.

The work of the first two is unknown. A function's own barriers are removed before XLA
fuses, unlike those of a batch, so that the function would be compiled differently in a batch.
"""


@dataclasses.dataclass(frozen=True)
class _Code:
    """What batching needs to know of a function.

    Attributes:
        main: its entry function.
        others: functions that it calls.
        meshes: definitions of its meshes, by name.
        operations: number of its operations.
    """

    main: Any
    others: list[Any]
    meshes: dict[str, str]
    operations: int


def batch(program: IfrtProgram, context: Any) -> IfrtProgram:
    """Returns the same program with each sequence of small calls replaced by one call.

    Args:
        program: the program, which is not modified.
        context: the MLIR context of the program.
    """
    with context:
        return _Batcher(program).run()


class _Batcher:
    def __init__(self, program: IfrtProgram) -> None:
        self._program = program
        self._codes = {function: _code(function) for function in program.functions()}
        self._made: dict[Any, Function] = {}
        self._replaced: dict[IfrtNode, IfrtNode] = {}

    def run(self) -> IfrtProgram:
        nodes = []
        for group in self._groups():
            # A copy: the program that was read stays unchanged.
            node = dataclasses.replace(group[0]) if len(group) == 1 else self._join(group)
            self._replaced |= dict.fromkeys(group, node)
            nodes.append(node)
        for node in nodes:
            after = dict.fromkeys(self._replaced[earlier] for earlier in node.after)
            after.pop(node, None)
            node.after = list(after)
        return dataclasses.replace(self._program, nodes=nodes)

    def _groups(self) -> Iterator[list[IfrtNode]]:
        group: list[IfrtNode] = []
        for node in self._program.nodes:
            if group and not self._fits(group, node):
                yield group
                group = []
            group.append(node)
        if group:
            yield group

    def _fits(self, group: list[IfrtNode], node: IfrtNode) -> bool:
        first = group[0].function
        if first is None or node.function is None or first.devices != node.function.devices:
            return False
        codes = [self._codes[member.function] for member in group if member.function]
        code = self._codes[node.function]
        if code is None or None in codes:
            return False
        known = [other for other in codes if other is not None]
        meshes = {name: text for other in known for name, text in other.meshes.items()}
        agree = all(meshes.get(name, text) == text for name, text in code.meshes.items())
        return agree and sum(c.operations for c in known) + code.operations <= BATCH_OPERATIONS

    def _join(self, group: list[IfrtNode]) -> IfrtNode:
        """Returns one node that replaces the nodes of a group."""
        made = {value for node in group for value in node.results}
        args = list(dict.fromkeys(v for node in group for v in node.args if v not in made))
        inside = set(group)
        wanted = set(self._program.results)
        for node in self._program.nodes:
            if node not in inside:
                wanted |= set(node.args)
        results = [value for node in group for value in node.results if value in wanted]
        given = {node.args[index] for node in group for index in node.donated} - made
        donated = [index for index, value in enumerate(args) if value in given]
        names = {value: f"%a{index}" for index, value in enumerate(args)}
        key = _shape(group, args, results, donated)
        if key not in self._made:
            self._made[key] = self._compose(group, names, results, donated)
        after = [earlier for node in group for earlier in node.after if earlier not in inside]
        return IfrtNode(self._made[key], args, results, donated, after)

    def _compose(
        self, group: list[IfrtNode], names: dict[int, str], results: list[int], donated: list[int]
    ) -> Function:
        functions = list(dict.fromkeys(node.function for node in group if node.function))
        codes = {f: code for f in functions if (code := self._codes[f]) is not None}
        text = _Composition(codes)
        arguments = text.arguments(group, names, donated)
        for node in group:
            text.call(node, names)
        kinds, returned = text.results(results, names)
        first = functions[0]
        name = f"batch_{len(self._made)}_of_{len(group)}_from_{first.name}"
        module = ir.Module.parse(
            f'module @"{name}" attributes {{mhlo.num_partitions = {len(first.devices)} : i32, '
            f"mhlo.num_replicas = 1 : i32, {BORDERS} = true}} {{\n{text.definitions()}\n"
            f"func.func public @main({arguments}) -> ({kinds}) {{\n"
            + "\n".join(text.lines)
            + f"\n{returned}\n}}\n}}"
        )
        return Function(name, first.devices, first.options, module)


class _Composition:
    """Builds the text of a batch.

    Attributes:
        lines: the calls.
    """

    def __init__(self, codes: dict[Function, _Code]) -> None:
        self.lines: list[str] = []
        self._codes = codes
        self._prefix = {function: f"f{index}" for index, function in enumerate(codes)}
        self._cuts: dict[int, str] = {}
        self._kinds: dict[int, str] = {}

    def definitions(self) -> str:
        """Returns the meshes and functions, the latter renamed to be unique."""
        meshes = {name: text for code in self._codes.values() for name, text in code.meshes.items()}
        parts = list(meshes.values())
        for function, code in self._codes.items():
            names = {symbol(other): f"{self._prefix[function]}_{symbol(other)}" for other in
                     (code.main, *code.others)}  # fmt: skip
            for original in (code.main, *code.others):
                clone = original.operation.clone()
                clone.attributes["sym_name"] = ir.StringAttr.get(names[symbol(original)])
                clone.attributes["sym_visibility"] = ir.StringAttr.get("private")
                for attribute in ("arg_attrs", "res_attrs"):
                    if attribute in clone.attributes:
                        del clone.attributes[attribute]
                _rename_calls(clone, names)
                parts.append(clone.get_asm(use_local_scope=True))
        return "\n".join(parts)

    def arguments(self, group: list[IfrtNode], names: dict[int, str], donated: list[int]) -> str:
        """Returns the parameters of the batch, sharded as in the first function that reads each."""
        for node in group:
            for value, kind, cut in self._given(node, "arg_attrs"):
                self._kinds.setdefault(value, kind)
                if value in names and cut:
                    self._cuts.setdefault(value, cut)
        parts = []
        for index, (value, name) in enumerate(names.items()):
            attributes = [f"sdy.sharding = {self._cuts[value]}"] if value in self._cuts else []
            attributes += ["jax.buffer_donor = true"] if index in donated else []
            given = f" {{{', '.join(attributes)}}}" if attributes else ""
            parts.append(f"{name}: {self._kinds[value]}{given}")
        return ", ".join(parts)

    def call(self, node: IfrtNode, names: dict[int, str]) -> None:
        """Adds a call of one function."""
        assert node.function is not None
        operands, kinds = [], []
        for value, kind, cut in self._given(node, "arg_attrs"):
            operand = names[value]
            if cut and self._cuts.get(value) != cut:
                operand = self._constrain(operand, cut, kind)
            operands.append(operand)
            kinds.append(kind)
        made = list(self._given(node, "res_attrs"))
        to = ", ".join(kind for _, kind, _ in made)
        number = len(self.lines)
        head = f"%r{number}:{len(made)} = " if made else ""
        name = f"{self._prefix[node.function]}_main"
        self.lines.append(
            f"{head}func.call @{name}({', '.join(operands)}) : ({', '.join(kinds)}) -> ({to})"
        )
        if not made:
            return
        parts = ", ".join(f"%r{number}#{index}" for index in range(len(made)))
        self.lines.append(f"%b{number}:{len(made)} = stablehlo.optimization_barrier {parts} : {to}")
        for index, (value, kind, cut) in enumerate(made):
            result = f"%b{number}#{index}"
            names[value] = self._constrain(result, cut, kind) if cut else result
            self._kinds[value] = kind
            if cut:
                self._cuts[value] = cut

    def results(self, results: list[int], names: dict[int, str]) -> tuple[str, str]:
        """Returns the result types of the batch, and its return statement."""
        parts = []
        for value in results:
            cut = self._cuts.get(value)
            given = f" {{sdy.sharding = {cut}}}" if cut else ""
            parts.append(f"{self._kinds[value]}{given}")
        kinds = ", ".join(self._kinds[value] for value in results)
        returned = ", ".join(names[value] for value in results)
        return ", ".join(parts), f"return {returned} : {kinds}" if results else "return"

    def _constrain(self, operand: str, cut: str, kind: str) -> str:
        name = f"%s{len(self.lines)}"
        where = cut.removeprefix("#sdy.sharding")
        self.lines.append(f"{name} = sdy.sharding_constraint {operand} {where} : {kind}")
        return name

    def _given(self, node: IfrtNode, attribute: str) -> Iterator[tuple[int, str, str]]:
        """Yields each argument or result of a node, its type, and its sharding in the function."""
        assert node.function is not None
        main = self._codes[node.function].main
        kind = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value)
        is_argument = attribute == "arg_attrs"
        kinds = kind.inputs if is_argument else kind.results
        given: list[Any] = [{}] * len(kinds)
        if attribute in main.attributes:
            given = [ir.DictAttr(one) for one in ir.ArrayAttr(main.attributes[attribute])]
        values = node.args if is_argument else node.results
        for value, tensor, attributes in zip(values, kinds, given, strict=True):
            cut = str(attributes["sdy.sharding"]) if "sdy.sharding" in attributes else ""
            yield value, str(tensor), cut


def _rename_calls(function: Any, names: dict[str, str]) -> None:
    def visit(operation: Any) -> Any:
        if operation.name == "func.call":
            callee = ir.FlatSymbolRefAttr(operation.attributes["callee"]).value
            operation.attributes["callee"] = ir.FlatSymbolRefAttr.get(names[callee])
        return ir.WalkResult.ADVANCE

    function.walk(visit)


def _shape(group: list[IfrtNode], args: list[int], results: list[int], donated: list[int]) -> Any:
    """Returns a key that is equal for groups that can use one function."""
    places = {value: index for index, value in enumerate(args)}
    calls = []
    for node in group:
        calls.append((node.function, tuple(places[value] for value in node.args)))
        for value in node.results:
            places[value] = len(places)
    return tuple(calls), tuple(places[value] for value in results), tuple(donated)


def _code(function: Function) -> _Code | None:
    """Returns what batching needs to know of a function; None if it cannot be batched."""
    main, others, meshes = None, [], {}
    for operation in function.module.body.operations:
        kind = operation.operation.name
        if kind == "sdy.mesh":
            meshes[symbol(operation)] = str(operation)
        elif kind != "func.func" or "mhlo.sharding" in str(operation.attributes):
            return None
        elif symbol(operation) == "main":
            main = operation
        else:
            others.append(operation)
    if main is None:
        return None
    work, operations = _work(function.module)
    return _Code(main, others, meshes, operations) if work <= SMALL_WORK else None


def _work(module: Any) -> tuple[float, int]:
    """Returns elements made plus multiplications in products, and the operation count."""
    work: float = 0
    operations = 0

    def visit(operation: Any) -> Any:
        nonlocal work, operations
        operations += 1
        if operation.name in LONELY:
            work = math.inf
        made = sum(_elements(value.type) for value in operation.results)
        if operation.name in ("stablehlo.dot_general", "stablehlo.convolution"):
            operands = [_elements(value.type) for value in operation.operands]
            made = max(made, int(math.sqrt(made * math.prod(operands))))
        work += made
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return work, operations


def _elements(kind: Any) -> int:
    if not isinstance(kind, ir.RankedTensorType):
        return 0
    return math.prod(ir.RankedTensorType(kind).shape)
