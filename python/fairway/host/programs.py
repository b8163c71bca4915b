"""Describes compiled programs to the controller."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from fairway.host.backend import Backend, JaxRuntimeError, tiled
from fairway.host.elements import dtype_of
from fairway.host.executable import Executable
from fairway.host.messages import CompiledSharding, OutputSpec, ProgramMetadata, Tiles
from fairway.host.screening import symbol

ELEMENT_TYPES = {
    "i1": "bool", "i2": "int2", "i4": "int4", "i8": "int8", "i16": "int16", "i32": "int32",
    "i64": "int64", "ui2": "uint2", "ui4": "uint4", "ui8": "uint8", "ui16": "uint16",
    "ui32": "uint32", "ui64": "uint64", "f16": "float16", "f32": "float32", "f64": "float64",
    "bf16": "bfloat16", "complex<f32>": "complex64", "complex<f64>": "complex128",
    "f8E3M4": "float8_e3m4", "f8E4M3": "float8_e4m3", "f8E4M3FN": "float8_e4m3fn",
    "f8E4M3B11FNUZ": "float8_e4m3b11fnuz", "f8E4M3FNUZ": "float8_e4m3fnuz",
    "f8E5M2": "float8_e5m2", "f8E5M2FNUZ": "float8_e5m2fnuz", "f8E8M0FNU": "float8_e8m0fnu",
    "f4E2M1FN": "float4_e2m1fn",
}  # fmt: skip
"""Maps MLIR's element types to numpy's names."""

DONATING = ("tf.aliasing_output", "jax.buffer_donor")


class Signature:
    """The signature of a program: its name, parameters and results.

    Attributes:
        name: name of the module; ``main`` if it has none.
        parameters: shape of each parameter.
        donated: parameters whose buffers results may reuse.
        results: element type and shape of each result.
    """

    def __init__(self, module: Any) -> None:
        self.name = symbol(module) or "main"
        main = next(
            operation
            for operation in module.body.operations
            if operation.operation.name == "func.func" and symbol(operation) == "main"
        )
        kind = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value)
        self.parameters = [_tensor(parameter)[1] for parameter in kind.inputs]
        self.results = [_tensor(result) for result in kind.results]
        self.donated: list[int] = []
        if "arg_attrs" in main.attributes:
            for index, given in enumerate(ir.ArrayAttr(main.attributes["arg_attrs"])):
                attributes = ir.DictAttr(given)
                if any(name in attributes for name in DONATING):
                    self.donated.append(index)


def _tensor(kind: Any) -> tuple[str, tuple[int, ...]]:
    if not isinstance(kind, ir.RankedTensorType):
        return "token", ()
    tensor = ir.RankedTensorType(kind)
    return ELEMENT_TYPES[str(tensor.element_type)], tuple(tensor.shape)


def partition(op_sharding: Any, rank: int, count: int) -> Tiles | None:
    """Returns the partition of an array of rank ``rank`` over ``count`` devices."""
    if op_sharding is None:
        return None
    sharding = tiled(op_sharding)
    if count == 1 or sharding.is_replicated() or sharding.is_manual():
        return None
    grid = list(sharding.tile_assignment_dimensions())
    order = list(sharding.tile_assignment_devices())
    if len(grid) < rank or len(order) != count:
        return None
    copies = int(np.prod(grid[rank:], dtype=np.int64))
    tile_of = [0] * count
    for cell, device in enumerate(order):
        tile_of[device] = cell // copies
    return Tiles(grid[:rank], tile_of)


def encoded(op_sharding: Any) -> bytes:
    """Returns the compiler's serialized sharding; empty if there is none."""
    return b"" if op_sharding is None else bytes(tiled(op_sharding).to_proto().SerializeToString())


def shard_shape(shape: tuple[int, ...], cut: Tiles | None) -> tuple[int, ...]:
    """Returns the shape of the shards of an evenly partitioned array."""
    if cut is None:
        return shape
    return tuple(-(-extent // tiles) for extent, tiles in zip(shape, cut.counts, strict=True))


def _minor_to_major(layout: Any, rank: int) -> list[int]:
    """Returns the axes of a layout whose text is ``{1,0}`` or ``{1,0:T(8,128)}``."""
    if layout is None:
        return list(range(rank))[::-1]
    text = str(layout)
    inside = text[text.find("{") + 1 :].split(":")[0].rstrip("}")
    axes = [int(axis) for axis in inside.split(",") if axis.strip()]
    return axes if len(axes) == rank else list(range(rank))[::-1]


def _layouts(get: Callable[[], list[Any]], ranks: list[int]) -> list[list[int]]:
    """Returns the layout of each parameter or result; row-major if tokens are among them."""
    try:
        layouts = get()
    except JaxRuntimeError:
        layouts = []
    given = itertools.zip_longest(layouts[: len(ranks)], ranks)
    return [_minor_to_major(layout, rank) for layout, rank in given]


def _memory_stats(loaded: Any) -> list[int] | None:
    try:
        stats = loaded.get_compiled_memory_stats()
    except Exception:  # platforms without statistics raise different errors
        return None
    names = ("generated_code", "argument", "output", "alias", "temp")
    device = [int(getattr(stats, f"{name}_size_in_bytes")) for name in names]
    host = [int(getattr(stats, f"host_{name}_size_in_bytes")) for name in names]
    return [*device, *host, int(getattr(stats, "peak_memory_in_bytes", 0))]


ALIASED_PARAMETER = re.compile(r"\{[\d,]*\}: \((\d+),")


def donated(loaded: Any, signature: Signature) -> list[int]:
    """Returns the parameters whose buffers results do reuse, as the compiler chose.

    Only the first line of the program's text has it: ``input_output_alias={ {0}: (1, {},
    may-alias) }``.
    """
    if not signature.donated:
        return []
    header = str(loaded.hlo_modules()[0].to_string()).partition("\n")[0]
    aliases = header.partition("input_output_alias={")[2].partition(" }")[0]
    return sorted({int(number) for number in ALIASED_PARAMETER.findall(aliases)})


def describe(
    backend: Backend, loaded: Any, signature: Signature, count: int
) -> tuple[Executable, ProgramMetadata]:
    """Wraps a loaded program and describes it."""
    results = signature.results
    given = loaded.get_output_shardings()
    if given is None or len(given) != len(results):
        given = [None] * len(results)
    cuts = [
        partition(sharding, len(shape), count)
        for sharding, (_, shape) in zip(given, results, strict=True)
    ]
    kinds = loaded.get_output_memory_kinds()
    memories = list(kinds[0]) if kinds else [None] * len(results)
    executable = backend.wrap(
        loaded,
        signature.name,
        [
            (dtype_of(dtype), shard_shape(shape, cut), memory)
            for (dtype, shape), cut, memory in zip(results, cuts, memories, strict=True)
        ],
    )
    executable.donated = tuple(signature.donated)
    executable.is_shared = executable.devices < count
    ranks = [len(shape) for shape in signature.parameters]
    parameters = loaded.get_parameter_shardings()
    fingerprint = loaded.fingerprint
    metadata = ProgramMetadata(
        name=signature.name,
        fingerprint=fingerprint if isinstance(fingerprint, bytes) else None,
        parameters=[
            CompiledSharding(partition(sharding, rank, count), encoded(sharding))
            for sharding, rank in zip(parameters, ranks, strict=True)
        ]
        if parameters is not None and len(parameters) == len(ranks)
        else None,
        parameter_layouts=_layouts(loaded.get_parameter_layouts, ranks),
        outputs=[
            OutputSpec(dtype, list(shape), CompiledSharding(cut, encoded(sharding)), memory)
            for (dtype, shape), cut, sharding, memory in zip(
                results, cuts, given, memories, strict=True
            )
        ],
        output_layouts=_layouts(loaded.get_output_layouts, [len(shape) for _, shape in results]),
        donated=donated(loaded, signature),
        parameter_count=len(ranks),
        memory=_memory_stats(loaded),
        code_bytes=int(loaded.size_of_generated_code_in_bytes()),
        costs=[(str(name), float(cost)) for name, cost in loaded.cost_analysis().items()],
        input=None,
        collectives=[],
    )
    return executable, metadata
