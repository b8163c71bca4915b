"""Trains a character-level transformer, data-parallel over two or more islands, in plain JAX.

Every island holds a replica of the parameters and computes the gradient of its share of the batch
on its own mesh. Then the islands exchange gradients (all-reduce), and each applies the same
average, so that the replicas stay bitwise equal. Nothing here needs Fairway: under plain `python`
the halves of eight CPU devices act as the islands. With `--input host`, Fairway's hosts make the
batches.
"""

from __future__ import annotations

import argparse
import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import lm
from corpus import BadInputError, Corpus, read_corpus
from reporting import save_report

COMPUTATIONS = 3  # of one step on a device: gradient, sum over islands, update

State = tuple[lm.Params, Any]  # parameters and optimizer state
Exchange = Callable[[list[jax.Array]], list[jax.Array]]  # one per island to their sum on each
Batches = Iterator[list[jax.Array]]  # each island's share, int32 [rows, sequence + 1]


def build_gradient(island: lm.Island, layers: list[Any]) -> Callable[..., Any]:
    """Compiles (params, tokens [rows, sequence + 1]) to (losses [devices], gradient [parameters]).

    The gradient is one vector, the island's mean, on each of its devices: one collective a step.
    """

    def compute_gradient(params: lm.Params, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        def loss_of(params: lm.Params) -> jax.Array:
            return lm.mean_loss(lm.forward(layers, params, tokens[:, :-1]), tokens[:, 1:])

        # Parameters that vary by device have a gradient of this device's rows alone, not yet
        # summed over the mesh leaf by leaf.
        local = jax.lax.pcast(params, "data", to="varying")
        loss, gradient = jax.value_and_grad(loss_of)(local)
        return loss[None], jax.lax.pmean(ravel_pytree(gradient)[0], "data")

    replicated, sharded = PartitionSpec(), PartitionSpec("data")
    return jax.jit(
        jax.shard_map(
            compute_gradient,
            mesh=island.mesh,
            in_specs=(replicated, sharded),
            out_specs=(sharded, replicated),
        )
    )


def build_update(island: lm.Island, islands: int) -> Callable[..., State]:
    """Compiles (state, total [parameters]) to the next state; the total is of all islands."""
    optimizer = lm.build_optimizer()

    def update(state: State, total: jax.Array) -> State:
        params, optimizer_state = state
        restore = ravel_pytree(params)[1]
        mean = restore(total / islands)
        updates, optimizer_state = optimizer.update(mean, optimizer_state, params)
        return jax.tree.map(operator.add, params, updates), optimizer_state

    return jax.jit(update, donate_argnums=0, out_shardings=island.replicated)


def build_device_put_exchange(islands: list[lm.Island]) -> Exchange:
    """Returns an exchange by plain device_put: every island receives all gradients and adds them.

    All add in island order, so that the sums are bitwise equal.
    """

    def add_up(gradients: list[jax.Array]) -> jax.Array:
        return functools.reduce(operator.add, gradients)

    sums = [jax.jit(add_up, out_shardings=island.replicated) for island in islands]

    def exchange(gradients: list[jax.Array]) -> list[jax.Array]:
        return [
            sums[number]([jax.device_put(gradient, island.replicated) for gradient in gradients])
            for number, island in enumerate(islands)
        ]

    return exchange


def build_psum_exchange(islands: list[lm.Island]) -> Exchange:
    """Returns an exchange by a computation over all islands that is only a psum (all-reduce)."""
    sizes = [len(island.devices) for island in islands]
    if len(set(sizes)) > 1:
        raise BadInputError(
            f"--exchange psum: expected islands of one size, got {sizes}; try device_put"
        )
    mesh = Mesh(np.array([island.devices for island in islands]), ("island", "data"))
    stacked = NamedSharding(mesh, PartitionSpec("island"))

    def sum_over_islands(gradient: jax.Array) -> jax.Array:
        total: jax.Array = jax.lax.psum(gradient, "island")
        return total

    sum_all = jax.jit(
        jax.shard_map(sum_over_islands, mesh=mesh, in_specs=stacked.spec, out_specs=PartitionSpec())
    )

    def exchange(gradients: list[jax.Array]) -> list[jax.Array]:
        parts = [shard.data for gradient in gradients for shard in gradient.addressable_shards]
        (parameters,) = gradients[0].shape
        shape = (len(islands) * parameters,)
        total = sum_all(jax.make_array_from_single_device_arrays(shape, stacked, parts))
        at = {shard.device: shard.data for shard in total.addressable_shards}
        return [
            jax.make_array_from_single_device_arrays(
                (parameters,), island.replicated, [at[device] for device in island.devices]
            )
            for island in islands
        ]

    return exchange


def make_batches(islands: list[lm.Island], corpus: Corpus, settings: argparse.Namespace) -> Batches:
    """Makes batches in this process and copies their rows to the islands."""
    for tokens in corpus.batches(settings.seed, settings.batch, settings.sequence):
        shares = np.split(tokens, len(islands))
        yield [
            jax.device_put(share, island.sharded)
            for share, island in zip(shares, islands, strict=True)
        ]


def ask_hosts(islands: list[lm.Island], corpus: Corpus, settings: argparse.Namespace) -> Batches:
    """Lets the hosts of each island make its share; this process sends one message per island."""
    import fairway

    rows = settings.batch // len(islands)
    inputs = [
        fairway.inputs(
            "corpus:host_batches",
            like=jax.ShapeDtypeStruct(
                (rows, settings.sequence + 1), corpus.tokens.dtype, sharding=island.sharded
            ),
            text=str(settings.text.resolve()) if settings.text else None,
            seed=settings.seed,
            rows=settings.batch,
            sequence=settings.sequence,
            first_row=number * rows,
        )
        for number, island in enumerate(islands)
    ]
    while True:
        yield [ask() for ask in inputs]


EXCHANGES = {"device_put": build_device_put_exchange, "psum": build_psum_exchange}


INPUTS = {"client": make_batches, "host": ask_hosts}


class Trainer:
    """A replica of the model on every island, and the compiled parts of a step."""

    def __init__(self, islands: list[lm.Island], layers: list[Any], exchange: Exchange) -> None:
        self._islands = islands
        self._exchange = exchange
        self._gradients = [build_gradient(island, layers) for island in islands]
        self._updates = [build_update(island, len(islands)) for island in islands]
        self._states: list[State] = []

    def start(self, params: lm.Params) -> None:
        """Copies the initial parameters to every island."""
        state = (params, jax.jit(lm.build_optimizer().init)(params))
        self._states = [jax.device_put(state, island.replicated) for island in self._islands]

    def step(self, shares: list[jax.Array]) -> list[jax.Array]:
        """Dispatches one step on each island's share of a batch; returns losses per island."""
        losses, gradients = [], []
        for number, share in enumerate(shares):
            loss, gradient = self._gradients[number](self._states[number][0], share)
            losses.append(loss)
            gradients.append(gradient)
        for number, total in enumerate(self._exchange(gradients)):
            self._states[number] = self._updates[number](self._states[number], total)
        return losses


def main(settings: argparse.Namespace) -> None:
    """Trains, then reports."""
    islands = lm.find_islands()
    lm.check_divides(len(islands), settings.batch, "--batch over the islands")
    rows = settings.batch // len(islands)
    for island in islands:
        lm.check_divides(len(island.devices), rows, "an island's share of --batch over its devices")
    corpus = read_corpus(settings.text, settings.sequence)
    layers = lm.build_layers(settings, len(corpus.vocabulary))
    trainer = Trainer(islands, layers, EXCHANGES[settings.exchange](islands))
    trainer.start(lm.initialize(layers, settings.seed, settings.sequence))
    facts = lm.describe(islands, corpus) | {
        "exchange": settings.exchange,
        "input": settings.input,
    }
    batches = INPUTS[settings.input](islands, corpus, settings)
    run = lm.train(trainer.step, batches, settings, COMPUTATIONS)
    save_report("train_lm", run, settings, facts)


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = lm.build_parser("Trains a character-level transformer data-parallel over islands.")
    parser.add_argument(
        "--exchange",
        choices=sorted(EXCHANGES),
        default="device_put",
        help="how gradients cross islands",
    )
    parser.add_argument(
        "--input",
        choices=sorted(INPUTS),
        default="client",
        help="who makes batches; hosts do only under Fairway",
    )
    return parser.parse_args()


if __name__ == "__main__":
    lm.run_main(main, parse_arguments())
