"""Computations that take a set time, so that CPU devices stand for accelerators of a fixed speed.

A core's speed varies with what else its machine does, by a factor of two on shared ones, and
devices that compute on the cores that clients and controller need are slowed by them. Here a
computation notes when it begins, computes, and sleeps until its time is over: its device is busy,
the cores are not, and everybody's computations take the same time, in Fairway or in JAX without it.

Two XLA custom calls do it, built from ``paced.c`` with the machine's C compiler. Hosts of Fairway
load them because a client asks for an input of this module (:func:`on_hosts`).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.metadata
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

__all__ = ["ALLOWED", "begin", "end", "on_hosts", "paced"]

FOLDER = Path(__file__).resolve().parent
MODULE = "paced"
ALLOWED: dict[str, Any] = {"input_modules": (MODULE,), "input_path": (FOLDER,)}
"""Settings of a run whose hosts may load the custom calls."""
BEGIN, END = "paced_begin", "paced_end"

_struct: Any = jax.ShapeDtypeStruct
_wait: Any = jax.block_until_ready
_ffi: Any = jax.ffi
_over: Any = jax.sharding.PartitionSpec


def _library() -> Path:
    """The custom calls, built if they are not there yet."""
    source = FOLDER / "paced.c"
    about = source.read_bytes() + importlib.metadata.version("jaxlib").encode()
    built = FOLDER.parent / f"out/paced-{hashlib.sha256(about).hexdigest()[:12]}.so"
    if not built.exists():
        built.parent.mkdir(exist_ok=True)
        fresh = built.with_suffix(f".{os.getpid()}")  # several processes may build at once
        include = f"-I{Path(jaxlib.__file__).parent / 'include'}"
        command = ["cc", "-O2", "-shared", "-fPIC", include, str(source), "-o", str(fresh)]
        subprocess.run(command, check=True)
        fresh.rename(built)
    return built


@functools.cache
def _register() -> None:
    """Tells XLA of the custom calls of this process."""
    library = ctypes.CDLL(str(_library()))
    for name in (BEGIN, END):
        _ffi.register_ffi_target(name, _ffi.pycapsule(library[name]), platform="cpu")


def begin(value: Any) -> tuple[Any, Any]:
    """Notes when something is computed from this value; returns both."""
    results = (_like(value), _struct((8,), jnp.uint8))
    call = _ffi.ffi_call(BEGIN, results, input_output_aliases={0: 0})
    value, began = call(value)
    return value, began


def end(value: Any, began: Any, seconds: float) -> Any:
    """Waits until so much time is over since then; returns the value."""
    takes = np.frombuffer(np.int64(round(seconds * 1e9)).tobytes(), np.uint8)
    call = _ffi.ffi_call(END, _like(value), input_output_aliases={0: 0})
    return call(value, began, takes)


def paced(
    function: Callable[[Any, Any], Any],
    forward_s: float,
    backward_s: float,
    devices: Sequence[jax.Device] | None,
    in_row: bool = False,
) -> Callable[[Any, Any], Any]:
    """A function of parameters and an array that takes a set time, and its gradient another.

    Args:
        function: what is computed.
        forward_s: seconds of it.
        backward_s: seconds of its gradient, once it is known, and of the sum of the parameters'
            over the devices.
        devices: that it runs on; the first axis of arrays is cut over them, parameters are on each.
            Without any, those over whose axis "data" it is mapped.
        in_row: are there others in one computation, which go on once the gradient of its array is
            known? Then that waits as well.
    """
    mesh = None if devices is None else jax.sharding.Mesh(np.array(devices), ("data",))
    cut, whole = _over("data"), _over()

    def on_each(call: Any, takes: Any, gives: Any) -> Any:
        if devices is not None and len(devices) == 1:
            return call
        return jax.shard_map(call, mesh=mesh, in_specs=takes, out_specs=gives, check_vma=False)

    started = on_each(begin, cut, (cut, cut))
    ended = on_each(functools.partial(end, seconds=forward_s), (cut, cut), cut)
    pulled = on_each(functools.partial(end, seconds=backward_s), (whole, cut), whole)
    passed = on_each(functools.partial(end, seconds=backward_s), (cut, cut), cut)

    def forward(parameters: Any, value: Any) -> tuple[Any, Any]:
        value, began = started(value)
        made, back = jax.vjp(function, parameters, value)
        return ended(made, began), back

    def backward(back: Any, cotangent: Any) -> Any:
        cotangent, began = started(cotangent)
        gradients, before = back(cotangent)
        if in_row:
            before = passed(before, began)
        (first, *others), tree = jax.tree.flatten(gradients)
        return jax.tree.unflatten(tree, [pulled(first, began), *others]), before

    @jax.custom_vjp
    def result(parameters: Any, value: Any) -> Any:
        value, began = started(value)
        return ended(function(parameters, value), began)

    result.defvjp(forward, backward)
    made: Callable[[Any, Any], Any] = result
    return made


def on_hosts(devices: Sequence[jax.Device]) -> None:
    """Has the hosts of these devices of Fairway, of one island, load the custom calls.

    The run must allow it: :data:`ALLOWED`.
    """
    import fairway  # plain JAX does without

    mesh = jax.sharding.Mesh(np.array(devices), ("device",))
    sharding = jax.sharding.NamedSharding(mesh, _over())
    like = _struct((), np.float32, sharding=sharding)
    _wait(fairway.inputs(f"{MODULE}:nothing", like=like, prefetch=1)())


def nothing(_: Any) -> Iterator[np.ndarray]:
    """The input for whose sake hosts import this module."""
    yield np.zeros((), np.float32)


def _like(value: Any) -> Any:
    return _struct(value.shape, value.dtype)


_register()
