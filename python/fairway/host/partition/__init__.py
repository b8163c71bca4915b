"""Partitions a program over several islands: computations of each island, and what crosses.

Shardy propagates the shardings of a program's arrays. Axes of its meshes that number islands are
then taken out: every island computes its part of each operation, and where a part needs elements
of others, a collective between islands stands in the program. What is left for XLA is a program on
the devices of one island.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxlib.mlir import ir, passmanager

from fairway.host.partition.axes import Islands, NotSeparableError, meshes_of
from fairway.host.partition.localize import Localizer
from fairway.host.partition.program import Assembler, Crossing, FunctionPart, Partitioned
from fairway.host.partition.tokens import as_arrays
from fairway.host.programs import Signature
from fairway.host.screening import functions_of

__all__ = ["Crossing", "FunctionPart", "NotSeparableError", "Partitioned", "partition"]

CROSSED_BYTES = "bytes between islands"
"""Name of that cost: bytes of an island's shards that collectives between islands take in a run."""
PASSES = (
    "builtin.module(sdy-lift-inlined-meshes)",
    "builtin.module(sdy-propagation-pipeline)",
    "builtin.module(func.func(sdy-populate-op-sharding-rules))",
)
"""Passes of Shardy, in jaxlib, that prepare a program."""


def partition(module: Any, islands_of: Sequence[int]) -> Partitioned:
    """Partitions a program.

    Args:
        module: the program, in StableHLO with shardings of Shardy.
        islands_of: for each of its devices, the number of the island.

    Raises:
        NotSeparableError: the axes of its meshes do not number the islands.
        RefusedError: it cannot be partitioned.
    """
    signature = Signature(module)
    with module.context, ir.Location.unknown():
        client_functions = functions_of(module)
        if client_functions:  # nothing else has tokens
            as_arrays(module)
        for name in PASSES:
            passmanager.PassManager.parse(name).run(module.operation)
        islands = Islands(islands_of)
        meshes = meshes_of(module, islands)
        localizer = Localizer(module, islands, meshes)
        flat = ir.Operation.create("builtin.module", regions=1)
        block = flat.regions[0].blocks.append()
        given, made = localizer.main(block)
        assembler = Assembler(signature.name, islands, meshes, localizer.loops)
        assembler.client_functions = client_functions
        text = assembler.assemble(block, given, made, set(signature.donated))
    costs = [(CROSSED_BYTES, assembler.crossed_bytes), *localizer.warnings.items()]
    return Partitioned(text, assembler.parts, islands.members, costs)
