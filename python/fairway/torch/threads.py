"""Threads of the backend, which end before Python does.

A daemon thread that is in C++ when the interpreter is finalized is unwound there, and PyTorch's
destructors turn that into ``terminate called without an active exception``: a process that had
only to report an error ends by SIGABRT. So when groups have been left at exit, their threads are
waited for.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable

__all__ = ["start"]

ENDING_S = 5.0
"""How long threads are waited for at exit, all together."""

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


# Handlers run in the reverse order of registration: groups, which come later, are left before.
atexit.register(_end)
