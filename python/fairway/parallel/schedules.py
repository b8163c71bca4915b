"""Pipeline schedules: the order in which stages execute their passes.

A schedule is one list of tasks for each worker (the devices of one stage, or of several where
stages are interleaved). It fixes only the order of each worker; :func:`schedule` merges the lists
into one order that satisfies all dependencies.

Sources: GPipe (Huang et al., 2019); 1F1B and interleaved stages (Narayanan et al., 2019, 2021);
ZB-H1 (Qi et al., 2023), which takes the weights' gradients out of the backward pass and fills
bubbles with them.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable

from fairway.errors import ConfigError

__all__ = ["SCHEDULES", "PassKind", "ScheduleTask", "bubble", "schedule"]


class PassKind(enum.Enum):
    """Kind of a task."""

    FORWARD = "F"
    BACKWARD = "B"
    """Gradients of inputs, and of weights unless these have tasks of their own."""
    WEIGHT = "W"
    """Gradients of weights alone."""


@dataclasses.dataclass(frozen=True)
class ScheduleTask:
    """One pass of one microbatch through one stage."""

    kind: PassKind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.stage}.{self.microbatch}"


Lists = list[list[ScheduleTask]]


def gpipe(workers: int, microbatches: int, rounds: int) -> Lists:
    """All forward passes, then all backward ones."""
    _only_one_round("gpipe", rounds)
    batches = range(microbatches)
    return [
        [ScheduleTask(PassKind.FORWARD, stage, batch) for batch in batches]
        + [ScheduleTask(PassKind.BACKWARD, stage, batch) for batch in batches]
        for stage in range(workers)
    ]


def one_f_one_b(workers: int, microbatches: int, rounds: int) -> Lists:
    """One forward, one backward: a stage holds at most ``workers - stage`` activations."""
    _only_one_round("1f1b", rounds)
    lists = []
    for stage in range(workers):
        ahead = min(workers - stage - 1, microbatches)
        tasks = [ScheduleTask(PassKind.FORWARD, stage, batch) for batch in range(ahead)]
        for batch in range(microbatches):
            if batch + ahead < microbatches:
                tasks.append(ScheduleTask(PassKind.FORWARD, stage, batch + ahead))
            tasks.append(ScheduleTask(PassKind.BACKWARD, stage, batch))
        lists.append(tasks)
    return lists


def interleaved(workers: int, microbatches: int, rounds: int) -> Lists:
    """1F1B with several stages per worker, ``workers`` apart, which shrinks the bubble."""
    if microbatches % workers:
        raise ConfigError(
            f"interleaved stages take microbatches in groups of {workers}, one for each worker; "
            f"there are {microbatches}"
        )
    total = microbatches * rounds
    lists = []
    for worker in range(workers):
        ahead = min(2 * (workers - worker - 1) + (rounds - 1) * workers, total)
        forward = [_nth(turn, workers, rounds, worker, False) for turn in range(total)]
        backward = [_nth(turn, workers, rounds, worker, True) for turn in range(total)]
        tasks = forward[:ahead]
        for turn in range(total):
            if turn + ahead < total:
                tasks.append(forward[turn + ahead])
            tasks.append(backward[turn])
        lists.append(tasks)
    return lists


def _nth(turn: int, workers: int, rounds: int, worker: int, backward: bool) -> ScheduleTask:
    """Returns a worker's ``turn``-th pass: groups of microbatches, round after round."""
    group, within = divmod(turn, workers * rounds)
    which, place = divmod(within, workers)
    if backward:
        which = rounds - 1 - which
    kind = PassKind.BACKWARD if backward else PassKind.FORWARD
    return ScheduleTask(kind, which * workers + worker, group * workers + place)


def zero_bubble(workers: int, microbatches: int, rounds: int) -> Lists:
    """ZB-H1: 1F1B whose weight gradients are deferred until the stage would be idle."""
    _only_one_round("zero-bubble", rounds)
    lists = []
    for stage, tasks in enumerate(one_f_one_b(workers, microbatches, 1)):
        late = min(stage, microbatches)
        filled: list[ScheduleTask] = []
        weights = 0
        for task in tasks:
            filled.append(task)
            if task.kind is PassKind.BACKWARD and task.microbatch >= late:
                filled.append(ScheduleTask(PassKind.WEIGHT, stage, weights))
                weights += 1
        filled += [
            ScheduleTask(PassKind.WEIGHT, stage, batch) for batch in range(weights, microbatches)
        ]
        lists.append(filled)
    return lists


def _only_one_round(name: str, rounds: int) -> None:
    if rounds != 1:
        raise ConfigError(f"schedule {name!r} has one stage for each worker; got {rounds}")


SCHEDULES: dict[str, Callable[[int, int, int], Lists]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zero-bubble": zero_bubble,
}
"""Generators of task lists, from the numbers of workers, microbatches, and stages per worker."""


def schedule(name: str, workers: int, microbatches: int, rounds: int = 1) -> list[ScheduleTask]:
    """Returns all tasks in an order that keeps each worker's and satisfies all dependencies.

    Args:
        name: one of :data:`SCHEDULES`.
        workers: number of workers.
        microbatches: parts of a batch.
        rounds: stages of each worker; worker ``s % workers`` has stage ``s``.

    Raises:
        ConfigError: the schedule is unknown, or does not support these numbers.
    """
    return [task for _, task, _ in _play(name, workers, microbatches, rounds, None)]


def bubble(
    name: str,
    workers: int,
    microbatches: int,
    rounds: int = 1,
    costs: dict[PassKind, float] | None = None,
) -> float:
    """Returns the pipeline bubble: the fraction of time that workers idle, without communication.

    Args:
        name: one of :data:`SCHEDULES`.
        workers: number of workers.
        microbatches: parts of a batch.
        rounds: stages of each worker.
        costs: time of a task of each kind in one stage; by default a backward pass takes twice a
            forward one, half of it for weights.
    """
    played = _play(name, workers, microbatches, rounds, costs)
    end = max(start + took for start, _, took in played)
    busy = sum(took for _, _, took in played)
    return 1.0 - busy / (workers * end)


def _costs(lists: Lists, given: dict[PassKind, float] | None) -> dict[PassKind, float]:
    if given is not None:
        return given
    apart = any(task.kind is PassKind.WEIGHT for tasks in lists for task in tasks)
    return {PassKind.FORWARD: 1.0, PassKind.BACKWARD: 1.0 if apart else 2.0, PassKind.WEIGHT: 1.0}


def _play(
    name: str, workers: int, microbatches: int, rounds: int, given: dict[PassKind, float] | None
) -> list[tuple[float, ScheduleTask, float]]:
    """Simulates a schedule: start, task and time of each, by start (list scheduling)."""
    if name not in SCHEDULES:
        raise ConfigError(f"there is no schedule {name!r}; there are {', '.join(SCHEDULES)}")
    if min(workers, microbatches, rounds) < 1:
        raise ConfigError(
            f"a pipeline needs workers, microbatches and stages; got {workers}, {microbatches} and "
            f"{rounds}"
        )
    lists = SCHEDULES[name](workers, microbatches, rounds)
    costs = _costs(lists, given)
    last = workers * rounds - 1
    ended: dict[ScheduleTask, float] = {}
    free = [0.0] * workers
    places = [0] * workers
    played = []
    while True:
        soonest: tuple[float, int] | None = None
        for worker, tasks in enumerate(lists):
            if places[worker] == len(tasks):
                continue
            needed = _needs(tasks[places[worker]], last)
            if all(other in ended for other in needed):
                start = max([free[worker], *(ended[other] for other in needed)])
                if soonest is None or (start, worker) < soonest:
                    soonest = start, worker
        if soonest is None:
            break
        start, worker = soonest
        task = lists[worker][places[worker]]
        places[worker] += 1
        took = costs[task.kind]
        free[worker] = ended[task] = start + took
        played.append((start, task, took))
    assert all(place == len(tasks) for place, tasks in zip(places, lists, strict=True)), lists
    return played


def _needs(task: ScheduleTask, last: int) -> list[ScheduleTask]:
    """Returns the tasks on which a task depends."""
    stage, batch = task.stage, task.microbatch
    match task.kind:
        case PassKind.FORWARD:
            return [ScheduleTask(PassKind.FORWARD, stage - 1, batch)] if stage > 0 else []
        case PassKind.BACKWARD:
            before = ScheduleTask(PassKind.BACKWARD, stage + 1, batch) if stage < last else None
            return [ScheduleTask(PassKind.FORWARD, stage, batch), *([before] if before else [])]
        case PassKind.WEIGHT:
            return [ScheduleTask(PassKind.BACKWARD, stage, batch)]
