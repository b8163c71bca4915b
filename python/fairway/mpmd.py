"""The MPMD library in jaxlib: its import mended, and a context that knows IFRT IR.

The library is in the wheel but was built for a tree in which jaxlib is ``jax.jaxlib``, and Shardy's
front end for one in which MLIR is ``mlir``. Both imports work once these names are known too, which
importing ``fairway`` sees to; nothing is loaded before somebody asks for one of them.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import threading
from collections.abc import Sequence
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

__all__ = ["SPARSE_CALL", "context", "install_names", "library"]

SPARSE_CALL = "fairway_sparse"
"""The custom call that a function is if it is a sparse exchange."""

NAMES = {"jax.jaxlib": "jaxlib", "mlir": "jaxlib.mlir"}
"""The other name of each package, and its own."""

EMPTY_PROGRAM = """
module { func.func @main() attributes {topology = #mpmd.topology<<"m" : <["x"=1]>>>} { return } }
"""

_LOADING = threading.Lock()


class _OtherNames(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of a package under its other name, which are the same modules."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if _own_name(name) is None or (path is None and PathFinder.find_spec(name) is not None):
            return None  # or there is a package that really has this name
        return importlib.machinery.ModuleSpec(name, self)

    def exec_module(self, module: ModuleType) -> None:
        # The import system hands out what stands here when this returns.
        sys.modules[module.__name__] = importlib.import_module(_own_name(module.__name__) or "")


def _own_name(name: str) -> str | None:
    for other, own in NAMES.items():
        if name == other or name.startswith(f"{other}."):
            return own + name.removeprefix(other)
    return None


def install_names() -> None:
    """Makes the other names known."""
    if not any(isinstance(finder, _OtherNames) for finder in sys.meta_path):
        # First, for what has the name of a package would be looked for, and loaded anew, in it.
        sys.meta_path.insert(0, _OtherNames())


def library() -> Any:
    """The library.

    Raises:
        ImportError: this jaxlib has none.
    """
    install_names()
    return importlib.import_module("jaxlib._sdy_mpmd")


def context() -> Any:
    """A context that knows the dialects of programs, IFRT's among them.

    IFRT's is loaded only by lowering something to it.
    """
    from jaxlib.mlir import ir
    from jaxlib.mlir._mlir_libs import _jax_mlir_ext
    from jaxlib.mlir.dialects import chlo, mpmd, sdy, stablehlo

    registry = ir.DialectRegistry()
    _jax_mlir_ext.register_dialects(registry)
    made: Any = ir.Context()
    made.append_dialect_registry(registry)
    made.load_all_available_dialects()
    for dialect in (stablehlo, sdy, mpmd, chlo):
        dialect.register_dialect(made)
    with _LOADING, made:
        library().lower_to_ifrt(ir.Module.parse(EMPTY_PROGRAM))
    return made
