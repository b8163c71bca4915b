"""``fairway explain``: every rung of a step is printed, and read again to the same bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fairway._native import StepGraph
from fairway.analysis.rungs import climb
from fairway.cli import app
from fairway.communication.steps import ChannelCost
from fairway.errors import ConfigError, GraphError, PlacementError
from fairway.placement.chakra import write_step

GOLDEN = Path(__file__).resolve().parents[1] / "crates" / "ir" / "tests" / "golden"
DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "topoopt"
COSTS = [ChannelCost(8e9)]


def explain(*words: str) -> str:
    found = CliRunner().invoke(app, ["explain", *words])
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    assert found.exit_code == 0, found.output
    return found.stdout


@pytest.mark.parametrize("name", ["data_parallel", "pipeline", "experts"])
def test_every_rung_is_printed_and_read_again(name: str, tmp_path: Path) -> None:
    program = GOLDEN / f"{name}.fw"
    shown = explain(str(program), "--out", str(tmp_path / "rungs"))
    written = {path.name: path.read_text() for path in (tmp_path / "rungs").iterdir()}
    assert set(written) == {"program.fw", "step.step", "plan.txt", "report.txt"}
    assert all(text.splitlines()[0] in shown for text in written.values())
    assert written["program.fw"] == program.read_text()
    assert written["step.step"] == (GOLDEN / f"{name}.step").read_text()
    # What was written is explained alike, from the step graph on.
    again = json.loads(explain(str(tmp_path / "rungs" / "step.step"), "--json"))
    assert again == {
        "step": written["step.step"],
        "plan": written["plan.txt"],
        "report": written["report.txt"],
    }


def test_a_report_says_what_is_exposed() -> None:
    rungs = climb(GOLDEN / "pipeline.fw", None, COSTS)
    # 1000 + 128 bytes + 2000 + 128 bytes + 1800 ns, of which device 0 computes 2800.
    report = {rung.name: rung.text for rung in rungs.rungs}["report"]
    assert rungs.report.busy_s == pytest.approx([2.8e-6, 2e-6])
    exposed_ms = 1e3 * (rungs.report.seconds - 2.8e-6)
    assert f"exposed communication: {exposed_ms:.6f} ms" in report
    assert "#2 @loss: compute, from" in report


def test_plans_name_what_they_cut() -> None:
    rungs = climb(GOLDEN / "experts.fw", None, [ChannelCost(8e9), ChannelCost(4e9)])
    plan = {rung.name: rung.text for rung in rungs.rungs}["plan"]
    assert "#1: 32 bytes" in plan
    assert "#3: 64 bytes" in plan
    assert plan.count("channel") >= 3


def test_traces_of_chakra_are_explained(tmp_path: Path) -> None:
    step = StepGraph(2)
    first = step.compute(0, 1000)
    step.collective("all_reduce", [0, 1], 800, [first])
    write_step(tmp_path / "traces", step)
    found = json.loads(explain(str(tmp_path / "traces"), "--json"))
    assert list(found) == ["step", "plan", "report"]
    assert "all_reduce 800 of 1bytes on [0..2]" in found["step"]


@pytest.mark.skipif(not DATA.exists(), reason="TopoOpt's graphs are not here")
def test_graphs_of_flexflow_are_explained() -> None:
    found = json.loads(explain(str(DATA / "100dlrm_16.fbuf"), "--json"))
    graph = StepGraph.parse(found["step"])
    assert (len(graph), str(graph)) == (1278, found["step"])
    assert "makespan:" in found["report"]


def test_what_cannot_be_explained_is_refused(tmp_path: Path) -> None:
    program = str(GOLDEN / "pipeline.fw")
    broken = tmp_path / "broken.step"
    broken.write_text("step @s on 2 devices\n#0 = gossip\n")
    binary = tmp_path / "binary.step"
    binary.write_bytes(b"\xff\xfe\x00")
    for words, error, says in (
        (["notes.txt"], ConfigError, "ends in .fw, .step, .fbuf"),
        ([str(broken)], GraphError, "line 2: expected"),
        ([str(binary)], GraphError, "holds no step graph"),
        ([program, "--fabric", "elect-flat:1"], PlacementError, "for 2 devices"),
        ([program, "--fabric", "mesh:4"], PlacementError, "there is no interconnect"),
        ([program, "--channels", "fast"], ConfigError, "rate of a channel"),
        ([program, "--out", str(tmp_path / "a" / "b")], ConfigError, "there is no folder"),
    ):
        with pytest.raises(error, match=says):
            explain(*words)
