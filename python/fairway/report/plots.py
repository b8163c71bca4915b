"""matplotlib, for files."""

from __future__ import annotations

from typing import Any

from fairway.errors import ConfigError

__all__ = ["drawing"]


def drawing() -> Any:
    """``matplotlib.pyplot`` without a screen.

    Raises:
        ConfigError: it is missing.
    """
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ConfigError("plots need matplotlib; try `pip install matplotlib`") from error
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot
