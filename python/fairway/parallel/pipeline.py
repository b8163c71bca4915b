"""Pipeline parallelism: trains a model in stages on separate islands, hosts or devices.

Each stage is a function of its parameters and its input; a step is one program. It traces the tasks
of a schedule in order; activations are transferred between the devices of stages, and every stage's
gradients are accumulated over microbatches and applied where its parameters are.

Source: PATHWAYS §5.3 (Table 2, Figure 10).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from fairway.errors import ConfigError
from fairway.parallel import schedules
from fairway.parallel.parts import Back, Part, Stage, cut
from fairway.parallel.schedules import PassKind
from fairway.tracing import Wrapped, program

__all__ = ["Pipeline", "State"]


@dataclasses.dataclass(frozen=True)
class State:
    """Parameters and optimizer states, by stage."""

    parameters: list[Any]
    optimizer: list[Any]


jax.tree_util.register_dataclass(State, ["parameters", "optimizer"], [])


class Pipeline:
    """A model in stages, its loss and its optimizer.

    Args:
        stages: in order; with ``rounds`` above 1, stage ``s`` shares the devices of stage ``s -
            workers``, where there are ``len(stages) / rounds`` workers.
        loss: mean loss of the last stage's output and targets, a scalar.
        optimizer: an optax optimizer: ``init(parameters)``, ``update(gradients, state,
            parameters)``.
        microbatches: number of microbatches of a batch.
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
        apart = any(task.kind is PassKind.WEIGHT for task in self.tasks)
        last = len(stages) - 1
        self._parts = [
            Part(
                stage, number == 0, loss if number == last else None, optimizer, microbatches, apart
            )
            for number, stage in enumerate(stages)
        ]
        self._step: Wrapped = program(self._trace)

    def init(self, parameters: Sequence[Any]) -> State:
        """Places the parameters of each stage and initializes its optimizer state.

        Raises:
            ConfigError: there are not as many parameters as stages.
        """
        if len(parameters) != len(self._parts):
            raise ConfigError(
                f"there are {len(self._parts)} stages and parameters for {len(parameters)}"
            )
        placed = [part.place(given) for part, given in zip(self._parts, parameters, strict=True)]
        return State([one for one, _ in placed], [one for _, one in placed])

    def step(self, state: State, inputs: Any, targets: Any) -> tuple[State, jax.Array]:
        """Runs one training step; donates the old state.

        Args:
            state: from :meth:`init` or the preceding step.
            inputs: arrays whose first axis is the batch.
            targets: what the loss compares the model's output with; the same batch.

        Returns:
            The new state, and the mean loss on the last stage's devices.

        Raises:
            ConfigError: the batch cannot be cut into microbatches.
        """
        result: tuple[State, jax.Array] = self._step(state, *self._cut(inputs, targets))
        return result

    def lower(self, state: State, inputs: Any, targets: Any) -> Any:
        """Returns the program of a step, as text and to count its nodes."""
        return self._step.lower(state, *self._cut(inputs, targets))

    def _cut(self, *batches: Any) -> list[list[Any]]:
        return [cut(batch, self.microbatches, "microbatches") for batch in batches]

    def _trace(self, state: State, inputs: list[Any], targets: list[Any]) -> tuple[State, Any]:
        parts, last = self._parts, len(self._parts) - 1
        given: dict[tuple[int, int], Any] = {}
        back: dict[tuple[int, int], tuple[Back, Any]] = {}
        gradients: dict[tuple[int, int], Any] = {(last, turn): None for turn in range(len(inputs))}
        sums: list[Any] = [None] * len(parts)
        loss = None

        def add(stage: int, more: Any) -> None:
            so_far = sums[stage]
            sums[stage] = more if so_far is None else parts[stage].add(so_far, more)

        def pass_back(stage: int, turn: int, gradient: Any) -> None:
            if stage > 0:
                gradients[stage - 1, turn] = parts[stage - 1].take(gradient)

        # Outputs are transferred at once: a worker executes commands in this order, and the next
        # task may have to wait.
        for task in self.tasks:
            stage, turn = key = task.stage, task.microbatch
            part = parts[stage]
            match task.kind:
                case PassKind.FORWARD:
                    taken = part.take(inputs[turn]) if stage == 0 else given.pop(key)
                    extra = [part.take(targets[turn])] if stage == last else []
                    arguments = (state.parameters[stage], taken, *extra)
                    made, kept = part.forward(*arguments)
                    back[key] = kept, arguments
                    if stage == last:
                        loss = made if loss is None else part.add(loss, made)
                    else:
                        given[stage + 1, turn] = parts[stage + 1].take(made)
                case PassKind.BACKWARD if part.apart:
                    if stage > 0:
                        pass_back(stage, turn, part.backward_input(*back[key], gradients[key]))
                case PassKind.BACKWARD:
                    of_weights, before = part.backward(*back.pop(key), gradients.pop(key))
                    pass_back(stage, turn, before)
                    add(stage, of_weights)
                case PassKind.WEIGHT:
                    add(stage, part.backward_weights(*back.pop(key), gradients.pop(key)))
        updated = [
            part.update(state.parameters[stage], state.optimizer[stage], sums[stage])
            for stage, part in enumerate(parts)
        ]
        new = State([one for one, _ in updated], [one for _, one in updated])
        return new, parts[last].mean(loss)
