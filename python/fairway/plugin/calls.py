"""How arrays of a host callback travel between a host and a client's process.

Arrays are a JSON list of their element types and shapes, preceded by its length in four
little-endian bytes, and their elements, each array row-major from a multiple of 8 bytes on. A token
has no elements. An answer is a byte, and results or the text of an error.
"""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

Arrays = Sequence["np.ndarray[Any, Any] | None"]
"""Arrays, and None for each token."""

ATTRIBUTE = "fairway.callbacks"
"""Attribute of a module: the client's numbers of its functions, by their index in the module."""
ALIGNED = 8
DONE, FAILED = b"\0", b"\1"
ERROR_CHARACTERS = 100_000
"""Longest error; of longer ones the middle is left out."""


def padding(size: int) -> int:
    """Returns the number of bytes that follow ``size`` bytes, so that the next array is aligned."""
    return -size % ALIGNED


def pack(arrays: Arrays) -> bytes:
    """Returns arrays as bytes."""
    described = [None if one is None else [one.dtype.name, list(one.shape)] for one in arrays]
    header = json.dumps(described, separators=(",", ":")).encode()
    parts = [len(header).to_bytes(4, "little"), header]
    parts.append(bytes(padding(4 + len(header))))
    for one in arrays:
        if one is not None:
            elements = one.tobytes()
            parts += [elements, bytes(padding(len(elements)))]
    return b"".join(parts)


def unpack(data: "bytes | memoryview") -> "list[np.ndarray[Any, Any] | None]":
    """Returns the arrays in bytes that :func:`pack` has made, as views.

    Raises:
        ValueError: they are something else.
    """
    import ml_dtypes

    length = int.from_bytes(data[:4], "little")
    described = json.loads(bytes(data[4 : 4 + length]))
    at = 4 + length + padding(4 + length)
    arrays: list[np.ndarray[Any, Any] | None] = []
    for one in described:
        if one is None:
            arrays.append(None)
            continue
        name, shape = one
        dtype = np.dtype(getattr(ml_dtypes, name, name))
        count = int(np.prod(shape, dtype=np.int64))
        arrays.append(
            np.frombuffer(data, dtype, count, at).reshape(shape)
            if count
            else np.zeros(shape, dtype)
        )
        size = count * dtype.itemsize
        at += size + padding(size)
    return arrays


def answer(results: Arrays) -> bytes:
    """Returns the answer with a function's results."""
    return DONE + bytes(ALIGNED - 1) + pack(results)


def failure(text: str) -> bytes:
    """Returns the answer with the text of an error."""
    if len(text) > ERROR_CHARACTERS:
        half = ERROR_CHARACTERS // 2
        text = f"{text[:half]} [...] {text[-half:]}"
    return FAILED + text.encode(errors="replace")


def read_answer(data: "bytes | memoryview") -> "list[np.ndarray[Any, Any] | None] | str":
    """Returns the results in an answer, or the text of its error.

    Raises:
        ValueError: it is no answer.
    """
    if bytes(data[:1]) == FAILED:
        return bytes(data[1:]).decode(errors="replace")
    return unpack(memoryview(data)[ALIGNED:])
