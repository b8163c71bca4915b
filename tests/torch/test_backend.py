"""The backend of `torch.distributed`: ranks are processes, as `torchrun` has them.

Needs PyTorch: `make test-torch`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
meeting = pytest.importorskip("fairway.torch.meeting")

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[1] / "examples" / "train_torch.py"
TIMEOUT_S = 120


@contextlib.contextmanager
def ranks(
    count: int, *command: str, environment: Mapping[str, str] | None = None
) -> Iterator[list[subprocess.Popen[str]]]:
    """N processes that form a process group."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    with contextlib.ExitStack() as stack:
        started = []
        for rank in range(count):
            own = {
                **{k: v for k, v in os.environ.items() if not k.startswith("FAIRWAY_")},
                "OMP_NUM_THREADS": "1",
                "RANK": str(rank),
                "WORLD_SIZE": str(count),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                **(environment or {}),
            }
            pipe = subprocess.PIPE
            process = subprocess.Popen(
                [sys.executable, *command], stdout=pipe, stderr=pipe, text=True, env=own
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            started.append(process)
        yield started


def run(count: int, *command: str, environment: Mapping[str, str] | None = None) -> str:
    """Returns the output of rank 0, when all have succeeded."""
    with ranks(count, *command, environment=environment) as started:
        words = [process.communicate(timeout=TIMEOUT_S) for process in started]
    for process, (_, errors) in zip(started, words, strict=True):
        assert process.returncode == 0, errors[-3000:]
    return words[0][0]


TWO_NETWORKS = {"FAIRWAY_CHANNELS": "tcp:127.0.0.1:0@2Gbit/s,tcp:127.0.0.1:0@1Gbit/s"}


@pytest.mark.parametrize("channels", [{}, TWO_NETWORKS], ids=["memory", "networks"])
@pytest.mark.parametrize("count", [2, 3])
def test_every_collective(count: int, channels: Mapping[str, str]) -> None:
    said = run(count, str(HERE / "every_collective.py"), "cpu", environment=channels)
    assert said.split()[-1] == "wrong"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_every_collective_of_what_lies_on_a_gpu() -> None:
    said = run(2, str(HERE / "every_collective.py"), "cuda")
    assert said.split()[-1] == "wrong"


@pytest.mark.parametrize("parallel", ["ddp", "fsdp", "experts"])
def test_training_goes_as_over_gloo(parallel: str) -> None:
    command = (str(EXAMPLE), "--parallel", parallel, "--steps", "12", "--backend")
    # Gloo's own threads may abort its ranks at exit, after they have printed their losses: they
    # free tensors while Python is finalized (PyTorch 2.15, ProcessGroupGloo::runLoop).
    with ranks(4, *command, "gloo") as started:
        words = [process.communicate(timeout=TIMEOUT_S) for process in started]
    expected = json.loads(words[0][0])["losses"]
    losses = json.loads(run(4, *command, "fairway", environment=TWO_NETWORKS))["losses"]
    assert losses == pytest.approx(expected, rel=1e-5)
    assert losses[-1] < losses[0]


def test_pipelines_sharded_tensors_and_sharded_training_run() -> None:
    run(2, str(HERE / "every_parallelism.py"))


STUCK = """
import time, torch, torch.distributed as dist
from datetime import timedelta
dist.init_process_group("fairway", timeout=timedelta(seconds=5))
rank = dist.get_rank()
given = torch.ones(10)
dist.all_reduce(given)
print("met", flush=True)
if rank == 1:
    time.sleep(60)
dist.all_reduce(given)
"""


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "stuck"])
def test_a_rank_that_goes_or_is_stuck_is_named(is_killed: bool) -> None:
    with ranks(2, "-c", STUCK) as (one, other):
        for process in (one, other):
            assert process.stdout is not None
            assert process.stdout.readline() == "met\n"
        began = time.monotonic()
        if is_killed:
            other.kill()
        _, errors = one.communicate(timeout=30)
        assert one.returncode != 0
        assert "BackendError" in errors, errors
        assert "rank 1" in errors, errors
        assert time.monotonic() - began < 10
        other.kill()
        other.communicate()


DDP = """
import os, signal, sys, time, torch, torch.distributed as dist
from datetime import timedelta
dist.init_process_group("fairway", timeout=timedelta(seconds=3))
rank = dist.get_rank()
layers = [torch.nn.Linear(32, 32) for _ in range(4)]
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.01)
if sys.argv[2:] == ["fp16"]:
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
for step in range(4):
    if step == 2 and rank == 1:
        if sys.argv[1] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(6)
    model(torch.randn(4, 32)).sum().backward()
    print("step", step, flush=True)
"""


@pytest.mark.parametrize("how", [("killed",), ("killed", "fp16"), ("late",)], ids="-".join)
def test_a_failure_under_ddp_is_an_error_on_all_survivors(how: tuple[str, ...]) -> None:
    with ranks(3, "-c", DDP, *how) as started:
        words = [process.communicate(timeout=TIMEOUT_S) for process in started]
    for rank, (process, (said, errors)) in enumerate(zip(started, words, strict=True)):
        assert "step 1" in said, errors
        if rank == 1 and how[0] == "killed":
            continue
        assert process.returncode == 1, (process.returncode, errors[-3000:])
        assert "BackendError: all_reduce of " in errors, errors[-3000:]
        assert f"in group '0' on rank {rank} failed" in errors, errors[-3000:]
        assert rank == 1 or "rank 1" in errors, errors[-3000:]


SILENT = """
import time, torch, torch.distributed as dist
from datetime import timedelta
dist.init_process_group("fairway", timeout=timedelta(seconds=30))
group = dist.new_group([1, 2], timeout=timedelta(seconds=30))
if dist.get_rank() == 0:
    print("met", flush=True)
    time.sleep(60)
if dist.get_rank() == 1:
    print("met", flush=True)
    work = dist.irecv(torch.empty(5), 2, group=group, tag=4)
    began = time.monotonic()
    try:
        work.wait()
    except RuntimeError as error:
        print(type(error).__name__, error, flush=True)
    print(time.monotonic() - began < 10, flush=True)
    try:
        dist.all_reduce(torch.ones(3), group=group, async_op=True).get_future().wait()
    except RuntimeError as error:
        print("raised", str(error).splitlines()[0], flush=True)
if dist.get_rank() == 2:
    print("met", flush=True)
    time.sleep(60)
"""


def test_a_message_of_a_dead_rank_fails_at_once_and_names_it() -> None:
    with ranks(3, "-c", SILENT) as started:
        for process in started:
            assert process.stdout is not None
            assert process.stdout.readline() == "met\n"
        started[2].kill()
        said, errors = started[1].communicate(timeout=TIMEOUT_S)
        for process in started:
            process.kill()
            process.communicate()
    failed, soon, raised = said.splitlines()
    assert failed.startswith("BackendError recv of 5 float32 from rank 2 (tag 4) in group"), said
    assert "on rank 1 failed: rank 2" in failed, said
    assert soon == "True", said
    assert raised.startswith("raised "), (said, errors)


OTHER_MACHINE = """
import os, torch.distributed as dist
from fairway.torch import meeting
name = "host" + os.environ["RANK"]
meeting._host = lambda: {"id": name, "name": name}
dist.init_process_group("fairway")
"""


def test_ranks_on_several_machines_say_how_they_are_reached() -> None:
    with ranks(2, "-c", OTHER_MACHINE) as started:
        for process in started:
            _, errors = process.communicate(timeout=60)
            assert "(host0: [0]; host1: [1]), and FAIRWAY_CHANNELS is not set" in errors, errors


def test_folders_of_dead_processes_are_swept(tmp_path: Path) -> None:
    dead, live, new, other = (
        tmp_path / f"fairway-{name}"
        for name in ("torch-dead", "torch-live", "torch-new", "0123abcd")
    )
    for folder in (dead, live, new):
        folder.mkdir()
        (folder / "lock").touch()
    # From the time before there were locks.
    other.mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(other / "channel"))
    with (live / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for folder in (dead, live, other):
            os.utime(folder, (0, 0))
        meeting.sweep(str(tmp_path))
    assert sorted(tmp_path.iterdir()) == [live, new]


WITHOUT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(name, name=name.partition(".")[0])
sys.meta_path.insert(0, Absent())
"""


@pytest.mark.parametrize(
    ("absent", "act"),
    [
        (("jax", "jaxlib", "scipy"), "import fairway.torch, fairway.cli"),
        (("torch",), "import fairway.cli, fairway.host.executor; fairway.cli; fairway.slice"),
    ],
    ids=["torch-alone", "jax-alone"],
)
def test_either_half_does_without_the_other(absent: tuple[str, ...], act: str) -> None:
    command = (sys.executable, "-c", WITHOUT.format(absent=absent) + act)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
