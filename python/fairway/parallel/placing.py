"""Which way to train a model on islands: all ways are told beforehand, and the best one is taken.

A model is a row of blocks. It can be copied to all islands (:class:`Replicas`), spread over them
(:class:`Sharded`), or cut into stages (:class:`Pipeline`), with more or fewer microbatches in
either schedule. What blocks take is measured on the devices of the first island; the rest is
simulated, by the network that joins islands.

Source: SiP-ML §3.2 (all ways to divide devices among copies and parts), PATHWAYS §4.1 (placement
is the system's). Differs from SiP-ML: what devices of an island tell each other is in what was
measured.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import jax
import numpy as np

from fairway.errors import CapacityError, ConfigError
from fairway.parallel.blocks import Block, form, inputs_of, mapped, read_blocks, time_s
from fairway.parallel.parts import Part, Stage
from fairway.parallel.pipeline import Pipeline
from fairway.parallel.replicas import Replicas
from fairway.parallel.schedules import Kind, schedule
from fairway.parallel.sharded import Sharded
from fairway.parallel.splits import Split, borders, split
from fairway.placement.fabrics import read_interconnect
from fairway.placement.graphs import Tasks
from fairway.placement.search import carry_out_tasks

__all__ = ["Costs", "Placed", "Way", "copied", "piped", "place"]

SCHEDULES = ("1f1b", "gpipe")
STATES = 3
"""Numbers that are kept for each parameter besides it: its gradient, and two of an optimizer."""
REPEATS = 3

_struct: Any = jax.ShapeDtypeStruct

Trainer = Pipeline | Replicas | Sharded


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to train.

    Attributes:
        kind: whether islands have copies, shares of all parameters, or stages.
        islands: how many are used.
        microbatches: of a pipeline; else 1.
        schedule: of a pipeline; else nothing.
        step_s: what a step is said to take.
        memory_bytes: what a device holds for parameters and what an optimizer keeps.
    """

    kind: Literal["replicas", "sharded", "pipeline"]
    islands: int
    microbatches: int
    schedule: str
    step_s: float
    memory_bytes: int

    def __str__(self) -> str:
        if self.kind == "pipeline":
            return f"pipeline of {self.islands}, {self.microbatches} x {self.schedule}"
        return f"{self.kind} on {self.islands}"


@dataclasses.dataclass(frozen=True)
class Costs:
    """What a block takes of so many rows.

    Attributes:
        forward_s: forward.
        backward_s: backward.
        update_s: to apply gradients.
        output_bytes: that it passes on.
        parameter_bytes: of its parameters.
    """

    forward_s: float
    backward_s: float
    update_s: float
    output_bytes: int
    parameter_bytes: int


class Measured(Protocol):
    """What blocks take.

    Attributes:
        rows: of a step.
        devices: of an island.
    """

    @property
    def rows(self) -> int:
        """Of a step."""

    @property
    def devices(self) -> int:
        """Of an island."""

    def of(self, rows: int) -> list[Costs]:
        """Of each block, on the devices of an island, with so many rows."""


class Placed:
    """A model, and all ways to train it that fit, the fastest in front; see :func:`place`.

    Attributes:
        ways: as told, the best first.
    """

    def __init__(
        self,
        blocks: list[Block],
        islands: list[list[jax.Device]],
        loss: Callable[[Any, Any], Any],
        optimizer: Any,
        ways: list[Way],
        stages: Callable[[Sequence[Sequence[jax.Device]]], Split],
    ) -> None:
        self.ways = ways
        self._blocks = blocks
        self._islands = islands
        self._loss = loss
        self._optimizer = optimizer
        self._stages = stages

    def trainer(self, way: Way | None = None) -> tuple[Trainer, list[Any]]:
        """What trains the model that way, the best one if nobody says, and what its ``init`` takes.

        Its ``step`` runs as any program of Fairway does.
        """
        way = self.ways[0] if way is None else way
        islands = self._islands[: way.islands]
        if way.kind == "pipeline":
            cut = self._stages(islands)
            made = Pipeline(
                cut.stages,
                self._loss,
                self._optimizer,
                microbatches=way.microbatches,
                schedule=way.schedule,
            )
            return made, cut.parameters
        kind = Replicas if way.kind == "replicas" else Sharded
        functions = [block.apply for block in self._blocks]
        parameters = [block.parameters for block in self._blocks]
        return kind(functions, islands, self._loss, self._optimizer), parameters


def place(
    model: Any,
    example: Any,
    islands: Sequence[Sequence[jax.Device]],
    loss: Callable[[Any, Any], Any],
    optimizer: Any,
    *,
    targets: Any,
    network: str = "10Gbit/s",
    latency: str = "100us",
    variables: Sequence[Any] | None = None,
    microbatches: Sequence[int] = (1, 2, 4, 8),
    memory_bytes: int | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Placed:
    """Says how long every way to train a model would take, and makes the one that is wanted.

    Args:
        model: as :func:`fairway.parallel.split` takes it: a row of flax modules.
        example: input of a step; only its shape and type matter.
        islands: devices of each, as many on all.
        loss: mean loss of the last block's output and targets, a scalar.
        optimizer: as optax makes them.
        targets: of the example, likewise.
        network: what an island sends to others, and receives.
        latency: of a message between islands.
        variables: of each linen module, as its ``init`` returned them.
        microbatches: into how many a pipeline may cut a batch.
        memory_bytes: of a device; no limit, unless somebody says.
        progress: is told how many blocks were measured, of how many.

    Raises:
        ConfigError: the model is no row of blocks, or the batch has no part for every device.
        CapacityError: no way fits.

    Example:
        >>> placed = fairway.place(layers, tokens, islands, loss, optax.adam(1e-3), targets=tokens)
        >>> trainer, parameters = placed.trainer()
        >>> state = trainer.init(parameters)
    """
    groups = [list(devices) for devices in islands]
    if not groups or len({len(devices) for devices in groups}) > 1:
        raise ConfigError(f"islands have {[len(one) for one in groups]} devices; expected one size")
    blocks, _ = read_blocks(model, variables)
    measured = _Measured(blocks, example, targets, groups[0], loss, optimizer, progress)

    def parts(counts: Sequence[int]) -> list[int]:
        """Into how many parts the batch can be cut, each with rows for every device."""
        return [c for c in sorted(set(counts)) if measured.rows % (c * len(groups[0])) == 0]

    copies = parts((1, len(groups)))
    cuts = parts(microbatches) if 1 < len(groups) <= len(blocks) else []
    if not copies:
        raise ConfigError(
            f"a batch of {measured.rows} has no part for each of {len(groups[0])} devices"
        )
    measured.prepare(sorted({measured.rows // count for count in (*copies, *cuts)}))
    joined = f"rate={network},latency={latency}"
    ways = []
    for count in copies:
        ways.append(copied(measured, "replicas", count, joined))
        if count > 1:
            ways.append(copied(measured, "sharded", count, joined))
    for count in cuts:
        names = SCHEDULES[:1] if count == 1 else SCHEDULES
        ways += [piped(measured, len(groups), count, name, joined) for name in names]
    fits = [way for way in ways if memory_bytes is None or way.memory_bytes <= memory_bytes]
    if not fits:
        least = min(way.memory_bytes for way in ways)
        raise CapacityError(f"a device needs {least} bytes at least; it has {memory_bytes}")
    fits.sort(key=lambda way: way.step_s)
    whole = measured.of(measured.rows)
    costs = [cost.forward_s + cost.backward_s for cost in whole]

    def stages(chosen: Sequence[Sequence[jax.Device]]) -> Split:
        return split(model, chosen, example, variables=variables, costs=costs)

    return Placed(blocks, groups, loss, optimizer, fits, stages)


class _Measured:
    """What blocks take on the devices of an island, by how many rows they get."""

    def __init__(
        self,
        blocks: list[Block],
        example: Any,
        targets: Any,
        devices: list[jax.Device],
        loss: Callable[[Any, Any], Any],
        optimizer: Any,
        progress: Callable[[int, int], object] | None,
    ) -> None:
        self._blocks = blocks
        self._inputs = inputs_of(blocks, example, devices)
        self._targets = jax.eval_shape(lambda: jax.tree.map(jax.numpy.asarray, targets))
        self._devices = devices
        self._loss = loss
        self._optimizer = optimizer
        self._progress = progress or (lambda done, of: None)
        self._known: dict[int, list[Costs]] = {}
        sizes = {leaf.shape[0] for leaf in jax.tree.leaves(self._inputs[0]) if leaf.ndim}
        if len(sizes) != 1:
            raise ConfigError(f"the first axis of the example has {sorted(sizes)} rows")
        self.rows: int = sizes.pop()

    @property
    def devices(self) -> int:
        """Of an island."""
        return len(self._devices)

    def of(self, rows: int) -> list[Costs]:
        """Of each block."""
        return self._known[rows]

    def prepare(self, counts: Sequence[int]) -> None:
        """Measures all blocks with so many rows; those that are alike once."""
        total = len(counts) * len(self._blocks)
        for turn, rows in enumerate(counts):
            alike: dict[Any, Costs] = {}
            found = []
            for number, block in enumerate(self._blocks):
                self._progress(turn * len(self._blocks) + number, total)
                given = _with_rows(self._inputs[number], rows)
                is_last = number == len(self._blocks) - 1
                structure, kinds = form((block.parameters, given))
                key = (block.kind, structure, tuple(kinds), number == 0, is_last)
                if key not in alike:
                    alike[key] = self._measure(number, given, rows)
                found.append(alike[key])
            self._known[rows] = found
        self._progress(total, total)

    def _measure(self, number: int, given: Any, rows: int) -> Costs:
        block, is_last = self._blocks[number], number == len(self._blocks) - 1
        stage = Stage(block.apply, self._devices)
        loss = self._loss if is_last else None
        part = Part(stage, number == 0, loss, self._optimizer, 1, False)

        def zeros(shapes: Any) -> Any:
            return part.take(jax.tree.map(lambda one: np.zeros(one.shape, one.dtype), shapes))

        made = jax.eval_shape(mapped(block.apply, self._devices), block.parameters, given)
        target = [zeros(_with_rows(self._targets, rows))] if is_last else []
        gradient = None if is_last else zeros(made)
        parameters, state = part.place(block.parameters)
        arguments = (parameters, zeros(given), *target)
        _, back = part.forward(*arguments)
        flat, _ = part.backward_flat(back, arguments, gradient)
        forward_s = time_s(lambda: part.forward(*arguments)[0], REPEATS)
        backward_s = time_s(lambda: part.backward_flat(back, arguments, gradient), REPEATS)

        def update() -> Any:
            nonlocal parameters, state
            parameters, state = part.update_flat(parameters, state, flat)
            return parameters

        update_s = time_s(update, REPEATS)
        return Costs(forward_s, backward_s, update_s, _bytes(made), _bytes(block.parameters))


def _with_rows(shapes: Any, rows: int) -> Any:
    return jax.tree.map(
        lambda one: _struct((rows, *one.shape[1:]), one.dtype) if one.ndim else one, shapes
    )


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


class _Step:
    """Tasks of a step, as they are found out one after another."""

    def __init__(self) -> None:
        self.tasks: Tasks = []

    def add(self, job: tuple[Any, ...], after: Sequence[int]) -> int:
        self.tasks.append((job, list(after)))
        return len(self.tasks) - 1

    def compute(self, island: int, seconds: float, after: Sequence[int]) -> int:
        return self.add((island, round(1e9 * seconds)), after)

    def takes_s(self, islands: int, joined: str) -> float:
        interconnect = read_interconnect(f"elect-flat:{islands},{joined}")
        return carry_out_tasks(self.tasks, interconnect).seconds


def copied(
    measured: Measured, kind: Literal["replicas", "sharded"], islands: int, joined: str
) -> Way:
    """Islands have all blocks, or a share of each; the batch is cut over them.

    Args:
        measured: what blocks take.
        kind: which of both.
        islands: how many.
        joined: options of a flat interconnect between them.
    """
    costs = measured.of(measured.rows // islands)
    members = list(range(islands))
    step = _Step()
    is_shared = kind == "sharded"
    gathers: list[int] = []

    def gather(block: int) -> list[int]:
        """What computing with a block waits for; parameters come in the order of their use."""
        if not is_shared:
            return []
        job = (members, costs[block].parameter_bytes, "all_gather")
        gathers.append(step.add(job, gathers[-1:]))
        return gathers[-1:]

    last: list[list[int]] = [[] for _ in members]
    for block, cost in enumerate(costs):
        there = gather(block)
        last = [[step.compute(i, cost.forward_s, [*last[i], *there])] for i in members]
    summed: list[list[int]] = [[] for _ in costs]
    for block in reversed(range(len(costs))):
        # The last block is there from the forward pass.
        there = gather(block) if block < len(costs) - 1 else []
        cost = costs[block]
        last = [[step.compute(i, cost.backward_s, [*last[i], *there])] for i in members]
        if islands > 1:
            name = "reduce_scatter" if is_shared else "all_reduce"
            made = [one for of_island in last for one in of_island]
            summed[block] = [step.add((members, cost.parameter_bytes, name), made)]
    for block in reversed(range(len(costs))):
        share = 1 / islands if is_shared else 1.0
        took = share * costs[block].update_s
        last = [[step.compute(i, took, [*last[i], *summed[block]])] for i in members]
    sizes = [cost.parameter_bytes for cost in costs]
    held = (1 + STATES) * sum(sizes)
    if is_shared:
        held = held // (islands * measured.devices) + 2 * max(sizes)
    return Way(kind, islands, 1, "", step.takes_s(islands, joined), held)


def piped(measured: Measured, stages: int, count: int, name: str, joined: str) -> Way:
    """An island has a stage; microbatches go from one to the next, and gradients back.

    Args:
        measured: what blocks take.
        stages: as many as islands.
        count: of microbatches.
        name: of the schedule.
        joined: options of a flat interconnect between islands.
    """
    whole = measured.of(measured.rows)
    cuts = borders([cost.forward_s + cost.backward_s for cost in whole], stages)
    costs = measured.of(measured.rows // count)
    parts = [costs[slice(*pair)] for pair in itertools.pairwise(cuts)]
    step = _Step()
    # What each stage did last, and what each task made of whom.
    last: list[list[int]] = [[] for _ in parts]
    made: dict[tuple[Kind, int, int], int] = {}
    for task in schedule(name, stages, count):
        part, turn = parts[task.stage], task.microbatch
        after = list(last[task.stage])
        if task.kind is Kind.FORWARD:
            took = sum(cost.forward_s for cost in part)
            if task.stage > 0:
                after.append(made[Kind.FORWARD, task.stage - 1, turn])
            target = task.stage + 1
            size = part[-1].output_bytes
        else:
            took = sum(cost.backward_s for cost in part)
            if task.stage < stages - 1:
                after.append(made[Kind.BACKWARD, task.stage + 1, turn])
            target = task.stage - 1
            size = parts[target][-1].output_bytes if target >= 0 else 0
        done = step.compute(task.stage, took, after)
        last[task.stage] = [done]
        if 0 <= target < stages:
            made[task.kind, task.stage, turn] = step.add((task.stage, target, size), [done])
    for stage, part in enumerate(parts):
        step.compute(stage, sum(cost.update_s for cost in part), last[stage])
    held = (1 + STATES) * max(sum(cost.parameter_bytes for cost in part) for part in parts)
    return Way("pipeline", stages, count, name, step.takes_s(stages, joined), held)
