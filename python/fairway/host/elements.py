"""Array elements as bytes: regions of them, and layouts other than row-major."""

from __future__ import annotations

from typing import Any

import numpy as np

Elements = np.ndarray[Any, Any]


def region_of(elements: Elements, start: list[int], size: list[int]) -> Elements:
    """Returns a view of a region, whose last axes are those of ``elements``."""
    rank = elements.ndim
    if rank == 0:
        return elements
    region = zip(start[-rank:], size[-rank:], strict=True)
    return elements[tuple(slice(low, low + extent) for low, extent in region)]


def elements_in(
    data: Any, dtype: np.dtype[Any], shape: tuple[int, ...], strides: list[int] | None
) -> Elements:
    """Returns the elements in ``data``, without a copy if they are row-major."""
    if strides is None:
        if 0 in shape or (dtype == np.bool_ and len(data) == 0):
            return np.zeros(shape, dtype)
        return np.frombuffer(data, dtype).reshape(shape)
    if 0 in shape:
        return np.zeros(shape, dtype)
    return np.ascontiguousarray(np.ndarray(shape, dtype, data, strides=strides)).reshape(shape)


def bytes_of(elements: Elements) -> memoryview:
    """Returns the bytes of elements, row-major."""
    contiguous = np.ascontiguousarray(elements).reshape(-1)
    return contiguous.view(np.uint8).data


def laid_out(elements: Elements, strides: list[int] | None) -> Elements:
    """Returns the smallest memory region that holds ``elements`` with these strides."""
    if strides is None or elements.size == 0 or elements.ndim == 0:
        return elements
    order = sorted(range(elements.ndim), key=lambda axis: -strides[axis])
    packed = np.ascontiguousarray(elements.transpose(order))
    expected = [strides[axis] for axis in order]
    if all(
        extent == 1 or stride == wanted
        for extent, stride, wanted in zip(packed.shape, packed.strides, expected, strict=True)
    ):
        return packed
    reach = sum(
        (extent - 1) * stride for extent, stride in zip(elements.shape, strides, strict=True)
    )
    region = np.zeros(reach + elements.itemsize, np.uint8)
    np.ndarray(elements.shape, elements.dtype, region, strides=strides)[...] = elements
    return region
