"""File formats of steps and channel costs.

A step is JSON: the number of ranks, and the tasks of each in program order::

    {"ranks": 4,
     "tasks": [
       {"name": "lookup", "compute_ms": 100, "after": ["row_grads@1"]},
       {"name": "rows", "after": ["lookup"],
        "collective": {"kind": "all_to_all", "elements": 1048576}, "dtype": "float32"},
       {"name": "top", "compute_ms": 300, "after": ["rows"]},
       {"name": "row_grads", "after": ["top"],
        "collective": {"kind": "all_to_all", "elements": 1048576}}],
     "hand": ["rows", "row_grads"],
     "prefetch": {}}

``NAME@1`` is a task of the preceding step. Elements are counted as
:class:`fairway.communication.team.Collective` does; a collective may have a ``root``, ``sizes`` or
``pairs``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fairway.communication.steps import After, ChannelCost, Step, Task
from fairway.communication.team import Collective
from fairway.errors import ConfigError, StepError
from fairway.quantities import parse_duration, parse_rate

__all__ = ["channels", "read_costs", "read_step", "write_costs"]

KINDS = {
    "all_reduce": (),
    "reduce_scatter": (),
    "all_gather": (),
    "all_to_all": (),
    "broadcast": ("root",),
    "reduce": ("root",),
}
"""Collectives that a file may name, and the fields that each has besides ``elements``."""


def read_step(path: str | os.PathLike[str]) -> tuple[Step, int]:
    """Reads a step from a JSON file.

    Returns:
        The step, and the number of ranks.

    Raises:
        StepError: the file holds no step; says where.
        OSError: the file cannot be read.
    """
    try:
        given = json.loads(Path(path).read_bytes())
    except ValueError as error:
        raise StepError(f"{path} holds no step: {error}; expected JSON") from None
    try:
        if not isinstance(given, Mapping):
            raise StepError('it is no object; expected {"ranks": ..., "tasks": [...]}')
        ranks = _integer(given, "ranks")
        tasks = tuple(_task(ranks, task) for task in _list(given, "tasks"))
        hand = tuple(_list(given, "hand")) if "hand" in given else ()
        prefetch = given.get("prefetch", {})
        if not isinstance(prefetch, Mapping) or not all(isinstance(name, str) for name in hand):
            raise StepError("its order by hand is no list of names with names to follow")
    except StepError as error:
        raise StepError(f"{path} holds no step: {error}") from None
    return Step(tasks, hand, dict(prefetch)), ranks


def _list(given: Any, name: str) -> list[Any]:
    found = given.get(name) if isinstance(given, Mapping) else None
    if not isinstance(found, list) or not found:
        raise StepError(f"it has no {name!r}; expected a list")
    return found


def _integer(given: Any, name: str) -> int:
    found = given.get(name) if isinstance(given, Mapping) else None
    if not isinstance(found, int) or isinstance(found, bool) or found < 0:
        shown = "missing" if found is None else reprlib.repr(found)
        raise StepError(f"{name!r} is {shown}; expected a whole number")
    return found


def _task(ranks: int, given: Any) -> Task:
    name = given.get("name") if isinstance(given, Mapping) else None
    if not isinstance(name, str) or not name:
        raise StepError(f"a task is {given!r}; expected one with a name")
    known = {"name", "after", "compute_ms", "collective", "dtype"}
    if unknown := set(given) - known:
        names = ", ".join(sorted(known))
        raise StepError(f"{name} has {sorted(unknown)[0]!r}; there are {names}")
    after = given.get("after", [])
    if not isinstance(after, list) or not all(isinstance(one, str) for one in after):
        raise StepError(f"{name} waits for {after!r}; expected a list of names")
    waits = tuple(_after(one) for one in after)
    dtype = given.get("dtype", "float32")
    if ("compute_ms" in given) == ("collective" in given):
        raise StepError(f"{name} has not one of 'compute_ms' and 'collective'")
    if "collective" in given:
        return Task(
            name, waits, collective=_collective(ranks, name, given["collective"]), dtype=dtype
        )
    milliseconds = given["compute_ms"]
    if not isinstance(milliseconds, int | float) or not 0 <= milliseconds <= 1e9:
        raise StepError(f"{name} computes for {milliseconds!r} ms; expected 0 to 1e9")
    return Task(name, waits, milliseconds / 1e3)


def _after(text: str) -> After:
    name, at, before = text.rpartition("@")
    return After(name, int(before)) if at and before.isdigit() else After(text)


def _collective(ranks: int, name: str, given: Any) -> Collective:
    kind = given.get("kind") if isinstance(given, Mapping) else None
    try:
        if kind == "all_to_all" and "sizes" in given:
            return Collective.all_to_all_of(ranks, given["sizes"])
        if kind == "permute":
            pairs = [(source, target) for source, target in _list(given, "pairs")]
            return Collective.permute(ranks, _integer(given, "elements"), pairs)
        if kind not in KINDS:
            raise StepError(f"{name} asks for {kind!r}; there are {', '.join(KINDS)} and permute")
        more = [_integer(given, field) for field in KINDS[kind]]
        make: Any = getattr(Collective, kind)
        made: Collective = make(ranks, _integer(given, "elements"), *more)
        return made
    except (ValueError, TypeError, OverflowError) as error:
        raise StepError(f"{name} cannot be: {error}") from None


def channels(text: str, latency: str = "50us") -> list[ChannelCost]:
    """Returns assumed costs of unmeasured channels, from rates such as ``200Mbit/s,100Mbit/s``.

    Args:
        text: comma-separated rates.
        latency: of a round on each.

    Raises:
        ConfigError: a rate or the latency cannot be parsed.
    """
    latency_ns = parse_duration("the latency", latency)
    rates = [parse_rate("the rate of a channel", rate.strip()) for rate in text.split(",")]
    return [ChannelCost(rate, latency_ns) for rate in rates]


def write_costs(path: str | os.PathLike[str], costs: Sequence[ChannelCost]) -> None:
    """Writes channel costs, as :func:`read_costs` reads them."""
    text = json.dumps({"channels": [dataclasses.asdict(cost) for cost in costs]}, indent=1)
    Path(path).write_text(text + "\n")


def read_costs(path: str | os.PathLike[str]) -> list[ChannelCost]:
    """Reads channel costs from a file of :func:`write_costs`.

    Raises:
        ConfigError: the file holds something else.
        OSError: the file cannot be read.
    """
    try:
        found = json.loads(Path(path).read_bytes())
    except ValueError as error:
        raise _no_costs(path, f"it is no JSON: {error}") from None
    entries = found.get("channels") if isinstance(found, Mapping) else None
    if not isinstance(entries, list):
        raise _no_costs(path, "it has no list 'channels'")
    return [_read_cost(path, number, entry) for number, entry in enumerate(entries)]


def _no_costs(path: str | os.PathLike[str], found: str) -> ConfigError:
    return ConfigError(
        f"{path} does not say what channels take: {found}; expected what "
        "`fairway calibrate --out FILE` writes"
    )


def _read_cost(path: str | os.PathLike[str], number: int, entry: Any) -> ChannelCost:
    if not isinstance(entry, Mapping):
        raise _no_costs(path, f"channel {number} is {reprlib.repr(entry)}, no object")
    known = [field.name for field in dataclasses.fields(ChannelCost)]
    for name, value in entry.items():
        if name not in known:
            raise _no_costs(path, f"channel {number} has {name!r}; there are {', '.join(known)}")
        values = value if name == "overlap" and isinstance(value, list) else [value]
        if not all(isinstance(one, int | float) and not isinstance(one, bool) for one in values):
            shown = reprlib.repr(value)
            raise _no_costs(path, f"{name!r} of channel {number} is {shown}, no number")
    if "rate_bps" not in entry:
        raise _no_costs(path, f"channel {number} has no 'rate_bps'")
    return ChannelCost(**{**entry, "overlap": tuple(entry.get("overlap", ()))})
