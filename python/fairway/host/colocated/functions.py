"""Loads and runs functions, in the process of their client."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental.colocated_python import serialization

from fairway.host.colocated.devices import Devices
from fairway.host.colocated.line import ShardHeader
from fairway.host.colocated.persistence import PREFIX, persistence_of
from fairway.host.colocated.shipped import ShippedModules
from fairway.host.elements import bytes_of, dtype_of, elements_in, name_of

__all__ = ["Functions", "NotAsSpecifiedError", "described"]

MESSAGE_CHARACTERS = 20_000
"""Most characters of an error's own text that are reported."""
TRACEBACK_CHARACTERS = 8000
"""Most characters of a traceback that are reported; its end is kept."""


class NotAsSpecifiedError(TypeError):
    """A function has returned something else than it was specialized for."""


@dataclasses.dataclass(frozen=True)
class _Function:
    """A function with what it takes and returns.

    Attributes:
        call: the function.
        arguments: tree and leaves of ``(args, kwargs)``.
        results: tree and leaves of what it returns.
        has_x64: whether its client has enabled 64-bit types.
    """

    call: Callable[..., Any]
    arguments: tuple[Any, Sequence[Any]]
    results: tuple[Any, Sequence[Any]]
    has_x64: bool


class Functions:
    """The functions that a client has loaded here.

    Args:
        devices: this process's devices.
    """

    def __init__(self, devices: Devices) -> None:
        self._devices = devices
        self._places = {device: index for index, device in enumerate(devices.own)}
        self._modules = ShippedModules()
        self._functions: dict[int, _Function] = {}

    def load(self, executable: int, program: bytes) -> None:
        """Loads a function.

        Raises:
            Exception: any of its modules, or of unpickling it.
        """
        if program.startswith(PREFIX):
            request = persistence_of(program[len(PREFIX) :], self._devices)
            tree = jax.tree.structure((tuple(request.arguments), {}))
            results = jax.tree.structure(request.results), request.results
            self._functions[executable] = _Function(
                request.call, (tree, request.arguments), results, True
            )
            return
        pickled, has_x64 = self._modules.take(program)
        with jax.enable_x64(has_x64 is not False):
            function, in_tree, in_leaves, out_tree, out_leaves, _ = serialization._deserialize(
                pickled
            )
        if has_x64 is None:
            kinds = [leaf.dtype for leaf in (*in_leaves, *out_leaves)]
            has_x64 = any(np.dtype(kind).kind in "iufc" and _is_wide(kind) for kind in kinds)
        function = _Function(function, (in_tree, in_leaves), (out_tree, out_leaves), has_x64)
        self._functions[executable] = function

    def drop(self, executable: int) -> None:
        """Forgets a function, and with it the objects that only it refers to."""
        self._functions.pop(executable, None)

    def run(
        self, executable: int, arguments: list[list[ShardHeader]], parts: list[bytearray]
    ) -> tuple[list[list[ShardHeader]], list[Any]]:
        """Runs a function.

        Args:
            executable: its number.
            arguments: the shards of each argument.
            parts: their bytes, in the same order.

        Returns:
            The shards of each result, and their bytes.

        Raises:
            KeyError: it was not loaded.
            NotAsSpecifiedError: it returns something else than it was specialized for.
            Exception: any that it raises.
        """
        function = self._functions[executable]
        left = iter(parts)
        with jax.enable_x64(function.has_x64):
            tree, leaves = function.arguments
            given = [
                self._assembled(leaf, shards, [next(left) for _ in shards])
                for leaf, shards in zip(leaves, arguments, strict=True)
            ]
            args, kwargs = jax.tree.unflatten(tree, given)
            results = self._checked(function, function.call(*args, **kwargs))
        headers: list[list[ShardHeader]] = []
        data: list[Any] = []
        for result in results:
            headers.append([])
            for shard in result.addressable_shards:
                elements = np.asarray(shard.data)
                place = self._places[shard.device]
                headers[-1].append(
                    ShardHeader(place, name_of(elements.dtype), list(elements.shape))
                )
                data.append(bytes_of(elements))
        return headers, data

    def _assembled(self, leaf: Any, shards: list[ShardHeader], parts: list[bytearray]) -> Any:
        """Returns an argument as an array of this process."""
        singles = [
            jax.device_put(
                elements_in(part, dtype_of(shard.dtype), tuple(shard.shape), None),
                self._devices.own[shard.device],
            )
            for shard, part in zip(shards, parts, strict=True)
        ]
        return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, singles)

    def _checked(self, function: _Function, returned: Any) -> list[Any]:
        """Returns the leaves of a function's results.

        Raises:
            NotAsSpecifiedError: they are not what it was specialized for.
        """
        wanted, specs = function.results
        leaves, tree = jax.tree.flatten(returned)
        if tree != wanted:
            raise NotAsSpecifiedError(f"it returned {tree}; it was specialized to return {wanted}")
        for leaf, spec in zip(leaves, specs, strict=True):
            if not isinstance(leaf, jax.Array) or (leaf.shape, leaf.dtype) != (
                spec.shape,
                spec.dtype,
            ):
                given = f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "dtype") else type(leaf)
                raise NotAsSpecifiedError(
                    f"it returned {given}; it was specialized to return a jax.Array of "
                    f"{spec.dtype}{list(spec.shape)}"
                )
            shape = spec.sharding.shard_shape(spec.shape)
            shards = {shard.device: shard.data.shape for shard in leaf.addressable_shards}
            if shards != dict.fromkeys(spec.sharding.addressable_devices, shape):
                raise NotAsSpecifiedError(
                    f"it returned an array of {spec.dtype}{list(spec.shape)} that is sharded "
                    f"otherwise than it was specialized for: {leaf.sharding}"
                )
        return leaves


def described(error: BaseException) -> str:
    """Formats an error of a function for its client, without this package's own frames."""
    frames = traceback.extract_tb(error.__traceback__)
    while frames and Path(frames[0].filename).parent == Path(__file__).parent:
        frames.pop(0)
    trace = "".join(traceback.format_list(frames))[-TRACEBACK_CHARACTERS:]
    try:
        text = str(error)
    except Exception:  # it is the user's own
        text = "(its text cannot be had)"
    if len(text) > MESSAGE_CHARACTERS:
        text = f"{text[:MESSAGE_CHARACTERS]}... ({len(text)} characters)"
    found = f"{type(error).__name__}: {text}\n{trace}"
    return found.encode(errors="backslashreplace").decode()


def _is_wide(dtype: Any) -> bool:
    kind = np.dtype(dtype)
    size: int = kind.itemsize
    return size == (16 if kind.kind == "c" else 8)
