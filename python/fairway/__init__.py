"""Fairway runs JAX from one Python process over many islands of accelerators."""

from fairway.errors import FairwayError

__all__ = ["FairwayError", "__version__"]

__version__ = "0.1.0"
