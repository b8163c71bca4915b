"""Collectives of programs over several islands, executed by teams of their hosts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import Notebook, client, client_environment, said, survive_a_loss

from fairway.cluster.supervisor import Run
from fairway.settings import Settings

ROOT = Path(__file__).parents[1]
SETUP = """
import functools
from jax import lax

ISLANDS = len({device.slice_index for device in jax.devices()})
mesh = Mesh(np.array(jax.devices()).reshape(ISLANDS, -1), ("island", "x"))
COUNT = mesh.devices.size
BOTH = ("island", "x")

def over(body, given, made, *arguments):
    whole = jax.shard_map(body, mesh=mesh, in_specs=given, out_specs=made, check_vma=False)
    return np.asarray(jax.jit(whole)(*arguments))

def place(array, *spec):
    return jax.device_put(array, NamedSharding(mesh, P(*spec)))

def numbers(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).integers(0, 5, shape).astype(dtype)
"""


LAYOUTS = ["2x1x2-unix", "3x1x2-unix-auto", "2x2x2-unix-auto", "2x1x2-tcp", "2x1x2-both-auto"]


@pytest.fixture(scope="module", params=LAYOUTS)
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    islands, plane, *plan = request.param.split("-")
    given = Settings.parse(islands, data_plane=plane, plan=(*plan, "off")[0], slice_index=True)
    with Run(given) as up:
        yield up


@pytest.fixture(scope="module")
def do(run: Run) -> Iterator[Callable[[str], None]]:
    with Notebook(run, SETUP) as notebook:
        yield notebook.run


def test_elements_of_every_type_are_combined(do: Callable[[str], None]) -> None:
    do("""
        kinds = [np.float32, np.float16, jnp.bfloat16, np.int8, np.uint32, np.complex64]
        for dtype in kinds:
            given = numbers(COUNT * 3, 5, dtype=dtype)
            blocks = given.reshape(COUNT, 3, 5)
            found = over(lambda v: lax.psum(v, BOTH), P(BOTH), P(), place(given, BOTH))
            assert found.dtype == dtype and np.array_equal(found, blocks.sum(0)), dtype
            by_island = blocks.reshape(ISLANDS, -1, 3, 5).sum(0).reshape(-1, 5)
            found = over(lambda v: lax.psum(v, "island"), P(BOTH), P("x"), place(given, BOTH))
            assert np.array_equal(found, by_island), dtype
        given = numbers(COUNT, 4)
        given[1, 2] = np.nan
        for reduce, expected in ((lax.pmax, np.max), (lax.pmin, np.min)):
            found = over(lambda v: reduce(v, BOTH), P(BOTH), P(), place(given, BOTH))
            assert np.array_equal(found, expected(given, 0, keepdims=True), equal_nan=True)
    """)


def test_bits_are_combined(do: Callable[[str], None]) -> None:
    do("""
        given = numbers(COUNT, 4) > 1
        found = over(lambda v: lax.pmax(v, BOTH), P(BOTH), P(), place(given, BOTH))
        assert np.array_equal(found, given.any(0, keepdims=True))
        found = over(lambda v: lax.pmin(v, BOTH), P(BOTH), P(), place(given, BOTH))
        assert np.array_equal(found, given.all(0, keepdims=True))
    """)


def test_sums_are_scattered(do: Callable[[str], None]) -> None:
    do("""
        for axes in (BOTH, "island"):
            ranks = COUNT if axes == BOTH else ISLANDS
            for dtype in (np.float32, np.complex64):
                given = numbers(4, ranks * 2, COUNT, dtype=dtype)
                scatter = lambda v: lax.psum_scatter(v, axes, scatter_dimension=1, tiled=True)
                kept = P(None, None, "x") if axes == "island" else P()
                made = P(None, "island", "x") if axes == "island" else P(None, BOTH)
                found = over(scatter, kept, made, place(given, *kept))
                assert np.array_equal(found, ranks * given), (axes, dtype)
    """)


def test_what_is_alike_is_gathered_once(do: Callable[[str], None]) -> None:
    do("""
        given = numbers(COUNT * 2, 3)
        gather = lambda v: lax.all_gather(v, BOTH, axis=1, tiled=True)
        found = over(gather, P(BOTH), P(), place(given, BOTH))
        assert np.array_equal(found, np.concatenate(np.split(given, COUNT), 1))
        alike = numbers(COUNT, 3)  # the same on all islands
        found = over(lambda v: lax.all_gather(v, BOTH, tiled=True), P("x"), P(), place(alike, "x"))
        assert np.array_equal(found, np.tile(alike, (ISLANDS, 1)))
    """)


def test_blocks_are_exchanged(do: Callable[[str], None]) -> None:
    do("""
        given = numbers(COUNT * COUNT, 2)
        exchange = lambda v: lax.all_to_all(v, BOTH, 0, 0, tiled=True)
        found = over(exchange, P(BOTH), P(BOTH), place(given, BOTH))
        expected = given.reshape(COUNT, COUNT, 2).swapaxes(0, 1).reshape(-1, 2)
        assert np.array_equal(found, expected)
        # Rank 0 sends to the last rank, others to the rank before; rank 1 sends nothing.
        pairs = [(0, COUNT - 1), *((i, i - 1) for i in range(2, COUNT))]
        found = over(lambda v: lax.ppermute(v, BOTH, pairs), P(BOTH), P(BOTH), place(given, BOTH))
        blocks, expected = np.split(given, COUNT), np.zeros((COUNT, COUNT, 2), np.float32)
        for source, target in pairs:
            expected[target] = blocks[source]
        assert np.array_equal(found, expected.reshape(-1, 2))
    """)


def test_nothing_is_exchanged_as_well(do: Callable[[str], None]) -> None:
    do("""
        empty = np.zeros((0, 4), np.float32)
        assert over(lambda v: lax.psum(v, BOTH), P(), P(), place(empty)).shape == (0, 4)
        gather = lambda v: lax.all_gather(v, "island", axis=1, tiled=True)
        assert over(gather, P(), P(), place(empty)).shape == (0, 4 * ISLANDS)
    """)


def test_several_collectives_follow_each_other(do: Callable[[str], None]) -> None:
    do("""
        given = numbers(COUNT * COUNT, 6)
        def body(v):
            mean = lax.pmean(lax.psum(v, "x"), "island")
            scattered = lax.psum_scatter(mean, BOTH, tiled=True)
            return lax.all_gather(scattered, BOTH, tiled=True)
        found = over(body, P(BOTH), P(), place(given, BOTH))
        expected = given.reshape(COUNT, COUNT, 6).sum(0) * COUNT / ISLANDS
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        for _ in range(30):
            assert np.array_equal(over(body, P(BOTH), P(), place(given, BOTH)), found)
    """)


def test_what_cannot_be_made_fails_for_all_and_the_next_goes_well(run: Run) -> None:
    found = client(
        run,
        SETUP
        + """
def huge(x):  # more than any machine has
    return jnp.cumsum(jnp.arange(1 << 44, dtype=jnp.int8) + x.astype(jnp.int8))[-1:].astype(x.dtype)

good = place(numbers(COUNT), BOTH)
shards = [one.data for one in good.addressable_shards]
shards[-1] = jax.jit(huge)(shards[-1])
bad = jax.make_array_from_single_device_arrays(good.shape, good.sharding, shards)
f = jax.jit(jax.shard_map(lambda v: lax.psum(v, BOTH), mesh=mesh, in_specs=P(BOTH), out_specs=P()))
wrong = f(bad)
errors = [fails(lambda one=one: np.asarray(one.data)) for one in wrong.addressable_shards]
say("errors", texts=[text for _, text in errors])
say("next", right=bool(np.array_equal(f(good), [numbers(COUNT).sum()])))
""",
    )
    texts = said(found.stdout, "errors")["texts"]
    assert all("RESOURCE_EXHAUSTED" in text for text in texts), texts
    assert said(found.stdout, "next") == {"right": True}


def test_a_lost_host_is_told_and_others_go_on() -> None:
    loop = (
        SETUP
        + """
f = jax.jit(jax.shard_map(lambda v: lax.psum(v, BOTH), mesh=mesh, in_specs=P(BOTH), out_specs=P()))
given = place(numbers(COUNT, 1000), BOTH)
assert np.asarray(f(given)).shape == (1, 1000)
say("up")
def go_on():
    while True:
        jax.block_until_ready(f(given))
say("end", error=fails(go_on)[1])
"""
    )
    survive_a_loss(Settings.parse("3x1x1", slice_index=True, timeout_s=5), loop)


GROUPS = """
import fairway

meshes = [Mesh(row, ("x",)) for row in mesh.devices]
cut = [NamedSharding(one, P("x")) for one in meshes]
whole = [NamedSharding(one, P()) for one in meshes]

def placed(arrays, shardings):
    return [jax.device_put(a, s) for a, s in zip(arrays, shardings)]

def check(found, expected, shardings):
    for one, sharding in zip(found, shardings, strict=True):
        assert one.sharding.is_equivalent_to(sharding, one.ndim), (one.sharding, sharding)
        np.testing.assert_array_equal(np.asarray(one), expected)
"""


def test_groups_sum_what_they_have(do: Callable[[str], None]) -> None:
    do(
        GROUPS
        + """
arrays = [numbers(8, 3, seed=n) for n in range(ISLANDS)]
for shardings in (cut, whole):
    found = fairway.all_reduce(placed(arrays, shardings), shardings)
    check(found, sum(arrays), shardings)
halves = [one.astype(jnp.bfloat16) for one in arrays]
check(fairway.all_reduce(placed(halves, cut), cut), sum(halves), cut)
# What lies elsewhere is moved first.
check(fairway.all_reduce(placed(arrays, whole), cut), sum(arrays), cut)
"""
    )


def test_sums_are_nodes_of_programs(do: Callable[[str], None]) -> None:
    do(
        GROUPS
        + """
@fairway.program
def step(weights, xs):
    made = [jax.jit(lambda w, x: w * x)(w, x) for w, x in zip(weights, xs)]
    sums = fairway.all_reduce(made, whole)
    again = fairway.all_reduce([jax.jit(lambda s: s + 1)(s) for s in sums], whole)
    return [jax.jit(lambda w, s: w - s)(w, s) for w, s in zip(weights, again)]

ws = placed([numbers(6, seed=9)] * ISLANDS, whole)
xs = [numbers(6, seed=n) for n in range(ISLANDS)]
expected = np.asarray(ws[0])
for _ in range(5):
    ws = step(ws, placed(xs, whole))
    expected = expected - ISLANDS * (sum(expected * x for x in xs) + 1)
    check(ws, expected, whole)
"""
    )


def test_sums_are_differentiated(do: Callable[[str], None]) -> None:
    do(
        GROUPS
        + """
arrays = placed([numbers(4, seed=n) for n in range(ISLANDS)], whole)
weights = [float(n + 1) for n in range(ISLANDS)]

def loss(arrays):
    sums = fairway.all_reduce(arrays, whole)
    parts = [jax.jit(lambda s, w=w: (s * w).sum())(s) for s, w in zip(sums, weights)]
    return [jax.device_put(one, whole[0]) for one in parts]

@fairway.program
def gradient(arrays, ones):
    _, back = jax.vjp(loss, arrays)
    [found] = back(ones)
    return found

ones = placed([np.ones((), np.float32)] * ISLANDS, [whole[0]] * ISLANDS)
check(gradient(arrays, ones), np.full(4, sum(weights), np.float32), whole)
"""
    )


def test_groups_gather_and_scatter(do: Callable[[str], None]) -> None:
    do(
        GROUPS
        + """
arrays = [numbers(8, 3, seed=n) for n in range(ISLANDS)]
stacked = np.stack(arrays)
def longer(sharding):
    return NamedSharding(sharding.mesh, P(None, *sharding.spec))
for shardings in (cut, whole):
    stacks = [longer(one) for one in shardings]
    check(fairway.all_gather(placed(arrays, shardings), shardings), stacked, stacks)
    given = [stacked * (n + 1) for n in range(ISLANDS)]
    found = fairway.reduce_scatter(placed(given, stacks), shardings)
    for n, (one, sharding) in enumerate(zip(found, shardings, strict=True)):
        check([one], sum(part[n] for part in given), [sharding])
"""
    )


def test_what_is_gathered_for_use_gets_its_gradient_back(do: Callable[[str], None]) -> None:
    """A layer whose weights are sharded over all groups, as in fully sharded training (FSDP)."""
    do(
        GROUPS
        + """
@fairway.program
def step(parts, xs):
    def loss(parts):
        layers = fairway.all_gather(parts, whole)
        made = [
            jax.jit(lambda w, x: jnp.sum(jnp.tanh(x @ w.reshape(4, 6)) ** 2))(w, x)
            for w, x in zip(layers, xs)
        ]
        return made
    losses, back = jax.vjp(loss, parts)
    [gradients] = back([jax.jit(jnp.ones_like)(one) for one in losses])
    return losses, [jax.jit(lambda p, g: p - 0.1 * g)(p, g) for p, g in zip(parts, gradients)]

def plain(w):
    return sum(jnp.sum(jnp.tanh(x @ w.reshape(4, 6)) ** 2) for x in inputs)

weights = np.random.default_rng(1).standard_normal(24).astype(np.float32)
inputs = [np.random.default_rng(n).standard_normal((5, 4)).astype(np.float32)
          for n in range(ISLANDS)]
parts = placed(np.split(weights, ISLANDS), whole)
for _ in range(4):
    losses, parts = step(parts, placed(inputs, whole))
    local = jax.device_put(weights, jax.devices()[0])
    value, slope = jax.jit(jax.value_and_grad(plain))(local)
    np.testing.assert_allclose(sum(map(float, losses)), float(value), rtol=1e-5)
    weights = weights - 0.1 * np.asarray(slope)
    found = np.concatenate([np.asarray(part) for part in parts])
    np.testing.assert_allclose(found, weights, rtol=1e-4, atol=1e-6)
"""
    )


def test_collectives_that_make_no_sense_are_refused(do: Callable[[str], None]) -> None:
    do(
        GROUPS
        + """
arrays = placed([numbers(8, 3, seed=n) for n in range(ISLANDS)], whole)
for act, bad, shardings, word in (
    (fairway.all_reduce, arrays[:-1], whole, "one array for each"),
    (fairway.all_gather, [arrays[0][:4], *arrays[1:]], whole, "of one shape"),
    (fairway.all_reduce, arrays, [whole[0]] * ISLANDS, "none is in two"),
    (fairway.all_gather, [], [], "of nothing"),
    (fairway.reduce_scatter, arrays, whole, f"expected [{ISLANDS}, ...]"),
    (fairway.all_reduce, arrays, [cut[0], *whole[1:]], "the cut of what the first group has"),
):
    kind, text = fails(lambda: jax.block_until_ready(act(bad, shardings)))
    assert word in text, (kind, text)
"""
    )


def test_sharded_training_goes_as_the_plain_example(tmp_path: Path) -> None:
    small = ["--steps", "6", "--batch", "16", "--sequence", "16", "--width", "32"]
    losses = []
    with Run(Settings.parse("2x1x2")) as up:
        for name in ("train_lm", "sharded_lm"):
            script = ROOT / "examples" / f"{name}.py"
            command = [sys.executable, str(script), *small, "--out", str(tmp_path)]
            subprocess.run(command, env=client_environment(up), check=True, timeout=300)
            losses.append(json.loads((tmp_path / f"{name}.json").read_text())["losses"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[0][-1] < losses[0][0]
