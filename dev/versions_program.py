"""Checks that a client of each version runs on hosts of each version, for `versions.py`.

Prints `checks` and each check with its error, empty where it passed. It needs two islands of four
devices, and numpy for comparison.
"""

# mypy: allow-untyped-calls, no-warn-return-any

import json
import sys
import traceback
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

ISLANDS = [[d for d in jax.devices() if d.island == number] for number in (0, 1)]
MESHES = [Mesh(np.array(devices), ("x",)) for devices in ISLANDS]
CUT = [NamedSharding(mesh, P("x")) for mesh in MESHES]
ROWS = np.random.default_rng(0).standard_normal((8, 6)).astype(np.float32)
close = np.testing.assert_allclose


def sharded() -> None:
    """Checks a sharded computation with a reduction, and its gradient."""
    x = jax.device_put(ROWS, CUT[0])
    value, gradient = jax.jit(jax.value_and_grad(lambda x: (jnp.sin(x) ** 2).sum()))(x)
    close(value, (np.sin(ROWS) ** 2).sum(), rtol=1e-5)
    close(gradient, np.sin(2 * ROWS), rtol=1e-4, atol=1e-5)


def loops() -> None:
    """Checks training by scan, fori_loop and while_loop, with donation."""
    target = ROWS @ np.arange(6, dtype=np.float32)

    def step(w: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        loss, slope = jax.value_and_grad(lambda w: ((x @ w - target) ** 2).mean())(w)
        return w - 0.05 * slope, loss

    x = jnp.asarray(ROWS)
    train = jax.jit(lambda w: jax.lax.scan(step, w, None, 200), donate_argnums=0)
    _, losses = train(jnp.zeros(6))
    assert losses[-1] < losses[0] / 50, losses
    assert jax.jit(lambda: jax.lax.fori_loop(0, 100, lambda i, s: s + i, 0))() == 4950
    assert jax.jit(lambda: jax.lax.while_loop(lambda s: s < 1000, lambda s: s * 2, 1))() == 1024


def collectives() -> None:
    """Checks shard_map and pmap."""
    total = jax.shard_map(
        lambda x: jax.lax.psum(x, "x"), mesh=MESHES[0], in_specs=P("x"), out_specs=P()
    )
    close(jax.jit(total)(ROWS), ROWS.reshape(4, 2, 6).sum(0), rtol=1e-5)
    mean = jax.pmap(lambda x: jax.lax.pmean(x, "i"), axis_name="i", devices=ISLANDS[0])
    close(mean(ROWS[:4])[0], ROWS[:4].mean(0), rtol=1e-5)


def across() -> None:
    """Checks transfers to the other island with resharding, and back; also of empty arrays."""
    for elements in (ROWS, ROWS[:0], np.broadcast_to(ROWS[0], (8, 6))):
        there = jax.device_put(jax.device_put(elements, CUT[0]), NamedSharding(MESHES[1], P()))
        close(np.asarray(jax.device_put(there, CUT[0])), elements)


def over_islands() -> None:
    """Checks a jit of only collectives, over both islands."""
    both = Mesh(np.array(ISLANDS), ("i", "x"))
    spec = P(("i", "x"))
    total = jax.shard_map(
        lambda x: jax.lax.psum(x, "i"), mesh=both, in_specs=spec, out_specs=P("x")
    )
    x = jax.device_put(ROWS, NamedSharding(both, spec))
    close(jax.jit(total)(x), ROWS[:4] + ROWS[4:], rtol=1e-5)


def linear_algebra() -> None:
    """Checks the hosts' LAPACK and sparse functions, in float64 too."""
    with jax.enable_x64(True):
        square = (ROWS.T @ ROWS + np.eye(6)).astype(np.float64)
        close(jnp.linalg.cholesky(square), np.linalg.cholesky(square), rtol=1e-10)
        close(jnp.linalg.eigvalsh(square), np.linalg.eigvalsh(square), rtol=1e-10)
    from jax.experimental import sparse

    close(sparse.BCSR.fromdense(ROWS) @ jnp.eye(6), ROWS)


def random_numbers() -> None:
    """Checks that random numbers are the same as in this process."""
    drawn = jax.jit(lambda key: jax.random.uniform(key, (4,)))(jax.random.key(0))
    close(drawn, [0.947667, 0.9785799, 0.33229148, 0.46866846], rtol=1e-5)


def exported() -> None:
    """Checks jax.export, and a call of an exported function."""
    made = jax.export.export(jax.jit(jnp.sin))(ROWS)
    close(made.call(ROWS), np.sin(ROWS), rtol=1e-5)


def ahead_of_time() -> None:
    """Checks ahead-of-time lowering, compilation, analysis and execution."""
    compiled = jax.jit(lambda x: x @ x.T).lower(ROWS).compile()
    assert compiled.cost_analysis()
    assert "dot" in (compiled.as_text() or "")
    close(compiled(ROWS), ROWS @ ROWS.T, rtol=1e-4, atol=1e-5)


def errors() -> None:
    """Checks that errors are typed, and that the client continues after them."""
    said = "nothing"
    try:
        jax.block_until_ready(jax.jit(lambda: jnp.zeros(1 << 45, jnp.int8) + 1)())
    except jax.errors.JaxRuntimeError as error:
        said = str(error)
    assert "RESOURCE_EXHAUSTED" in said, said
    sharded()


def program() -> None:
    """Checks jitted functions over both islands as one program."""
    import fairway

    first = jax.jit(lambda x: x * 2)
    second = jax.jit(lambda x: x + 1)

    @fairway.program
    def step(x: jax.Array) -> jax.Array:
        return second(jax.device_put(first(x), CUT[1]))

    close(step(jax.device_put(ROWS, CUT[0])), ROWS * 2 + 1, rtol=1e-6)


CHECKS: dict[str, Callable[[], None]] = {
    "sharded jit and grad": sharded,
    "loops": loops,
    "collectives": collectives,
    "island to island": across,
    "collectives over islands": over_islands,
    "linear algebra": linear_algebra,
    "random": random_numbers,
    "export": exported,
    "ahead of time": ahead_of_time,
    "errors": errors,
    "fairway.program": program,
}


def main() -> None:
    """Runs every check to its end, whatever the results of the others."""
    results = {}
    for name, check in CHECKS.items():
        try:
            check()
        except Exception as error:
            traceback.print_exc(file=sys.stdout)
            results[name] = f"{type(error).__name__}: {error}"
        else:
            results[name] = ""
    print("checks", json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
