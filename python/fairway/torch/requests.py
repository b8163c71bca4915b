"""What PyTorch asks of a collective: its reduction, its name and its tensors, checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C._distributed_c10d import ReduceOp

from fairway.communication.team import Vector
from fairway.torch.tensors import added_type, fill, in_place, name_of

__all__ = [
    "are_small",
    "check_types",
    "copy_back",
    "counts",
    "limit_of",
    "named",
    "reduction_of",
    "scale",
    "scatter_flat",
]

REDUCTIONS = {
    ReduceOp.SUM: "sum",
    ReduceOp.AVG: "sum",
    ReduceOp.PREMUL_SUM: "sum",
    ReduceOp.PRODUCT: "product",
    ReduceOp.MAX: "max",
    ReduceOp.MIN: "min",
    ReduceOp.BAND: "and",
    ReduceOp.BOR: "or",
    ReduceOp.BXOR: "xor",
}
OF_BITS = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
OF_COMPLEX = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PREMUL_SUM)
COALESCED_BYTES = 1 << 20
"""Coalesced tensors of at most this total size are sent as one."""


def limit_of(opts: Any) -> float:
    """Returns the timeout of an operation in seconds; 0 if it has none of its own."""
    given = getattr(opts, "timeout", None)
    seconds = given.total_seconds() if given is not None else 0.0
    return float(max(0.0, seconds))


def reduction_of(what: str, op: Any, tensor: Tensor) -> tuple[str, Any]:
    """Returns the reduction operator, and the factor that elements are multiplied by before."""
    kind = op.op if hasattr(op, "op") else op
    dtype = tensor.dtype
    is_exact = not dtype.is_floating_point and not dtype.is_complex
    fits = kind in REDUCTIONS
    if kind in OF_BITS:
        fits = is_exact
    elif kind == ReduceOp.AVG:
        fits = not is_exact
    if dtype.is_complex:
        fits = kind in OF_COMPLEX
    if not fits:
        name = getattr(kind, "name", str(kind))
        raise ValueError(
            f"the reduction {name} of {name_of(dtype)} is not there ({what}); there are SUM, "
            "PRODUCT, MAX and MIN of numbers, AVG and PREMUL_SUM of floating-point ones, BAND, BOR "
            "and BXOR of integers, and SUM and AVG of complex numbers"
        )
    added_type(dtype)
    factor = getattr(op, "factor", None) if kind == ReduceOp.PREMUL_SUM else None
    return REDUCTIONS[kind], factor


def named(what: str, tensor: Tensor, op: Any = None, root: int | None = None) -> str:
    """Returns what ranks compare of a collective besides its sizes."""
    text = f"{what} of {tensor.numel()} {name_of(tensor.dtype)}"
    if op is not None:
        kind = op.op if hasattr(op, "op") else op
        text = f"{text} ({getattr(kind, 'name', kind)})"
    return text if root is None else f"{text}, root {root}"


def scale(vector: Vector, factor: Any) -> None:
    """Multiplies elements in place if there is a factor."""
    if factor is not None:
        vector *= np.asarray(float(factor)).astype(vector.dtype)


def copy_back(tensor: Tensor) -> Callable[[Vector], None]:
    """Returns what copies a result back, if the vector does not share the tensor's memory."""
    if in_place(tensor):
        return lambda _: None
    return lambda result: fill(tensor, result)


def counts(tensors: Sequence[Tensor]) -> Any:
    """Returns the number of elements of each tensor."""
    return np.array([one.numel() for one in tensors], np.int64)


def check_types(what: str, tensors: Sequence[Tensor]) -> None:
    """Checks that tensors are of one type.

    Raises:
        ValueError: they are not.
    """
    found = {one.dtype for one in tensors}
    if len(found) > 1:
        names = ", ".join(sorted(name_of(one) for one in found))
        raise ValueError(f"{what} was given tensors of {names}; expected one type")


def are_small(tensors: Sequence[Tensor]) -> bool:
    """Returns whether several tensors are better sent as one."""
    kinds = {(one.dtype, one.device, one.is_sparse) for one in tensors}
    size = sum(one.numel() * one.element_size() for one in tensors)
    return len(tensors) > 1 and len(kinds) == 1 and size <= COALESCED_BYTES


def scatter_flat(tensors: Sequence[Tensor], whole: Tensor) -> None:
    """Copies the parts of a flat tensor to tensors of their sizes."""
    at = 0
    with torch.no_grad():
        for one in tensors:
            one.detach().copy_(whole[at : at + one.numel()].view(one.shape))
            at += one.numel()
