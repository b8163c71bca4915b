"""Planned programs: their collectives follow a joint schedule (algorithm, channels and order).

The first runs of a program are unplanned. The first of its hosts measures their computations,
plans, and reports the plan to the controller, which assigns a plan to each run. A planned run is
a step of a team of its hosts: collectives are submitted as their inputs become ready, each by a
thread of its own, and executed in the order of the plan. Each plan has a team of its own, so that a
run of the previous plan ends as it began. A plan that turns out slower is rolled back.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from fairway.communication.steps import Span
from fairway.communication.team import Script, Team, Vector
from fairway.errors import TeamError
from fairway.host import messages
from fairway.host.objects import Failed, error_text
from fairway.host.outline import Outline, Shift, can_be_planned, collectives_of
from fairway.host.reporter import Reporter
from fairway.host.teams import Carry, Elements, Teams, Turn, failed
from fairway.host.watch import Propose, Watch

__all__ = ["PlannedRun", "Plans"]


class Plans:
    """The plans of this host's programs.

    Args:
        teams: creates teams of hosts.
        host: its number over all islands.
        report: sends reports to the controller.
    """

    def __init__(self, teams: Teams, host: int, report: Reporter) -> None:
        self._teams = teams
        self._host = host
        self._report = report
        self._loaded: dict[int, list[messages.Command]] = {}
        self._programs: dict[int, _Program | None] = {}

    def load(self, command: messages.LoadProgram) -> None:
        """Keeps the commands of a program's runs on this host, if any of them may be planned."""
        if any(isinstance(step, messages.Collective) for step in command.steps):
            self._loaded[command.executable] = command.steps
        else:
            self._programs[command.executable] = None

    def unload(self, executable: int) -> None:
        """Forgets a program; runs in progress continue."""
        self._loaded.pop(executable, None)
        program = self._programs.pop(executable, None)
        if program is not None:
            program.close()

    def adopt(self, command: messages.AdoptPlan) -> None:
        """Adds a plan, used from the first run on that names its number."""
        program = self._program(command.executable)
        if program is not None:
            program.adopt(command.plan, Script.parse(command.script) if command.script else None)

    def begin(self, command: messages.RunProgram, shift: Shift) -> PlannedRun | None:
        """Begins a run.

        Args:
            command: the run; its first tag is the same on all hosts, and names it.
            shift: buffers of its slots.

        Returns:
            None if its collectives cannot be planned; all hosts decide the same.
        """
        program = self._program(command.executable)
        return None if program is None else program.begin(command.plan, command.first_tag, shift)

    def _program(self, executable: int) -> _Program | None:
        if executable not in self._programs:
            steps = self._loaded.pop(executable)
            found = collectives_of(steps)
            made = None
            if can_be_planned([one for one, _ in found.values()]):

                def propose(
                    number: int, script: Script | None, predicted_s: Sequence[float]
                ) -> None:
                    predicted = None
                    if predicted_s:
                        measured, planned = (round(one * 1e9) for one in predicted_s)
                        predicted = measured, planned
                    text = script.text if script is not None else ""
                    report = messages.PlanProposed(executable, number, text, predicted)
                    self._report.send(report)

                outline = Outline(steps, found, self._host)
                made = _Program(self._teams, outline, propose)
            self._programs[executable] = made
        return self._programs[executable]


class _Program:
    """One program and its plans; each run uses the plan that its command names.

    Args:
        teams: creates teams of hosts.
        outline: this host's part of a run.
        propose: proposes another plan to all hosts.
    """

    def __init__(self, teams: Teams, outline: Outline, propose: Propose) -> None:
        self.outline = outline
        self.teams = teams
        self.propose = propose
        self.threads = ThreadPoolExecutor(len(outline.carries), "fairway-planned")
        self._scripts: dict[int, Script | None] = {1: None}
        self._kept: _Kept | None = None
        costs = teams.costs(len(outline.carries[0].hosts))
        self._watch = Watch(outline, costs, propose) if outline.is_first else None

    def adopt(self, number: int, script: Script | None) -> None:
        """Adds a plan; None runs collectives unplanned."""
        self._scripts[number] = script

    def begin(self, number: int, name: int, shift: Shift) -> PlannedRun:
        """Begins a run with a plan."""
        if self._kept is None or self._kept.number != number:
            if self._kept is not None:
                self._kept.retire()
            script = self._scripts[number]
            self._scripts = {n: one for n, one in self._scripts.items() if n >= number}
            self._kept = _Kept(self, number, script, name)
        return PlannedRun(self, self._kept, self._watch, shift)

    def close(self) -> None:
        """Retires the current plan; no more runs begin."""
        if self._kept is not None:
            self._kept.retire()
        if self._watch is not None:
            self._watch.close()
        self.threads.shutdown(wait=False)


class _Kept:
    """A plan in use, and the team that executes it.

    Args:
        program: the program of the plan.
        number: number of the plan.
        script: the plan; None runs collectives unplanned, and needs no team.
        name: name of the team.
    """

    def __init__(self, program: _Program, number: int, script: Script | None, name: int) -> None:
        self.number = number
        self.script = script
        self._program = program
        self._name = name
        self._starts = ThreadPoolExecutor(1, "fairway-begin")
        self._lock = threading.Lock()
        self._team: Team | None = None
        self._part: Any = None
        self._failure: TeamError | None = None
        self._runs = 0
        self._is_retired = False
        self._is_broken = False

    def begin(self) -> Future[tuple[Team, int]]:
        """Begins a step, after earlier ones; the future's result is the team and the step."""
        with self._lock:
            self._runs += 1
        return self._starts.submit(self._begin_now)

    def _begin_now(self) -> tuple[Team, int]:
        # Without this, hosts that join late would take the next run for this one.
        if self._failure is not None:
            raise self._failure
        try:
            return self._meet_and_begin()
        except TeamError as error:
            self._failure = error
            raise

    def _meet_and_begin(self) -> tuple[Team, int]:
        assert self.script is not None
        if self._team is None:
            self._team = self._program.teams.meet(
                self._program.outline.carries[0].hosts, self._name
            )
            self._part = self._team.prepare(self.script)
        return self._team, self._team.begin(self._part)

    def broken(self) -> None:
        """Leaves a team that cannot continue, and proposes to run collectives unplanned."""
        with self._lock:
            if self._is_broken:
                return
            self._is_broken = True
        if self._team is not None:
            self._team.close()
        self._program.propose(self.number, None, ())

    def end_run(self) -> None:
        """Counts a run as ended."""
        with self._lock:
            self._runs -= 1
        self._close_if_over()

    def retire(self) -> None:
        """Closes the team once its last run has ended; no more runs begin."""
        with self._lock:
            self._is_retired = True
        self._close_if_over()

    def take_spans(self) -> list[Span]:
        """Returns the spans of communication since the last call."""
        return self._team.take_spans() if self._team is not None and not self._is_broken else []

    def _close_if_over(self) -> None:
        with self._lock:
            if not self._is_retired or self._runs:
                return
        self._starts.shutdown(wait=False)
        if self._team is not None and not self._is_broken:
            self._team.close()


class PlannedRun:
    """One run of a program with a plan.

    Attributes:
        threads: threads that run its collectives.
        teams: teams of this host.
    """

    def __init__(self, program: _Program, kept: _Kept, watch: Watch | None, shift: Shift) -> None:
        self.threads = program.threads
        self.teams = program.teams
        self._program = program
        self._kept = kept
        self._watch = watch
        self._shift = shift
        self._started = kept.begin() if self.is_kept else None
        self._lock = threading.Lock()
        self._left = len(program.outline.carries)
        self._launches = 0

    @property
    def is_kept(self) -> bool:
        """Whether collectives follow a plan, or run unplanned."""
        return self._kept.script is not None

    def turn(self, number: int, carries: Sequence[Carry]) -> Turn:
        """Returns the turn of one of its collectives.

        Args:
            number: number of the collective in the program.
            carries: this host's part of it.
        """
        return _PlannedTurn(self, self._program.outline.operations[number], carries)

    def launched(self, token: Any) -> None:
        """Notes that its next launch was enqueued on the devices."""
        if self._watch is not None:
            self._watch.launched(self._launches, token)
        self._launches += 1

    def end(self) -> None:
        """Notes that all its launches were issued."""
        if self._watch is not None:
            self._watch.end(self._kept, self._shift)

    def carry(
        self,
        operation: int,
        carry: Carry,
        held: Mapping[Any, Elements],
        poison: str | None = None,
    ) -> Vector:
        """Runs a collective; returns its result.

        Args:
            operation: index of the collective.
            carry: this host's part of it.
            held: this host's values.
            poison: error that replaces the values, if this host has none.

        Raises:
            Failed: a host had no values, is lost or stuck.
        """
        assert self._started is not None
        try:
            team, step = self._started.result()
            collective = self._program.outline.collectives[operation]
            vector = team.vector(collective, carry.dtype)
            if poison is None:
                carry.pack(vector, held)
            at = (step, operation)
            result = team.wait(team.submit(at, collective, vector, carry.reduction, poison))
        except TeamError as error:
            if error.kind != "Poisoned":
                self._kept.broken()
            self._count_down()
            raise failed(carry, error) from None
        except Exception as error:
            if poison is None:
                raise  # the caller poisons it for the other hosts
            self._kept.broken()
            self._count_down()
            raise Failed(error_text(error)) from None
        self._count_down()
        return result

    def _count_down(self) -> None:
        with self._lock:
            self._left -= 1
            is_over = self._left == 0
        if is_over:
            self._kept.end_run()


class _PlannedTurn(Turn):
    """One collective of a planned run."""

    def __init__(self, run: PlannedRun, operation: int, carries: Sequence[Carry]) -> None:
        super().__init__(run.teams, carries, 0)
        self._run = run
        self._operation = operation

    def _carry(self, carry: Carry, number: int, held: Mapping[Any, Elements]) -> Vector:
        return self._run.carry(self._operation, carry, held)

    def _poison(self, carry: Carry, number: int, reason: str) -> None:
        with contextlib.suppress(Failed):  # the other hosts know, or are lost
            self._run.carry(self._operation, carry, {}, reason)
