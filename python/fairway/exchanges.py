"""Communication between groups of devices: sparse exchanges of rows, and collectives.

``fairway.Exchange`` sends rows to the shards that the data choose, and collects them again (a
ragged all-to-all). Unlike in a collective, whose volume does not depend on the data, only chosen
rows are transferred. A host that sends rows announces their number to each receiving host, so no
host waits for rows that are not sent.
``fairway.all_reduce``, ``all_gather`` and ``reduce_scatter`` are collectives over groups of
devices; corresponding shards of all groups are the members of one collective. They use all
channels.

Source: PATHWAYS §4.3 (sparse exchanges along sharded edges, with progress tracking).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from fairway.errors import ExchangeError
from fairway.primitives import PRIMITIVES, collect_p, collective_p, dispatch_p
from fairway.tracing import program

__all__ = ["PRIMITIVES", "Exchange", "Received", "all_gather", "all_reduce", "reduce_scatter"]

Arrays = Sequence[Any]
_struct: Any = jax.core.ShapedArray
_float0: Any = jax.dtypes.float0


class Received(NamedTuple):
    """Rows that one group of target devices received; each device holds its part.

    Attributes:
        rows: [devices * capacity, ...], sorted by bin, in an order that does not depend on arrival;
            padded with zeros.
        origins: int32 [devices * capacity], the choice that each row was sent for; padded with -1.
        counts: int32 [devices * bins], rows in each bin.
    """

    rows: Any
    origins: Any
    counts: Any


@dataclasses.dataclass(frozen=True)
class Exchange:
    """An edge between two sets of devices, along which the data choose the target of each row.

    Inside :func:`fairway.program` each dispatch and each collect is one node; outside they run as
    programs of their own. Both can be differentiated: the transpose of a dispatch is a collect, and
    the other way round.

    ``capacity`` bounds the rows that a device receives per round. Rows beyond it are not lost: they
    stay at their source until a later round. ``rounds`` gives the most rounds that can be needed.

    Attributes:
        sources: devices that rows come from: shardings over the first axis, one for each group of
            devices, such as ``NamedSharding(mesh, PartitionSpec("data"))``.
        targets: devices that rows may go to, likewise. Devices count over all groups.
        bins: bins on each target device; a choice is the number of a bin over all devices.
        capacity: rows that a target device receives in one round, a multiple of the number of
            source devices, which share it equally; by default all that can be sent.

    Example:
        >>> exchange = fairway.Exchange((on_first,), (on_first, on_second), bins=2)
        >>> received = exchange.dispatch([rows], [choices])
        >>> brought = exchange.collect([one.rows for one in received], received, [choices])
    """

    sources: tuple[Any, ...]
    targets: tuple[Any, ...]
    bins: int = 1
    capacity: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "sources", tuple(self.sources))
        object.__setattr__(self, "targets", tuple(self.targets))
        if not self.sources or not self.targets:
            raise ExchangeError(
                "an exchange needs devices that give rows and devices that get some"
            )
        for sharding in (*self.sources, *self.targets):
            _check_sharding(sharding)
        if self.bins < 1:
            raise ExchangeError(f"an exchange has {self.bins} bins a device; expected at least 1")
        givers = self._count(self.sources)
        if self.capacity is not None and (self.capacity < 1 or self.capacity % givers):
            raise ExchangeError(
                f"the capacity of an exchange is {self.capacity}; expected a multiple of its "
                f"{givers} source devices, which share it"
            )

    @staticmethod
    def _count(shardings: Sequence[Any]) -> int:
        return sum(len(sharding.device_set) for sharding in shardings)

    @property
    def places(self) -> int:
        """The number of bins on all target devices."""
        return self._count(self.targets) * self.bins

    def credit(self, choices: Arrays) -> int:
        """Returns the rows that one source device may send to one target device in a round.

        Args:
            choices: [n, k] of each group.
        """
        if self.capacity is not None:
            return self.capacity // self._count(self.sources)
        return self._each(choices)

    def rounds(self, choices: Arrays) -> int:
        """Returns the number of rounds after which every row has been sent, whatever is chosen.

        Args:
            choices: [n, k] of each group.
        """
        return -(-self._each(choices) // self.credit(choices))

    def _each(self, choices: Arrays) -> int:
        """Returns the choices on each source device."""
        return math.prod(np.shape(choices[0])) // len(self.sources[0].device_set)

    def dispatch(self, rows: Arrays, choices: Arrays, turn: int = 0) -> list[Received]:
        """Sends each row to the bins that are chosen for it.

        Args:
            rows: of each group of source devices, [n, ...].
            choices: of each group, int32 [n, k]: numbers of bins, negative for none.
            turn: number of the round.

        Returns:
            The rows that each group of target devices receives.

        Raises:
            ExchangeError: the arrays do not fit the exchange.
        """
        self._check(rows, choices)
        return _dispatch(tuple(rows), tuple(choices), self, turn, False)

    def collect(
        self, rows: Arrays, received: Sequence[Received], choices: Arrays, turn: int = 0
    ) -> list[Any]:
        """Returns rows to the choices that they were sent for.

        Args:
            rows: of each group of target devices, [devices * capacity, ...] in the order in which
                they were received; they may be of any shape and type.
            received: the result of the dispatch.
            choices: those of the dispatch.
            turn: the round of the dispatch.

        Returns:
            Rows of each group of source devices, [n, k, ...]; zeros where no row was sent this
            round.

        Raises:
            ExchangeError: the arrays do not fit the exchange.
        """
        if len(rows) != len(self.targets) or len(received) != len(self.targets):
            raise ExchangeError(
                f"{len(rows)} arrays of rows come back from {len(self.targets)} groups of devices"
            )
        origins = tuple(one.origins for one in received)
        return list(_collect(tuple(rows), origins, tuple(choices), self, turn))

    def _check(self, rows: Arrays, choices: Arrays) -> None:
        if not len(rows) == len(choices) == len(self.sources):
            raise ExchangeError(
                f"an exchange of {len(self.sources)} groups of source devices is given "
                f"{len(rows)} arrays of rows and {len(choices)} of choices"
            )
        for number, (row, choice, sharding) in enumerate(
            zip(rows, choices, self.sources, strict=True)
        ):
            shape, devices = np.shape(choice), len(sharding.device_set)
            each = shape[0] // devices if shape else 0
            first = np.shape(choices[0])
            wanted = first[0] // len(self.sources[0].device_set) if first else 0
            if (
                len(shape) != 2
                or np.shape(row)[:1] != shape[:1]
                or shape[0] % devices
                or (each, shape[1:]) != (wanted, first[1:])
            ):
                raise ExchangeError(
                    f"group {number} of an exchange is given rows {np.shape(row)} and choices "
                    f"{shape}; expected [n, ...] and [n, k], with as many of each on every device"
                )
            if np.dtype(jax.dtypes.result_type(choice)) != np.int32:
                raise ExchangeError(
                    f"choices of group {number} are {jax.dtypes.result_type(choice)}; expected "
                    "int32"
                )


def all_reduce(arrays: Arrays, shardings: Sequence[Any]) -> list[Any]:
    """Sums arrays of several groups of devices; every group gets the sum.

    Inside :func:`fairway.program` it is one node, which starts when its last array is ready and
    overlaps with independent nodes; outside it runs as a program of its own. It can be
    differentiated.

    Args:
        arrays: one array per group, all of one shape and type.
        shardings: the sharding of each group's array, alike in all groups; an array of another
            sharding is resharded first.

    Returns:
        The sum on each group's devices, bitwise identical everywhere.

    Raises:
        ExchangeError: the arrays or the groups do not fit each other.

    Example:
        >>> gradients = fairway.all_reduce([of_first, of_second], [on_first, on_second])
    """
    return list(_collective(*_checked(arrays, shardings), "reduce"))


def all_gather(arrays: Arrays, shardings: Sequence[Any]) -> list[Any]:
    """Gathers the arrays of several groups of devices on every group; see :func:`all_reduce`.

    Args:
        arrays: one array per group, all of one shape and type.
        shardings: the sharding of each group's array, alike in all groups.

    Returns:
        On each group's devices, [groups, ...]: all arrays along a new first axis, sharded as they
        are.

    Raises:
        ExchangeError: the arrays or the groups do not fit each other.
    """
    return list(_collective(*_checked(arrays, shardings), "gather"))


def reduce_scatter(arrays: Arrays, shardings: Sequence[Any]) -> list[Any]:
    """Gives each group of devices the sum of all groups' parts for it; see :func:`all_reduce`.

    It is the transpose of :func:`all_gather`.

    Args:
        arrays: of each group, [groups, ...].
        shardings: the sharding of each group's sum, alike in all groups; the arrays are sharded
            likewise, and not along the first axis.

    Returns:
        The sum of the n-th parts on the devices of the n-th group.

    Raises:
        ExchangeError: the arrays or the groups do not fit each other.
    """
    arrays, shardings = _checked(arrays, shardings)
    shape = np.shape(arrays[0])
    if not shape or shape[0] != len(arrays):
        raise ExchangeError(
            f"arrays of shape {shape} are to be scattered over {len(arrays)} groups of devices; "
            f"expected [{len(arrays)}, ...]"
        )
    return list(_collective(arrays, shardings, "scatter"))


def _checked(arrays: Arrays, shardings: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    arrays, shardings = tuple(arrays), tuple(shardings)
    kinds = {(np.shape(one), np.dtype(jax.dtypes.result_type(one))) for one in arrays}
    if not arrays or len(arrays) != len(shardings) or len(kinds) != 1:
        shown = ", ".join(f"{kind}{list(shape)}" for shape, kind in sorted(kinds, key=str))
        raise ExchangeError(
            f"arrays {shown or 'of nothing'} are given for {len(shardings)} groups of devices; "
            f"expected one array for each, of one shape and type, not {len(arrays)}"
        )
    devices = [device for sharding in shardings for device in sharding.device_set]
    counts = {len(sharding.device_set) for sharding in shardings}
    if len(set(devices)) < len(devices) or len(counts) != 1:
        raise ExchangeError(
            f"a collective is asked for over groups of {sorted(counts)} devices; expected groups "
            "of as many devices each, of which none is in two"
        )
    return arrays, shardings


TRANSPOSED = {"reduce": "reduce", "gather": "scatter", "scatter": "gather"}


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _collective(arrays: tuple[Any, ...], shardings: tuple[Any, ...], kind: str) -> tuple[Any, ...]:
    return tuple(collective_p.bind(*arrays, shardings=shardings, kind=kind))


def _collective_forward(arrays: tuple[Any, ...], shardings: tuple[Any, ...], kind: str) -> Any:
    return _collective(arrays, shardings, kind), None


def _collective_backward(shardings: tuple[Any, ...], kind: str, _: None, given: Any) -> Any:
    return (_collective(tuple(given), shardings, TRANSPOSED[kind]),)


_collective.defvjp(_collective_forward, _collective_backward)


def _check_sharding(sharding: Any) -> None:
    if isinstance(sharding, SingleDeviceSharding):
        return
    if isinstance(sharding, NamedSharding):
        spec = tuple(sharding.spec)
        first = spec[0] if spec else ()
        names = (first,) if isinstance(first, str) else tuple(first or ())
        sizes = dict(sharding.mesh.shape)
        in_order = [name for name in sharding.mesh.axis_names if name in names] == list(names)
        rest = all(entry is None for entry in spec[1:])
        if rest and in_order and math.prod(sizes[n] for n in names) == sharding.mesh.size:
            return
    raise ExchangeError(
        f"an exchange is between shardings of the first axis over all devices; got {sharding}; try "
        "NamedSharding(mesh, PartitionSpec(mesh.axis_names))"
    )


# Differentiation: each direction is the transpose of the other. Equal choices give an equal order
# of rows, so the cotangents match.


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _dispatch(
    rows: tuple[Any, ...], choices: tuple[Any, ...], exchange: Exchange, turn: int, each: bool
) -> list[Received]:
    made = dispatch_p.bind(*rows, *choices, exchange=exchange, turn=turn, each=each)
    return [Received(*made[at : at + 3]) for at in range(0, len(made), 3)]


def _dispatch_forward(
    rows: tuple[Any, ...], choices: tuple[Any, ...], exchange: Exchange, turn: int, each: bool
) -> Any:
    received = _dispatch(rows, choices, exchange, turn, each)
    return received, (choices, [one.origins for one in received])


def _dispatch_backward(exchange: Exchange, turn: int, each: bool, kept: Any, given: Any) -> Any:
    choices, origins = kept
    rows = _collect(
        tuple(one.rows for one in given), tuple(origins), tuple(choices), exchange, turn
    )
    if not each:
        rows = [row.sum(axis=1) for row in rows]
    return tuple(rows), tuple(map(_nothing, choices))


_dispatch.defvjp(_dispatch_forward, _dispatch_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _collect(
    rows: tuple[Any, ...],
    origins: tuple[Any, ...],
    choices: tuple[Any, ...],
    exchange: Exchange,
    turn: int,
) -> list[Any]:
    shapes = tuple(np.shape(choice) for choice in choices)
    return list(collect_p.bind(*rows, *origins, exchange=exchange, shapes=shapes))


def _collect_forward(
    rows: tuple[Any, ...],
    origins: tuple[Any, ...],
    choices: tuple[Any, ...],
    exchange: Exchange,
    turn: int,
) -> Any:
    return _collect(rows, origins, choices, exchange, turn), (origins, choices)


def _collect_backward(exchange: Exchange, turn: int, kept: Any, given: Any) -> Any:
    origins, choices = kept
    received = _dispatch(tuple(given), tuple(choices), exchange, turn, True)
    rows = tuple(one.rows for one in received)
    return rows, tuple(map(_nothing, origins)), tuple(map(_nothing, choices))


_collect.defvjp(_collect_forward, _collect_backward)


def _nothing(integers: Any) -> Any:
    """Returns the gradient of integers: zeros of type float0."""
    return np.zeros(np.shape(integers), _float0)


@functools.lru_cache(maxsize=128)
def _alone(primitive: Any, params: tuple[tuple[str, Any], ...]) -> Any:
    """Returns a program that consists of one exchange."""
    return program(lambda *args: primitive.bind(*args, **dict(params)))


def _run_alone(primitive: Any, *args: Any, **params: Any) -> list[Any]:
    made: list[Any] = _alone(primitive, tuple(sorted(params.items())))(*args)
    return made


for _primitive in PRIMITIVES:
    _primitive.def_impl(functools.partial(_run_alone, _primitive))
