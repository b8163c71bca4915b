"""Chooses a parallelism strategy for training on islands, by predicted step time.

A model is a sequence of blocks. It can be replicated on all islands (:class:`Replicas`), sharded
over them (:class:`Sharded`), or split into stages (:class:`Pipeline`), with various numbers of
microbatches and either schedule. Block times are measured on all islands that a strategy uses
concurrently, as islands may share hardware; stage times on the first island alone. The rest is
simulated on the network between islands.

Source: SiP-ML §3.2 (all divisions of devices among copies and parts), PATHWAYS §4.1 (placement is
the system's). Differs from SiP-ML: communication within an island is part of the measured times.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax

from fairway._native import StepGraph
from fairway.errors import ConfigError
from fairway.parallel.blocks import Block, read_blocks
from fairway.parallel.joined import ConfiguredNetwork, Joined, MeasuredNetwork
from fairway.parallel.joined import Kind as Collective
from fairway.parallel.measuring import Known, MeasuredBlocks, Training
from fairway.parallel.pipeline import Pipeline
from fairway.parallel.replicas import AHEAD, Replicas
from fairway.parallel.schedules import PassKind, schedule
from fairway.parallel.sharded import Sharded
from fairway.parallel.splits import Split, split
from fairway.placement.ranking import rank
from fairway.placement.search import simulate_graph

__all__ = [
    "Placed",
    "StrategyOptions",
    "Training",
    "TrainingStrategy",
    "copied",
    "piped",
    "place_blocks",
]

SCHEDULES = ("1f1b", "gpipe")
STATES = 3
"""Numbers kept per parameter besides it: its gradient, and two of optimizer state."""

SHOWN = 5
"""Most strategies that ``print`` shows."""

Trainer = Pipeline | Replicas | Sharded


@dataclasses.dataclass(frozen=True)
class TrainingStrategy:
    """A parallelism strategy.

    Attributes:
        kind: whether islands have copies, shards of all parameters, or stages.
        islands: number of islands used.
        microbatches: of a pipeline; else 1.
        schedule: of a pipeline; else empty.
        step_s: predicted time of a step.
        memory_bytes: bytes of parameters, gradients and optimizer state on a device.
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
class StrategyOptions:
    """The network between islands, and which strategies are considered.

    Attributes:
        network: bandwidth of each island in each direction, such as ``"10Gbit/s"``; by default
            communication between islands is measured.
        latency: of a message between islands; used only with ``network``.
        variables: of each linen module, as its ``init`` returned them.
        microbatches: numbers of microbatches to consider for a pipeline.
        memory_bytes: capacity of a device; no limit by default.
    """

    network: str | None = None
    latency: str = "100us"
    variables: Sequence[Any] | None = None
    microbatches: Sequence[int] = (1, 2, 4, 8)
    memory_bytes: int | None = None


DEFAULTS = StrategyOptions()


class Placed:
    """A model with all strategies that fit in memory; see :func:`place_blocks`.

    Attributes:
        strategies: strategies with predicted times, the fastest first.
    """

    def __init__(
        self,
        blocks: list[Block],
        islands: list[list[jax.Device]],
        training: Training,
        strategies: list[TrainingStrategy],
        stages: Callable[[Sequence[Sequence[jax.Device]]], Split],
    ) -> None:
        self.strategies = strategies
        self._blocks = blocks
        self._islands = islands
        self._training = training
        self._stages = stages

    def __repr__(self) -> str:
        shown = [
            f"{strategy}: {1e3 * strategy.step_s:.3f} ms a step predicted"
            for strategy in self.strategies[:SHOWN]
        ]
        if len(self.strategies) > SHOWN:
            shown.append(f"and {len(self.strategies) - SHOWN} more")
        return f"Placed, {len(self._blocks)} blocks, the fastest first:\n  " + "\n  ".join(shown)

    def trainer(self, strategy: TrainingStrategy | None = None) -> tuple[Trainer, list[Any]]:
        """The trainer of a strategy, by default the fastest, and the argument of its ``init``.

        Its ``step`` runs as any program of Fairway does.
        """
        strategy = self.strategies[0] if strategy is None else strategy
        islands = self._islands[: strategy.islands]
        if strategy.kind == "pipeline":
            cut = self._stages(islands)
            made = Pipeline(
                cut.stages,
                self._training.loss,
                self._training.optimizer,
                microbatches=strategy.microbatches,
                schedule=strategy.schedule,
            )
            return made, cut.parameters
        kind = Replicas if strategy.kind == "replicas" else Sharded
        functions = [block.apply for block in self._blocks]
        parameters = [block.parameters for block in self._blocks]
        return kind(functions, islands, self._training.loss, self._training.optimizer), parameters


def place_blocks(
    model: Any,
    islands: Sequence[Sequence[jax.Device]],
    training: Training,
    options: StrategyOptions = DEFAULTS,
    *,
    progress: Callable[[int, int], object] | None = None,
) -> Placed:
    """Predicts the step time of every strategy to train a model, and sorts the strategies by it.

    Args:
        model: a sequence of flax modules, as in :func:`fairway.parallel.split`.
        islands: devices of each island, the same number on all.
        training: what a step trains with.
        options: the network between islands, and which strategies are considered.
        progress: called with the number of blocks and stages measured, and their total.

    Raises:
        ConfigError: the model is no sequence of blocks, or the batch has no part for every device.
        CapacityError: no strategy fits in memory.

    Example:
        >>> training = fairway.Training(tokens, targets, loss, optax.adam(1e-3))
        >>> placed = place_blocks(layers, islands, training)
        >>> trainer, parameters = placed.trainer()
        >>> state = trainer.init(parameters)
    """
    groups = [list(devices) for devices in islands]
    if not groups or len({len(devices) for devices in groups}) > 1:
        raise ConfigError(f"islands have {[len(one) for one in groups]} devices; expected one size")
    variables = options.variables
    blocks, _ = read_blocks(model, variables)
    measured = MeasuredBlocks(blocks, training, groups, progress)

    def parts(counts: Sequence[int]) -> list[int]:
        """Returns the counts that cut the batch into equal parts with rows for every device."""
        return [c for c in sorted(set(counts)) if measured.rows % (c * len(groups[0])) == 0]

    copies = parts((1, len(groups)))
    cuts = parts(options.microbatches) if 1 < len(groups) <= len(blocks) else []
    if not copies:
        raise ConfigError(
            f"a batch of {measured.rows} has no part for each of {len(groups[0])} devices"
        )
    measured.prepare(copies, cuts)
    joined = (
        MeasuredNetwork(groups)
        if options.network is None
        else ConfiguredNetwork(len(groups), options.network, options.latency)
    )
    candidates: list[Callable[[], TrainingStrategy]] = []
    for count in copies:
        candidates.append(functools.partial(copied, measured, "replicas", count, joined))
        if count > 1:
            candidates.append(functools.partial(copied, measured, "sharded", count, joined))
    for count in cuts:
        names = SCHEDULES[:1] if count == 1 else SCHEDULES
        candidates += [functools.partial(piped, measured, count, name, joined) for name in names]
    fits = rank(candidates, lambda predict: predict(), options.memory_bytes)
    costs = [cost.forward_s + cost.backward_s for cost in measured.blocks(measured.rows)]

    def stages(chosen: Sequence[Sequence[jax.Device]]) -> Split:
        return split(model, chosen, training.example, variables=variables, costs=costs)

    return Placed(blocks, groups, training, fits, stages)


class _Step:
    """The graph of a step on joined islands."""

    def __init__(self, joined: Joined) -> None:
        self.graph = StepGraph(joined.interconnect.devices)
        self.joined = joined

    def compute(self, island: int, seconds: float, after: Sequence[int]) -> int:
        return self.graph.compute(island, round(1e9 * seconds), after)

    def takes_s(self) -> float:
        return simulate_graph(self.graph, self.joined.interconnect).seconds


def copied(
    measured: Known, kind: Literal["replicas", "sharded"], islands: int, joined: Joined
) -> TrainingStrategy:
    """Predicts data parallelism: islands have all blocks, or shards, and part of the batch.

    Args:
        measured: costs of blocks.
        kind: replicated or sharded.
        islands: number of islands.
        joined: the network between them.
    """
    costs = measured.blocks(measured.rows // islands)
    members = list(range(islands))
    step = _Step(joined)
    is_shared = kind == "sharded"
    communicated: list[int] = []

    def tell(block: int, kind: Collective, after: Sequence[int]) -> list[int]:
        """Adds a collective of a block's data; collectives are issued in program order."""
        size, behind = costs[block].parameter_bytes, [*communicated[-1:], *after]
        communicated.append(joined.collective(step.graph, kind, members, size, behind))
        return communicated[-1:]

    def gather(block: int) -> list[int]:
        """Adds the all-gather on which a block's compute depends; none for replicas."""
        return tell(block, "all_gather", []) if is_shared and block < len(costs) else []

    last: list[list[int]] = [[] for _ in members]
    there = gather(0)
    for block, cost in enumerate(costs):
        following = gather(block + 1)
        last = [[step.compute(i, cost.forward_s, [*last[i], *there])] for i in members]
        there = following
    summed: list[list[int]] = [[] for _ in costs]
    # The last block is still gathered from the forward pass.
    wholes = {len(costs) - 1: there}
    others = reversed(range(len(costs) - 1))
    for block in reversed(range(len(costs))):
        for other in itertools.islice(others, AHEAD + 1 - len(wholes)):
            wholes[other] = gather(other)
        there = wholes.pop(block)
        cost = costs[block]
        last = [[step.compute(i, cost.backward_s, [*last[i], *there])] for i in members]
        if islands > 1:
            sums: Collective = "reduce_scatter" if is_shared else "all_reduce"
            summed[block] = tell(block, sums, [one for of_island in last for one in of_island])
    for block in reversed(range(len(costs))):
        share = 1 / islands if is_shared else 1.0
        took = share * costs[block].update_s
        last = [[step.compute(i, took, [*last[i], *summed[block]])] for i in members]
    sizes = [cost.parameter_bytes for cost in costs]
    held = (1 + STATES) * sum(sizes)
    if is_shared:
        held = held // (islands * measured.devices) + (AHEAD + 1) * max(sizes)
    return TrainingStrategy(kind, islands, 1, "", step.takes_s(), held)


def piped(measured: Known, count: int, name: str, joined: Joined) -> TrainingStrategy:
    """Predicts pipeline parallelism: one stage per island, with transfers between neighbours.

    Args:
        measured: costs of stages.
        count: number of microbatches.
        name: of the schedule.
        joined: the network between islands.
    """
    parts = measured.stages(measured.rows // count)
    stages = len(parts)
    step = _Step(joined)
    # The last task of each stage, and the transfer that each task's output takes.
    last: list[list[int]] = [[] for _ in parts]
    made: dict[tuple[PassKind, int, int], int] = {}
    for task in schedule(name, stages, count):
        part, turn = parts[task.stage], task.microbatch
        after = list(last[task.stage])
        if task.kind is PassKind.FORWARD:
            took = part.forward_s
            if task.stage > 0:
                after.append(made[PassKind.FORWARD, task.stage - 1, turn])
            target = task.stage + 1
            size = part.output_bytes
        else:
            took = part.backward_s
            if task.stage < stages - 1:
                after.append(made[PassKind.BACKWARD, task.stage + 1, turn])
            target = task.stage - 1
            size = parts[target].output_bytes if target >= 0 else 0
        done = step.compute(task.stage, took, after)
        last[task.stage] = [done]
        if task.kind is PassKind.BACKWARD and turn > 0:
            last[task.stage] = [step.compute(task.stage, part.add_s, [done])]
        if 0 <= target < stages:
            made[task.kind, task.stage, turn] = joined.transfer(
                step.graph, task.stage, target, size, [done]
            )
    for stage, part in enumerate(parts):
        step.compute(stage, part.update_s, last[stage])
    held = (1 + STATES) * max(part.parameter_bytes for part in parts)
    return TrainingStrategy("pipeline", stages, count, name, step.takes_s(), held)
