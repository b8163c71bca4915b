"""``fairway compare``: measured steps, and their simulation on the same machine."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_capture import SINGLE_DEVICES
from typer.testing import CliRunner

from fairway._native import StepGraph
from fairway.analysis.comparing import Comparison, compare
from fairway.analysis.machine import FittedMachine, Unit, simulate
from fairway.cli import app
from fairway.errors import CaptureError, ConfigError, ReportError
from fairway.report.measured import STEPS_MAX, STEPS_MIN, HostRecords, measure
from fairway.report.steps import Span, StepReport, digest

GOLDEN = Path(__file__).resolve().parents[1] / "crates" / "ir" / "tests" / "golden"

PIPELINE = """program @pipe
function @first 3000000ns
function @second 5000000ns
input %0: float32[1024] on [0] carried from %1
node %1: float32[1024] on [0] = call @first (%0)
node %2: float32[1024] on [1] = move (%1)
node %3: float32[1024] on [1] = call @second (%2)
return (%3)
"""
"""Two stages: the first one runs ahead of the second."""
FIRST, TRANSFER, SECOND = 0, 1, 2
MS = 1_000_000
ORDERS = itertools.count()


def run(begin_ms: float, end_ms: float, name: str, client: int = 1) -> list[Any]:
    begin, end = round(begin_ms * MS), round(end_ms * MS)
    return ["run", begin, end, 1000, [0], name, client, begin, next(ORDERS)]


def sent(begin_ms: float, end_ms: float, peer: int, tag: int) -> list[Any]:
    begin, end = round(begin_ms * MS), round(end_ms * MS)
    return ["move", begin, end, peer, 4096, "out", 0, tag, next(ORDERS)]


def pipeline(steps: int) -> dict[int, HostRecords]:
    """The second stage is the slower one; its steps take 5 ms."""
    first, second = [], []
    for step in range(steps):
        begin = 3 * step
        first += [run(begin, begin + 3, "first"), sent(begin + 3, begin + 4, 1, 100 + step)]
        second.append(run(4 + 5 * step, 9 + 5 * step, "second"))
    return {0: HostRecords(range(1), first), 1: HostRecords(range(1, 2), second)}


@pytest.mark.parametrize("steps", [STEPS_MIN, 10])
def test_steps_are_found_in_records(steps: int) -> None:
    report = measure(PIPELINE, 1, pipeline(steps))
    graph = digest(StepGraph.of_program(PIPELINE))
    assert (report.step, report.source, report.graph) == ("pipe", "measured", graph)
    expected = [
        {
            FIRST: Span(3 * step * MS, (3 * step + 3) * MS),
            TRANSFER: Span((3 * step + 3) * MS, (3 * step + 4) * MS),
            SECOND: Span((4 + 5 * step) * MS, (9 + 5 * step) * MS),
        }
        for step in range(steps)
    ]
    assert report.steps == expected
    assert report.periods_ns == [5 * MS] * (steps - 1)


def test_other_clients_and_what_follows_the_steps_are_left_out() -> None:
    hosts = pipeline(12)
    first = [run(-5, -4, "warm"), *hosts[0].records, run(900, 901, "evaluate")]
    first.insert(7, run(7, 8, "first", client=2))
    second = [*hosts[1].records, run(902, 903, "evaluate"), run(904, 905, "second", client=2)]
    given = {0: HostRecords(range(1), first), 1: HostRecords(range(1, 2), second)}
    assert measure(PIPELINE, 1, given) == measure(PIPELINE, 1, hosts)


def test_transfers_are_found_where_ends_of_computations_were_noticed_late() -> None:
    hosts = pipeline(10)
    late = [
        [record[0], record[1] + 9 * MS, record[2] + 9 * MS, *record[3:]]
        if record[0] == "run"
        else record
        for record in hosts[0].records
    ]
    report = measure(PIPELINE, 1, {**hosts, 0: HostRecords(range(1), late)})
    # Times of a report are from its first event, here the first transfer.
    expected = [Span(3 * step * MS, (3 * step + 1) * MS) for step in range(10)]
    assert [step[TRANSFER] for step in report.steps] == expected


def test_a_long_run_is_measured_by_its_last_steps() -> None:
    report = measure(PIPELINE, 1, pipeline(STEPS_MAX + 30))
    assert len(report.steps) == STEPS_MAX
    assert report.periods_ns == [5 * MS] * (STEPS_MAX - 1)


def test_too_few_steps_are_no_report() -> None:
    with pytest.raises(CaptureError, match=f"repeated its last step 3 times.*at least {STEPS_MIN}"):
        measure(PIPELINE, 1, pipeline(3))
    with pytest.raises(CaptureError, match="repeated its last step 0 times"):
        measure(PIPELINE, 2, pipeline(9))


def test_a_gang_computes_until_its_last_host_has_ended() -> None:
    program = PIPELINE.replace("on [0]", "tiled 2 on [0..2]").replace("on [1]", "on [2]")
    hosts = pipeline(6)
    late = [
        run(record[1] / MS + 0.5, record[2] / MS + 0.25, "first")
        for record in hosts[0].records
        if record[0] == "run"
    ]
    moved = [
        [*record[:3], 2, *record[4:]] if record[0] == "move" else record
        for record in hosts[0].records
    ]
    given = {
        0: HostRecords(range(1), moved),
        1: HostRecords(range(1, 2), late),
        2: HostRecords(range(2, 3), hosts[1].records),
    }
    report = measure(program, 1, given)
    begin = report.steps[1][FIRST].begin_ns - report.steps[0][FIRST].begin_ns
    assert begin == 3 * MS
    assert {step[FIRST].length_ns for step in report.steps} == {round(2.75 * MS)}


def test_the_simulation_has_the_dependencies_of_the_program() -> None:
    graph = StepGraph.of_program(PIPELINE)
    gangs = [Unit("gang", (0,)), Unit("gang", (1,))]
    assert [str(gang) for gang in gangs] == ["gang 0", "gang 1"]
    machine = FittedMachine({FIRST: 3 * MS, TRANSFER: MS, SECOND: 5 * MS}, {0: 0, 1: 0}, {})
    steps = simulate(graph, machine, 4)
    for step, spans in enumerate(steps):
        assert spans[FIRST] == Span(3 * step * MS, (3 * step + 3) * MS)
        assert spans[SECOND] == Span((4 + 5 * step) * MS, (9 + 5 * step) * MS)
    # A launch is a part of the gang's time, and waking the receiver of the transfer's.
    channel = Unit("channel", (0, 1))
    machine = FittedMachine(machine.node_ns, {0: MS, 1: 2 * MS}, {channel: MS // 2})
    spans = simulate(graph, machine, 2)
    assert spans[0][SECOND].begin_ns == 4 * MS + MS // 2
    assert spans[1][FIRST].begin_ns == 4 * MS
    assert spans[1][SECOND].begin_ns == spans[0][SECOND].end_ns + 2 * MS


@pytest.mark.parametrize("name", ["data_parallel", "pipeline", "experts"])
def test_a_machine_that_is_as_modelled_is_predicted(name: str) -> None:
    """What a known machine does is found again from its report, up to rounding."""
    program = (GOLDEN / f"{name}.fw").read_text()
    graph = StepGraph.of_program(program)
    times = {
        number: 10_000 + 1_000 * (number % 7) if node.kind == "compute" else 40_000
        for number, node in enumerate(graph.nodes)
    }
    known = FittedMachine(times, dict.fromkeys(range(graph.devices), 3_000), {})
    report = StepReport(graph.name, "measured", digest(graph), simulate(graph, known, 24))
    found = compare(program, report)
    assert abs(found.step.error) < 0.01
    assert all(abs(node.error) < 0.01 for node in found.nodes)
    assert found.compared == [*range(7, 24, 2)]


def compare_one(spans: list[dict[int, Span]]) -> Comparison:
    """Compares measured steps of a program that calls one function."""
    program = "program @one\nfunction @f 1ns\ninput %0: float32[] on [0] carried from %1\n"
    program += "node %1: float32[] on [0] = call @f (%0)\nreturn (%1)\n"
    graph = digest(StepGraph.of_program(program))
    return compare(program, StepReport("one", "measured", graph, spans))


def test_the_error_is_that_of_the_steps_that_were_not_fitted() -> None:
    """Every other step is twice as slow: the fit is on fast ones, the comparison on slow ones."""
    spans, begin = [], 0
    for step in range(16):
        length = 10 * MS if step % 2 == 0 else 20 * MS
        spans.append({0: Span(begin, begin + length)})
        begin += length
    found = compare_one(spans)
    assert found.compared == [*range(5, 16, 2)]
    assert found.step.measured_ns == 20 * MS
    assert found.step.error == pytest.approx(-0.5)


@pytest.mark.parametrize("waits", [True, False])
def test_pauses_are_no_part_of_the_machine(waits: bool) -> None:
    """The script waits for a second before one step, or one step takes that long."""
    spans, begin = [], 0
    for step in range(12):
        begin += 1000 * MS if waits and step == 5 else MS
        length = 1000 * MS if not waits and step == 5 else 9 * MS
        spans.append({0: Span(begin, begin + length)})
        begin += length
    found = compare_one(spans)
    assert found.compared == [4, 7, 9, 11]
    assert found.step.measured_ns == pytest.approx(10 * MS)
    assert found.step.error == pytest.approx(0, abs=0.01)


reports = st.builds(
    StepReport,
    st.from_regex(r"[a-z][a-z_0-9]{0,8}", fullmatch=True),
    st.sampled_from(["measured", "simulated"]),
    st.from_regex(r"[0-9a-f]{16}", fullmatch=True),
    st.lists(
        st.dictionaries(
            st.integers(0, 999_999_999),
            st.tuples(st.integers(0, 2**62), st.integers(0, 2**40)).map(
                lambda one: Span(one[0], one[0] + one[1])
            ),
            max_size=4,
        ),
        max_size=4,
    ),
    st.dictionaries(
        st.from_regex(r"[a-z_]{1,20}_(ns|bytes)", fullmatch=True), st.integers(0, 2**62), max_size=3
    ),
)


@given(reports)
def test_reports_are_read_as_printed(report: StepReport) -> None:
    assert StepReport.parse(str(report)) == report


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1 is ''"),
        ("report of @x, guessed, of step graph 0123456789abcdef\n", "line 1"),
        ("step 1\n", "line 2 is 'step 1'; expected `step 0`"),
        ("#0 from 0ns to 1ns\n", "line 2"),
        ("step 0\n#0 from 2ns to 1ns\n", "line 3: node #0: it ends before it begins"),
        ("step 0\n#0 from 0ns to 1ns\n#0 from 1ns to 2ns\n", "line 4: node #0: it is there twice"),
        ("step 0\n#0 from 0ns\n", "line 3"),
        ("step 0\n\nstep 1\n", "line 3"),
        ("step 0\nmakespan_ns: 1\n", "line 3"),
        ("makespan_ns: 1\nmakespan_ns: 1\n", "line 3"),
        ("step 0\n#0 from -1ns to 1ns\n", "line 3"),
    ],
)
def test_what_is_no_report_is_refused(text: str, message: str) -> None:
    header = "report of @x, measured, of step graph 0123456789abcdef\n"
    with pytest.raises(ReportError) as raised:
        StepReport.parse(text if text.startswith("report") or not text else header + text)
    assert message in str(raised.value)


def invoke(*words: str) -> Any:
    found = CliRunner().invoke(app, ["compare", *words])
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    assert found.exit_code == 0, found.output
    return found


def test_reports_of_other_programs_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "step.fw"
    path.write_text(PIPELINE)
    with pytest.raises(ConfigError, match=r"has no measured report, .*step\.report; capture"):
        invoke(str(path))
    report = measure(PIPELINE, 1, pipeline(6))
    path.with_suffix(".report").write_text(str(report))
    path.write_text(PIPELINE.replace("3000000ns", "4000000ns"))
    with pytest.raises(
        ReportError, match=r"the report is of step graph .*; capture the script again"
    ):
        invoke(str(path))
    path.write_text(PIPELINE)
    report.steps[2][77] = Span(0, 1)
    path.with_suffix(".report").write_text(str(report))
    with pytest.raises(ReportError, match="step 2 has a node #77; the program has 3 nodes"):
        invoke(str(path))
    with pytest.raises(ReportError, match="cannot read"):
        invoke(str(path), "--report", str(tmp_path / "none.report"))
    with pytest.raises(ConfigError, match="is no captured program"):
        invoke(str(tmp_path / "step.report"))
    with pytest.raises(ConfigError, match=r"there is no file .*none\.fw"):
        invoke(str(tmp_path / "none.fw"))
    with pytest.raises(ReportError, match=r"cannot read .*none\.report"):
        invoke(str(path), "--predicted", str(tmp_path / "none.report"))


def capture(script: str, step: Path) -> str:
    """Captures a script; returns its standard error."""
    path = step.with_name("steps.py")
    path.write_text(script)
    command = [sys.executable, "-m", "fairway", "capture", "--islands", "2x1x1", str(path)]
    done = subprocess.run(
        [*command, "-o", str(step)],
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_the_report_of_an_earlier_capture_does_not_stay(tmp_path: Path, own_runtime: Path) -> None:
    step = tmp_path / "step.fw"
    step.with_suffix(".report").write_text("of an earlier capture")
    notes = capture(SINGLE_DEVICES, step)
    assert f"{step} has no measured report: the script repeated its last step 3 times" in notes
    assert not step.with_suffix(".report").exists()


def test_a_captured_script_is_compared(tmp_path: Path, own_runtime: Path) -> None:
    """A real script, its hosts' records, and what the command makes of them."""
    step = tmp_path / "step.fw"
    capture(SINGLE_DEVICES.replace("range(3)", "range(24)"), step)
    measured = StepReport.read(step.with_suffix(".report"))
    graph = StepGraph.of_program(step.read_text())
    assert all(
        set(range(len(graph))) - set(spans)
        <= {n for n, node in enumerate(graph.nodes) if node.kind == "transfer"}
        for spans in measured.steps
    ), "every computation of every step was observed"
    files = {name: tmp_path / name for name in ("plot.png", "both.json", "simulated.report")}
    shown = invoke(
        str(step),
        "--json",
        "--plot",
        str(files["plot.png"]),
        "--timeline",
        str(files["both.json"]),
        "-o",
        str(files["simulated.report"]),
    )
    figures = json.loads(shown.stdout)
    assert figures["step"]["measured_s"] > 0
    assert len(figures["nodes"]) <= len(graph)
    # Every other one behind the warm-up, but for pauses of the machine.
    others = range(max(1, round(len(measured.steps) / 4)) + 1, len(measured.steps), 2)
    assert len(others) // 2 <= len(figures["steps"]) <= len(others)
    assert files["plot.png"].read_bytes().startswith(b"\x89PNG")
    simulated = StepReport.read(files["simulated.report"])
    assert simulated.source == "simulated"
    assert len(simulated.steps) == len(measured.steps)
    events = json.loads(files["both.json"].read_text())["traceEvents"]
    assert {event["pid"] for event in events if event["ph"] == "X"} == {0, 1}
    assert "one step, mean" in invoke(str(step)).stdout
