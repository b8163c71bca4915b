"""Graphs of devices that differ: read from FlexFlow's, and planned."""

from __future__ import annotations

from pathlib import Path

import pytest

from fairway.communication import graphs
from fairway.communication.steps import ChannelCost
from fairway.errors import GraphError

DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "topoopt"
BYTE_A_NANO = ChannelCost(8e9)
NETWORK = ChannelCost(100e9, 5_000)

needs_data = pytest.mark.skipif(not DATA.exists(), reason="TopoOpt's graphs are not here")


def test_what_the_rest_waits_for_goes_first() -> None:
    nodes = [
        ((0, 10), []),
        ((0, 1, 100), [(0, 0)]),
        ((0, 2, 50), [(0, 0)]),
        ((2, 200), [(2, 0)]),
    ]
    found = graphs.plan(graphs.Graph(3, nodes), [BYTE_A_NANO], steps=1)
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
    both_ways = [(0, 1, 256), (1, 0, 256)]
    jobs = [job for job, _ in graph.nodes]
    assert jobs == [(0, 1000), (1, 2000), ([0, 1], 256), *both_ways, *both_ways]
    waits = [waits for _, waits in graph.nodes[2:]]
    assert waits == [[(0, 0), (1, 0)], *2 * [[(2, 0)]], *2 * [[(3, 0), (4, 0)]]]


@pytest.mark.parametrize(
    ("nodes", "says"),
    [
        ([((0, 10), [(0, 0)])], "node 0 waits for node 0"),
        ([((0, 10), [(3, 1)])], "expected an earlier one of 1"),
        ([((0, -1), [])], "cannot be planned"),
    ],
)
def test_graphs_that_make_no_sense_are_refused(nodes: list, says: str) -> None:
    with pytest.raises(GraphError, match=says):
        graphs.plan(graphs.Graph(1, nodes), [BYTE_A_NANO])


def test_channels_that_cannot_be_are_refused() -> None:
    graph = graphs.Graph(1, [((0, 10), [])])
    for costs in ([], [ChannelCost(0.0)], [ChannelCost(float("nan"))]):
        with pytest.raises(GraphError):
            graphs.plan(graph, costs)


@pytest.mark.parametrize("content", [b"", b"\0" * 64, b"not a graph" * 10, b"\xff" * 200])
def test_files_that_are_no_graphs_are_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "graph.fbuf"
    path.write_bytes(content)
    with pytest.raises(GraphError, match=r"graph\.fbuf is no task graph"):
        graphs.read_flexflow(path)


@needs_data
@pytest.mark.parametrize(
    ("name", "devices", "tasks", "gain"),
    [("100dlrm_16", 16, 1278, 1.2), ("100candle_16", 16, 1580, 1.5)],
)
def test_graphs_of_flexflow_take_less_as_planned(
    name: str, devices: int, tasks: int, gain: float
) -> None:
    graph = graphs.read_flexflow(DATA / f"{name}.fbuf")
    assert (graph.devices, len(graph.nodes)) == (devices, tasks)
    found = graphs.plan(graph, [NETWORK])
    assert found == graphs.plan(graph, [NETWORK]), "the same seed finds the same plan"
    assert found.planned_s <= found.ordered_s
    assert found.fifo_s >= found.planned_s
    assert found.strict_s / found.planned_s >= gain
