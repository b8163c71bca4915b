"""Mixtures of experts whose experts lie on different islands.

Each row goes to the experts that are chosen for it and no further: between islands travels what
routing demands, and no row is dropped. A device computes the rows that have come, not the room
there is for more.

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
    """Experts that rows are sent to.

    Called inside a function that :func:`fairway.program` traces; it can be differentiated, by the
    experts' parameters and by the rows.

    Args:
        apply: what one expert makes of rows, [m, width] to [m, ...], from its parameters; each row
            by itself.
        exchange: between the devices that rows lie on and those of the experts, of which each
            has ``exchange.bins``. If it has a capacity, devices take so many rows at a time, and
            the rest follows in further rounds.
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
        """Puts each expert's parameters on its device.

        Args:
            parameters: a tree of arrays whose first axis is the expert.

        Returns:
            The tree of each group of devices.

        Raises:
            ConfigError: there are not as many experts as places for them.
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
        """What the chosen experts make of each row, added up by their shares.

        Args:
            parameters: as :meth:`place` gives them.
            rows: of each group of source devices, [n, width].
            chosen: numbers of experts, int32 [n, k]; negative for none.
            shares: what each counts, [n, k].

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
    """Adds rows [n, k, ...] by their shares [n, k] to those of earlier rounds."""
    more = jnp.einsum("nk,nk...->n...", shares, back)
    return more if so_far is None else so_far + more


def _on_devices(apply: Apply, target: Any, block: int) -> Callable[[Any, Any, Any], Any]:
    """The experts of one group of devices; each device computes its own."""

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


# The rows of each expert, block by block. A block may reach into the rows of the next expert; what
# is computed of those is overwritten when their turn comes.


def _grouped(apply: Apply, block: int, parameters: Any, rows: Any, counts: Any) -> Any:
    """Applies each expert to its rows.

    Args:
        apply: what one expert makes of rows.
        block: rows at a time.
        parameters: a tree of arrays whose first axis is the expert.
        rows: [capacity, width], by experts.
        counts: int32 [experts].
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
    """Zeros where a row of a block is another expert's."""
    return jnp.where(mine.reshape(-1, *[1] * (rows.ndim - 1)), rows, 0)


def _blocks(rows: Any, counts: Any, block: int) -> tuple[Any, Any, Callable[[Any], Any]]:
    """Rows with room for a last block, how many blocks there are, and where each lies.

    The third gives a block's expert, its first row, and which of its rows are that expert's.
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
