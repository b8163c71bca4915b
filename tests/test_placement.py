"""Models described, split, placed and simulated."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from exact import exact_ns, random_graph
from typer.testing import CliRunner

import fairway
from fairway.analysis.topologies import read_topology
from fairway.cli import app
from fairway.errors import CapacityError, ConfigError, FairwayError, PlacementError, TopologyError
from fairway.formats.flexflow import read_flexflow
from fairway.parallel.placing import TrainingStrategy
from fairway.placement import NAMES
from fairway.placement.graphs import Edge, Op, OpGraph, of_flexflow
from fairway.placement.models import MODELS, SAMPLES, V100
from fairway.placement.programs import of_program
from fairway.placement.ranking import rank
from fairway.placement.search import (
    Replication,
    SearchBounds,
    evaluate_strategy,
    search_strategies,
    simulate_graph,
)
from fairway.placement.simulating import simulate_step
from fairway.studies.reproduce import sipml

DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "topoopt"
needs_data = pytest.mark.skipif(not DATA.exists(), reason="TopoOpt's graphs are not here")
HEURISTICS = SearchBounds(V100.memory_bytes, evaluations=0)
FABRICS = ("elect-flat", "elect-cluster", "sip-ring", "sip-ocs")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "a fabric has no name; expected one such as dragonfly:264"),
        ("elect-flat", "without a size; give a size, as in elect-flat:64"),
        ("sip-ring:8x8", "cannot read a fabric from"),
        ("sip-rings:8", "cannot read a fabric from"),
        ("sip-ring:0", "the number of devices is 0"),
        ("sip-ring:64,ports=3", 'sip-ring has no "ports"; there are'),
        ("elect-cluster:64,per-server=many", "expected a count"),
        ("elect-cluster:64,oversubscription=0.5", "oversubscription is 0.5; expected 1 to 1000"),
        ("elect-flat:64,rate=fast", 'rate of elect-flat is "fast"'),
        ("sip-ocs:64,every=often", "expected a time"),
        ("sip-ocs:64,failed-switches=16", "16 of 16 switches failed"),
        ("sip-ocs:64,oversubscription=2", "expected leaf=DEVICES"),
        ("sip-ocs:64,leaf=8,oversubscription=9", "oversubscription is 9; expected 1 to 8"),
        ("sip-ring:64,weak=3", 'weak of sip-ring is "3"; expected what is weak and the part'),
        ("sip-ring:64,weak=64:0.5", "a weak device is 64; expected 0 to 63"),
        ("elect-flat:64,cut=3", 'elect-flat has no "cut"; there are rate, latency, weak'),
    ],
)
def test_interconnects_that_cannot_be(text: str, said: str) -> None:
    with pytest.raises(TopologyError, match=said.replace("(", r"\(")):
        read_topology(text)


def test_placements_are_near_the_exact_optimum() -> None:
    ratios = []
    for seed in range(8):
        graph = random_graph(4 + seed % 5, seed)
        joined = read_topology("elect-flat:3,rate=8Gbit/s,latency=0ns").interconnect
        bounds = SearchBounds(1 << 40, quantum_ns=10**9, evaluations=3000)
        found = evaluate_strategy(graph, joined, Replication(), bounds)
        exact = exact_ns(graph, 3, 1.0, 60.0)
        assert exact is not None
        assert found.bound_s * 1e9 <= exact * (1 + 1e-6)
        ratios.append(found.estimate_s * 1e9 / exact)
    assert min(ratios) >= 1 - 1e-6
    assert max(ratios) <= 1.05


def test_names_are_those_of_models() -> None:
    assert tuple(MODELS) == NAMES
    sizes = {name: make().parameters() for name, make in MODELS.items()}
    assert 25.0e6 < sizes["resnet50"] < 26e6
    assert 300e6 < sizes["transformer"] < 400e6
    assert 18e9 < sizes["megatron"] < 18.9e9


@pytest.mark.parametrize("fabric", ["torus:4x4", "dragonfly:16", "fattree:4", "switch:16"])
def test_models_are_placed_on_packet_networks(fabric: str) -> None:
    """As on any interconnect; twice the rate of links is never slower."""
    graph = MODELS["transformer"]().graph(V100, SAMPLES)
    slow, fast = (
        search_strategies(
            graph,
            read_topology(f"{fabric},rate={rate}Gbit/s").interconnect,
            [(64, 1)],
            SearchBounds(V100.memory_bytes, spread_max=2),
        )[0]
        for rate in (100, 200)
    )
    assert slow.step_s >= fast.step_s > 0
    assert slow.copies * slow.devices == 16


def test_more_bandwidth_is_never_slower() -> None:
    graph = MODELS["resnet50"]().graph(V100, (1, 2, 4, 8, 16, 32, 64))
    before = float("inf")
    for gigabits in (100, 400, 1600, 6400):
        joined = read_topology(f"elect-flat:64,rate={gigabits}Gbit/s").interconnect
        strategy = search_strategies(graph, joined, [(1024, 100)], HEURISTICS)[0]
        assert strategy.total_s <= before
        before = strategy.total_s


def test_an_ideal_switch_is_never_slower() -> None:
    graph = MODELS["transformer"]().graph(V100, (1, 2, 4, 8, 16, 32))
    seconds = {}
    for fabric in FABRICS:
        given = ",wavelengths=80" if fabric == "sip-ring" else ",rate=2Tbit/s"
        joined = read_topology(f"{fabric}:64{given}").interconnect
        found = evaluate_strategy(
            graph, joined, Replication(256, 16, rule="range"), SearchBounds(V100.memory_bytes)
        )
        seconds[fabric] = found.seconds
    assert min(seconds, key=seconds.__getitem__) == "elect-flat"


def test_memory_is_a_limit() -> None:
    model = MODELS["megatron"]()
    graph = model.graph(V100, (1, 2, 4, 8))
    joined = read_topology("elect-flat:64").interconnect
    with pytest.raises(PlacementError, match=r"operation .* finds no device|needs .* of a device"):
        search_strategies(graph, joined, [(64, 1)], dataclasses.replace(HEURISTICS, spread_max=4))
    strategies = search_strategies(graph, joined, [(64, 1)], HEURISTICS)
    assert all(
        strategy.memory_bytes <= V100.memory_bytes and strategy.devices >= 16
        for strategy in strategies
    )


@needs_data
@pytest.mark.parametrize("fabric", FABRICS)
def test_graphs_of_others_are_carried_out(fabric: str) -> None:
    graph = read_flexflow(DATA / "100dlrm_16.fbuf")
    # The graph names one more device than there are nodes.
    joined = read_topology(f"{fabric}:17").interconnect
    placed = simulate_graph(graph, joined)
    busiest = max(
        sum(node.time_ns for node in graph.nodes if device in node.devices) for device in range(16)
    )
    assert placed.seconds * 1e9 >= busiest
    anew = of_flexflow(graph)
    bounds = SearchBounds(1 << 50, quantum_ns=10**9, evaluations=50)
    rostam = evaluate_strategy(anew, joined, Replication(rule="range"), bounds)
    ours = evaluate_strategy(anew, joined, Replication(), bounds)
    assert ours.seconds <= rostam.seconds * 1.001
    # The search begins at the given placement.
    given = evaluate_strategy(anew, joined, Replication(rule="given"), bounds)
    assert given.seconds <= placed.seconds * 1.05  # sums are in the order of devices now
    assert ours.seconds <= given.seconds * 1.001


PROGRAM = """
program @step
function @forward 1000ns 2000000flops 8000bytes
function @loss 2000ns 4000000flops 8000bytes
function @backward 3000ns
function @update 500ns 1024flops 12288bytes
input %0: float32[1024] on [0,1] donated
input %1: float32[64,16] tiled 2x1 on [0,1]
node %2: float32[64,16] tiled 2x1 on [0,1] = call @forward (%0, %1)
node %3: float32[64,16] tiled 2x1 on [2,3] = move (%2)
node %4: float32[64,16] tiled 2x1 on [2,3] = call @loss (%3)
node %5: float32[64,16] tiled 2x1 on [0,1] = move (%4)
node %6: float32[1024] on [0,1] = call @backward (%0, %5)
node %7: float32[1024] on [0,1] = call @update (%0, %6) donating (0)
return (%7)
"""


def test_a_captured_program_is_its_calls() -> None:
    graph = of_program(PROGRAM)
    assert [op.name for op in graph.ops] == ["forward", "loss", "backward", "update"]
    assert [op.times_ns for op in graph.ops] == [[2000], [4000], [6000], [1000]]
    assert {op.shards_max for op in graph.ops} == {2}
    # Parameters are on two devices each, the batch is sharded over them; one op reads all first.
    assert [op.resident for op in graph.ops] == [2 * 4096 + 4096, 0, 0, 0]
    assert [op.beside for op in graph.ops] == [None, None, 0, 0]
    needs = [[(edge.source, *edge.sizes) for edge in op.after] for op in graph.ops]
    assert needs == [[], [(0, 4096)], [(1, 4096)], [(2, 4096)]]
    # The operation that applies gradients replaces the parameters in place.
    assert [op.kept for op in graph.ops] == [[4096], [4096], [8192], [0]]
    carried = evaluate_strategy(
        graph, read_topology("elect-flat:4").interconnect, Replication(), SearchBounds(1 << 20)
    )
    assert carried.seconds >= 6.5e-6


def test_a_captured_program_on_other_devices() -> None:
    counted = PROGRAM.replace("@backward 3000ns", "@backward 3000ns 8000000flops 16000bytes")
    ops = of_program(counted, V100).ops
    assert [op.times_ns[0] for op in ops] == [
        2 * round(1e9 * V100.seconds(flops, moved))
        for flops, moved in [(2e6, 8000), (4e6, 8000), (8e6, 16000), (1024, 12288)]
    ]
    with pytest.raises(PlacementError, match=r"nothing was counted of function 'backward'"):
        of_program(PROGRAM, V100)
    with pytest.raises(PlacementError, match=r"function 'loss' was never measured"):
        of_program(PROGRAM.replace("@loss 2000ns", "@loss"))
    with pytest.raises(PlacementError, match=r"line 3"):
        of_program(PROGRAM.replace("1000ns", "1000 hours"))


def test_any_graph_is_placed_or_refused() -> None:
    drawn = random.Random(3)
    counts = collections.Counter[str]()
    for _ in range(200):
        count = drawn.randint(0, 6)
        ops = [
            Op(
                f"op {number}",
                [drawn.choice((0, 1, 1000, 2**40))],
                [Edge(drawn.randint(0, 7), [drawn.choice((0, 1, 2**50))]) for _ in range(2)],
                resident=drawn.choice((0, 1, 2**45)),
                beside=drawn.choice((None, None, drawn.randint(0, 7))),
                shards_max=drawn.choice((0, 1, 8)),
            )
            for number in range(count)
        ]
        graph = OpGraph([1], ops, [([drawn.randint(0, 7)], 5)] if drawn.random() < 0.3 else [])
        joined = read_topology(f"{drawn.choice(FABRICS)}:8").interconnect
        said = ""
        with contextlib.suppress(FairwayError):
            evaluate_strategy(graph, joined, Replication(), SearchBounds(1 << 44, evaluations=10))
            said = "placed"
        counts[said] += 1
    assert min(counts["placed"], counts[""]) > 10


def test_the_command_line_places_a_model() -> None:
    command = [sys.executable, "-m", "fairway", "place", "resnet50", "--fabric"]
    options = ["--batch", "1024", "--evaluations", "0", "--json"]
    done = subprocess.run(
        [*command, "sip-ring:64,wavelengths=40", *options],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    strategies = json.loads(done.stdout)
    assert strategies == sorted(
        strategies, key=lambda strategy: strategy["steps"] * strategy["step_s"]
    )
    assert all(strategy["copies"] * strategy["devices"] == 64 for strategy in strategies)
    wrong = subprocess.run([*command, "sip-string:64"], capture_output=True, text=True, timeout=120)
    assert wrong.returncode != 0
    assert "cannot read a fabric from" in wrong.stderr


def test_what_devices_do_is_shown(tmp_path: Path) -> None:
    timeline, picture = tmp_path / "step.json", tmp_path / "step.png"
    arguments = ["simulate", "--fabric", "sip-ring:8", "--workload", "transformer:64/2", "--json"]
    shown = ["--timeline", str(timeline), "--plot", str(picture)]
    found = CliRunner().invoke(app, [*arguments, *shown])
    assert found.exit_code == 0, found.output
    figures = json.loads(found.stdout)
    events = [e for e in json.loads(timeline.read_text())["traceEvents"] if e["ph"] == "X"]
    # All computation and communication of one replica's devices, to the end of the step.
    assert {event["pid"] for event in events} == {-1, 0, 1, 2, 3}
    assert max(e["ts"] + e["dur"] for e in events) == pytest.approx(1e6 * figures["takes"])
    on_devices = [e for e in events if e["pid"] >= 0 and e["tid"] == 0]
    computed = sum(event["dur"] for event in on_devices)
    part = float(figures["device utilisation"].rstrip("%")) / 100
    assert computed / 4 / 1e6 / figures["takes"] == pytest.approx(part, abs=1e-3)
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_ways_are_the_same_again() -> None:
    graph = MODELS["resnet50"]().graph(V100, (1, 4, 16))
    joined = read_topology("sip-ocs:16").interconnect
    both = [
        search_strategies(graph, joined, [(64, 1)], SearchBounds(V100.memory_bytes))
        for _ in range(2)
    ]
    assert [dataclasses.asdict(strategy) for strategy in both[0]] == [
        dataclasses.asdict(strategy) for strategy in both[1]
    ]


def test_optical_fabrics_win_where_devices_are_fast() -> None:
    strategies = {}
    for fabric in ("Elect-Cluster 400", "Elect-Flat", "SiP-OCS", "SiP-Ring"):
        found = sipml.best("transformer", fabric, 8192, 64)
        assert found is not None
        strategies[fabric] = found.total_s
    # The ideal is never slower; SiP-ML has optical fabrics 1.3 to 9.1 times as fast.
    assert min(strategies.values()) == strategies["Elect-Flat"]
    assert strategies["Elect-Cluster 400"] / strategies["SiP-OCS"] > 1.3
    assert strategies["Elect-Cluster 400"] / strategies["SiP-Ring"] > 1.3
    assert sipml.best("megatron", "Elect-Flat", 8192, 8) is None


def test_copies_alone_are_not_best_where_there_is_little_to_compute() -> None:
    hybrid, copies = (
        sipml.best("transformer", "Elect-Flat", 512, 256, spread_max=most) for most in (64, 1)
    )
    assert hybrid is not None
    assert copies is not None
    assert 1.1 < copies.total_s / hybrid.total_s < 3


def test_one_function_places_models_for_scripts_and_the_command_line(tmp_path: Path) -> None:
    runner = CliRunner()
    for what, fabric in (("transformer", "sip-ring:8"), ("gpt:layers=4", "elect-cluster:8")):
        request = fairway.PlacementRequest(batch=64, evaluations=10)
        placed = fairway.place(what, fabric, request)
        given = ["--fabric", fabric, "--batch", "64", "--evaluations", "10", "--json"]
        shown = runner.invoke(app, ["place", what, *given], catch_exceptions=False)
        assert json.loads(shown.stdout) == [dataclasses.asdict(one) for one in placed.strategies]
        assert f"{len(placed.strategies)} strategies" in str(placed)


@pytest.mark.parametrize(
    ("what", "fabric"),
    [
        ("resnet50", "elect-cluster:8"),
        ("gpt:layers=8,hidden=1024,heads=16", "elect-cluster:8"),
        ("gpt:layers=8,hidden=1024,heads=16", "torus:2x4"),
        ("gpt:layers=8,hidden=1024,heads=16,experts=8", "sip-ring:8"),
    ],
)
def test_what_is_placed_takes_as_long_when_it_is_simulated(
    tmp_path: Path, what: str, fabric: str
) -> None:
    """A step that was written is read as the same graph, on the same devices, of the same time."""
    placed = fairway.place(what, fabric, fairway.PlacementRequest(batch=64))
    placed.write_step(tmp_path)
    simulated = simulate_step(fabric, str(tmp_path))
    assert simulated.figures["takes"] == pytest.approx(placed.strategies[0].step_s, rel=1e-6)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("resnet50", [["cpu"]]), "on a fabric such as 'elect-cluster:64'"),
        ((["block"], "elect-cluster:8"), "on the devices of islands"),
        ((["block"], [["cpu"]]), "training=fairway.Training"),
        (("resnet50", "sip-ring:8", fairway.StrategyOptions()), "are fairway.PlacementRequest"),
        (("resnet50", "sip-ring:8", {"batch": 64}), "found {'batch': 64}"),
    ],
)
def test_what_cannot_be_placed_is_explained(given: tuple[Any, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        fairway.place(*given)


def test_strategies_are_ranked_and_what_does_not_fit_is_left_out() -> None:
    def evaluate(size: int) -> TrainingStrategy:
        if size == 0:
            raise PlacementError("it cannot be cut")
        return TrainingStrategy("replicas", 1, 1, "", 1 / size, size)

    assert [one.memory_bytes for one in rank([0, 1, 3, 2], evaluate, 2)] == [2, 1]
    assert [one.memory_bytes for one in rank([0, 1, 3], evaluate)] == [3, 1]
    with pytest.raises(CapacityError, match="needs 3 bytes at least; it has 2"):
        rank([0, 5, 3], evaluate, 2)
    with pytest.raises(CapacityError, match="it cannot be cut"):
        rank([0], evaluate, 2)
