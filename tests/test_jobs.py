"""Several jobs on one fabric: parsed, drawn at random, scheduled, reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fairway.cli import app
from fairway.errors import CapacityError, PlacementError
from fairway.placement.jobs import Job, random_jobs, read_jobs, share, step_times


def a_second(_: Job) -> float:
    return 1.0


def test_jobs_are_read_in_the_order_of_their_arrival(tmp_path: Path) -> None:
    path = tmp_path / "jobs.csv"
    path.write_text("# who\n5, 8, resnet50, 256, 10\n\n0.5, 16, megatron, 64, 1  # soon\n")
    assert read_jobs(path) == [
        Job(0.5, 16, "megatron", 64, 1),
        Job(5.0, 8, "resnet50", 256, 10),
    ]


@pytest.mark.parametrize(
    "line",
    ["1, 8, resnet50, 256", "1, 0, resnet50, 256, 1", "-1, 8, resnet50, 256, 1", "1, 8, a, 1, 1"],
)
def test_jobs_that_make_no_sense_are_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "jobs.csv"
    path.write_text(f"0, 8, resnet50, 256, 1\n{line}\n")
    with pytest.raises(PlacementError, match=r"line 2 of .*jobs.csv is .*; expected seconds"):
        read_jobs(path)
    path.write_text("# no jobs\n")
    with pytest.raises(PlacementError, match="has no jobs"):
        read_jobs(path)


def test_jobs_that_are_drawn_want_what_was_asked_for() -> None:
    jobs = random_jobs(4000, 256, 0.5, 1, a_second)
    assert jobs == random_jobs(4000, 256, 0.5, 1, a_second)
    work = sum(job.devices * job.steps for job in jobs)
    assert 0.45 < work / 256 / jobs[-1].arrives_s < 0.55
    assert {job.devices for job in jobs} == {2**power for power in range(7)}


def test_a_switch_makes_room_where_stretches_are_apart() -> None:
    jobs = random_jobs(600, 64, 0.95, 2, a_second)
    apart, joined = share("sip-ring:64", jobs, a_second, 30_000_000)
    (anywhere,) = share("elect-flat:64", jobs, a_second, 30_000_000)
    assert apart.apart_s > 0
    assert apart.moves == 0
    assert joined.apart_s == anywhere.apart_s == 0
    assert joined.moves > 0
    assert sum(joined.waits_s) < sum(apart.waits_s)
    # The reconfiguration time of a switch is negligible beside the jobs' times.
    assert joined.end_s == pytest.approx(anywhere.end_s, rel=1e-2)
    with pytest.raises(PlacementError, match="job 0 needs 65 devices; expected 1 to 64"):
        list(share("sip-ring:64", [Job(0, 65, "resnet50", 65, 1)], a_second, 0))


def test_a_kind_of_job_that_does_not_fit_is_simulated_once() -> None:
    seen: list[str] = []
    step_s = step_times("sip-ring:16", seen.append)
    for _ in range(2):
        with pytest.raises(CapacityError, match="megatron does not fit on 1 devices"):
            step_s(Job(0, 1, "megatron", 32, 1))
    assert len(seen) == 1


def test_jobs_of_a_missing_file_are_refused_before_any_work() -> None:
    found = CliRunner().invoke(app, ["jobs", "missing.csv"])
    assert found.exit_code != 0
    assert found.output == ""


def test_a_block_of_a_ring_is_a_row() -> None:
    """A job on a whole ring can use both directions around it."""
    own, whole = step_times("sip-ring:16"), step_times("sip-ring:8")
    job = Job(0, 8, "transformer", 256, 1)
    assert own(job) >= whole(job)


def test_the_command_line_shares_a_fabric(tmp_path: Path) -> None:
    path, picture = tmp_path / "jobs.csv", tmp_path / "jobs.png"
    path.write_text(
        "0, 3, resnet50, 192, 100\n0, 2, resnet50, 128, 1000\n0, 3, resnet50, 192, 100\n"
        "1, 6, resnet50, 384, 10\n"
    )
    arguments = ["jobs", str(path), "--fabric", "sip-ring:8", "--plot", str(picture)]
    found = CliRunner().invoke(app, [*arguments, "--json"])
    assert found.exit_code == 0, found.output
    apart, joined = json.loads(found.stdout)
    assert apart["policy"] == "neighbours"
    assert joined["policy"] == "neighbours, by a switch"
    assert len(apart["waits_s"]) == 4
    assert joined["waits_s"][3] <= apart["waits_s"][3]
    assert picture.read_bytes()[:4] == b"\x89PNG"
    shown = CliRunner().invoke(app, ["jobs", "--fabric", "elect-flat:16", "--count", "20"])
    assert shown.exit_code == 0, shown.output
    assert "20 jobs on elect-flat:16" in shown.stdout
    refused = CliRunner().invoke(app, [*arguments[:-1], "jobs.txt"])
    assert refused.exit_code != 0
