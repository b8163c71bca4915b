"""Machines on which something is wrong: clocks, disks, drivers."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest
from test_joining import SUMS, agents, joined, run_script

from fairway.cluster.logs import Logs
from fairway.cluster.records import Clock
from fairway.errors import StartError

SKEWED = """
#include <time.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>

int clock_gettime(clockid_t clock, struct timespec *time) {
  int failed = syscall(SYS_clock_gettime, clock, time);
  if (clock == CLOCK_REALTIME) time->tv_sec += SKEW;
  return failed;
}
int gettimeofday(struct timeval *now, void *zone) {
  struct timespec time;
  clock_gettime(CLOCK_REALTIME, &time);
  now->tv_sec = time.tv_sec; now->tv_usec = time.tv_nsec / 1000;
  return 0;
}
time_t time(time_t *there) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (there) *there = now.tv_sec;
  return now.tv_sec;
}
"""
"""Calls that return a wall clock which is off."""
HOUR_S = 3600
NS = 1_000_000_000
MOVES = """
first, second = ([d for d in jax.devices() if d.island == i] for i in (0, 1))
f = jax.jit(lambda x: (x @ x) / 512)
x = jax.device_put(np.ones((512, 512), "f4"), first[0])
for turn in range(20):
    x = f(jax.device_put(f(x), second[0]))
    x = jax.device_put(x, first[0])
say("end", value=float(x[0, 0]))
"""


def skewed(folder: Path, skew_s: int) -> list[str]:
    """Returns the prefix of a command whose wall clock is off."""
    code, library = folder / "skewed.c", folder / f"skewed{skew_s}.so"
    code.write_text(SKEWED)
    build = ["cc", "-shared", "-fPIC", f"-DSKEW=({skew_s})", "-o", str(library), str(code)]
    subprocess.run(build, check=True)
    prefix = ["env", f"LD_PRELOAD={library}"]
    shown = subprocess.run([*prefix, "date", "+%s"], check=True, capture_output=True, text=True)
    assert abs(int(shown.stdout) - time.time() - skew_s) < 5, "the clock is off"
    return prefix


@pytest.mark.parametrize("skew_s", [HOUR_S, -HOUR_S])
def test_wall_clocks_that_are_off_by_an_hour_do_no_harm(
    own_runtime: Path, tmp_path: Path, skew_s: int
) -> None:
    """Certificates and tokens are checked as well; hosts compute, and leases hold."""
    run = joined("2x1x1")
    with agents(run, skewed(tmp_path, skew_s), ()) as there, run:
        assert run_script(run) == SUMS
        time.sleep(2 * run.settings.timeout_s)
        assert all(agent.poll() is None for agent in there)
        assert [island["state"] for island in run.overview()["islands"]] == ["up", "up"]


def test_timelines_of_machines_are_by_one_clock(own_runtime: Path, tmp_path: Path) -> None:
    """Monotonic clocks of machines begin when these do, so they differ by hours."""
    if os.geteuid():
        pytest.skip("namespaces of time need root")
    run = joined("2x1x1", timeline=tmp_path / "run.json")
    clocks = [["unshare", "--time", "--monotonic", str(hours * HOUR_S)] for hours in (1, 30)]
    began = time.monotonic_ns()
    with agents(run, *clocks), run:
        assert run_script(run, MOVES, "end") == {"value": 1.0}
    ended = time.monotonic_ns()
    assert run.timeline is not None
    assert (tmp_path / "run.json").stat().st_size > 10_000
    records = run.timeline.records
    times = [at for found in records.values() for record in found for at in record[1:3]]
    assert began < min(times)
    assert max(times) < ended
    for host in (0, 1):
        assert sum(one[0] == "run" and "lambda" in one[5] for one in records[host]) == 20
    moves = {way: _moves(records, way) for way in ("out", "in")}
    assert len(moves["out"]) == len(moves["in"]) == 40
    for tag, (_, received) in moves["in"].items():
        sent, _ = moves["out"][tag]
        # By the estimate's error, half a round trip, which is long where all processors are busy.
        assert received > sent - NS // 20, "what is received was sent before"


def _moves(records: dict[int, list[list[object]]], way: str) -> dict[int, tuple[int, int]]:
    """Returns when transfers between hosts began and ended, by their tags."""
    every = (record for found in records.values() for record in found)
    return {
        record[7]: (record[1], record[2])  # type: ignore[misc]
        for record in every
        if record[0] == "move" and record[5] == way and record[3] in (0, 1)
    }


def test_the_quickest_answer_says_the_clock() -> None:
    clock = Clock()
    assert clock.ahead_ns is None
    clock.add(100, 1000 + 150 + 400, 1100)
    clock.add(2000, 1000 + 2005, 2010)
    clock.add(3000, 1000 + 3005 - 300, 4000)
    assert clock.ahead_ns == 1000
    for at in range(10_000, 30_000, 500):
        clock.add(at, 7000 + at + 50, at + 100)
    assert clock.ahead_ns == 7000, "clocks drift, so old answers do not count"


FULL = 'mount -t tmpfs -o size=64k none "$0" && cat /dev/zero > "$0"/full; exec "$@"'


def on_full_disk(folder: Path, *variables: str) -> list[str]:
    """Returns the prefix of a command whose temporary folder, or another one, is on a full disk."""
    if os.geteuid():
        pytest.skip("mounts need root")
    folder.mkdir(exist_ok=True)
    environment = [f"{name}={folder}" for name in variables or ("TMPDIR",)]
    return ["unshare", "--mount", "sh", "-c", FULL, str(folder), "env", *environment]


def test_an_agent_on_a_full_disk_computes(own_runtime: Path, tmp_path: Path) -> None:
    """It keeps nothing there but sockets; what it would record is lost, and that is said."""
    run = joined("2x1x1", timeline=tmp_path / "run.json")
    full = on_full_disk(own_runtime / "disk", "TMPDIR", "XDG_RUNTIME_DIR")
    with agents(run, full, ()), run:
        assert run_script(run) == SUMS
        said = [record.text for record in run.logs.read(0)]
    assert any("No space left on device" in line for line in said)
    assert run.timeline is not None
    assert not run.timeline.records[0] or not run.timeline.records[1]
    assert run.timeline.records[0] or run.timeline.records[1]


def test_modules_that_a_full_disk_cannot_take_are_named(own_runtime: Path, tmp_path: Path) -> None:
    code = own_runtime / "code"
    code.mkdir()
    (code / "large.py").write_text(f"DATA = {os.urandom(1 << 17).hex()!r}\n")
    run = joined("1x1x1", script=code / "script.py")
    full = on_full_disk(own_runtime / "disk", "XDG_CACHE_HOME")
    says = "cannot keep its modules: No space left on device"
    with agents(run, full), pytest.raises(StartError, match=says), run:
        pass


def test_a_full_disk_of_logs_ends_no_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    if os.geteuid():
        pytest.skip("mounts need root")
    folder = tmp_path / "logs"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "none", str(folder)]
    subprocess.run(mount, check=True)
    try:
        logs = Logs(folder)
        for number in range(2000):
            logs.add(f"line {number}")
        assert logs.read()[-1].text == "line 1999"
        logs.close()
    finally:
        subprocess.run(["umount", str(folder)], check=True)
    said = capfd.readouterr().err
    assert said.count("No space left on device") == 1, said
    assert str(folder) in said


def test_machines_without_a_driver_for_gpus_are_refused(own_runtime: Path) -> None:
    run = joined("1x1x1", platform="cuda")
    try:
        with agents(run, ()) as (agent,):
            assert agent.wait(30) == 1
            assert agent.stderr is not None
            said = agent.stderr.read()
        assert "no driver for NVIDIA GPUs; install it, or use --platform cpu" in said
    finally:
        run.close()
