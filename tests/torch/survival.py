"""Run by each rank: operations that must not harm a process group, by name."""

import os
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

HALF = 0.5


def averages(rank: int) -> None:
    """The average of parameters, and of tensors of inference mode, on any thread."""
    parameter = torch.nn.Parameter(torch.full((3,), float(rank)))
    with torch.no_grad():
        dist.all_reduce(parameter, dist.ReduceOp.AVG, async_op=True).wait()
    assert parameter.tolist() == [HALF] * 3
    with torch.inference_mode():
        given = torch.full((3,), float(rank))
        dist.all_reduce(given, dist.ReduceOp.AVG, async_op=True).wait()
        part = torch.empty(2)
        whole = torch.full((4,), float(rank))
        dist.reduce_scatter_tensor(part, whole, dist.ReduceOp.AVG, async_op=True).wait()
    assert given.tolist() == [HALF] * 3
    assert part.tolist() == [HALF] * 2


def forked(rank: int) -> None:
    """A forked child that exits normally leaves its parent's group alone."""
    if rank == 0:
        child = os.fork()
        if child == 0:
            sys.exit(0)
        os.waitpid(child, 0)
    dist.barrier()
    given = torch.ones(3)
    dist.send(given, 1) if rank == 0 else dist.recv(given, 0)
    exchange([1, 2], [2, 1], rank)


def exchange(first: list[int], second: list[int], rank: int) -> Tensor:
    """Exchanges rows of rank 0 and rank 1 for each; a rank passes sizes where its own differ."""
    sent = (first, second)[rank]
    received = [first[rank], second[rank]]
    is_even = len(set(sent)) == len(set(received)) == 1
    out = torch.empty(sum(received))
    sizes = (None, None) if is_even else (received, sent)
    dist.all_to_all_single(out, torch.full((sum(sent),), float(rank)), *sizes)
    return out


def mixed_sizes(rank: int) -> None:
    """Rank 0 sends and receives equal sizes; only the others know that theirs differ."""
    out = exchange([2, 2], [2, 1], rank)
    assert out.tolist() == [0.0, 0.0] + [1.0] * (2 - rank)


def fixed_address(rank: int) -> None:
    """A given port is one group's; further groups take others, also after a group begins again."""
    dist.barrier(group=dist.new_group([0, 1]))
    dist.destroy_process_group()
    dist.init_process_group("fairway", timeout=timedelta(seconds=20))
    dist.barrier()


def late_message(rank: int) -> None:
    """A message that never arrives: the error names the rank that should have sent it."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    if rank == 0:
        with pytest.raises(dist.DistBackendError, match=r"Timed out after 1\.0 s") as found:
            dist.recv(torch.empty(3), 1, group=group)
        assert found.value.rank == 1
    dist.barrier()


def killed(rank: int) -> None:
    """Kills the process, so that its sockets stay."""
    dist.barrier()
    time.sleep(0.5)
    os.kill(os.getpid(), 9)


ACTS = (averages, forked, mixed_sizes, fixed_address, late_message, killed)


if __name__ == "__main__":
    dist.init_process_group("fairway", timeout=timedelta(seconds=20))
    next(act for act in ACTS if act.__name__ == sys.argv[1])(dist.get_rank())
    dist.destroy_process_group()
    sys.exit(0)
