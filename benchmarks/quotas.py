"""Devices of a fixed speed on a machine with few cores: each host's XLA threads get a CPU quota.

Without it, stages of a pipeline share the cores, what one leaves idle makes the others faster, and
there are no bubbles to see. Only the threads that compute are held back; a host's other threads are
what beside an accelerator is its processor. Needs root and the ``cpu`` controller of cgroups v1.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = ["can_limit", "limited"]

CONTROLLER = Path("/sys/fs/cgroup/cpu")
PERIOD_US = 10_000
SHARES = 10_240
"""Ten times what other work of the machine has, so that it takes little of the quotas away."""
THREADS = "XLAEigen"
"""What the names of the threads that compute contain."""


def can_limit() -> bool:
    """Is there what it takes?"""
    return os.geteuid() == 0 and (CONTROLLER / "cpu.cfs_quota_us").exists()


@contextlib.contextmanager
def limited(processes: Sequence[int], cores: float) -> Iterator[None]:
    """Each of these hosts computes with so much of a core, as long as this lasts."""
    groups = []
    try:
        for process in processes:
            group = CONTROLLER / f"fairway-{process}"
            group.mkdir()
            groups.append(group)
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(round(PERIOD_US * cores)))
            (group / "cpu.shares").write_text(str(SHARES))
            for thread in _computing(process):
                (group / "tasks").write_text(thread)
        yield
    finally:
        for group in groups:
            for thread in (group / "tasks").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    (CONTROLLER / "tasks").write_text(thread)
            group.rmdir()


def _computing(process: int) -> list[str]:
    tasks = Path(f"/proc/{process}/task").iterdir()
    return [task.name for task in tasks if THREADS in (task / "comm").read_text()]
