"""Options of XLA that clients may not set."""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["UnreadableError", "check_overrides"]

FILE_OPTIONS = re.compile(
    r"dump|path|dir$|dir_|file|cache|profile|_load_|save|library|extra_options"
)
"""Names of XLA's options that refer to files, or contain other options."""
HARMLESS_OPTIONS = frozenset({"xla_dump_max_hlo_modules"})
"""Options with such names that only limit what other options write."""


class UnreadableError(Exception):
    """A program that this jaxlib cannot read; the text is ``CODE_NAME: message``."""


def check_overrides(overrides: Iterable[tuple[str, object]]) -> None:
    """Rejects options by which a client could read or write files as this host's user.

    Raises:
        UnreadableError: names the option.
    """
    for name, _ in overrides:
        if FILE_OPTIONS.search(name) and name not in HARMLESS_OPTIONS:
            raise UnreadableError(
                f"INVALID_ARGUMENT: the compiler option {name} is not a client's to set, since it "
                "names files of the hosts; give it to the hosts by the setting xla_flags"
            )
