"""Programs that were captured, as operations that are free to be placed anew."""

from __future__ import annotations

from fairway import _native
from fairway.errors import PlacementError
from fairway.placement.graphs import Edge, Op, OpGraph
from fairway.placement.models import Device

__all__ = ["of_program"]

SMALL_BYTES = 4096
"""What the step begins with and is smaller than this goes to whoever reads it."""


def of_program(text: str, device: Device | None = None) -> OpGraph:
    """Operations of a captured program; see :mod:`fairway.capture`.

    Each call is one, and can be cut into as many shards as it ran on devices: what they told each
    other is in its time. What the step begins with (parameters, an optimizer's state, a batch) is
    where it is read first, and so is whoever else reads it, as what applies gradients is where the
    forward pass is.

    Args:
        text: as ``fairway capture`` writes it.
        device: how fast operations are, by what XLA counts of them; without one they take the
            times that were measured.

    Returns:
        Operations of one batch, the one that the program ran with.

    Raises:
        PlacementError: it holds no program, or it is not known what a function takes; says which.
    """
    try:
        functions, sizes, inputs, nodes = _native.program_nodes(text)
    except ValueError as error:
        raise PlacementError(f"it holds no program: {error}") from None
    times = [_time_ns(*function, device) for function in functions]
    origins = list(range(len(sizes)))  # what a value is that was only moved
    makers: dict[int, int] = {}
    homes: dict[int, int] = {}  # of what the step begins with
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
        name, each = ("exchange", 0) if function is None else times[function]
        ops.append(
            Op(
                name,
                [each * count],
                [Edge(source, [size]) for source, size in sources.items()],
                [max(held, 0)],
                sum(sizes[value][1] for value in fresh),
                beside=beside,
                shards_max=count,
                launch_ns=0 if device is None or function is None else round(1e9 * device.launch_s),
            )
        )
        makers |= dict.fromkeys(results, number)
    return OpGraph([1], ops)


def _beside(
    homes: dict[int, int], number: int, ops: list[Op], sizes: list[tuple[int, int]]
) -> int | None:
    """Where an operation is because of what the step begins with: whoever has most of that."""
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
    """Name of a function, and what it takes on each of its devices."""
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
