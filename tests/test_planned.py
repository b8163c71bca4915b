"""Plans that are carried out: by the simulator and by the schedule of a network."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fairway._native import Placement, StepGraph, Topology, schedule_step
from fairway.analysis.planned import plan_graph
from fairway.analysis.rungs import Options, climb
from fairway.cli import app
from fairway.communication import graphs
from fairway.errors import ConfigError, GraphError, TopologyError
from fairway.placement.reading import read_graph
from fairway.placement.search import simulate_graph

GOLDEN = Path(__file__).resolve().parents[1] / "crates" / "ir" / "tests" / "golden"
DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "topoopt"
PIPELINE = str(GOLDEN / "pipeline.fw")
FABRICS = ["elect-flat:32", "elect-cluster:32", "sip-ring:32", "torus:4x8"]


def run(*words: str) -> dict:
    found = CliRunner().invoke(app, [*words, "--json"], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return json.loads(found.stdout)


def steps() -> list[str]:
    golden = [str(GOLDEN / f"{name}.fw") for name in ("data_parallel", "pipeline", "experts")]
    return [*golden, str(DATA / "100dlrm_16.fbuf")] if DATA.exists() else golden


@pytest.mark.parametrize("fabric", FABRICS)
@pytest.mark.parametrize("path", steps(), ids=lambda path: Path(path).stem)
def test_one_graph_with_one_placement_takes_one_time(
    path: str, fabric: str, tmp_path: Path
) -> None:
    """Placing, planning, simulating and explaining a step say the same of it."""
    topology, graph = Topology.parse(fabric), read_graph(Path(path))
    # Devices in reverse order, so that a command which forgets the placement says something else.
    reverse = range(graph.devices)[::-1]
    placed = Placement(graph.name, fabric, list(reverse)).apply(graph, topology)
    step = tmp_path / "placed.step"
    step.write_text(str(placed))
    seconds = simulate_graph(placed, topology.interconnect).seconds
    planned = run("plan", str(step), "--fabric", fabric)
    assert run("simulate", "--fabric", fabric, "--workload", str(step))["takes"] == seconds
    assert planned["unplanned_s"] == seconds
    explained = climb(step, Options(topology, evaluations=1)).report.figures
    assert explained["unplanned_makespan_ns"] == round(1e9 * seconds)
    # A plan is kept only if a step is faster for it.
    if planned["scheduled_s"] is None:
        assert planned["planned_s"] <= seconds


def contended() -> StepGraph:
    """Two transfers from one device; a long computation waits for the second."""
    graph = StepGraph(4)
    graph.transfer(0, 1, 1 << 20, name="spare")
    needed = graph.transfer(0, 2, 1 << 20, name="needed")
    graph.compute(2, 1_000_000, [needed])
    return graph


def lone() -> StepGraph:
    graph = StepGraph(4)
    needed = graph.transfer(0, 2, 1 << 20)
    graph.compute(2, 1_000_000, [needed])
    return graph


def test_simulated_steps_keep_to_the_order_of_their_plan() -> None:
    topology = Topology.parse("elect-flat:4")
    graph = contended()
    found = plan_graph(graph, topology, steps=1)
    alone = simulate_graph(lone(), topology.interconnect).seconds
    assert found.simulated.seconds == pytest.approx(alone, rel=1e-6)
    assert found.unplanned.seconds > found.simulated.seconds, "both transfers share the port"
    order = [node for node, _ in found.plan.order]
    assert order.index(1) < order.index(0)
    (spare, needed, _) = found.times_s
    assert spare[0] >= needed[0]
    assert spare[1] > needed[1]


def test_schedules_keep_to_the_order_and_algorithms_of_their_plan() -> None:
    topology = Topology.parse("ring:4")
    found = plan_graph(contended(), topology, steps=1)
    assert found.schedule is not None
    assert found.plan.order
    # By piece, when it arrives: the transfer that is waited for, before any piece of the other.
    ends = dict(zip(enumerate(found.step.origins), found.schedule.ends_s, strict=True))
    needed = max(end for (_, node), end in ends.items() if node == 1)
    assert all(end > needed for (_, node), end in ends.items() if node == 0)
    graph = StepGraph(4)
    graph.collective("all_reduce", [0, 1, 2, 3], 1 << 20)
    ring = graphs.plan(graph, topology, steps=1)
    (kind,) = ring.kinds
    for algorithm in ("ring", "two-shot", "tree 2", "groups 2"):
        planned = dataclasses.replace(ring, kinds=(dataclasses.replace(kind, algorithm=algorithm),))
        assert type(planned).parse(str(planned)) == planned
        planned.verify(graph)
        schedule = schedule_step(planned.apply(graph), topology)
        assert set(schedule.algorithms) == {algorithm.replace(" ", "-")}
    unknown = dataclasses.replace(ring, kinds=(dataclasses.replace(kind, algorithm="gossip"),))
    with pytest.raises(ValueError, match='planned as "gossip", which is no algorithm of a all_red'):
        schedule_step(unknown.apply(graph), topology)


def test_algorithms_follow_from_the_topology() -> None:
    """On a ring of links all-to-all messages share links; a switch has none to share."""
    graph = StepGraph(16)
    graph.collective("all_reduce", list(range(16)), 64 << 20)
    chosen = {
        name: graphs.plan(graph, Topology.parse(name), steps=1, evaluations=1).kinds[0].algorithm
        for name in ("ring:16", "switch:16")
    }
    assert chosen["ring:16"] == "ring"
    assert chosen["switch:16"] != "ring"


def test_pieces_carry_all_that_was_to_be_carried() -> None:
    graph = read_graph(GOLDEN / "experts.fw")
    plan = graphs.plan(graph, Topology.parse("elect-flat:8"))
    kinds = tuple(dataclasses.replace(kind, segments=3) for kind in plan.kinds)
    pieces = dataclasses.replace(plan, kinds=kinds, order=()).apply(graph)
    carried: dict[int, int] = {}
    for node, origin in zip(pieces.graph.nodes, pieces.origins, strict=True):
        carried[origin] = carried.get(origin, 0) + node.size
    assert carried == {number: node.size for number, node in enumerate(graph.nodes)}
    assert len(pieces.graph) == len(graph) + 2 * sum(len(kind.nodes) for kind in kinds)
    many = tuple(dataclasses.replace(kind, segments=10**9) for kind in plan.kinds)
    with pytest.raises(GraphError, match="at most 1048576 nodes"):
        dataclasses.replace(plan, kinds=many, order=()).apply(graph)


def test_steps_that_are_left_as_they_are_are_said_to_be(tmp_path: Path) -> None:
    """Times are compared within one model; what no chip can hold is planned as flows."""
    graph = StepGraph(2)
    graph.transfer(0, 1, 1 << 20)
    found = plan_graph(graph, Topology.parse("torus:2x2"), steps=2)
    assert found.is_unplanned
    assert found.plan.planned_ns == found.plan.fifo_ns
    assert found.plan.evaluations > 1
    figures = found.as_json()
    assert figures["unplanned_scheduled_s"] == figures["scheduled_s"]
    assert figures["unplanned_s"] == figures["planned_s"]
    large = StepGraph(2)
    large.transfer(0, 1, 1 << 30)
    found = plan_graph(large, Topology.parse("torus:2x2"), steps=2)
    assert found.schedule is None
    assert "a chip holds 220.0 MiB" in found.unscheduled
    assert found.seconds == found.unplanned.seconds > 0
    (tmp_path / "large.step").write_text(str(large))
    step = str(tmp_path / "large.step")
    shown = CliRunner().invoke(app, ["plan", step, "--fabric", "torus:2x2"])
    assert "the step is left as it is" in shown.output
    assert "not scheduled: task 0 is of 1.0 GiB" in shown.output
    empty = tmp_path / "empty.step"
    empty.write_text("step @s on 2 devices\n")
    for more in ([], ["--fabric", "ring:2"]):
        shown = CliRunner().invoke(app, ["plan", str(empty), *more], catch_exceptions=False)
        assert shown.exit_code == 0


@pytest.mark.parametrize(("steps", "seed"), [(-1, 0), (1 << 22, 0), (1, -1)])
def test_limits_out_of_range_are_refused(steps: int, seed: int) -> None:
    with pytest.raises(GraphError, match="cannot be planned"):
        graphs.plan(contended(), Topology.parse("ring:4"), steps=steps, seed=seed)


def test_orders_that_contradict_the_step_are_refused() -> None:
    graph = StepGraph(3)
    first = graph.transfer(0, 1, 1000)
    computed = graph.compute(1, 1000, [first])
    graph.transfer(0, 2, 1000, [computed])
    plan = graphs.plan(graph, Topology.parse("elect-flat:3"), evaluations=1)
    assert [node for node, _ in plan.order] == [first, 2]
    plan.verify(graph)
    with pytest.raises(GraphError, match=r"cannot be applied: node \d waits for a cycle"):
        dataclasses.replace(plan, order=plan.order[::-1]).verify(graph)


@pytest.mark.parametrize(
    ("words", "error", "says"),
    [
        (["dlrm:dlrm-s", "--fabric", "ring:4"], ConfigError, "a step of ranks that do the same"),
        ([PIPELINE, "--fabric", "mesh:4"], TopologyError, "cannot read a fabric from"),
        ([PIPELINE, "--fabric", "ring:1"], GraphError, "of 2 devices; the topology has 1"),
        ([PIPELINE, "--ranks", "8"], ConfigError, "--ranks 8 is for dlrm:NAME and traces"),
        ([PIPELINE, "--explain"], ConfigError, "`fairway explain` prints the plan"),
        (["none.json", "--fabric", "ring:4"], ConfigError, "there is no file none.json"),
        ([PIPELINE, "--fabric", "ring:4", "--channels", "1Gbit/s"], ConfigError, "expected one"),
    ],
)
def test_what_cannot_be_planned_for_a_topology_is_refused(
    words: list[str], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        CliRunner().invoke(app, ["plan", *words], catch_exceptions=False)


@pytest.mark.parametrize(
    "fabric", ["switch:2", "ring:2", "elect-flat:2", "sip-ring:2", "torus:4x4"]
)
@pytest.mark.parametrize("kind", ["broadcast", "reduce"])
def test_a_vector_for_all_takes_as_long_as_one_for_a_neighbour(kind: str, fabric: str) -> None:
    """A link carries it whole, in pieces."""
    topology = Topology.parse(fabric)
    devices = topology.interconnect.devices
    found = []
    for node in (f"{kind} 1000000 root 0 of 4bytes on [0..2]", "transfer 4000000bytes from 0 to 1"):
        graph = StepGraph.parse(f"step @s on {devices} devices\n#0 = {node}\n")
        found.append(simulate_graph(graph, topology.interconnect).seconds)
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_the_latency_of_a_transfer_is_that_of_its_path() -> None:
    interconnect = Topology.parse("ring:64,latency=1us").interconnect
    for target, hops in ((1, 1), (2, 2), (32, 32), (63, 1)):
        text = f"step @s on 64 devices\n#0 = transfer 0bytes from 0 to {target}\n"
        seconds = simulate_graph(StepGraph.parse(text), interconnect).seconds
        assert seconds == pytest.approx(hops * 1e-6), target
    # The messages of a tree go 1, 2, 4 and so on up to 32 links: once around, less one.
    text = "step @s on 64 devices\n#0 = all_gather 0 of 4bytes on [0..64]\n"
    assert simulate_graph(StepGraph.parse(text), interconnect).seconds == pytest.approx(63e-6)
