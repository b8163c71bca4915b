"""Expert parallelism: mixture-of-experts layers whose experts are on different islands.

Each row is sent only to the experts to which it is routed, and no row is dropped. A device computes
the rows that it received, not its full capacity.

Source: PATHWAYS §1-2 (sparse models) and §4.3 (sparse exchanges over many islands); no row dropped,
as in MegaBlocks (Gale et al., MLSys 2023).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from fairway.errors import ConfigError
from fairway.exchanges import Exchange

__all__ = ["Experts"]

Apply = Callable[[Any, Any], Any]
_lax: Any = jax.lax
_partition: Any = PartitionSpec


class Experts:
    """Experts to which rows are dispatched.

    Called inside a function that :func:`fairway.program` traces; it is differentiable with respect
    to the experts' parameters and the rows.

    Args:
        apply: computes one expert's output, [m, ...], of its parameters and rows, [m, width]; each
            row independently.
        exchange: between the devices of the rows and those of the experts, each of which has
            ``exchange.bins`` experts. If it has a capacity, devices receive at most that many rows
            at a time, and the rest follows in further rounds.
        block: rows that an expert computes at a time, the unit to which its work is rounded up.

    Example:
        >>> exchange = fairway.Exchange(tokens, experts, bins=2)  # shardings, one for each island
        >>> layer = Experts(lambda weights, rows: jax.nn.relu(rows @ weights), exchange)
        >>> mixed = layer(layer.place(weights), rows, chosen, shares)
    """

    def __init__(self, apply: Apply, exchange: Exchange, block: int = 128) -> None:
        if block < 1:
            raise ConfigError(f"experts compute {block} rows at a time; expected at least 1")
        self.exchange = exchange
        self._compute = [_on_devices(apply, target, block) for target in exchange.targets]
        self._mix = [jax.jit(_mix, out_shardings=source) for source in exchange.sources]

    def place(self, parameters: Any) -> list[Any]:
        """Places each expert's parameters on its device.

        Args:
            parameters: a tree of arrays whose first axis is the expert.

        Returns:
            The tree of each group of devices.

        Raises:
            ConfigError: the number of experts differs from the number of places.
        """
        experts = {leaf.shape[0] for leaf in jax.tree.leaves(parameters)}
        if experts != {self.exchange.places}:
            raise ConfigError(
                f"there are places for {self.exchange.places} experts and parameters for "
                f"{sorted(experts)}"
            )
        placed, first = [], 0
        for target in self.exchange.targets:
            last = first + len(target.device_set) * self.exchange.bins
            mine = jax.tree.map(lambda leaf, part=slice(first, last): leaf[part], parameters)
            placed.append(jax.device_put(mine, target))
            first = last
        return placed

    def __call__(
        self,
        parameters: Sequence[Any],
        rows: Sequence[Any],
        chosen: Sequence[Any],
        shares: Sequence[Any],
    ) -> list[Any]:
        """Returns the outputs of the chosen experts for each row, summed with their weights.

        Args:
            parameters: as returned by :meth:`place`.
            rows: of each group of source devices, [n, width].
            chosen: numbers of experts, int32 [n, k]; negative for none.
            shares: weight of each chosen expert (gate), [n, k].

        Returns:
            Arrays [n, ...] of each group.

        Raises:
            ExchangeError: the arrays do not fit the exchange.
        """
        exchange = self.exchange
        mixed: list[Any] = [None] * len(exchange.sources)
        for turn in range(exchange.rounds(chosen)):
            received = exchange.dispatch(rows, chosen, turn)
            made = [
                compute(own, one.rows, one.counts)
                for compute, own, one in zip(self._compute, parameters, received, strict=True)
            ]
            for group, back in enumerate(exchange.collect(made, received, chosen, turn)):
                mixed[group] = self._mix[group](mixed[group], back, shares[group])
        return mixed


def _mix(so_far: Any, back: Any, shares: Any) -> Any:
    """Adds the weighted sum of rows [n, k, ...] with weights [n, k] to that of earlier rounds."""
    more = jnp.einsum("nk,nk...->n...", shares, back)
    return more if so_far is None else so_far + more


def _on_devices(apply: Apply, target: Any, block: int) -> Callable[[Any, Any, Any], Any]:
    """Compiles the experts of one group of devices; each device computes its own."""

    def compute(parameters: Any, rows: Any, counts: Any) -> Any:
        return _grouped(apply, block, parameters, rows, counts)

    if isinstance(target, NamedSharding):
        spec = _partition(target.mesh.axis_names)
        compute = jax.shard_map(
            compute, mesh=target.mesh, in_specs=spec, out_specs=spec, check_vma=False
        )
    made: Callable[[Any, Any, Any], Any] = jax.jit(
        compute, in_shardings=(target, target, target), out_shardings=target
    )
    return made


# Rows are sorted by expert and computed in blocks. A block may extend into the next expert's rows;
# its results for those are overwritten by the next expert's block.


def _grouped(apply: Apply, block: int, parameters: Any, rows: Any, counts: Any) -> Any:
    """Applies each expert to its rows (grouped matrix multiplication).

    Args:
        apply: computes one expert's output of rows.
        block: rows at a time.
        parameters: a tree of arrays whose first axis is the expert.
        rows: [capacity, width], sorted by expert.
        counts: rows of each expert, int32 [experts].
    """

    @jax.custom_vjp
    def run(parameters: Any, rows: Any, counts: Any) -> Any:
        padded, blocks, place = _blocks(rows, counts, block)
        like = jax.eval_shape(apply, _of(parameters, 0), padded[:block])
        made = jnp.zeros((len(padded), *like.shape[1:]), like.dtype)

        def one(number: Any, made: Any) -> Any:
            expert, at, mine = place(number)
            part = apply(_of(parameters, expert), _lax.dynamic_slice_in_dim(padded, at, block))
            return _lax.dynamic_update_slice_in_dim(made, _masked(part, mine), at, 0)

        return _lax.fori_loop(0, blocks, one, made)[: len(rows)]

    def forward(parameters: Any, rows: Any, counts: Any) -> Any:
        return run(parameters, rows, counts), (parameters, rows, counts)

    def backward(kept: Any, gradient: Any) -> Any:
        parameters, rows, counts = kept
        padded, blocks, place = _blocks(rows, counts, block)
        given = _padded(gradient, block)

        def one(number: Any, sums: Any) -> Any:
            of_parameters, of_rows = sums
            expert, at, mine = place(number)
            taken = _lax.dynamic_slice_in_dim(padded, at, block)
            part = _masked(_lax.dynamic_slice_in_dim(given, at, block), mine)
            back = jax.vjp(apply, _of(parameters, expert), taken)[1]
            more, row = back(part)
            of_parameters = jax.tree.map(
                lambda total, one: total.at[expert].add(one), of_parameters, more
            )
            return of_parameters, _lax.dynamic_update_slice_in_dim(of_rows, row, at, 0)

        nothing = jax.tree.map(jnp.zeros_like, (parameters, padded))
        of_parameters, of_rows = _lax.fori_loop(0, blocks, one, nothing)
        integers = jnp.zeros(counts.shape, jax.dtypes.float0)
        return of_parameters, of_rows[: len(rows)], integers

    run.defvjp(forward, backward)
    return run(parameters, rows, counts)


def _of(parameters: Any, expert: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[expert], parameters)


def _padded(rows: Any, block: int) -> Any:
    return jnp.concatenate([rows, jnp.zeros((block, *rows.shape[1:]), rows.dtype)])


def _masked(rows: Any, mine: Any) -> Any:
    """Masks with zeros the rows of a block that belong to another expert."""
    return jnp.where(mine.reshape(-1, *[1] * (rows.ndim - 1)), rows, 0)


def _blocks(rows: Any, counts: Any, block: int) -> tuple[Any, Any, Callable[[Any], Any]]:
    """Returns rows padded for a last block, the number of blocks, and a function that locates them.

    The function returns a block's expert, its first row, and which of its rows are that expert's.
    """
    blocks = (counts + block - 1) // block
    ends = jnp.cumsum(blocks)
    starts = jnp.cumsum(counts) - counts

    def place(number: Any) -> Any:
        expert = jnp.searchsorted(ends, number, side="right")
        within = (number - (ends[expert] - blocks[expert])) * block
        mine = within + jnp.arange(block) < counts[expert]
        return expert, starts[expert] + within, mine

    return _padded(rows, block), ends[-1], place
