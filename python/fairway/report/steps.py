"""The report of consecutive steps: when each node began and ended, measured or simulated.

Its text has a header, figures of a simulated step, and a line for each node of each step::

    report of @train, simulated, of step graph 0123456789abcdef
    makespan_ns: 1500
    transferred_bytes: 4096
    step 0
    #0 from 0ns to 1200ns
    #1 from 1300ns to 1500ns
    step 1
    ...

Nodes are those of the step graph (``lower``); a node that was not observed has no line.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import re
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from fairway import _native
from fairway.errors import ReportError

__all__ = ["REPORT", "Span", "StepReport", "digest"]

REPORT = ".report"
"""Suffix of a report's file."""
HEADER = re.compile(r"report of @(\S+), (measured|simulated), of step graph ([0-9a-f]{16})")
NODE = re.compile(r"#(\d{1,9}) from (\d{1,19})ns to (\d{1,19})ns")
FIGURE = re.compile(r"([a-z_]{1,64}): (\d{1,19})")
STEP = re.compile(r"step (\d{1,9})")


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """When a node ran, in ns since the report's begin."""

    begin_ns: int
    end_ns: int

    @property
    def length_ns(self) -> int:
        """How long it took."""
        return self.end_ns - self.begin_ns

    def joined(self, other: Span) -> Span:
        """Returns the span of both together: from the later begin until both have ended."""
        begin = max(self.begin_ns, other.begin_ns)
        return Span(begin, max(begin, self.end_ns, other.end_ns))


@dataclasses.dataclass(frozen=True)
class StepReport:
    """Consecutive steps of one step graph.

    Attributes:
        step: name of the step graph.
        source: ``measured`` or ``simulated``.
        graph: :func:`digest` of the step graph.
        steps: for each step the nodes that were observed.
        figures: of one step, by name; names end with their unit.
    """

    step: str
    source: str
    graph: str
    steps: Sequence[dict[int, Span]]
    figures: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @classmethod
    def observed(
        cls, graph: _native.StepGraph, source: str, steps: Sequence[dict[int, Span]]
    ) -> Self:
        """Returns the report of steps of a graph whose times have any origin."""
        first = min((span.begin_ns for step in steps for span in step.values()), default=0)
        moved = [
            {
                number: Span(span.begin_ns - first, span.end_ns - first)
                for number, span in sorted(step.items())
            }
            for step in steps
        ]
        return cls(graph.name, source, digest(graph), moved)

    @property
    def ends_ns(self) -> list[int]:
        """End of the last node of each step."""
        return [max((span.end_ns for span in step.values()), default=0) for step in self.steps]

    @property
    def periods_ns(self) -> list[int]:
        """Time from the end of each step to the end of the next one."""
        return [end - begin for begin, end in itertools.pairwise(self.ends_ns)]

    def __str__(self) -> str:
        lines = [f"report of @{self.step}, {self.source}, of step graph {self.graph}"]
        lines += [f"{name}: {figure}" for name, figure in self.figures.items()]
        for number, step in enumerate(self.steps):
            lines.append(f"step {number}")
            for node, span in sorted(step.items()):
                lines.append(f"#{node} from {span.begin_ns}ns to {span.end_ns}ns")
        return "\n".join(lines) + "\n"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses the text of ``str``.

        Raises:
            ReportError: the text is no report; names the line.
        """
        first, *lines = text.split("\n")
        header = HEADER.fullmatch(first)
        if header is None:
            raise ReportError(f"line 1 is {reprlib.repr(first)}; expected `report of @NAME, ...`")
        steps: list[dict[int, Span]] = []
        figures: dict[str, int] = {}
        for number, line in enumerate(lines, 2):
            if (node := NODE.fullmatch(line)) and steps:
                index, begin, end = map(int, node.groups())
                if end < begin or index in steps[-1]:
                    what = "it is there twice" if index in steps[-1] else "it ends before it begins"
                    raise ReportError(f"line {number}: node #{index}: {what}")
                steps[-1][index] = Span(begin, end)
            elif (figure := FIGURE.fullmatch(line)) and not steps and figure[1] not in figures:
                figures[figure[1]] = int(figure[2])
            elif (step := STEP.fullmatch(line)) and int(step[1]) == len(steps):
                steps.append({})
            elif line or number != len(lines) + 1:
                raise ReportError(
                    f"line {number} is {reprlib.repr(line)}; expected `step {len(steps)}` or a node"
                )
        return cls(header[1], header[2], header[3], steps, figures)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads a file.

        Raises:
            ReportError: it cannot be read, or holds no report.
        """
        try:
            return cls.parse(path.read_text())
        except OSError as error:
            raise ReportError(f"cannot read {path}: {error.strerror}") from None
        except (ReportError, UnicodeDecodeError) as error:
            raise ReportError(f"{path} holds no report: {error}") from None


def digest(graph: _native.StepGraph) -> str:
    """Returns what identifies a step graph in its reports."""
    return hashlib.sha256(str(graph).encode()).hexdigest()[:16]
