"""Fairway's plugin for a Python in which Fairway is not installed.

JAX finds this module when the folder that holds ``jax_plugins`` is in ``PYTHONPATH``, as
``fairway up`` says. It needs nothing but jax.
"""

import importlib.util
import sys
from pathlib import Path

PLUGIN = Path(__file__).parents[2] / "plugin"
NAME = "_fairway_plugin"


def initialize() -> None:
    """Registers the platform ``proxy``, as Fairway's own entry point does."""
    described = importlib.util.spec_from_file_location(
        NAME, PLUGIN / "__init__.py", submodule_search_locations=[str(PLUGIN)]
    )
    if described is None or described.loader is None:
        raise ImportError(f"Fairway's plugin is not at {PLUGIN}")
    plugin = sys.modules[NAME] = importlib.util.module_from_spec(described)
    described.loader.exec_module(plugin)
    plugin.initialize()
