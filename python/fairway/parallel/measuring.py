"""Measures the cost of a model's blocks and pipeline stages on the devices of islands."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from fairway.errors import ConfigError
from fairway.parallel.blocks import Block, form, in_row, inputs_of, mapped, time_s
from fairway.parallel.parts import Part, Stage
from fairway.parallel.splits import borders

__all__ = ["Costs", "Known", "MeasuredBlocks", "Training"]

REPEATS = 3

_struct: Any = jax.ShapeDtypeStruct


@dataclasses.dataclass(frozen=True)
class Costs:
    """Cost of a block, or of a stage of several, for a number of rows.

    Attributes:
        forward_s: forward pass.
        backward_s: backward pass.
        add_s: accumulation of gradients.
        update_s: optimizer update.
        output_bytes: size of its activations.
        parameter_bytes: size of its parameters.
    """

    forward_s: float
    backward_s: float
    add_s: float
    update_s: float
    output_bytes: int
    parameter_bytes: int


class Known(Protocol):
    """Costs of blocks and stages.

    Attributes:
        rows: batch size of a step.
        devices: devices of an island.
    """

    @property
    def rows(self) -> int:
        """Batch size of a step."""

    @property
    def devices(self) -> int:
        """Devices of an island."""

    def blocks(self, rows: int) -> list[Costs]:
        """Returns the cost of each block on the devices of an island, for ``rows`` rows."""

    def stages(self, rows: int) -> list[Costs]:
        """Returns the cost of each stage, likewise."""


@dataclasses.dataclass(frozen=True)
class Training:
    """What a step trains with.

    Attributes:
        example: input of a step; only its shape and type matter.
        targets: targets of the example; only their shape and type matter.
        loss: mean loss of the last block's output and targets, a scalar.
        optimizer: an optax optimizer.
    """

    example: Any
    targets: Any
    loss: Callable[[Any, Any], Any]
    optimizer: Any


class MeasuredBlocks:
    """Measured costs of blocks (on islands concurrently) and stages (on one), by number of rows."""

    def __init__(
        self,
        blocks: list[Block],
        training: Training,
        islands: list[list[jax.Device]],
        progress: Callable[[int, int], object] | None,
    ) -> None:
        self._blocks = blocks
        self._inputs = inputs_of(blocks, training.example, islands[0])
        self._targets = jax.eval_shape(lambda: jax.tree.map(jax.numpy.asarray, training.targets))
        self._islands = islands
        self._loss = training.loss
        self._optimizer = training.optimizer
        self._progress = progress or (lambda done, of: None)
        self._blocks_of: dict[int, list[Costs]] = {}
        self._stages_of: dict[int, list[Costs]] = {}
        sizes = {leaf.shape[0] for leaf in jax.tree.leaves(self._inputs[0]) if leaf.ndim}
        if len(sizes) != 1:
            raise ConfigError(f"the first axis of the example has {sorted(sizes)} rows")
        self.rows: int = sizes.pop()

    @property
    def devices(self) -> int:
        """Devices of an island."""
        return len(self._islands[0])

    def blocks(self, rows: int) -> list[Costs]:
        """Returns the cost of each block for ``rows`` rows."""
        return self._blocks_of[rows]

    def stages(self, rows: int) -> list[Costs]:
        """Returns the cost of each stage for ``rows`` rows."""
        return self._stages_of[rows]

    def prepare(self, copies: Sequence[int], cuts: Sequence[int]) -> None:
        """Measures blocks for each number of copies, and stages for each number of microbatches."""
        count, stages = len(self._blocks), len(self._islands)
        total = len(copies) * count + len(cuts) * stages
        done = 0
        alike: dict[Any, _Bench] = {}

        def measure(ends: Sequence[int], rows: int, copies: int, flat: bool) -> list[Costs]:
            """Measures the parts between ``ends`` on ``copies`` islands; like parts only once."""
            nonlocal done
            known: dict[_Bench, Costs] = {}
            found = []
            for begin, end in itertools.pairwise(ends):
                self._progress(done, total)
                done += 1
                block = in_row(self._blocks[begin:end])
                structure, kinds = form((block.parameters, _with_rows(self._inputs[begin], 1)))
                key = (block.kind, structure, tuple(kinds), begin == 0, end == count, flat)
                if key not in alike:
                    alike[key] = self._bench(block, begin == 0, end == count, flat)
                bench = alike[key]
                if bench not in known:
                    given = _with_rows(self._inputs[begin], rows)
                    known[bench] = bench.measure(given, _with_rows(self._targets, rows), copies)
                found.append(known[bench])
            return found

        for copy in copies:
            rows = self.rows // copy
            self._blocks_of[rows] = measure(range(count + 1), rows, copy, True)
        if cuts:
            whole = self._blocks_of[self.rows]
            ends = borders([cost.forward_s + cost.backward_s for cost in whole], stages)
            for cut in cuts:
                rows = self.rows // cut
                self._stages_of[rows] = measure(ends, rows, 1, False)
        self._progress(total, total)

    def _bench(self, block: Block, is_first: bool, is_last: bool, flat: bool) -> _Bench:
        loss = self._loss if is_last else None
        parts = [
            Part(Stage(block.apply, devices), is_first, loss, self._optimizer, 1, False)
            for devices in (self._islands if flat else self._islands[:1])
        ]
        output = mapped(block.apply, self._islands[0])
        return _Bench(block, parts, output, is_last, flat)


class _Bench:
    """Measures a block on islands, with various numbers of rows.

    Args:
        block: one block, or several as one.
        parts: the block on each island; all are measured concurrently.
        output: computes the block's output from parameters and input.
        is_last: whether it ends in the loss.
        flat: whether its gradients are one vector.
    """

    def __init__(
        self, block: Block, parts: list[Part], output: Any, is_last: bool, flat: bool
    ) -> None:
        self._parts = parts
        self._output = output
        self._parameters = block.parameters
        self._is_last = is_last
        self._flat = flat
        self._states = [part.place(block.parameters) for part in parts]
        # Costs that do not depend on rows, by number of islands.
        self._adds: dict[int, float] = {}
        self._updates: dict[int, float] = {}

    def measure(self, given: Any, target: Any, islands: int) -> Costs:
        """Measures with input and target of these shapes, on ``islands`` islands concurrently.

        Replicas compute at the same time, and islands may share hardware.
        """
        made = jax.eval_shape(self._output, self._parameters, given)
        parts = self._parts[:islands]
        arguments, backs, cotangents = [], [], []
        for part, (parameters, _) in zip(parts, self._states, strict=False):
            targets = [_zeros(part, target)] if self._is_last else []
            arguments.append((parameters, _zeros(part, given), *targets))
            backs.append(part.forward(*arguments[-1])[1])
            cotangents.append(None if self._is_last else _zeros(part, made))
        backward = [part.backward_flat if self._flat else part.backward for part in parts]

        def go_forward() -> Any:
            return [part.forward(*own)[0] for part, own in zip(parts, arguments, strict=True)]

        def go_back() -> Any:
            return [
                call(*own)
                for call, *own in zip(backward, backs, arguments, cotangents, strict=True)
            ]

        gradients = [one for one, _ in go_back()]
        forward_s, backward_s = time_s(go_forward, REPEATS), time_s(go_back, REPEATS)
        if islands not in self._updates:
            self._adds[islands] = 0.0 if self._flat else self._adding_s(gradients)
            # Donates the parameters, which measuring with other rows needs again.
            self._updates[islands] = self._updating_s(gradients)
        sizes = _bytes(made), _bytes(self._parameters)
        return Costs(forward_s, backward_s, self._adds[islands], self._updates[islands], *sizes)

    def _adding_s(self, gradients: list[Any]) -> float:
        totals = jax.tree.map(jax.numpy.copy, gradients)

        def add() -> Any:
            for number, gradient in enumerate(gradients):
                totals[number] = self._parts[number].add(totals[number], gradient)
            return totals

        return time_s(add, REPEATS)

    def _updating_s(self, gradients: list[Any]) -> float:
        def update() -> Any:
            for number, gradient in enumerate(gradients):
                part = self._parts[number]
                apply = part.update_flat if self._flat else part.update
                self._states[number] = apply(*self._states[number], gradient)
            return self._states[: len(gradients)]

        return time_s(update, REPEATS)


def _zeros(part: Part, shapes: Any) -> Any:
    return part.take(jax.tree.map(lambda one: np.zeros(one.shape, one.dtype), shapes))


def _with_rows(shapes: Any, rows: int) -> Any:
    return jax.tree.map(
        lambda one: _struct((rows, *one.shape[1:]), one.dtype) if one.ndim else one, shapes
    )


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
