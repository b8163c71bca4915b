"""Recorded steps, placed and simulated: of PyTorch, of Chakra, of FlexFlow."""

from __future__ import annotations

import contextlib
import gzip
import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fairway._native import StepGraph
from fairway.analysis.topologies import read_topology
from fairway.cli import app
from fairway.errors import FairwayError, GraphError
from fairway.formats.chakra import TraceNode, write_nodes
from fairway.formats.chakra_steps import find_traces, read_step, rescaled, write_step
from fairway.formats.flexflow import read_flexflow
from fairway.formats.kineto import of_pytorch
from fairway.placement.models import MODELS, V100
from fairway.placement.search import Replication, SearchBounds, evaluate_strategy, simulate_graph

DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "topoopt"
FABRICS = ("elect-flat", "elect-cluster", "sip-ring", "sip-ocs")
COMPUTES, SENDS, RECEIVES, COLLECTIVE = 4, 5, 6, 7


# PyTorch


def tensor(storage: int, elements: int) -> list[Any]:
    return [100 + storage, storage, 0, elements, 4, "cpu"]


def operator(
    number: int, name: str, schema: str, reads: list[Any], writes: list[Any], parent: int = 1
) -> dict[str, Any]:
    attributes = [{"name": "rf_id", "type": "uint64", "value": number},
                  {"name": "op_schema", "type": "string", "value": schema}]  # fmt: skip
    return {"id": number, "name": name, "ctrl_deps": parent, "inputs": {"values": reads},
            "outputs": {"values": writes}, "attrs": attributes}  # fmt: skip


def event(number: int, took_us: float, category: str = "cpu_op") -> dict[str, Any]:
    given = {"External id": 50 + number}
    if category == "cpu_op":
        given["Record function id"] = number
    return {"ph": "X", "cat": category, "name": f"event {number}", "dur": took_us, "args": given}


def step() -> list[dict[str, Any]]:
    """Two layers forward, one backward, and its update."""
    samples, hidden, weights, gradient = (tensor(n, 64) for n in (1, 2, 3, 4))
    return [
        operator(2, "aten::linear", "aten::linear(Tensor, Tensor)", [samples, weights], [hidden]),
        operator(3, "aten::addmm", "aten::addmm(Tensor)", [samples, weights], [hidden], 2),
        operator(4, "aten::relu", "aten::relu(Tensor)", [hidden], [tensor(5, 64)]),
        operator(5, "autograd::engine", "", [], []),
        operator(6, "aten::t", "aten::t(Tensor(a)) -> Tensor(a)", [weights], [weights], 5),
        operator(7, "aten::mm", "aten::mm(Tensor)", [tensor(5, 64), samples], [gradient], 5),
        operator(8, "aten::add_", "aten::add_(Tensor(a!))", [weights, gradient], [weights]),
    ]


def write(folder: Path, nodes: Any, events: Any) -> tuple[Path, Path]:
    trace, profile = folder / "trace.json", folder / "profile.json"
    trace.write_text(json.dumps({"schema": "1.1.1", "nodes": nodes}))
    profile.write_text(json.dumps({"traceEvents": events}))
    return trace, profile


def test_operators_of_pytorch(tmp_path: Path) -> None:
    times = [event(number, 10.0 * number) for number in range(2, 9)]
    graph = of_pytorch(*write(tmp_path, step(), times), 16)
    names = ["aten::linear 2", "aten::relu 4", "aten::t 6", "aten::mm 7", "aten::add_ 8"]
    assert [op.name for op in graph.ops] == names
    assert [op.times_ns for op in graph.ops] == [[20_000], [40_000], [60_000], [70_000], [80_000]]
    assert [[edge.source for edge in op.after] for op in graph.ops] == [[], [0], [], [1], [3]]
    # The batch and the weights are placed with their first use; the update is placed with them.
    assert [op.resident for op in graph.ops] == [512, 0, 0, 0, 0]
    assert [op.gradients for op in graph.ops] == [0, 0, 0, 256, 0]
    assert [op.beside for op in graph.ops] == [None, None, 0, 0, 0]
    found = evaluate_strategy(
        graph,
        read_topology("elect-flat:4").interconnect,
        Replication(16, 4),
        SearchBounds(1 << 30),
    )
    assert found.seconds >= 270e-6 / 4


def test_kernels_say_how_long_operators_take(tmp_path: Path) -> None:
    times = [event(number, 1.0) for number in range(2, 9)]
    kernels = [event(3, 5.0, "kernel"), event(3, 7.0, "gpu_memcpy"), event(7, 9.0, "kernel")]
    trace, profile = write(tmp_path, step(), [*times, *kernels])
    packed = tmp_path / "profile.json.gz"
    packed.write_bytes(gzip.compress(profile.read_bytes()))
    graph = of_pytorch(trace, packed)
    assert [op.times_ns[0] for op in graph.ops] == [12_000, 0, 0, 9_000, 0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda nodes, events: nodes.clear(), "has no list 'nodes'"),
        (lambda nodes, events: nodes[1].update(id=2), "has a node with id 2"),
        (lambda nodes, events: nodes[2].pop("inputs"), "node 4 of .* is no node"),
        (lambda nodes, events: nodes[3].update(attrs=5), "node 5 of .* is no node"),
        (lambda nodes, events: events[0].update(dur="long"), "event 'event 2' that takes 'long'"),
        (lambda nodes, events: events.__delitem__(slice(0, 7)), "has no list 'traceEvents'"),
        (lambda nodes, events: [e["args"].update({"Record function id": 99}) for e in events],
         "expected the same run"),
    ],
)  # fmt: skip
def test_what_pytorch_did_not_write(
    tmp_path: Path, change: Callable[[Any, Any], object], said: str
) -> None:
    nodes, events = step(), [event(number, 1.0) for number in range(2, 9)]
    change(nodes, events)
    with pytest.raises(GraphError, match=said):
        of_pytorch(*write(tmp_path, nodes, events))


# Chakra


def placed(copies: int = 4) -> tuple[StepGraph, float]:
    graph = MODELS["resnet50"]().graph(V100, (1, 2, 4, 8))
    joined = read_topology("elect-cluster:16").interconnect
    strategy, bounds = (
        Replication(64, copies, width=4),
        SearchBounds(V100.memory_bytes, evaluations=0),
    )
    found = evaluate_strategy(graph, joined, strategy, bounds, whole=True)
    assert found.graph is not None
    return found.graph, found.seconds


@pytest.mark.parametrize("fabric", FABRICS)
def test_steps_are_written_and_read(tmp_path: Path, fabric: str) -> None:
    graph, _ = placed()
    assert len(write_step(tmp_path, graph)) == 16
    again = read_step(find_traces(tmp_path))
    joined = read_topology(f"{fabric}:16").interconnect
    one, other = (simulate_graph(each, joined) for each in (graph, again))
    assert again.devices == 16
    assert other.moved_bytes == pytest.approx(one.moved_bytes, rel=1e-6)
    assert other.busy_s == pytest.approx(one.busy_s)
    # Ties of priority are broken by the order in a file.
    assert other.seconds == pytest.approx(one.seconds, rel=0.02)


def test_a_part_stands_for_what_is_written(tmp_path: Path) -> None:
    graph, seconds = placed()
    assert simulate_graph(graph, read_topology("elect-cluster:16").interconnect).seconds == seconds


def test_steps_of_more_and_fewer_devices() -> None:
    graph = StepGraph(2)
    first, second = graph.compute(0, 1000), graph.compute(1, 2000)
    sent = graph.transfer(0, 1, 500, [first])
    graph.collective("all_reduce", [0, 1], 800, [second, sent])
    more = rescaled(graph, 4)
    assert [str(node) for node in more.nodes[-3:]] == [
        "transfer 500bytes from 0 to 1", "transfer 500bytes from 2 to 3",
        "all_reduce 800 of 1bytes on [0..4]"]  # fmt: skip
    assert more.nodes[-1].after == [2, 3, 4, 5]
    fewer = rescaled(graph, 1)
    assert [str(node) for node in fewer.nodes] == [
        "compute 1000ns on [0]", "compute 2000ns on [0]", "compute 0ns on [0]",
        "all_reduce 800 of 1bytes on [0]"]  # fmt: skip
    joined = read_topology("elect-flat:1").interconnect
    assert simulate_graph(fewer, joined).seconds == pytest.approx(3e-6)
    with pytest.raises(GraphError, match="2 devices cannot be 3"):
        rescaled(graph, 3)


def test_all_to_alls_stay_with_their_copies() -> None:
    graph = StepGraph(4)
    graph.collective("all_to_all", [0, 1, 2, 3], 400)
    assert simulate_graph(graph, read_topology("elect-flat:4").interconnect).moved_bytes == 4 * 300
    more, fewer = rescaled(graph, 8), rescaled(graph, 2)
    assert [node.devices for node in more.nodes] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert simulate_graph(more, read_topology("elect-flat:8").interconnect).moved_bytes == 8 * 300
    # Two devices do the work of four: half of what each has is for the other.
    assert simulate_graph(fewer, read_topology("elect-flat:2").interconnect).moved_bytes == 2 * 400


def rank(*nodes: tuple[int, tuple[int, ...], dict[str, Any]]) -> list[TraceNode]:
    return [
        TraceNode(number, f"node {number}", kind, after, 0, 5, given)
        for number, (kind, after, given) in enumerate(nodes)
    ]


def test_ranks_meet(tmp_path: Path) -> None:
    sent = {"comm_dst": 1, "comm_size": 1000, "comm_tag": 3}
    taken = {"comm_src": 0, "comm_size": 1000, "comm_tag": 3}
    summed = {"comm_type": 0, "comm_size": 64}
    exchanged = {"comm_type": 6, "comm_size": 64, "pg_name": "experts"}
    write_nodes(tmp_path / "run.0.et", rank(
        (COMPUTES, (), {}), (SENDS, (0,), sent), (COLLECTIVE, (0,), summed),
        (COLLECTIVE, (2,), exchanged)))  # fmt: skip
    write_nodes(tmp_path / "run.1.et", rank(
        (RECEIVES, (), taken), (2, (0,), {}), (COMPUTES, (1,), {}), (COLLECTIVE, (2,), summed),
        (COLLECTIVE, (3,), exchanged)))  # fmt: skip
    step = read_step(find_traces(tmp_path))
    assert step.devices == 2
    assert [str(node) for node in step.nodes] == [
        "compute 5000ns on [0]", "transfer 1000bytes from 0 to 1",
        "all_reduce 64 of 1bytes on [0..2]",
        "all_to_all (32, 32, 32, 32) of 1bytes on [0..2]",
        "compute 5000ns on [1]"]  # fmt: skip
    assert [node.after for node in step.nodes] == [[], [0], [0, 4], [2], [1]]


@pytest.mark.parametrize(
    ("node", "said"),
    [
        ((SENDS, (), {"comm_dst": 9, "comm_size": 1}), "has comm_dst 9; expected a rank of 2"),
        ((SENDS, (), {"comm_dst": 1}), "has comm_size None"),
        ((COLLECTIVE, (), {"comm_type": 77}), "is a collective of type 77"),
        ((COLLECTIVE, (), {"comm_type": 2}), "is of type 0, where another rank has 2"),
        ((COMPUTES, (5,), {}), r"node 0 \(node 0\) waits for 5"),
        ((COMPUTES, (0,), {}), r"node 0 \(node 0\) waits for itself"),
    ],
)
def test_ranks_that_do_not_go_together(tmp_path: Path, node: Any, said: str) -> None:
    write_nodes(tmp_path / "0.et", rank(node))
    write_nodes(tmp_path / "1.et", rank((COLLECTIVE, (), {"comm_type": 0})))
    with pytest.raises(GraphError, match=said):
        read_step(find_traces(tmp_path))


def test_folders_without_traces(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match="has no traces"):
        find_traces(tmp_path)
    (tmp_path / "0.et").touch()
    (tmp_path / "a.0.et").touch()
    with pytest.raises(GraphError, match=r"says no rank of its own"):
        find_traces(tmp_path)
    with pytest.raises(GraphError, match=r"has traces of other ranks, such as 0\.et"):
        write_step(tmp_path, StepGraph(1))


def test_a_step_that_cannot_be_written_whole_leaves_no_part(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    (folder / "rank.2.et").mkdir(parents=True)
    graph = StepGraph(4)
    for rank in range(4):
        graph.compute(rank, 10)
    with pytest.raises(IsADirectoryError):
        write_step(folder, graph)
    assert [path.name for path in folder.iterdir()] == ["rank.2.et"]


# Fuzzing: arbitrary input


def broken(data: bytes, drawn: random.Random) -> bytes:
    """Cut off, or with some bytes changed."""
    if drawn.random() < 0.5:
        return data[: drawn.randrange(len(data))]
    changed = bytearray(data)
    for _ in range(drawn.choice((1, 3, 20))):
        changed[drawn.randrange(len(data))] = drawn.randrange(256)
    return bytes(changed)


def test_broken_traces_are_refused(tmp_path: Path) -> None:
    drawn = random.Random(5)
    joined = read_topology("elect-flat:2").interconnect
    events = [event(number, 1.0) for number in range(2, 9)]
    trace, profile = write(tmp_path, step(), events)
    ranks = [tmp_path / "0.et", tmp_path / "1.et"]
    summed = {"comm_type": 0, "comm_size": 64}
    for path in ranks:
        write_nodes(path, rank((COMPUTES, (), {}), (COLLECTIVE, (0,), summed)))
    whole = {path: path.read_bytes() for path in (trace, profile, *ranks)}
    counts = Counter[str]()
    for _ in range(800):
        path = drawn.choice(list(whole))
        path.write_bytes(broken(whole[path], drawn))
        said = "read"
        try:
            if path.suffix == ".et":
                simulate_graph(read_step(ranks), joined)
            else:
                of_pytorch(trace, profile).native()
        except FairwayError as error:
            text = str(error)
            said = "byte" if "byte" in text else "node" if path.name in text else text[:30]
        counts[said] += 1
        path.write_bytes(whole[path])
    # In few mutants the error is one of the trace as a whole, not of a byte or a node.
    assert counts["byte"] > 100, counts
    assert counts["node"] > 20, counts
    assert counts.total() - counts["read"] - counts["byte"] - counts["node"] < 20, counts


@pytest.mark.skipif(not DATA.exists(), reason="TopoOpt's graphs are not here")
def test_broken_task_graphs_are_refused(tmp_path: Path) -> None:
    drawn = random.Random(6)
    whole = (DATA / "100dlrm_16.fbuf").read_bytes()
    path = tmp_path / "graph.fbuf"
    counts = Counter[str]()
    for _ in range(150):
        path.write_bytes(broken(whole, drawn))
        said = "read"
        with contextlib.suppress(FairwayError):
            try:
                read_flexflow(path)
            except GraphError as error:
                said = "byte" if "byte" in str(error) else "task"
                raise
        counts[said] += 1
    assert counts["byte"] > 100, counts


def test_the_command_line_writes_traces_and_carries_them_out(tmp_path: Path) -> None:
    fabric = "elect-cluster:16"
    runner = CliRunner()
    folder = str(tmp_path / "step")
    options = ["--batch", "64", "--evaluations", "0", "--chakra", folder, "--json"]
    done = runner.invoke(app, ["place", "resnet50", "--fabric", fabric, *options])
    assert done.exit_code == 0, done.output
    best = json.loads(done.stdout)[0]
    for devices in (16, 32):
        command = ["simulate", "--fabric", f"elect-cluster:{devices}", "--workload", folder]
        done = runner.invoke(app, [*command, "--json"])
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)["takes"] == pytest.approx(best["step_s"], rel=0.2)


def test_the_command_line_places_what_pytorch_ran(tmp_path: Path) -> None:
    trace, profile = write(tmp_path, step(), [event(number, 10.0) for number in range(2, 9)])
    runner = CliRunner()
    command = ["place", str(trace), "--samples", "16", "--fabric", "elect-flat:4", "--json"]
    done = runner.invoke(app, command)
    assert done.exit_code != 0
    assert "expected a profile (--profile)" in str(done.exception)
    done = runner.invoke(app, [*command, "--profile", str(profile)])
    assert done.exit_code == 0, done.output
    assert {way["copies"] for way in json.loads(done.stdout)} == {1, 2, 4}
