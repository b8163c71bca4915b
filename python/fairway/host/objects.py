"""What a buffer's number stands for on a host: an array, one still to come, or an error.

:class:`Objects` is the host's part of the object store. The thread that takes commands fills and
empties it; threads that read a buffer meanwhile are known to it, so that none is donated or deleted
under them.
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
"""How long the thread that takes commands waits for another that reads a buffer."""


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


class Deferred:
    """An array that is not on its devices until it is asked for."""

    __slots__ = ("__weakref__",)

    def get(self) -> Array:
        """The array.

        Raises:
            Failed: it cannot be had.
        """
        raise NotImplementedError

    def block_until_ready(self) -> None:
        """Waits until the array is computed.

        Raises:
            Failed: it cannot be had.
        """
        self.get().block_until_ready()

    def delete(self) -> None:
        """Frees the memory that it has, for all arrays that share it."""


class Lazy(Deferred):
    """An array that is made when first needed, by whichever thread needs it first."""

    __slots__ = ("_lock", "_make", "_value")

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

    # Until it is made, it is a use of what it is made of, as a thread that reads that is.

    def done(self) -> bool:
        """Has it been made?"""
        return self._make is None

    def result(self) -> None:
        """Makes it; an error stays its own."""
        with contextlib.suppress(Failed):
            self.get()


def resolve(value: Any) -> Array:
    """The array that ``value`` stands for, waited for if need be.

    Raises:
        Failed: it is or becomes an error.
    """
    if isinstance(value, Deferred):
        return value.get()
    if isinstance(value, Failed):
        raise value
    return value


def _delete_after(uses: list[Future[Any] | Lazy], value: Any) -> None:
    """Deletes an array once nothing reads it."""
    for use in uses:
        use.result()
    value.delete()


class _Users:
    """What other threads do with buffers, by number."""

    def __init__(self) -> None:
        self._known: dict[int, list[Future[Any] | Lazy]] = {}

    def note(self, number: int, use: Future[Any] | Lazy) -> None:
        """Something is done with a buffer until ``use`` ends."""
        known = self._known
        known[number] = [*(other for other in known.get(number, ()) if not other.done()), use]
        if len(known) > 256:
            self._known = {
                key: left
                for key, uses in known.items()
                if (left := [other for other in uses if not other.done()])
            }

    def finish(self, numbers: list[int]) -> None:
        """Waits until nothing is done with these buffers."""
        if self._known:
            for number in numbers:
                for use in self._known.pop(number, ()):
                    use.result()

    def unfinished(self, numbers: list[int], wait_s: float) -> dict[int, list[Future[Any] | Lazy]]:
        """What is still done with each of these buffers after at most ``wait_s``."""
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
        """These buffers are gone."""
        if self._known:
            for number in numbers:
                self._known.pop(number, None)


class Objects:
    """All buffers of this host, by number.

    Attributes:
        values: what each number stands for.
    """

    def __init__(self) -> None:
        self.values: dict[int, Array | Deferred | Failed] = {}
        self._families: dict[int, set[int]] = {}
        self._uses = _Users()
        self._waits = _Users()
        self._patience_s = PATIENCE_S
        self._deletions = ThreadPoolExecutor(1, thread_name_prefix="fairway-delete")

    def get(self, number: int) -> Any:
        """What a number stands for; an error if it stands for nothing."""
        try:
            return self.values[number]
        except KeyError:
            return Failed(f"NOT_FOUND: this host has no buffer {number}")

    def attempt(self, number: int, make: Callable[[], Array]) -> None:
        """Makes an array now; a failure becomes the buffer's state."""
        try:
            self.values[number] = make()
        except Exception as error:
            self.values[number] = Failed(error_text(error))

    def derive(self, number: int, sources: list[int], make: Callable[[], Array]) -> None:
        """Makes an array of other buffers, at once unless one of them is still to come."""
        if not any(isinstance(self.values.get(source), Lazy) for source in sources):
            self.attempt(number, make)
            return
        self.values[number] = lazy = Lazy(make)
        for source in sources:
            self.note_use(source, lazy)

    def share(self, number: int, sources: list[int]) -> None:
        """A buffer is another name of memory that others have."""
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
        """The same for all buffers that may share memory.

        Addresses do not say who does: jaxlib reads host memory in place, so that buffers which are
        freed each by itself may have one address.
        """
        family = self._families.get(number)
        return -number if family is None else id(family)

    def poison(self, numbers: list[int], error: str) -> None:
        """Makes buffers that give this error on use."""
        for number in numbers:
            self.values[number] = Failed(error)

    def note_use(self, number: int, use: Future[Any] | Lazy) -> None:
        """Another thread reads a buffer until ``use`` ends."""
        self._uses.note(number, use)

    def note_wait(self, number: int, wait: Future[Any]) -> None:
        """Another thread waits until a buffer is computed, which its donation does not disturb."""
        self._waits.note(number, wait)

    def use(self, threads: Executor, number: int, work: Callable[[], None]) -> None:
        """Lets another thread read a buffer."""
        self.note_use(number, threads.submit(work))

    def unfinished_uses(self, numbers: list[int]) -> dict[int, list[Future[Any] | Lazy]]:
        """The buffers that threads read for longer than a moment, which must not be donated.

        Once one did, none is waited for before others are read as fast as usual again.
        """
        late = self._uses.unfinished(numbers, self._patience_s)
        self._patience_s = 0.0 if late else PATIENCE_S
        return late

    def finish_waits(self, numbers: list[int]) -> None:
        """Waits until no thread has to do with these buffers, so that they may be moved."""
        self._uses.finish(numbers)
        self._waits.finish(numbers)

    def delete(self, numbers: list[int]) -> None:
        """Frees device memory, whoever shares it."""
        late = self.unfinished_uses(numbers)
        for number in numbers:
            value = self.values.get(number)
            if value is None or isinstance(value, Failed):
                continue
            # A launch that were given what is deleted would take the process down.
            self.values[number] = Failed("INVALID_ARGUMENT: the array has been deleted")
            if number in late:
                self._deletions.submit(_delete_after, late[number], value)
            else:
                value.delete()
        collect_garbage()

    def free(self, numbers: list[int]) -> None:
        """Forgets buffers."""
        pop = self.values.pop
        for number in numbers:
            pop(number, None)
            if (family := self._families.pop(number, None)) is not None:
                family.discard(number)
        self._uses.forget(numbers)
        self._waits.forget(numbers)
        collect_garbage()
