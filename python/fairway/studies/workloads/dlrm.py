"""A recommendation model (DLRM) over several ranks, with the five collectives of its step.

Embedding tables are sharded over ranks (model parallelism), each of which also has a replica of the
MLPs and its own part of every batch. In a step ranks exchange the row indices they need (``data``),
the rows (``rows``) and their gradients (``row_grads``), and all-reduce the gradients of both MLPs
(``top_grads``, ``bottom_grads``).

Source: SYNDICATE §3.1.1 and Figure 13. Differs from it: updates are applied where parameters are
needed next, so that gradients of one step may arrive during the next.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fairway.communication.steps import After, Step, Task
from fairway.communication.team import Collective, Vector

__all__ = ["WORKLOADS", "Config", "Rank", "reference_losses"]

DENSE = 13
"""Dense features of a sample, as in Criteo's data."""
GROUPS = 16
"""Tables whose rows are pooled together before features interact."""
LEARNING_RATE = 0.05

Array = Any


@dataclasses.dataclass(frozen=True)
class Config:
    """A model and how fast devices compute it.

    Attributes:
        tables: embedding tables; a multiple of the number of ranks.
        rows: of each table.
        dim: of an embedding.
        words: raw words of one feature of a sample, which the table's owner hashes to
        pooled: this many rows, which are sum-pooled.
        bottom: widths of the hidden layers of the bottom MLP.
        top: the same of the top MLP.
        batch: samples of one rank.
        lookup_s, bottom_s, top_s, back_s: compute times of the four parts of a step on a device.
        seed: of all randomness.
    """

    tables: int = 128
    rows: int = 400
    dim: int = 256
    words: int = 64
    pooled: int = 4
    bottom: tuple[int, ...] = (1024, 512)
    top: tuple[int, ...] = (1024, 1024, 512)
    batch: int = 32
    lookup_s: float = 0.10
    bottom_s: float = 0.08
    top_s: float = 0.30
    back_s: float = 0.12
    seed: int = 0

    def step(self, ranks: int) -> Step:
        """Returns the tasks of a rank's step.

        Raises:
            ValueError: the ranks do not divide the tables.
        """
        if self.tables % ranks:
            raise ValueError(f"{self.tables} tables cannot be spread evenly over {ranks} ranks")
        owned = self.tables // ranks
        rows = owned * self.batch * self.dim * ranks
        bottom, top = (sum(a * b + b for a, b in widths) for widths in self.layers())
        exchange = Collective.all_to_all
        reduce = Collective.all_reduce
        tasks = (
            Task(
                "data",
                collective=exchange(ranks, owned * self.batch * self.words * ranks),
                dtype="int32",
            ),
            Task("lookup", (After("data"), After("row_grads", 1)), self.lookup_s),
            Task("rows", (After("lookup"),), collective=exchange(ranks, rows)),
            Task("bottom", (After("bottom_grads", 1),), self.bottom_s),
            Task("top", (After("rows"), After("bottom"), After("top_grads", 1)), self.top_s),
            Task("row_grads", (After("top"),), collective=exchange(ranks, rows)),
            Task("top_grads", (After("top"),), collective=reduce(ranks, top)),
            Task("back", (After("top"),), self.back_s),
            Task("bottom_grads", (After("back"),), collective=reduce(ranks, bottom)),
        )
        hand = ("data", "rows", "row_grads", "bottom_grads", "top_grads")
        return Step(tasks, hand, {"data": "rows"})

    def layers(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Returns inputs and outputs of each layer of both MLPs."""
        pairs = (GROUPS + 1) * GROUPS // 2
        bottom = (DENSE, *self.bottom, self.dim)
        top = (pairs + self.dim, *self.top, 1)
        return list(itertools.pairwise(bottom)), list(itertools.pairwise(top))

    def weights(self) -> tuple[Vector, Vector]:
        """Returns initial weights of both MLPs, each as one vector."""
        random = np.random.default_rng((self.seed, 1))

        def of(layers: list[tuple[int, int]]) -> Vector:
            parts = []
            for fan_in, fan_out in layers:
                weight = random.standard_normal(fan_in * fan_out) * np.sqrt(1.0 / fan_in)
                parts += [weight.astype(np.float32), np.zeros(fan_out, np.float32)]
            return np.concatenate(parts)

        bottom, top = self.layers()
        return of(bottom), of(top)

    def table(self, number: int) -> Vector:
        """Returns the initial values of an embedding table: rows x dim."""
        random = np.random.default_rng((self.seed, 2, number))
        return (random.standard_normal((self.rows, self.dim)) * 0.1).astype(np.float32)

    def samples(self, step: int, rank: int) -> tuple[Vector, Vector, Vector]:
        """Generates a rank's training data for a step.

        Returns:
            Dense features (batch x 13), words (tables x batch x words), and labels (batch).
        """
        random = np.random.default_rng((self.seed, 3, step, rank))
        dense = np.log1p(random.exponential(2.0, (self.batch, DENSE))).astype(np.float32)
        # Word frequencies are skewed, as in click logs.
        shape = (self.tables, self.batch, self.words)
        words = (random.random(shape, np.float32) ** 4 * 50_000).astype(np.int32)
        taste = np.cos(words[: self.tables // 4, :, 0] * 1.7).sum(0)
        score = dense @ np.linspace(-1, 1, DENSE) + taste / np.sqrt(self.tables // 4)
        labels = (score > np.median(score)).astype(np.float32)
        return dense, words, labels

    def indices(self, words: Array) -> Array:
        """Returns rows of a table for the words of its feature: ... x words to ... x pooled."""
        groups = words.reshape(*words.shape[:-1], self.pooled, -1)
        mixed = (groups * (2 * jnp.arange(groups.shape[-1], dtype=jnp.int32) + 1)).sum(-1)
        return mixed % self.rows


def _mlp(weights: Array, layers: list[tuple[int, int]], values: Array) -> Array:
    at = 0
    for number, (fan_in, fan_out) in enumerate(layers):
        matrix = weights[at : at + fan_in * fan_out].reshape(fan_in, fan_out)
        at += fan_in * fan_out
        values = values @ matrix + weights[at : at + fan_out]
        at += fan_out
        if number < len(layers) - 1:
            values = jax.nn.relu(values)
    return values


def _losses(config: Config, weights: Array, features: Array, pooled: Array, labels: Array) -> Array:
    """Returns the loss of each sample, from bottom features (batch x dim) and pooled rows."""
    tables, batch, dim = pooled.shape
    groups = pooled.reshape(GROUPS, tables // GROUPS, batch, dim).sum(1)
    everything = jnp.concatenate([features[None], groups]).transpose(1, 0, 2)
    products = jnp.einsum("bid,bjd->bij", everything, everything) / dim
    upper = np.triu_indices(GROUPS + 1, 1)
    inputs = jnp.concatenate([features, products[:, upper[0], upper[1]]], 1)
    scores = _mlp(weights, config.layers()[1], inputs)[:, 0]
    return jnp.maximum(scores, 0) - scores * labels + jnp.log1p(jnp.exp(-jnp.abs(scores)))


@dataclasses.dataclass(frozen=True)
class _Functions:
    """Computations of devices, compiled once for all ranks of one model."""

    lookup: Callable[..., Any]
    learn_rows: Callable[..., Array]
    bottom: Callable[..., Array]
    top: Callable[..., Any]
    back: Callable[..., Array]
    learn: Callable[..., Array]


@functools.lru_cache
def _functions(config: Config, ranks: int) -> _Functions:
    owned = config.tables // ranks
    total = ranks * config.batch
    layers = config.layers()[0]

    def lookup(tables: Array, words: Array) -> Any:
        words = words.reshape(ranks, owned, config.batch, config.words).swapaxes(0, 1)
        indices = config.indices(words.reshape(owned, total, config.words))
        # One row of each at a time: gathering all at once would materialize them in memory.
        at = indices + config.rows * jnp.arange(owned, dtype=jnp.int32)[:, None, None]
        flat = tables.reshape(owned * config.rows, config.dim)
        rows = sum(flat[at[..., number]] for number in range(config.pooled))
        # owned x (ranks x batch) x dim; the blocks of each target rank are contiguous.
        return indices, rows.reshape(owned, ranks, config.batch, config.dim).swapaxes(0, 1)

    def learn_rows(tables: Array, indices: Array, grads: Array) -> Array:
        grads = grads.reshape(ranks, owned, config.batch, config.dim)
        grads = grads.swapaxes(0, 1).reshape(owned, total, config.dim)
        update: Any = jax.vmap(lambda table, rows, grad: table.at[rows].add(-LEARNING_RATE * grad))
        for number in range(config.pooled):
            tables = update(tables, indices[..., number], grads)
        return tables

    def bottom(weights: Array, dense: Array) -> Array:
        return _mlp(weights, layers, dense)

    def top(weights: Array, features: Array, pooled: Array, labels: Array) -> Any:
        def loss(weights: Array, features: Array, pooled: Array) -> Array:
            return _losses(config, weights, features, pooled, labels).sum() / total

        graded: Any = jax.value_and_grad(loss, (0, 1, 2))
        return graded(weights, features, pooled)

    def back(weights: Array, dense: Array, grads: Array) -> Array:
        _, pull = jax.vjp(lambda weights: _mlp(weights, layers, dense), weights)
        return pull(grads)[0]

    def learn(weights: Array, grads: Array) -> Array:
        return weights - LEARNING_RATE * grads

    return _Functions(
        jax.jit(lookup),
        jax.jit(learn_rows, donate_argnums=0),
        *(jax.jit(function) for function in (bottom, top, back, learn)),
    )


class Rank:
    """One rank's part of the model; a :class:`fairway.communication.steps.Program`.

    Args:
        config: the model.
        rank: number of this rank.
        ranks: number of ranks.
    """

    def __init__(self, config: Config, rank: int, ranks: int) -> None:
        self._config = config
        self._rank = rank
        self._ranks = ranks
        self._owned = config.tables // ranks
        self._functions = _functions(config, ranks)
        tables = range(rank * self._owned, (rank + 1) * self._owned)
        self._tables = jnp.stack([jnp.asarray(config.table(number)) for number in tables])
        self._weights = [jnp.asarray(weights) for weights in config.weights()]
        self._samples: dict[int, tuple[Vector, Vector, Vector]] = {}
        self._indices: Array = None
        self._results: dict[str, Array] = {}
        self._made: dict[str, Array] = {}
        self.losses: list[float] = []

    def load(self, steps: int) -> None:
        """Generates this rank's training data for ``steps`` steps."""
        self._samples = {step: self._config.samples(step, self._rank) for step in range(steps)}

    def compute(self, task: str, step: int) -> None:
        """Computes a task, and waits for its end."""
        compute: dict[str, Callable[[int], None]] = {
            "lookup": self._compute_lookup,
            "bottom": self._compute_bottom,
            "top": self._compute_top,
            "back": self._compute_back,
        }
        compute[task](step)

    def _compute_lookup(self, step: int) -> None:
        grads = self._results.pop("row_grads", None)
        if grads is not None:
            self._tables = self._functions.learn_rows(self._tables, self._indices, grads)
        words = self._results.pop("data")
        self._indices, rows = self._functions.lookup(self._tables, words)
        self._made["rows"] = np.asarray(rows)

    def _compute_bottom(self, step: int) -> None:
        self._learned(0, "bottom_grads")
        features = self._functions.bottom(self._weights[0], self._samples[step][0])
        self._made["features"] = features.block_until_ready()

    def _compute_top(self, step: int) -> None:
        self._learned(1, "top_grads")
        shape = (self._config.tables, self._config.batch, self._config.dim)
        pooled = self._results.pop("rows").reshape(shape)
        labels = self._samples[step][2]
        loss, grads = self._functions.top(self._weights[1], self._made["features"], pooled, labels)
        self._made["top_grads"], self._made["back"], rows = (np.asarray(one) for one in grads)
        self._made["row_grads"] = rows
        self.losses.append(float(loss))

    def _compute_back(self, step: int) -> None:
        dense = self._samples.pop(step)[0]
        grads = self._functions.back(self._weights[0], dense, self._made["back"])
        self._made["bottom_grads"] = np.asarray(grads)

    def _learned(self, which: int, grads: str) -> None:
        if grads in self._results:
            self._weights[which] = self._functions.learn(
                self._weights[which], self._results.pop(grads)
            )

    def give(self, task: str, step: int, vector: Vector) -> None:
        """Fills the input buffer of a collective."""
        given = self._samples[step][1] if task == "data" else self._made[task]
        vector[: given.size] = given.reshape(-1)

    def take(self, task: str, step: int, result: Vector) -> None:
        """Keeps the result of a collective."""
        self._results[task] = jnp.array(result)


def reference_losses(
    config: Config, ranks: int, steps: int, seed: int | None = None
) -> list[float]:
    """Returns the mean loss of each step, computed as one model in one process.

    Each rank's samples are multiplied separately, as ranks do: where an activation is within
    rounding error of zero, larger products would round differently. So would sums in another order.

    Args:
        config: the model.
        ranks: number of ranks whose samples are used.
        steps: number of steps.
        seed: draws the order in which ranks' gradients are summed, separately for each of several
            blocks of a vector, as collectives may reorder them; None uses rank order.
    """
    order = np.random.default_rng(seed) if seed is not None else None
    bottom, top = (jnp.asarray(weights) for weights in config.weights())
    tables = jnp.stack([jnp.asarray(config.table(number)) for number in range(config.tables)])

    def loss(parameters: Any, dense: Array, indices: Array, labels: Array) -> Array:
        bottom, top, tables = parameters
        pooled = jax.vmap(lambda table, rows: table[rows].sum(-2))(tables, indices)
        features = _mlp(bottom, config.layers()[0], dense)
        return _losses(config, top, features, pooled, labels).sum() / (ranks * config.batch)

    step = jax.jit(jax.value_and_grad(loss))
    parameters = (bottom, top, tables)
    losses = []
    for number in range(steps):
        values: list[float] = []
        mlps: list[Array] = []
        learned: Array = None
        for rank in range(ranks):
            dense, words, labels = config.samples(number, rank)
            value, grads = step(parameters, dense, config.indices(jnp.asarray(words)), labels)
            values.append(float(value))
            *own, rows = grads
            mlps.append(own)
            learned = rows if learned is None else learned + rows
        losses.append(sum(values))
        sums = (*(_added(parts, order) for parts in zip(*mlps, strict=True)), learned)
        parameters = jax.tree.map(lambda p, g: p - LEARNING_RATE * g, parameters, sums)
    return losses


def _added(parts: Sequence[Array], order: np.random.Generator | None) -> Array:
    """Sums vectors in their order or, block by block, in a random one."""
    if order is None:
        return functools.reduce(jnp.add, parts)
    blocks = zip(*(np.array_split(np.asarray(part), len(parts)) for part in parts), strict=True)
    mixed = ([own[rank] for rank in order.permutation(len(own))] for own in blocks)
    return jnp.concatenate([functools.reduce(np.add, own) for own in mixed])


WORKLOADS = {
    "balanced": Config(),
    "embeddings": Config(dim=512, bottom=(256,), top=(512, 512, 256), seed=1),
    "mlps": Config(dim=128, bottom=(1024, 1024), top=(2048, 1024, 512), seed=2),
    "data": Config(words=192, bottom=(512, 512), top=(1024, 512), seed=3),
    "compute": Config(lookup_s=0.18, bottom_s=0.14, top_s=0.54, back_s=0.22, seed=4),
}
"""Workloads for the comparison of systems; fixed before any of them was measured."""
