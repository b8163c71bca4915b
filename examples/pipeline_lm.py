"""Trains the model of `train_lm.py` as a pipeline with one stage per island, in plain JAX.

A stage is a slice of the model's layers, compiled on its island's mesh alone. One process
dispatches all stages' work in pipeline order and waits for none of it; `jax.device_put` transfers
activations to the next island and their gradients back, so that the stages overlap. The batches and
the initial parameters are those of `train_lm.py`, and so are the losses.
"""

from __future__ import annotations

import argparse
import itertools
import operator
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec

import lm
from corpus import BadInputError, read_corpus
from reporting import save_report

REPLICATED, SHARDED = PartitionSpec(), PartitionSpec("data")

State = tuple[lm.Params, Any]  # parameters and optimizer state


class Task(NamedTuple):
    """One microbatch's pass through one stage."""

    stage: int
    microbatch: int
    backward: bool

    def needs(self, stages: int) -> set[Task]:
        """Returns the tasks on which it depends."""
        if not self.backward:
            return {self._replace(stage=self.stage - 1)} if self.stage > 0 else set()
        own = {self._replace(backward=False)}
        return own | {self._replace(stage=self.stage + 1)} if self.stage < stages - 1 else own


def build_schedule(stages: int, microbatches: int, gpipe: bool) -> list[Task]:
    """Returns all tasks of a step in an order that satisfies their dependencies.

    GPipe runs all forward passes first. 1F1B starts a stage's first backward pass as soon as
    possible, so that stage `s` keeps the inputs of at most `stages - s` microbatches.
    """
    waiting = []
    for stage in range(stages):
        ahead = microbatches if gpipe else min(microbatches, stages - stage)
        forwards = deque(Task(stage, number, backward=False) for number in range(microbatches))
        tasks = deque(forwards.popleft() for _ in range(ahead))
        for number in range(microbatches):
            tasks.append(Task(stage, number, backward=True))
            if forwards:
                tasks.append(forwards.popleft())
        waiting.append(tasks)
    order: list[Task] = []
    done: set[Task] = set()
    while any(waiting):
        ready = [tasks.popleft() for tasks in waiting if tasks and tasks[0].needs(stages) <= done]
        assert ready, "every schedule has a next task"
        order += ready
        done.update(ready)
    return order


def build_forward(island: lm.Island, layers: list[Any]) -> Callable[..., jax.Array]:
    """Compiles (params, inputs) to the stage's output, activations [rows, sequence, width].

    Inputs are tokens [rows, sequence] for the first stage, else activations; their rows, like
    those of the output, are split over the island's devices.
    """

    def run_forward(params: lm.Params, inputs: jax.Array) -> jax.Array:
        return lm.forward(layers, params, inputs)

    return _compile(island, run_forward, (REPLICATED, SHARDED))


def build_backward(
    island: lm.Island, layers: list[Any], *, first: bool, last: bool
) -> Callable[..., tuple[jax.Array, jax.Array, jax.Array | None]]:
    """Compiles (params, total, inputs, end) to (losses [devices], total, gradient of inputs).

    `end` is the targets [rows, sequence] for the last stage, else the gradient of the stage's
    output. `total` [devices * parameters] is each device's sum over microbatches. Only the last
    stage's losses are meaningful; the first has no gradient of its inputs.
    """

    def objective(params: lm.Params, inputs: jax.Array, end: jax.Array) -> jax.Array:
        output = lm.forward(layers, params, inputs)
        # The gradient of <output, end> is the vector-Jacobian product with `end`.
        return lm.mean_loss(output, end) if last else (output * end).sum()

    differentiate = jax.value_and_grad(objective, argnums=(0,) if first else (0, 1))

    def run_backward(
        params: lm.Params, total: jax.Array, inputs: jax.Array, end: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        # Parameters that vary by device have a gradient of this device's rows alone.
        local = jax.lax.pcast(params, "data", to="varying")
        loss, (gradient, *of_inputs) = differentiate(local, inputs, end)
        total = total + ravel_pytree(gradient)[0]
        return loss[None], total, of_inputs[0] if of_inputs else None

    return _compile(island, run_backward, (REPLICATED, SHARDED, SHARDED, SHARDED))


def build_update(island: lm.Island, microbatches: int) -> Callable[..., State]:
    """Compiles (state, total [devices * parameters]) to the next state; one collective a step."""
    optimizer = lm.build_optimizer()
    parts = len(island.devices) * microbatches

    def update(state: State, total: jax.Array) -> State:
        params, optimizer_state = state
        mean = jax.lax.psum(total, "data") / parts
        restore = ravel_pytree(params)[1]
        updates, optimizer_state = optimizer.update(restore(mean), optimizer_state, params)
        return jax.tree.map(operator.add, params, updates), optimizer_state

    return _compile(island, update, (REPLICATED, SHARDED), out=REPLICATED, donate=0)


def _compile(
    island: lm.Island,
    compute: Callable[..., Any],
    arguments: tuple[PartitionSpec, ...],
    out: PartitionSpec = SHARDED,
    donate: int | tuple[int, ...] = (),
) -> Callable[..., Any]:
    """Compiles `compute` to run on each device's shard of its arguments."""
    mapped = jax.shard_map(compute, mesh=island.mesh, in_specs=arguments, out_specs=out)
    return jax.jit(mapped, donate_argnums=donate)


class Stage:
    """A slice of the layers on one island: its state and its compiled computations."""

    def __init__(
        self, island: lm.Island, layers: list[Any], microbatches: int, *, first: bool, last: bool
    ) -> None:
        self.island = island
        self._forward = build_forward(island, layers)
        self._backward = build_backward(island, layers, first=first, last=last)
        self._update = build_update(island, microbatches)

    def start(self, params: lm.Params) -> None:
        """Copies the stage's initial parameters to its island."""
        state = (params, jax.jit(lm.build_optimizer().init)(params))
        self._state: State = jax.device_put(state, self.island.replicated)
        parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
        zero = np.zeros(len(self.island.devices) * parameters, np.float32)
        self._zero = self._total = jax.device_put(zero, self.island.sharded)

    def forward(self, inputs: jax.Array) -> jax.Array:
        """Returns the next stage's inputs, still on this island."""
        return self._forward(self._state[0], inputs)

    def backward(self, inputs: jax.Array, end: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Returns losses and the gradient of `inputs`; accumulates that of the parameters."""
        losses, self._total, of_inputs = self._backward(self._state[0], self._total, inputs, end)
        return losses, of_inputs

    def update(self) -> None:
        """Applies the mean of the gradients accumulated since the last update."""
        self._state = self._update(self._state, self._total)
        self._total = self._zero


class Pipeline:
    """The stages in order, and the order of their tasks in a step."""

    def __init__(
        self, islands: list[lm.Island], layers: list[Any], microbatches: int, gpipe: bool
    ) -> None:
        last = len(islands) - 1
        self._microbatches = microbatches
        self._schedule = build_schedule(len(islands), microbatches, gpipe)
        self._slices = split_layers(len(layers), len(islands))
        self._stages = [
            Stage(island, layers[part], microbatches, first=number == 0, last=number == last)
            for number, (island, part) in enumerate(zip(islands, self._slices, strict=True))
        ]

    def start(self, params: lm.Params) -> None:
        """Copies every stage's initial parameters to its island."""
        for stage, part in zip(self._stages, self._slices, strict=True):
            stage.start(params[part])

    def step(self, tokens: np.ndarray) -> list[jax.Array]:
        """Dispatches one step on tokens [batch, sequence + 1]; returns losses per microbatch."""
        stages, last = self._stages, len(self._stages) - 1
        inputs: dict[tuple[int, int], jax.Array] = {}  # by stage and microbatch
        ends: dict[tuple[int, int], jax.Array] = {}
        losses = []
        for number, rows in enumerate(np.split(tokens, self._microbatches)):
            inputs[0, number] = jax.device_put(rows[:, :-1], stages[0].island.sharded)
            ends[last, number] = jax.device_put(rows[:, 1:], stages[last].island.sharded)
        for at, number, backward in self._schedule:
            if backward:
                loss, of_inputs = stages[at].backward(
                    inputs.pop((at, number)), ends.pop((at, number))
                )
                if at == last:
                    losses.append(loss)
                if of_inputs is not None:
                    ends[at - 1, number] = jax.device_put(of_inputs, stages[at - 1].island.sharded)
            elif at < last:  # the last stage's forward pass is part of its backward pass
                output = stages[at].forward(inputs[at, number])
                inputs[at + 1, number] = jax.device_put(output, stages[at + 1].island.sharded)
        for stage in stages:
            stage.update()
        return losses


def split_layers(layers: int, stages: int) -> list[slice]:
    """Splits embedding, blocks and head into stages with nearly equal numbers of blocks.

    Raises BadInputError where a stage would have no block.
    """
    blocks = layers - 2
    if blocks < stages:
        raise BadInputError(f"--layers: expected at least {stages}, one a stage, got {blocks}")
    borders = [1 + blocks * stage // stages for stage in range(stages + 1)]
    borders[0], borders[-1] = 0, layers
    return [slice(*pair) for pair in itertools.pairwise(borders)]


def main(settings: argparse.Namespace) -> None:
    """Trains, then reports."""
    islands = lm.find_islands()
    lm.check_divides(settings.microbatches, settings.batch, "--batch over --microbatches")
    rows = settings.batch // settings.microbatches
    for island in islands:
        lm.check_divides(len(island.devices), rows, "a microbatch over an island's devices")
    corpus = read_corpus(settings.text, settings.sequence)
    layers = lm.build_layers(settings, len(corpus.vocabulary))
    pipeline = Pipeline(islands, layers, settings.microbatches, settings.schedule == "gpipe")
    pipeline.start(lm.initialize(layers, settings.seed, settings.sequence))
    facts = lm.describe(islands, corpus)
    computations = 2 * settings.microbatches + 1  # of one step on a device
    batches = corpus.batches(settings.seed, settings.batch, settings.sequence)
    run = lm.train(pipeline.step, batches, settings, computations)
    save_report("pipeline_lm", run, settings, facts)


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = lm.build_parser("Trains a character-level transformer as a pipeline over islands.")
    parser.add_argument(
        "--microbatches", type=lm.positive_integer, default=4, help="parts of a batch"
    )
    parser.add_argument(
        "--schedule", choices=("1f1b", "gpipe"), default="1f1b", help="order of a stage's passes"
    )
    return parser.parse_args()


if __name__ == "__main__":
    lm.run_main(main, parse_arguments())
