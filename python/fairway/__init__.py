"""Fairway runs JAX from one Python process over many islands of accelerators."""

import importlib
from typing import TYPE_CHECKING, Any

from fairway.errors import FairwayError
from fairway.mpmd import install_names

if TYPE_CHECKING:
    from fairway.exchanges import Exchange, all_gather, all_reduce, reduce_scatter
    from fairway.feeding import inputs
    from fairway.placing import PlacementRequest, StrategyOptions, Training, place
    from fairway.shards import Shard
    from fairway.slices import slice
    from fairway.tracing import program

__all__ = [
    "Exchange",
    "FairwayError",
    "PlacementRequest",
    "Shard",
    "StrategyOptions",
    "Training",
    "__version__",
    "all_gather",
    "all_reduce",
    "inputs",
    "place",
    "program",
    "reduce_scatter",
    "slice",
]

__version__ = "0.1.0"

install_names()


_LATER = {
    "Exchange": "fairway.exchanges",
    "PlacementRequest": "fairway.placing",
    "Shard": "fairway.shards",
    "StrategyOptions": "fairway.placing",
    "Training": "fairway.placing",
    "all_gather": "fairway.exchanges",
    "all_reduce": "fairway.exchanges",
    "inputs": "fairway.feeding",
    "place": "fairway.placing",
    "program": "fairway.tracing",
    "reduce_scatter": "fairway.exchanges",
    "slice": "fairway.slices",
}
"""Loaded lazily, since these modules need JAX; hosts and the controller never import them."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'fairway' has no attribute {name!r}")
    try:
        found = importlib.import_module(_LATER[name])
    except ModuleNotFoundError as error:
        if error.name not in ("jax", "jaxlib"):
            raise
        raise ModuleNotFoundError(
            f"fairway.{name} needs {error.name}, which is not installed; install fairway[jax]",
            name=error.name,
        ) from None
    return getattr(found, name)
