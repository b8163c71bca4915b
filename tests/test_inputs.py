"""Batches that hosts make: their values, order, end and errors, and the client's interface."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Background, Islands, Measured, Notebook, Up, client, hosts_of, said, until

from fairway.cluster.supervisor import Run
from fairway.settings import Settings

HERE = Path(__file__).parent

PRELUDE = """
import fairway, feeds

def island(number=0, *shape):
    devices = [d for d in jax.devices() if d.island == number]
    shape = shape or (len(devices),)
    return Mesh(np.array(devices).reshape(shape), ("x", "y")[:len(shape)])

def like(shape, mesh, *spec, dtype=np.int32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

def rows(batch=8, mesh=None, prefetch=2, function="feeds:rows", **config):
    return fairway.inputs(function, like=like((batch, 2), mesh or island(), "x"),
                          prefetch=prefetch, batch=batch, **config)

def check(given, number, batch=8):
    assert np.array_equal(given, [[number, row] for row in range(batch)]), (number, given)

"""


def run(islands: Islands, code: str, **options: Any) -> str:
    """Runs a client to its end, which must succeed; returns what it printed."""
    result = client(
        islands,
        PRELUDE + textwrap.dedent(code),
        environment={"PYTHONPATH": str(HERE)},
        **options,
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


def settings(islands: str, **others: Any) -> Settings:
    """Islands whose hosts may import ``feeds``."""
    given = {"input_modules": ("feeds", "feeds_broken"), "input_path": (HERE,), **others}
    return Settings.parse(islands, **given)


@pytest.fixture(scope="module")
def pair(runtime: Path) -> Iterator[Run]:
    """One island of two hosts with two devices each, shared by all tests that leave it intact."""
    with Run(settings("1x2x2")) as running:
        yield running


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Islands, str], Background]]:
    """Starts client programs that are ended with the test."""
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    with contextlib.ExitStack() as stack:

        def begin(islands: Islands, code: str) -> Background:
            return stack.enter_context(Background(islands, PRELUDE + textwrap.dedent(code)))

        yield begin


Do = Callable[[str], None]


@pytest.fixture(scope="module")
def do(pair: Run) -> Iterator[Do]:
    """Runs code in a client that many tests share."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(HERE))
        notebook = Notebook(pair, PRELUDE)
    with notebook:
        yield notebook.run


# Batches of one host


@pytest.mark.parametrize("topology", ["1x1x1", "1x2x1", "1x2x2", "2x1x2"])
def test_every_sharding_gets_its_part(topology: str) -> None:
    with Run(settings(topology)) as islands:
        run(
            islands,
            """
            last = max(d.island for d in jax.devices())
            count = len(island(last).devices)
            meshes = [island(last), Mesh(island(last).devices[::-1], ("x",))]
            if count == 4:
                meshes += [island(last, 2, 2), Mesh(island(last).devices[[0, 2, 1, 3]], ("x",))]
            shapes = {"a": [8, 4], "b": [4, 8, 2], "c": [], "d": [16]}
            for mesh in meshes:
                y = mesh.axis_names[-1]
                specs = {"a": P("x", y if y != "x" else None), "b": P(None, "x"), "c": P(),
                         "d": P(mesh.axis_names)}
                given = fairway.inputs("feeds:leaves", shapes=shapes, like={
                    path: like(shapes[path], mesh, *specs[path], dtype=np.float32)
                    for path in shapes})
                for number in range(3):
                    batch = given()
                    for path, leaf in batch.items():
                        wanted = feeds.whole(number, tuple(shapes[path]), "float32")
                        assert np.array_equal(leaf, wanted), (path, mesh)
                        assert leaf.sharding == NamedSharding(mesh, specs[path])
                        for shard in leaf.addressable_shards:
                            assert np.array_equal(shard.data, wanted[shard.index])
            """,
        )


def test_element_types_and_trees(do: Do) -> None:
    do(
        """
        for dtype in ["bool", "int8", "uint32", "bfloat16", "float16", "complex64"]:
            given = fairway.inputs("feeds:leaves", dtype=dtype, shapes={"x": [8, 3]},
                                   like={"x": like((8, 3), island(), "x", dtype=dtype)})
            assert np.array_equal(given()["x"], feeds.whole(0, (8, 3), dtype)), dtype
        """,
    )


# Order


def test_order_over_a_hundred_batches(do: Do) -> None:
    """Calls and iteration share one order; a buffer may be reused."""
    do(
        """
        given = rows(first=5)
        asked = [given() if number % 3 else next(given) for number in range(100)]
        for number, batch in enumerate(asked):
            check(batch, number + 5)
        """,
    )


def test_two_inputs_at_once(do: Do) -> None:
    do(
        """
        one, other = rows(), rows(first=1000, batch=16, prefetch=5)
        for number in range(50):
            check(one(), number)
            if number % 2:
                check(other(), 1000 + number // 2, 16)
        """,
    )


def test_a_dataset_of_grain(do: Do) -> None:
    do(
        """
        given = fairway.inputs("feeds:grained", like=like((16,), island(), "x"), batch=16, seed=3)
        batches = [np.asarray(batch) for batch in given]
        assert len(batches) == 8
        for epoch in (batches[:4], batches[4:]):
            assert sorted(np.concatenate(epoch)) == list(range(64))
        assert not np.array_equal(batches[0], np.arange(16))
        """,
    )


def test_programs_take_batches(do: Do) -> None:
    """A step of two batches is one message, however many are prefetched; calls share one order."""
    do(
        """
        mesh = island()
        given = rows(mesh=mesh, prefetch=1)
        total = jax.jit(lambda s, b: s + b[:, 0].sum() // 8,
                        out_shardings=NamedSharding(mesh, P()))

        @fairway.program
        def step(s):
            one, other = given(), given()
            return total(total(s, one), other), one, other

        check(given(), 0)
        s = jax.device_put(np.int32(0), NamedSharding(mesh, P()))
        for number in range(20):
            s, one, other = step(s)
            check(one, 2 * number + 1), check(other, 2 * number + 2)
        assert int(s) == sum(range(41))
        check(given(), 41)

        @fairway.program
        def again(s, t):  # another program takes what comes next, too
            return total(s, given()), t

        assert int(again(s, s)[0]) == sum(range(41)) + 42
        """,
    )


def test_programs_over_islands_take_batches() -> None:
    with Run(settings("2x1x2")) as islands:
        run(
            islands,
            """
            meshes = [island(0), island(1)]
            given = [rows(mesh=mesh, first=100 * number) for number, mesh in enumerate(meshes)]
            total = [jax.jit(lambda b: b[:, 0].sum() // 8, out_shardings=NamedSharding(mesh, P()))
                     for mesh in meshes]
            add = jax.jit(lambda a, b: a + b, out_shardings=NamedSharding(meshes[1], P()))

            @fairway.program
            def step():
                there = jax.device_put(total[0](given[0]()), NamedSharding(meshes[1], P()))
                return add(there, total[1](given[1]()))

            assert [int(step()) for _ in range(20)] == [100 + 2 * n for n in range(20)]
            """,
        )


# The end, and errors


@pytest.mark.parametrize("uneven", [0, 3, -3])
def test_the_end_of_the_data(do: Do, uneven: int) -> None:
    """Loops end; for explicit calls the end is an error at its use, the same on all hosts."""
    stop = 7 + min(uneven, 0)
    do(
        f"""
        stop, uneven = {stop}, {uneven}
        seen = [int(batch[0, 0]) for batch in rows(stop=7, uneven=uneven)]
        assert seen == list(range(stop)), seen
        given = rows(stop=7, uneven=uneven)
        total = jax.jit(lambda s, b: s + b.sum())
        s = 0
        for number in range(stop):
            s = total(s, given())
        good = s
        for number in range(5):
            s = total(s, given())  # hosts that do not agree would wait for one another here
        kind, text = fails(lambda: s.block_until_ready())
        assert kind == "JaxRuntimeError" and text.startswith("OUT_OF_RANGE"), text
        assert f"has ended after {{stop}} batches" in text, text
        assert int(good) == sum(8 * n + 28 for n in range(stop))
        assert fails(lambda: next(given))[0] == "StopIteration"
        assert [int(b[0, 0]) for b in rows(stop=7, first=5, uneven=0)] == [5, 6]
        """,
    )


@pytest.mark.parametrize("fail_on", [None, 0, 1])
def test_an_exception_arrives_with_its_traceback(do: Do, fail_on: int | None) -> None:
    do(
        f"""
        given = rows(function="feeds:failing", fail_at=3, fail_on={fail_on})
        total = jax.jit(lambda s, b: s + b.sum())
        s = 0
        for number in range(3):
            check(given(), number)
        for number in range(3):
            s = total(s, given())
        for do in (lambda: s.block_until_ready(), lambda: next(given), lambda: np.asarray(given())):
            kind, text = fails(do)
            assert kind == "JaxRuntimeError" and text.startswith("UNKNOWN"), text
            assert "feeds:failing" in text and "ValueError: row 3 is broken" in text, text
            assert "feeds.py" in text and 'raise ValueError(f"row' in text, text
        check(rows()(), 0)
        """,
    )


@pytest.mark.parametrize(
    ("function", "code", "part"),
    [
        ("feeds_nowhere:rows", "PERMISSION_DENIED", "input_modules"),
        ("os:system", "PERMISSION_DENIED", "input_modules"),
        ("feeds:imported", "PERMISSION_DENIED", "module subprocess"),
        ("feeds:nothing", "NOT_FOUND", "nothing"),
        ("feeds.below:rows", "NOT_FOUND", "feeds.below"),
        ("feeds:not_a_function", "INVALID_ARGUMENT", "no function"),
        ("feeds_broken:rows", "UNKNOWN", "RuntimeError: no data on this machine"),
    ],
)
def test_functions_that_cannot_be_had(do: Do, function: str, code: str, part: str) -> None:
    do(
        f"""
        kind, text = fails(lambda: fairway.inputs({function!r}, like=like((8,), island(), "x")))
        assert kind == "JaxRuntimeError" and text.startswith({code!r}) and {part!r} in text, text
        check(rows()(), 0)
        """,
    )


@pytest.mark.parametrize(
    ("kind", "given", "wanted"),
    [
        ("shape", "float32[4, 1] for leaf ''", "float32[4]"),
        ("type", "int64[4] for leaf ''", "float32[4]"),
        ("tree", "leaves ['x']", "leaves ['']"),
    ],
)
def test_batches_that_were_not_asked_for(do: Do, kind: str, given: str, wanted: str) -> None:
    do(
        f"""
        given = fairway.inputs("feeds:wrong", like=like((8,), island(), "x", dtype=np.float32),
                               kind={kind!r})
        assert np.array_equal(given(), np.zeros(8))
        kind, text = fails(lambda: given().block_until_ready())
        assert text.startswith("INVALID_ARGUMENT") and "as batch 1" in text, text
        assert {given!r} in text and {wanted!r} in text, text
        """,
    )


def test_what_the_client_is_told_at_once(up: Up) -> None:
    """Invalid requests are refused in the client, before they reach a host."""
    run(
        up,
        """
        good = like((8,), island(), "x")
        both = Mesh(np.array(jax.devices()), ("x",))
        for call, part in [
            (lambda: fairway.inputs("feeds:rows", like=like((8,), both, "x")), "islands [0, 1]"),
            (lambda: fairway.inputs("feeds:rows", like={}), "no leaves"),
            (lambda: fairway.inputs("feeds:rows", like=np.zeros(3)), "NamedSharding"),
            (lambda: fairway.inputs("feeds.rows", like=good), "package.module:name"),
            (lambda: fairway.inputs("feeds:rows", like=good, x=object()), "JSON"),
            (lambda: fairway.inputs("feeds:rows", like=good, x=float("nan")), "JSON"),
            (lambda: fairway.inputs("feeds:rows", like=good, prefetch=0), "prefetch"),
            (lambda: fairway.inputs("feeds:rows", like=[good, like((8,), island(1), "x")]),
             "expected the same"),
        ]:
            kind, text = fails(call)
            assert kind == "InputError" and part in text, (kind, text)
        kind, text = fails(lambda: fairway.inputs("feeds:rows", like=good))
        assert text.startswith("PERMISSION_DENIED") and "input_modules" in text, text
        """,
    )


def test_calls_that_make_no_sense_harm_nobody(do: Do) -> None:
    do(
        """
        where = NamedSharding(island(), P("x"))
        struct = jax.ShapeDtypeStruct((8,), np.float32)
        call = jax.ffi.ffi_call
        good = json.dumps({"number": 5, "function": "feeds:rows", "config": {"batch": 8},
                           "paths": [""], "prefetch": 2})
        texts = ["", "{}", "[]", "7", good.replace("5", "-1"), good.replace("2}", '"2"}'),
                 good.replace('[""]', "[1]"), good.replace('[""]', "[]"),
                 good.replace("5", "1e400"), good.replace("5", str(1 << 63))]
        for text in texts:
            made = jax.jit(lambda: call("fairway_input", struct)(description=text),
                           out_shardings=where)
            assert fails(made)[1].startswith("INVALID_ARGUMENT"), text
        bare = jax.jit(lambda: call("fairway_input", struct)(), out_shardings=where)
        assert fails(bare)[1].startswith("INVALID_ARGUMENT")
        takes = jax.jit(lambda x: call("fairway_input", struct)(x, description=good))
        ones = jax.device_put(np.ones(8), where)
        assert fails(lambda: takes(ones))[1].startswith("UNIMPLEMENTED")
        given = rows()
        inside = jax.jit(lambda: given() + 1)
        kind, text = fails(inside)
        assert text.startswith("UNIMPLEMENTED") and "inside a jitted function" in text, text
        check(given(), 0)
        """,
    )


def test_a_lost_host_is_the_error(
    start: Callable[..., Run], watch: Callable[[Islands, str], Background]
) -> None:
    islands = start("2x1x1", input_modules=("feeds",), input_path=(HERE,))
    running = watch(
        islands,
        """
        given = rows(delay_s=0.05)
        given().block_until_ready()
        say("begun")
        for _ in range(10_000):
            kind, text = fails(lambda: given().block_until_ready())
            if kind != "nothing":
                break
        say("failed", text=text)
        check(rows(mesh=island(1))(), 0)
        say("other")
        """,
    )
    running.hear("begun")
    os.kill(hosts_of(islands)[0]["process"], signal.SIGKILL)
    assert running.hear("failed")["text"].startswith("DATA_LOSS")
    running.hear("other")


# Threads


def marks(folder: Path) -> dict[tuple[int, int], str]:
    """What was recorded of each process and thread."""
    named = {tuple(map(int, path.name.split("-"))): path.read_text() for path in folder.iterdir()}
    return {(process, thread): state for (process, thread), state in named.items()}


def thread_is_there(process: int, thread: int) -> bool:
    return Path(f"/proc/{process}/task/{thread}").exists()


@pytest.mark.parametrize("how", ["freed", "killed"])
def test_threads_end(
    pair: Run, watch: Callable[[Islands, str], Background], tmp_path: Path, how: str
) -> None:
    running = watch(
        pair,
        f"""
        import gc
        given = fairway.inputs("feeds:marked", folder={str(tmp_path)!r},
                               like=like((8,), island(), "x", dtype=np.float32))
        for _ in range(5):
            given().block_until_ready()
        say("begun")
        sys.stdin.readline()
        del given
        gc.collect()
        say("freed")
        sys.stdin.readline()
        """,
    )
    running.hear("begun")
    threads = marks(tmp_path)
    assert list(threads.values()) == ["open", "open"]
    assert all(thread_is_there(*thread) for thread in threads)
    if how == "killed":
        running.process.kill()
    else:
        running.tell("")
        running.hear("freed")
    until(lambda: not any(thread_is_there(*thread) for thread in threads), 10, "threads end")
    assert list(marks(tmp_path).values()) == ["closed", "closed"]


# Effects on other clients


@pytest.mark.alone
@pytest.mark.parametrize("through", ["calls", "program"])
def test_a_slow_input_stalls_nobody(
    pair: Run, watch: Callable[[Islands, str], Background], measured: Measured, through: str
) -> None:
    """Steps that depend on batches of a second each do not delay other clients' launches."""
    slow = watch(
        pair,
        f"""
        mesh = island()
        given = rows(mesh=mesh, delay_s=1.0)
        add = jax.jit(lambda s, b: s + b.sum(), out_shardings=NamedSharding(mesh, P()))
        def step(s):
            return add(s, given())
        if {through!r} == "program":
            step = fairway.program(step)
        s = jax.device_put(np.int32(0), NamedSharding(mesh, P()))
        step(s).block_until_ready()
        for _ in range(100):
            s = step(s)
        say("asked")
        sys.stdin.readline()
        """,
    )
    slow.hear("asked")
    output = run(
        pair,
        """
        step = jax.jit(lambda a: a + a.sum())
        a = jax.device_put(np.ones(8, np.float32), NamedSharding(island(), P("x")))
        step(a).block_until_ready()
        worst = 0.0
        for _ in range(200):
            begun = time.perf_counter()
            step(a).block_until_ready()
            worst = max(worst, time.perf_counter() - begun)
        say("worst", seconds=worst)
        """,
    )
    worst = said(output, "worst")["seconds"]
    measured("worst_step_beside_a_slow_input_s", worst)
    assert worst < 0.5


class Counter:
    """A proxy of a controller that counts the bytes that a client sends."""

    def __init__(self, islands: Islands) -> None:
        self._islands = islands
        self._port = int(islands.environment["JAX_BACKEND_TARGET"].rpartition(":")[2])
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open = [self._listener]
        self.sent = 0
        threading.Thread(target=self._serve, daemon=True).start()

    @property
    def environment(self) -> dict[str, str]:
        port = self._listener.getsockname()[1]
        return {**self._islands.environment, "JAX_BACKEND_TARGET": f"grpc://127.0.0.1:{port}"}

    def overview(self) -> dict[str, Any]:
        return self._islands.overview()

    def close(self) -> None:
        for one in self._open:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                inner = self._listener.accept()[0]
                outer = socket.create_connection(("127.0.0.1", self._port))
                self._open += [inner, outer]
                for pair in ((inner, outer, True), (outer, inner, False)):
                    threading.Thread(target=self._pass, args=pair, daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, counts: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 20):
                self.sent += len(data) if counts else 0
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def test_batches_do_not_pass_through_the_client(
    pair: Run, watch: Callable[[Islands, str], Background], measured: Measured
) -> None:
    """A loop over batches of 4 MiB sends a few hundred bytes a step."""
    counter = Counter(pair)
    running = watch(
        counter,
        """
        mesh = island()
        given = fairway.inputs("feeds:slow_and_wide", extent=1 << 14,
                               like=like((64, 1 << 14), mesh, "x", dtype=np.float32))
        step = jax.jit(lambda w, b: w + b.mean(), out_shardings=NamedSharding(mesh, P()))
        w = step(jax.device_put(np.float32(0), NamedSharding(mesh, P())), given())
        w.block_until_ready()
        say("begun")
        sys.stdin.readline()
        for _ in range(50):
            w = step(w, given())
        assert float(w) == 51.0
        say("done")
        sys.stdin.readline()
        """,
    )
    running.hear("begun")
    before = counter.sent
    running.tell("")
    running.hear("done")
    each = (counter.sent - before) / 50
    counter.close()
    measured("bytes_sent_for_a_step_of_4_MiB", each)
    assert each < 2000
