"""``fairway.program``: traces Python that calls many jitted functions into one program.

Source: PATHWAYS §3 (Figure 2). The block is traced once: every call of a jitted function becomes a
node on that function's devices, every ``jax.device_put`` a transfer, and where a function takes an
array of other devices, a transfer is inserted. The program is compiled once and then dispatched
with one message, regardless of its number of nodes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.interpreters import mlir
from jax.sharding import NamedSharding

from fairway import mpmd
from fairway.errors import ProgramError
from fairway.tracing.builder import Builder, Value
from fairway.tracing.shardings import is_placed

PROGRAMS_KEPT = 128
"""Compiled programs that one traced function caches, one per signature; the oldest is evicted."""
_struct: Any = jax.ShapeDtypeStruct


def program(function: Callable[..., Any]) -> Wrapped:
    """Traces ``function`` into one program for each new signature of its arguments.

    Args:
        function: calls jitted functions (with shardings of their own, or on arrays that have one)
            and ``jax.device_put``; may take and return any pytrees of arrays. As under ``jax.jit``
            its Python runs only while it is traced.

    Returns:
        A callable with the same result that sends one message to the controller.

    Example:
        >>> @fairway.program
        ... def step(x):
        ...     return on_second_island(on_first_island(x))
    """
    return Wrapped(function)


class Wrapped:
    """A function that runs as one program."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._compiled: dict[Any, Compiled] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the program asynchronously; the results may not be ready when this returns.

        Raises:
            ProgramError: the function cannot be traced into a program.
        """
        leaves, tree = jax.tree.flatten((args, kwargs))
        key = (tree, tuple(_kind(leaf) for leaf in leaves))
        compiled = self._compiled.get(key)
        if compiled is None:
            if len(self._compiled) >= PROGRAMS_KEPT:
                self._compiled.pop(next(iter(self._compiled)))
            compiled = self._compiled[key] = self.lower(*args, **kwargs).compile()
        return compiled.run(leaves)

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Traces the function with arguments of this signature, without compiling or running it.

        Raises:
            ProgramError: it cannot be traced into a program.
        """
        leaves, tree = jax.tree.flatten((args, kwargs))

        def flat(*flat_leaves: Any) -> Any:
            given, named = jax.tree.unflatten(tree, flat_leaves)
            return self._function(*given, **named)

        avals = [_struct(np.shape(leaf), _dtype(leaf)) for leaf in leaves]
        jaxpr, shape = jax.make_jaxpr(flat, return_shape=True)(*avals)
        places = [leaf.sharding if is_placed(leaf) else None for leaf in leaves]
        name = getattr(self._function, "__name__", "program")
        builder = Builder(name, jaxpr, places)
        text, results = builder.build()
        return Lowered(builder, text, results, jax.tree.structure(shape))


def _dtype(leaf: Any) -> np.dtype[Any]:
    return np.dtype(jax.dtypes.canonicalize_dtype(jax.dtypes.result_type(leaf)))


def _kind(leaf: Any) -> Any:
    place = leaf.sharding if is_placed(leaf) else None
    if isinstance(place, NamedSharding):  # trailing unsharded axes may be left out of the spec
        spec = list(place.spec)
        while spec and spec[-1] is None:
            spec.pop()
        place = place.mesh, tuple(spec), place.memory_kind
    return np.shape(leaf), _dtype(leaf), place


class Lowered:
    """A traced program.

    Attributes:
        devices: the devices that the numbers in the text refer to.
        nodes: computations and transfers.
    """

    def __init__(self, builder: Builder, text: str, results: list[Value], tree: Any) -> None:
        self.devices: list[Any] = builder.devices
        self.nodes = builder.nodes
        self._text = text
        self._builder = builder
        self._results = results
        self._tree = tree

    def as_text(self) -> str:
        """Returns the program as IFRT IR."""
        return self._text

    def compile(self) -> Compiled:
        """Compiles every function for its devices.

        Raises:
            ProgramError: the program's devices are not of Fairway's islands.
            jax.errors.JaxRuntimeError: a function cannot be compiled.
        """
        if getattr(self.devices[0], "island", None) is None:
            raise ProgramError(
                f"cannot compile the program {self._builder.name!r} for "
                f"{self.devices[0].platform!r} devices of this process; expected islands of "
                "Fairway; try `fairway run SCRIPT`"
            )
        library = mpmd.library()
        with mpmd.context() as context:
            module = mlir.ir.Module.parse(self._text, context)
            executable = library.compile_mpmd(
                self.devices[0].client,
                module,
                self.devices,
                [result.aval for result in self._results],
                [result.sharding for result in self._results],
                mpmd.compile_options(module),
            )
        return Compiled(executable, self._builder, self._tree)


class Compiled:
    """A program compiled for its devices."""

    def __init__(self, executable: Any, builder: Builder, tree: Any) -> None:
        self._executable = executable
        self._inputs = builder.inputs
        self._constants = [
            jax.device_put(constant, value.sharding)
            for constant, value in zip(
                builder.constants, builder.inputs[: len(builder.constants)], strict=True
            )
        ]
        self._tree = tree

    def run(self, leaves: Sequence[Any]) -> Any:
        """Runs the program.

        Args:
            leaves: the flattened arguments, of the signature it was lowered for.

        Returns:
            The function's results.
        """
        placed = list(self._constants)
        for leaf, value in zip(leaves, self._inputs[len(placed) :], strict=True):
            if isinstance(leaf, jax.Array) and leaf.sharding == value.sharding:
                placed.append(leaf)
            else:
                placed.append(jax.device_put(np.asarray(leaf, value.aval.dtype), value.sharding))
        results = self._executable.execute(tuple(placed))
        return jax.tree.unflatten(self._tree, results)

    def as_text(self) -> str:
        """Returns the compiled program, as the controller has it."""
        return str(self._executable.get_hlo_text())
