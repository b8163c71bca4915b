"""Programs over several islands: collectives only, run by teams of hosts.

XLA's collectives are limited to one island. A program that names devices of several islands
is therefore interpreted here, if it is one ``shard_map`` whose body consists of ``psum`` (and
``pmean``, ``pmax``, ``pmin``), ``all_gather``, ``all_to_all``, ``ppermute`` and ``psum_scatter``.
Any other program is rejected with the operation that is not supported.

Each host first combines the shards of its own devices; one collective then covers all groups
that have the same hosts. Contents that several devices replicate are sent once. Every host plans
its part deterministically, so all issue the same collectives in one order without communicating.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from fairway.host import messages
from fairway.host.bundles import Bundle, Values
from fairway.host.elements import dtype_of
from fairway.host.partition import Crossing
from fairway.host.shard_maps import (
    REDUCTIONS,
    NotOnlyCollectivesError,
    content_classes,
    find_body,
    find_meshes,
    integer_attribute,
    operand_elements,
    read_groups,
    read_rows,
    reduction_of,
    splat_value,
)
from fairway.host.teams import Carry, Cut, Elements, Piece, Turn

__all__ = ["LoweredExchange"]

Group = tuple[int, ...]
"""Device positions that communicate."""
Ended = Callable[[int, Sequence[Carry]], None]
"""Takes when collectives began, by the monotonic clock, and which these are."""
Hosts = tuple[int, ...]
COMBINED = {
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64"),
}
"""Element types that teams can reduce."""
SCALINGS: dict[str, Callable[[Elements, Any], Elements]] = {
    "stablehlo.divide": np.divide,
    "stablehlo.multiply": np.multiply,
}

RESHAPINGS = ("stablehlo.broadcast_in_dim", "stablehlo.convert")
"""Operations on a constant that is an operand of a scaling."""


@dataclasses.dataclass(frozen=True)
class CollectiveStep:
    """One operation of the body.

    Attributes:
        kind: ``reduce``, ``gather``, ``all_to_all``, ``permute`` or ``scale``.
        operand: number of its operand value; the result gets the next free number.
        groups: positions that communicate; for ``permute``, (source, target) pairs.
        combine: for ``reduce`` and ``scale``, the operation on two values.
        axes: for ``gather`` (axis,); ``all_to_all`` (split, concatenation); for a ``reduce`` whose
            result is scattered (axis,), else empty.
        factor: for ``scale``, the other operand.
        carries: collectives of this host's teams.
    """

    kind: str
    operand: int
    groups: tuple[Group, ...]
    combine: Callable[..., Elements] | None = None
    axes: tuple[int, ...] = ()
    factor: Any = None
    carries: tuple[Carry, ...] = ()


class LoweredExchange:
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
        self._steps: list[CollectiveStep] = []
        self._bundle: Bundle | None = None
        if module is not None:
            self._read(module)

    @classmethod
    def of(
        cls,
        kind: str,
        owners: list[int],
        host: int,
        contents: list[Any],
        groups: Sequence[Group],
        elements: tuple[np.dtype[Any], int],
    ) -> LoweredExchange:
        """Returns one collective over groups of positions.

        Args:
            kind: ``reduce``, ``gather`` or ``scatter``, the latter two along the first axis.
            owners: host of each position.
            host: this host's number.
            contents: equal entries for positions with equal contents.
            groups: positions that communicate.
            elements: element type, and number of elements of each position.
        """
        exchange = cls(None, owners, host)
        exchange._classes = [contents]
        if kind == "gather":
            step, _ = exchange._gather(0, tuple(groups), 0, elements)
        else:
            axes = (0,) if kind == "scatter" else ()
            total = REDUCTIONS["stablehlo.add"]
            step, _ = exchange._reduce(0, tuple(groups), axes, total, elements)
        exchange._steps = [step]
        exchange.outputs = [(1, *elements, None)]
        return exchange

    @classmethod
    def of_crossing(cls, crossing: Crossing, owners: list[int], host: int) -> LoweredExchange:
        """Returns one collective of a program that was partitioned.

        Raises:
            ValueError: it is malformed.
        """
        groups = tuple(tuple(group) for group in crossing.groups)
        positions = sorted(position for group in groups for position in group)
        count = len(groups[0]) if groups else 0
        is_each = positions == list(range(len(owners)))
        if crossing.kind == "permute":
            is_each = set(positions) <= set(range(len(owners)))
        if (
            not is_each
            or len(crossing.contents) != len(owners)
            or (crossing.kind != "reduce" and any(len(group) != count for group in groups))
        ):
            raise ValueError("its groups are not all of its devices, each once")
        kind = dtype_of(crossing.dtype)
        exchange = cls(None, owners, host)
        exchange._classes = [list(crossing.contents)]
        exchange.parameters = [None] * len(crossing.shapes)
        exchange._bundle = bundle = Bundle(crossing, count)
        held = (kind, bundle.elements)
        match crossing.kind:
            case "gather":
                step, _ = exchange._gather(0, groups, 0, held)
            case "all_to_all":
                step, _ = exchange._all_to_all(0, groups, (0, 0), held)
            case "permute":
                step, _ = exchange._permute(0, groups, held)
            case "reduce" | "scatter":
                axes = (0,) if crossing.kind == "scatter" else ()
                reduction = REDUCTIONS[f"stablehlo.{crossing.reduction}"]
                step, _ = exchange._reduce(0, groups, axes, reduction, held)
            case _:
                raise ValueError(f"it is a {crossing.kind}")
        exchange._steps = [step]
        exchange.outputs = [(1, crossing.dtype, shape, None) for shape in bundle.results]
        return exchange

    def _read(self, module: Any) -> None:
        owners = self._owners
        self._meshes = find_meshes(module)
        body, self.parameters, outputs = find_body(module, self._meshes, len(owners))
        numbers = {argument: index for index, argument in enumerate(body.arguments)}
        self._classes = [content_classes(cut, len(owners)) for cut in self.parameters]
        constants: dict[Any, Any] = {}
        results: list[int] = []
        for operation in body.operations:
            name = operation.operation.name
            if name in ("sdy.return", "func.return"):
                if any(operand not in numbers for operand in operation.operands):
                    raise NotOnlyCollectivesError("it returns a constant")
                results = [numbers[operand] for operand in operation.operands]
            elif name == "stablehlo.constant":
                constants[operation.results[0]] = splat_value(operation)
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

    @functools.cached_property
    def carries(self) -> list[Carry]:
        """Collectives of this host's teams, in order."""
        return [carry for step in self._steps for carry in step.carries]

    def host_collectives(self) -> list[messages.HostCollective]:
        """Returns the collectives of this host's teams, as they are reported."""
        return [
            messages.HostCollective(number, carry.text([*map(self._owners.index, carry.hosts)]))
            for number, step in enumerate(self._steps)
            for carry in step.carries
        ]

    def run(self, turn: Turn, arguments: list[Values], ended: Ended) -> list[Values]:
        """Runs the program; returns all results.

        Args:
            turn: runs :attr:`carries`, one after another.
            arguments: the part of each argument on each local position.
            ended: called after each operation with collectives.
        """
        values = list(arguments)
        if self._bundle is not None:
            values = [self._bundle.joined(values)]
        for step in self._steps:
            begun_ns = time.monotonic_ns()
            run = getattr(self, f"_run_{step.kind}")
            values.append(run(step, values[step.operand], turn))
            if step.carries:
                ended(begun_ns, step.carries)
        if self._bundle is not None:
            return self._bundle.parted(values[-1])
        return [values[number] for number, *_ in self.outputs]

    # Planning

    def _add(
        self, operation: Any, name: str, numbers: dict[Any, int], constants: dict[Any, Any]
    ) -> None:
        if name in SCALINGS and operation.operands[1] in constants:
            operand = numbers[operation.operands[0]]
            factor = constants[operation.operands[1]]
            step = CollectiveStep("scale", operand, (), SCALINGS[name], factor=factor)
            self._append(step, operation, numbers, self._classes[operand])
            return
        if name not in PLANNERS or operation.operands[0] not in numbers:
            raise NotOnlyCollectivesError(f"it contains {name}")
        operand = numbers[operation.operands[0]]
        step, classes = PLANNERS[name](self, operation, operand)
        self._append(step, operation, numbers, classes)

    def _append(
        self, step: CollectiveStep, operation: Any, numbers: dict[Any, int], classes: list[Any]
    ) -> None:
        self._steps.append(step)
        numbers[operation.results[0]] = len(self._classes)
        self._classes.append(classes)

    def _groups(self, operation: Any) -> tuple[Group, ...]:
        return read_groups(operation, self._meshes, len(self._owners))

    def _hosts(self, group: Group) -> Hosts:
        return tuple(dict.fromkeys(self._owners[position] for position in group))

    def _own(self, group: Group) -> list[int]:
        """Returns this host's positions of a group."""
        return [position for position in group if self._owners[position] == self._host]

    def _key(self, operand: int, group: Group) -> Any:
        """Returns a key: equal for groups with the same contents and hosts in the same places."""
        contents = tuple(self._classes[operand][position] for position in group)
        return contents, tuple(self._owners[position] for position in group)

    def _teams(self, groups: Iterable[Group]) -> dict[Hosts, list[Group]]:
        """Returns groups over several hosts including this one, by their hosts."""
        teams: dict[Hosts, list[Group]] = {}
        for group in groups:
            hosts = self._hosts(group)
            if len(hosts) > 1 and self._host in hosts:
                teams.setdefault(hosts, []).append(group)
        return teams

    def _distinct(self, operand: int, groups: tuple[Group, ...]) -> list[Group]:
        """Returns the groups that do not repeat an earlier group."""
        first = {self._key(operand, group): group for group in reversed(groups)}
        return [group for group in groups if first[self._key(operand, group)] == group]

    def _plan_reduce(self, operation: Any, operand: int) -> tuple[CollectiveStep, list[Any]]:
        scatters = "scatter_dimension" in operation.attributes
        axes = (integer_attribute(operation, "scatter_dimension"),) if scatters else ()
        groups = self._groups(operation)
        return self._reduce(
            operand, groups, axes, reduction_of(operation), operand_elements(operation)
        )

    def _reduce(
        self,
        operand: int,
        groups: tuple[Group, ...],
        axes: tuple[int, ...],
        reduction: tuple[Callable[[Elements, Elements], Elements], str | None],
        held: tuple[np.dtype[Any], int],
    ) -> tuple[CollectiveStep, list[Any]]:
        (combine, name), (dtype, elements) = reduction, held
        teams = self._teams(self._distinct(operand, groups))
        carries = []
        for hosts, together in teams.items():
            keys = [self._key(operand, group) for group in together]
            if name is None or dtype.name not in COMBINED:
                # All hosts get all partial results, and reduce them in the same order.
                each = {host: [(("of", key, host), key) for key in keys] for host in hosts}
                carries.append(self._gathered(hosts, each, elements * dtype.itemsize))
            elif axes and self._is_even(hosts, together):
                pieces = [
                    (owner, (key, index), Piece(key, (axes[0], index, len(group))))
                    for group, key in zip(together, keys, strict=True)
                    for index, owner in enumerate(self._owners[p] for p in group)
                ]
                size = elements // len(together[0])
                carries.append(
                    Carry(
                        hosts,
                        ("reduce_scatter", size * len(pieces)),
                        dtype,
                        name,
                        size,
                        tuple(one for to in hosts for host, _, one in pieces if host == to),
                        tuple(key for host, key, _ in pieces if host == self._host),
                    )
                )
            else:
                kind = ("all_reduce", elements * len(keys))
                given = tuple(Piece(key) for key in keys)
                carries.append(Carry(hosts, kind, dtype, name, elements, given, tuple(keys)))
        classes: list[Any] = [None] * len(self._owners)
        number = len(self._classes)
        for group in groups:
            contents, _ = self._key(operand, group)
            for index, position in enumerate(group):
                classes[position] = (number, contents, index if axes else 0)
        return CollectiveStep(
            "reduce", operand, groups, combine, axes, carries=tuple(carries)
        ), classes

    def _is_even(self, hosts: Hosts, groups: list[Group]) -> bool:
        """Returns whether all hosts have equally many positions in each of these groups."""
        owners = [[self._owners[position] for position in group] for group in groups]
        return all(len({own.count(host) for host in hosts}) == 1 for own in owners)

    def _gathered(self, hosts: Hosts, each: dict[int, list[tuple[Any, Any]]], size: int) -> Carry:
        """Gathers pieces of ``size`` bytes on all hosts; ``each``: keys and sources by host."""
        bytes_ = np.dtype(np.uint8)
        given = [Piece(source) for _, source in each[self._host]]
        counts = [len(each[host]) for host in hosts]
        rank = hosts.index(self._host)
        if len(set(counts)) == 1:
            taken = tuple(key for host in hosts for key, _ in each[host])
            kind: tuple[Any, ...] = ("all_gather", size * len(taken))
            start = rank * len(given)
            return Carry(hosts, kind, bytes_, "sum", size, tuple(given), taken, start)
        sizes = tuple(
            size * counts[source] * (source != target)
            for source in range(len(hosts))
            for target in range(len(hosts))
        )
        taken = tuple(key for host in hosts if host != self._host for key, _ in each[host])
        all_given = tuple(given * (len(hosts) - 1))
        return Carry(hosts, ("all_to_all_of", sizes), bytes_, "sum", size, all_given, taken)

    def _sent(self, hosts: Hosts, moved: Sequence[tuple[int, int, Cut | None]], size: int) -> Carry:
        """Sends pieces of ``size`` bytes between positions: (source, target, cut)."""
        blocks: dict[tuple[int, int], list[tuple[int, int, Cut | None]]] = {}
        for one in moved:
            source, target = self._owners[one[0]], self._owners[one[1]]
            if source != target:
                blocks.setdefault((source, target), []).append(one)
        sizes = tuple(size * len(blocks.get((a, b), ())) for a in hosts for b in hosts)
        given = [one for host in hosts for one in blocks.get((self._host, host), ())]
        taken = [one for host in hosts for one in blocks.get((host, self._host), ())]
        return Carry(
            hosts,
            ("all_to_all_of", sizes),
            np.dtype(np.uint8),
            "sum",
            size,
            tuple(Piece(source, cut) for source, _, cut in given),
            tuple((source, target) for source, target, _ in taken),
        )

    def _plan_gather(self, operation: Any, operand: int) -> tuple[CollectiveStep, list[Any]]:
        axis = integer_attribute(operation, "all_gather_dim")
        return self._gather(operand, self._groups(operation), axis, operand_elements(operation))

    def _gather(
        self, operand: int, groups: tuple[Group, ...], axis: int, held: tuple[np.dtype[Any], int]
    ) -> tuple[CollectiveStep, list[Any]]:
        dtype, elements = held
        carries = []
        for hosts, together in self._teams(groups).items():
            # Contents that several positions of a host replicate are taken from the first.
            each: dict[int, dict[Any, int]] = {host: {} for host in hosts}
            for group in together:
                for source in group:
                    owner = self._owners[source]
                    each[owner].setdefault((self._classes[operand][source], owner), source)
            listed = {host: list(found.items()) for host, found in each.items()}
            carries.append(self._gathered(hosts, listed, elements * dtype.itemsize))
        step = CollectiveStep("gather", operand, groups, axes=(axis,), carries=tuple(carries))
        classes: list[Any] = [None] * len(self._owners)
        number = len(self._classes)
        for group in groups:
            contents, _ = self._key(operand, group)
            for position in group:
                classes[position] = (number, contents)
        return step, classes

    def _plan_all_to_all(self, operation: Any, operand: int) -> tuple[CollectiveStep, list[Any]]:
        split = integer_attribute(operation, "split_dimension")
        axes = (split, integer_attribute(operation, "concat_dimension"))
        return self._all_to_all(operand, self._groups(operation), axes, operand_elements(operation))

    def _all_to_all(
        self,
        operand: int,
        groups: tuple[Group, ...],
        axes: tuple[int, int],
        held: tuple[np.dtype[Any], int],
    ) -> tuple[CollectiveStep, list[Any]]:
        (dtype, elements), split = held, axes[0]
        carries = []
        for hosts, together in self._teams(groups).items():
            moved = [
                (source, target, (split, index, len(group)))
                for group in together
                for source in group
                for index, target in enumerate(group)
            ]
            size = elements * dtype.itemsize // len(together[0])
            carries.append(self._sent(hosts, moved, size))
        number = len(self._classes)
        classes = [(number, position) for position in range(len(self._owners))]
        step = CollectiveStep("all_to_all", operand, groups, axes=axes, carries=tuple(carries))
        return step, classes

    def _plan_permute(self, operation: Any, operand: int) -> tuple[CollectiveStep, list[Any]]:
        pairs = read_rows(operation.attributes["source_target_pairs"])
        return self._permute(operand, pairs, operand_elements(operation))

    def _permute(
        self, operand: int, pairs: tuple[Group, ...], held: tuple[np.dtype[Any], int]
    ) -> tuple[CollectiveStep, list[Any]]:
        dtype, elements = held
        crossing = [pair for pair in pairs if len(self._hosts(pair)) > 1]
        hosts = tuple(sorted({host for pair in crossing for host in self._hosts(pair)}))
        carries: tuple[Carry, ...] = ()
        if self._host in hosts:
            moved = [(source, target, None) for source, target in crossing]
            carries = (self._sent(hosts, moved, elements * dtype.itemsize),)
        number = len(self._classes)
        classes = [(number, position) for position in range(len(self._owners))]
        return CollectiveStep("permute", operand, pairs, carries=carries), classes

    # Running

    def _run_scale(self, step: CollectiveStep, operand: Values, turn: Turn) -> Values:
        assert step.combine is not None
        return {
            position: step.combine(held, np.asarray(step.factor, held.dtype)).astype(held.dtype)
            for position, held in operand.items()
        }

    def _run_reduce(self, step: CollectiveStep, operand: Values, turn: Turn) -> Values:
        assert step.combine is not None
        mine = [group for group in step.groups if self._own(group)]
        partial: dict[Any, Elements] = {}
        for group in mine:
            key = self._key(step.operand, group)
            if key not in partial:
                members = [operand[position] for position in self._own(group)]
                partial[key] = functools.reduce(step.combine, members)
        arrived = turn.carry(step.carries, partial)
        result: Values = {}
        for group in mine:
            key = self._key(step.operand, group)
            for index, position in enumerate(group):
                if position not in operand:
                    continue
                if (key, index) in arrived:
                    shape = list(partial[key].shape)
                    shape[step.axes[0]] //= len(group)
                    result[position] = arrived[key, index].reshape(shape)
                    continue
                if key not in arrived:
                    arrived[key] = self._total(step, group, partial[key], arrived)
                total = arrived[key].reshape(partial[key].shape)
                if step.axes:
                    total = np.split(total, len(group), step.axes[0])[index]
                result[position] = total
        return result

    def _total(
        self, step: CollectiveStep, group: Group, own: Elements, arrived: dict[Any, Elements]
    ) -> Elements:
        """Reduces partial results in the order of hosts, which is the same everywhere."""
        key = self._key(step.operand, group)
        parts = [
            own if host == self._host else arrived["of", key, host].reshape(own.shape)
            for host in self._hosts(group)
        ]
        assert step.combine is not None
        return functools.reduce(step.combine, parts)

    def _run_gather(self, step: CollectiveStep, operand: Values, turn: Turn) -> Values:
        arrived = turn.carry(step.carries, operand)
        shape = next(iter(operand.values())).shape
        gathered: dict[Group, Elements] = {}
        result: Values = {}
        for group in step.groups:
            for position in self._own(group):
                if group not in gathered:
                    parts = [
                        operand[source]
                        if source in operand
                        else arrived[
                            self._classes[step.operand][source], self._owners[source]
                        ].reshape(shape)
                        for source in group
                    ]
                    gathered[group] = turn.joined(parts, step.axes[0])
                result[position] = gathered[group]
        return result

    def _run_all_to_all(self, step: CollectiveStep, operand: Values, turn: Turn) -> Values:
        split, concatenation = step.axes
        arrived = turn.carry(step.carries, operand)
        result: Values = {}
        for group in step.groups:
            shape = list(next(iter(operand.values())).shape)
            shape[split] //= len(group)
            for index, position in enumerate(group):
                if position not in operand:
                    continue
                parts = [
                    np.split(operand[source], len(group), split)[index]
                    if source in operand
                    else arrived[source, position].reshape(shape)
                    for source in group
                ]
                result[position] = turn.joined(parts, concatenation)
        return result

    def _run_permute(self, step: CollectiveStep, operand: Values, turn: Turn) -> Values:
        arrived = turn.carry(step.carries, operand)
        result = {position: np.zeros_like(held) for position, held in operand.items()}
        for source, target in step.groups:
            if target not in operand:
                continue
            if source in operand:
                result[target] = operand[source]
            else:
                result[target] = arrived[source, target].reshape(operand[target].shape)
        return result


PLANNERS: dict[str, Callable[..., tuple[CollectiveStep, list[Any]]]] = {
    "stablehlo.all_reduce": LoweredExchange._plan_reduce,
    "stablehlo.reduce_scatter": LoweredExchange._plan_reduce,
    "stablehlo.all_gather": LoweredExchange._plan_gather,
    "stablehlo.all_to_all": LoweredExchange._plan_all_to_all,
    "stablehlo.collective_permute": LoweredExchange._plan_permute,
}
