"""One jit over several islands: partitioned, and run as computations of each island."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import Notebook, client, said, survive_a_loss

from fairway.cluster.supervisor import Run
from fairway.settings import Settings

PROGRAMS = int(os.environ.get("FAIRWAY_PROGRAMS", "16"))
SETUP = f"""
import functools
import sys

sys.path.insert(0, {str(Path(__file__).parent)!r})
from jax import lax
from random_programs import RandomProgram, meshes

mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
X = np.random.default_rng(0).normal(size=(8, 16)).astype("f")
W = np.random.default_rng(1).normal(size=(16, 16)).astype("f")

def place(array, *spec):
    return jax.device_put(array, NamedSharding(mesh, P(*spec)))

def check(f, *specs, tolerance=1e-5):
    given = [X, W][: len(specs)]
    found = jax.tree.leaves(jax.jit(f)(*(place(a, *s) for a, s in zip(given, specs))))
    alone = jax.device_put(given, jax.devices()[0])
    for one, other in zip(found, jax.tree.leaves(jax.jit(f)(*alone)), strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)
"""


@pytest.fixture(scope="module", params=["2x1x4", "2x2x2", "4x1x2"])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    with Run(Settings.parse(request.param, slice_index=True)) as up:
        yield up


@pytest.fixture(scope="module")
def do(run: Run) -> Iterator[Callable[[str], None]]:
    with Notebook(run, SETUP) as notebook:
        yield notebook.run


def test_what_does_not_cross_is_one_computation(do: Callable[[str], None]) -> None:
    do("""
        check(lambda x, w: jnp.tanh(x @ w), ("data",), (None, "model"))
        check(lambda x: x + jax.random.normal(jax.random.key(3), x.shape), ("data", "model"))
        check(lambda x: jnp.arange(8)[:, None] * x, ("data",))
    """)


def test_reductions_cross(do: Callable[[str], None]) -> None:
    do("""
        check(lambda x: (x.sum(), x.max(0), x.mean(), x.min(1), x.T @ x), ("data", "model"))
        check(lambda x: (jnp.argmax(x, 0), jax.nn.softmax(x, 0), jnp.prod(x, 0)), ("data",))
        loss = lambda x, w: (jnp.tanh(x @ w) ** 2).sum()
        check(jax.grad(loss, argnums=(0, 1)), ("data",), (None, "model"))
        check(jax.grad(loss, argnums=(0, 1)), ("data",), ("data", "model"), tolerance=1e-4)
    """)


def test_operations_along_islands_are_resharded(do: Callable[[str], None]) -> None:
    do("""
        check(lambda x: (jnp.sort(x, 0), x[::-1], jnp.cumsum(x, 0), jnp.roll(x, 1, 0)), ("data",))
        rows = np.array([1, 5, 2])
        check(lambda x: (x[1:5], jnp.pad(x, ((1, 1), (0, 0))), x.reshape(-1), x[rows]), ("data",))
        check(lambda x: (x.at[jnp.array([1, 6])].add(1.0), jnp.fft.fft(x, axis=0).real), ("data",))
    """)


def test_loops_and_branches_cross(do: Callable[[str], None]) -> None:
    do("""
        def layers(x, w):
            step = lambda c, v: (jnp.tanh(c @ v), c.sum())
            return lax.scan(step, x, jnp.stack([w, w, w]))
        check(layers, ("data",), (None, "model"))
        check(jax.grad(lambda x, w: layers(x, w)[0].sum(), argnums=1), ("data",), ())
        until = lambda x: lax.while_loop(lambda c: c.sum() < 100, lambda c: c + c.mean(), x + 1)
        check(until, ("data",))
        either = lambda x: lax.cond(x[0, 0] > 0, lambda a: a.sum(0), lambda a: a.mean(0), x)
        check(either, ("data",))
    """)


def test_shard_map_crosses(do: Callable[[str], None]) -> None:
    do("""
        across = Mesh(np.array(jax.devices()), ("all",))
        over = functools.partial(jax.shard_map, mesh=across, check_vma=False)

        def ring(x):
            def step(c, i):
                c = lax.ppermute(c, "all", [(k, (k + 1) % 8) for k in range(8)])
                return jnp.tanh(c + i), c.sum()
            c, sums = lax.scan(step, x, jnp.arange(3.0))
            return c + sums.sum() + lax.axis_index("all")

        found = jax.jit(over(ring, in_specs=P("all"), out_specs=P("all")))(X)
        expected = X.copy()
        sums = np.zeros((8, 1), "f")
        for i in range(3):
            expected = np.roll(expected, 1, 0)
            sums += expected.sum(1, keepdims=True)
            expected = np.tanh(expected + i)
        np.testing.assert_allclose(found, expected + sums + np.arange(8)[:, None], rtol=1e-5)

        def all_kinds(x):
            y = x * 2
            gathered = lax.all_gather(y, "all", axis=0, tiled=True)
            turned = lax.all_to_all(y, "all", 1, 0, tiled=True)
            own = lax.psum_scatter(gathered, "all", scatter_dimension=0, tiled=True)
            return own + turned.sum() + lax.pmax(y, "all")

        found = jax.jit(over(all_kinds, in_specs=P("all"), out_specs=P("all")))(X)
        turned = (2 * X).reshape(8, 8, 2).sum((0, 2))[:, None]
        np.testing.assert_allclose(found, 16 * X + turned + (2 * X).max(0), rtol=1e-5)
    """)


def test_pmap_is_over_all_devices(do: Callable[[str], None]) -> None:
    do("""
        found = jax.pmap(lambda x: lax.psum(x, "i") + lax.axis_index("i"), axis_name="i")(X)
        np.testing.assert_allclose(found, X.sum(0) + np.arange(8)[:, None], rtol=1e-5)
    """)


def test_make_mesh_spans_islands(do: Callable[[str], None]) -> None:
    do("""
        from jax import make_mesh
        assert len({device.slice_index for device in jax.devices()}) > 1
        over = make_mesh((4, 2), ("a", "b"))
        assert over.devices.size == 8
        assert over.axis_types == make_mesh((2, 1), ("a", "b")).axis_types
        auto = jax.make_mesh((8,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
        assert auto.axis_types == (jax.sharding.AxisType.Auto,)
        kind, text = fails(lambda: make_mesh((16,), ("a",)))
        assert (kind, "must be" in text) == ("ValueError", True), (kind, text)
        x = jax.device_put(X, NamedSharding(over, P("a")))
        np.testing.assert_allclose(jax.jit(lambda x: x.sum(0))(x), X.sum(0), rtol=1e-5)
    """)


def test_donated_arguments_are_gone(do: Callable[[str], None]) -> None:
    do("""
        step = jax.jit(lambda w, x: w - x.T @ x, donate_argnums=0)
        w, x = place(W), place(X, "data")
        for _ in range(3):
            w, old = step(w, x), w
        assert old.is_deleted()
        np.testing.assert_allclose(w, W - 3 * X.T @ X, rtol=1e-4, atol=1e-4)
    """)


@pytest.mark.parametrize("part", range(4))
def test_random_programs_are_those_of_one_device(do: Callable[[str], None], part: int) -> None:
    do(f"""
        all_meshes = meshes()
        for seed in range({part}, {PROGRAMS}, 4):
            over = all_meshes[seed % len(all_meshes)]
            program = RandomProgram(seed, over)
            apart = program.difference(over)
            assert apart < 3e-4, (seed, over, program.specs, program.names, apart)
    """)


def test_a_mesh_that_mixes_islands_is_refused_by_name(do: Callable[[str], None]) -> None:
    do("""
        mixed = Mesh(np.array(jax.devices())[[0, 1, 2, 4, 3, 5, 6, 7]], ("all",))
        x = jax.device_put(X, NamedSharding(mixed, P("all")))
        kind, text = fails(lambda: jax.jit(lambda x: x.sum())(x))
        assert "INVALID_ARGUMENT" in text and "goes from island to island" in text, text
    """)


def test_a_lost_island_ends_it_and_it_is_compiled_again() -> None:
    loop = (
        SETUP.replace("reshape(2, 4)", "reshape(3, 1)")
        + """
f = jax.jit(lambda x: x.T @ x)
x = place(X[:6], "data")
np.testing.assert_allclose(f(x), X[:6].T @ X[:6], rtol=1e-4, atol=1e-4)
say("up")
def go_on():
    while True:
        jax.block_until_ready(f(x))
say("end", error=fails(go_on)[1])
"""
    )
    survive_a_loss(Settings.parse("3x1x1", slice_index=True, timeout_s=5), loop)


def test_one_island_more_does_not_change_what_the_others_compute() -> None:
    code = (
        SETUP
        + """
f = jax.jit(lambda x, w: (jnp.tanh(x @ w), w.sum()))
made, total = f(place(X, "data"), place(W, None, "model"))
say("made", sharding=str(made.sharding.spec), total=float(total), devices=len(made.devices()))
"""
    )
    with Run(Settings.parse("2x1x4", slice_index=True)) as up:
        found = said(client(up, code).stdout, "made")
    assert found["devices"] == 8, found
    assert "data" in found["sharding"], found


def test_sums_may_be_reduced_later_inside_of_a_program(do: Callable[[str], None]) -> None:
    """Explicit shardings: a product that is unreduced over the axis of the islands."""
    do("""
        kinds = (jax.sharding.AxisType.Explicit,) * 2
        explicit = jax.make_mesh((2, 4), ("x", "y"), axis_types=kinds)
        a = jax.device_put(X, NamedSharding(explicit, P("y", "x")))
        b = jax.device_put(W, NamedSharding(explicit, P("x", None)))
        product = (((1,), (0,)), ((), ()))
        def f(a, b):
            unreduced = P("y", None, unreduced={"x"})
            c = lax.dot_general(a, b, product, out_sharding=unreduced)
            return jax.sharding.reshard(c + c, P("y", None))
        with jax.set_mesh(explicit):
            np.testing.assert_allclose(jax.jit(f)(a, b), 2 * X @ W, rtol=1e-4, atol=1e-4)
            out = P("y", None, unreduced={"x"})
            g = jax.jit(lambda a, b: lax.dot_general(a, b, product, out_sharding=out))
            kind, text = fails(lambda: g(a, b).block_until_ready())
            assert "unreduced" in text, text
    """)
