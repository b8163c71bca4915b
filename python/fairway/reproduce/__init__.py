"""Papers' figures, made anew."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from fairway.errors import ConfigError

__all__ = ["check_figures"]


def check_figures(names: Iterable[str], known: Collection[str]) -> None:
    """Before any of them is made.

    Raises:
        ConfigError: a figure is not known.
    """
    for name in names:
        if name not in known:
            raise ConfigError(f"there is no figure {name!r}; there are {', '.join(known)}")
