"""``fairway explain``: every rung of a step is printed, and read again to the same bytes."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_capture import SINGLE_DEVICES
from typer.testing import CliRunner

from fairway._native import Placement, StepGraph, StepSchedule, Topology, place_step
from fairway.analysis.rungs import Options, climb
from fairway.cli import app
from fairway.communication import graphs
from fairway.communication.graph_plans import GraphPlan
from fairway.communication.steps import ChannelCost
from fairway.errors import ConfigError, GraphError, PlacementError, TopologyError
from fairway.formats.chakra_steps import write_step
from fairway.placement.reading import read_graph
from fairway.placement.search import simulate_graph
from fairway.report.steps import StepReport, digest

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
    assert set(written) == {"program.fw", "step.step", "placement.txt", "plan.txt", "report.report"}
    assert all(text.splitlines()[0] in shown for text in written.values())
    assert written["program.fw"] == program.read_text()
    assert written["step.step"] == (GOLDEN / f"{name}.step").read_text()
    graph = StepGraph.parse(written["step.step"])
    assert str(graph) == written["step.step"]
    assert str(Placement.parse(written["placement.txt"])) == written["placement.txt"]
    plan = GraphPlan.parse(written["plan.txt"])
    plan.verify(graph)
    assert str(plan) == written["plan.txt"]
    report = StepReport.parse(written["report.report"])
    assert str(report) == written["report.report"]
    assert report.graph == digest(graph)
    assert set(report.steps[0]) == set(range(len(graph)))
    # What was written is explained alike, from the step graph on.
    again = json.loads(explain(str(tmp_path / "rungs" / "step.step"), "--json"))
    assert again == {
        "step": written["step.step"],
        "placement": written["placement.txt"],
        "plan": written["plan.txt"],
        "report": written["report.report"],
    }


@pytest.mark.parametrize("fabric", ["torus:2x4", "dragonfly:16", "fattree:4", "ring:8x2"])
@pytest.mark.parametrize("name", ["data_parallel", "pipeline", "experts"])
def test_packet_networks_get_a_schedule(name: str, fabric: str) -> None:
    rungs = climb(GOLDEN / f"{name}.fw", Options(Topology.parse(fabric), COSTS))
    topology = Topology.parse(fabric)
    texts = {rung.name: rung.text for rung in rungs.rungs}
    assert list(texts) == ["program", "step", "placement", "plan", "schedule", "report"]
    assert str(Placement.parse(texts["placement"])) == texts["placement"]
    assert str(StepSchedule.parse(texts["schedule"], topology)) == texts["schedule"]
    # No vector moves before its node may begin, and the step takes what its computations take.
    schedule = rungs.planned.schedule
    assert schedule is not None
    assert rungs.seconds == schedule.seconds == pytest.approx(max(schedule.ends_s))
    assert rungs.seconds >= rungs.report.figures["compute_ns"] / 1e9
    # What is computed alone takes the same, to a cycle of 900 MHz for each node.
    compute_ns = sum(node.time_ns for node in rungs.graph.nodes)
    assert rungs.seconds <= compute_ns / 1e9 + 1e-3


def test_schedules_that_were_changed_are_refused() -> None:
    rungs = climb(GOLDEN / "pipeline.fw", Options(Topology.parse("ring:4"), COSTS))
    topology = Topology.parse("ring:4")
    text = next(rung.text for rung in rungs.rungs if rung.name == "schedule")
    train = next(line for line in text.splitlines() if line.startswith("train"))
    link, _, start = train.split(" ")[3].partition("@")
    for changed, says in (
        (text.replace(train, train.replace(f"{link}@{start}", f"{link}@0")), "."),
        (text.replace(train, train.replace(f"{link}@", "99@")), "."),
        (text.replace(train + "\n", ""), "."),
        (text + "send 0\n", "expected a number"),
        ("", "expected timing"),
    ):
        with pytest.raises(ValueError, match=says):
            StepSchedule.parse(changed, topology)


def test_devices_that_communicate_are_placed_near_each_other() -> None:
    step = StepGraph(16)
    for device in range(8):
        step.transfer(device, device + 8, 1 << 20)
    cluster = Topology.parse("elect-cluster:16")

    def seconds(evaluations: int) -> float:
        placement = place_step(step, cluster, evaluations, 0)
        return simulate_graph(placement.apply(step, cluster), cluster.interconnect).seconds

    assert seconds(5000) < seconds(1) / 4


def test_a_report_says_what_is_exposed() -> None:
    report = climb(GOLDEN / "pipeline.fw", Options(costs=COSTS)).report
    # 1000 + 128 bytes + 2000 + 128 bytes + 1800 ns, of which device 0 computes 2800.
    assert report.figures["compute_ns"] == 2800
    exposed_ns = report.figures["makespan_ns"] - 2800
    assert report.figures["exposed_communication_ns"] == exposed_ns > 0
    assert report.ends_ns == [report.figures["makespan_ns"]]
    assert "#2 from " in str(report)


def two_channels() -> tuple[StepGraph, GraphPlan]:
    """Returns a step with two kinds of communication, and its plan."""
    costs = [ChannelCost(8e9, 3, 7e10, 0.25, (0.0, 0.125)), ChannelCost(4e9)]
    graph = read_graph(GOLDEN / "experts.fw")
    return graph, graphs.plan(graph, costs)


def test_plans_are_read_as_printed_and_name_what_they_cut() -> None:
    graph, plan = two_channels()
    assert GraphPlan.parse(str(plan)) == plan
    plan.verify(graph)
    assert {kind.nodes for kind in plan.kinds} == {(1,), (3,)}
    assert "channel 0: 8000000000.0 bit/s, 3 ns a round" in str(plan)
    assert "incast 0.25, overlap 0.0 0.125" in str(plan)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("plan of", "plan for", "line 1 is .*expected `plan of"),
        ("channel 1: ", "channel 2: ", "line 3 .*expected channel 1"),
        ("order: #1.0", "order: #1.0.0", "expected `order"),
        ("strict: ", "loose: ", "expected `strict"),
        ("fifo: ", "ordered: ", "expected `fifo"),
        (" plans evaluated", " evaluated", "expected `... plans evaluated"),
        ("incast 0.25", "incast 0..25", "expected numbers"),
        ("incast 0.25", "incast 0.250", "as a plan is printed"),
        ("\n#", "\n\n#", "expected `order"),
    ],
)
def test_what_is_no_plan_is_refused(old: str, new: str, says: str) -> None:
    text = str(two_channels()[1])
    assert old in text
    with pytest.raises(GraphError, match=says):
        GraphPlan.parse(text.replace(old, new, 1))
    for cut in range(0, len(text) - 1, 7):
        with pytest.raises(GraphError):
            GraphPlan.parse(text[:cut])
    with pytest.raises(GraphError, match="expected the end"):
        GraphPlan.parse(f"{text}more\n")


def test_plans_of_other_graphs_do_not_verify() -> None:
    graph, plan = two_channels()
    first, second = plan.kinds
    for changed, says in (
        (dataclasses.replace(plan, step="other"), "the plan is of @other"),
        (dataclasses.replace(plan, kinds=(first,)), "no strategy of: #3"),
        (dataclasses.replace(plan, kinds=(first, second, second)), "a kind that the graph lacks"),
        (
            dataclasses.replace(plan, kinds=(first, dataclasses.replace(second, channel=2))),
            "there are 2 channels",
        ),
        (
            dataclasses.replace(plan, kinds=(first, dataclasses.replace(second, segments=0))),
            "cannot be carried out",
        ),
        (dataclasses.replace(plan, order=plan.order[1:]), "pieces of communication; the step has"),
        (dataclasses.replace(plan, order=plan.order + plan.order[:1]), "comes twice"),
        (dataclasses.replace(plan, order=((0, 0), *plan.order)), "piece 0 of node 0, which is not"),
    ):
        with pytest.raises(GraphError, match=says):
            changed.verify(graph)


def test_traces_of_chakra_are_explained(tmp_path: Path) -> None:
    step = StepGraph(2)
    first = step.compute(0, 1000)
    step.collective("all_reduce", [0, 1], 800, [first])
    write_step(tmp_path / "traces", step)
    found = json.loads(explain(str(tmp_path / "traces"), "--json"))
    assert list(found) == ["step", "placement", "plan", "report"]
    assert "all_reduce 800 of 1bytes on [0..2]" in found["step"]
    assert str(GraphPlan.parse(found["plan"])) == found["plan"]
    assert str(StepReport.parse(found["report"])) == found["report"]


@pytest.mark.skipif(not DATA.exists(), reason="TopoOpt's graphs are not here")
def test_graphs_of_flexflow_are_explained() -> None:
    found = json.loads(explain(str(DATA / "100dlrm_16.fbuf"), "--json"))
    graph = StepGraph.parse(found["step"])
    assert (len(graph), str(graph)) == (1278, found["step"])
    plan = GraphPlan.parse(found["plan"])
    plan.verify(graph)
    assert str(plan) == found["plan"]
    report = StepReport.parse(found["report"])
    assert (str(report), len(report.steps[0])) == (found["report"], 1278)


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
        ([program, "--fabric", "elect-flat:1"], PlacementError, "the topology has 1$"),
        ([program, "--fabric", "mesh:4"], TopologyError, "cannot read a fabric from"),
        ([program, "--channels", "fast"], ConfigError, "rate of a channel"),
        ([program, "--out", str(tmp_path / "a" / "b")], ConfigError, "there is no folder"),
    ):
        with pytest.raises(error, match=says):
            explain(*words)


PIPELINE = f"import sys\nassert sys.argv[1:] == ['--steps', '3'], sys.argv\n{SINGLE_DEVICES}"


def fairway(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fairway", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("fabric", ["torus:2x2", "elect-cluster:8", "sip-ring:4"])
def test_a_known_step_is_predicted_on_any_topology(fabric: str) -> None:
    program = str(GOLDEN / "pipeline.fw")
    figures, faster = (
        json.loads(fairway("predict", program, "--fabric", fabric, "--json", *more).stdout)
        for more in ((), ("--scale", "0.01"))
    )
    rungs = climb(GOLDEN / "pipeline.fw", Options(Topology.parse(fabric)))
    assert figures["predicted_s"] == rungs.seconds
    assert figures["compute_s"] == pytest.approx(2.8e-6)
    assert faster["compute_s"] == pytest.approx(2.8e-8)
    assert faster["predicted_s"] < figures["predicted_s"]


def test_a_script_is_predicted_in_one_command(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PIPELINE)
    ended = fairway(
        "predict",
        str(script),
        "--steps",
        "3",
        "--fabric",
        "torus:2x2",
        "--islands",
        "2x1x1",
        "--json",
    )
    assert ended.returncode == 0, ended.stderr
    figures = json.loads(ended.stdout)
    assert figures["nodes"] == 3
    assert figures["bytes_transferred"] == 64 * 64 * 4
    assert 0 < figures["compute_s"] < figures["predicted_s"] < 10
    failed = fairway("predict", str(script), "--fabric", "torus:2x2", "--islands", "2x1x1")
    assert failed.returncode == 1
    assert "the script ended with status 1, so nothing is predicted" in failed.stderr


def test_what_cannot_be_predicted_is_refused() -> None:
    program = str(GOLDEN / "pipeline.fw")
    for words, says in (
        ([program], "Missing option '--fabric'"),
        ([program, "--fabric", "ring:1"], "the topology has 1"),
        ([program, "--fabric", "mesh:4"], "cannot read a fabric from"),
        ([program, "--fabric", "torus:2x2,speed=1"], 'torus has no "speed"; there are rate'),
        (["nothing.py", "--fabric", "ring:2"], "there is no script nothing.py"),
    ):
        ended = fairway("predict", *words)
        assert ended.returncode != 0
        assert says in ended.stderr, ended.stderr
        assert "Traceback" not in ended.stderr
