"""What existing programs expect of a JAX backend."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Notebook, Up, client, client_environment, said

from fairway.plugin import BARE, REFUSED_JAXLIBS, check_jaxlib

SETUP = """
islands = [[d for d in jax.devices() if d.island == i] for i in (0, 1)]
meshes = [Mesh(np.array(devices), ("x",)) for devices in islands]
rng = np.random.default_rng(0)
"""


@pytest.fixture(scope="module")
def notebook(up: Up) -> Iterator[Notebook]:
    with Notebook(up, SETUP) as running:
        yield running


# Empty arrays, and arrays of any strides

DTYPES = """
[jnp.bool_, jnp.int2, jnp.int4, jnp.int8, jnp.int16, jnp.int32, jnp.int64, jnp.uint2, jnp.uint4,
 jnp.uint8, jnp.uint16, jnp.uint32, jnp.uint64, jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64,
 jnp.complex64, jnp.complex128, jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float8_e3m4,
 jnp.float8_e8m0fnu, jnp.float4_e2m1fn]
"""


@pytest.mark.parametrize("maker", ["uploaded", "computed"])
def test_arrays_of_no_elements_go_anywhere(notebook: Notebook, maker: str) -> None:
    """Uploaded or computed, with any sharding, on one island and to the other; every type once."""
    notebook.run(
        f"""
        dtypes = {" ".join(DTYPES.split())}
        specs = [P(), P("x"), P(None, "x"), islands]
        shapes = [(0, 4), (4, 0), (0, 0), (8, 0), (0, 8)]
        def places(island):
            return [islands[island][1], *(NamedSharding(meshes[island], s) for s in specs[:3])]
        number = 0
        with jax.enable_x64(True):
            for source in places(0):
                for target in [*places(0), *places(1)]:
                    for shape in shapes:
                        dtype = dtypes[number % len(dtypes)]
                        number += 1
                        x = jax.device_put(np.zeros(shape, dtype), source)
                        if {maker!r} == "computed":
                            x = jax.jit(lambda x: jnp.zeros_like(x))(x)
                        y = jax.device_put(x, target)
                        z = jax.device_put(y, islands[0][0])
                        for array in (x, y, z):
                            assert np.asarray(array).shape == shape, (source, target, shape)
                            assert array.dtype == dtype
                            for shard in array.addressable_shards:
                                assert np.asarray(shard.data).size == 0
        assert number >= len(dtypes)
        """,
        timeout_s=240,
    )


def test_programs_and_collectives_over_islands_take_arrays_of_no_elements(
    notebook: Notebook,
) -> None:
    notebook.run(
        """
        import fairway
        from functools import partial

        double = jax.jit(lambda x: x * 2)
        there = NamedSharding(meshes[1], P("x"))
        join = jax.jit(lambda x: jnp.concatenate([x, jnp.ones((4, 3))], 1), out_shardings=there)

        @fairway.program
        def step(x):
            return join(jax.device_put(double(x), there))

        x = jax.device_put(np.zeros((4, 0), np.float32), NamedSharding(meshes[0], P("x")))
        np.testing.assert_array_equal(step(x), np.ones((4, 3)))

        both = Mesh(np.array(islands), ("i", "x"))
        spread = jax.device_put(np.zeros((16, 0), np.float32), NamedSharding(both, P(("i", "x"))))
        gather = partial(jax.lax.all_gather, tiled=True)
        for collective in (jax.lax.psum, gather, partial(jax.lax.psum_scatter, tiled=True)):
            over = jax.jit(jax.shard_map(
                lambda x: collective(x, "i"), mesh=both, in_specs=P(("i", "x")),
                out_specs=P(("i", "x")), check_vma=False,
            ))
            assert np.asarray(over(spread)).size == 0
        """
    )


def test_an_array_of_no_elements_fails_with_its_source(notebook: Notebook) -> None:
    notebook.run(
        """
        def fail(x):
            y = jnp.zeros((1 << 40,), jnp.float32) + x.sum()
            return x, y
        out = jax.jit(fail)
        x = jax.device_put(np.zeros((0,), np.float32), islands[0][0])
        kind, text = fails(lambda: np.asarray(jax.device_put(out(x)[0], islands[1][0])))
        assert "RESOURCE_EXHAUSTED" in text, (kind, text)
        """
    )


def test_numpy_arrays_of_any_strides(notebook: Notebook) -> None:
    """Of zero strides (`broadcast_to`) and negative ones; put, passed to a jit, or in shards."""
    notebook.run(
        """
        whole, cut = NamedSharding(meshes[0], P()), NamedSharding(meshes[0], P("x"))
        base = np.arange(24, dtype=np.float32).reshape(4, 6)
        cases = [
            np.broadcast_to(np.float32(2), (4,)),
            np.broadcast_to(np.float32(2), (1000, 1000)),
            np.broadcast_to(base[0], (4, 6)),
            np.broadcast_to(base[:, :1], (4, 6)),
            np.broadcast_to(base[:, None], (4, 4, 6)),
            np.broadcast_to(np.array([True, False]), (4, 2)),
            np.broadcast_to(np.arange(6).astype(jnp.int4), (4, 6)),
            np.broadcast_to(base[::-1, ::-1], (4, 4, 6)),
            base[::-1], base[:, ::-1], base.T[::-1, ::2][:4], base[::-2][:0],
        ]
        same = jax.jit(lambda x: x)
        for case in cases:
            made = [jax.device_put(case), jnp.asarray(case), same(case), same(case)]
            made.append(jax.device_put(case, whole))
            made.append(jax.make_array_from_callback(case.shape, whole, lambda i: case[i]))
            if case.shape[0] == 4:
                made.append(jax.device_put(case, cut))
                made.append(jax.make_array_from_callback(case.shape, cut, lambda i: case[i]))
            for array in made:
                np.testing.assert_array_equal(np.asarray(array), case)
        """
    )


# What JAX requires of a backend


def test_sparse_matrices(notebook: Notebook) -> None:
    """Their products use jaxlib's custom calls, which hosts must have registered."""
    notebook.run(
        """
        from jax.experimental import sparse
        dense = rng.standard_normal((6, 5)) * (rng.random((6, 5)) < 0.4)
        right = rng.standard_normal((5, 3))
        for dtype in (np.float32, np.complex64):
            left = dense.astype(dtype)
            by = right.astype(dtype)
            for kind in (sparse.BCSR, sparse.BCOO):
                made = kind.fromdense(left)
                product = jax.jit(lambda a, b: a @ b)
                for of in (by, by[:, 0]):
                    np.testing.assert_allclose(product(made, of), left @ of, rtol=1e-5, atol=1e-6)
        """
    )


def test_exported_functions(notebook: Notebook) -> None:
    notebook.run(
        """
        from jax import export
        x = np.arange(8.0, dtype=np.float32)
        made = export.export(jax.jit(lambda x: jnp.sin(x) * 2))(x)
        np.testing.assert_allclose(made.call(x), np.sin(x) * 2, rtol=1e-6)
        cut = jax.jit(lambda x: x + 1, in_shardings=NamedSharding(meshes[0], P("x")))
        made = export.export(cut)(x)
        on = jax.device_put(x, NamedSharding(meshes[0], P("x")))
        np.testing.assert_allclose(jax.jit(made.call)(on), x + 1)
        """
    )


# How the plugin is found


def bare_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs code with no Fairway in the environment but what is passed."""
    kept = {
        name: value
        for name, value in client_environment(None).items()
        if not name.startswith(("JAX_", "TF_CPP", "FAIRWAY", "IFRT", "GRPC"))
    }
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


SUM = "print(len(jax.devices()), float(jax.numpy.arange(4).sum()))"


def test_configured_after_the_import(up: Up) -> None:
    code = (
        "import jax; jax.config.update('jax_platforms', 'proxy'); "
        f"jax.config.update('jax_backend_target', {up.environment['JAX_BACKEND_TARGET']!r}); {SUM}"
    )
    result = bare_python(code)
    assert (result.stdout, result.stderr) == ("8 6.0\n", ""), result


def test_nothing_is_said_where_only_the_two_variables_are_set(up: Up) -> None:
    result = bare_python(f"import jax; {SUM}", **up.environment)
    assert (result.stdout, result.stderr) == ("8 6.0\n", ""), result


def test_it_stays_away_where_nobody_asks_for_it() -> None:
    code = "import jax; print([d.platform for d in jax.devices()])"
    for environment in ({}, {"JAX_PLATFORMS": "cpu"}, {"JAX_BACKEND_TARGET": "grpc://127.0.0.1:1"}):
        result = bare_python(code, **environment)
        assert (result.stdout, result.stderr) == ("['cpu']\n", ""), result


def test_a_python_without_fairway(up: Up, tmp_path: Path) -> None:
    """It needs the folder that `fairway up` names, and nothing else of Fairway."""
    packages = tmp_path / "packages"
    packages.mkdir()
    for path in map(Path, sys.path):
        if path.name == "site-packages":
            for package in path.iterdir():
                if "fairway" not in package.name and not (packages / package.name).exists():
                    (packages / package.name).symlink_to(package)
    assert f"PYTHONPATH={BARE}" in up.errors.read_text().replace("\n", "")
    code = (
        f"import sys; sys.path.append({str(packages)!r})\n"
        f"import importlib.util, jax\n"
        f"print(importlib.util.find_spec('fairway')); {SUM}"
    )
    environment = {**client_environment(up), "PYTHONPATH": str(BARE)}
    result = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.stdout == "None\n8 6.0\n", result


def test_versions_that_do_not_work_are_refused() -> None:
    for version, reason in REFUSED_JAXLIBS.items():
        with pytest.raises(RuntimeError, match="install another version") as caught:
            check_jaxlib(version)
        assert version in str(caught.value)
        assert reason in str(caught.value)
    check_jaxlib("0.11.2")


# Forked children

FORKS = """
import os, signal, warnings
warnings.simplefilter("ignore")
x = jax.device_put(np.arange(8.0, dtype=np.float32))
double = jax.jit(lambda x: x * 2)
total = float(double(x).sum())
uses = {
    "jit": lambda: float(double(x).sum()),
    "compiled before": lambda: jax.block_until_ready(double(x)),
    "eager": lambda: x + 1,
    "new jit": lambda: jax.jit(lambda x: x - 7)(np.ones(3)),
    "read": lambda: np.array(x),
    "wait": lambda: x.block_until_ready(),
    "put": lambda: jax.device_put(np.ones(4)),
    "devices": lambda: jax.devices(),
    "float": lambda: float(x[0]),
}
errors = {}
for name, use in uses.items():
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        signal.alarm(20)
        os.write(writer, ": ".join(fails(use)).encode())
        os._exit(0)
    os.close(writer)
    errors[name] = os.read(reader, 4096).decode()
    os.close(reader)
    os.waitpid(child, 0)
say("errors", **errors)
say("parent", before=total, after=float(double(x).sum()), new=float(jax.jit(lambda x: x + 5)(x)[0]))
"""


def test_a_forked_child_that_uses_jax_fails_at_once(up: Up) -> None:
    """The child lacks the threads that its connection needs; its parent continues."""
    result = client(up, FORKS, timeout_s=240)
    errors = said(result.stdout, "errors")
    for use, error in errors.items():
        assert error.startswith("RuntimeError"), (use, error)
        assert "forked" in error, (use, error)
    assert said(result.stdout, "parent") == {"before": 56.0, "after": 56.0, "new": 5.0}


def test_a_child_that_was_forked_before_uses_jax(up: Up) -> None:
    result = client(
        up,
        """
        import multiprocessing as mp
        def work(queue):
            queue.put(float(jnp.arange(4).sum()))
        context = mp.get_context("fork")
        queue = context.Queue()
        child = context.Process(target=work, args=(queue,))
        child.start()
        say("child", value=queue.get(timeout=30))
        child.join()
        """,
        environment={"PYTHONWARNINGS": "ignore"},
    )
    assert said(result.stdout, "child") == {"value": 6.0}, result.stdout
