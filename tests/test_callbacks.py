"""Host callbacks: programs call functions of the client's process."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from conftest import Background, Notebook, client, hosts_of, said

from fairway.cluster.supervisor import Run
from fairway.host.backend import Backend
from fairway.host.screening import RefusedError, screen
from fairway.plugin import calls
from fairway.plugin.callbacks import GREETING
from fairway.settings import Settings

SETUP = """
import ml_dtypes
from jax import lax, shard_map
from jax.experimental import buffer_callback, io_callback

devices = jax.devices()
mesh = Mesh(np.array(devices).reshape(2, -1), ("outer", "inner"))
X = np.arange(16, dtype="f").reshape(8, 2)
PLACES = {
    "one device": devices[0],
    "one island": NamedSharding(Mesh(np.array(devices[:2]), ("x",)), P("x")),
    "all devices": NamedSharding(mesh, P(("outer", "inner"))),
}

def everywhere(check):
    for name, place in PLACES.items():
        check(jax.device_put(X, place))

def like(x, shape=None, dtype=None):
    return jax.ShapeDtypeStruct(x.shape if shape is None else shape, dtype or x.dtype)
"""


@pytest.fixture(scope="module", params=["1x1x4", "1x2x2", "2x1x4"])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    with Run(Settings.parse(request.param)) as up:
        yield up


@pytest.fixture(scope="module")
def do(run: Run) -> Iterator[Callable[[str], None]]:
    with Notebook(run, SETUP) as notebook:
        yield notebook.run


def test_a_function_is_called_once_with_whole_arrays(do: Callable[[str], None]) -> None:
    do("""
        def check(x):
            seen = []
            def double(a):
                assert isinstance(a, jax.Array)
                seen.append(np.array(a))
                return 2 * seen[-1]
            f = jax.jit(lambda x: jax.pure_callback(double, like(x), x + 1) - x)
            np.testing.assert_array_equal(f(x), X + 2)
            np.testing.assert_array_equal(f(x), X + 2)
            assert len(seen) == 2, len(seen)
            np.testing.assert_array_equal(seen[0], X + 1)
        everywhere(check)
    """)


def test_computing_in_a_callback_needs_no_device_of_the_islands(do: Callable[[str], None]) -> None:
    do("""
        def sines(a):
            return np.asarray(jnp.sin(a) @ jnp.ones(2))
        def check(x):
            f = jax.jit(lambda x: jax.pure_callback(sines, like(x, (8,)), x))
            np.testing.assert_allclose(f(x), np.sin(X) @ np.ones(2), rtol=1e-5)
        everywhere(check)
    """)


def test_any_element_type_and_shape_travels_both_ways(do: Callable[[str], None]) -> None:
    do("""
        names = ("bool", "int8", "uint16", "int32", "float32", "bfloat16", "complex64",
                 "float8_e5m2", "int4")
        shapes = ((), (3,), (0, 4), (2, 3, 4))
        for place in PLACES.values():
            if not isinstance(place, NamedSharding):
                continue
            whole = NamedSharding(place.mesh, P())
            for name in names:
                dtype = np.dtype(getattr(ml_dtypes, name, name))
                given = [np.ones(shape).astype(dtype) for shape in shapes]
                same = lambda *arrays: [np.asarray(a) for a in arrays]
                f = jax.jit(lambda *a: jax.pure_callback(same, [like(x) for x in given], *a))
                for found, wanted in zip(f(*jax.device_put(given, whole)), given, strict=True):
                    assert found.dtype == wanted.dtype and found.shape == wanted.shape
                    assert np.asarray(found).tobytes() == wanted.tobytes(), name
        large = np.random.default_rng(0).normal(size=(1 << 21,)).astype("f")
        f = jax.jit(lambda x: jax.pure_callback(lambda a: -np.asarray(a), like(x), x))
        np.testing.assert_array_equal(f(large), -large)
    """)


def test_effects_keep_their_order(do: Callable[[str], None]) -> None:
    do("""
        def check(x):
            seen = []
            @jax.jit
            def f(x):
                io_callback(lambda s: seen.append(("sum", float(s))), None, x.sum(), ordered=True)
                def body(carry, i):
                    io_callback(lambda i: seen.append(int(i)), None, i, ordered=True)
                    return carry + 1, None
                return lax.scan(body, x, jnp.arange(4))[0]
            for _ in range(3):
                x = f(x)
            jax.effects_barrier()
            np.testing.assert_array_equal(x, X + 12)
            wanted = [(("sum", 120.0 + 64 * n), 0, 1, 2, 3) for n in range(3)]
            assert seen == [one for turn in wanted for one in turn], seen
        everywhere(check)
    """)


def test_prints_appear_in_the_client(run: Run) -> None:
    ended = client(
        run,
        """
        f = jax.jit(lambda x: (jax.debug.print("sum {} at {x}", x.sum(), x=x[0]), x)[1])
        f(jnp.arange(1.0, 5.0))
        f(jnp.arange(5.0))
        mesh = Mesh(np.array(jax.devices()), ("x",))
        f(jax.device_put(np.ones(8), NamedSharding(mesh, P("x"))))
        """,
    )
    assert ended.returncode == 0, ended.stdout
    prints = [line for line in ended.stdout.splitlines() if line.startswith("sum")]
    assert sorted(prints) == ["sum 10.0 at 0.0", "sum 10.0 at 1.0", "sum 8.0 at 1.0"]


def test_callbacks_work_under_all_transformations(do: Callable[[str], None]) -> None:
    do("""
        square = lambda a: np.square(np.asarray(a))
        def f(x):
            return jax.pure_callback(square, like(x), x, vmap_method="expand_dims")
        @jax.custom_jvp
        def g(x):
            return f(x)
        g.defjvp(lambda given, tangents: (g(given[0]), 2 * given[0] * tangents[0]))
        def check(x):
            np.testing.assert_allclose(jax.jit(jax.vmap(f))(x), X ** 2)
            np.testing.assert_allclose(jax.jit(jax.grad(lambda x: g(x).sum()))(x), 2 * X)
            loop = lambda x: lax.fori_loop(0, 3, lambda i, x: f(x) / (x + 1), x)
            wanted = X
            for _ in range(3):
                wanted = wanted ** 2 / (wanted + 1)
            np.testing.assert_allclose(jax.jit(loop)(x), wanted, rtol=1e-4)
            branch = lambda x: lax.cond(x.sum() > 100, f, lambda x: x, x)
            np.testing.assert_allclose(jax.jit(branch)(x), X ** 2)
        everywhere(check)
    """)


def test_each_device_calls_in_a_shard_map(do: Callable[[str], None]) -> None:
    do("""
        seen = []
        def rows(a):
            seen.append(a.shape)
            return np.asarray(a) * 10
        spec = P(("outer", "inner"))
        f = jax.jit(shard_map(lambda a: jax.pure_callback(rows, like(a), a) + lax.psum(a, "inner"),
                              mesh=mesh, in_specs=spec, out_specs=spec))
        x = jax.device_put(X, PLACES["all devices"])
        f(x).block_until_ready()
        assert seen == [(8 // len(devices), 2)] * len(devices), seen
    """)


def test_buffer_callbacks_write_in_place(do: Callable[[str], None]) -> None:
    do("""
        def add(context, out, a, b):
            np.asarray(out)[...] = np.asarray(a) + np.asarray(b)
        f = buffer_callback.buffer_callback(add, like(X))
        np.testing.assert_array_equal(jax.jit(lambda x: f(x, x + 1))(X), 2 * X + 1)
    """)


def test_an_error_names_the_line_and_nothing_is_lost(do: Callable[[str], None]) -> None:
    do("""
        kept = jax.device_put(X, PLACES["all devices"])
        def wrong(a):
            raise ValueError("no such thing")
        def check(x):
            f = jax.jit(lambda x: jax.pure_callback(wrong, like(x), x) + 1)
            y = f(x)
            kind, text = fails(lambda: np.asarray(y))
            assert kind == "JaxRuntimeError" and "ValueError: no such thing" in text, text
            assert "in wrong" in text and "fairway/host" not in text, text
            kind, text = fails(lambda: (y * 2).block_until_ready())
            assert "no such thing" in text, text
            np.testing.assert_array_equal(jax.jit(lambda x: x * 2)(x), 2 * X)
        everywhere(check)
        fails(jax.effects_barrier)
        np.testing.assert_array_equal(kept, X)
    """)


def test_after_an_error_a_run_calls_nothing_any_more(do: Callable[[str], None]) -> None:
    do("""
        def check(x):
            seen = []
            def first(a):
                raise ValueError("first")
            def second(a):
                seen.append(a)
            @jax.jit
            def f(x):
                y = io_callback(first, like(x, ()), x.sum(), ordered=True)
                io_callback(second, None, y, ordered=True)
                return x + y
            assert "first" in fails(lambda: f(x).block_until_ready())[1]
            fails(jax.effects_barrier)
            jax._src.dispatch.runtime_tokens.clear()
            assert not seen
        everywhere(check)
    """)


def test_a_run_that_fails_gives_zeros_to_no_other(do: Callable[[str], None]) -> None:
    """Runs that are enqueued behind it have the values that their functions return."""
    do("""
        def halve(a):
            if float(a[0, 0]) == 3.0:
                raise ValueError("three")
            return np.asarray(a) / 2
        def check(x):
            f = jax.jit(lambda x: jax.pure_callback(halve, like(x), x) * 2, donate_argnums=0)
            for _ in range(5):
                given = [jax.device_put(np.full((8, 2), n, "f"), x.sharding) for n in range(8)]
                found = [f(one) for one in given]
                for n, one in enumerate(found):
                    if n == 3:
                        assert "three" in fails(lambda: np.asarray(one))[1]
                    else:
                        np.testing.assert_array_equal(one, np.full((8, 2), n))
        everywhere(check)
        fails(jax.effects_barrier)
    """)


def test_a_result_of_another_shape_is_an_error(do: Callable[[str], None]) -> None:
    do("""
        f = jax.jit(lambda x: jax.pure_callback(lambda a: np.zeros(3, "f"), like(x), x))
        kind, text = fails(lambda: f(X).block_until_ready())
        assert "Incorrect output shape" in text, text
    """)


def test_many_programs_keep_their_functions_as_long_as_they_can_run(
    do: Callable[[str], None],
) -> None:
    do("""
        def scaled(factor):
            times = lambda a: factor * np.asarray(a)
            return jax.jit(lambda x: jax.pure_callback(times, like(x), x))
        kept = [scaled(n) for n in range(4)]
        for n in range(4):
            np.testing.assert_array_equal(kept[n](X), n * X)
        for n in range(300):
            jax.jit(lambda x: jax.pure_callback(lambda a: np.asarray(a), like(x), x))(X[0, :1])
        for n in range(4):
            np.testing.assert_array_equal(kept[n](X), n * X)
    """)


def test_a_callback_reads_other_arrays_or_says_why_not(do: Callable[[str], None]) -> None:
    """Over several islands it would wait for hosts that wait for it."""
    do("""
        other = jnp.ones(2) + 1
        def check(x):
            spans = len({device.island for device in x.devices()}) > 1
            add = lambda a: np.asarray(a) + np.asarray(other)
            f = jax.jit(lambda x: jax.pure_callback(add, x, x))
            if spans:
                text = fails(lambda: f(x).block_until_ready())[1]
                assert "make them operands of the callback" in text, text
            else:
                np.testing.assert_array_equal(f(x), X + 2)
        if len({device.island for device in devices}) > 1:
            check(jax.device_put(X, PLACES["all devices"]))
        else:
            everywhere(check)
    """)


def test_a_slow_callback_delays_reads_of_no_other_client(run: Run) -> None:
    slow = """
    import time
    def wait(a):
        say("waiting")
        time.sleep(4)
        return np.asarray(a)
    f = jax.jit(lambda x: jax.pure_callback(wait, jax.ShapeDtypeStruct((2,), np.float32), x))
    np.testing.assert_array_equal(f(jnp.ones(2)) + 1, 2)
    say("over")
    """
    with Notebook(run, "x = jax.device_put(np.ones(4), jax.devices()[1])\n") as other:
        other.run("np.testing.assert_array_equal(x, 1)")
        with Background(run, slow) as waiting:
            waiting.hear("waiting")
            begun = time.monotonic()
            other.run("np.testing.assert_array_equal(jax.device_put(x, jax.devices()[2]), 1)")
            took = time.monotonic() - begun
            waiting.hear("over")
    assert took < 2.0


@pytest.mark.parametrize("place", ["jax.devices()[0]", "everywhere"])
def test_a_client_killed_in_a_callback_leaves_its_devices_free(run: Run, place: str) -> None:
    before = [host["process"] for host in hosts_of(run)]
    stuck = f"""
    import time
    everywhere = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))
    f = jax.jit(lambda x: jax.pure_callback(
        lambda a: (say("waiting"), time.sleep(600)), jax.ShapeDtypeStruct((8,), np.float32), x))
    f(jax.device_put(np.ones(8, "f"), {place})).block_until_ready()
    """
    with Background(run, stuck) as killed:
        killed.hear("waiting")
    ended = client(
        run,
        """
        everywhere = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))
        x = jax.device_put(np.ones(8, "f"), everywhere)
        f = jax.jit(lambda x: jax.pure_callback(lambda a: 2 * np.asarray(a), x, x) + x.sum())
        say("found", values=np.asarray(f(x)).tolist())
        """,
        timeout_s=60,
    )
    assert said(ended.stdout, "found")["values"] == [10.0] * 8
    assert [host["process"] for host in hosts_of(run)] == before, "no island started anew"


# Attacks ------------------------------------------------------------------------------------------


def listener_of(run: Run) -> tuple[str, int]:
    host, _, port = run.environment["JAX_BACKEND_TARGET"].removeprefix("grpc://").rpartition(":")
    return host, int(port)


def test_a_stream_without_a_sessions_key_gets_nothing(run: Run) -> None:
    with socket.create_connection(listener_of(run), 5) as stranger:
        stranger.sendall(GREETING + bytes(32))
        assert stranger.recv(10) == b"\0"
        assert stranger.recv(10) == b"", "it is closed"
    with socket.create_connection(listener_of(run), 5) as stranger:
        stranger.sendall(b"fairway nonsense 1\n" + bytes(40))
        assert stranger.recv(10) == b""


def test_answers_that_no_call_waits_for_and_too_long_ones_harm_none(run: Run) -> None:
    ended = client(
        run,
        """
        import struct
        from fairway.plugin import callbacks
        f = jax.jit(lambda x: jax.pure_callback(lambda a: np.asarray(a) + 1, x, x))
        np.testing.assert_array_equal(f(jnp.ones(2)), 2)
        [functions] = [one for one in __import__("gc").get_objects()
                       if isinstance(one, callbacks.CallbackFunctions)]
        connection = functions._connection
        connection._socket.sendall(struct.pack("<QQ", 12345, 100_000) + bytes(100_000))
        np.testing.assert_array_equal(f(jnp.ones(2)), 2)
        say("ignored")
        answer_of = callbacks._answer_of
        callbacks._answer_of = lambda *given: bytes(4 << 20)
        say("long", error=fails(lambda: f(jnp.ones(2)).block_until_ready())[1])
        callbacks._answer_of = lambda *given: answer_of(*given)[:-9]
        time = __import__("time")
        while not connection.is_closed:
            time.sleep(0.01)
        g = jax.jit(lambda x: jax.pure_callback(lambda a: np.asarray(a) + 1, x, x))
        say("short", error=fails(lambda: g(jnp.ones(3)).block_until_ready())[1])
        callbacks._answer_of = answer_of
        np.testing.assert_array_equal(g(jnp.ones(3)), 2)
        say("well")
        """,
    )
    said(ended.stdout, "ignored")
    assert "has ended while it ran a host callback" in said(ended.stdout, "long")["error"]
    assert said(ended.stdout, "short")["error"]
    said(ended.stdout, "well")


def call(
    index: str, result: str = "tensor<4xf32>", target: str = "xla_ffi_python_cpu_callback"
) -> str:
    return (
        f"stablehlo.custom_call @{target}(%arg0) {{mhlo.backend_config = {{{index}}}}} : "
        f"(tensor<4xf32>) -> {result}"
    )


def module_with(attributes: str, custom_calls: list[str]) -> Any:
    lines = "\n".join(f"%r{number} = {one}" for number, one in enumerate(custom_calls))
    text = f"""
    module @m attributes {{{attributes}}} {{
      func.func public @main(%arg0: tensor<4xf32>) -> tensor<4xf32> {{
        {lines}
        return %arg0 : tensor<4xf32>
      }}
    }}"""
    return Backend.load(text.encode())


@pytest.mark.parametrize(
    ("named", "custom_calls"),
    [
        ("", [call("index = 0 : ui64")]),
        ("fairway.callbacks = array<i64: 7>", [call("index = 1 : ui64")]),
        ("fairway.callbacks = array<i64: 7>", [call("index = 18446744073709551615 : ui64")]),
        ("fairway.callbacks = array<i64: 7>", [call("other = 0 : ui64")]),
        ("fairway.callbacks = array<i64: 7>", [call('index = "0"')]),
        ("fairway.callbacks = array<i32: 7>", [call("index = 0 : ui64")]),
        (
            "fairway.callbacks = array<i64: 7>",
            [call("index = 0 : ui64"), call("index = 0 : ui64", "tensor<400xf32>")],
        ),
        (
            "fairway.callbacks = array<i64: 7>",
            [call("index = 0 : ui64", target="xla_ffi_partitioned_python_cpu_callback")],
        ),
    ],
)
def test_a_program_reaches_only_functions_that_it_names(
    named: str, custom_calls: list[str]
) -> None:
    module = module_with(named, custom_calls)
    with module.context, pytest.raises(RefusedError):
        screen(module)


def test_arrays_of_a_call_are_what_was_packed() -> None:
    given = [np.arange(3, dtype="i8"), None, np.zeros((0, 2), "f"), np.array(True)]
    found = calls.unpack(calls.pack(given))
    for one, other in zip(found, given, strict=True):
        if other is None:
            assert one is None
        else:
            assert one is not None
            np.testing.assert_array_equal(one, other)
            assert one.dtype == other.dtype
    long = calls.read_answer(calls.failure("begin" + "x" * 200_000 + "end"))
    assert isinstance(long, str)
    assert long.startswith("begin")
    assert long.endswith("end")
    for broken in (b"", b"\0", b"\0" * 20, calls.answer(given)[:40]):
        with pytest.raises((ValueError, TypeError)):
            calls.read_answer(broken)
