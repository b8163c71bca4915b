"""Python functions of clients that run beside hosts (``colocated_python``)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import Background, Notebook, client, said

from fairway.cluster.supervisor import Run
from fairway.settings import Settings

SETUP = """
import os, sys, threading, time
from jax.experimental import colocated_python as colocated

devices = jax.devices()
HOSTS = len({device.host for device in devices})
everywhere = NamedSharding(Mesh(np.array(devices), ("x",)), P("x"))
X = np.arange(16, dtype="f").reshape(8, 2)

def on(device, value):
    return jax.device_put(np.asarray(value), device)

def raised(call):
    try:
        jax.block_until_ready(call())
    except Exception as error:
        return str(error)
    raise AssertionError("it did not raise")

def shards_of(x, make):
    return jax.make_array_from_single_device_arrays(
        x.shape, x.sharding, [make(shard.data) for shard in x.addressable_shards]
    )
"""


@pytest.fixture(scope="module", params=["1x1x4", "1x2x2", "2x1x4"])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    with Run(Settings.parse(request.param)) as up:
        yield up


@pytest.fixture(scope="module")
def do(run: Run) -> Iterator[Callable[[str], None]]:
    with Notebook(run, SETUP) as notebook:
        yield notebook.run


def test_each_host_runs_a_function_once_on_its_own_shards(do: Callable[[str], None]) -> None:
    do("""
        @colocated.colocated_python
        def process_of(x):
            number = len(x.addressable_shards) * 10_000_000 + os.getpid()
            return shards_of(x, lambda data: jax.numpy.full_like(data, number))

        found = process_of(jax.device_put(np.zeros(8, np.int32), everywhere))
        per_host = np.unique(np.asarray(found))
        assert len(per_host) == HOSTS, per_host
        assert os.getpid() not in per_host % 10_000_000
        assert set(per_host // 10_000_000) == {len(devices) // HOSTS}, per_host
    """)


def test_results_are_those_of_the_function(do: Callable[[str], None]) -> None:
    do("""
        @colocated.colocated_python
        def double(x, and_more):
            return {"double": shards_of(x, lambda data: data * 2), "more": [and_more]}

        x = jax.device_put(X, everywhere)
        found = double(x, and_more=x)
        assert found["double"].sharding == everywhere
        np.testing.assert_array_equal(found["double"], 2 * X)
        np.testing.assert_array_equal(found["more"][0], X)
        added = jax.jit(lambda a: a.sum())(double(x, and_more=x)["double"])
        assert float(added) == 2 * X.sum()
    """)


def test_an_exception_has_the_line_of_the_function(do: Callable[[str], None]) -> None:
    do("""
        def broken(x):
            if float(x) > 1:
                raise LookupError("too much")
            return x

        broken = colocated.colocated_python(broken).specialize(out_specs_fn=lambda x: x)
        assert float(broken(on(devices[0], 1.0))) == 1
        error = raised(lambda: broken(on(devices[0], 2.0)))
        assert "UNKNOWN" in error and "LookupError: too much" in error and "in broken" in error
        assert "the colocated function broken on host 0" in error, error
        assert "LookupError" in raised(lambda: broken(on(devices[0], 2.0)) + 1)
        assert float(broken(on(devices[0], 1.0))) == 1
    """)


def test_what_it_was_not_specialized_for_is_refused(do: Callable[[str], None]) -> None:
    do("""
        x = jax.device_put(X, everywhere)
        whole = NamedSharding(everywhere.mesh, P())

        def gathered(x):
            return jax.make_array_from_callback(x.shape, whole, lambda index: X[index])

        one = on(devices[0], X)
        wrong = colocated.colocated_python(lambda x: x[:1]).specialize(out_specs_fn=lambda x: x)
        assert "float32[8, 2]" in raised(lambda: wrong(one))
        wrong = colocated.colocated_python(lambda x: [x]).specialize(out_specs_fn=lambda x: x)
        assert "specialized to return" in raised(lambda: wrong(one))
        wrong = colocated.colocated_python(gathered).specialize(out_specs_fn=lambda x: x)
        assert "sharded otherwise" in raised(lambda: wrong(x))
    """)


def test_objects_keep_what_they_have_until_they_are_dropped(do: Callable[[str], None]) -> None:
    do("""
        @colocated.colocated_python_class
        class Counter:
            def __init__(self, start):
                self.count = start
            def add(self, x):
                self.count += int(x)
                return jax.device_put(np.int32(self.count), x.sharding)
            def __del__(self):
                colocated.last_count = self.count

        @colocated.colocated_python
        def last(x):
            return jax.device_put(np.int32(getattr(colocated, "last_count", -1)), x.sharding)

        counter, other, two = Counter(40), Counter(0), on(devices[0], np.int32(2))
        assert [int(counter.add(two)) for _ in range(5)] == [42, 44, 46, 48, 50]
        assert int(other.add(two)) == 2
        assert int(last(two)) == -1
        del counter
        assert int(last(two)) == 50
    """)


def test_runs_of_a_thread_follow_one_another_and_those_of_others_do_not_wait(
    do: Callable[[str], None],
) -> None:
    do("""
        @colocated.colocated_python
        def prepare(x):
            colocated.meeting, colocated.order = threading.Barrier(3), []
            return x

        def meet(x):
            colocated.meeting.wait(timeout=20)
            return x
        meet = colocated.colocated_python(meet).specialize(out_specs_fn=lambda x: x)

        def append(x):
            time.sleep(0.05 if int(x) % 2 else 0)
            colocated.order.append(int(x))
            return x
        append = colocated.colocated_python(append).specialize(out_specs_fn=lambda x: x)

        @colocated.colocated_python
        def order(x):
            return jax.device_put(np.array(colocated.order, np.int32), x.sharding)

        zero = on(devices[0], np.int32(0))
        jax.block_until_ready(prepare(zero))
        met = []
        threads = [threading.Thread(target=lambda: met.append(meet(zero))) for _ in range(3)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        jax.block_until_ready(met)
        for number in range(8):
            append(on(devices[0], np.int32(number)))
        assert list(np.asarray(order(zero))) == list(range(8))
    """)


def test_a_process_that_ends_is_started_again(do: Callable[[str], None]) -> None:
    do("""
        def leave(x):
            if int(x):
                os._exit(3)
            return x
        leave = colocated.colocated_python(leave).specialize(out_specs_fn=lambda x: x)
        assert int(leave(on(devices[0], np.int32(0)))) == 0
        error = raised(lambda: leave(on(devices[0], np.int32(1))))
        assert "UNAVAILABLE" in error and "with status 3" in error, error
        assert int(leave(on(devices[0], np.int32(0)))) == 0
    """)


def test_code_that_breaks_its_process_fails_alone(do: Callable[[str], None]) -> None:
    """Whatever it does, its call fails and the next one succeeds."""
    do("""
        import ctypes, glob, socket, struct

        class Unprintable(Exception):
            def __str__(self):
                raise RuntimeError("no text")

        def fork(x):
            if os.fork() == 0:
                time.sleep(60)
                os._exit(0)
            os._exit(5)

        def forge(x):
            mine = [fd for fd in range(3, 64) if os.path.exists(f"/proc/self/fd/{fd}")]
            for fd in mine:
                try:
                    line = socket.socket(fileno=os.dup(fd))
                    import msgspec
                    outcome = {"type": "Outcome", "call": 3, "error": None, "results": []}
                    header = msgspec.msgpack.encode([outcome, [2**30, -(2**30)]])
                    line.sendall(struct.pack("<I", len(header)) + header)
                except OSError:
                    continue
            time.sleep(30)
            return x

        def crash(x):
            ctypes.string_at(0)

        def fail(error):
            def raises(x):
                raise error
            return raises

        found = {
            "unprintable": (fail(Unprintable()), "Unprintable"),
            "surrogate": (fail(ValueError("\\ud800")), "ValueError"),
            "long": (fail(ValueError("x" * 10_000_000)), "(10000000 characters)"),
            "fork": (fork, "with status 5"),
            "closed": (lambda x: (os.closerange(3, 4096), x)[1], "ended"),
            "forged": (forge, "no outcome"),
            "crash": (crash, "by signal 11"),
            "exit": (lambda x: sys.exit(4), "SystemExit"),
        }
        def good(x):
            return x + 1
        good = colocated.colocated_python(good).specialize(out_specs_fn=lambda x: x)
        one = on(devices[0], np.int32(1))
        for name, (function, text) in found.items():
            bad = colocated.colocated_python(function).specialize(out_specs_fn=lambda x: x)
            error = raised(lambda: bad(one))
            assert text in error and len(error) < 100_000, (name, error[:2000])
            assert int(good(one)) == 2, name
    """)


def test_strings_are_put_moved_and_read(do: Callable[[str], None]) -> None:
    do("""
        texts = np.array([["ab", "", "ü" * 300, "d"]] * 2, dtype=np.dtypes.StringDType())
        first = jax.device_put(texts, devices[0])
        np.testing.assert_array_equal(np.asarray(first), texts)
        last = jax.device_put(first, devices[-1])
        np.testing.assert_array_equal(np.asarray(last), texts)

        @colocated.colocated_python
        def louder(x):
            texts = np.asarray(x)
            made = np.array([[text.upper() for text in row] for row in texts], texts.dtype)
            return jax.device_put(made.astype(np.dtypes.StringDType()), x.sharding)

        assert np.asarray(louder(last))[1].tolist() == ["AB", "", "Ü" * 300, "D"]
    """)


def test_types_are_those_of_the_client(do: Callable[[str], None]) -> None:
    do("""
        import ml_dtypes
        @colocated.colocated_python
        def twice(x):
            return x + x
        for kind in ("int8", "uint32", "bool", "complex64", ml_dtypes.bfloat16):
            x = on(devices[0], np.ones((2, 3), kind))
            found = twice(x)
            assert (found.dtype, found.shape) == (x.dtype, (2, 3))
        assert twice(on(devices[0], np.zeros((0, 4), "f"))).shape == (0, 4)
        with jax.enable_x64(True):
            found = twice(on(devices[0], np.array([2**40])))
            assert found.dtype == np.int64 and int(found[0]) == 2**41
    """)


def test_modules_of_the_client_are_sent(
    do: Callable[[str], None], tmp_path: Path, run: Run
) -> None:
    package = f"apart_{os.getpid()}_{len(str(run.settings.islands))}"
    folder = tmp_path / package
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "constants.py").write_text("FACTOR = 3\n")
    (folder / "work.py").write_text(
        "from . import constants\ndef scaled(x):\n    return x * constants.FACTOR\n"
    )
    do(f"""
        sys.path.insert(0, {str(tmp_path)!r})
        from {package} import constants, work
        x = on(devices[0], np.int32(2))
        assert int(colocated.colocated_python(work.scaled)(x)) == 6
        sys.path.pop(0)
    """)
    (folder / "constants.py").write_text("FACTOR = 50\n")
    do(f"""
        import importlib
        constants = importlib.reload(sys.modules["{package}.constants"])
        x = on(devices[0], np.int32(2))
        assert int(colocated.colocated_python(lambda x: x * constants.FACTOR)(x)) == 100
    """)


WAITS = """
import time
from jax.experimental import colocated_python as colocated

def slow(x):
    import os, time
    print("process", os.getpid(), flush=True)
    time.sleep({seconds})
    return x
slow = colocated.colocated_python(slow).specialize(out_specs_fn=lambda x: x)

x = jax.device_put(np.float32(1), jax.devices()[0])
quick = jax.jit(lambda a: a + 1)
assert float(quick(x)) == 2
"""


def test_a_slow_function_delays_no_other_client(run: Run) -> None:
    holding = (
        WAITS.format(seconds=8)
        + """
result = quick(slow(x))
say("called")
say("result", value=float(result))
"""
    )
    code = (
        WAITS.format(seconds=0)
        + """
begun = time.time()
for _ in range(20):
    float(quick(x))
say("took", seconds=time.time() - begun)
"""
    )
    with Background(run, holding) as other:
        other.hear("called")
        took = said(client(run, code).stdout, "took")["seconds"]
        assert took < 4, took
        assert other.hear("result")["value"] == 2


def test_the_process_of_a_client_ends_with_it(run: Run) -> None:
    code = (
        WAITS.format(seconds=600)
        + """
@colocated.colocated_python
def process(x):
    import os
    return jax.device_put(np.int32(os.getpid()), x.sharding)
say("process", number=int(process(x)))
slow(x)
"""
    )
    number = said(client(run, code).stdout, "process")["number"]
    until = time.monotonic() + 20
    while Path(f"/proc/{number}").exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not Path(f"/proc/{number}").exists()


def test_what_a_client_has_queued_does_not_run_after_it(run: Run, tmp_path: Path) -> None:
    began = tmp_path / "began"
    code = (
        WAITS.format(seconds=0)
        + f"""
import os, signal

def leave_a_mark(x):
    import time
    with open({str(began)!r}, "a") as file:
        print(os.getpid(), file=file)
    time.sleep(3)
    return x
leave_a_mark = colocated.colocated_python(leave_a_mark).specialize(out_specs_fn=lambda x: x)
for _ in range(4):
    leave_a_mark(x)
while not os.path.exists({str(began)!r}):
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""
    )
    client(run, code)
    time.sleep(4)
    [only] = began.read_text().split()
    assert not Path(f"/proc/{only}").exists()
