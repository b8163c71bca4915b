"""``fairway plan``: steps that are parsed, planned and explained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fairway.cli import app
from fairway.communication import files, steps
from fairway.communication.explanation import explain
from fairway.communication.steps import ChannelCost
from fairway.communication.team import Script
from fairway.errors import ConfigError, StepError, TeamError
from fairway.studies.reproduce import syndicate
from fairway.studies.workloads import dlrm

COSTS = [ChannelCost(2e8, 50_000), ChannelCost(1e8, 50_000)]
STEP: dict[str, Any] = {
    "ranks": 2,
    "tasks": [
        {"name": "first", "compute_ms": 10, "after": ["second@1"]},
        {
            "name": "second",
            "after": ["first"],
            "collective": {"kind": "all_reduce", "elements": 50_000},
        },
    ],
}


def run(*words: str) -> Any:
    result = CliRunner().invoke(app, ["plan", *words])
    if result.exception is not None:
        raise result.exception
    return result.stdout


def written(tmp_path: Path, step: Any) -> str:
    path = tmp_path / "step.json"
    path.write_text(json.dumps(step))
    return str(path)


def test_waits_are_explained_to_the_last_nanosecond() -> None:
    step = dlrm.WORKLOADS["balanced"].step(4)
    for plan in steps.plan(step, COSTS, evaluations=500).values():
        found = explain(step, plan)
        assert found.period_ns == pytest.approx(plan.period_ns, abs=2)
        computed = round(sum(task.compute_s or 0 for task in step.tasks) * 1e9)
        idle = sum(wait.idle_ns for wait in found.waits)
        assert computed + idle == pytest.approx(found.period_ns, abs=2)
        assert found.idle == pytest.approx(idle / found.period_ns)
        for wait in found.waits:
            parts = wait.moves_ns + sum(wait.behind_ns.values()) + wait.late_ns
            assert parts == wait.idle_ns > 0
        assert sum(link.time_ns for link in found.path) == pytest.approx(found.period_ns, abs=2)
        assert len(found.sentences()) == len(found.waits)


def test_what_stands_behind_what_is_named() -> None:
    step = dlrm.WORKLOADS["balanced"].step(4)
    plan = steps.plan(step, COSTS, evaluations=500)["fifo"]
    longest = max(explain(step, plan).waits, key=lambda wait: wait.idle_ns)
    assert (longest.task, longest.blocker) == ("bottom", "bottom_grads")
    assert set(longest.behind_ns) == {"top_grads"}


def test_a_step_is_planned_and_its_plan_written(tmp_path: Path) -> None:
    out, picture = tmp_path / "plan.json", tmp_path / "plan.png"
    given = written(tmp_path, STEP)
    found = json.loads(run(given, "--json", "--out", str(out), "--picture", str(picture)))
    systems = found["systems"]
    assert list(systems) == ["fifo", "lifo", "exec-only", "sched-only", "joint", "joint+striping"]
    # 10 ms, and 200 kB at 200 Mbit/s; striped at 300.
    assert systems["fifo"]["period_ns"] == pytest.approx(18.2e6, rel=0.02)
    assert systems["joint+striping"]["period_ns"] == pytest.approx(15.5e6, rel=0.02)
    assert found["least_ns"] <= systems["joint+striping"]["period_ns"]
    assert [name for name, _, _ in Script.parse(out.read_text()).operations] == ["second"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_plans_are_written_for_msccl(tmp_path: Path) -> None:
    run(written(tmp_path, STEP), "--system", "fifo", "--json", "--msccl", str(tmp_path / "xml"))
    assert [path.name for path in (tmp_path / "xml").iterdir()] == ["second.xml"]


def test_people_see_tables_and_reasons() -> None:
    shown = " ".join(run("dlrm:data", "--ranks", "2", "--explain", "--evaluations", "200").split())
    for text in (
        "joint+striping",
        "no plan takes less",
        "critical path:",
        "queued behind",
        "channel 1",
    ):
        assert text in shown


def test_costs_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    files.write_costs(path, COSTS)
    assert files.read_costs(path) == COSTS
    assert files.channels("200Mbit/s, 100Mbit/s", "50us") == COSTS
    path.write_text('{"channels": [{"rate": 1}]}')
    with pytest.raises(ConfigError, match="does not say what channels take"):
        files.read_costs(path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "it is no JSON: Expecting property name"),
        ("[]", "it has no list 'channels'"),
        ('{"channels": [7]}', "channel 0 is 7, no object"),
        ('{"channels": [{"rate": 1}]}', "channel 0 has 'rate'; there are rate_bps, "),
        ('{"channels": [{"rate_bps": "x"}]}', "'rate_bps' of channel 0 is 'x', no number"),
        ('{"channels": [{}]}', "channel 0 has no 'rate_bps'"),
    ],
)
def test_costs_that_are_none_are_refused_in_words(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says) as raised:
        files.read_costs(path)
    assert "Error(" not in str(raised.value)


def test_a_file_that_is_no_object_is_no_step(tmp_path: Path) -> None:
    with pytest.raises(StepError, match="it is no object; expected"):
        files.read_step(written(tmp_path, [1]))
    with pytest.raises(StepError, match="'ranks' is missing; expected a whole number"):
        files.read_step(written(tmp_path, {}))


@pytest.mark.parametrize("system", ["nope", "hand"])
def test_a_system_that_is_none_is_refused_before_planning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str
) -> None:
    monkeypatch.setattr(steps, "plan", lambda *_, **__: pytest.fail("it plans"))
    with pytest.raises(ConfigError, match=f"no system '{system}'; there are fifo, lifo"):
        run(written(tmp_path, STEP), "--system", system)


def test_systems_are_those_that_plan() -> None:
    found = steps.plan(dlrm.WORKLOADS["balanced"].step(4), COSTS, evaluations=10)
    assert set(found) <= set(steps.SYSTEMS)
    assert {name for name in steps.SYSTEMS if not name.startswith("hand")} <= set(found)


def test_without_an_algorithm_for_each_collective_none_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "algorithms"
    with pytest.raises(StepError, match="chunks of 1 elements"):
        run("dlrm:balanced", "--evaluations", "50", "--msccl", str(folder), "--json")
    assert not list(folder.iterdir())


def test_costs_that_cannot_be_written_are_refused_before_measuring(tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["calibrate", "--out", str(tmp_path / "a" / "b" / "c.json")])
    assert isinstance(found.exception, ConfigError)
    assert "create it first" in str(found.exception)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"ranks": "two"}, "'ranks' is 'two'"),
        ({"ranks": 0}, "second cannot be"),
        ({"tasks": []}, "no 'tasks'"),
        ({"tasks": [{"compute_ms": 1}]}, "one with a name"),
        ({"tasks": [{"name": "a"}]}, "not one of"),
        ({"tasks": [{"name": "a", "compute_ms": 1, "afer": []}]}, "has 'afer'"),
        ({"tasks": [{"name": "a", "compute_ms": -1}]}, "computes for -1"),
        ({"tasks": [{"name": "a", "compute_ms": 1, "after": "b"}]}, "expected a list"),
        ({"tasks": [{"name": "a", "collective": {"kind": "gossip", "elements": 1}}]}, "'gossip'"),
        ({"tasks": [{"name": "a", "collective": {"kind": "broadcast", "elements": 1}}]}, "'root'"),
        (
            {"tasks": [{"name": "a", "collective": {"kind": "all_to_all", "sizes": [1, 2]}}]},
            "a cannot be",
        ),
        ({"hand": [1]}, "order by hand"),
    ],
)
def test_what_is_no_step_is_refused(tmp_path: Path, change: Any, says: str) -> None:
    with pytest.raises(StepError, match=says):
        files.read_step(written(tmp_path, {**STEP, **change}))


def test_what_cannot_be_planned_is_told(tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    unknown = {**STEP, "tasks": [{"name": "a", "compute_ms": 1, "after": ["b"]}]}
    for words, error, says in (
        ([str(broken)], StepError, "expected JSON"),
        ([written(tmp_path, unknown)], StepError, "no task of the step"),
        (["dlrm:huge"], ConfigError, "there are balanced"),
        (["dlrm:data", "--ranks", "3"], ConfigError, "spread evenly"),
        (["dlrm:data", "--channels", "fast"], ConfigError, "rate of a channel"),
        (["dlrm:data", "--latency", "5"], ConfigError, "latency"),
        (["dlrm:data", "--system", "best"], ConfigError, "no system 'best'"),
        (["dlrm:data", "--picture", "plan.txt"], ConfigError, "ends in .png"),
        (["graph.fbuf", "--explain"], ConfigError, "planned as a whole"),
        (["missing.json"], OSError, "missing.json"),
    ):
        with pytest.raises(error, match=says):
            run(*words)


@pytest.mark.long
def test_production_models_are_planned_as_the_paper_says(tmp_path: Path) -> None:
    found = {
        figure.name: figure for figure in syndicate.reproduce(tmp_path, ["11", "16", "17"], print)
    }
    gains = {row["model"]: row for row in found["11"].rows}
    assert list(gains) == ["A1", "A2", "A3", "A4", "A5", "A6"]
    for row in gains.values():
        order = [row[name] for name in ("BS+", "S-Sched", "joint", "joint, striped")]
        assert order == sorted(order)
        assert max(row["HO"], row["S-Exec"]) <= row["joint"]
        assert row["joint, striped"] <= row["no plan gains more"] * 1.0001
    # A chain of dependencies leaves nothing to reorder.
    assert gains["A6"]["joint"] == pytest.approx(1.0, abs=0.02)
    assert gains["A1"]["joint"] > gains["A2"]["joint"]
    assert gains["A4"]["joint"] > gains["A2"]["joint"]
    for name, small, large in (("16", "tree 4", "ring"), ("17", "whole", "spline 8")):
        first, last = found[name].rows[1], found[name].rows[-2]
        assert first[small] < first[large]
        assert last[large] < last[small]
        assert (tmp_path / f"syndicate-{name}.png").read_bytes().startswith(b"\x89PNG")


def test_channels_between_hosts_are_measured(tmp_path: Path) -> None:
    out = tmp_path / "costs.json"
    result = CliRunner().invoke(
        app, ["calibrate", "--islands", "2x1x1", "--json", "--out", str(out)]
    )
    assert result.exception is None, result.exception
    found = json.loads(result.stdout)
    [cost] = files.read_costs(out)
    assert cost.rate_bps == found["costs"][0]["rate_bps"] > 1e7
    assert found["error_worst"] >= found["error_median"] > 0
    assert "joint" in run("dlrm:data", "--costs", str(out), "--evaluations", "100")


@pytest.mark.parametrize(
    ("islands", "error", "says"),
    [
        ("[[islands]]\nhosts = 1\ndevices = 1\n", ConfigError, "at least two hosts"),
        (
            '[[islands]]\nhosts = 2\ndevices = 1\nprefix = ["no-such-word"]\n',
            TeamError,
            "cannot be started by 'no-such-word'",
        ),
        (
            '[[islands]]\nhosts = 2\ndevices = 1\nprefix = ["false"]\n',
            TeamError,
            "rank 0 has ended",
        ),
        (  # the second ends first, and is not the one that is named
            "[[islands]]\nhosts = 2\ndevices = 1\n"
            'prefix = ["sh", "-c", "[ $0 = 1 ] || sleep 0.5; exit 1", "{rank}"]\n',
            TeamError,
            "rank 0 has ended",
        ),
        (
            'data_plane = "both"\n[[islands]]\nhosts = 2\ndevices = 1\naddress = "192.0.2.1"\n',
            TeamError,
            "192.0.2.1",
        ),
    ],
)
def test_hosts_that_cannot_be_measured_are_told(
    tmp_path: Path, islands: str, error: type[Exception], says: str
) -> None:
    config = tmp_path / "fairway.toml"
    config.write_text(islands)
    result = CliRunner().invoke(app, ["calibrate", "--config", str(config)])
    assert isinstance(result.exception, error)
    assert says in str(result.exception)
