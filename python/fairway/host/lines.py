"""Work queues: each runs its work in order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future

__all__ = ["Lines"]


class Lines:
    """Runs the work of one queue in FIFO order, and queues concurrently.

    A queue has a thread as long as it is not empty.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[Hashable, deque[tuple[Future[None], Callable[[], None]]]] = {}

    def submit(self, line: Hashable, work: Callable[[], None]) -> Future[None]:
        """Appends work to a queue."""
        future: Future[None] = Future()
        with self._lock:
            if line in self._waiting:
                self._waiting[line].append((future, work))
                return future
            self._waiting[line] = deque([(future, work)])
        drain = threading.Thread(target=self._drain, args=(line,), name="fairway-line", daemon=True)
        try:
            drain.start()
        except RuntimeError:  # no thread can be started
            self._drain(line)
        return future

    def _drain(self, line: Hashable) -> None:
        while True:
            with self._lock:
                waiting = self._waiting[line]
                if not waiting:
                    del self._waiting[line]
                    return
                future, work = waiting.popleft()
            try:
                work()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)
