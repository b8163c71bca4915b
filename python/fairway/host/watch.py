"""Measures runs of a program, and replans its collectives from them."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import math
import queue
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from fairway.communication.replanning import WORTH, Proposal, Replanner
from fairway.communication.steps import ChannelCost, Seen, Span, waited_ns
from fairway.communication.team import Script
from fairway.host.outline import Outline, Shift, launch

__all__ = ["Kept", "Propose", "Watch"]

_LOG = logging.getLogger(__name__)

UNSEEN_RUNS = 2
"""Runs that are not measured: the first ones compile and fill memory."""
SEEN_RUNS = 8
"""Runs that are measured together."""

Propose = Callable[[int, Script | None, Sequence[float]], None]
"""Proposes to all hosts a script instead of the plan of this number, or None to run unplanned; with
the measured time of a run in seconds and the predicted one, both empty if unknown."""


class Kept(Protocol):
    """A plan in use."""

    number: int
    script: Script | None

    def take_spans(self) -> list[Span]:
        """Returns the spans of communication since the last call."""


@dataclasses.dataclass(frozen=True)
class _Ended:
    """All launches of a run have been issued."""

    kept: Kept
    shift: Shift


@dataclasses.dataclass
class _Lot:
    """Successive runs with one plan.

    Attributes:
        kept: the plan.
        ends_ns: end of the run before them, and of each of them.
        shifts: buffers of the slots of those runs.
        busy_s: duration of each computation in each of them.
    """

    kept: Kept
    ends_ns: list[int]
    shifts: list[Shift]
    busy_s: dict[str, list[float]] = dataclasses.field(default_factory=dict)

    def seen(self) -> Seen:
        """Returns the measurements of these runs."""
        spans = self.kept.take_spans()
        took = max(self.ends_ns[-1] - self.ends_ns[0], 1)
        waited = max(waited_ns(spans).values(), default=0) / took
        busy = {name: statistics.median(each) for name, each in self.busy_s.items()}
        each = statistics.median(end - begin for begin, end in itertools.pairwise(self.ends_ns))
        return Seen(each, waited, busy, spans)


class Watch:
    """Measures a program's computations and motifs, and proposes plans from the measurements.

    Args:
        outline: this host's part of a run; it is the first host of the collectives.
        costs: cost of each channel.
        propose: proposes another plan to all hosts.
    """

    def __init__(self, outline: Outline, costs: Sequence[ChannelCost], propose: Propose) -> None:
        self._outline = outline
        self._costs = costs
        self._propose = propose
        self._queue: queue.SimpleQueue[tuple[int, Any, int] | _Ended | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._kept: Kept | None = None
        self._replanner: Replanner | None = None
        self._predicted_s: tuple[float, ...] = ()
        self._best: tuple[float, Script | None, tuple[float, ...]] = math.inf, None, ()
        self._is_settled = False
        self._is_closed = False

    def launched(self, place: int, token: Any) -> None:
        """Notes that a launch of a run was enqueued on the devices."""
        if not self._is_closed:
            self._queue.put((place, token, time.monotonic_ns()))

    def end(self, kept: Kept, shift: Shift) -> None:
        """Notes that a run's launches are complete."""
        if self._is_closed:
            return
        self._queue.put(_Ended(kept, shift))
        if self._thread is None:
            self._thread = threading.Thread(target=self._look, name="fairway-watch", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Ends the thread; there are no more runs."""
        self._queue.put(None)

    def _look(self) -> None:
        try:
            for lot in self._lots():
                self._judge(lot)
        except Exception:  # runs continue with the plan that they have
            _LOG.exception("the runs of a program are not looked at any more")
        finally:
            self._is_closed = True

    def _lots(self) -> Iterator[_Lot]:
        lot: _Lot | None = None
        ended_ns, unseen = 0, UNSEEN_RUNS
        busy: dict[str, float] = {}
        while (item := self._queue.get()) is not None:
            if not isinstance(item, _Ended):
                place, token, begun_ns = item
                _wait(token)
                now = time.monotonic_ns()
                busy[launch(place)] = (now - max(begun_ns, ended_ns)) / 1e9
                ended_ns = now
                continue
            if lot is None or lot.kept is not item.kept or unseen > 0:
                unseen -= 1
                item.kept.take_spans()
                lot = _Lot(item.kept, [ended_ns], [item.shift])
            else:
                lot.shifts.append(item.shift)
                lot.ends_ns.append(ended_ns)
                for name, took in busy.items():
                    lot.busy_s.setdefault(name, []).append(took)
                if len(lot.shifts) > SEEN_RUNS:
                    yield lot
                    lot = _Lot(item.kept, [ended_ns], [item.shift])
            busy = {}

    def _judge(self, lot: _Lot) -> None:
        if self._is_settled:
            return
        kept, seen = lot.kept, lot.seen()
        if kept is self._kept:
            assert self._replanner is not None
            self._replanner.look(0, seen)
            return
        if kept.script is None and self._kept is not None:
            # With the previous plan, some host could not continue.
            self._is_settled = True
            return
        self._kept = kept
        least_ns, script, predicted_s = self._best
        if seen.step_ns > least_ns * (1 + WORTH):
            _LOG.warning("runs take longer by the new plan; they go as before from now on")
            self._is_settled = True
            self._propose(kept.number, script, predicted_s)
            return
        self._best = seen.step_ns, kept.script, self._predicted_s

        def propose(made: Proposal) -> int:
            self._predicted_s = made.seen_s, made.predicted_s
            self._propose(kept.number, made.script, self._predicted_s)
            return sys.maxsize  # the next runs have another plan: never measure this one again

        step = self._outline.whole(*lot.shifts[-2:])
        before = self._replanner
        costs = self._costs if before is None else before.costs
        self._replanner = Replanner(propose, step, costs, kept.script)
        if before is None:
            self._replanner.plan(seen)


def _wait(token: Any) -> None:
    """Waits for the end of a launch; its error is raised where its results are used."""
    if token is not None:
        with contextlib.suppress(Exception):
            token.block_until_ready()
