"""Programs whose collectives follow a plan (``plan="auto"``), which is made while they run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from conftest import Notebook, survive_a_loss

from fairway.cluster.supervisor import Run
from fairway.settings import Settings

SETUP = """
import fairway

ISLANDS = len({device.slice_index for device in jax.devices()})
meshes = [Mesh(row, ("x",)) for row in np.array(jax.devices()).reshape(ISLANDS, -1)]
whole = [NamedSharding(one, P()) for one in meshes]

def placed(arrays):
    return [jax.device_put(a, s) for a, s in zip(arrays, whole, strict=True)]

def numbers(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 5, shape).astype(np.float32)

@jax.jit
def slowly(x):
    # Takes its time, and gives back what it got.
    def turn(_, held):
        return jnp.tanh(held @ held) * 0.1
    made = jax.lax.fori_loop(0, 60, turn, jnp.full((256, 256), x[0] * 1e-30))
    return x + jnp.where(made[0, 0] > 2, 1, 0)

@jax.jit
def both(a, b):
    return a.sum() + b.sum()

SMALL, LARGE = 8, 1 << 21

# What is first here is there last.
@fairway.program
def step(small, large):
    first = fairway.all_reduce([slowly(one) for one in small], whole)
    second = fairway.all_reduce(large, whole)
    return [both(a, b) for a, b in zip(first, second, strict=True)]

small = [numbers(SMALL, seed=n) for n in range(ISLANDS)]
large = [numbers(LARGE, seed=n + 9) for n in range(ISLANDS)]
arguments = placed(small), placed(large)
expected = sum(map(np.sum, small)) + sum(map(np.sum, large))

def check(found, wanted):
    for one in found:
        assert float(one) == wanted, (float(one), wanted)
"""


@pytest.fixture(scope="module", params=["2x1x2", "2x2x1", "3x1x1"])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    with Run(Settings.parse(request.param, slice_index=True, plan="auto")) as up:
        yield up


@pytest.fixture(scope="module")
def do(run: Run) -> Iterator[Callable[[str], None]]:
    with Notebook(run, SETUP) as notebook:
        yield notebook.run


def test_runs_are_right_before_and_after_a_plan_is_made(
    run: Run, do: Callable[[str], None]
) -> None:
    do("for _ in range(20): check(step(*arguments), expected)")
    for _ in range(20):
        [plan] = [one for one in run.overview()["plans"] if one["collectives"] == 2]
        if plan["plan"] > 1:
            break
        do("for _ in range(5): check(step(*arguments), expected)")
    assert plan["plan"] > 1
    if plan["predicted_s"] is not None:  # else it was withdrawn already
        before, after = plan["predicted_s"]
        assert 0 < after < before, plan
    do("for _ in range(10): check(step(*arguments), expected)")


def test_runs_follow_one_another_without_a_wait(do: Callable[[str], None]) -> None:
    do("""
        @fairway.program
        def learn(weights, xs):
            gathered = fairway.all_gather(weights, whole)
            made = [jax.jit(lambda w, x: w.reshape(-1) * x)(w, x) for w, x in zip(gathered, xs)]
            sums = fairway.all_reduce(made, whole)
            again = fairway.all_reduce([jax.jit(lambda s: s + 1)(s) for s in sums], whole)
            stacked = [jax.jit(lambda s: s.reshape(ISLANDS, -1))(s) for s in again]
            scattered = fairway.reduce_scatter(stacked, whole)
            return [jax.jit(lambda w, s: w - s)(w, s) for w, s in zip(weights, scattered)]

        weights = [numbers(4, seed=n) / 64 for n in range(ISLANDS)]
        xs = [numbers(4 * ISLANDS, seed=n) / 8 for n in range(ISLANDS)]
        held, given = placed(weights), placed(xs)
        for _ in range(40):
            held = learn(held, given)  # no client waits for it
            flat = np.concatenate(weights)
            total = ISLANDS * (sum(flat * x for x in xs) + 1) * ISLANDS
            weights = [w - s for w, s in zip(weights, np.split(total, ISLANDS))]
            if np.abs(weights[0]).max() > 1e6:
                held = placed([numbers(4, seed=n) / 64 for n in range(ISLANDS)])
                weights = [numbers(4, seed=n) / 64 for n in range(ISLANDS)]
        for one, wanted in zip(held, weights, strict=True):
            np.testing.assert_allclose(np.asarray(one), wanted, rtol=1e-4)
    """)


def test_a_plan_knows_what_only_other_hosts_wait_for(do: Callable[[str], None]) -> None:
    """The first island's input of the last sum is ready; the second's depends on the first sum."""
    do("""
        @fairway.program
        def chained(small, large):
            first = fairway.all_reduce([slowly(one) for one in small], whole)
            brought = jax.device_put(jax.jit(lambda a: a[:1] * 0)(first[0]), whole[1])
            late = list(large)
            late[1] = jax.jit(lambda v, z: v + z[0])(late[1], brought)
            second = fairway.all_reduce(late, whole)
            return [both(a, b) for a, b in zip(first, second, strict=True)]

        for _ in range(25):
            check(chained(*arguments), expected)
    """)


def test_an_array_may_be_given_twice(do: Callable[[str], None]) -> None:
    """A launch that may donate an input of a sum waits for that sum, under any alias."""
    do("""
        @fairway.program
        def twice(small, others, large):
            first = fairway.all_reduce([slowly(one) for one in small[:-1]] + small[-1:], whole)
            late = [*large[:-1], jax.jit(lambda v, y: v + y[0] * 0)(large[-1], others[-1])]
            second = fairway.all_reduce(late, whole)
            return [both(a, b) for a, b in zip(first, second, strict=True)]

        given, more = arguments
        for number in range(40):
            others = given if number % 2 else placed(small)
            check(twice(given, others, more), expected)
    """)


def test_what_cannot_be_made_fails_where_it_is_used(do: Callable[[str], None]) -> None:
    do("""
        @jax.jit
        def huge(x):  # more than any machine has
            made = jnp.cumsum(jnp.arange(1 << 44, dtype=jnp.int8) + x[0].astype(jnp.int8))
            return x + made[-1]

        @fairway.program
        def apart(small, large):
            first = fairway.all_reduce(small, whole)
            second = fairway.all_reduce(large, whole)
            return [jax.jit(jnp.sum)(a) for a in (*first, *second)]

        good = placed(small)
        bad = [*good[:-1], huge(good[-1])]
        more = placed(large)
        for number in range(12):
            found = apart(bad if number % 3 == 1 else good, more)
            for one in found[:ISLANDS]:
                kind, text = fails(lambda one=one: float(one))
                assert ("RESOURCE_EXHAUSTED" in text) == (number % 3 == 1), (number, text)
            check(found[ISLANDS:], sum(map(np.sum, large)))
    """)


def test_a_lost_host_ends_runs_and_others_go_on() -> None:
    loop = (
        SETUP
        + """
for _ in range(20):
    check(step(*arguments), expected)
say("up")
def go_on():
    while True:
        check(step(*arguments), expected)
say("end", error=fails(go_on)[1])
"""
    )
    survive_a_loss(Settings.parse("3x1x1", slice_index=True, timeout_s=5, plan="auto"), loop)
