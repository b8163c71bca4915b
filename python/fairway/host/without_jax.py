"""Lets jaxlib run on a host without jax, and imports jax and scipy once they are needed.

jaxlib imports jax for two things: the type that describes an array, and the function that makes
the sharding of a single device. Importing all of jax for them takes longer than the rest of a
host's start, and 40 MB. A host therefore answers these imports itself, until a module of the user's
is imported, which may need jax.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxlib import _jax

__all__ = ["answer_imports", "import_jax", "is_imported", "own_path"]

PATH = list(sys.path)
"""Where modules are searched, without the folders of users' modules, which are added later."""


class _StandIn(types.ModuleType):
    """A module in the place of one of jax's."""


class _Becoming(_StandIn):
    """A stand-in that becomes the real module when something else of it is asked for.

    So other threads find what they ask for while jax is imported, and take no part in that.
    """

    def __getattr__(self, name: str) -> Any:
        package = sys.modules.get(self.__name__.rpartition(".")[0])
        folders = getattr(package, "__path__", None)
        if name.startswith("__") or folders is None or self.__spec__ is not None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        spec = importlib.machinery.PathFinder.find_spec(self.__name__, folders)
        assert spec is not None
        assert spec.loader is not None
        self.__spec__, self.__loader__, self.__file__ = spec, spec.loader, spec.origin
        self.__package__ = spec.parent
        spec.loader.exec_module(self)
        return getattr(self, name)


class _OwnPath(importlib.abc.MetaPathFinder):
    """Finds what one thread imports on :data:`PATH` before other folders."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if path is not None or threading.get_ident() != self._thread:
            return None
        return importlib.machinery.PathFinder.find_spec(name, PATH)


@contextlib.contextmanager
def own_path() -> Iterator[None]:
    """Imports of this thread find no user's file in place of a module of that name."""
    finder = _OwnPath()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def is_imported() -> bool:
    """Is the real jax imported, and completely?"""
    module = sys.modules.get("jax")
    if module is None or isinstance(module, _StandIn):
        return False
    return not getattr(module.__spec__, "_initializing", False)


def answer_imports(describe: Callable[..., Any]) -> None:
    """Answers what jaxlib imports of jax (0.10.2 to 0.12), unless jax is imported.

    Args:
        describe: what jaxlib calls for ``jax.core.ShapedArray``. It keeps this function for good,
            and so calls it for arrays of a user's functions as well.
    """
    if is_imported():
        return
    package: Any = _StandIn("jax")
    arrays: Any = _StandIn("jax.core")
    package.__path__ = []  # jaxlib's MPMD library is in a package of this name
    arrays.ShapedArray = describe
    shardings: Any = _Becoming("jax._src.sharding_impls")
    shardings.make_single_device_sharding = _jax.SingleDeviceSharding
    sys.modules.update({module.__name__: module for module in (package, arrays, shardings)})


def import_jax() -> bool:
    """Imports jax, which then answers these imports itself; takes a second.

    Returns:
        False if it was imported before.
    """
    if is_imported():
        return False
    for name in ("jax", "jax.core"):
        sys.modules.pop(name, None)
    with own_path():
        importlib.import_module("jax")
    return True
