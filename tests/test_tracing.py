"""Whole programs: ``fairway.program`` computes what numpy and JAX, op by op, compute.

One client serves all tests but the last, like a user's notebook.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from conftest import (
    Begin,
    Notebook,
    Start,
    Up,
    client,
    hosts_of,
    rss_bytes,
    until,
)

CLIENT = """
import fairway
from jax import lax

devices = jax.devices()
half = len(devices) // 2
meshes = [Mesh(np.array(part).reshape(2, half // 2), ("x", "y"))
          for part in (devices[:half], devices[half:])]

def on(island, *spec):
    return NamedSharding(meshes[island], P(*spec))

def lies(function, island, given=P("x"), made=P("x"), **options):
    return jax.jit(function, in_shardings=on(island, *given), out_shardings=on(island, *made),
                   **options)

same = np.testing.assert_array_equal
"""

Do = Callable[[str], None]


@pytest.fixture(scope="module")
def notebook(up: Up) -> Iterator[Notebook]:
    with Notebook(up, CLIENT) as running:
        yield running


@pytest.fixture
def do(notebook: Notebook) -> Do:
    """Runs code in the shared client."""
    return notebook.run


def test_without_islands_of_fairway_it_says_how_to_get_some() -> None:
    code = """
import fairway
double = jax.jit(lambda x: 2 * x)
step = fairway.program(lambda x: double(x))
step(jax.device_put(np.ones(4), jax.devices()[0]))
"""
    result = client(None, code, environment={"JAX_PLATFORMS": "cpu"})
    assert result.returncode == 1
    last = result.stdout.splitlines()[-1]
    for part in ("ProgramError", "'cpu' devices", "islands of Fairway", "fairway run"):
        assert part in last, result.stdout


# Values


@pytest.mark.fast
def test_the_program_of_the_paper(do: Do) -> None:
    """Source: PATHWAYS Figure 2."""
    do(
        """
        def get_devices(n, taken=[0]):
            taken[0] += n
            return devices[taken[0] - n : taken[0]]

        a = jax.pmap(lambda x: x * 2.0, devices=get_devices(2))
        b = jax.pmap(lambda x: x + 1.0, devices=get_devices(2))
        c = jax.pmap(lambda x: x / 2.0, devices=get_devices(2))

        @fairway.program
        def f(v):
            x = a(v)
            y = b(x)
            z = a(c(x))
            return (y, z)

        y, z = f(np.array([1.0, 2.0]))
        same(y, [3.0, 5.0])
        same(z, [2.0, 4.0])
        assert y.devices() == set(devices[2:4]) and z.devices() == set(devices[:2])
        """
    )


def test_results_are_arguments_of_the_kind_that_was_compiled_for(do: Do) -> None:
    """Trailing axes may be named or not; a program that is fed its results is compiled once."""
    do(
        """
        step = fairway.program(lies(lambda x: x + 1, 0, P("x"), P("x", None)))
        x = jax.device_put(np.zeros((4, 4), np.float32), on(0, "x"))
        for _ in range(3):
            x = step(x)
        same(x, np.full((4, 4), 3))
        assert len(step._compiled) == 1, list(step._compiled)
        """
    )


def test_what_is_alike_is_compiled_once(do: Do) -> None:
    """Layers are functions of their own; equal computations on equal devices are compiled once.

    Where nothing is left to be decided, a function is not compiled to infer the shardings of its
    results: only the compiler knows `erf_inv`, but that is within a `shard_map` over all axes.
    """
    do(
        """
        def layer(island):
            mesh = on(island, ("x", "y")).mesh
            cut = P(("x", "y"))
            inner = jax.shard_map(
                lambda x: jax.scipy.special.erfinv(x / 4), mesh=mesh, in_specs=cut, out_specs=cut
            )
            return jax.jit(lambda x: inner(x) + 1, in_shardings=on(island, ("x", "y")))

        layers = [*[layer(0) for _ in range(5)], *[layer(1) for _ in range(3)]]

        @fairway.program
        def chain(x):
            for one in layers:
                x = one(x)
            return x

        seen = []
        listen = jax.monitoring.register_event_duration_secs_listener
        listen(lambda name, *_, **__: seen.append(name))
        x = np.linspace(-1, 1, 8, dtype=np.float32)
        lowered = chain.lower(x)
        assert not any("backend_compile" in name for name in seen), seen
        assert lowered.as_text().count("sym_visibility") == 2
        made = chain(x)
        assert made.sharding == on(1, ("x", "y"))
        expected = x
        for _ in layers:
            expected = jax.scipy.special.erfinv(expected / 4) + 1
        np.testing.assert_allclose(made, expected, rtol=1e-6)
        """
    )


def test_constants_and_gradients_of_moves_lie_where_they_are_used(do: Do) -> None:
    do(
        """
        double = lies(lambda x: 2 * x, 0)
        cube = jax.jit(lambda x: (x ** 3).sum(), in_shardings=on(1, "x"), out_shardings=on(1))

        @fairway.program
        def slope(x):
            def loss(x):
                moved = jax.device_put(double(x), on(1, "x"))
                return jax.device_put(cube(moved) + jnp.zeros(()), on(0)) + x.sum()
            return jax.value_and_grad(loss)(x)

        x = np.arange(8, dtype=np.float32)
        value, gradient = slope(jax.device_put(x, on(0, "x")))
        same(value, (8 * x ** 3).sum() + x.sum())
        same(gradient, 24 * x ** 2 + 1)
        assert {device.id for device in gradient.devices()} <= set(range(half))
        """
    )


def test_numbers_that_are_put_somewhere(do: Do) -> None:
    """A number that the program puts on devices lies there; without a put, where it is read."""
    do(
        """
        @fairway.program
        def scaled(x):
            factor = jax.device_put(2.0, on(1))
            shift, one = jax.device_put((3.0, x))
            return jax.device_put(one, on(1, "x")) * factor + shift, x + shift, factor

        x = np.arange(8, dtype=np.float32)
        there, here, factor = scaled(jax.device_put(x, on(0, "x")))
        same(there, 2 * x + 3)
        same(here, x + 3)
        same(factor, 2.0)
        assert there.devices() == factor.devices() == set(devices[half:])
        assert here.devices() == set(devices[:half])
        """
    )


def test_shardings(do: Do) -> None:
    """Every sharding on one island becomes every other on the next; last axis fastest."""
    do(
        """
        specs = [P("x", "y"), P("y", "x"), P(("x", "y"), None), P(None, ("y", "x")), P("y"), P()]
        x = np.arange(64, dtype=np.float32).reshape(8, 8)
        for index, given in enumerate(specs):
            made = specs[(index + 1) % len(specs)]
            first = lies(lambda a: a * 2 + a[0], 0, given, made)
            second = lies(lambda b: b.T - 3, 1, given, made)

            @fairway.program
            def both(a):
                b = first(a)
                return b, second(b)

            b, c = both(x)
            same(b, x * 2 + x[0], err_msg=f"{given} {made}")
            same(c, (x * 2 + x[0]).T - 3, err_msg=f"{given} {made}")
            assert b.sharding == on(0, *made) and c.sharding == on(1, *made)
            for array in (b, c):
                for shard in array.addressable_shards:
                    same(shard.data, np.asarray(array)[shard.index])
        """
    )


def test_moves(do: Do) -> None:
    """Between devices, shardings and islands, named and not; the same array is transferred once."""
    do(
        """
        x = np.arange(8, dtype=np.float32)
        plus = lies(lambda a: a + 1, 1)
        minus = lies(lambda a, b: a - b, 0)

        @fairway.program
        def program(a, *, scale, tree):
            b = jax.device_put(a, devices[6]) * 2
            c = jax.device_put(b, on(0, ("y", "x")))
            both = jax.device_put({"c": c, "d": plus(c)}, on(0, "y"))
            return both, [plus(c) * scale, minus(c, tree["p"][0])]

        given = dict(scale=jax.device_put(3.0, on(1)), tree={"p": (x * x,)})
        both, rest = program(x, **given)
        same(both["c"], 2 * x)
        same(both["d"], 2 * x + 1)
        same(rest[0], (2 * x + 1) * 3)
        same(rest[1], 2 * x - x * x)
        assert both["d"].sharding == on(0, "y") and both["c"].sharding == on(0, "y")
        lowered = program.lower(x, **given)
        assert lowered.as_text().count("ifrt.Reshard") == 5, lowered.as_text()
        """
    )


def test_a_pipeline(do: Do) -> None:
    """Three microbatches forth and back over two islands, with a loss and gradients at its end."""
    do(
        """
        random = np.random.default_rng(0)
        given, target = random.normal(size=(2, 3, 8, 4)).astype(np.float32)
        weights = random.normal(size=(2, 4, 4)).astype(np.float32)
        w = [jax.device_put(weights[island], on(island)) for island in (0, 1)]

        def forward(w, x):
            return jnp.tanh(x @ w)

        def loss(w, x, y):
            return ((jnp.tanh(x @ w) - y) ** 2).sum()

        def backward(w, x, g):
            return jax.vjp(forward, w, x)[1](g)[0]

        cut, whole = on(0, "x"), on(0)
        ahead = jax.jit(forward, in_shardings=(whole, cut), out_shardings=cut)
        cut, whole = on(1, ("x", "y")), on(1)
        turn = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)), in_shardings=(whole, cut, cut),
                       out_shardings=(whole, (whole, cut)))
        cut, whole = on(0, "x"), on(0)
        back = jax.jit(backward, in_shardings=(whole, cut, cut), out_shardings=whole)
        add = [jax.jit(jnp.add, in_shardings=on(i), out_shardings=on(i)) for i in (0, 1)]

        @fairway.program
        def train(w, given, target):
            hidden = [ahead(w[0], x) for x in given]
            ends = [turn(w[1], x, y) for x, y in zip(hidden, target)]
            starts = [back(w[0], x, g[1]) for x, (_, g) in zip(given, ends)]
            total = lambda add, parts: add(add(parts[0], parts[1]), parts[2])
            return (total(add[1], [end[0] for end in ends]), total(add[0], starts),
                    total(add[1], [g[0] for _, g in ends]))

        def plain(w0, w1):
            return sum(loss(w1, forward(w0, x), y) for x, y in zip(given, target))

        value, *gradients = train(w, list(given), list(target))
        local = [jax.device_put(one, devices[0]) for one in weights]
        expected, slopes = jax.value_and_grad(plain, argnums=(0, 1))(*local)
        np.testing.assert_allclose(value, expected, rtol=1e-5)
        for gradient, slope in zip(gradients, slopes):
            np.testing.assert_allclose(gradient, slope, rtol=1e-4, atol=1e-5)
        """
    )


@pytest.mark.parametrize("is_optimized", [True, False])
@pytest.mark.parametrize("count", [1, 4])
def test_a_chain_is_equal_bit_by_bit(do: Do, count: int, is_optimized: bool) -> None:
    """Nothing is contracted or reassociated across the boundaries of functions.

    The map is chaotic: one bit that differs early has changed every element at the end, and so has
    a function of the program that is compiled with other options than a single one.
    """
    do(
        f"""
        jax.config.update("jax_disable_most_optimizations", {not is_optimized})
        mesh = Mesh(np.array(devices[:{count}]), ("d",))
        cut = NamedSharding(mesh, P("d"))
        mixed = jax.shard_map(lambda x: x * 0.9 + lax.psum(x, "d") * np.float32(0.1 / {count}),
                              mesh=mesh, in_specs=P("d"), out_specs=P("d"))
        steps = [jax.jit(step, in_shardings=cut, out_shardings=cut) for step in
                 (lambda x: x * np.float32(1.41), lambda x: x * x, lambda x: 1 - x, mixed)]

        def chain(x):
            for number in range(128):
                x = steps[number % 4](x)
            return x

        x = np.random.default_rng(1).uniform(-1, 1, size=64).astype(np.float32)
        program = fairway.program(chain)
        assert program.lower(x).nodes == 128
        whole, single = np.asarray(program(x)), np.asarray(chain(jax.device_put(x, cut)))
        assert np.isfinite(single).all() and len(set(single.tolist())) > 16
        jax.config.update("jax_disable_most_optimizations", True)
        same(whole.view(np.uint32), single.view(np.uint32))
        """
    )


def test_element_types(do: Do) -> None:
    do(
        """
        names = ["bfloat16", "float16", "int8", "uint8", "int32", "bool", "complex64"]
        xs = [jnp.array([0, 1, 2, 5]).astype(name) for name in names]
        there = lies(lambda *xs: tuple(x + x for x in xs), 1)
        back = lies(lambda *xs: tuple(x * x for x in xs), 0, made=())
        found = fairway.program(lambda xs: back(*there(*xs)))(xs)
        for x, y in zip(xs, found, strict=True):
            assert y.dtype == x.dtype
            same(np.asarray(y), np.asarray((x + x) * (x + x)))
        """
    )


def test_arguments_and_results(do: Do) -> None:
    """Results that are arguments, are there twice, or are unused."""
    do(
        """
        pair = lies(lambda a: (a + 1, a * 2), 0)
        x = np.arange(4, dtype=np.float32)

        @fairway.program
        def program(a, unused):
            b, _ = pair(a)
            pair(b)  # its result is never read
            return {"a": a, "twice": (b, b), "none": None}

        for given in (x, jax.device_put(x, on(0, "x"))):
            made = program(given, {"un": np.ones(3), "used": given})
            assert made["none"] is None
            for one in made["twice"]:
                same(one, x + 1)
                assert one.sharding == on(0, "x")
            same(made["a"], x)
            same(given, x)
        """
    )


def test_scalars_closures_and_new_kinds(do: Do) -> None:
    """Retraces for new shapes, types, places and trees, and for nothing else."""
    do(
        """
        traces = []
        kept = jax.device_put(np.arange(4, dtype=np.float32), on(1, "x"))
        table = np.array([0, 8, 4, 2], np.float32)
        add = lies(lambda a, b: a + b + table, 1)

        @fairway.program
        def program(a):
            traces.append(1)
            return add(a * 2, kept)

        for scale in (1, 2):  # values are not part of a kind
            same(program(np.full(4, scale, np.float32)), 2 * scale + np.arange(4) + table)
        assert len(traces) == 1
        there = jax.device_put(np.ones(4, np.float32), devices[0])
        same(program(there), 2 + np.arange(4) + table)
        same(program(np.ones((4, 4), np.float32)), np.full((4, 4), 2) + np.arange(4) + table)
        assert len(traces) == 3
        half = fairway.program(lambda x: jnp.sqrt(x) / 2)
        assert float(half(9.0)) == 1.5 and half(4).shape == () and half(np.int8(16)) == 2
        assert float(half(x=25.0)) == 2.5
        """
    )


# Donation and errors


def test_donation_of_an_argument(do: Do) -> None:
    do(
        """
        give = lies(lambda a: a + 1, 0, donate_argnums=0)
        there = lies(lambda a: a * 2, 1)
        program = fairway.program(lambda a: there(give(a)))
        x = jax.device_put(np.arange(4, dtype=np.float32), on(0, "x"))
        same(program(x), (np.arange(4) + 1) * 2)
        assert x.is_deleted()
        kind, text = fails(lambda: program(x))
        assert kind == "JaxRuntimeError" and text.startswith("INVALID_ARGUMENT"), (kind, text)
        assert fails(lambda: np.asarray(x))[0] == "RuntimeError"

        after = fairway.program(lambda a: (give(a), there(a)))
        x = jax.device_put(np.arange(4, dtype=np.float32), on(0, "x"))
        kind, text = fails(lambda: after(x))
        assert kind == "ProgramError" and "donate_argnums" in text, (kind, text)
        same(x, np.arange(4))
        """
    )


def test_errors(do: Do) -> None:
    """Functions that cannot be a program are refused when they are traced, with an alternative."""
    do(
        """
        add = jax.jit(lambda a, b: a + b)
        a, b = (jax.device_put(np.ones(2), device) for device in (devices[0], devices[5]))
        kind, text = fails(lambda: fairway.program(lambda a, b: add(a, b))(a, b))
        assert kind == "ProgramError" and "[0]" in text and "[5]" in text, (kind, text)
        assert "in_shardings" in text, text

        def prints(a):
            jax.debug.print("{}", a)
            return a

        for function in (prints, jax.jit(prints)):
            kind, text = fails(lambda: fairway.program(function)(a))
            assert kind == "ProgramError" and "effects" in text, (kind, text)

        for function in (lambda a: (add(a, a), 3), lambda a: 1.5):
            kind, text = fails(lambda: fairway.program(function)(a))
            assert kind == "ProgramError" and "constant" in text, (kind, text)

        kind, text = fails(lambda: fairway.program(lambda a: 1 if a[0] > 0 else 2)(a))
        assert kind == "TracerBoolConversionError", (kind, text)
        same(fairway.program(add)(a, a), [2, 2])
        """
    )


def test_an_error_inside_travels_along(do: Do) -> None:
    """Results that depend on a failed one are that error, on any island; the next run succeeds."""
    do(
        """
        spread = jax.jit(lambda x: jnp.zeros((2**20, 2**20)) + x)
        corner = jax.jit(lambda x: x[0, :2])

        @fairway.program
        def program(x):
            return jax.device_put(corner(spread(x)), devices[5]) * 2, jax.device_put(x, devices[6])

        x = jax.device_put(np.float32(1), devices[0])
        for _ in range(2):
            broken, well = program(x)
            kind, text = fails(lambda: np.asarray(broken))
            assert kind == "JaxRuntimeError" and text.startswith("RESOURCE_EXHAUSTED"), (kind, text)
            assert float(well) == 1
        assert float(fairway.program(lambda x: jax.device_put(x + 1, devices[5]) * 2)(x)) == 4
        """
    )


# Leaks


def test_many_runs_leave_nothing(up: Up) -> None:
    """Neither the controller's entries nor the hosts' objects grow with the runs."""
    code = """
        there = lies(lambda a: (a + 1, a * 0), 1)
        back = lies(lambda a, b: (a + b, a), 0)

        @fairway.program
        def program(a):
            b, c = there(a)
            d, unread = back(b, c)
            return d, b, a

        x = jax.device_put(np.zeros(1 << 18, np.float32), on(0, "x"))
        for _ in range({runs}):
            x, _, _ = program(x)
        assert float(x[0]) == {runs} and float(x[-1]) == {runs}
    """
    with Notebook(up, CLIENT) as alone:
        alone.run(code.format(runs=50))
        before = [rss_bytes(host["process"]) for host in hosts_of(up)]
        alone.run(code.format(runs=300))
        alone.run("import gc; gc.collect()")
        until(lambda: up.overview()["clients"][-1]["buffers"] == 0, 5, "no buffer is left")
        after = [rss_bytes(host["process"]) for host in hosts_of(up)]
    grown = [new - old for new, old in zip(after, before, strict=True)]
    assert max(grown) < 150e6, grown  # one value that is kept makes 300 MB


LOSS = """
import fairway
devices = jax.devices()
half = len(devices) // 2
places = [NamedSharding(Mesh(np.array(part), ("x",)), P("x"))
          for part in (devices[:half], devices[half:])]
plus = [jax.jit(lambda x: x + 1, in_shardings=place, out_shardings=place) for place in places]
over = fairway.program(lambda x: plus[0](plus[1](plus[0](x))))
alone = fairway.program(lambda x: plus[1](plus[1](x)))
start = np.zeros(4, np.float32)
np.testing.assert_array_equal(over(start), start + 3)
np.testing.assert_array_equal(alone(start), start + 2)
say("ready")
x = start
try:
    while True:
        x = jax.block_until_ready(over(x))
except Exception as error:
    say("failed", at=time.monotonic(), kind=type(error).__name__, text=str(error))
kind, text = fails(lambda: jax.block_until_ready(over(start)))
say("again", kind=kind, text=text)
x = start
for _ in range(100):
    x = alone(x)
say("elsewhere", values=np.asarray(x).tolist())
"""


def test_loss_of_a_host(start: Start, background: Begin) -> None:
    """Programs that used it fail with its name; programs of the other island continue."""
    run = start("2x1x2")
    client = background(run, LOSS)
    client.hear("ready")
    time.sleep(0.3)
    killed = time.monotonic()
    os.kill(hosts_of(run)[0]["process"], signal.SIGKILL)
    failures: list[dict[str, Any]] = [client.hear("failed", 30), client.hear("again", 30)]
    assert failures[0]["at"] - killed < 1.0
    for failure in failures:
        assert failure["kind"] == "JaxRuntimeError", failure
        assert failure["text"].startswith("DATA_LOSS"), failure
        assert "island 0" in failure["text"], failure
    assert client.hear("elsewhere", 30) == {"values": [200.0] * 4}
