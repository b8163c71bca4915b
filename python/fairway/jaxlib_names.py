"""Other names under which jaxlib's MPMD partitioner looks for jaxlib's own modules.

The partitioner is in the wheel but was built for a tree in which jaxlib is ``jax.jaxlib``, and
Shardy's front end for one in which MLIR is ``mlir``. Giving the loaded modules those names as well
mends both imports.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

__all__ = ["import_mpmd", "install"]

NAMES = {
    "jax.jaxlib": "jaxlib",
    "jax.jaxlib._jax": "jaxlib._jax",
    "jax.jaxlib.mlir": "jaxlib.mlir",
    "jax.jaxlib.mlir._mlir_libs": "jaxlib.mlir._mlir_libs",
    "jax.jaxlib.mlir.ir": "jaxlib.mlir.ir",
    "mlir": "jaxlib.mlir",
    "mlir.ir": "jaxlib.mlir.ir",
}
"""The other name of each module, and its own."""


def install() -> None:
    """Makes the other names known, unless something else has them."""
    for other, own in NAMES.items():
        sys.modules.setdefault(other, importlib.import_module(own))


def import_mpmd() -> Any:
    """jaxlib's MPMD partitioner."""
    install()
    return importlib.import_module("jaxlib._sdy_mpmd")
