"""What a buffer's number stands for on a host: an array, one still to come, or an error."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from fairway import _native

Array = Any


class Failed(Exception):  # noqa: N818 - it is a state of a buffer as well as an error
    """A buffer that gives an error on use; the text is ``CODE_NAME: message``."""

    @property
    def text(self) -> str:
        """The error as it is reported."""
        return str(self.args[0])


def error_text(error: BaseException) -> str:
    """Any error as ``CODE_NAME: message``."""
    if isinstance(error, Failed):
        return error.text
    if isinstance(error, _native.StatusError):
        return f"{error.args[0]}: {error.args[1]}"
    if isinstance(error, MemoryError):
        return f"RESOURCE_EXHAUSTED: out of host memory: {error}"
    text = str(error)
    name = text.partition(": ")[0]
    return text if name.isupper() and name.isidentifier() else f"INTERNAL: {text}"


class Lazy:
    """An array that is made when first needed, by whichever thread needs it first."""

    __slots__ = ("__weakref__", "_lock", "_make", "_value")

    def __init__(self, make: Callable[[], Array]) -> None:
        self._make: Callable[[], Array] | None = make
        self._value: Array | Failed = None
        self._lock = threading.Lock()

    def get(self) -> Array:
        """The array.

        Raises:
            Failed: it cannot be made; so does every later call.
        """
        with self._lock:
            if self._make is not None:
                try:
                    self._value = self._make()
                except Exception as error:
                    self._value = Failed(error_text(error))
                self._make = None
            if isinstance(self._value, Failed):
                raise self._value
            return self._value


def resolve(value: Any) -> Array:
    """The array that ``value`` stands for, waited for if need be.

    Raises:
        Failed: it is or becomes an error.
    """
    if isinstance(value, Lazy):
        return value.get()
    if isinstance(value, Failed):
        raise value
    return value
