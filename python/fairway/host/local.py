"""This host: what the parts of its executor share."""

from __future__ import annotations

import dataclasses

from fairway import _native
from fairway.host.backend import Backend
from fairway.host.reporter import Reporter
from fairway.host.stored import StoredPrograms
from fairway.host.trace import Trace

__all__ = ["LocalHost"]


@dataclasses.dataclass(frozen=True)
class LocalHost:
    """This host.

    Attributes:
        number: its number over all islands.
        backend: its devices.
        plane: its end of the data plane.
        report: sends reports to the controller.
        stored: its executables on disk.
        trace: records runs, transfers and compilations, if set.
    """

    number: int
    backend: Backend
    plane: _native.DataPlane
    report: Reporter
    stored: StoredPrograms
    trace: Trace | None = None
