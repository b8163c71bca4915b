"""Teams of ranks: collectives under plans, training, and errors when ranks diverge.

Ranks are threads here, each with its own sockets; the testbed has them in processes.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from fairway.communication import calibration, steps
from fairway.communication.replanning import Replanner, ReplanSettings
from fairway.communication.steps import After, ChannelCost, Report, Step, Task
from fairway.communication.team import Channel, Collective, Listener, Script, Team
from fairway.errors import StepError, TeamError
from fairway.studies.workloads import dlrm

COSTS = [ChannelCost(2e9, 50_000), ChannelCost(1e9, 50_000)]
SMALL = dlrm.Config(
    tables=32, rows=20, dim=8, words=8, pooled=2, bottom=(16,), top=(32, 16), batch=4,
    lookup_s=0.002, bottom_s=0.002, top_s=0.005, back_s=0.002,
)  # fmt: skip


@contextlib.contextmanager
def team(
    ranks: int, channels: int = 2, timeout_s: float = 20.0, near: Path | None = None
) -> Iterator[list[Team]]:
    """A team of ranks of this process; in shared memory, if there is a folder for sockets."""

    def channels_of(rank: int) -> list[Channel]:
        if near is None:
            return [Channel("tcp:127.0.0.1:0")] * channels
        return [Channel(f"unix:{near}/{rank}-{number}") for number in range(channels)]

    listeners = [Listener(rank, channels_of(rank), "secret") for rank in range(ranks)]
    addresses = [listener.addresses for listener in listeners]
    with ThreadPoolExecutor(ranks) as threads:
        teams = list(threads.map(lambda one: one.join(addresses, timeout_s), listeners))
    try:
        yield teams
    finally:
        for one in teams:
            one.close()


def as_ranks(teams: Sequence[Team], act: Callable[[Team], Any]) -> list[Any]:
    """Runs a function on all ranks concurrently; returns their results."""
    with ThreadPoolExecutor(len(teams)) as threads:
        return list(threads.map(act, teams))


@pytest.mark.parametrize("near", [False, True], ids=["tcp", "memory"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32", "uint8"])
def test_sums_of_every_type(dtype: str, near: bool, tmp_path: Path) -> None:
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    count = 1000

    def act(one: Team) -> None:
        collective = Collective.all_reduce(one.ranks, count)
        # One in shared memory, and one that is copied into it.
        for vector in (one.vector(collective, kind), np.empty(count, kind)):
            vector[:] = (np.arange(count) % 5 + one.rank).astype(kind)
            result = one.run(collective, vector)
            expected = sum((np.arange(count) % 5 + rank) for rank in range(one.ranks))
            np.testing.assert_array_equal(result.astype(np.float64), expected)

    with team(3, near=tmp_path if near else None) as teams:
        as_ranks(teams, act)


@pytest.mark.parametrize("near", [False, True], ids=["tcp", "memory"])
def test_sums_are_the_same_on_all_ranks_to_the_last_bit(near: bool, tmp_path: Path) -> None:
    costs = [ChannelCost(1e9, 50_000), ChannelCost(5e8, 50_000)]

    def act(one: Team, count: int) -> bytes:
        collective = Collective.all_reduce(one.ranks, count)
        vector = one.vector(collective, np.float32)
        vector[:] = np.random.default_rng(one.rank).normal(size=count)
        part = one.prepare(steps.alone(collective, np.float32, costs))
        return one.call(part, vector).tobytes()

    with team(5, near=tmp_path if near else None) as teams:
        for count in (1, 300, 10_000, 300_000):
            assert len(set(as_ranks(teams, lambda one: act(one, count)))) == 1  # noqa: B023


RANK = """
import sys, time
import numpy as np
from fairway.communication.team import Channel, Collective, Listener

listener = Listener(1, [Channel("unix:" + sys.argv[1] + "/1")], "secret")
print("listening", flush=True)
team = listener.join([["unix:" + sys.argv[1] + "/0"], listener.addresses], 30)
collective = Collective.all_reduce(2, 100)
team.run(collective, team.vector(collective, np.float32))
print("joined", flush=True)
time.sleep(60)
"""


def test_a_rank_that_is_killed_is_missed_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RANK, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        try:
            listener = Listener(0, [Channel(f"unix:{tmp_path}/0")], "secret")
            assert other.stdout.readline() == "listening\n"
            with listener.join([listener.addresses, [f"unix:{tmp_path}/1"]], 30) as one:
                collective = Collective.all_reduce(2, 100)
                one.run(collective, one.vector(collective, np.float32))
                assert other.stdout.readline() == "joined\n"
                threading.Timer(0.2, other.kill).start()
                began = time.monotonic()
                with pytest.raises(TeamError, match="rank 1 is lost") as found:
                    one.run(collective, one.vector(collective, np.float32))
                assert found.value.kind == "Lost"
                assert time.monotonic() - began < 5
        finally:
            other.kill()


def test_rows_go_where_sizes_say() -> None:
    sizes = [[2, 0, 5], [1, 3, 0], [4, 4, 4]]

    def act(one: Team) -> None:
        collective = Collective.all_to_all_of(3, [size for row in sizes for size in row])
        vector = one.vector(collective, np.int64)
        given = np.repeat(100 * one.rank + np.arange(3), sizes[one.rank])
        vector[: len(given)] = given
        result = one.run(collective, vector, channel=1)
        counts = [sizes[rank][one.rank] for rank in range(3)]
        np.testing.assert_array_equal(result, np.repeat(100 * np.arange(3) + one.rank, counts))

    with team(3) as teams:
        as_ranks(teams, act)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_training_is_the_same_under_every_plan(ranks: int) -> None:
    count = 5
    step = SMALL.step(ranks)
    plans = steps.plan(step, COSTS, evaluations=300, chains=2)
    assert len(plans) == 8
    expected = dlrm.reference_losses(SMALL, ranks, count)
    assert expected[-1] != expected[0]

    def act(one: Team) -> list[list[float]]:
        losses = []
        for plan in plans.values():
            program = dlrm.Rank(SMALL, one.rank, ranks)
            program.load(count)
            steps.run(one, step, Script.parse(plan.script.text), program, count)
            losses.append(program.losses)
        return losses

    with team(ranks) as teams:
        found = np.sum(as_ranks(teams, act), 0)
    for losses in found:
        np.testing.assert_allclose(losses, expected, rtol=2e-5)


def test_what_is_measured_is_what_a_plan_is_made_of() -> None:
    with team(3) as teams:
        measured = as_ranks(teams, lambda one: calibration.measure(one, 2, (64 << 10, 512 << 10)))
    assert len({tuple(samples) for samples in map(tuple, measured)}) == 1, "ranks agree"
    found = calibration.fit(measured[0], 3)
    assert len(found.costs) == 2
    assert all(cost.rate_bps > 1e6 for cost in found.costs)
    assert 0 <= found.error_median <= found.error_worst


@pytest.mark.parametrize("times_s", [(1e-3, 2e-3), (1e-3, 1e-3), (3e-3, 1e-3), (1e-4, 3e-3)])
def test_no_latency_and_no_rate_is_negative_whatever_was_measured(
    times_s: tuple[float, float],
) -> None:
    """A busy machine may take longer for a small vector than for a large one."""
    sizes = (64 << 10, 512 << 10)
    samples = [
        calibration.Sample(0, pattern, size, took)
        for pattern in calibration.PATTERNS
        for size, took in zip(sizes, times_s, strict=True)
    ]
    (cost,) = calibration.fit(samples, 3).costs
    slowest, fastest = (
        op(2 / 3 * 8 * size * 2 / took for size, took in zip(sizes, times_s, strict=True))
        for op in (min, max)
    )
    assert cost.latency_ns >= 0
    assert slowest / 2 <= cost.rate_bps
    if cost.latency_ns == 0:
        assert cost.rate_bps <= fastest


@pytest.mark.parametrize(
    ("every_ns", "alone_ns", "fair_ns"),
    [
        ((10, 10), (10, 10), (10, 10)),  # nothing is shared
        ((20, 20), (10, 10), (20, 20)),  # one link is shared fairly
        ((15, 30), (10, 10), (20, 20)),  # ... or not
        ((100, 100 / 9), (100, 10), (100, 100 / 9)),  # a slow one loses nothing to a fast one
        ((10, 100), (10, 100), (10, 100)),
        ((9, 9), (10, 10), (10, 10)),  # noise makes no channel faster than alone
    ],
)
@pytest.mark.parametrize("stopped_ns", [0, 300])
def test_a_fair_share_of_what_two_channels_carry_together(
    every_ns: tuple[float, float],
    alone_ns: tuple[float, float],
    fair_ns: tuple[float, float],
    stopped_ns: int,
) -> None:
    """Neither which flow got more nor one stop by the scheduler makes channels look slower."""
    series = [np.cumsum(np.full(round(2000 / each), each)) for each in every_ns]
    ends = [(each + stopped_ns * (each > 700)).round().astype(int).tolist() for each in series]
    took = calibration.fair_times(ends, [1 / each for each in alone_ns])
    assert took == pytest.approx(fair_ns, rel=0.06)


def test_channels_of_which_one_ended_before_the_other_began_shared_nothing() -> None:
    assert calibration.fair_times([[10, 20, 30], [40, 50, 60]], [0.1, 0.2]) == (10, 5)


def test_the_same_seed_finds_the_same_plan() -> None:
    first, again = (steps.plan(SMALL.step(4), COSTS, evaluations=500, seed=3) for _ in range(2))
    for system, plan in first.items():
        assert plan.script.text == again[system].script.text, system
        assert plan.period_ns >= first["joint"].period_ns or "joint" in system


def test_a_plan_is_read_as_it_was_written_and_checked() -> None:
    script = steps.plan(SMALL.step(2), COSTS, evaluations=100)["joint+striping"].script
    assert Script.parse(script.text).text == script.text
    written = json.loads(script.text)
    written["order"][0].pop()
    with pytest.raises(ValueError, match="expected once"):
        Script.parse(json.dumps(written))
    for text in ("", "{}", "[1]", script.text.replace('"ranks": 2', '"ranks": 0')):
        with pytest.raises(ValueError, match="cannot be read"):
            Script.parse(text)


def test_ranks_that_ask_for_different_things_are_told() -> None:
    def act(one: Team) -> str:
        collective = Collective.all_reduce(2, 100 + one.rank)
        with pytest.raises(TeamError) as found:
            one.run(collective, one.vector(collective, np.float32))
        return found.value.kind

    with team(2) as teams:
        assert "Diverged" in as_ranks(teams, act)


def test_a_plan_of_another_program_is_refused() -> None:
    other = Collective.all_reduce(2, 11)

    def act(one: Team) -> None:
        part = one.prepare(Script.series(Collective.all_reduce(2, 10), 0))
        step = one.begin(part)
        with pytest.raises(TeamError, match="the plan is of another program"):
            one.submit((step, 0), other, one.vector(other, np.float32))
        with pytest.raises(TeamError, match="operation 7"):
            one.submit((step, 7), other, one.vector(other, np.float32))

    with team(2) as teams:
        as_ranks(teams, act)


def test_what_one_rank_cannot_make_fails_for_all() -> None:
    collective = Collective.all_reduce(3, 1000)

    def act(one: Team) -> None:
        part = one.prepare(Script.series(collective, 0))
        poison = "INTERNAL: a layer has failed" if one.rank == 2 else None
        vector = one.vector(collective, np.float32)
        ticket = one.submit((one.begin(part), 0), collective, vector, poison=poison)
        with pytest.raises(TeamError, match="a layer has failed") as found:
            one.wait(ticket)
        assert found.value.kind == "Poisoned"
        vector[:] = 1
        assert one.run(collective, vector).tolist() == [3.0] * 1000

    with team(3) as teams:
        as_ranks(teams, act)


def test_a_rank_that_leaves_is_named() -> None:
    collective = Collective.all_reduce(2, 1000)
    with team(2) as teams:
        teams[1].close()
        with pytest.raises(TeamError, match="rank 1"):
            teams[0].run(collective, teams[0].vector(collective, np.float32))


def test_a_rank_that_never_comes_is_named() -> None:
    listener = Listener(0, [Channel("tcp:127.0.0.1:0")], "secret")
    absent = Listener(1, [Channel("tcp:127.0.0.1:0")], "secret")
    try:
        with pytest.raises(TeamError, match="rank 0 cannot be joined") as found:
            absent.join([listener.addresses, absent.addresses], timeout_s=0.3)
        assert found.value.kind == "Join"
    finally:
        listener.close()
        absent.close()


def test_vectors_that_do_not_fit_are_refused() -> None:
    collective = Collective.all_reduce(1, 10)
    with team(1) as (one,):
        step = one.begin(one.prepare(Script.series(collective, 0)))
        with pytest.raises(TeamError, match="expected 40"):
            one.submit((step, 0), collective, np.zeros(11, np.float32))
        with pytest.raises(TeamError, match="complex64"):
            one.submit((step, 0), collective, np.zeros(10, np.complex64))
        read_only = np.zeros(10, np.float32)
        read_only.flags.writeable = False
        with pytest.raises((BufferError, ValueError)):
            one.submit((step, 0), collective, read_only)


def test_threads_may_wait_while_another_submits() -> None:
    collective = Collective.all_reduce(1, 4)
    with team(1) as (one,):
        part = one.prepare(Script.series(collective, 0, 2))
        step = one.begin(part)
        vectors = [np.ones(4, np.float32) for _ in range(2)]
        second = one.submit((step, 1), collective, vectors[1])
        done = threading.Event()

        def wait() -> None:
            one.wait(second)
            done.set()

        thread = threading.Thread(target=wait)
        thread.start()
        assert not done.wait(0.1), "the first one comes first"
        first = one.submit((step, 0), collective, vectors[0])
        one.wait(first)
        assert done.wait(10)
        thread.join()


@pytest.mark.parametrize(
    ("tasks", "says"),
    [
        ((Task("a"),), "neither computes"),
        ((Task("a", compute_s=1.0), Task("a", compute_s=1.0)), "one name"),
        ((Task("a", (After("b"),), compute_s=1.0),), "no task of the step"),
        ((Task("a", (After("a", 2),), compute_s=1.0),), "expected 0 or 1"),
        ((Task("a", (After("b"),), 1.0), Task("b", (), 1.0)), "list nodes in the order"),
    ],
)
def test_steps_that_make_no_sense_are_refused(tasks: tuple[Task, ...], says: str) -> None:
    with pytest.raises(StepError, match=says):
        steps.plan(Step(tasks), COSTS)
    with pytest.raises(StepError, match="expected channels"):
        steps.plan(Step((Task("a", compute_s=1.0),)), [])


class Sleeper:
    """A program whose computations sleep for their time, and whose sums are checked."""

    def __init__(self, times_s: dict[str, float], rank: int) -> None:
        self._times_s = times_s
        self._rank = rank
        self.results: dict[str, list[float]] = {}

    def compute(self, task: str, step: int) -> None:
        time.sleep(self._times_s[task])

    def give(self, task: str, step: int, vector: Any) -> None:
        vector[:] = step + self._rank

    def take(self, task: str, step: int, result: Any) -> None:
        assert result[0] == result[-1]
        self.results.setdefault(task, []).append(float(result[0]))


@pytest.mark.alone
def test_a_plan_that_turns_out_wrong_is_made_again_while_steps_go_on() -> None:
    count, ranks = 60, 2
    reduce = Collective.all_reduce
    step = Step(
        (
            Task("a", (After("large", 1),), 0.001),
            Task("large", (After("a"),), collective=reduce(ranks, 6_000_000)),
            Task("b", (), 0.001),
            Task("small", (After("b"),), collective=reduce(ranks, 1000)),
            Task("c", (After("small"),), 0.02),
        )
    )
    costs = [ChannelCost(8e9, 50_000)]
    script = steps.plan(step, costs)["joint"].script
    times_s = {"a": 0.001, "b": 0.03, "c": 0.02}

    def act(one: Team) -> tuple[Report, Replanner | None, Sleeper]:
        program = Sleeper(times_s, one.rank)
        watcher = None
        if one.rank == 0:
            watcher = Replanner(
                lambda made: one.propose(made.script),
                step,
                costs,
                script,
                ReplanSettings(evaluations=500),
            )
        return steps.run(one, step, script, program, count, watcher), watcher, program

    with team(ranks, channels=1) as teams:
        (report, watcher, first), (_, _, second) = as_ranks(teams, act)
    assert watcher is not None
    assert watcher.changes, "nothing was planned again"
    change = watcher.changes[0]
    names = [task.name for task in step.operations]

    def waits(held: Callable[[int], bool]) -> float:
        spans = [(s[0], names.index(s[1]), *s[2:]) for s in report.carried if held(s[0])]
        return steps.waited_ns(spans)[0] / len({span[0] for span in spans})

    before, after = waits(lambda number: number < change), waits(lambda number: number > change + 1)
    assert after < before / 2
    for program in (first, second):
        assert program.results["large"] == [2 * number + 1 for number in range(count)]
