"""The MPMD library in jaxlib: fixes its imports, and makes a context that has IFRT IR.

The library is in the wheel but was built for a tree in which jaxlib is ``jax.jaxlib``, and Shardy's
front end for one in which MLIR is ``mlir``. Importing ``fairway`` registers both names as aliases;
nothing is loaded until one of them is imported.
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

__all__ = ["SPARSE_CALL", "compile_options", "context", "install_names", "library"]

SPARSE_CALL = "fairway_sparse"
"""The custom call that makes up a function that is a sparse exchange."""

NAMES = {"jax.jaxlib": "jaxlib", "mlir": "jaxlib.mlir"}
"""Alias of each package, and its own name."""

EMPTY_PROGRAM = """
module { func.func @main() attributes {topology = #mpmd.topology<<"m" : <["x"=1]>>>} { return } }
"""

_LOADING = threading.Lock()


class _OtherNames(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import hook that resolves a package's alias to the same modules."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if _own_name(name) is None or (path is None and PathFinder.find_spec(name) is not None):
            return None  # not an alias, or a package of this name exists
        return importlib.machinery.ModuleSpec(name, self)

    def exec_module(self, module: ModuleType) -> None:
        # The import system returns the entry of sys.modules.
        sys.modules[module.__name__] = importlib.import_module(_own_name(module.__name__) or "")


def _own_name(name: str) -> str | None:
    for other, own in NAMES.items():
        if name == other or name.startswith(f"{other}."):
            return own + name.removeprefix(other)
    return None


def install_names() -> None:
    """Registers the aliases."""
    if not any(isinstance(finder, _OtherNames) for finder in sys.meta_path):
        # First, or the path finder would look for submodules of the alias in the package and reload
        # them.
        sys.meta_path.insert(0, _OtherNames())


def library() -> Any:
    """Returns the MPMD library.

    Raises:
        ImportError: this jaxlib does not have it.
    """
    install_names()
    return importlib.import_module("jaxlib._sdy_mpmd")


def compile_options(module: Any) -> dict[str, Any]:
    """Returns the options of each function of a program, by name of the function and its mesh.

    They are those that ``jax.jit`` takes from JAX's configuration; the library knows of none.
    """
    from jax._src import compiler

    return {
        name: compiler.get_compile_options(default.num_replicas, default.num_partitions)
        for name, default in library().get_compile_options(module, {}).items()
    }


def context() -> Any:
    """Returns an MLIR context with the dialects of programs, IFRT's among them.

    IFRT's is loaded only by lowering a program to it.
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
