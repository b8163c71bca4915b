"""Trains a transformer with mixture-of-experts layers, whose experts are on all islands.

Every island holds a replica of the dense layers and a part of the batch; each device holds some of
the experts of every layer (expert parallelism). A token is dispatched to the experts that its
router chooses, on any island: only its row is transferred there, and the expert's output back
(all-to-all). The whole step is one program.

`--dispatch dense` is the reference: plain JAX on one device, where every expert computes every
token. The losses are the same up to rounding.
"""

from __future__ import annotations

import argparse
import operator
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import lm
from corpus import read_corpus
from reporting import save_report

Params = dict[str, Any]
Mix = Callable[[int, list[Any], list[Any], list[Any]], list[Any]]
"""Computes a layer's expert outputs for the rows of each island, from layer, rows, experts and
gates."""


class Attention(nn.Module):
    """Causal self-attention, [batch, sequence, width] to the same."""

    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Adds the attention's result to `x`."""
        return lm.attend(x, self.heads)


class Router(nn.Module):
    """Chooses experts for tokens."""

    experts: int
    choices: int

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Maps [batch, sequence, width] to rows [n, width], experts and gates [n, choices]."""
        rows = nn.LayerNorm()(x).reshape(-1, x.shape[-1])
        scores = jax.nn.softmax(nn.Dense(self.experts, use_bias=False)(rows))
        shares, chosen = jax.lax.top_k(scores, self.choices)
        return rows, chosen, shares / shares.sum(axis=1, keepdims=True)


def expert(weights: Params, rows: jax.Array) -> jax.Array:
    """One expert, a perceptron with one hidden layer: rows [n, width] to the same."""
    hidden = nn.gelu(rows @ weights["into"] + weights["bias"])
    result: jax.Array = hidden @ weights["out"]
    return result


def initialize(settings: argparse.Namespace, vocabulary: int) -> tuple[Params, list[Params]]:
    """Returns initial parameters of the dense layers, and of each layer's experts, float32."""
    width, experts = settings.width, settings.experts
    keys = iter(jax.random.split(jax.random.key(settings.seed), 2 + 4 * settings.layers))
    tokens = jnp.zeros((1, settings.sequence), jnp.int32)
    x = jnp.zeros((1, settings.sequence, width))
    dense: Params = {
        "embedding": lm.Embedding(vocabulary, width).init(next(keys), tokens)["params"],
        "head": lm.Head(vocabulary).init(next(keys), x)["params"],
    }
    layers = []
    for number in range(settings.layers):
        router = Router(experts, settings.choices)
        dense[f"attention_{number}"] = Attention(settings.heads).init(next(keys), x)["params"]
        dense[f"router_{number}"] = router.init(next(keys), x)["params"]
        draw = nn.initializers.lecun_normal(batch_axis=0)
        layers.append(
            {
                "into": draw(next(keys), (experts, width, 4 * width)),
                "bias": jnp.zeros((experts, 4 * width)),
                "out": draw(next(keys), (experts, 4 * width, width)),
            }
        )
    return dense, layers


class Model:
    """The dense layers, as functions that are compiled for each island."""

    def __init__(self, settings: argparse.Namespace, vocabulary: int) -> None:
        self.layers = settings.layers
        embedding, head = lm.Embedding(vocabulary, settings.width), lm.Head(vocabulary)
        attention, router = Attention(settings.heads), Router(settings.experts, settings.choices)

        def embed(params: Params, tokens: jax.Array) -> Any:
            return embedding.apply({"params": params}, tokens)

        def route(attending: Params, routing: Params, x: jax.Array) -> Any:
            x = attention.apply({"params": attending}, x)
            return x, router.apply({"params": routing}, x)

        def end(params: Params, x: jax.Array, targets: jax.Array) -> Any:
            return lm.mean_loss(head.apply({"params": params}, x), targets)

        self._embed, self._route, self._end = jax.jit(embed), jax.jit(route), jax.jit(end)
        self._add = jax.jit(lambda x, mixed: x + mixed.reshape(x.shape))

    def losses(self, dense: list[Params], mix: Mix, tokens: list[Any], targets: list[Any]) -> Any:
        """Returns the loss of each island's part of a batch, given each replica's parameters."""
        pairs = zip(dense, tokens, strict=True)
        xs = [self._embed(params["embedding"], part) for params, part in pairs]
        for number in range(self.layers):
            routed = [
                self._route(params[f"attention_{number}"], params[f"router_{number}"], x)
                for params, x in zip(dense, xs, strict=True)
            ]
            rows, chosen, shares = zip(*(ends for _, ends in routed), strict=True)
            mixed = mix(number, list(rows), list(chosen), list(shares))
            xs = [self._add(x, one) for (x, _), one in zip(routed, mixed, strict=True)]
        parts = zip(dense, xs, targets, strict=True)
        return [self._end(params["head"], x, target) for params, x, target in parts]


def update(params: Any, state: Any, gradient: Any) -> tuple[Any, Any]:
    """Applies one step of the optimizer."""
    changes, state = lm.build_optimizer().update(gradient, state, params)
    return jax.tree.map(operator.add, params, changes), state


class Dense:
    """The reference: every expert computes every token, on one device."""

    def __init__(self, model: Model, params: tuple[Params, list[Params]]) -> None:
        self._state = params, lm.build_optimizer().init(params)

        def mix(experts: list[Params], number: int, rows: Any, chosen: Any, shares: Any) -> Any:
            made = jax.vmap(expert, in_axes=(0, None))(experts[number], rows[0])
            count = len(made)
            weights = jnp.einsum("nk,nke->ne", shares[0], jax.nn.one_hot(chosen[0], count))
            return [jnp.einsum("ne,enw->nw", weights, made)]

        def loss(params: Any, tokens: Any, targets: Any) -> Any:
            dense, experts = params

            def layer(*given: Any) -> Any:
                return mix(experts, *given)

            return model.losses([dense], layer, [tokens], [targets])[0]

        def step(state: Any, tokens: Any, targets: Any) -> Any:
            params, optimizer = state
            value, gradient = jax.value_and_grad(loss)(params, tokens, targets)
            return value, update(params, optimizer, gradient)

        self._step = jax.jit(step, donate_argnums=0)

    def step(self, tokens: np.ndarray) -> list[jax.Array]:
        """Trains one step on tokens [batch, sequence + 1]; returns its loss."""
        loss, self._state = self._step(self._state, tokens[:, :-1], tokens[:, 1:])
        return [loss]


class Sparse:
    """Expert parallelism: tokens are dispatched to the chosen experts, over all islands."""

    def __init__(
        self,
        model: Model,
        params: tuple[Params, list[Params]],
        islands: list[lm.Island],
        bins: int,
        capacity: int | None,
    ) -> None:
        import fairway
        from fairway.parallel import Experts

        self._islands = islands
        places = tuple(island.sharded for island in islands)
        layer = Experts(expert, fairway.Exchange(places, places, bins, capacity))
        first = islands[0].replicated
        dense = jax.device_put(params[0], first)
        experts = [layer.place(one) for one in params[1]]
        states = jax.tree.map(_optimizer_state, (dense, experts), is_leaf=_is_params)
        self._state = dense, experts, states
        change = jax.jit(update, donate_argnums=(0, 1))

        def loss(dense: Params, experts: list[list[Params]], tokens: Any, targets: Any) -> Any:
            # Replicas of the others; their gradients are transferred back and summed with the
            # first's.
            copies = [dense] + [jax.device_put(dense, one.replicated) for one in islands[1:]]

            def mix(number: int, rows: Any, chosen: Any, shares: Any) -> Any:
                return layer(experts[number], rows, chosen, shares)

            losses = model.losses(copies, mix, tokens, targets)
            total = losses[0]
            for other in losses[1:]:
                total = total + jax.device_put(other, first)
            return total / len(islands)

        def step(state: Any, tokens: Any, targets: Any) -> Any:
            dense, experts, optimizer = state
            value, gradients = jax.value_and_grad(loss, argnums=(0, 1))(
                dense, experts, tokens, targets
            )
            old, tree = jax.tree.flatten((dense, experts), is_leaf=_is_params)
            given = zip(old, *map(tree.flatten_up_to, (optimizer, gradients)), strict=True)
            new, states = zip(*(change(*one) for one in given), strict=True)
            return value, (*tree.unflatten(new), tree.unflatten(states))

        self._step = fairway.program(step)

    def step(self, tokens: np.ndarray) -> list[jax.Array]:
        """Trains one step on tokens [batch, sequence + 1]; returns its loss."""
        shares = [
            [jax.device_put(part, island.sharded) for part, island in
             zip(np.split(side, len(self._islands)), self._islands, strict=True)]
            for side in (tokens[:, :-1], tokens[:, 1:])
        ]  # fmt: skip
        loss, self._state = self._step(self._state, *shares)
        return [loss]


def _optimizer_state(params: Params) -> Any:
    """Returns the initial optimizer state, with the sharding of the parameters."""
    place = jax.tree.leaves(params)[0].sharding
    whole = NamedSharding(place.mesh, PartitionSpec())
    state = lm.build_optimizer().init(params)
    return jax.tree.map(lambda leaf: jax.device_put(leaf, place if leaf.ndim else whole), state)


def _is_params(node: Any) -> bool:
    """Returns whether a node is the parameters of the dense layers, or of one group of experts."""
    return isinstance(node, dict)


def main(settings: argparse.Namespace) -> None:
    """Trains, then reports."""
    corpus = read_corpus(settings.text, settings.sequence)
    vocabulary = len(corpus.vocabulary)
    model, facts = Model(settings, vocabulary), {"dispatch": settings.dispatch}
    trainer: Dense | Sparse
    if settings.dispatch == "dense":
        trainer = Dense(model, initialize(settings, vocabulary))
    else:
        islands = lm.find_islands(f"--dispatch sparse: {lm.NEEDS_FAIRWAY}, or --dispatch dense")
        devices = sum(len(island.devices) for island in islands)
        lm.check_divides(devices, settings.experts, "--experts over all devices")
        lm.check_divides(devices, settings.batch, "--batch over all devices")
        facts |= lm.describe(islands, corpus)
        params = initialize(settings, vocabulary)
        bins = settings.experts // devices
        trainer = Sparse(model, params, islands, bins, settings.capacity)
    batches = corpus.batches(settings.seed, settings.batch, settings.sequence)
    run = lm.train(trainer.step, batches, settings, 16 * settings.layers)
    save_report(f"moe_lm_{settings.dispatch}", run, settings, facts)


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = lm.build_parser("Trains a character-level transformer with experts on all islands.")
    parser.add_argument("--experts", type=lm.positive_integer, default=8, help="experts a layer")
    parser.add_argument(
        "--choices", type=lm.positive_integer, default=2, help="experts that a token visits"
    )
    parser.add_argument(
        "--capacity",
        type=lm.positive_integer,
        help="rows that a device takes at a time; the rest waits; default: all that can come",
    )
    parser.add_argument(
        "--dispatch",
        choices=("sparse", "dense"),
        default="sparse",
        help="tokens travel to their experts, or every expert computes every token on one device",
    )
    return parser.parse_args()


if __name__ == "__main__":
    lm.run_main(main, parse_arguments())
