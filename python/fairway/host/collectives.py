"""Programs over several islands: nothing but collectives, run over the data plane.

XLA's collectives end at the border of an island. A program that names devices of several islands
is therefore read here, and run if it is one ``shard_map`` whose body is made of ``psum`` (and
``pmean``, ``pmax``, ``pmin``), ``all_gather``, ``all_to_all``, ``ppermute`` and ``psum_scatter``.
Anything else is refused with the operation that stands in the way.

Every host plans the whole exchange in the same way, so that both ends of a message agree on its
tag without a word. What several devices hold alike is sent once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy, stablehlo

from fairway import _native
from fairway.host.programs import ELEMENT_TYPES, Partition

__all__ = ["Exchange", "NotOnlyCollectivesError"]

Elements = np.ndarray[Any, Any]
Values = dict[int, Elements]
"""What each local device position holds of one value."""
Mesh = dict[str, int]
"""Sizes of a mesh's axes by name, major first."""

REDUCTIONS: dict[str, Callable[[Elements, Elements], Elements]] = {
    "stablehlo.add": np.add,
    "stablehlo.maximum": np.maximum,
    "stablehlo.minimum": np.minimum,
    "stablehlo.multiply": np.multiply,
    "stablehlo.and": np.bitwise_and,
    "stablehlo.or": np.bitwise_or,
}
SCALINGS: dict[str, Callable[[Elements, Any], Elements]] = {
    "stablehlo.divide": np.divide,
    "stablehlo.multiply": np.multiply,
}

RESHAPINGS = ("stablehlo.broadcast_in_dim", "stablehlo.convert")
"""What may be done to a constant on its way to a scaling."""


class NotOnlyCollectivesError(Exception):
    """A program does more than collectives."""


@dataclasses.dataclass(frozen=True)
class Message:
    """One transfer of a step: what ``source`` holds goes to ``host`` as message ``tag``.

    Attributes:
        tag: counted from the first tag of the run.
        sender: host that sends.
        host: host that receives.
        source: position whose value is sent, or the first position of a host's partial result.
        cut: which part of the value, as (axis, part, parts); none is all of it.
    """

    tag: int
    sender: int
    host: int
    source: int
    cut: tuple[int, int, int] | None = None


@dataclasses.dataclass(frozen=True)
class Step:
    """One operation of the body.

    Attributes:
        kind: ``reduce``, ``gather``, ``all_to_all``, ``permute`` or ``scale``.
        operand: number of the value it takes; the result gets the next free number.
        groups: positions that work together; for ``permute``, (source, target) pairs.
        combine: for ``reduce`` and ``scale``, what is done with two values.
        axes: for ``gather`` (axis,); ``all_to_all`` (split, concatenation); for a ``reduce`` whose
            result is scattered (axis,), else empty.
        factor: for ``scale``, the other operand.
        messages: what hosts send one another.
    """

    kind: str
    operand: int
    groups: tuple[tuple[int, ...], ...]
    combine: Callable[..., Elements] | None = None
    axes: tuple[int, ...] = ()
    factor: Any = None
    messages: tuple[Message, ...] = ()


class Exchange:
    """A program over several islands, ready to run on this host.

    Args:
        module: the program.
        owners: host of each device position.
        host: this host's number.

    Raises:
        NotOnlyCollectivesError: the program does more than collectives.
    """

    def __init__(self, module: Any, owners: list[int], host: int) -> None:
        self._owners = owners
        self._host = host
        self._meshes = _find_meshes(module)
        body, self.parameters, outputs = _find_body(module, self._meshes, len(owners))
        self._steps: list[Step] = []
        self._next_tag = 0
        numbers = {argument: index for index, argument in enumerate(body.arguments)}
        self._classes = [_classes(cut, len(owners)) for cut in self.parameters]
        constants: dict[Any, Any] = {}
        results: list[int] = []
        for operation in body.operations:
            name = operation.operation.name
            if name in ("sdy.return", "func.return"):
                results = [numbers[operand] for operand in operation.operands]
            elif name == "stablehlo.constant":
                constants[operation.results[0]] = _splat(operation)
            elif name in RESHAPINGS and operation.operands[0] in constants:
                constants[operation.results[0]] = constants[operation.operands[0]]
            else:
                self._add(operation, name, numbers, constants)
        self.outputs = [(number, *output) for number, output in zip(results, outputs, strict=True)]
        """Value, element type, shape and partition of each result."""

    @property
    def local(self) -> list[int]:
        """Device positions of this host."""
        return [position for position, owner in enumerate(self._owners) if owner == self._host]

    def run(
        self, plane: _native.DataPlane, arguments: list[Values], first_tag: int, timeout_s: float
    ) -> list[Values]:
        """Runs the program; returns all results.

        Args:
            plane: this host's end of the data plane.
            arguments: what each local position holds of each argument.
            first_tag: first tag of this run; the same on all hosts.
            timeout_s: how long a message may be under way.
        """
        values = list(arguments)
        for step in self._steps:
            run = getattr(self, f"_run_{step.kind}")
            post = _Post(plane, step, self._host, first_tag, timeout_s)
            values.append(run(step, values[step.operand], post))
        return [values[number] for number, *_ in self.outputs]

    def abandon(self, plane: _native.DataPlane, first_tag: int, error: str) -> None:
        """Tells the others that this host's messages of a run will not come."""
        for step in self._steps:
            for message in step.messages:
                if message.sender == self._host:
                    plane.send_failure(message.host, first_tag + message.tag, error)

    # Planning

    def _add(
        self, operation: Any, name: str, numbers: dict[Any, int], constants: dict[Any, Any]
    ) -> None:
        if name in SCALINGS and operation.operands[1] in constants:
            operand = numbers[operation.operands[0]]
            factor = constants[operation.operands[1]]
            step = Step("scale", operand, (), SCALINGS[name], factor=factor)
            self._append(step, operation, numbers, self._classes[operand])
            return
        if name not in PLANNERS or operation.operands[0] not in numbers:
            raise NotOnlyCollectivesError(f"it contains {name}")
        operand = numbers[operation.operands[0]]
        step, classes = PLANNERS[name](self, operation, operand)
        self._append(step, operation, numbers, classes)

    def _append(
        self, step: Step, operation: Any, numbers: dict[Any, int], classes: list[Any]
    ) -> None:
        self._steps.append(step)
        numbers[operation.results[0]] = len(self._classes)
        self._classes.append(classes)

    def _message(
        self, sender: int, host: int, source: int, cut: tuple[int, int, int] | None = None
    ) -> Message:
        self._next_tag += 1
        return Message(self._next_tag - 1, sender, host, source, cut)

    def _groups(self, operation: Any) -> tuple[tuple[int, ...], ...]:
        """Positions that work together, written out or given as axes of a mesh (jax 0.11.2)."""
        given = operation.attributes["replica_groups"]
        if not stablehlo.ReplicaGroupMeshAxesAttr.isinstance(given):
            return _rows(given)
        given = stablehlo.ReplicaGroupMeshAxesAttr(given)
        mesh = _mesh(given.mesh, self._meshes)
        axes = [_axis_name(stablehlo.AxisRefAttr(axis)) for axis in given.axes]
        return _groups_along(mesh, axes, len(self._owners))

    def _hosts(self, group: tuple[int, ...]) -> list[int]:
        return list(dict.fromkeys(self._owners[position] for position in group))

    def _distinct(self, operand: int, groups: tuple[tuple[int, ...], ...]) -> Iterator[Any]:
        """Groups that no earlier group repeats: same contents, in the same places, same hosts."""
        seen = set()
        for group in groups:
            contents = tuple(self._classes[operand][position] for position in group)
            key = (contents, tuple(self._owners[position] for position in group))
            if key not in seen:
                seen.add(key)
                yield group

    def _plan_reduce(self, operation: Any, operand: int) -> tuple[Step, list[Any]]:
        combine = _reduction(operation)
        groups = self._groups(operation)
        messages = [
            self._message(sender, host, _first(group, sender, self._owners))
            for group in self._distinct(operand, groups)
            for sender in self._hosts(group)
            for host in self._hosts(group)
            if sender != host
        ]
        axes: tuple[int, ...] = ()
        if "scatter_dimension" in operation.attributes:
            axes = (_integer(operation, "scatter_dimension"),)
        classes: list[Any] = [None] * len(self._owners)
        number = len(self._classes)
        for group in groups:
            contents = tuple(self._classes[operand][position] for position in group)
            for index, position in enumerate(group):
                classes[position] = (number, contents, index if axes else 0)
        step = Step("reduce", operand, groups, combine, axes, messages=tuple(messages))
        return step, classes

    def _plan_gather(self, operation: Any, operand: int) -> tuple[Step, list[Any]]:
        groups = self._groups(operation)
        messages = self._spread(operand, groups)
        step = Step(
            "gather",
            operand,
            groups,
            axes=(_integer(operation, "all_gather_dim"),),
            messages=tuple(messages),
        )
        classes: list[Any] = [None] * len(self._owners)
        number = len(self._classes)
        for group in groups:
            contents = tuple(self._classes[operand][position] for position in group)
            for position in group:
                classes[position] = (number, contents)
        return step, classes

    def _spread(self, operand: int, groups: tuple[tuple[int, ...], ...]) -> list[Message]:
        """Messages that bring what each member holds to each host of its group, once."""
        messages = []
        sent = set()
        for group in groups:
            for source in group:
                for host in self._hosts(group):
                    key = (self._classes[operand][source], self._owners[source], host)
                    if self._owners[source] != host and key not in sent:
                        sent.add(key)
                        messages.append(self._message(self._owners[source], host, source))
        return messages

    def _plan_all_to_all(self, operation: Any, operand: int) -> tuple[Step, list[Any]]:
        groups = self._groups(operation)
        split = _integer(operation, "split_dimension")
        axes = (split, _integer(operation, "concat_dimension"))
        messages = [
            self._message(
                self._owners[source], self._owners[target], source, (split, index, len(group))
            )
            for group in groups
            for source in group
            for index, target in enumerate(group)
            if self._owners[source] != self._owners[target]
        ]
        number = len(self._classes)
        classes = [(number, position) for position in range(len(self._owners))]
        step = Step("all_to_all", operand, groups, axes=axes, messages=tuple(messages))
        return step, classes

    def _plan_permute(self, operation: Any, operand: int) -> tuple[Step, list[Any]]:
        pairs = _rows(operation.attributes["source_target_pairs"])
        messages = [
            self._message(self._owners[source], self._owners[target], source, (0, target, -1))
            for source, target in pairs
            if self._owners[source] != self._owners[target]
        ]
        number = len(self._classes)
        classes = [(number, position) for position in range(len(self._owners))]
        return Step("permute", operand, pairs, messages=tuple(messages)), classes

    # Running

    def _run_scale(self, step: Step, operand: Values, post: _Post) -> Values:
        assert step.combine is not None
        return {
            position: step.combine(held, np.asarray(step.factor, held.dtype)).astype(held.dtype)
            for position, held in operand.items()
        }

    def _run_reduce(self, step: Step, operand: Values, post: _Post) -> Values:
        assert step.combine is not None
        mine = [group for group in step.groups if any(p in operand for p in group)]
        partial: dict[int, Elements] = {}
        for group in mine:
            members = [operand[position] for position in group if position in operand]
            total = members[0]
            for other in members[1:]:
                total = step.combine(total, other)
            partial[_first(group, self._host, self._owners)] = total
        post.send(partial)
        arrived = post.receive(next(iter(operand.values())).dtype)
        totals: dict[Any, Elements] = {}
        result: Values = {}
        for group in mine:
            contents = tuple(self._classes[step.operand][position] for position in group)
            key = (contents, tuple(self._owners[position] for position in group))
            if key not in totals:
                totals[key] = self._total(step, group, partial, arrived)
            for index, position in enumerate(group):
                if position in operand:
                    total = totals[key]
                    if step.axes:
                        total = np.split(total, len(group), step.axes[0])[index]
                    result[position] = total
        return result

    def _total(
        self,
        step: Step,
        group: tuple[int, ...],
        partial: dict[int, Elements],
        arrived: dict[tuple[int, Any], Elements],
    ) -> Elements:
        """Partial results combined in the order of hosts, which is the same everywhere."""
        assert step.combine is not None
        total: Elements | None = None
        for host in self._hosts(group):
            first = _first(group, host, self._owners)
            part = partial[first] if host == self._host else arrived[first, None]
            part = part.reshape(partial[_first(group, self._host, self._owners)].shape)
            total = part if total is None else step.combine(total, part)
        assert total is not None
        return total

    def _run_gather(self, step: Step, operand: Values, post: _Post) -> Values:
        post.send(operand)
        sample = next(iter(operand.values()))
        arrived = post.receive(sample.dtype)
        by_class = {
            (self._classes[step.operand][source], self._owners[source]): elements
            for (source, _), elements in arrived.items()
        }
        gathered: dict[tuple[int, ...], Elements] = {}
        result: Values = {}
        for group in step.groups:
            for position in group:
                if position not in operand:
                    continue
                if group not in gathered:
                    parts = [
                        operand[source]
                        if source in operand
                        else by_class[
                            self._classes[step.operand][source], self._owners[source]
                        ].reshape(sample.shape)
                        for source in group
                    ]
                    gathered[group] = np.concatenate(parts, step.axes[0])
                result[position] = gathered[group]
        return result

    def _run_all_to_all(self, step: Step, operand: Values, post: _Post) -> Values:
        split, concatenation = step.axes
        post.send(operand)
        sample = next(iter(operand.values()))
        arrived = post.receive(sample.dtype)
        result: Values = {}
        for group in step.groups:
            shape = list(sample.shape)
            shape[split] //= len(group)
            for index, position in enumerate(group):
                if position not in operand:
                    continue
                parts = [
                    np.split(operand[source], len(group), split)[index]
                    if source in operand
                    else arrived[source, (split, index, len(group))].reshape(shape)
                    for source in group
                ]
                result[position] = np.concatenate(parts, concatenation)
        return result

    def _run_permute(self, step: Step, operand: Values, post: _Post) -> Values:
        post.send(operand)
        sample = next(iter(operand.values()))
        arrived = post.receive(sample.dtype)
        result = {position: np.zeros_like(held) for position, held in operand.items()}
        for source, target in step.groups:
            if target not in operand:
                continue
            if source in operand:
                result[target] = operand[source]
            else:
                result[target] = arrived[source, (0, target, -1)].reshape(sample.shape)
        return result


class _Post:
    """Sends and receives the messages of one step on one host."""

    def __init__(
        self, plane: _native.DataPlane, step: Step, host: int, first_tag: int, timeout_s: float
    ) -> None:
        self._plane = plane
        self._host = host
        self._first = first_tag
        self._timeout_s = timeout_s
        self._out = [message for message in step.messages if message.sender == host]
        self._in = [message for message in step.messages if message.host == host]
        for message in self._in:
            plane.expect(first_tag + message.tag, message.sender)

    def send(self, held: Values) -> None:
        """Sends this host's messages."""
        for message in self._out:
            elements = held[message.source]
            if message.cut is not None and message.cut[2] > 0:
                axis, part, parts = message.cut
                elements = np.split(elements, parts, axis)[part]
            data = np.ascontiguousarray(elements).reshape(-1).view(np.uint8)
            self._plane.send(message.host, self._first + message.tag, data.data)

    def receive(self, dtype: np.dtype[Any]) -> dict[tuple[int, Any], Elements]:
        """Waits for the messages to this host; returns flat elements by source and cut."""
        return {
            (message.source, message.cut): np.frombuffer(
                memoryview(self._plane.take(self._first + message.tag, self._timeout_s)), dtype
            )
            for message in self._in
        }


PLANNERS: dict[str, Callable[..., tuple[Step, list[Any]]]] = {
    "stablehlo.all_reduce": Exchange._plan_reduce,
    "stablehlo.reduce_scatter": Exchange._plan_reduce,
    "stablehlo.all_gather": Exchange._plan_gather,
    "stablehlo.all_to_all": Exchange._plan_all_to_all,
    "stablehlo.collective_permute": Exchange._plan_permute,
}


def _find_meshes(module: Any) -> dict[str, Mesh]:
    """The meshes that a program names."""
    named = {
        ir.StringAttr(operation.attributes["sym_name"]).value: operation.attributes["mesh"]
        for operation in module.body.operations
        if operation.operation.name == "sdy.mesh"
    }
    spelled = _frontend_attribute(module.operation, "xla.sdy.meshes")
    named.update({one.name: one.attr for one in ir.DictAttr(spelled)} if spelled else {})
    meshes = {}
    for name, mesh in named.items():
        mesh = sdy.MeshAttr(mesh)
        if list(mesh.device_ids):
            raise NotOnlyCollectivesError("its mesh permutes the devices")
        axes = [sdy.MeshAxisAttr(axis) for axis in mesh.axes]
        meshes[name] = {axis.name: axis.size for axis in axes}
    return meshes


def _frontend_attribute(operation: Any, name: str) -> Any:
    """An attribute that clients up to jaxlib 0.9 write as text, or none."""
    if "mhlo.frontend_attributes" not in operation.attributes:
        return None
    given = ir.DictAttr(operation.attributes["mhlo.frontend_attributes"])
    if name not in given:
        return None
    return ir.Attribute.parse(ir.StringAttr(given[name]).value, operation.context)


def _mesh(given: Any, meshes: dict[str, Mesh]) -> Mesh:
    """The mesh that an attribute names or spells out."""
    if isinstance(given, ir.FlatSymbolRefAttr):
        return meshes[given.value]
    if stablehlo.MeshAttr.isinstance(given):
        mesh = stablehlo.MeshAttr(given)
        if mesh.device_ids is None:
            axes = [stablehlo.MeshAxisAttr(axis) for axis in mesh.axes]
            return {axis.name: axis.size for axis in axes}
    raise NotOnlyCollectivesError(f"it uses the mesh {given}")


def _axis_name(axis: Any) -> str:
    if axis.sub_axis_info is not None:
        raise NotOnlyCollectivesError(f"it uses a part of a mesh axis, {axis}")
    return str(axis.name)


def _groups_along(mesh: Mesh, axes: list[str], count: int) -> tuple[tuple[int, ...], ...]:
    """Positions that differ only along ``axes``, of which the first is the major one.

    >>> _groups_along({"island": 2, "x": 3}, ["island"], 6)
    ((0, 3), (1, 4), (2, 5))
    """
    names = list(mesh)
    along = [names.index(name) for name in axes]
    apart = [axis for axis in range(len(names)) if axis not in along]
    positions = _positions(mesh, count).transpose(*apart, *along)
    width = int(np.prod([mesh[name] for name in axes], dtype=np.int64))
    return tuple(tuple(int(position) for position in row) for row in positions.reshape(-1, width))


def _positions(mesh: Mesh, count: int) -> Elements:
    """The device positions in the shape of a mesh."""
    sizes = tuple(mesh.values())
    if int(np.prod(sizes, dtype=np.int64)) != count:
        raise NotOnlyCollectivesError("its mesh does not cover its devices")
    return np.arange(count).reshape(sizes)


MANUAL = ["sdy.manual_computation", "func.return"]
"""What a program that is one shard_map consists of."""
MANUAL_BEFORE_0_10 = ["stablehlo.custom_call", "func.call", "stablehlo.custom_call", "func.return"]
"""The same from clients up to jaxlib 0.9, with the body in a function of its own."""


def _find_body(
    module: Any, meshes: dict[str, Mesh], count: int
) -> tuple[Any, list[Partition], list[Any]]:
    """The body of the one shard_map, the partitions of its parameters, and its results."""
    functions = {
        ir.StringAttr(operation.attributes["sym_name"]).value: operation.regions[0].blocks[0]
        for operation in module.body.operations
        if operation.operation.name == "func.func"
    }
    main = functions["main"]
    operations = list(main.operations)
    names = [operation.operation.name for operation in operations]
    if names == MANUAL:
        first = last = operations[0]
        body = first.regions[0].blocks[0]
        shardings = first.attributes["in_shardings"], first.attributes["out_shardings"]
    elif names == MANUAL_BEFORE_0_10:
        first, call, last, _ = operations
        body = functions[ir.FlatSymbolRefAttr(call.attributes["callee"]).value]
        shardings = (
            _frontend_attribute(first, "xla.sdy.in_shardings"),
            _frontend_attribute(last, "xla.sdy.out_shardings"),
        )
        known = all(sharding is not None for sharding in shardings)
        if not known or list(call.operands) != list(first.results):
            raise NotOnlyCollectivesError("it contains stablehlo.custom_call outside a shard_map")
    else:
        other = next((name for name in names if name not in MANUAL), "nothing")
        raise NotOnlyCollectivesError(f"it contains {other} outside a shard_map")
    if list(first.operands) != list(main.arguments) or list(operations[-1].operands) != list(
        last.results
    ):
        raise NotOnlyCollectivesError("it reorders arguments or results around its shard_map")
    given, made = (_partitions(sharding, meshes, count) for sharding in shardings)
    outputs = []
    for result, cut in zip(last.results, made, strict=True):
        tensor = ir.RankedTensorType(result.type)
        outputs.append((ELEMENT_TYPES[str(tensor.element_type)], tuple(tensor.shape), cut))
    return body, given, outputs


def _partitions(attribute: Any, meshes: dict[str, Mesh], count: int) -> list[Partition]:
    """How each value is cut, from the mesh axes that its dimensions name."""
    given = sdy.TensorShardingPerValueAttr(attribute).shardings
    return [_partition(sdy.TensorShardingAttr(one), meshes, count) for one in given]


def _partition(sharding: Any, meshes: dict[str, Mesh], count: int) -> Partition:
    mesh = _mesh(sharding.mesh_or_ref, meshes)
    coordinates = dict(zip(mesh, np.indices(_positions(mesh, count).shape), strict=True))
    counts = []
    tile = np.zeros(count, np.int64)
    for dimension in map(sdy.DimensionShardingAttr, sharding.dimension_shardings):
        tiles = 1
        for name in [_axis_name(sdy.AxisRefAttr(axis)) for axis in dimension.axes]:
            tile = tile * mesh[name] + coordinates[name].reshape(-1)
            tiles *= mesh[name]
        counts.append(tiles)
    if all(tiles == 1 for tiles in counts):
        return None
    return counts, [int(position) for position in tile]


def _classes(cut: Partition, count: int) -> list[Any]:
    """Equal entries for positions that hold the same elements."""
    return [0] * count if cut is None else list(cut[1])


def _first(group: tuple[int, ...], host: int, owners: list[int]) -> int:
    """The first position of a host in a group."""
    return next(position for position in group if owners[position] == host)


def _rows(attribute: Any) -> tuple[tuple[int, ...], ...]:
    table = np.array(ir.DenseIntElementsAttr(attribute))
    return tuple(tuple(int(position) for position in row if position >= 0) for row in table)


def _integer(operation: Any, name: str) -> int:
    return int(ir.IntegerAttr(operation.attributes[name]).value)


def _splat(operation: Any) -> Any:
    value = ir.DenseElementsAttr(operation.attributes["value"])
    if not value.is_splat:
        raise NotOnlyCollectivesError("it contains a constant array")
    number = value.get_splat_value()
    kind = ir.FloatAttr if isinstance(number.type, ir.FloatType) else ir.IntegerAttr
    return kind(number).value


def _reduction(operation: Any) -> Callable[[Elements, Elements], Elements]:
    body = [inner.operation.name for inner in operation.regions[0].blocks[0].operations]
    if len(operation.operands) == 1 and len(body) == 2 and body[0] in REDUCTIONS:
        return REDUCTIONS[body[0]]
    raise NotOnlyCollectivesError(f"it reduces by {body[0]}")
