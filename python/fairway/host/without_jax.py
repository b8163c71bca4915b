"""Lets jaxlib run on a host without jax.

jaxlib imports jax for two things: the type that describes an array, and the function that makes
the sharding of a single device. Importing all of jax for them takes longer than the rest of a
host's start, and 40 MB. A host therefore answers these imports itself, until a module of the user's
is imported, which may need jax.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

from jaxlib import _jax

__all__ = ["answer_imports", "is_imported", "return_imports"]


class _StandIn(types.ModuleType):
    """A module in the place of one of jax's."""


def is_imported() -> bool:
    """Is the real jax imported?"""
    return not isinstance(sys.modules.get("jax", _StandIn("jax")), _StandIn)


def answer_imports(describe: Callable[..., Any]) -> None:
    """Answers what jaxlib imports of jax (0.10.2 to 0.12), unless jax is imported.

    Args:
        describe: what jaxlib calls for ``jax.core.ShapedArray``. It keeps this function for good,
            and so calls it for arrays of a user's functions as well.
    """
    if is_imported():
        return
    answers: dict[str, dict[str, Any]] = {
        "jax": {"__path__": []},  # a package, as jaxlib's MPMD library is in one of this name
        "jax.core": {"ShapedArray": describe},
        "jax._src.sharding_impls": {"make_single_device_sharding": _jax.SingleDeviceSharding},
    }
    for name, functions in answers.items():
        sys.modules[name] = _StandIn(name)
        vars(sys.modules[name]).update(functions)


def return_imports() -> None:
    """Imports jax, which then answers these imports itself; takes a second the first time."""
    for name, module in list(sys.modules.items()):
        if isinstance(module, _StandIn):
            del sys.modules[name]
    importlib.import_module("jax")
