"""``jax.device_put`` to other shardings: hosts transfer what the client does not read."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from conftest import Notebook

from fairway.cluster.supervisor import Run
from fairway.settings import Settings

SETUP = """
from jax.sharding import SingleDeviceSharding

devices = jax.devices()
everywhere = Mesh(np.array(devices), ("x",))
first = Mesh(np.array(devices[:4]).reshape(2, 2), ("a", "b"))
second = Mesh(np.array(devices[4:]), ("x",))
PLACES = [
    NamedSharding(everywhere, P("x")), NamedSharding(everywhere, P()),
    NamedSharding(first, P("a", "b")), NamedSharding(first, P("b")),
    NamedSharding(first, P(None, ("a", "b"))), NamedSharding(second, P(None, "x")),
    NamedSharding(second, P()), SingleDeviceSharding(devices[5]),
]

def reads(do):
    from jax._src import array
    seen, kind = [], array.ArrayImpl
    value = kind._value
    kind._value = property(lambda self: (seen.append(self.shape), value.fget(self))[1])
    try:
        return do(), seen
    finally:
        kind._value = value
"""


@pytest.fixture(scope="module", params=["2x1x4", "2x2x2"])
def do(request: pytest.FixtureRequest) -> Iterator[Callable[[str], None]]:
    with Run(Settings.parse(request.param)) as run, Notebook(run, SETUP) as notebook:
        yield notebook.run


def test_any_sharding_becomes_any_other_without_being_read(do: Callable[[str], None]) -> None:
    do("""
        wanted = np.arange(256, dtype="f").reshape(16, 16)
        for before in PLACES:
            for after in PLACES:
                array = jax.device_put(wanted, before)
                found, read = reads(lambda: jax.device_put(array, after))
                assert not read, (before, after)
                assert found.sharding.is_equivalent_to(after, 2)
                np.testing.assert_array_equal(found, wanted)
                assert not array.is_deleted()
    """)


def test_arrays_of_other_shapes_and_types_go_the_same_way(do: Callable[[str], None]) -> None:
    do("""
        for before, after in ((PLACES[0], PLACES[6]), (PLACES[2], PLACES[5])):
            for shape in ((16, 16), (32, 8), (8, 64)):
                for kind in ("f", "i", "bool"):
                    wanted = (np.arange(shape[0] * shape[1]) % 7).reshape(shape).astype(kind)
                    found = jax.device_put(jax.device_put(wanted, before), after)
                    assert (found.shape, found.dtype) == (shape, wanted.dtype)
                    np.testing.assert_array_equal(found, wanted)
    """)


def test_the_client_does_not_wait_for_what_is_resharded(do: Callable[[str], None]) -> None:
    do("""
        x = jax.device_put(np.ones((64, 64), "f"), NamedSharding(first, P("a")))
        slow = jax.jit(lambda a: jax.lax.fori_loop(0, 20_000, lambda _, a: jnp.sin(a), a))
        to = NamedSharding(second, P(None, "x"))
        np.asarray(jax.device_put(slow(x), to))
        computed = slow(x)
        moved = jax.device_put(computed, to)
        assert not computed.is_ready(), "it was put before it was computed"
        np.testing.assert_array_equal(moved, computed)
    """)


def test_keys_small_types_and_no_axes(do: Callable[[str], None]) -> None:
    do("""
        keys = jax.random.split(jax.random.key(3), 8)
        moved = jax.device_put(jax.device_put(keys, PLACES[0]), NamedSharding(first, P("a")))
        assert (jax.random.key_data(moved) == jax.random.key_data(keys)).all()
        for kind in ("bool", "int8", jnp.bfloat16, "complex64"):
            scalar = jax.device_put(np.ones((), kind), devices[0])
            assert jax.device_put(scalar, NamedSharding(everywhere, P())).dtype == scalar.dtype
            flat = jax.device_put(np.arange(8).astype(kind), PLACES[0])
            np.testing.assert_array_equal(
                jax.device_put(flat, NamedSharding(second, P())), np.arange(8).astype(kind)
            )
    """)


def test_arrays_of_no_elements(do: Callable[[str], None]) -> None:
    do("""
        for shape in ((0, 4), (4, 0), (0,)):
            for before in (PLACES[1], PLACES[6]):
                for after in (PLACES[0], PLACES[6], PLACES[7]):
                    if len(shape) == 2 and shape[0] == 4 and after is PLACES[0]:
                        continue  # not divisible
                    array = jax.device_put(np.zeros(shape, "f"), before)
                    assert np.asarray(jax.device_put(array, after)).shape == shape
    """)


def test_errors_come_with_the_result(do: Callable[[str], None]) -> None:
    do("""
        def refuse(a):
            raise LookupError("no value")
        x = jax.device_put(np.ones(8, "f"), devices[0])
        failed = jax.jit(lambda a: jax.pure_callback(refuse, a, a))(x)
        text = fails(lambda: np.asarray(jax.device_put(failed, PLACES[0])))[1]
        assert "no value" in text, text
        gone = jax.device_put(np.ones(8, "f"), PLACES[0])
        gone.delete()
        assert "deleted" in fails(lambda: jax.device_put(gone, PLACES[1]))[1]
    """)
