"""The axes of a program's meshes, split into those that number islands and those inside an island.

A mesh axis of size 8 over two islands of four devices is two axes: one of size 2 that numbers the
islands, and one of size 4 inside them. A dimension of an array that is sharded over axes is a list
of :class:`Token`, the major one first; those without an island axis are the business of XLA.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy

__all__ = [
    "IslandAxis",
    "IslandSharding",
    "Islands",
    "MeshView",
    "NotSeparableError",
    "Token",
    "meshes_of",
    "whole_mesh",
]


class NotSeparableError(Exception):
    """A mesh whose axes do not separate islands; the text is ``CODE_NAME: message``."""


@dataclasses.dataclass(frozen=True, order=True)
class IslandAxis:
    """One factor of the number of islands: island ``i`` has coordinate ``i // stride % size``."""

    stride: int
    size: int


@dataclasses.dataclass(frozen=True)
class Token:
    """One of the axes that a dimension is sharded over.

    Attributes:
        size: its size.
        island: which factor of the islands' number it is; None for one inside an island.
        axis: its name in the inner mesh, as Shardy writes it; None for one that numbers islands.
        stride: distance in the inner mesh between devices that are next to each other along it.
    """

    size: int
    island: IslandAxis | None = None
    axis: str | None = None
    stride: int = dataclasses.field(default=1, compare=False)


Dimension = tuple[Token, ...]


@dataclasses.dataclass(frozen=True)
class IslandSharding:
    """How an array of known shape is sharded.

    Attributes:
        dims: for each dimension, its axes.
        mesh: name of the mesh that axes inside an island belong to.
    """

    dims: tuple[Dimension, ...]
    mesh: str | None = None

    @classmethod
    def whole(cls, rank: int) -> IslandSharding:
        """Returns the cut of an array that every device has whole."""
        return cls(((),) * rank)

    def islands(self) -> tuple[tuple[tuple[IslandAxis, int], ...], ...]:
        """Returns where islands cut: for each dimension, axes and the number of parts before each.

        Arrays of equal shape whose cuts agree in this have equal elements on each island.
        """
        return self._islands

    def axes(self) -> set[IslandAxis]:
        """Returns the island axes that occur."""
        return set(self._axes)

    @functools.cached_property
    def _islands(self) -> tuple[tuple[tuple[IslandAxis, int], ...], ...]:
        return tuple(tuple(_placed(dimension)) for dimension in self.dims)

    @functools.cached_property
    def _axes(self) -> frozenset[IslandAxis]:
        tokens = (token for dimension in self.dims for token in dimension)
        return frozenset(token.island for token in tokens if token.island)

    @property
    def is_whole(self) -> bool:
        """Whether each island has the whole array."""
        return not self._axes

    def local(self, shape: Sequence[int]) -> list[int]:
        """Returns the shape of an island's part of an array."""
        return [
            extent // math.prod(token.size for token in dimension if token.island)
            for extent, dimension in zip(shape, self.dims, strict=True)
        ]

    def inner(self, shape: Sequence[int], mesh: str | None = None) -> str | None:
        """Returns the inner sharding as Shardy writes it; None if there is none.

        Args:
            shape: the island's part of the array; dimensions that its axes do not divide are
                not sharded.
            mesh: name of a mesh, for a cut that names none.
        """
        mesh = self.mesh or mesh
        if mesh is None:
            return None
        dims = []
        for index, dimension in enumerate(self.dims):
            inner = [token for token in dimension if token.axis]
            size = math.prod(token.size for token in inner)
            if shape[index] % size:
                inner = []
            dims.append("{" + ", ".join(str(token.axis) for token in inner) + "}")
        return f"#sdy.sharding<@{mesh}, [{', '.join(dims)}]>"

    def without(self, axes: Iterable[IslandAxis]) -> IslandSharding:
        """Returns the cut without these island axes.

        Where a minor island axis stays, parts of a dropped major one stay parts, of no axis.
        """
        dropped = set(axes)
        if not dropped & self._axes:
            return self
        dims = []
        for dimension in self.dims:
            last = max((i for i, token in enumerate(dimension) if token.island), default=-1)
            while last >= 0 and dimension[last].island in dropped | {None}:
                last -= 1
            kept = [
                Token(token.size) if token.island in dropped and i < last else token
                for i, token in enumerate(dimension)
                if token.island not in dropped or i < last
            ]
            dims.append(tuple(kept))
        return IslandSharding(tuple(dims), self.mesh)

    def with_inner(self, other: IslandSharding) -> IslandSharding:
        """Returns the cut by these island axes, and inside an island as another is."""
        dims = []
        for own, theirs in zip(self.dims, other.dims, strict=True):
            if tuple(_placed(own)) == tuple(_placed(theirs)):
                dims.append(theirs)
                continue
            last = max((i for i, token in enumerate(own) if token.island), default=-1)
            kept = [t if t.island else Token(t.size) for t in own[: last + 1]]
            dims.append((*kept, *(token for token in theirs if token.axis)))
        return IslandSharding(tuple(dims), other.mesh or self.mesh)

    def even(self, shape: Sequence[int]) -> IslandSharding:
        """Returns the cut without island axes where dimensions cannot be divided evenly."""
        if self.is_whole:
            return self
        dims: list[Dimension] = []
        for extent, dimension in zip(shape, self.dims, strict=True):
            last = max((i for i, token in enumerate(dimension) if token.island), default=-1)
            parts = math.prod(token.size for token in dimension[: last + 1])
            if extent % parts:
                dimension = tuple(token for token in dimension if not token.island)
            dims.append(dimension)
        return IslandSharding(tuple(dims), self.mesh)


def _placed(dimension: Dimension) -> Iterator[tuple[IslandAxis, int]]:
    before = 1
    for token in dimension:
        if token.island:
            yield token.island, before
        before *= token.size


class Islands:
    """The islands of a program's devices.

    Attributes:
        of: for each device of the program, the number of its island, counted from 0.
        count: number of islands.
        members: for each island, its devices in the order that its own programs number them.
        axes: all island axes, the major one first.
        names: the islands, as users number them.

    Args:
        of: for each device of the program, the number of its island.
    """

    def __init__(self, of: Sequence[int]) -> None:
        numbers = [f"island {number}" for number in sorted(set(of))]
        self.names = " and ".join(numbers) if len(numbers) < 4 else f"{len(numbers)} islands"
        self.number(of, range(len(of)))
        self.axes = [IslandAxis(1, self.count)] if self.count > 1 else []

    def number(self, of: Sequence[int], order: Iterable[int]) -> None:
        """Numbers islands in the order in which their devices come first."""
        numbers = {
            island: index for index, island in enumerate(dict.fromkeys(of[d] for d in order))
        }
        self.of = [numbers[island] for island in of]
        self.count = len(numbers)
        self.members = [
            [device for device, island in enumerate(of) if island == number]
            for number in range(self.count)
        ]

    @property
    def size(self) -> int:
        """Devices of an island."""
        return len(self.members[0])

    def coordinate(self, axis: IslandAxis, island: int) -> int:
        """Returns an island's coordinate along an axis."""
        return island // axis.stride % axis.size

    def groups(self, axes: Sequence[IslandAxis]) -> list[list[int]]:
        """Returns the devices that communicate along axes, the first being the major one.

        Those of a group are at the same place of their islands, and of the islands in order.
        """
        groups: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for island in range(self.count):
            others = tuple(self.coordinate(axis, island) for axis in self.axes if axis not in axes)
            place = 0
            for axis in axes:
                place = place * axis.size + self.coordinate(axis, island)
            groups.setdefault(others, []).append((place, island))
        return [
            [self.members[island][number] for _, island in sorted(group)]
            for group in groups.values()
            for number in range(self.size)
        ]


class MeshView:
    """A mesh of a program: its axes as digits, and the mesh that is left inside an island.

    Attributes:
        name: its name.
        digits: for each axis, the tokens that it consists of, the major one first.
        first_device: the first of its devices.

    Args:
        name: its name.
        mesh: the mesh.
        islands: the islands of the program's devices; the first mesh numbers their members.
        is_first: whether it is the first mesh.

    Raises:
        NotSeparableError: no axes of the mesh, or factors of them, number the islands.
    """

    def __init__(self, name: str, mesh: Any, islands: Islands, is_first: bool) -> None:
        self.name = name
        axes = [sdy.MeshAxisAttr(axis) for axis in mesh.axes]
        self._sizes = [int(axis.size) for axis in axes]
        names = [str(axis.name) for axis in axes]
        ids = [int(number) for number in mesh.device_ids] or list(range(math.prod(self._sizes)))
        self.first_device = (ids or [0])[0]
        self.is_whole = sorted(ids) == list(range(len(islands.of)))
        self.digits: dict[str, list[Token]] = {}
        if not self.is_whole:  # of one device, or of none: what it holds is everywhere
            return
        grid = np.array(ids).reshape(self._sizes)
        if is_first:
            islands.number(islands.of, ids)
        island_of = np.array(islands.of)[grid]
        for index, axis in enumerate(names):
            self.digits[axis] = list(self._split(index, axis, island_of, islands))
        self._devices = self._inner_devices(grid, islands, is_first)
        stride = 1
        for axis in reversed(names):
            for place, token in reversed(list(enumerate(self.digits[axis]))):
                if token.axis:
                    self.digits[axis][place] = dataclasses.replace(token, stride=stride)
                    stride *= token.size

    def _split(
        self, index: int, name: str, island_of: np.ndarray[Any, Any], islands: Islands
    ) -> Iterator[Token]:
        """Returns the tokens of an axis."""
        size = self._sizes[index]
        line = [int(row[0]) for row in np.moveaxis(island_of, index, 0).reshape(size, -1)]
        inner = next((i for i, number in enumerate(line) if number != line[0]), size)
        if inner == size:
            yield Token(size, axis=f'"{name}"')
            return
        back = (i for i in range(inner, size, inner) if line[i] == line[0])
        period = next(back, size)
        outer, middle = size // period, period // inner
        if outer > 1:
            yield Token(outer, axis=f'"{name}.outer"')
        stride = line[inner] - line[0]
        for prime in _primes(middle):
            middle //= prime
            yield Token(prime, IslandAxis(stride * middle, prime))
        if inner > 1:
            yield Token(inner, axis=f'"{name}"')

    def _inner_devices(
        self, grid: np.ndarray[Any, Any], islands: Islands, is_first: bool
    ) -> list[int]:
        """Returns the inner mesh's devices, as an island numbers them; checks the tokens."""
        tokens = [token for axis in self.digits.values() for token in axis]
        product = math.prod(token.size for token in tokens)
        found = sorted({token.island for token in tokens if token.island}, reverse=True)
        if is_first:
            islands.axes = found
        fits = all(islands.of.count(number) == islands.size for number in range(islands.count))
        if not fits or product != grid.size or found != islands.axes:
            raise NotSeparableError(self._reason(islands))
        digits = grid.reshape([token.size for token in tokens])
        order = sorted(
            range(len(tokens)),
            key=lambda i: -tokens[i].island.stride if tokens[i].island else 1,  # type: ignore[union-attr]
        )
        if math.prod(axis.size for axis in found) != islands.count:
            raise NotSeparableError(self._reason(islands))
        by_island = digits.transpose(order).reshape(islands.count, -1)
        for number, members in enumerate(by_island):
            if any(islands.of[device] != number for device in members):
                raise NotSeparableError(self._reason(islands))
        if is_first:
            islands.members = [[int(device) for device in members] for members in by_island]
        devices = [islands.members[0].index(device) for device in by_island[0]]
        for members, own in zip(by_island, islands.members, strict=True):
            if [own.index(device) for device in members] != devices:
                raise NotSeparableError(self._reason(islands))
        return devices

    def _reason(self, islands: Islands) -> str:
        shape = " x ".join(map(str, self._sizes))
        return (
            f"INVALID_ARGUMENT: the mesh of shape {shape} has devices of {islands.names}, "
            "and neither its axes nor factors of them number the islands; order its devices so "
            "that an axis, or a factor of one, goes from island to island"
        )

    def inner(self) -> str:
        """Returns the mesh inside an island, as Shardy writes it."""
        if not self.is_whole:
            return "#sdy.mesh<[]>"
        axes = [token for axis in self.digits.values() for token in axis if token.axis]
        listed = ", ".join(f"{token.axis}={token.size}" for token in axes)
        ids = ""
        if axes and self._devices != list(range(len(self._devices))):
            ids = f", device_ids={self._devices}"
        return f"#sdy.mesh<[{listed}]{ids}>"

    def tokens(self, axis: Any) -> list[Token]:
        """Returns the tokens of a reference to an axis or to a part of one."""
        if not self.is_whole:
            return []
        digits = self.digits[str(axis.name)]
        if axis.sub_axis_info is None:
            return digits
        info = sdy.SubAxisInfoAttr(axis.sub_axis_info)
        first, last = int(info.pre_size), int(info.pre_size) * int(info.size)
        found, before = [], 1
        for digit in digits:
            after = before * digit.size
            low, high = max(before, first), min(after, last)
            if low < high:
                if low == before and high == after:
                    found.append(digit)
                elif digit.island or low % before or high % low:
                    return found
                else:
                    part = f"{digit.axis}:({low // before}){high // low}"
                    stride = digit.stride * (after // high)
                    found.append(Token(high // low, axis=part, stride=stride))
            before = after
        return found

    def inner_cut(self, sharding: Any) -> IslandSharding:
        """Returns the cut that a sharding over the inner mesh means."""
        known = {token.axis: token for axis in self.digits.values() for token in axis}
        dims = []
        for dimension in map(sdy.DimensionShardingAttr, sharding.dimension_shardings):
            tokens = []
            for axis in map(sdy.AxisRefAttr, dimension.axes):
                token = known[f'"{axis.name}"']
                if axis.sub_axis_info is not None:
                    info = sdy.SubAxisInfoAttr(axis.sub_axis_info)
                    before, size = int(info.pre_size), int(info.size)
                    stride = token.stride * (token.size // (before * size))
                    token = Token(size, axis=f"{token.axis}:({before}){size}", stride=stride)
                tokens.append(token)
            dims.append(tuple(tokens))
        return IslandSharding(tuple(dims), self.name)

    def coordinate(self, token: Token, device: int) -> int:
        """Returns the coordinate of an island's device along an axis inside the island."""
        return self._devices.index(device) // token.stride % token.size

    def cut(self, sharding: Any) -> IslandSharding:
        """Returns the cut that a sharding means."""
        dims = []
        for dimension in map(sdy.DimensionShardingAttr, sharding.dimension_shardings):
            axes = map(sdy.AxisRefAttr, dimension.axes)
            dims.append(tuple(token for axis in axes for token in self.tokens(axis)))
        return IslandSharding(tuple(dims), self.name if self.is_whole else None)


def _primes(number: int) -> list[int]:
    """Returns the prime factors of a number, ascending."""
    found, factor = [], 2
    while number > 1:
        while number % factor == 0:
            found.append(factor)
            number //= factor
        factor += 1
    return found


def whole_mesh(meshes: dict[str, MeshView]) -> str | None:
    """Returns the name of a mesh of all devices; None if there is none."""
    return next((view.name for view in meshes.values() if view.is_whole), None)


def meshes_of(module: Any, islands: Islands) -> dict[str, MeshView]:
    """Returns the meshes of a program by name.

    Raises:
        NotSeparableError: no axes of a mesh number the islands.
    """
    views: dict[str, MeshView] = {}
    for operation in module.body.operations:
        if operation.operation.name == "sdy.mesh":
            name = str(ir.StringAttr(operation.attributes["sym_name"]).value)
            is_first = not any(view.is_whole for view in views.values())
            mesh = sdy.MeshAttr(operation.attributes["mesh"])
            views[name] = MeshView(name, mesh, islands, is_first)
    return views
