"""Random JAX programs over a mesh, for comparison with the same program on one device."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

SHAPES = [(8, 16), (16, 8), (16, 16), (8, 8), (16,), (8, 8, 4), (32, 8)]
ELEMENTS_MAX = 4096
Array = Any
Operation = Callable[[random.Random, Array], Array]


def meshes() -> list[Mesh]:
    """Returns meshes of eight devices, in which islands are major, minor or in the middle."""
    devices = np.array(jax.devices())
    two, cube = devices.reshape(2, 4), devices.reshape(2, 2, 2)
    return [
        Mesh(devices, ("a",)),
        Mesh(two, ("a", "b")),
        Mesh(devices.reshape(4, 2), ("a", "b")),
        Mesh(cube, ("a", "b", "c")),
        Mesh(two.T, ("a", "b")),
        Mesh(devices[::-1].reshape(2, 4), ("a", "b")),
        Mesh(cube.transpose(1, 0, 2), ("a", "b", "c")),
        Mesh(devices.reshape(1, 8), ("a", "b")),
    ]


def random_spec(choose: random.Random, mesh: Mesh, shape: tuple[int, ...]) -> P:
    """Returns a sharding of an array of this shape that divides it evenly."""
    names = list(mesh.axis_names)
    choose.shuffle(names)
    axes: list[Any] = []
    for extent in shape:
        own: list[str] = []
        parts = 1
        while names and choose.random() < 0.5 and extent % (parts * mesh.shape[names[0]]) == 0:
            own.append(names.pop(0))
            parts *= mesh.shape[own[-1]]
        axes.append(tuple(own) or None)
    return P(*axes)


def _axis(choose: random.Random, x: Array) -> int:
    return choose.randrange(x.ndim)


def _matmul(_: random.Random, x: Array) -> Array:
    return 0.1 * (x @ jnp.swapaxes(x, -1, -2) if x.ndim >= 2 else jnp.outer(x, x))


def _convolution(_: random.Random, x: Array) -> Array:
    if x.ndim != 2:
        return x
    kernel = jnp.full((2, 1, 3, 3), 0.1)
    return lax.conv_general_dilated(x[None, None], kernel, (1, 1), "SAME")[0, 0]


def _scan(_: random.Random, x: Array) -> Array:
    step = lambda c, i: (jnp.tanh(c + i * 0.1 * c.mean()), c.sum())  # noqa: E731
    return lax.scan(step, x, jnp.arange(3.0))[0]


def _scan_over(choose: random.Random, x: Array) -> Array:
    return lax.scan(lambda c, a: (c * 0.5 + jnp.sin(a), c), x[0] * 0, x)[choose.randrange(2)]


def _update(_: random.Random, x: Array) -> Array:
    row = jnp.argmax(x.reshape(-1)) % x.shape[0]
    return lax.dynamic_update_slice(x, x[:1] * 3, (row, *(0,) * (x.ndim - 1)))


def _halved(choose: random.Random, x: Array) -> Array:
    axis = _axis(choose, x)
    if choose.random() < 0.5:
        return lax.slice_in_dim(x, 0, max(1, x.shape[axis] // 2), axis=axis)
    return lax.slice_in_dim(x, 0, x.shape[axis], 2, axis=axis)


def _reduced(choose: random.Random, x: Array) -> Array:
    reduce = choose.choice([jnp.sum, jnp.max, jnp.mean, jnp.min, jnp.prod])
    return reduce(x * 0.3, axis=_axis(choose, x), keepdims=choose.random() < 0.5)


def _embedded(_: random.Random, x: Array) -> Array:
    return x[(jnp.abs(x).reshape(-1)[:8] * 10).astype(int) % x.shape[0]]


def _padded(choose: random.Random, x: Array) -> Array:
    return jnp.pad(x, [(choose.randrange(2), choose.randrange(3)) for _ in x.shape])


def _noisy(choose: random.Random, x: Array) -> Array:
    return x + jax.random.normal(jax.random.key(choose.randrange(99)), x.shape)


def _branch(_: random.Random, x: Array) -> Array:
    return lax.cond(x.sum() > 0, lambda a: a - a.mean(0), lambda a: a * 2, x)


OPERATIONS: dict[str, Operation] = {
    "tanh": lambda _, x: jnp.tanh(x),
    "gelu": lambda _, x: jax.nn.gelu(x),
    "matmul": _matmul,
    "reduce": _reduced,
    "softmax": lambda q, x: jax.nn.softmax(x, axis=_axis(q, x)),
    "transpose": lambda q, x: jnp.transpose(x, q.sample(range(x.ndim), x.ndim)),
    "reshape": lambda q, x: x.reshape(q.choice([(-1,), (2, -1), (-1, 4), (4, 2, -1)])),
    "scan": _scan,
    "scan over": _scan_over,
    "convolution": _convolution,
    "gather": lambda _, x: jnp.take(x, jnp.arange(4) * 3 % x.shape[0], axis=0),
    "sort": lambda q, x: jnp.sort(x, axis=_axis(q, x)),
    "cumsum": lambda q, x: jnp.cumsum(x * 0.2, axis=_axis(q, x)),
    "random": _noisy,
    "slice": _halved,
    "pad": _padded,
    "concatenate": lambda q, x: jnp.concatenate([x, x * 2], axis=_axis(q, x)),
    "roll": lambda q, x: jnp.roll(x, q.randrange(5), axis=_axis(q, x)),
    "update": _update,
    "scatter": lambda _, x: x.at[jnp.arange(4) * 3 % x.shape[0]].add(1.5),
    "one hot": lambda _, x: jax.nn.one_hot(jnp.arange(8) % 4, 4) * x.mean(),
    "argmax": lambda q, x: 0.1 * jnp.argmax(x, axis=_axis(q, x)).astype("f"),
    "cond": _branch,
    "embed": _embedded,
    "loop": lambda _, x: lax.fori_loop(0, 3, lambda i, c: c + 0.1 * i * jnp.flip(c, 0), x),
    "sort pairs": lambda _, x: lax.sort((x, x * 2), dimension=0, num_keys=1)[1],
    "top k": lambda _, x: lax.top_k(x, 2)[0],
    "reverse": lambda q, x: jnp.flip(x, _axis(q, x)),
    "logsumexp": lambda _, x: jax.nn.logsumexp(x, axis=-1),
    "checkpoint": lambda _, x: jax.checkpoint(lambda a: jnp.sin(jnp.cos(a)))(x),
}
"""Operations by name, each of an array; random numbers choose its details."""
WITHOUT_GRADIENT = {
    "while": lambda _, x: lax.while_loop(
        lambda c: jnp.abs(c).sum() < 500, lambda c: c * 1.5 + 0.1, x
    )
}


class RandomProgram:
    """A random program and its arguments.

    Attributes:
        names: its operations.
        arguments: its arguments, on no device.
        specs: how they are sharded.
        function: the program.

    Args:
        seed: chooses everything.
        mesh: the mesh that arrays are sharded over.
    """

    def __init__(self, seed: int, mesh: Mesh) -> None:
        choose = random.Random(seed)
        numbers = np.random.default_rng(seed)
        self.arguments = [
            numbers.normal(size=choose.choice(SHAPES)).astype("f")
            for _ in range(choose.randint(2, 3))
        ]
        self.specs = [random_spec(choose, mesh, one.shape) for one in self.arguments]
        is_gradient = choose.random() < 0.3
        known = OPERATIONS if is_gradient else OPERATIONS | WITHOUT_GRADIENT
        self.names = [choose.choice(sorted(known)) for _ in range(choose.randint(2, 7))]
        self._seeds = [choose.randrange(10**9) for _ in self.names]
        self._known = known
        self.function = self._results
        if is_gradient:
            self.names.append("gradient")
            self.function = jax.grad(self._loss, argnums=tuple(range(len(self.arguments))))

    def _values(self, arguments: tuple[Array, ...]) -> list[Array]:
        values = list(arguments)
        for name, seed in zip(self.names, self._seeds, strict=False):
            choose = random.Random(seed)
            made = self._known[name](choose, choose.choice(values))
            if made.ndim and 0 < made.size <= ELEMENTS_MAX:
                values.append(made)
        return values

    def _results(self, *arguments: Array) -> list[Array]:
        values = self._values(arguments)
        return [values[-1], values[len(values) // 2]]

    def _loss(self, *arguments: Array) -> Array:
        return sum(jnp.tanh(value * 0.3).sum() for value in self._values(arguments))

    def difference(self, mesh: Mesh) -> float:
        """Returns the largest difference, relative to 1 or more, from the program on one device."""
        placed = [
            jax.device_put(one, NamedSharding(mesh, spec))
            for one, spec in zip(self.arguments, self.specs, strict=True)
        ]
        found = jax.tree.leaves(jax.jit(self.function)(*placed))
        alone = jax.device_put(self.arguments, jax.devices()[0])
        expected = jax.tree.leaves(jax.jit(self.function)(*alone))
        return max(
            float(np.max(np.abs(np.asarray(a) - b) / np.maximum(1, np.abs(b))))
            for a, b in zip(found, map(np.asarray, expected), strict=True)
        )
