"""Graphs of devices that differ: read from FlexFlow's format, and planned."""

from __future__ import annotations

from pathlib import Path

import pytest

from fairway._native import StepGraph
from fairway.communication import graphs
from fairway.communication.steps import ChannelCost
from fairway.errors import GraphError
from fairway.formats.flexflow import read_flexflow

DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "topoopt"
BYTE_A_NANO = ChannelCost(8e9)
NETWORK = ChannelCost(100e9, 5_000)

needs_data = pytest.mark.skipif(not DATA.exists(), reason="TopoOpt's graphs are not here")


def test_what_the_rest_waits_for_goes_first() -> None:
    graph = StepGraph(3)
    first = graph.compute(0, 10)
    graph.transfer(0, 1, 100, [first])
    sent = graph.transfer(0, 2, 50, [first])
    graph.compute(2, 200, [sent])
    found = graphs.plan(graph, [BYTE_A_NANO], steps=1)
    assert round(found.strict_s * 1e9) == round(found.fifo_s * 1e9) == 360
    assert round(found.ordered_s * 1e9) == 260
    assert found.planned_s <= found.ordered_s


PROGRAM = """\
program @step
function @f 1000ns
function @g 2000ns
input %0: float32[64] on [0,1]
input %1: float32[64] on [2,3]
node %2: float32[64] on [0,1] = call @f (%0)
node %3: float32[64] on [2,3] = call @g (%1)
node %4: float32[64] on [0,1], %5: float32[64] on [2,3] = reduce (%2, %3)
node %6: float32[2,64] on [0,1], %7: float32[2,64] on [2,3] = gather (%4, %5)
node %8: float32[64] on [0,1], %9: float32[64] on [2,3] = scatter (%6, %7)
return (%8, %9)
"""


def test_collectives_of_a_program_are_what_groups_send_each_other() -> None:
    graph = graphs.of_program(PROGRAM)
    assert graph.devices == 2
    both_ways = [[0, 1], [1, 0]]
    nodes = graph.nodes
    kinds = ["compute", "compute", "all_reduce", *4 * ["transfer"]]
    assert [node.kind for node in nodes] == kinds
    assert [node.time_ns for node in nodes[:2]] == [1000, 2000]
    assert [node.size for node in nodes[2:]] == 5 * [256]
    assert [node.devices for node in nodes] == [[0], [1], [0, 1], *both_ways, *both_ways]
    # What a group sends on is what has arrived there.
    assert [node.after for node in nodes[2:]] == [[0, 1], [2], [2], [4], [3]]


LOOP = """\
program @step
function @f 1000ns
function @g 3000ns
input %0: float32[64] on [0]CARRIED
node %1: float32[64] on [0] = call @f (%0)
node %2: float32[64] on [1] = move (%1)
node %3: float32[64] on [1] = call @g (%2)
node %4: float32[64] on [0] = move (%3)
return (%4)
"""


@pytest.mark.parametrize("steps", [1, 2, 8])
def test_a_loop_waits_for_what_it_carries(steps: int) -> None:
    """``x = step(x)`` is loop-carried: its steps run in sequence; those of a pipeline overlap."""
    carried = graphs.of_program(LOOP.replace("CARRIED", " carried from %4"))
    assert carried.nodes[0].carried == [(0, 1), (3, 1)]
    step_ns = 1000 + 256 + 3000 + 256
    found = graphs.plan(carried, [BYTE_A_NANO], steps=steps)
    assert round(found.strict_s * 1e9) == steps * step_ns
    overlapping = graphs.of_program(LOOP.replace("CARRIED", ""))
    found = graphs.plan(overlapping, [BYTE_A_NANO], steps=steps)
    assert round(found.strict_s * 1e9) == step_ns + (steps - 1) * 3000


def test_graphs_are_read_as_they_are_printed() -> None:
    graph = graphs.of_program(LOOP.replace("CARRIED", " carried from %4"))
    assert StepGraph.parse(str(graph)) == graph
    with pytest.raises(ValueError, match="line 2: expected"):
        StepGraph.parse("step @s on 1 devices\n#0 = gossip")
    for node in ("transfer 281474976710657bytes from 0 to 1", "compute 1125899906842625ns on [0]"):
        with pytest.raises(ValueError, match=r"node 0 is of .*; expected at most"):
            StepGraph.parse(f"step @s on 2 devices\n#0 = {node}")
    with pytest.raises(ValueError, match="node 0 is of device 3"):
        StepGraph.parse("step @s on 1 devices\n#0 = compute 1ns on [3]")


@pytest.mark.parametrize(
    ("after", "says"),
    [([0], "node 0 depends on node 0"), ([(3, 1)], "expected another one of 1 nodes")],
)
def test_graphs_that_make_no_sense_are_refused(after: list, says: str) -> None:
    graph = StepGraph(1)
    graph.compute(0, 10, after)
    with pytest.raises(GraphError, match=says):
        graphs.plan(graph, [BYTE_A_NANO])


def test_channels_that_cannot_be_are_refused() -> None:
    graph = StepGraph(1)
    graph.compute(0, 10)
    for costs in ([], [ChannelCost(0.0)], [ChannelCost(float("nan"))]):
        with pytest.raises(GraphError):
            graphs.plan(graph, costs)


@pytest.mark.parametrize("content", [b"", b"\0" * 64, b"not a graph" * 10, b"\xff" * 200])
def test_files_that_are_no_graphs_are_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "graph.fbuf"
    path.write_bytes(content)
    with pytest.raises(GraphError, match=r"graph\.fbuf is no task graph"):
        read_flexflow(path)


@needs_data
@pytest.mark.parametrize(
    ("name", "devices", "tasks", "gain"),
    [("100dlrm_16", 17, 1278, 1.2), ("100candle_16", 17, 1580, 1.5)],
)
def test_graphs_of_flexflow_take_less_as_planned(
    name: str, devices: int, tasks: int, gain: float
) -> None:
    graph = read_flexflow(DATA / f"{name}.fbuf")
    assert (graph.devices, len(graph)) == (devices, tasks)
    found = graphs.plan(graph, [NETWORK])
    assert found == graphs.plan(graph, [NETWORK]), "the same seed finds the same plan"
    assert found.planned_s <= found.ordered_s
    assert found.fifo_s >= found.planned_s
    assert found.strict_s / found.planned_s >= gain
