"""Array elements as bytes: regions of them, layouts other than row-major, and strings."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

Elements = np.ndarray[Any, Any]

STRING = np.dtypes.StringDType()
STRING_TAG = 0x0A
"""What each string of an array begins with: as field 1 of ``xla.ifrt.StringArrayProto``."""


@functools.cache
def dtype_of(name: str) -> np.dtype[Any]:
    """Returns the numpy element type called ``name``, including those of ml_dtypes."""
    if name == "token":
        return np.dtype(np.bool_)
    return np.dtype(getattr(ml_dtypes, name, name))


def name_of(dtype: np.dtype[Any]) -> str:
    """Returns the name of an element type, as :func:`dtype_of` reads it."""
    return "T" if is_string(dtype) else dtype.name


def is_string(dtype: np.dtype[Any]) -> bool:
    """Returns whether elements are strings, which arrays of JAX hold as objects."""
    return dtype == STRING or dtype == np.object_


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
    if is_string(dtype):
        return _strings_in(bytes(data), shape)
    if strides is None:
        if 0 in shape or (dtype == np.bool_ and len(data) == 0):
            return np.zeros(shape, dtype)
        return np.frombuffer(data, dtype).reshape(shape)
    if 0 in shape:
        return np.zeros(shape, dtype)
    return np.ascontiguousarray(np.ndarray(shape, dtype, data, strides=strides)).reshape(shape)


def bytes_of(elements: Elements) -> memoryview:
    """Returns the bytes of elements, row-major."""
    if is_string(elements.dtype):
        return memoryview(b"".join(_string_bytes(elements)))
    contiguous = np.ascontiguousarray(elements).reshape(-1)
    return contiguous.view(np.uint8).data


def laid_out(elements: Elements, strides: list[int] | None) -> Elements:
    """Returns the smallest memory region that holds ``elements`` with these strides."""
    if strides is None or elements.size == 0 or elements.ndim == 0 or is_string(elements.dtype):
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


def _string_bytes(elements: Elements) -> Iterator[bytes]:
    """Yields tag, length (varint) and UTF-8 of each string."""
    for element in elements.reshape(-1).tolist():
        text = element if isinstance(element, bytes) else str(element).encode()
        length = len(text)
        head = bytearray([STRING_TAG])
        while length > 0x7F:
            head.append(length & 0x7F | 0x80)
            length >>= 7
        head.append(length)
        yield bytes(head)
        yield text


def _strings_in(data: bytes, shape: tuple[int, ...]) -> Elements:
    """Reads strings.

    Raises:
        ValueError: they are malformed, not UTF-8, or not as many as the shape says.
    """
    count = int(np.prod(shape, dtype=np.int64))
    found = list(itertools.islice(_read_strings(data), count + 1))
    if len(found) != count:
        raise ValueError(f"{len(found)} strings are given for an array of shape {shape}")
    return np.array(found, dtype=STRING).reshape(shape)


def _read_strings(data: bytes) -> Iterator[str]:
    place = 0
    try:
        while place < len(data):
            if data[place] != STRING_TAG:
                raise ValueError(f"byte {place} of an array of strings is no string's beginning")
            place, length, shift = place + 1, 0, 0
            while data[place] & 0x80:
                length |= (data[place] & 0x7F) << shift
                place, shift = place + 1, shift + 7
            length |= data[place] << shift
            place += 1
            if place + length > len(data):
                raise IndexError
            yield data[place : place + length].decode()
            place += length
    except IndexError:
        raise ValueError("an array of strings ends within a string") from None
