"""Unmodified JAX over islands: results, transfers between islands, collectives, errors."""

import os
import subprocess
import sys

import pytest
from conftest import client

from fairway.cluster.supervisor import Run
from fairway.settings import Settings

MOVES = """
import itertools, jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
devices = jax.devices()
half = len(devices) // 2
assert [d.island for d in devices] == [0] * half + [1] * half
meshes = [Mesh(np.array(part).reshape(2, half // 2), ("x", "y"))
          for part in (devices[:half], devices[half:])]
x = np.arange(64.0).reshape(8, 8)
specs = [P("x"), P("x", "y"), P(None, "y"), P(), P(("x", "y")), P("y", "x")]
for source, target in itertools.product(specs, specs):
    there = jax.device_put(jax.device_put(x, NamedSharding(meshes[0], source)),
                           NamedSharding(meshes[1], target))
    assert np.array_equal(there, x), (source, target)
    back = jax.device_put(jax.jit(lambda a: a * 2)(there), NamedSharding(meshes[0], source))
    assert np.array_equal(back, 2 * x), (source, target)
"""

GATHERED = """
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()).reshape(2, -1), ("island", "x"))
x = np.arange(64, dtype=np.float32).reshape(8, 8)
a = jax.device_put(x, NamedSharding(mesh, P("island", "x")))
whole = jax.device_put(x, NamedSharding(mesh, P(None, "x")))
def over(body, given, made, *arguments):
    return np.asarray(jax.jit(jax.shard_map(body, mesh=mesh, in_specs=given, out_specs=made))(
        *arguments))
cut = P("island", "x")
top, bottom = x[:4], x[4:]
assert np.array_equal(over(lambda v: lax.psum(v, "island"), cut, P(None, "x"), a), top + bottom)
assert np.allclose(over(lambda v: lax.pmean(v, "island"), cut, P(None, "x"), a),
                   (top + bottom) / 2)
assert np.array_equal(over(lambda v: lax.pmax(v, "island"), cut, P(None, "x"), a), bottom)
assert np.array_equal(over(lambda v: lax.ppermute(v, "island", [(0, 1), (1, 0)]), cut, cut, a),
                      np.concatenate([bottom, top]))
assert np.array_equal(
    over(lambda v: lax.all_gather(v, "island", axis=0, tiled=True), cut, cut, a),
    np.concatenate([x, x]))
assert np.array_equal(
    over(lambda v: lax.psum_scatter(v, "island", scatter_dimension=0, tiled=True),
         P(None, "x"), cut, whole), 2 * x)
swapped = over(lambda v: lax.all_to_all(v, "island", 0, 1, tiled=True), cut, cut, a)
assert swapped.shape == (4, 16) and sorted(swapped.ravel()) == sorted(x.ravel())
assert np.array_equal(jax.jit(lambda v: v + 1)(a), np.asarray(a) + 1)
assert float(jax.device_put(1.0, jax.devices()[-1]) + 1) == 2.0
"""

TRAINED = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
devices = jax.devices()
mesh = Mesh(np.array(devices[: len(devices) // 2]), ("data",))
rng = np.random.default_rng(0)
weights = {"w": rng.normal(size=(16, 4)).astype(np.float32), "b": np.zeros(4, np.float32)}
inputs = rng.normal(size=(32, 16)).astype(np.float32)
wanted = rng.normal(size=(32, 4)).astype(np.float32)
def loss(p, x, y):
    return jnp.mean((x @ p["w"] + p["b"] - y) ** 2)
def step(p, x, y):
    value, gradient = jax.value_and_grad(loss)(p, x, y)
    return jax.tree.map(lambda a, g: a - 0.1 * g, p, gradient), value
replicated, cut = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
p = jax.device_put(weights, replicated)
x, y = jax.device_put(inputs, cut), jax.device_put(wanted, cut)
train = jax.jit(step, donate_argnums=0)
losses = []
for _ in range(50):
    p, value = train(p, x, y)
    losses.append(value)
losses = [float(v) for v in losses]
w, b = weights["w"].astype(np.float64), weights["b"].astype(np.float64)
for seen in losses:
    error = inputs @ w + b - wanted
    assert abs(seen - np.mean(error**2)) < 1e-5 * np.mean(error**2), seen
    w = w - 0.1 * 2 * inputs.T @ error / error.size
    b = b - 0.1 * 2 * error.sum(0) / error.size
"""

DELETED = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
devices = jax.devices()
def is_there(x):
    try:
        return np.asarray(x).size > 0
    except RuntimeError as error:
        assert "deleted" in str(error), error
        return False
for pair in (devices[:2], devices[1:3]):  # of one host, and of two hosts where there are
    mesh = Mesh(np.array(pair), ("x",))
    x = np.arange(8.0)
    source = jax.device_put(x, pair[0])
    copies = jax.device_put(source, NamedSharding(mesh, P()))
    own, other = [shard.data for shard in copies.addressable_shards]
    source.delete()
    found = [is_there(copies), is_there(own), is_there(other)]
    other.delete()
    halves = jax.device_put(x, NamedSharding(mesh, P("x")))
    first, second = [shard.data for shard in halves.addressable_shards]
    first.delete()
    found += [is_there(halves), is_there(first), is_there(second), is_there(second + 1)]
    halves = jax.device_put(x, NamedSharding(mesh, P("x")))
    first, second = [shard.data for shard in halves.addressable_shards]
    jax.jit(lambda x: x + 1, donate_argnums=0)(second)
    found += [is_there(halves), is_there(first), is_there(second)]
    halves = jax.device_put(x, NamedSharding(mesh, P("x")))
    first, second = [shard.data for shard in halves.addressable_shards]
    halves.delete()
    found += [is_there(first), is_there(second)]
    assert found == [False, False, True, False, False, True, True,
                     False, True, False, False, False], (pair, found)
"""

ALIASED = """
import fairway, jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
devices = jax.devices()[:len(jax.devices()) // 2]
sharding = NamedSharding(Mesh(np.array(devices), ("x",)), P())
def arrays():
    a = jax.device_put(np.ones((4, 4), np.float32), sharding)
    shards = [shard.data for shard in a.addressable_shards]
    return a, jax.make_array_from_single_device_arrays(a.shape, sharding, shards)
def refused(act):
    try:
        jax.block_until_ready(act())
    except (jax.errors.JaxRuntimeError, RuntimeError, ValueError) as error:
        return str(error)
    return ""
add = lambda x, y: x + y
for donated in (0, 1, (0, 1)):
    step = jax.jit(add, donate_argnums=donated)
    a, b = arrays()
    error = refused(lambda: step(a, b))
    assert "same memory" in error, error
    a, _ = arrays()
    assert refused(lambda: step(a, a))
    @fairway.program
    def twice(x, y):
        return step(x, jax.device_put(x, sharding)), y
    a, b = arrays()
    assert refused(lambda: twice(a, b))
    @fairway.program
    def same(x):
        return step(x + 0, x)
    a, _ = arrays()
    assert refused(lambda: same(a)) == "", "a sum is another memory"
step = jax.jit(add, donate_argnums=0)
a, _ = arrays()
b = jax.device_put(np.ones((4, 4), np.float32), sharding)
assert float(step(a, b).sum()) == 32, "what shares nothing is donated"
"""


def check(settings, code):
    with Run(settings) as islands:
        done = client(islands, code, timeout_s=120)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("islands", ["2x1x4", "2x2x2"])
def test_programs(islands):
    """One client runs all of them, one after another, like a user's session."""
    with Run(Settings.parse(islands)) as run:
        for code in (MOVES, GATHERED, ALIASED, DELETED, TRAINED):
            done = client(run, code, timeout_s=120)
            assert done.returncode == 0, done.stdout
        assert run.overview()["clients"] == []


def test_deleting_goes_by_shards_in_plain_jax_too():
    """The program observes the same deleted shards on islands as in plain JAX."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}
    subprocess.run([sys.executable, "-c", DELETED], env=environment, check=True, timeout=60)


def test_moves_over_tcp():
    check(Settings.parse("2x1x4", data_plane="tcp"), MOVES)
