"""The report of consecutive steps: when each node began and ended, measured or simulated.

Its text has a header, and a line for each node of each step::

    report of @train, measured, of program 0123456789abcdef
    step 0
    #0 from 0ns to 1200ns
    #1 from 1300ns to 1500ns
    step 1
    ...

Nodes are those of the step graph of the program (``lower``); a node that was not observed has no
line.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import re
import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from fairway.errors import ReportError

__all__ = ["REPORT", "Span", "StepReport", "digest"]

REPORT = ".report"
"""Suffix of a report's file."""
HEADER = re.compile(r"report of @(\S+), (measured|simulated), of program ([0-9a-f]{16})")
NODE = re.compile(r"#(\d{1,9}) from (\d{1,19})ns to (\d{1,19})ns")
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


@dataclasses.dataclass(frozen=True)
class StepReport:
    """Consecutive steps of one program.

    Attributes:
        step: name of the program.
        source: ``measured`` or ``simulated``.
        program: :func:`digest` of the program's text.
        steps: for each step the nodes that were observed.
    """

    step: str
    source: str
    program: str
    steps: Sequence[dict[int, Span]]

    @property
    def ends_ns(self) -> list[int]:
        """End of the last node of each step."""
        return [max((span.end_ns for span in step.values()), default=0) for step in self.steps]

    @property
    def periods_ns(self) -> list[int]:
        """Time from the end of each step to the end of the next one."""
        return [end - begin for begin, end in itertools.pairwise(self.ends_ns)]

    def __str__(self) -> str:
        lines = [f"report of @{self.step}, {self.source}, of program {self.program}"]
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
        for number, line in enumerate(lines, 2):
            if (node := NODE.fullmatch(line)) and steps:
                index, begin, end = map(int, node.groups())
                if end < begin or index in steps[-1]:
                    what = "it is there twice" if index in steps[-1] else "it ends before it begins"
                    raise ReportError(f"line {number}: node #{index}: {what}")
                steps[-1][index] = Span(begin, end)
            elif (step := STEP.fullmatch(line)) and int(step[1]) == len(steps):
                steps.append({})
            elif line or number != len(lines) + 1:
                raise ReportError(
                    f"line {number} is {reprlib.repr(line)}; expected `step {len(steps)}` or a node"
                )
        return cls(header[1], header[2], header[3], steps)

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


def digest(program: str) -> str:
    """Returns what identifies the text of a program in its reports."""
    return hashlib.sha256(program.encode()).hexdigest()[:16]
