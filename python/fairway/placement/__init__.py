"""Placement of a model's shards on devices of any fabric, and the predicted time of a step."""

NAMES = ("resnet50", "transformer", "megatron")
"""Built-in models; see :mod:`fairway.placement.models`."""
STEPS = (
    "graph.fbuf",
    "program.fw",
    "graph.step",
    "a folder of Chakra's traces",
    *(f"{name}:BATCH or {name}:BATCH/COPIES" for name in NAMES),
)
"""Training steps that can be simulated."""
PATIENCE = 2
"""Doublings of a copy's devices without gain after which the search stops."""
