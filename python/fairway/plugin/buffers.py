"""Buffers of this process in place of a device's, for functions that write their results in place.

``jax.experimental.buffer_callback`` gives a function the buffers of its operands and results. A
host sends copies of both, and writes back what the function has made of the results.
"""

from collections.abc import Callable
from typing import Any

import numpy as np


class Buffer:
    """An array with the interface of JAX's buffers.

    Attributes:
        array: its elements.
        writeable: whether they may be written.
    """

    def __init__(self, array: "np.ndarray[Any, Any]", writeable: bool) -> None:
        self._elements = array  # numpy exports only arrays that can be written
        self.array = array.view()
        self.array.flags.writeable = self.writeable = writeable

    @property
    def dtype(self) -> "np.dtype[Any]":
        """The element type."""
        found: np.dtype[Any] = self.array.dtype
        return found

    @property
    def shape(self) -> tuple[int, ...]:
        """The extents."""
        return tuple(self.array.shape)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self.array.ndim

    @property
    def __array_interface__(self) -> dict[str, Any]:
        if self.array.dtype.isbuiltin != 1:
            raise AttributeError("the interface has no name for this element type")
        return self.array.__array_interface__

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> "np.ndarray[Any, Any]":
        if dtype is None or dtype == self.array.dtype:
            return self.array.copy() if copy else self.array
        return self.array.astype(dtype)

    def __dlpack__(self, **options: Any) -> Any:
        return self._elements.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


class ExecutionContext:
    """Where a function is called: while the program runs, on a CPU."""

    @property
    def stage(self) -> Any:
        """The stage of the program's life."""
        from jax.experimental import buffer_callback

        return buffer_callback.ExecutionStage.EXECUTE

    @property
    def stream(self) -> int:
        """The stream of a GPU, which this process has none of."""
        from jax.errors import JaxRuntimeError

        raise JaxRuntimeError(
            "UNIMPLEMENTED: XLA FFI GPU context is not available: the function runs in the "
            "client's process, on copies of the buffers"
        )


def on_buffers(
    function: Callable[..., Any], operands: int, aliases: dict[int, int]
) -> Callable[..., Any]:
    """Returns a function of arrays that calls one of buffers.

    Args:
        function: takes a context, the buffers of its operands, and those of its results.
        operands: number of its operands.
        aliases: operand whose memory a result shares, by result.
    """

    def on_arrays(*arrays: Any) -> list[Any]:
        copies = [one.copy() for one in arrays]
        for result, operand in aliases.items():
            copies[operands + result] = copies[operand]
        given = [Buffer(one, index >= operands) for index, one in enumerate(copies)]
        function(ExecutionContext(), *given)
        return copies[operands:]

    return on_arrays
