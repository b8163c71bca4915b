"""Plans as they were predicted and as ranks executed them, on one timeline."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from test_team import COSTS, SMALL, as_ranks, team
from typer.testing import CliRunner

from fairway.cli import app
from fairway.communication import steps
from fairway.communication.steps import Report
from fairway.communication.team import Script, Team
from fairway.communication.timelines import Timelines, timelines
from fairway.errors import ConfigError, FairwayError, ReportError
from fairway.report.steps import StepReport, digest
from fairway.studies.workloads import dlrm

COUNT = 8


@pytest.fixture(scope="module")
def executed() -> Timelines:
    """Two ranks that have trained under a plan with both channels."""
    step = SMALL.step(2)
    plan = steps.plan(step, COSTS, evaluations=300)["joint+striping"]

    def act(one: Team) -> Report:
        program = dlrm.Rank(SMALL, one.rank, 2)
        program.load(COUNT)
        return steps.run(one, step, Script.parse(plan.script.text), program, COUNT)

    with team(2) as teams:
        return timelines("dlrm", step, plan, as_ranks(teams, act))


def test_every_node_of_a_plan_is_predicted_and_measured(executed: Timelines) -> None:
    nodes = executed.graph.nodes
    for report in (executed.predicted, executed.measured):
        assert report.graph == digest(executed.graph)
        assert len(report.steps) == COUNT
        assert StepReport.parse(str(report)) == report
        for spans in report.steps:
            assert set(spans) == set(range(len(nodes)))
        # What is on one channel is there one after another; so are computations.
        for device in range(executed.graph.devices):
            on = [number for number, node in enumerate(nodes) if node.devices == [device]]
            spans = sorted(
                (span.begin_ns, span.end_ns)
                for found in report.steps
                for number, span in found.items()
                if number in on
            )
            assert spans, device
            slack_ns = 0 if report.source == "simulated" else 2_000_000
            for before, after in itertools.pairwise(spans):
                assert before[1] <= after[0] + slack_ns
    # Computations take at least their set time.
    top = next(number for number, node in enumerate(nodes) if node.name == "top")
    assert all(span[top].length_ns >= 0.004e9 for span in executed.measured.steps)


def invoke(*words: str) -> dict:
    found = CliRunner().invoke(app, ["compare", *words, "--json"], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return json.loads(found.stdout)


def test_a_predicted_report_is_compared_instead_of_a_simulation(
    executed: Timelines, tmp_path: Path
) -> None:
    step = tmp_path / "dlrm.step"
    step.write_text(str(executed.graph))
    measured, predicted = tmp_path / "dlrm.report", tmp_path / "predicted.report"
    measured.write_text(str(executed.measured))
    predicted.write_text(str(executed.predicted))
    figures = invoke(str(step), "--predicted", str(predicted), "--plot", str(tmp_path / "a.png"))
    assert (tmp_path / "a.png").stat().st_size > 10_000
    assert len(figures["nodes"]) == len(executed.graph)
    periods = executed.measured.periods_ns
    assert figures["steps"][-1]["measured_s"] == pytest.approx(periods[-1] / 1e9)
    assert figures["steps"][-1]["predicted_s"] == pytest.approx(
        executed.predicted.periods_ns[-1] / 1e9
    )
    same = invoke(str(step), "--predicted", str(measured))
    assert same["step"]["predicted_s"] == same["step"]["measured_s"]
    other = tmp_path / "other.report"
    other.write_text(str(executed.predicted).replace(digest(executed.graph), 16 * "0"))
    cases: list[tuple[list[str], type[FairwayError], str]] = [
        ([str(step)], ConfigError, r"or a step graph \(.step\) with a report"),
        ([str(step), "--predicted", str(other)], ReportError, "is of step graph 0000"),
        ([str(step), "--predicted", str(tmp_path / "none")], ReportError, "cannot read"),
    ]
    for words, error, says in cases:
        with pytest.raises(error, match=says):
            invoke(*words)
