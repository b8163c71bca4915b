"""Workloads on simulated chips: numbers against numpy, the command line, all rows of the paper."""

import json
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from conftest import cpu_s, until
from typer.testing import CliRunner

from fairway.analysis.topologies import read_routed
from fairway.cli import app
from fairway.errors import ConfigError, RouteError, TopologyError
from fairway.execution import ExecutionOptions
from fairway.simulation import simulate
from fairway.studies.reproduce import tsp
from fairway.studies.workloads import COLLECTIVES
from fairway.studies.workloads.bert import Encoder, Shape, encode, place_over_chips, place_pipeline
from fairway.studies.workloads.cholesky import assembled, place_cholesky
from fairway.studies.workloads.collectives import all_reduce, try_out
from fairway.studies.workloads.matmul import place_product
from fairway.studies.workloads.program import ChipProgram

NODE = read_routed("dragonfly:8")


@pytest.fixture
def random():
    return np.random.default_rng(7)


def test_a_program_computes_sends_and_adds():
    program = ChipProgram(NODE)
    here = program.put(0, np.arange(320, dtype=np.float32).reshape(4, 80))
    there = program.send(here, 5)
    double = program.compute(5, lambda x: 2 * x, [there], (4, 80), cycles=100)
    total = program.add(double, program.put(3, np.ones((4, 80), np.float32)))
    last = program.send(program.rows(total, 2, 3), 1)
    run = program.run()
    expected = 2 * np.arange(320, dtype=np.float32).reshape(4, 80) + 1
    assert np.array_equal(run[total], expected)
    assert np.array_equal(run[last], expected[2:3])
    # Three hops of 722 ns, 100 cycles, and vectors of 26 ns pipelined behind the first ones.
    assert 3 * 0.722e-6 + 100 / 900e6 < run.seconds < 3.5 * 0.722e-6


@pytest.mark.parametrize(("columns", "rows"), [(1, 1), (4, 3), (8, 2), (2, 9)])
def test_a_product_is_right(random, columns, rows):
    left = random.normal(size=(48, 330)).astype(np.float16)
    right = random.normal(size=(330, 640)).astype(np.float16)
    program = ChipProgram(read_routed("dragonfly:24"), "float16")
    blocks = place_product(program, left, right, columns, rows)
    run = program.run()
    found = np.concatenate([np.concatenate([run[one] for one in group]) for group in blocks], 1)
    exact = left.astype(np.float32) @ right.astype(np.float32)
    # Partial products are stored and added in 16 bits.
    assert np.abs(found - exact).max() < 4e-3 * np.abs(exact).max()


@pytest.mark.parametrize("chips", [1, 3, 8])
def test_a_factor_is_right(random, chips):
    half = random.normal(size=(400, 400))
    matrix = (half @ half.T + 400 * np.eye(400)).astype(np.float32)
    program = ChipProgram(NODE)
    factor = place_cholesky(program, matrix, chips, block=80)
    found = assembled(factor, program.run(), 80)
    assert np.abs(found - np.linalg.cholesky(matrix)).max() < 1e-4


def test_encoders_are_right_in_a_pipeline_and_over_chips(random):
    shape = Shape(words=12, width=80, heads=4, inside=160)
    encoders = [Encoder.random(shape, random) for _ in range(4)]
    inputs = [random.normal(size=(12, 80)).astype(np.float32) for _ in range(3)]
    expected = list(inputs)
    for encoder in encoders:
        expected = [encode(x, encoder, 4) for x in expected]
    program = ChipProgram(NODE)
    outputs = place_pipeline(program, inputs, encoders, shape, 4)
    run = program.run()
    for output, wanted in zip(outputs, expected, strict=True):
        assert np.abs(run[output] - wanted).max() < 1e-5
    program = ChipProgram(NODE)
    output = place_over_chips(program, inputs[0], encoders, shape, 4)
    assert np.abs(program.run()[output] - expected[0]).max() < 1e-5


@pytest.mark.parametrize("kind", COLLECTIVES)
@pytest.mark.parametrize("fabric", ["dragonfly:16", "torus:2x3", "ring:4", "switch:5"])
def test_collectives_bring_what_they_should(kind, fabric):
    plan = read_routed(fabric).collective(kind, 20_000)
    outcome = try_out(kind, plan, options=ExecutionOptions(noise=(1, 0.05, 1)))
    assert outcome["right"]
    assert outcome["corrected"] > 0


def test_damage_that_cannot_be_mended_is_told_and_changes_the_result():
    plan = NODE.collective("all-reduce", 100_000)
    outcome = try_out("all-reduce", plan, options=ExecutionOptions(noise=(1, 0.2, 2)))
    assert outcome["incidents"]
    assert not outcome["right"]


def test_an_all_reduce_is_numpys(random):
    arrays = [random.integers(0, 99, (33, 17)).astype(np.float32) for _ in range(8)]
    found, _ = all_reduce(NODE.collective("all-reduce", arrays[0].nbytes), arrays)
    assert all(np.array_equal(one, np.sum(arrays, 0)) for one in found)


def test_plans_and_outcomes_are_the_same_on_any_number_of_threads():
    plans = [read_routed("dragonfly:72").collective("all-reduce", 1 << 16) for _ in range(2)]
    assert plans[0].trains() == plans[1].trains()
    runs = [
        try_out("all-reduce", plans[0], options=ExecutionOptions(noise=(3, 0.01, 2), threads=n))
        for n in (1, 2, 1, 2, 1, 2)
    ]
    assert all(run == runs[0] for run in runs)


def test_timelines_are_the_same_byte_by_byte(tmp_path):
    timelines = []
    for number in range(4):
        found = simulate("dragonfly:16", "all-reduce:256KiB", threads=1 + number % 2)
        path = tmp_path / f"{number}.json"
        found.write_timeline(path)
        timelines.append(path.read_bytes())
    assert len(set(timelines)) == 1
    assert len(timelines[0]) > 10_000


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda p: p.put(8, np.ones(3)), "no chip 8"),
        (lambda p: p.compute(1, np.sin, [p.put(0, np.ones(3))], (3,), 1), "cannot compute"),
        (lambda p: p.add(p.put(0, np.ones(3)), p.put(1, np.ones(3))), "cannot add"),
        (lambda p: p.rows(p.put(0, np.ones((3, 3))), 1, 2), "whole vectors"),
        (lambda p: p.send(p.empty(0, (1 << 28,)), 1) and p.plan(), "a chip holds"),
        (lambda p: p.compute(0, lambda: np.ones(2), [], (3,), 1) and p.run(), "expected"),
    ],
)
def test_programs_that_cannot_be_are_refused(wrong, words):
    with pytest.raises(RouteError, match=words):
        wrong(ChipProgram(NODE))


def test_what_a_function_raises_comes_through():
    program = ChipProgram(NODE)
    program.compute(0, lambda: np.linalg.cholesky(-np.eye(2)), [], (2, 2), 1)
    with pytest.raises(np.linalg.LinAlgError):
        program.run()


def test_the_command_simulates_draws_and_writes(tmp_path):
    runner = CliRunner()
    timeline, plot = tmp_path / "deep" / "run.json", tmp_path / "links.png"
    command = ["simulate", "--fabric", "dragonfly:16", "--workload", "allreduce:64KiB"]
    shown = runner.invoke(app, [*command, "--timeline", str(timeline), "--plot", str(plot)])
    assert shown.exit_code == 0, shown.output
    assert "results verified" in shown.output
    events = json.loads(timeline.read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) > 100
    assert plot.read_bytes().startswith(b"\x89PNG")
    printed = runner.invoke(app, [*command, "--json", "--errors", "0.01"])
    found = json.loads(printed.stdout)
    assert found["vectors corrected"] > 0
    assert found["takes"] == pytest.approx(json.loads(printed.stdout)["takes"])


def test_dead_nodes_are_replaced():
    found = simulate("dragonfly:72", "failover:3").figures
    assert found["nodes that were replaced"] == "3"
    assert found["carried out"] == "results verified"
    with pytest.raises(RouteError, match="no spare is left"):
        simulate("dragonfly:72", "failover:3,4")
    with pytest.raises(RouteError, match="no node 9"):
        simulate("dragonfly:72", "failover:9")
    with pytest.raises(RouteError, match="expected a dragonfly"):
        simulate("torus:4x4", "failover:1")


@pytest.mark.alone
def test_ctrl_c_ends_long_planning_at_once():
    command = [sys.executable, "-m", "fairway", "simulate", "--fabric", "switch:2000"]
    with subprocess.Popen(
        [*command, "--workload", "all-to-all:1MiB"],
        start_new_session=True,
        # A shell that started the tests in the background had them ignore it.
    ) as run:
        try:
            # Imports need less; in wall time, a busy machine may not have reached planning yet.
            until(lambda: cpu_s(run.pid) > 2.5, 120, "it plans")
            begin = time.monotonic()
            run.send_signal(signal.SIGINT)
            assert run.wait(10) == 130
            assert time.monotonic() - begin < 2
        finally:
            run.kill()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--workload", "all-reduce:64KiB", "--plot", "/proc/nope/links.png"], "cannot write"),
        (["--workload", "all-reduce:64KiB", "--plot", "links.xyz"], "ends in"),
        (["--workload", "uniform:5", "--timeline", "run.json"], "no schedule"),
        (["--workload", "uniform:5", "--errors", "0.5"], "no errors"),
        (["--workload", "uniform:99999999"], "20000000 messages at most"),
        (["--workload", "all-reduce:" + 400 * "9" + "B"], "expected a size"),
    ],
)
def test_what_cannot_be_written_or_done_is_said_first(options, words):
    shown = CliRunner().invoke(app, ["simulate", "--fabric", "ring:8", *options])
    assert isinstance(shown.exception, (ConfigError, RouteError))
    assert words in str(shown.exception)
    assert len(str(shown.exception)) < 300


@pytest.mark.parametrize("workload", ["matmul:80x400x640", "cholesky:960", "bert:8", "uniform:20"])
def test_every_workload_can_be_simulated(workload):
    assert simulate("dragonfly:8", workload).figures["takes"] > 0


@pytest.mark.parametrize(
    ("fabric", "workload", "error", "words"),
    [
        ("dragonfly:9", "all-reduce:1MiB", TopologyError, "multiple of 8"),
        ("dragonfly:8", "all-reduce", ConfigError, "there is no workload"),
        ("dragonfly:8", "some-reduce:1MiB", ConfigError, "there is no workload"),
        ("dragonfly:8", "all-reduce:1TB", RouteError, "memory of 220.0 MiB"),
        ("dragonfly:8", "all-reduce:much", ConfigError, "the size"),
        ("switch:100", "all-reduce:1KiB", RouteError, "at most 64 endpoints"),
        ("torus:1000x1000", "all-reduce:1MiB", RouteError, "memory"),
        ("switch:100000", "all-to-all:1KiB", RouteError, "planning it would take"),
        ("dragonfly:8", "matmul:8x8", ConfigError, "product"),
        ("dragonfly:8", "cholesky:100", ConfigError, "multiple of 320"),
        ("dragonfly:8", "bert:9", ConfigError, "as many on each"),
        ("dragonfly:8", "uniform:0", ConfigError, "a count"),
    ],
)
def test_what_cannot_be_simulated_is_refused(fabric, workload, error, words):
    with pytest.raises(error, match=words):
        simulate(fabric, workload)


@pytest.mark.long
def test_every_row_of_the_paper_holds_or_says_why(tmp_path):
    names = ["10", "13", "14", "15", "16", "18", "19", "20", "variance"]
    figures = list(tsp.reproduce(tmp_path, names, lambda _: None))
    found = tsp.write_page(tmp_path, figures, lambda _: None)
    assert {row.number for row in found} >= {*range(1, 26), 29, 31, 32, 33, 34}
    assert [row for row in found if not row.holds] == []
    assert all(row.note for row in found if row.kind == "X")
    page = (tmp_path / "tsp.md").read_text()
    assert all((tmp_path / f"tsp-{name}.png").is_file() for name in names)
    assert all(f"tsp-{name}.png" in page for name in names)
    by_name = {figure.name: figure for figure in figures}
    linear = by_name["18"].lines["simulated"][1]
    assert linear == pytest.approx([1, 4, 8, 16], rel=0.02)
    speedups = by_name["19"].lines["simulated"][1]
    assert speedups == pytest.approx([1, 1.2, 1.4, 1.5], abs=0.12)
    utilisation = by_name["14"].lines["utilisation"][1]
    assert utilisation[0] == pytest.approx(79.8, abs=0.1)
    assert max(utilisation) == utilisation[0]
    bandwidth = by_name["16"].lines["8 chips"][1]
    assert bandwidth == sorted(bandwidth)
    assert "1 duration" in by_name["variance"].summary
