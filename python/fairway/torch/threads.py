"""Threads of the backend, which are joined before Python exits.

A daemon thread that is in C++ when the interpreter is finalized is unwound there, and PyTorch's
destructors turn that into ``terminate called without an active exception``: a process that had
only to report an error ends by SIGABRT. So at exit, once groups have been left, their threads are
joined.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable

__all__ = ["start"]

ENDING_S = 5.0
"""Total time for joining threads at exit."""

_started: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def start(act: Callable[[], None], name: str) -> threading.Thread:
    """Starts a thread that does not keep the process alive."""
    thread = threading.Thread(target=act, name=name, daemon=True)
    _started.add(thread)
    thread.start()
    return thread


def _end() -> None:
    deadline = time.monotonic() + ENDING_S
    for thread in list(_started):
        if thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))


# Handlers run in reverse order of registration: groups register later, so they are left before.
atexit.register(_end)
