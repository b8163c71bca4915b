"""Hosts start without jax and scipy, and have them when a program or a module needs them."""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Up, client, said

pytestmark = pytest.mark.fast

START = """
import sys
import numpy as np
from fairway import mpmd
from fairway.host import without_jax
from fairway.host.backend import Backend
from fairway.host.modules import AllowedModules

backend, float32 = Backend("cpu", 2), np.dtype(np.float32)
backend.warm_up()

def on_both_devices(elements):
    return backend.put(elements.dtype, elements.shape, (0, 1), None, [elements, 2 * elements])

whole = on_both_devices(np.arange(3, dtype=np.float32))
for index, shard in enumerate(backend.shards(whole)):
    assert backend.places(shard) == (index,)
    assert np.array_equal(backend.view(shard), np.arange(3) * (index + 1))
copied = backend.shards(backend.copy(whole, (1, 0), None))
joined = backend.join(float32, (3,), (1, 0), None, copied)
assert np.array_equal(backend.view(backend.shard(joined, 1)), 2 * np.arange(3))
assert mpmd.context()
assert not without_jax.is_imported() and "scipy" not in sys.modules
"""

USERS_MODULE = """
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

jax.config.update("jax_num_cpu_devices", 2)

def use():
    mesh = jax.make_mesh((2,), ("x",))
    x = jax.device_put(jnp.arange(6, dtype=jnp.float32), NamedSharding(mesh, PartitionSpec("x")))
    shards = [shard.data for shard in x.addressable_shards]
    assert all(type(shard.aval) is jax.core.ShapedArray for shard in shards)
    assert all(type(shard.sharding) is jax.sharding.SingleDeviceSharding for shard in shards)
    weak = jax.device_put(2.0, NamedSharding(mesh, PartitionSpec())).addressable_shards[1].data
    assert (weak * 3).tolist() == 6.0 and weak.aval.weak_type
    doubled = jax.jit(lambda value: value * 2)(shards[1])
    return doubled.shape, doubled.tolist(), float(jax.grad(lambda v: (v ** 2).sum())(shards[0])[2])
"""

USE = """
import threading
from concurrent.futures import ThreadPoolExecutor

def step():
    while not is_over.wait(0):
        shards = backend.shards(on_both_devices(np.arange(3, dtype=np.float32)))
        assert np.array_equal(backend.view(shards[1]), 2 * np.arange(3))

sys.path.insert(0, sys.argv[1])
modules, is_over = AllowedModules(["users_module"], [], backend.import_jax), threading.Event()
with ThreadPoolExecutor(4) as threads:
    steps = [threads.submit(step) for _ in range(2)]
    loaded = [threads.submit(modules.load, "users_module") for _ in range(2)]
    try:
        users = [one.result() for one in loaded]
    finally:
        is_over.set()
    for one in steps:
        one.result()
found = users[0].use()
assert found == ((3,), [6.0, 8.0, 10.0], 4.0), found
again = on_both_devices(np.arange(3, dtype=np.float32))
assert np.array_equal(backend.view(backend.shards(again)[1]), 2 * np.arange(3))
"""

SHADOW = """
from jaxlib.mlir.dialects import stablehlo
sys.path.insert(0, sys.argv[1])
module = backend.parse(stablehlo.serialize_portable_artifact_str(
    'func.func @main(%a: tensor<f32>) -> tensor<f32> {'
    ' %b = stablehlo.custom_call @lapack_spotrf_ffi(%a) : (tensor<f32>) -> tensor<f32>'
    ' return %b : tensor<f32> }', "1.0.0"))
backend.load(module.operation.get_asm(binary=True))
assert "scipy.linalg" in sys.modules
backend.import_jax()
"""

LINEAR_ALGEBRA = """
square = np.random.default_rng(7).normal(size=(5, 5)).astype(np.float32)
square = square @ square.T + np.eye(5, dtype=np.float32)
say("done", off={
    "cholesky": off(jnp.linalg.cholesky, np.linalg.cholesky),
    "solve": off(lambda x: jnp.linalg.solve(x, x[0]), lambda x: np.linalg.solve(x, x[0])),
    "values": off(jnp.linalg.eigvalsh, np.linalg.eigvalsh),
    "singular": off(lambda x: jnp.linalg.svd(x)[1], lambda x: np.linalg.svd(x)[1]),
    "tridiagonal": off(
        lambda x: jax.lax.linalg.tridiagonal_solve(0 * x[0], x[0] + 9, 0 * x[0], x[:, :1]),
        lambda x: x[:, :1] / (x[0] + 9)[:, None]),
})
"""


def starts(code: str, *arguments: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr


def test_a_host_starts_without_jax_and_scipy() -> None:
    starts(START)


def test_modules_of_users_have_all_of_jax(tmp_path: Path) -> None:
    (tmp_path / "users_module.py").write_text(USERS_MODULE)
    starts(START + USE, str(tmp_path))


def test_users_files_take_no_module_of_scipy_or_jax(tmp_path: Path) -> None:
    for name in ("calendar", "secrets", "zipfile", "csv"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')")
    starts(START + SHADOW, str(tmp_path))


def test_linear_algebra_runs_on_hosts(up: Up) -> None:
    ended = client(
        up,
        "def off(ours, theirs):\n"
        "    return float(np.max(np.abs(jax.jit(ours)(square) - theirs(square))))\n"
        + LINEAR_ALGEBRA,
    )
    off = said(ended.stdout, "done")["off"]
    assert max(off.values()) < 1e-3, off


def test_batches_of_linear_algebra_stay_on_their_devices(up: Up) -> None:
    ended = client(
        up,
        """
        devices = [device for device in jax.devices() if device.island == 0]
        mesh = Mesh(np.array(devices), ("x",))
        x = jax.device_put(np.stack([np.eye(5, dtype="f")] * 8), NamedSharding(mesh, P("x")))
        of = {"cholesky": jnp.linalg.cholesky, "qr": jnp.linalg.qr, "values": jnp.linalg.eigvalsh}
        texts = {name: jax.jit(function).lower(x).compile().as_text()
                 for name, function in of.items()}
        say("done", devices=len(devices), gathered=[n for n in of if "all-gather" in texts[n]],
            called=[name for name in of if "lapack_" in texts[name]])
        """,
    )
    done = said(ended.stdout, "done")
    assert done["devices"] > 1
    assert done["gathered"] == []
    assert done["called"] == ["cholesky", "qr", "values"]
