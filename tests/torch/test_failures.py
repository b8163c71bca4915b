"""Ranks of a process group that diverge, fork, restart, or have too few resources."""

from __future__ import annotations

import socket
import subprocess
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from disagreements import ACTS  # noqa: E402 - needs PyTorch
from test_backend import TIMEOUT_S, TWO_NETWORKS, ranks, run  # noqa: E402

HERE = Path(__file__).parent
SURVIVAL = str(HERE / "survival.py")
IN_MEMORY = [act.__name__ for act in ACTS]


@pytest.mark.parametrize("act", IN_MEMORY)
@pytest.mark.parametrize("channels", [{}, TWO_NETWORKS], ids=["memory", "networks"])
def test_ranks_that_disagree_get_an_error_and_no_numbers(
    act: str, channels: dict[str, str]
) -> None:
    with ranks(2, str(HERE / "disagreements.py"), act, environment=channels) as started:
        words = [process.communicate(timeout=TIMEOUT_S) for process in started]
    kinds = ["Diverged", "Reported"]
    if act == "gather_root" and channels:
        # Each waits for a message that the other one does not send, and no board has the reason.
        kinds.append("Late")
    expected = tuple(f"{act} {kind}" for kind in kinds)
    for rank, (said, errors) in enumerate(words):
        if act == "message_type" and rank == 1:
            assert "passed" in said, errors
        else:
            assert said.startswith(expected), (said, errors[-2000:])


@pytest.mark.parametrize("act", ["averages", "forked", "mixed_sizes", "late_message"])
def test_a_group_survives(act: str) -> None:
    run(2, SURVIVAL, act)


LEAVES = """
import time, torch, torch.distributed as dist
dist.init_process_group("fairway")
if dist.get_rank() == 1:
    time.sleep(60)
given = [torch.ones(100_000) for _ in range(300)]
works = [dist.all_reduce(one, async_op=True) for one in given[:200]]
received = [dist.irecv(one, 1, tag=tag) for tag, one in enumerate(given[200:])]
futures = [work.get_future().then(lambda future: future.value()) for work in received]
time.sleep(0.1)
raise RuntimeError("left early")
"""


@pytest.mark.parametrize("turn", range(8))
def test_a_rank_that_leaves_operations_under_way_ends_with_its_own_error(turn: int) -> None:
    # Threads that end futures in C++ while Python is finalized would end the process by SIGABRT;
    # without the wait for them, one turn in six did.
    with ranks(2, "-c", LEAVES) as started:
        _, errors = started[0].communicate(timeout=TIMEOUT_S)
        assert (started[0].returncode, errors.split()[-2:]) == (1, ["left", "early"]), errors


def each_at(command: tuple[str, ...], addresses: list[str]) -> list[subprocess.Popen[str]]:
    """Starts ranks that listen at addresses of their own, set in the environment."""
    prelude = (
        "import os, runpy, sys; "
        "os.environ['FAIRWAY_CHANNELS'] = sys.argv[1].split()[int(os.environ['RANK'])]; "
        "sys.argv = sys.argv[2:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    with ranks(len(addresses), "-c", prelude, " ".join(addresses), *command) as started:
        for process in started:
            process.said = process.communicate(timeout=TIMEOUT_S)  # type: ignore[attr-defined]
    return started


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@pytest.mark.parametrize("scheme", ["tcp", "unix"])
def test_a_fixed_address_serves_more_than_one_group(scheme: str, tmp_path: Path) -> None:
    paths = [f"unix:{tmp_path}/rank{rank}" for rank in range(2)]
    ports = [f"tcp:127.0.0.1:{port}" for port in free_ports(2)]
    started = each_at((SURVIVAL, "fixed_address"), ports if scheme == "tcp" else paths)
    assert [one.returncode for one in started] == [0, 0], [one.said for one in started]


def test_a_path_that_a_killed_rank_left_behind_is_taken_over(tmp_path: Path) -> None:
    paths = [f"unix:{tmp_path}/rank{rank}" for rank in range(2)]
    each_at((SURVIVAL, "killed"), paths)
    assert (tmp_path / "rank0").exists()
    started = each_at((SURVIVAL, "late_message"), paths)
    assert [one.returncode for one in started] == [0, 0], [one.said for one in started]


ALONE = """
import torch.distributed as dist
try:
    dist.init_process_group("fairway")
except dist.DistBackendError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({"FAIRWAY_CHANNELS": "unix:"}, "FAIRWAY_CHANNELS has 'unix:'; expected tcp:ADDRESS:PORT"),
        ({"FAIRWAY_CHANNELS": "tcp:203.0.113.7:1"}, "cannot listen at tcp:203.0.113.7:1"),
        ({"FAIRWAY_COSTS": "/nowhere/costs.json"}, "/nowhere/costs.json"),
    ],
    ids=["path", "address", "costs"],
)
def test_what_cannot_be_is_an_error_of_the_backend(environment: dict[str, str], text: str) -> None:
    said = run(1, "-c", ALONE, environment=environment)
    assert said.startswith("BackendError rank 0 cannot join its process group"), said
    assert text in said


FEW = """
import os, resource
import torch.distributed as dist
if os.environ["RANK"] == "1":
    import fairway.torch
    from fairway.torch import membership
    meet = membership.meet
    def starved(*given):
        found = meet(*given)
        soft = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, soft))
        return found
    membership.meet = starved
dist.init_process_group("fairway")
"""


def test_a_rank_without_file_descriptors_says_so_at_once() -> None:
    began = time.monotonic()
    with ranks(2, "-c", FEW) as (other, starved):
        _, errors = starved.communicate(timeout=TIMEOUT_S)
        other.kill()
        other.communicate()
    assert "Too many open files" in errors, errors[-2000:]
    assert " within " not in errors
    assert time.monotonic() - began < TIMEOUT_S
