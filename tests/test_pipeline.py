"""Pipelines: properties of schedules, and training under each of them as in plain numpy."""

import itertools

import pytest
from conftest import Up, client, said

from fairway.errors import ConfigError
from fairway.parallel.schedules import PassKind, ScheduleTask, bubble, schedule

SHAPES = [(1, 1), (2, 4), (3, 3), (4, 8), (4, 16), (8, 32)]


def needs(task: ScheduleTask, last: int) -> list[ScheduleTask]:
    if task.kind is PassKind.FORWARD:
        return (
            [ScheduleTask(PassKind.FORWARD, task.stage - 1, task.microbatch)] if task.stage else []
        )
    if task.kind is PassKind.WEIGHT:
        return [ScheduleTask(PassKind.BACKWARD, task.stage, task.microbatch)]
    own = ScheduleTask(PassKind.FORWARD, task.stage, task.microbatch)
    later = (
        [ScheduleTask(PassKind.BACKWARD, task.stage + 1, task.microbatch)]
        if task.stage < last
        else []
    )
    return [own, *later]


@pytest.mark.parametrize(
    ("name", "rounds"),
    [("gpipe", 1), ("1f1b", 1), ("zero-bubble", 1), ("interleaved", 2), ("interleaved", 3)],
)
@pytest.mark.parametrize(("workers", "microbatches"), SHAPES)
def test_every_task_comes_once_and_when_it_can(name, rounds, workers, microbatches):
    tasks = schedule(name, workers, microbatches, rounds)
    kinds = [
        PassKind.FORWARD,
        PassKind.BACKWARD,
        *([PassKind.WEIGHT] if name == "zero-bubble" else []),
    ]
    stages = range(workers * rounds)
    every = itertools.product(kinds, stages, range(microbatches))
    assert set(tasks) == {ScheduleTask(*one) for one in every}
    assert len(set(tasks)) == len(tasks)
    done: set[ScheduleTask] = set()
    for task in tasks:
        assert done.issuperset(needs(task, stages[-1])), task
        done.add(task)


@pytest.mark.parametrize(("workers", "microbatches"), [(2, 4), (4, 8), (4, 16), (8, 32)])
def test_bubbles_are_those_of_the_papers(workers, microbatches):
    idle = workers - 1
    for name in ("gpipe", "1f1b"):
        assert bubble(name, workers, microbatches) == pytest.approx(idle / (microbatches + idle))
    for rounds in (2, 4):
        found = bubble("interleaved", workers, microbatches, rounds)
        assert found == pytest.approx(idle / (rounds * microbatches + idle))
    # ZB-H1: a third of 1F1B's bubble, where all three kinds of task take the same time.
    found = bubble("zero-bubble", workers, microbatches)
    assert found == pytest.approx(idle / (3 * microbatches + idle))


@pytest.mark.parametrize(("workers", "microbatches"), [(4, 8), (4, 16), (8, 32)])
def test_one_f_one_b_holds_few_activations(workers, microbatches):
    """At most as many as there are stages from it on, for any number of microbatches."""
    held = dict.fromkeys(range(workers), 0)
    for task in schedule("1f1b", workers, microbatches):
        held[task.stage] += 1 if task.kind is PassKind.FORWARD else -1
        assert held[task.stage] <= workers - task.stage


def test_what_cannot_be_scheduled_is_refused():
    with pytest.raises(ConfigError, match="there is no schedule 'best'"):
        schedule("best", 2, 2)
    with pytest.raises(ConfigError, match="in groups of 4"):
        schedule("interleaved", 4, 6, 2)
    with pytest.raises(ConfigError, match="one stage for each worker"):
        schedule("1f1b", 4, 8, 2)
    with pytest.raises(ConfigError, match="needs workers"):
        schedule("gpipe", 0, 8)


TRAIN = """
import optax
from fairway.parallel import Pipeline, Stage

devices, rng = jax.devices(), np.random.default_rng(0)
widths = [16, 32, 32, 32, 8]
weights = [rng.normal(size=(a, b)) / np.sqrt(a) for a, b in zip(widths, widths[1:])]
x, target = rng.normal(size=(32, 16)), rng.normal(size=(32, 8))

def layer(parameters, x):
    return jnp.tanh(x @ parameters)

def loss(made, target):
    return jnp.mean((made - target) ** 2)

def train(steps, name, rounds=1, rate=0.1):
    workers = 4 // rounds
    each = len(devices) // workers
    places = [devices[s % workers * each : (s % workers + 1) * each] for s in range(4)]
    stages = [Stage(layer, place) for place in places]
    pipeline = Pipeline(stages, loss, optax.sgd(rate), microbatches=4, schedule=name,
                        rounds=rounds)
    state = pipeline.init([w.astype("f") for w in weights])
    losses = []
    for _ in range(steps):
        state, value = pipeline.step(state, x.astype("f"), target.astype("f"))
        losses.append(value)
    return [float(value) for value in losses], [np.asarray(p) for p in state.parameters]

def reference(steps, rate=0.1):
    "The same in float64, by hand."
    parameters, losses = [w.copy() for w in weights], []
    for _ in range(steps):
        kept = [x]
        for w in parameters:
            kept.append(np.tanh(kept[-1] @ w))
        losses.append(np.mean((kept[-1] - target) ** 2))
        gradient = 2 * (kept[-1] - target) / target.size
        for place in reversed(range(4)):
            gradient = gradient * (1 - kept[place + 1] ** 2)
            of_weights = kept[place].T @ gradient
            gradient = gradient @ parameters[place].T
            parameters[place] -= rate * of_weights
    return losses, parameters
"""


def test_each_schedule_trains_the_same(up: Up):
    ended = client(
        up,
        TRAIN
        + """
wanted, _ = reference(5)
for name, rounds in (("gpipe", 1), ("1f1b", 1), ("zero-bubble", 1), ("interleaved", 2)):
    losses, _ = train(5, name, rounds)
    np.testing.assert_allclose(losses, wanted, rtol=1e-6)
say("done")
""",
        150,
    )
    said(ended.stdout, "done")


def test_two_hundred_steps_are_those_of_float64(up: Up, measured):
    ended = client(
        up,
        TRAIN
        + """
losses, parameters = train(200, "1f1b")
wanted, exact = reference(200)
off = np.max(np.abs(np.array(losses) - wanted) / np.array(wanted))
farthest = max(np.max(np.abs(p - w)) / np.max(np.abs(w)) for p, w in zip(parameters, exact))
say("error", loss=float(off), parameters=float(farthest))
""",
        150,
    )
    error = said(ended.stdout, "error")
    measured("loss off float64", error["loss"])
    measured("parameters off float64", error["parameters"])
    assert error["loss"] <= 2e-6
    assert error["parameters"] <= 2e-6


def test_a_batch_that_cannot_be_cut_is_refused(up: Up):
    ended = client(
        up,
        TRAIN
        + """
pipeline = Pipeline([Stage(layer, devices)], loss, optax.sgd(0.1), microbatches=5)
state = pipeline.init([weights[0].astype("f")])
say("cut", error=fails(lambda: pipeline.step(state, x, target)))
say("given", error=fails(lambda: pipeline.init([])))
say("stages", error=fails(lambda: Pipeline([], loss, optax.sgd(0.1), microbatches=5)))
""",
    )
    assert said(ended.stdout, "cut")["error"][0] == "ConfigError"
    assert "5 microbatches" in said(ended.stdout, "cut")["error"][1]
    assert "1 stages and parameters for 0" in said(ended.stdout, "given")["error"][1]
    assert said(ended.stdout, "stages")["error"][0] == "ConfigError"
