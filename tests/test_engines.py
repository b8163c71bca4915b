"""Engines: hosts that a real Slurm and a real Ray cluster start, on machines of their own.

A machine is a network namespace with a name and an address of its own. All are removed at the end,
with whatever runs on them.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from conftest import PREAMBLE, Measured, until
from machines import LOOK, RAY, Nodes, Program, Ray, networked

from fairway.cluster.registry import live_runs

pytestmark = [pytest.mark.alone, pytest.mark.timeout(300)]

FAIRWAY = (sys.executable, "-m", "fairway")
LOST_AFTER_S = 4.0
BACK_S = 30.0
"""Time within which a lost island is back elsewhere."""
LEFT_S = 20.0
"""Time within which nothing is left of what has ended."""
Training = tuple[Path, list[float]]

SUM = 'say("sum", of=sum(float(jax.device_put(1.0, d)) for d in jax.devices()))\n'
TRAIN = f"""{PREAMBLE}{SUM}
islands = [[d for d in jax.devices() if d.island == number] for number in range(2)]
meshes = [Mesh(np.array(devices), ("x",)) for devices in islands]
whole = [NamedSharding(mesh, P()) for mesh in meshes]
x, y = np.sin(np.arange(64.0)).reshape(2, 8, 4), np.cos(np.arange(16.0)).reshape(2, 8, 1)
xs, ys = (
    [jax.device_put(all[one], NamedSharding(meshes[one], P("x"))) for one in range(2)]
    for all in (x, y)
)
loss = lambda w, x, y: jnp.mean((jnp.tanh(x @ w) - y) ** 2)
slope = jax.jit(jax.value_and_grad(loss))
w, losses = jax.device_put(np.full((4, 1), 0.1), whole[0]), []
for _ in range(3):
    parts = [slope(jax.device_put(w, whole[one]), xs[one], ys[one]) for one in range(2)]
    losses.append(sum(float(loss) for loss, _ in parts) / 2)
    w = w - 0.25 * (parts[0][1] + jax.device_put(parts[1][1], whole[0]))
say("losses", of=losses)
sys.stdin.readline()
"""
"""Sums over all devices, trains on both islands, and waits for a line."""
TICK = f"""{PREAMBLE}
one, step = jax.device_put(1.0, jax.devices()[int(sys.argv[1])]), jax.jit(lambda x: x + 1)
float(step(one))
say("ticking")
last, longest = time.monotonic(), 0.0
try:
    while True:
        float(step(one))
        now = time.monotonic()
        longest, last = max(longest, now - last), now
        say("ticks", at=now, longest=longest)
        time.sleep(0.1)
except Exception as error:
    say("end", error=str(error))
"""
"""Computes on one device until that fails."""
TWO_RUNS = f"""{PREAMBLE}
import dataclasses
import ray
from fairway.cluster.supervisor import Run
from fairway.errors import StartError
from fairway.settings import Settings
settings = Settings.parse("1x1x1", on=f"ray:{{sys.argv[1]}}", data_plane="tcp")
runs = [Run(settings), Run(settings)]
for run in runs:
    run.start()
runs[0].close()
runs[1].add_island(settings.islands[0])
hosts = [host for island in runs[1].overview()["islands"] for host in island["hosts"]]
say("hosts", lost=[bool(host["lost"]) for host in hosts])
try:
    Run(dataclasses.replace(settings, on="ray:192.0.2.1:6379")).start()
except StartError as error:
    say("another", error=str(error))
runs[1].close()
say("ended", connected=ray.is_initialized())
"""
"""Starts two runs, ends the first, and goes on with the second."""


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Training:
    """A script, and its losses on hosts of this machine."""
    script = tmp_path_factory.mktemp("script") / "train.py"
    script.write_text(TRAIN)
    with Program([*FAIRWAY, "run", "--islands", "2x2x1", str(script)]) as run:
        losses = run.hear("losses", 120)["of"]
        run.tell("end")
        assert run.end(30) == 0, run.text()
    return script, losses


def trains(run: Program, training: Training, measured: Measured) -> None:
    """Checks what the training script says."""
    assert run.hear("sum", 120) == {"of": 4.0}
    measured("s from the command to its first output", time.monotonic() - run.began)
    assert run.hear("losses", 60)["of"] == pytest.approx(training[1], abs=1e-5)


@pytest.fixture
def quick(tmp_path: Path) -> tuple[str, ...]:
    """A command that brings islands up whose lost hosts are noticed soon."""
    config = tmp_path / "fairway.toml"
    config.write_text(f"timeout_s = {LOST_AFTER_S}\n")
    return (*FAIRWAY, "up", "--config", str(config))


def hosts(number: int) -> list[int]:
    """Processes of the hosts of an island that is up; none if it is not."""
    islands = live_runs()[0]["islands"] if live_runs() else []
    up = [island for island in islands if island["state"] == "up" and island["id"] == number]
    return [host["process"] for island in up for host in island["hosts"]]


def survives(
    up: Program, nodes: Nodes, inside: list[str], vanish: Callable[[str], None], note: Measured
) -> str:
    """Checks that island 1 comes back elsewhere when one of its machines vanishes; returns which.

    ``up`` brings two islands up on the machines, ``inside`` is the prefix of their clients, and
    ``vanish`` takes a machine away.
    """
    target = up.read("JAX_BACKEND_TARGET=", 120).strip().partition("=")[2]
    environment = {"JAX_PLATFORMS": "proxy", "JAX_BACKEND_TARGET": target}
    client = [*inside, sys.executable, "-c"]
    until(lambda: hosts(0) and hosts(1), 10, "the run answers")
    # The controller of Ray's tests is on the first machine, which so is not the one that vanishes.
    undisturbed, victim = hosts(0), max(map(nodes.place, hosts(1)))
    with ExitStack() as stack:
        clients = [
            stack.enter_context(Program([*client, TICK, str(device)], environment))
            for device in (0, len(undisturbed))
        ]
        steady, losing = (one for one in clients if one.hear("ticking", 60) == {})
        began = time.monotonic()
        vanish(victim)
        assert "DATA_LOSS" in losing.hear("end", BACK_S)["error"]
        note("s until its client knows", time.monotonic() - began)
        up.read("island 1 is lost", BACK_S)
        up.read("island 1 is up again", BACK_S)
        back = time.monotonic()
        note("s until the island is back", back - began)
        assert back - began < BACK_S
        assert len(hosts(1)) == len(undisturbed)
        assert victim not in map(nodes.place, hosts(1))
        assert hosts(0) == undisturbed
        with Program([*client, PREAMBLE + SUM], environment) as again:
            assert again.hear("sum", 60) == {"of": 2.0 * len(undisturbed)}
        while (ticks := steady.hear("ticks", 10))["at"] < back:
            pass
        note("s at most between two results of the other", ticks["longest"])
        assert ticks["longest"] < LOST_AFTER_S
    until(lambda: not nodes.processes(victim), 30, "nothing of Fairway is left on it")
    return victim


class Slurm(Nodes):
    """A Slurm of machines with one CPU each, whose controller runs on this machine."""

    def ask(self, *words: str) -> str:
        """Returns what a command of Slurm prints; nothing if it fails."""
        environment = {**os.environ, **self.environment}
        return subprocess.run(
            words, env=environment, capture_output=True, text=True, timeout=30, check=False
        ).stdout

    def program(self, *words: str) -> Program:
        """Runs a command that uses it."""
        return Program(words, self.environment)

    def join(self, name: str) -> None:
        """Starts the daemon of a machine."""
        self.serve(name, self.on(name, "slurmd", "-N", name, "-D"))

    def jobs(self, *options: str) -> list[str]:
        """Jobs in the queue."""
        return self.ask("squeue", "--noheader", "--format=%i", *options).split()

    def commands(self) -> list[Path]:
        """Processes, wherever, that use it and are no daemons: commands, steps and their tasks."""
        mark, found = f"{self.folder}/slurm.conf\0".encode(), []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                is_daemon = (entry / "comm").read_text().strip() in DAEMONS
                if not is_daemon and mark in (entry / "environ").read_bytes():
                    found.append(entry)
        return found

    def is_clear(self) -> bool:
        """Whether nothing is left: no job, no process, and all nodes are idle."""
        time.sleep(0.2)
        states = self.ask("sinfo", "--noheader", "--Node", "--format=%T").split()
        return states == ["idle"] * len(self.names) and not self.jobs() and not self.commands()


def free_port() -> int:
    with socket.create_server(("", 0)) as found:
        return int(found.getsockname()[1])


DAEMONS = ("munged", "slurmctld", "slurmscriptd", "slurmd")
CONFIG = """ClusterName=engines
SlurmctldHost={me}({nodes.controller})
SlurmctldPort={port}
SlurmUser=root
AuthInfo=socket={nodes.folder}/munge
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
ReturnToService=2
SlurmdTimeout=20
SlurmdSpoolDir={nodes.folder}/spool-%n
SlurmdPidFile={nodes.folder}/pid-%n
StateSaveLocation={nodes.folder}/state
SlurmctldPidFile={nodes.folder}/slurmctld.pid
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
"""Of a Slurm that shares nothing with one of this machine."""


@pytest.fixture(scope="module")
def slurm(runtime: Path) -> Iterator[Slurm]:
    """A Slurm."""
    if not all(map(shutil.which, ("slurmctld", "slurmd", "munged", "srun", "salloc"))):
        pytest.skip("slurmctld, slurmd, munged, srun or salloc is not here")
    with networked(Slurm, 4) as slurm:
        folder = slurm.folder
        slurm.environment["SLURM_CONF"] = f"{folder}/slurm.conf"
        for name in ["state", *(f"spool-{name}" for name in slurm.names)]:
            (folder / name).mkdir()
        config = CONFIG.format(me=platform.node(), nodes=slurm, port=free_port())
        for name, address in slurm.addresses.items():
            config += f"NodeName={name} NodeAddr={address} CPUs=1\n"
        (folder / "slurm.conf").write_text(config)
        groups = "CgroupPlugin=cgroup/v1\nCgroupAutomount=yes\nConstrainCores=no\n"
        (folder / "cgroup.conf").write_text(groups)
        (folder / "key").write_bytes(os.urandom(128))
        (folder / "key").chmod(0o600)
        files = [f"--{one}-file={folder}/munge-{one}" for one in ("pid", "log", "seed")]
        files += [f"--key-file={folder}/key", f"--socket={folder}/munge"]
        slurm.serve("munged", ["munged", "--foreground", *files])
        until((folder / "munge").exists, 10, "munged listens")
        slurm.serve("slurmctld", ["slurmctld", "-D", "-c"])
        until(lambda: slurm.ask("sinfo", "--noheader"), 20, "slurmctld answers")
        for name in slurm.names:
            slurm.join(name)
        until(slurm.is_clear, 30, "all nodes are idle")
        yield slurm


@pytest.fixture
def cleared(slurm: Slurm) -> Iterator[Slurm]:
    """The Slurm, in which each test leaves nothing."""
    until(slurm.is_clear, 40, "nothing is left by an earlier test")
    yield slurm
    for name in slurm.names:  # of a test that failed, like the jobs
        slurm.cut(name, down=False)
    slurm.ask("scancel", "--user=root")


@pytest.mark.parametrize("within", [(), ("salloc", "-N4")], ids=["alone", "allocated"])
def test_hosts_run_on_nodes_of_slurm(
    cleared: Slurm, training: Training, within: tuple[str, ...], measured: Measured
) -> None:
    """In jobs of their own, or in steps of an allocation; none of them is left."""
    command = [*within, *FAIRWAY, "run", "--on", "slurm", "--islands", "2x2x1", str(training[0])]
    with cleared.program(*command) as run:
        trains(run, training, measured)
        assert all(map(cleared.processes, cleared.names))
        assert len(cleared.jobs()) == (1 if within else 2)
        run.tell("end")
        assert run.end(30) == 0, run.text()
    measured("s until nothing is left", until(cleared.is_clear, LEFT_S, "nothing is left"))


@pytest.mark.parametrize("how", ["cut", "killed"])
def test_a_node_that_slurm_loses_is_replaced(
    cleared: Slurm, quick: tuple[str, ...], how: str, measured: Measured
) -> None:
    """By the spare one of the allocation, whether its link is down or all on it was killed."""
    slurm, command = cleared, ["salloc", "-N3", "--no-kill", *quick, "--on", "slurm"]
    with slurm.program(*command, "--islands", "2x1x1") as up:
        victim = survives(up, slurm, [], slurm.cut if how == "cut" else slurm.kill, measured)
        if how == "cut":
            slurm.cut(victim, down=False)
        else:
            slurm.join(victim)
        os.kill(live_runs()[0]["process"], signal.SIGTERM)
        up.end(30)
    measured("s until nothing is left", until(slurm.is_clear, 60, "nothing is left"))


def test_what_slurm_refuses_is_explained(cleared: Slurm) -> None:
    on = ("--on", "slurm:--partition=absent", "--islands", "1x1x1")
    with cleared.program(*FAIRWAY, "up", *on) as up:
        assert up.end(30) == 1, up.text()
        how = "host 0 does not start: the agent on nodes of island 0 has ended with status 1"
        assert how in up.text()
        assert "srun: error: invalid partition specified: absent" in up.text()
    assert cleared.is_clear()


def test_more_nodes_than_slurm_has_are_explained(cleared: Slurm) -> None:
    """Slurm lets such a job wait, since nodes may come, until Ctrl-C; what it says is shown."""
    with cleared.program(*FAIRWAY, "up", "--on", "slurm", "--islands", "1x8x1") as up:
        up.read("Requested partition configuration not available now", 30)
        up.read("queued and waiting for resources", 5)
        up.interrupt()
    until(cleared.is_clear, LEFT_S, "nothing is left")


def test_ctrl_c_leaves_nothing_in_slurm(
    cleared: Slurm, training: Training, measured: Measured
) -> None:
    """While agents start."""
    command = [*FAIRWAY, "run", "--on", "slurm", "--islands", "2x2x1", str(training[0])]
    with cleared.program(*command) as run:
        until(lambda: len(cleared.jobs("--states=running")) == 2, 30, "both jobs run")
        measured("s from Ctrl-C to its end", run.interrupt())
    until(cleared.is_clear, LEFT_S, "nothing is left")


@pytest.fixture(scope="module")
def ray(runtime: Path) -> Iterator[Ray]:
    """A Ray cluster."""
    if importlib.util.find_spec("ray") is None or not RAY.exists():
        pytest.skip("there is no Ray here")
    with networked(Ray, 5) as ray:
        for name in ray.names:  # one at a time: Ray gives up where that takes too long
            ray.join(name)
        with Program([*ray.inside, sys.executable, "-c", LOOK, ray.address]) as ray.looker:
            ray.has_nodes(5)
            yield ray


@pytest.fixture
def untouched(ray: Ray) -> Ray:
    """The Ray cluster, in which each test leaves nothing."""
    until(ray.is_clear, 40, "nothing is left by an earlier test")
    return ray


def test_hosts_run_on_nodes_of_ray(untouched: Ray, training: Training, measured: Measured) -> None:
    """In actors, none of which is left."""
    ray, script = untouched, training[0]
    command = [*FAIRWAY, "run", "--on", f"ray:{ray.address}", "--islands", "2x2x1", str(script)]
    with Program([*ray.inside, *command]) as run:
        trains(run, training, measured)
        assert sum(map(bool, map(ray.processes, ray.names[1:]))) >= 3
        assert {"actors": 4, "free": 1, "nodes": 5}.items() <= ray.look().items()
        run.tell("end")
        assert run.end(30) == 0, run.text()
    measured("s until nothing is left", until(ray.is_clear, LEFT_S, "nothing is left"))


def test_a_node_that_ray_loses_is_replaced(
    untouched: Ray, quick: tuple[str, ...], measured: Measured
) -> None:
    """One of two of its island, by the only spare one; its own successor has room again."""
    ray, command = untouched, [*quick, "--on", f"ray:{untouched.address}", "--islands", "2x2x1"]
    with Program([*ray.inside, *command]) as up:
        victim = survives(up, ray, ray.inside, ray.cut, measured)
        ray.has_nodes(4)
        ray.kill(victim)
        ray.cut(victim, down=False)
        ray.join(victim)
        ray.has_nodes(5)
        time.sleep(5)
        assert ray.look()["free"] == 1, "nothing holds the CPU of the node that is there again"
        os.kill(live_runs()[0]["process"], signal.SIGTERM)
        up.end(30)
    measured("s until nothing is left", until(ray.is_clear, LEFT_S, "nothing is left"))


def test_runs_of_one_process_share_its_connection_to_ray(untouched: Ray) -> None:
    """The end of the one that has connected it takes nothing of the other along."""
    with Program([*untouched.inside, sys.executable, "-c", TWO_RUNS, untouched.address]) as runs:
        assert runs.hear("hosts", 120) == {"lost": [False, False]}
        assert f"the runs of this process use {untouched.address}" in runs.hear("another")["error"]
        assert runs.hear("ended", 30) == {"connected": False}
        assert runs.end(30) == 0, runs.text()
    until(untouched.is_clear, LEFT_S, "nothing is left")


def test_a_ray_that_does_not_answer_is_named(untouched: Ray, measured: Measured) -> None:
    absent = f"{untouched.controller}:{free_port()}"
    command = [*FAIRWAY, "up", "--on", f"ray:{absent}", "--islands", "1x1x1"]
    with Program([*untouched.inside, *command]) as up:
        assert up.end(60) == 1, up.text()
        measured("s until it is refused", time.monotonic() - up.began)
        assert f"no Ray cluster answers at {absent}" in up.text()
        assert "ray start --head" in up.text()


@pytest.mark.parametrize("moment", ["queued", "starting"])
def test_ctrl_c_leaves_nothing_in_ray(
    untouched: Ray, training: Training, moment: str, measured: Measured
) -> None:
    """Neither while there is no room for an island, nor while agents start."""
    ray, shape = untouched, {"queued": "2x4x1", "starting": "2x2x1"}[moment]
    command = [*FAIRWAY, "run", "--on", f"ray:{ray.address}", "--islands", shape]
    with Program([*ray.inside, *command, str(training[0])]) as run:
        until(lambda: ray.look()["actors"] >= 4, 60, "actors are there")
        measured("s from Ctrl-C to its end", run.interrupt())
    until(ray.is_clear, LEFT_S, "nothing is left")
