"""Captured programs as operator graphs that can be placed anew."""

from __future__ import annotations

from fairway import _native
from fairway.errors import PlacementError
from fairway.placement.graphs import Edge, Op, OpGraph
from fairway.placement.models import Device

__all__ = ["of_program"]

SMALL_BYTES = 4096
"""Inputs of the step that are smaller than this do not determine placement; they are sent to
readers."""


def of_program(text: str, device: Device | None = None) -> OpGraph:
    """Makes operations of a captured program; see :mod:`fairway.capture`.

    Each call is an operation, and can be cut into as many shards as it ran on devices: their
    communication is part of its time. Inputs of the step (parameters, optimizer state, a batch) are
    resident where they are first read, and other readers are colocated there, as the update of
    gradients is with the forward pass.

    Args:
        text: output of ``fairway capture``.
        device: model that predicts times from XLA's cost analysis; None uses the times that were
            measured.

    Returns:
        Operations of one batch, the one that the program ran with.

    Raises:
        PlacementError: the text is no program, or the time of a function is unknown; says which.
    """
    try:
        functions, sizes, inputs, nodes = _native.program_nodes(text)
    except ValueError as error:
        raise PlacementError(f"it holds no program: {error}") from None
    times = [
        None if is_collectives else _time_ns(name, time_ns, work, device)
        for name, time_ns, work, is_collectives in functions
    ]
    origins = list(range(len(sizes)))  # the value of which a transferred value is a copy
    makers: dict[int, int] = {}
    homes: dict[int, int] = {}  # operation where each input of the step is resident
    ops: list[Op] = []
    for function, devices, args, results, donated in nodes:
        if function is None and len(args) == len(results):
            for arg, result in zip(args, results, strict=True):
                origins[result] = origins[arg]
            continue
        number = len(ops)
        read = dict.fromkeys(origins[arg] for arg in args)
        given = [value for value in read if value < inputs]
        fresh = [value for value in given if value not in homes]
        homes |= dict.fromkeys(fresh, number)
        beside = _beside({value: homes[value] for value in given}, number, ops, sizes)
        sources: dict[int, int] = {}
        for value in read:
            source = makers[value] if value >= inputs else homes[value]
            if source not in (number, beside) or value >= inputs:
                sources[source] = sources.get(source, 0) + sizes[value][0]
        held = sum(sizes[value][1] for value in results) - sum(sizes[v][1] for v in donated)
        count = max(len(devices), 1)
        computed = None if function is None else times[function]
        name, each = computed or ("exchange", 0)
        ops.append(
            Op(
                name,
                [each * count],
                [Edge(source, [size]) for source, size in sources.items()],
                [max(held, 0)],
                sum(sizes[value][1] for value in fresh),
                beside=beside,
                shards_max=count,
                launch_ns=0 if device is None or computed is None else round(1e9 * device.launch_s),
            )
        )
        makers |= dict.fromkeys(results, number)
    return OpGraph([1], ops)


def _beside(
    homes: dict[int, int], number: int, ops: list[Op], sizes: list[tuple[int, int]]
) -> int | None:
    """Returns the operation with which to colocate: the home of most bytes of the step's inputs."""
    shares: dict[int, int] = {}
    for value, home in homes.items():
        if home != number and sizes[value][0] >= SMALL_BYTES:
            known = ops[home].beside
            place = home if known is None else known
            shares[place] = shares.get(place, 0) + sizes[value][0]
    return max(shares, key=lambda place: shares[place], default=None)


def _time_ns(
    name: str, time_ns: int | None, work: tuple[int, int] | None, device: Device | None
) -> tuple[str, int]:
    """Returns the name of a function, and its time on each of its devices."""
    if device is None:
        if time_ns is None:
            raise PlacementError(
                f"function {name!r} was never measured; expected a device whose speed is known, or "
                "a program that ran for a while before it was captured"
            )
        return name, time_ns
    if work is None:
        raise PlacementError(f"nothing was counted of function {name!r}, so its time is not known")
    return name, round(1e9 * device.seconds(*work))
