"""One client that trains a language model on request: worker of ``pipelines.py``.

The model is that of ``examples``: a decoder-only transformer over characters, as a list of linen
modules, split by ``fairway.parallel.split``; the text is Python's own standard library.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
import operator
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import paced
from common import ROOT, serve_methods

from fairway.parallel import Pipeline, Replicas, Sharded, split

sys.path.insert(0, str(ROOT / "examples"))
lm: Any = importlib.import_module("lm")
corpus: Any = importlib.import_module("corpus")

HEADS = 4

Step = Callable[[Any, Any, Any], tuple[Any, Any]]
Apply = Callable[[Any, Any], Any]


def first(random: np.random.Generator, path: tuple[Any, ...], form: Any) -> Any:
    """Draws initial parameters much as flax does, but without compilation."""
    match path[-1].key:
        case "bias":
            return np.zeros(form.shape, form.dtype)
        case "scale":
            return np.ones(form.shape, form.dtype)
        case "positions":
            return random.normal(0, 0.02, form.shape).astype(form.dtype)
        case _:
            return random.normal(0, form.shape[0] ** -0.5, form.shape).astype(form.dtype)


class Runner:
    """Builds strategies of training one model on all devices, and runs them."""

    def __init__(self) -> None:
        self._steps: dict[str, Step] = {}
        self._states: dict[str, Any] = {}

    def model(
        self, blocks: int, width: int, sequence: int, rows: int, microbatches: int, seed: int
    ) -> None:
        """Makes the model; ``rows`` are sequences of a microbatch."""
        text = corpus.read_corpus(None, sequence)
        vocabulary = len(text.vocabulary)
        modules = [lm.Embedding(vocabulary, width)]
        modules += [lm.Block(HEADS) for _ in range(blocks)]
        self._modules = [*modules, lm.Head(vocabulary)]
        shapes = jax.eval_shape(lambda: lm.initialize(self._modules, seed, sequence))
        random = np.random.default_rng(seed)
        parameters = jax.tree_util.tree_map_with_path(functools.partial(first, random), shapes)
        self._variables = [{"params": own} for own in parameters]
        self._example = np.zeros((rows, sequence), np.int32)
        self._microbatches = microbatches
        self._batches = functools.partial(text.batches, seed, rows * microbatches, sequence)

    def split(self, parts: int, gflops: float, islands: int) -> dict[str, Any]:
        """Splits the model into parts, for devices with this aggregate compute rate."""
        every = jax.devices()
        self._gflops = gflops / len(every)
        for devices in np.array(every).reshape(islands, -1).tolist():
            paced.on_hosts(devices)
        places = [[device] for device in itertools.islice(itertools.cycle(every), parts)]
        sizes = [sum(leaf.size for leaf in jax.tree.leaves(own)) for own in self._variables]
        # Embedding and head are negligible, and stages must be equal.
        costs = [0, *sizes[1:-1], 0]
        self._parts = split(
            self._modules, places, self._example, variables=self._variables, costs=costs
        )
        return {
            "parameters": self._parts.stage_costs,
            "borders": self._parts.borders,
            "stage_s": [self._seconds(size) for size in self._parts.stage_costs],
        }

    def _seconds(self, parameters: float) -> float:
        """Returns the device time of these parameters for a microbatch, forward and backward."""
        return 6 * parameters * self._example.size / self._gflops / 1e9

    def pipeline(self, schedule: str) -> None:
        """Makes a pipeline with one stage on each device."""
        stages = [
            dataclasses.replace(stage, function=self._paced(number, stage.devices, 1))
            for number, stage in enumerate(self._parts.stages)
        ]
        trained = Pipeline(
            stages,
            lm.mean_loss,
            lm.build_optimizer(),
            microbatches=self._microbatches,
            schedule=schedule,
        )
        self._steps[schedule] = trained.step
        self._states[schedule] = trained.init(self._parts.parameters)

    def replicas(self, name: str, islands: int) -> None:
        """Makes replicas, one on each of ``islands`` groups of devices."""
        self._train_together(Replicas, name, islands)

    def sharded(self, name: str, islands: int) -> None:
        """Shards parameters over ``islands`` groups of devices."""
        self._train_together(Sharded, name, islands)

    def _train_together(self, kind: type[Replicas | Sharded], name: str, islands: int) -> None:
        every = jax.devices()
        groups = np.array(every).reshape(islands, -1).tolist()
        part = self._microbatches / len(every)
        numbers = range(len(self._parts.stages))
        functions = [self._paced(number, groups[0], part) for number in numbers]
        trained = kind(functions, groups, lm.mean_loss, lm.build_optimizer())
        self._steps[name] = trained.step
        self._states[name] = trained.init(self._parts.parameters)

    def one_jit(self, name: str) -> dict[str, float]:
        """Compiles a step as one jit over all devices: data-parallel, on a mesh of all of them."""
        every = jax.devices()
        mesh = jax.sharding.Mesh(np.array(every), ("data",))
        over: Any = jax.sharding.PartitionSpec
        rows = jax.sharding.NamedSharding(mesh, over("data"))
        whole = jax.sharding.NamedSharding(mesh, over())
        part = self._microbatches / len(every)
        parts = [
            self._paced(number, every, part, in_row=True)
            for number in range(len(self._parts.stages))
        ]
        optimizer = lm.build_optimizer()

        def loss_of(parameters: Any, tokens: Any, targets: Any) -> Any:
            value = tokens
            for function, own in zip(parts, parameters, strict=True):
                value = function(own, value)
            return lm.mean_loss(value, targets)

        def step(state: Any, tokens: Any, targets: Any) -> tuple[Any, Any]:
            parameters, memory = state
            loss, gradient = jax.value_and_grad(loss_of)(parameters, tokens, targets)
            updates, memory = optimizer.update(gradient, memory, parameters)
            return (jax.tree.map(operator.add, parameters, updates), memory), loss

        state = (self._parts.parameters, optimizer.init(self._parts.parameters))
        state = jax.device_put(jax.tree.map(np.asarray, state), whole)
        batch = jax.device_put(next(iter(self._batches())), rows)
        lowered = jax.jit(step, donate_argnums=0).lower(state, batch[:, :-1], batch[:, 1:])
        began = time.perf_counter()
        compiled = lowered.compile()
        took = time.perf_counter() - began

        def train(state: Any, tokens: Any, targets: Any) -> tuple[Any, Any]:
            made: tuple[Any, Any] = compiled(state, *jax.device_put((tokens, targets), rows))
            return made

        self._steps[name], self._states[name] = train, state
        return {"compile_s": took}

    def _paced(
        self, number: int, devices: Sequence[Any], microbatches: float, in_row: bool = False
    ) -> Apply:
        """Returns a part of the model, paced for a number of microbatches on each device."""
        seconds = microbatches * self._seconds(self._parts.stage_costs[number])
        function = self._parts.stages[number].function
        return paced.paced(function, seconds / 3, 2 * seconds / 3, devices, in_row)

    def losses(self, name: str, steps: int) -> list[float]:
        """Trains on the first batches; compiles on the first call."""
        return [float(loss) for loss in self._train(name, steps)]

    def round(self, name: str, steps: int) -> float:
        """Trains on the first batches again; returns the seconds until all work is done."""
        began = time.perf_counter()
        losses = list(self._train(name, steps))
        losses[-1].block_until_ready()
        for leaf in jax.tree.leaves(self._states[name]):
            leaf.block_until_ready()
        return time.perf_counter() - began

    def _train(self, name: str, steps: int) -> Iterator[Any]:
        for tokens in itertools.islice(self._batches(), steps):
            self._states[name], loss = self._steps[name](
                self._states[name], tokens[:, :-1], tokens[:, 1:]
            )
            yield loss


def main() -> None:
    """Serves requests."""
    serve_methods(Runner())


if __name__ == "__main__":
    main()
