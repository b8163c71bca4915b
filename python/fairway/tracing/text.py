"""The text of IFRT IR: modules, types and shardings."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
from jax.sharding import SingleDeviceSharding

from fairway import mpmd

ELEMENT_TYPES = {
    "bool": "i1",
    "bfloat16": "bf16",
    "complex64": "complex<f32>",
    "complex128": "complex<f64>",
}
"""MLIR's names of types, where they are not numpy's abbreviated."""


def private_module(name: str, body: str, attributes: str = "") -> str:
    """Returns the text of a module with private visibility.

    It uses the generic form of operations, which every version of MLIR reads: newer versions reject
    the visibility among the attributes of a module in its custom form.
    """
    return (
        f'"builtin.module"() <{{sym_name = "{name}", sym_visibility = "private"}}> ({{\n'
        f"{body}\n}}) {attributes} : () -> ()"
    )


def exchange_module(name: str, text: str, inputs: list[str], outputs: list[str]) -> str:
    """Returns a function that consists of one exchange, which hosts recognise."""
    arguments = ", ".join(f"%a{index}: {kind}" for index, kind in enumerate(inputs))
    given, made = ", ".join(inputs), ", ".join(outputs)
    operands = ", ".join(f"%a{index}" for index in range(len(inputs)))
    results = ", ".join(f"%r#{index}" for index in range(len(outputs)))
    return private_module(
        name,
        f"func.func public @main({arguments}) -> ({made}) {{\n"
        f"%r:{len(outputs)} = stablehlo.custom_call @{mpmd.SPARSE_CALL}({operands}) "
        f'{{backend_config = "{text}"}} : ({given}) -> ({made})\n'
        f"return {results} : {made}\n}}",
    )


def tensor_type(aval: Any) -> str:
    """Returns the MLIR type of an array."""
    extents = "".join(f"{extent}x" for extent in aval.shape)
    return f"tensor<{extents}{_element(aval.dtype)}>"


def _element(dtype: np.dtype[Any]) -> str:
    name = str(dtype)
    if name in ELEMENT_TYPES:
        return ELEMENT_TYPES[name]
    kind, bits = re.fullmatch(r"([a-z]+)(\w+)", name).groups()  # type: ignore[union-attr]
    return {"int": "i", "uint": "ui", "float": "f"}[kind] + bits.upper().replace("_", "")


def sharding_parameter(sharding: Any, rank: int) -> str:
    """Returns a sharding as IFRT's ``ShardingParam``: ``2x1 to [0,1] on 2x4``.

    Tiles along each axis of the array; the axes of the device grid, the one along which tiles vary
    fastest first; and their sizes, the one that varies fastest in the device list first.
    """
    if isinstance(sharding, SingleDeviceSharding):
        return f"{'x'.join(['1'] * rank)} to [0] on 1"
    sizes = dict(sharding.mesh.shape)
    names = list(reversed(sizes))
    spec = (*sharding.spec, *[None] * (rank - len(sharding.spec)))
    cuts = [
        () if entry is None else entry if isinstance(entry, tuple) else (entry,) for entry in spec
    ]
    used = [name for cut in cuts for name in cut]
    copies = [name for name in names if name not in used]
    order = [names.index(name) for name in [*copies, *reversed(used)]]
    tiles = "x".join(str(math.prod(sizes[name] for name in cut)) for cut in cuts)
    grid = "x".join(str(sizes[name]) for name in names)
    return f"{tiles} to {order} on {grid}"
