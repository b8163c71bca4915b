"""The backend of `torch.distributed`: ranks are processes, as `torchrun` has them.

Needs PyTorch: `make test-torch`.
"""

from __future__ import annotations

import contextlib
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

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[1] / "examples" / "train_torch.py"
TIMEOUT_S = 120


@contextlib.contextmanager
def ranks(
    count: int, *command: str, environment: Mapping[str, str] | None = None
) -> Iterator[list[subprocess.Popen[str]]]:
    """So many processes that are a process group."""
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
    """What rank 0 says, when all have ended well."""
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
    losses = []
    for backend, channels in (("gloo", {}), ("fairway", TWO_NETWORKS)):
        command = (str(EXAMPLE), "--backend", backend, "--parallel", parallel, "--steps", "12")
        losses.append(json.loads(run(4, *command, environment=channels))["losses"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[0][-1] < losses[0][0]


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
        assert "TeamError" in errors, errors
        assert "rank 1" in errors, errors
        assert time.monotonic() - began < 10
        other.kill()
        other.communicate()


def test_ranks_on_several_machines_say_how_they_are_reached() -> None:
    alone = {"LOCAL_WORLD_SIZE": "1"}
    with ranks(2, "-c", STUCK, environment=alone) as started:
        _, errors = started[0].communicate(timeout=60)
        assert "FAIRWAY_CHANNELS is not set" in errors, errors
