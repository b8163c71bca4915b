"""State of a buffer on a host: an array, an array still to be made, or an error.

:class:`Objects` is the host's part of the object store. The thread that takes commands fills and
empties it; it tracks threads that read a buffer concurrently, so that no buffer is donated or
deleted while it is read.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

from fairway import _native
from fairway.host.backend import collect_garbage

Array = Any
PATIENCE_S = 0.02
"""Grace period in which the thread that takes commands waits for readers of a buffer."""


class Failed(Exception):  # noqa: N818 - it is a state of a buffer as well as an error
    """A buffer whose use raises an error; the text is ``CODE_NAME: message``.

    Attributes:
        is_common: all hosts that have a part of the buffer have this error, so that all leave out
            what needs it.
        is_noted: the controller has made errors of all that may derive from the buffer.
    """

    def __init__(self, text: str, is_common: bool = False, is_noted: bool = False) -> None:
        super().__init__(text)
        self.is_common = is_common
        self.is_noted = is_noted

    @property
    def text(self) -> str:
        """The error as it is reported."""
        return str(self.args[0])


class CallError(Exception):
    """A host callback has failed; the text is ``CODE_NAME: message``."""


def error_text(error: BaseException) -> str:
    """Formats any error as ``CODE_NAME: message``."""
    if isinstance(error, Failed):
        return error.text
    if isinstance(error, _native.StatusError):
        return f"{error.args[0]}: {error.args[1]}"
    if isinstance(error, MemoryError):
        return f"RESOURCE_EXHAUSTED: out of host memory: {error}"
    # XLA puts the traceback of this process before the error that a host callback has raised.
    text = str(error).rpartition(f"\n{CallError.__name__}: ")[2]
    name = text.partition(": ")[0]
    return text if name.isupper() and name.isidentifier() else f"INTERNAL: {text}"


def failure(error: Exception) -> Failed:
    """Returns the state of a buffer of this host that could not be made because of an error."""
    return Failed(error_text(error), is_noted=isinstance(error, Failed) and error.is_noted)


class Deferred:
    """An array that is put on its devices only when it is used."""

    __slots__ = ("__weakref__",)

    def get(self) -> Array:
        """Returns the array.

        Raises:
            Failed: it cannot be made.
        """
        raise NotImplementedError

    def block_until_ready(self) -> None:
        """Waits until the array is computed.

        Raises:
            Failed: it cannot be made.
        """
        self.get().block_until_ready()

    def delete(self) -> None:
        """Frees its memory, for all arrays that share it."""


class Lazy(Deferred):
    """An array that is made on first use, by the thread that uses it first."""

    __slots__ = ("_lock", "_make", "_value")

    def __init__(self, make: Callable[[], Array]) -> None:
        self._make: Callable[[], Array] | None = make
        self._value: Array | Failed = None
        self._lock = threading.Lock()

    def get(self) -> Array:
        """Returns the array.

        Raises:
            Failed: it cannot be made; every later call raises the same error.
        """
        with self._lock:
            if self._make is not None:
                try:
                    self._value = self._make()
                except Exception as error:
                    self._value = failure(error)
                self._make = None
            if isinstance(self._value, Failed):
                raise self._value
            return self._value

    # Until it is made, it counts as a use of its sources, like a future of a thread that reads
    # them.

    def done(self) -> bool:
        """Returns whether it has been made."""
        return self._make is None

    def result(self) -> None:
        """Makes it; an error becomes its state."""
        with contextlib.suppress(Failed):
            self.get()


class Called(Lazy):
    """A result of a function that another thread calls.

    Args:
        run: the run, whose outcome is the list of its results.
        index: which of them.
    """

    __slots__ = ("run",)

    def __init__(self, run: Future[list[Array]], index: int) -> None:
        super().__init__(lambda: run.result()[index])
        self.run = run


def resolve(value: Any) -> Array:
    """Returns the array that ``value`` stands for, waiting for it if necessary.

    Raises:
        Failed: it is or becomes an error.
    """
    if isinstance(value, Deferred):
        return value.get()
    if isinstance(value, Failed):
        raise value
    return value


def _delete_after(uses: list[Future[Any] | Lazy], value: Any) -> None:
    """Deletes an array once it is not read any more."""
    for use in uses:
        use.result()
    value.delete()


class _Users:
    """Uses of buffers by other threads, by buffer number."""

    def __init__(self) -> None:
        self._known: dict[int, list[Future[Any] | Lazy]] = {}

    def note(self, number: int, use: Future[Any] | Lazy) -> None:
        """Records a use of a buffer, which lasts until ``use`` is done."""
        known = self._known
        known[number] = [*(other for other in known.get(number, ()) if not other.done()), use]
        if len(known) > 256:
            self._known = {
                key: left
                for key, uses in known.items()
                if (left := [other for other in uses if not other.done()])
            }

    def finish(self, numbers: list[int]) -> None:
        """Waits until these buffers are not in use."""
        if self._known:
            for number in numbers:
                for use in self._known.pop(number, ()):
                    use.result()

    def unfinished(self, numbers: list[int], wait_s: float) -> dict[int, list[Future[Any] | Lazy]]:
        """Returns the uses of each of these buffers that are not done after at most ``wait_s``."""
        deadline = time.monotonic() + wait_s
        found: dict[int, list[Future[Any] | Lazy]] = {}
        for number in numbers if self._known else ():
            uses = [use for use in self._known.pop(number, ()) if not use.done()]
            futures = [use for use in uses if isinstance(use, Future)]
            if futures:
                concurrent.futures.wait(futures, max(0.0, deadline - time.monotonic()))
            if left := [use for use in uses if not use.done()]:
                self._known[number] = found[number] = left
        return found

    def forget(self, numbers: list[int]) -> None:
        """Forgets the uses of freed buffers."""
        if self._known:
            for number in numbers:
                self._known.pop(number, None)


class Objects:
    """All buffers of this host, by number.

    Attributes:
        values: state of each number's buffer.
    """

    def __init__(self) -> None:
        self.values: dict[int, Array | Deferred | Failed] = {}
        self._families: dict[int, set[int]] = {}
        self._uses = _Users()
        self._waits = _Users()
        self._patience_s = PATIENCE_S
        self._deletions = ThreadPoolExecutor(1, thread_name_prefix="fairway-delete")

    def get(self, number: int) -> Any:
        """Returns the state of a buffer; an error if the number is unknown."""
        try:
            return self.values[number]
        except KeyError:
            return Failed(f"NOT_FOUND: this host has no buffer {number}")

    def attempt(self, number: int, make: Callable[[], Array]) -> None:
        """Makes an array now; a failure becomes the buffer's state."""
        try:
            self.values[number] = make()
        except Exception as error:
            self.values[number] = failure(error)

    def derive(self, number: int, sources: list[int], make: Callable[[], Array]) -> None:
        """Makes an array of other buffers, at once unless one of them is still to be made."""
        if not any(isinstance(self.values.get(source), Lazy) for source in sources):
            self.attempt(number, make)
            return
        self.values[number] = lazy = Lazy(make)
        for source in sources:
            self.note_use(source, lazy)

    def share(self, number: int, sources: list[int]) -> None:
        """Records that a buffer aliases the memory of others."""
        family = self._families.setdefault(number, {number})
        for source in sources:
            if source not in self.values:
                continue
            other = self._families.setdefault(source, {source})
            if other is not family:
                fewer, family = sorted((other, family), key=len)
                family |= fewer
                self._families.update(dict.fromkeys(fewer, family))

    def family(self, number: int) -> int:
        """Returns a key that is equal for all buffers that may share memory.

        Addresses do not identify sharing: jaxlib reads host memory in place, so that buffers that
        are freed independently may have one address.
        """
        family = self._families.get(number)
        return -number if family is None else id(family)

    def poison(self, numbers: list[int], error: str) -> None:
        """Puts buffers into an error state, raised on use."""
        for number in numbers:
            self.values[number] = Failed(error)

    def note_use(self, number: int, use: Future[Any] | Lazy) -> None:
        """Records that another thread reads a buffer until ``use`` ends."""
        self._uses.note(number, use)

    def note_wait(self, number: int, wait: Future[Any]) -> None:
        """Records that a thread waits for a buffer's computation; a donation does not matter."""
        self._waits.note(number, wait)

    def use(self, threads: Executor, number: int, work: Callable[[], None]) -> None:
        """Reads a buffer in another thread."""
        self.note_use(number, threads.submit(work))

    def unfinished_uses(self, numbers: list[int]) -> dict[int, list[Future[Any] | Lazy]]:
        """Returns the buffers that threads read beyond the grace period; they must not be donated.

        After such a case the grace period is 0 until a call finds no late reader.
        """
        late = self._uses.unfinished(numbers, self._patience_s)
        self._patience_s = 0.0 if late else PATIENCE_S
        return late

    def finish_waits(self, numbers: list[int]) -> None:
        """Waits until no thread reads or waits for these buffers, so that they may be spilled."""
        self._uses.finish(numbers)
        self._waits.finish(numbers)

    def delete(self, numbers: list[int]) -> None:
        """Frees device memory, also for all buffers that share it."""
        late = self.unfinished_uses(numbers)
        for number in numbers:
            value = self.values.get(number)
            if value is None or isinstance(value, Failed):
                continue
            # A launch with a deleted argument would crash the process.
            self.values[number] = Failed(
                "INVALID_ARGUMENT: the array has been deleted", is_common=True
            )
            if number in late:
                self._deletions.submit(_delete_after, late[number], value)
            else:
                value.delete()
        collect_garbage()

    def free(self, numbers: list[int]) -> None:
        """Removes buffers from the store."""
        pop = self.values.pop
        for number in numbers:
            pop(number, None)
            if (family := self._families.pop(number, None)) is not None:
                family.discard(number)
        self._uses.forget(numbers)
        self._waits.forget(numbers)
        collect_garbage()
