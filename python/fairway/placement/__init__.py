"""Which device holds which shard of a model, on any fabric, and how long a step takes then."""

NAMES = ("resnet50", "transformer", "megatron")
"""Models that are described here; see :mod:`fairway.placement.models`."""
STEPS = (
    "graph.fbuf",
    "program.fw",
    "a folder of Chakra's traces",
    *(f"{name}:BATCH or {name}:BATCH/COPIES" for name in NAMES),
)
"""Steps of training that can be simulated."""
PATIENCE = 2
"""The search for the devices of a copy stops when so many doublings in a row gain nothing."""
