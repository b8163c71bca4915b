"""What scripts do besides computing: statistics, costs, exchange with other libraries."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from conftest import Notebook

from fairway.cluster.supervisor import Run
from fairway.settings import Settings


@pytest.fixture(scope="module")
def do() -> Iterator[Callable[[str], None]]:
    with Run(Settings.parse("2x1x2")) as run, Notebook(run) as notebook:
        yield notebook.run


def test_statistics_of_memory_are_unknown_as_on_cpus(do: Callable[[str], None]) -> None:
    do("assert [device.memory_stats() for device in jax.devices()] == [None] * 4")


def test_a_program_that_is_not_compiled_has_costs(do: Callable[[str], None]) -> None:
    do("""
        lowered = jax.jit(lambda x: x @ x).lower(jnp.ones((4, 4)))
        assert lowered.cost_analysis()["flops"] == 128
        assert lowered.compile().cost_analysis()["flops"] == 128
    """)


def test_arrays_are_exchanged_as_copies(do: Callable[[str], None]) -> None:
    do("""
        x = jax.device_put(np.arange(6, dtype="f").reshape(2, 3), jax.devices()[3])
        found = np.from_dlpack(x)
        np.testing.assert_array_equal(found, x)
        found[0, 0] = 7
        assert float(x[0, 0]) == 0
        given = np.arange(4.0, dtype="f")
        for take in (jax.dlpack.from_dlpack, jnp.from_dlpack):
            taken = take(given)
            assert taken.devices() == {jax.devices()[0]}
            np.testing.assert_array_equal(taken + 1, [1, 2, 3, 4])
        np.testing.assert_array_equal(jnp.from_dlpack(x), x)
        placed = jax.dlpack.from_dlpack(given, jax.devices()[2])
        assert placed.devices() == {jax.devices()[2]}
        assert fails(lambda: jax.dlpack.from_dlpack(given, copy=False))[0] == "BufferError"
        over = jax.device_put(np.ones(4), NamedSharding(Mesh(np.array(jax.devices()), "x"), P("x")))
        assert fails(lambda: np.from_dlpack(over))[0] == "BufferError"
    """)


def test_a_mesh_over_islands_may_be_the_first_use_of_jax(do: Callable[[str], None]) -> None:
    do("""
        import subprocess
        program = (
            "import jax, numpy as np\\n"
            "mesh = jax.make_mesh((4,), ('x',))\\n"
            "assert type(mesh.devices) is np.ndarray and mesh.size == 4\\n"
            "flat = jax.make_mesh((2, 2), ('a', 'b'), devices=jax.devices()[::-1])\\n"
            "assert [d.id for d in flat.devices.flat] == [3, 2, 1, 0], flat.devices\\n"
        )
        subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    """)
