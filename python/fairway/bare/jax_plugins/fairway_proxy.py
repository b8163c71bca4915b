"""Fairway's plugin for a Python in which Fairway is not installed.

JAX finds this module when the folder that holds ``jax_plugins`` is in ``PYTHONPATH``, as
``fairway up`` says. It needs nothing but jax.
"""

import importlib.util
from pathlib import Path

PLUGIN = Path(__file__).parents[2] / "plugin.py"


def initialize() -> None:
    """Registers the platform ``proxy``, as Fairway's own entry point does."""
    described = importlib.util.spec_from_file_location("_fairway_plugin", PLUGIN)
    if described is None or described.loader is None:
        raise ImportError(f"Fairway's plugin is not at {PLUGIN}")
    plugin = importlib.util.module_from_spec(described)
    described.loader.exec_module(plugin)
    plugin.initialize()
