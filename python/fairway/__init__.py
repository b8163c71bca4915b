"""Fairway runs JAX from one Python process over many islands of accelerators."""

from typing import TYPE_CHECKING, Any

from fairway.errors import FairwayError
from fairway.mpmd import install_names

if TYPE_CHECKING:
    from fairway.exchanges import Exchange
    from fairway.feeding import inputs
    from fairway.shards import Shard
    from fairway.slices import slice
    from fairway.tracing import program

__all__ = ["Exchange", "FairwayError", "Shard", "__version__", "inputs", "program", "slice"]

__version__ = "0.1.0"

install_names()


def __getattr__(name: str) -> Any:
    """What needs JAX is loaded when it is first asked for; hosts and the controller never do."""
    if name == "Exchange":
        from fairway.exchanges import Exchange

        return Exchange
    if name == "inputs":
        from fairway.feeding import inputs

        return inputs
    if name == "Shard":
        from fairway.shards import Shard

        return Shard
    if name == "program":
        from fairway.tracing import program

        return program
    if name == "slice":
        from fairway.slices import slice

        return slice
    raise AttributeError(f"module 'fairway' has no attribute {name!r}")
