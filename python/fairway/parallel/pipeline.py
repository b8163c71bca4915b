"""Training a model in stages on islands, hosts or devices of their own, as one program a step.

Each stage is a function of its parameters and its input. A step traces the tasks of a schedule in
order; what one stage hands to the next moves between their devices, and every stage's gradients
are summed over microbatches and applied where its parameters are.

Source: PATHWAYS §5.3 (Table 2, Figure 10).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fairway.errors import ConfigError
from fairway.parallel import schedules
from fairway.parallel.schedules import Kind
from fairway.tracing import Wrapped, program

__all__ = ["Pipeline", "Stage", "State"]

_partition: Any = PartitionSpec


@dataclasses.dataclass(frozen=True)
class Stage:
    """A part of a model.

    Attributes:
        function: its output from its parameters and its input, whose first axis is the batch.
        devices: where it runs; the batch is cut over them, parameters are on each.
    """

    function: Callable[[Any, Any], Any]
    devices: Sequence[jax.Device]


@dataclasses.dataclass(frozen=True)
class State:
    """Parameters and optimizer states, by stage."""

    parameters: list[Any]
    optimizer: list[Any]


jax.tree_util.register_dataclass(State, ["parameters", "optimizer"], [])


class Pipeline:
    """A model in stages, its loss and its optimizer.

    Args:
        stages: in order; with ``rounds`` above 1, stage ``s`` shares the devices of stage
            ``s - workers``, where there are ``len(stages) / rounds`` workers.
        loss: mean loss of the last stage's output and targets, a scalar.
        optimizer: as optax makes them: ``init(parameters)``, ``update(gradients, state,
            parameters)``.
        microbatches: parts that a batch is cut into.
        schedule: one of :data:`fairway.parallel.SCHEDULES`.
        rounds: stages of each worker.

    Raises:
        ConfigError: the stages do not fit the schedule.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        loss: Callable[[Any, Any], Any],
        optimizer: Any,
        *,
        microbatches: int,
        schedule: str = "1f1b",
        rounds: int = 1,
    ) -> None:
        if not stages or len(stages) % rounds:
            raise ConfigError(
                f"{len(stages)} stages cannot be shared out among workers with {rounds} each"
            )
        self.microbatches = microbatches
        self.tasks = schedules.schedule(schedule, len(stages) // rounds, microbatches, rounds)
        apart = any(task.kind is Kind.WEIGHT for task in self.tasks)
        self._optimizer = optimizer
        last = len(stages) - 1
        self._parts = [
            _Part(
                stage, number == 0, loss if number == last else None, optimizer, microbatches, apart
            )
            for number, stage in enumerate(stages)
        ]
        self._step: Wrapped = program(self._trace)

    def init(self, parameters: Sequence[Any]) -> State:
        """Places the parameters of each stage and makes its optimizer's state.

        Raises:
            ConfigError: there are not as many parameters as stages.
        """
        if len(parameters) != len(self._parts):
            raise ConfigError(
                f"there are {len(self._parts)} stages and parameters for {len(parameters)}"
            )
        placed = [
            jax.device_put(given, part.whole, may_alias=False)  # a step uses its state up
            for part, given in zip(self._parts, parameters, strict=True)
        ]
        states = [
            jax.device_put(self._optimizer.init(given), part.whole)
            for part, given in zip(self._parts, placed, strict=True)
        ]
        return State(placed, states)

    def step(self, state: State, inputs: Any, targets: Any) -> tuple[State, jax.Array]:
        """One step of training; the old state is used up.

        Args:
            state: of :meth:`init` or of the step before.
            inputs: arrays whose first axis is the batch.
            targets: what the loss compares the model's output with; the same batch.

        Returns:
            The new state, and the mean loss on the last stage's devices.

        Raises:
            ConfigError: the batch cannot be cut into microbatches.
        """
        result: tuple[State, jax.Array] = self._step(state, self._cut(inputs), self._cut(targets))
        return result

    def lower(self, state: State, inputs: Any, targets: Any) -> Any:
        """The program of a step, as text and to count its nodes."""
        return self._step.lower(state, self._cut(inputs), self._cut(targets))

    def _cut(self, batch: Any) -> list[Any]:
        count = self.microbatches
        sizes = {np.shape(leaf)[0] for leaf in jax.tree.leaves(batch)}
        if len(sizes) != 1 or next(iter(sizes)) % count:
            raise ConfigError(f"a batch of {sorted(sizes)} cannot be cut into {count} microbatches")
        size = next(iter(sizes)) // count
        return [
            jax.tree.map(lambda leaf, begin=turn * size: leaf[begin : begin + size], batch)
            for turn in range(count)
        ]

    def _trace(self, state: State, inputs: list[Any], targets: list[Any]) -> tuple[State, Any]:
        parts, last = self._parts, len(self._parts) - 1
        given: dict[tuple[int, int], Any] = {(0, turn): one for turn, one in enumerate(inputs)}
        back: dict[tuple[int, int], tuple[_Back, Any]] = {}
        gradients: dict[tuple[int, int], Any] = {}
        sums: list[Any] = [None] * len(parts)
        loss = None

        def add(stage: int, more: Any) -> None:
            so_far = sums[stage]
            sums[stage] = more if so_far is None else parts[stage].add(so_far, more)

        for task in self.tasks:
            stage, key = task.stage, (task.stage, task.microbatch)
            part = parts[stage]
            match task.kind:
                case Kind.FORWARD:
                    taken = part.take(given.pop(key))
                    extra = [part.take(targets[task.microbatch])] if stage == last else []
                    arguments = (state.parameters[stage], taken, *extra)
                    made, kept = part.forward(*arguments)
                    back[key] = kept, arguments
                    if stage == last:
                        loss = made if loss is None else part.add(loss, made)
                    else:
                        given[stage + 1, task.microbatch] = made
                case Kind.BACKWARD if part.apart:
                    gradient = None if stage == last else part.take(gradients[key])
                    if stage > 0:
                        before = part.backward_input(*back[key], gradient)
                        gradients[stage - 1, task.microbatch] = before
                case Kind.BACKWARD:
                    gradient = None if stage == last else part.take(gradients.pop(key))
                    of_weights, before = part.backward(*back.pop(key), gradient)
                    gradients[stage - 1, task.microbatch] = before
                    add(stage, of_weights)
                case Kind.WEIGHT:
                    gradient = None if stage == last else part.take(gradients.pop(key))
                    add(stage, part.backward_weights(*back.pop(key), gradient))
        updated = [
            part.update(state.parameters[stage], state.optimizer[stage], sums[stage])
            for stage, part in enumerate(parts)
        ]
        new = State([one for one, _ in updated], [one for _, one in updated])
        return new, parts[last].mean(loss)


@dataclasses.dataclass(frozen=True)
class _Back:
    """What a backward pass needs of the forward one, besides its arguments.

    A function that returns its arguments copies them: every weight, once a microbatch.

    Attributes:
        kept: what is no argument.
        places: of each array that is needed, its place among the arguments, if it is one.
        tree: what the arrays make: the function from an output's gradient to the arguments'.
    """

    kept: list[Any]
    places: tuple[int | None, ...]
    tree: Any

    @classmethod
    def of(cls, back: Callable[..., Any], arguments: Any) -> _Back:
        """Takes the arguments out of what :func:`jax.vjp` returned."""
        leaves, tree = jax.tree.flatten(back)
        known = {id(leaf): place for place, leaf in enumerate(jax.tree.leaves(arguments))}
        places = tuple(known.get(id(leaf)) for leaf in leaves)
        kept = [leaf for leaf, place in zip(leaves, places, strict=True) if place is None]
        return cls(kept, places, tree)

    def restore(self, arguments: Any) -> Callable[..., Any]:
        """What :func:`jax.vjp` returned."""
        leaves, kept = jax.tree.leaves(arguments), iter(self.kept)
        given = [next(kept) if place is None else leaves[place] for place in self.places]
        back: Callable[..., Any] = jax.tree.unflatten(self.tree, given)
        return back


jax.tree_util.register_dataclass(_Back, ["kept"], ["places", "tree"])


class _Part:
    """The jitted functions of one stage.

    Attributes:
        whole: the sharding of what is on each of its devices.
        apart: are the gradients of weights computed on their own?
    """

    def __init__(
        self,
        stage: Stage,
        first: bool,
        loss: Callable[[Any, Any], Any] | None,
        optimizer: Any,
        microbatches: int,
        apart: bool,
    ) -> None:
        mesh = Mesh(np.array(stage.devices), ("data",))
        self.whole = NamedSharding(mesh, _partition())
        self._cut = NamedSharding(mesh, _partition("data"))
        self.apart = apart

        def forward(parameters: Any, taken: Any, *target: Any) -> Any:
            def compute(parameters: Any, taken: Any) -> Any:
                made = stage.function(parameters, taken)
                return made if loss is None else loss(made, *target)

            if first:  # nobody wants the gradient of the batch
                made, back = jax.vjp(lambda p: compute(p, taken), parameters)
            else:
                made, back = jax.vjp(compute, parameters, taken)
            return made, _Back.of(back, (parameters, taken, *target))

        def backward(back: _Back, arguments: Any, gradient: Any) -> Any:
            gradient = jax.numpy.ones(()) if gradient is None else gradient
            gradients = back.restore(arguments)(gradient)
            return (*gradients, None) if first else gradients

        def update(parameters: Any, state: Any, gradients: Any) -> Any:
            gradients = jax.tree.map(lambda gradient: gradient / microbatches, gradients)
            changes, state = optimizer.update(gradients, state, parameters)
            return jax.tree.map(lambda p, change: p + change, parameters, changes), state

        def add(one: Any, other: Any) -> Any:
            return jax.tree.map(jax.numpy.add, one, other)

        self.forward = jax.jit(forward)
        self.backward = jax.jit(backward)
        self.backward_input = jax.jit(lambda *given: backward(*given)[1])
        self.backward_weights = jax.jit(lambda *given: backward(*given)[0])
        self.update = jax.jit(update, donate_argnums=(0, 1))
        self.add = jax.jit(add, donate_argnums=0)
        self.mean = jax.jit(lambda total: total / microbatches)

    def take(self, arrays: Any) -> Any:
        """Arrays on this stage's devices, cut along the batch where they have one."""
        return jax.tree.map(
            lambda array: jax.device_put(array, self._cut if array.ndim else self.whole), arrays
        )
