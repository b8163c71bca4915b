"""Reads of small arrays over a connection of their own."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import pytest
from conftest import Notebook, client, said

from fairway.cluster.supervisor import Run
from fairway.plugin.readbacks import GREETING
from fairway.settings import Settings

SETUP = """
import gc, threading
import ml_dtypes
from jaxlib import _jax

devices = jax.devices()
readbacks = next(m for name, m in list(sys.modules.items()) if name.endswith("plugin.readbacks"))
connections = []
take = readbacks._Connection._take

def counted(self, part):
    connections.append((self, len(part)))
    return take(self, part)

readbacks._Connection._take = counted

def received(do):
    before = len(connections)
    result = do()
    return result, len(connections) > before
"""


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with Run(Settings.parse("2x1x2")) as up:
        yield up


@pytest.fixture(scope="module")
def do(run: Run) -> Iterator[Callable[[str], None]]:
    with Notebook(run, SETUP) as notebook:
        yield notebook.run


def test_small_arrays_of_all_types_are_read_this_way(do: Callable[[str], None]) -> None:
    do("""
        own = (ml_dtypes.bfloat16, ml_dtypes.int4)
        for kind in ("int8", "bool", "float32", "complex64", "uint32", *own):
            for shape in ((), (3,), (0, 4), (2, 3, 4)):
                wanted = np.ones(shape, kind)
                array = jax.jit(lambda a: a)(jax.device_put(wanted, devices[-1]))
                found, is_read_back = received(lambda: np.asarray(array))
                assert is_read_back, (kind, shape)
                assert (found.dtype, found.shape) == (wanted.dtype, shape)
                assert (found == wanted).all() and not found.flags.writeable
        everywhere = NamedSharding(Mesh(np.array(devices), ("x",)), P())
        found, is_read_back = received(lambda: np.asarray(jax.device_put(np.arange(8), everywhere)))
        assert is_read_back and (found == np.arange(8)).all()
    """)


def test_large_and_sharded_arrays_are_read_as_ever(do: Callable[[str], None]) -> None:
    do("""
        large = jax.device_put(np.arange(1 << 16), devices[0])
        found, is_read_back = received(lambda: np.asarray(large))
        assert not is_read_back and (found == np.arange(1 << 16)).all()
        sharded = jax.device_put(
            np.arange(8), NamedSharding(Mesh(np.array(devices), ("x",)), P("x"))
        )
        found, _ = received(lambda: np.asarray(sharded))
        assert (found == np.arange(8)).all()
    """)


def test_errors_are_those_of_other_reads(do: Callable[[str], None]) -> None:
    do("""
        def value():
            return jax.device_put(np.float32(1), devices[0])

        kept = value()
        kept.delete()
        assert "deleted" in fails(lambda: float(kept))[1]
        donated = value()
        jax.jit(lambda a: a + 1, donate_argnums=0)(donated)
        assert "deleted" in fails(lambda: float(donated))[1]

        def refuse(x):
            raise LookupError("no value")
        failed = jax.jit(lambda a: jax.pure_callback(refuse, a, a))(value())
        assert "no value" in fails(lambda: float(failed))[1]
        assert float(value()) == 1
    """)


def test_threads_read_concurrently(do: Callable[[str], None]) -> None:
    do("""
        wrong = []
        def work(number):
            add = jax.jit(lambda a: a + 1)
            for turn in range(100):
                place = devices[(number + turn) % len(devices)]
                value = jax.device_put(np.int32(turn * 1000 + number), place)
                if int(add(value)) != turn * 1000 + number + 1:
                    wrong.append((number, turn))
        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert not wrong
    """)


def test_reads_that_are_dropped_leave_room_for_others(do: Callable[[str], None]) -> None:
    do("""
        for number in range(3 * readbacks.SLOTS):
            array = jax.device_put(np.int32(number), devices[0])
            array.copy_to_host_async()
            del array
        gc.collect()
        many = [jax.device_put(np.int32(number), devices[0]) for number in range(200)]
        for array in many:
            array.copy_to_host_async()
        assert [int(array) for array in many] == list(range(200))
        assert [int(value) for value in jax.device_get(many)] == list(range(200))
        _, is_read_back = received(lambda: int(jax.device_put(np.int32(5), devices[0])))
        assert is_read_back
    """)


def test_an_exception_of_a_signal_handler_changes_no_later_value(do: Callable[[str], None]) -> None:
    """Wherever it comes: while a read is asked for, while it waits, or as its bytes arrive."""
    do("""
        import itertools, signal

        class Late(Exception):
            pass

        def late(*_):
            raise Late

        signal.signal(signal.SIGALRM, late)
        add = jax.jit(lambda a: a + 1)
        interrupted = 0
        for number in range(400):
            value = add(jax.device_put(np.int32(number), devices[number % 4]))
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.00002 * (number % 50) + 1e-5)
                assert int(value) == number + 1
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Late:
                interrupted += 1
            assert int(value) == number + 1
        assert interrupted > 20, interrupted
        time.sleep(1.2)
        int(add(1))
        _, is_read_back = received(lambda: int(jax.device_put(np.int32(5), devices[0])))
        assert is_read_back, "there is a connection again"
    """)


def test_what_is_not_small_is_refused_on_the_connection(do: Callable[[str], None]) -> None:
    do("""
        readbacks.BYTES_MAX, limit = 1 << 30, readbacks.BYTES_MAX
        try:
            large = jax.device_put(np.arange(1 << 16), devices[0])
            assert (np.asarray(large) == np.arange(1 << 16)).all(), "it is read otherwise"
        finally:
            readbacks.BYTES_MAX = limit
        assert int(jax.device_put(np.int32(5), devices[0])) == 5
    """)


def test_a_connection_that_ends_leaves_the_other_way(run: Run) -> None:
    code = (
        SETUP
        + """
first = int(jax.device_put(np.int32(5), devices[0]))
connections[-1][0]._socket.shutdown(2)
later = [int(jax.device_put(np.int32(number), devices[0])) for number in range(50)]
say("found", first=first, later=later)
"""
    )
    assert said(client(run, code).stdout, "found") == {"first": 5, "later": list(range(50))}


def test_a_connection_without_a_sessions_key_gets_nothing(run: Run) -> None:
    host, _, port = run.environment["JAX_BACKEND_TARGET"].removeprefix("grpc://").rpartition(":")
    with socket.create_connection((host, int(port)), 5) as stranger:
        stranger.sendall(GREETING + bytes(32))
        assert stranger.recv(10) == b"\0"
        assert stranger.recv(10) == b"", "it is closed"
