"""Computations of a set duration, so that CPU devices act as accelerators of a fixed speed.

A core's speed varies with other load of its machine, by a factor of two on shared ones, and devices
that compute on the cores that clients and controller need are slowed by them. Here a computation
records its start, computes, and sleeps until its time is over: its device is busy, the cores are
not, and all computations take the same time, in Fairway and in plain JAX.

Two XLA custom calls implement this, built from ``paced.c`` with the machine's C compiler. Fairway's
hosts load them because a client requests an input of this module (:func:`on_hosts`).
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
BEGIN, END = "paced_begin", "paced_end"
ALLOWED: dict[str, Any] = {
    "input_modules": (MODULE,),
    "input_path": (FOLDER,),
    "custom_calls": (BEGIN, END),
}
"""Settings of a run whose hosts may load the custom calls."""

_struct: Any = jax.ShapeDtypeStruct
_wait: Any = jax.block_until_ready
_ffi: Any = jax.ffi
_over: Any = jax.sharding.PartitionSpec


def _library() -> Path:
    """Returns the custom calls' library, built if it does not exist."""
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
    """Registers the custom calls with XLA in this process."""
    library = ctypes.CDLL(str(_library()))
    for name in (BEGIN, END):
        _ffi.register_ffi_target(name, _ffi.pycapsule(library[name]), platform="cpu")


def begin(value: Any) -> tuple[Any, Any]:
    """Records the start of a computation on this value; returns the value and the start."""
    results = (_like(value), _struct((8,), jnp.uint8))
    call = _ffi.ffi_call(BEGIN, results, input_output_aliases={0: 0})
    value, began = call(value)
    return value, began


def end(value: Any, began: Any, seconds: float) -> Any:
    """Waits until ``seconds`` after ``began``; returns the value."""
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
    """Makes a function of parameters and an array take a set time, and its gradient another.

    Args:
        function: the computation.
        forward_s: its duration in seconds.
        backward_s: duration of its gradient, and of the reduction of the parameters' gradient over
            the devices.
        devices: where it runs; the first axis of arrays is sharded over them, parameters are
            replicated. None uses the axis "data" over which it is mapped.
        in_row: whether other functions in the same computation depend on the gradient of its array,
            which then waits as well.
    """
    mesh = None if devices is None else jax.sharding.Mesh(np.array(devices), ("data",))
    cut, whole = _over("data"), _over()

    def on_each(call: Any, takes: Any, gives: Any) -> Any:
        if devices is not None and len(devices) == 1:
            return call

        def mapped(*arguments: Any) -> Any:
            # Where a mesh is set already, it is the same one.
            own = mesh if jax.sharding.get_abstract_mesh().empty else None
            shards = jax.shard_map(call, mesh=own, in_specs=takes, out_specs=gives, check_vma=False)
            return shards(*arguments)

        return mapped

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
    """Makes Fairway's hosts of these devices, of one island, load the custom calls.

    The run must allow it: :data:`ALLOWED`.
    """
    import fairway  # not needed for plain JAX

    mesh = jax.sharding.Mesh(np.array(devices), ("device",))
    sharding = jax.sharding.NamedSharding(mesh, _over())
    like = _struct((), np.float32, sharding=sharding)
    _wait(fairway.inputs(f"{MODULE}:nothing", like=like, prefetch=1)())


def nothing(_: Any) -> Iterator[np.ndarray]:
    """Input for which hosts import this module."""
    yield np.zeros((), np.float32)


def _like(value: Any) -> Any:
    return _struct(value.shape, value.dtype)


_register()
