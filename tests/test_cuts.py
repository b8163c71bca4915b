"""Transformers cut by data, tensor, pipeline and expert parallelism: closed forms, simulation."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

import fairway
from fairway import _native
from fairway.analysis.topologies import read_topology
from fairway.errors import CapacityError, ConfigError, PlacementError
from fairway.placement.cuts import SIMULATED, best_cuts, least_s
from fairway.placement.placing import CutPlacement
from fairway.placement.search import simulate_graph
from fairway.placement.simulating import simulate_step
from fairway.placement.transformers import (
    A100,
    A100_REACHES,
    Machine,
    Parallelism,
    Transformer,
    step_graph,
    step_time,
)


def machine(fabric: str) -> Machine:
    return Machine(_native.Links(read_topology(fabric).interconnect, {}), A100, A100_REACHES)


def test_transformers_are_cut_as_people_cut_them() -> None:
    servers = machine("elect-cluster:1024,rate=2.4Tbit/s,server=800Gbit/s,latency=10us")
    model = Transformer(96, 12_288, 96, 2048)
    strategies = best_cuts(model, servers, 1024, 1536)
    best = strategies[0].parallelism
    # Megatron trains this model with tensor parallelism over the eight devices of a server.
    assert best.tensor == 8
    assert best.pipeline > 1
    least = least_s(model, servers, 1024, 1536)
    for strategy in strategies:
        cut = strategy.parallelism
        assert cut.data * cut.tensor * cut.pipeline == 1024
        assert cut.batch % (cut.data * cut.micro_batch) == 0
        assert strategy.step.memory_bytes <= A100.memory_bytes
        assert strategy.step.total_s >= least
    assert strategies == sorted(strategies, key=lambda strategy: strategy.step.total_s)


def test_experts_are_spread() -> None:
    model = Transformer(24, 2048, 16, 1024, experts=64, active=2)
    best = best_cuts(model, machine("elect-flat:64,rate=2Tbit/s"), 64, 512)[0]
    assert best.parallelism.expert > 1


def test_transformers_that_cannot_be_cut() -> None:
    flat = machine("elect-flat:8")
    with pytest.raises(CapacityError, match="a device needs"):
        best_cuts(Transformer(96, 12_288, 96, 2048), flat, 8, 64)
    with pytest.raises(PlacementError, match="7 devices and batches of 3 have no common parts"):
        best_cuts(Transformer(4, 64, 4, 64), machine("elect-flat:7"), 7, 3)
    with pytest.raises(PlacementError, match="whole heads"):
        Transformer(8, 1024, 97, 1024)
    with pytest.raises(PlacementError, match="a batch of 0"):
        simulate_step("elect-cluster:64", "megatron:0")


def test_the_command_line_cuts_transformers() -> None:
    command = [sys.executable, "-m", "fairway", "place", "gpt:layers=24,hidden=2048,heads=16"]
    options = ["--fabric", "elect-cluster:64", "--batch", "512"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "lower bound" in " ".join(done.stdout.split())
    done = subprocess.run(
        [*command, *options, "--json"], capture_output=True, text=True, timeout=120
    )
    strategies = json.loads(done.stdout)
    simulated = [one["simulated_s"] for one in strategies if one["simulated_s"] is not None]
    assert len(simulated) == SIMULATED
    assert simulated == sorted(simulated)
    others = [one["step"]["total_s"] for one in strategies[SIMULATED:]]
    assert others == sorted(others)
    assert f"simulated {SIMULATED} of {len(strategies)} strategies" in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    "cut",
    [
        Parallelism(8, 1, 1, 2, 64),
        Parallelism(1, 8, 1, 4, 64),
        Parallelism(1, 1, 8, 1, 64),
        Parallelism(2, 2, 2, 2, 64),
        Parallelism(2, 2, 2, 2, 64, recomputes=True),
        Parallelism(8, 1, 1, 1, 64, expert=4),
        Parallelism(4, 2, 1, 1, 64, expert=4, recomputes=True),
    ],
    ids=str,
)
def test_a_simulated_cut_takes_what_closed_forms_say(cut: Parallelism) -> None:
    """On an ideal switch nothing is shared, so that both models have the same step.

    Closed forms leave the overhead of microbatches out of the bubble.
    """
    model = Transformer(8, 1024, 16, 512, experts=8 if cut.expert > 1 else 1)
    flat = machine("elect-flat:8")
    graph = step_graph(model, flat, cut)
    found = simulate_graph(graph, read_topology("elect-flat:8").interconnect)
    total_s = step_time(model, flat, cut).total_s + (cut.pipeline - 1) * A100.overhead_s
    assert found.seconds == pytest.approx(total_s, rel=0.01)
    # Forward and backward of each microbatch on each copy of a stage, and the updates.
    passes = 2 * cut.batch // cut.micro_batch // cut.data
    ops = [line for line in str(graph).splitlines() if "compute" in line]
    assert len(ops) == cut.data * cut.pipeline * (passes + 1)


def test_stages_hold_as_many_microbatches_as_there_are_stages_behind() -> None:
    """1F1B: a stage begins backward as soon as it can, and keeps no more activations than that."""
    cut = Parallelism(1, 1, 4, 1, 8)
    graph = step_graph(Transformer(8, 1024, 16, 512), machine("elect-flat:4"), cut)
    interconnect = read_topology("elect-flat:4").interconnect
    times = simulate_graph(graph, interconnect).times_s
    begun = dict.fromkeys(range(4), 0)
    most = dict.fromkeys(range(4), 0)
    passes = [
        (start, node.name, node.devices[0])
        for node, (start, _) in zip(graph.nodes, times, strict=True)
        if node.kind == "compute" and node.name != "update"
    ]
    for _, name, device in sorted(passes):
        begun[device] += 1 if name.startswith("forward") else -1
        most[device] = max(most[device], begun[device])
    assert most == {0: 4, 1: 3, 2: 2, 3: 1}


def test_dependencies_grow_with_the_devices() -> None:
    """A device sends after its own all-to-all, not after those of all devices of its copy."""

    def edges(tensor: int) -> int:
        model = Transformer(2, 4096, 4096, 16, experts=2)
        cut = Parallelism(2, tensor, 2, 1, 2, expert=2)
        graph = step_graph(model, machine(f"elect-flat:{4 * tensor}"), cut)
        return sum(len(node.after) for node in graph.nodes)

    assert edges(512) < 2.2 * edges(256)


def test_many_messages_between_experts_are_left_to_closed_forms() -> None:
    model = Transformer(8, 1024, 8, 512, experts=64, active=54)
    with pytest.raises(PlacementError, match="nodes; expected at most"):
        step_graph(model, machine("elect-flat:64"), Parallelism(64, 1, 1, 1, 4096, expert=64))


@pytest.mark.parametrize("batch", [0, -4, 1 << 31, 10**30, 2.5, "64"])
@pytest.mark.parametrize("what", ["gpt:layers=4", "resnet50"])
def test_batches_that_are_none_are_refused(what: str, batch: Any) -> None:
    with pytest.raises(ConfigError, match="expected 1 to 2147483647 samples"):
        fairway.place(what, "elect-flat:8", fairway.PlacementRequest(batch=batch))


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ("experts=8,active=9", "routed to 9 of 8 experts"),
        ("layers=3,layers=4", "each at most once"),
        ("layers=\N{ARABIC-INDIC DIGIT THREE}", "expected NAME=NUMBER"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(sizes: str, says: str) -> None:
    with pytest.raises(PlacementError, match=says):
        fairway.place(f"gpt:{sizes}", "elect-flat:8")


def test_a_step_of_too_many_nodes_is_left_to_closed_forms() -> None:
    huge = fairway.place("gpt:layers=64,hidden=8192,heads=64", "elect-cluster:4096")
    assert isinstance(huge, CutPlacement)
    assert huge.strategies[0].simulated_s is not None
    cut = Parallelism(512, 8, 1, 1, 1 << 20)
    with pytest.raises(PlacementError, match="nodes; expected at most"):
        step_graph(huge.model, huge.machine, cut)
