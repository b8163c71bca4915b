"""Converts tensors to vectors that a team transfers, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from fairway.communication.team import Vector

__all__ = ["added", "added_type", "check", "divide", "fill", "finish_kernels", "in_place", "moved"]
__all__ += ["moved_type", "name_of", "rows", "split"]

NUMBERS = {
    torch.float32: "f4",
    torch.float64: "f8",
    torch.float16: "f2",
    torch.bfloat16: "u2",
    torch.bool: "b1",
    torch.int8: "i1",
    torch.int16: "i2",
    torch.int32: "i4",
    torch.int64: "i8",
    torch.uint8: "u1",
    torch.uint16: "u2",
    torch.uint32: "u4",
    torch.uint64: "u8",
    torch.complex64: "f4",
    torch.complex128: "f8",
}
"""numpy's codes of types that can be reduced; a complex number counts as two elements."""


class _Elements:
    """A tensor's memory for numpy; ``Tensor.numpy`` would keep the tensor from being resized."""

    __slots__ = ("__array_interface__", "_tensor")

    def __init__(self, tensor: Tensor, kind: str, size: int) -> None:
        self._tensor = tensor
        self.__array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": (tensor.numel() * tensor.element_size() // size,),
            "typestr": f"{'|' if size == 1 else '<'}{kind}",
            "version": 3,
        }


def name_of(dtype: torch.dtype) -> str:
    """Returns the name of a type without PyTorch's prefix."""
    return str(dtype).removeprefix("torch.")


def _here(tensor: Tensor) -> Tensor:
    """Returns the tensor contiguous in host memory; a copy if it is not."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().cpu()


def _vector(tensor: Tensor, kind: str) -> Vector:
    size = int(kind[1:])
    if tensor.numel() == 0:
        return np.empty(0, kind)
    found: Vector = np.asarray(_Elements(tensor, kind, size))
    return found


def moved_type(dtype: torch.dtype) -> Any:
    """Returns the type for transfers without a reduction: plain bits."""
    return np.dtype(f"u{min(8, dtype.itemsize)}")


def moved(tensor: Tensor) -> Vector:
    """Returns the elements of a tensor as bits to transfer; a copy unless :func:`in_place`."""
    return _vector(_here(tensor), f"u{min(8, tensor.dtype.itemsize)}")


def added_type(dtype: torch.dtype) -> Any:
    """Returns the numpy type in which elements are reduced.

    Raises:
        TypeError: the type cannot be reduced.
    """
    if dtype == torch.bfloat16:
        return np.dtype(ml_dtypes.bfloat16)
    if dtype not in NUMBERS:
        known = ", ".join(sorted(name_of(one) for one in NUMBERS))
        raise TypeError(
            f"elements of type {name_of(dtype)} cannot be combined; expected one of {known}"
        )
    return np.dtype(NUMBERS[dtype])


def added(tensor: Tensor) -> Vector:
    """Returns the elements of a tensor for a reduction; a copy unless :func:`in_place`."""
    kind = added_type(tensor.dtype)
    return _vector(_here(tensor), NUMBERS[tensor.dtype]).view(kind)


def in_place(tensor: Tensor) -> bool:
    """Returns whether a vector of a tensor shares the tensor's memory."""
    is_plain = not tensor.is_conj() and not tensor.is_neg()
    return tensor.is_contiguous() and tensor.device.type == "cpu" and is_plain


def fill(tensor: Tensor, result: Vector) -> None:
    """Copies the elements of a vector into a tensor."""
    if tensor.numel() == 0:
        return
    flat = torch.from_numpy(result.view(np.uint8)).view(tensor.dtype)
    with torch.no_grad():
        tensor.detach().copy_(flat.view(tensor.shape))


def divide(tensor: Tensor, by: int) -> None:
    """Divides the elements of a tensor in place.

    Threads that collect results have autograd modes of their own: there a parameter would join a
    graph, and a tensor that was made in inference mode could not be written to.
    """
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        tensor.detach().div_(by)


def split(tensors: Sequence[Tensor], vectors: Sequence[Vector]) -> None:
    """Copies the elements of each vector into its tensor."""
    for tensor, vector in zip(tensors, vectors, strict=True):
        fill(tensor, vector)


def rows(tensor: Tensor, sizes: Sequence[int], ranks: int) -> list[Tensor]:
    """Splits a tensor by rows, one part for each rank; into equal parts if no sizes are given."""
    if not sizes:
        check(tensor.size(0) % ranks == 0, "all_to_all", tensor)
        sizes = [tensor.size(0) // ranks] * ranks
    if sum(sizes) != tensor.size(0):
        raise ValueError(
            f"all_to_all was given splits of {sum(sizes)} rows for a tensor of {tensor.size(0)}; "
            "expected as many"
        )
    return list(torch.split(tensor, list(sizes)))


def check(holds: bool, what: str, *tensors: Tensor) -> None:
    """Raises an error if the tensors of an operation do not fit each other."""
    if not holds:
        sizes = [one.numel() for one in tensors]
        raise ValueError(
            f"{what} was given tensors of {sizes} elements, which do not fit each other"
        )


def finish_kernels(tensors: Sequence[Tensor]) -> None:
    """Waits for GPU kernels that use tensors to which another thread will write."""
    for place in {one.device for one in tensors if one.is_cuda}:
        torch.cuda.current_stream(place).synchronize()
