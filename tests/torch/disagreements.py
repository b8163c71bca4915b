"""Run by each rank: its operation diverges from the others', which must be an error on all."""

import sys
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

COUNT = 4


def tensor(is_odd: bool, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.ones(COUNT, dtype=dtype if is_odd else torch.float32)


def broadcast_root(rank: int, ranks: int, is_odd: bool) -> None:
    dist.broadcast(torch.full((COUNT,), float(rank)), 1 if is_odd else 0)


def broadcast_type(rank: int, ranks: int, is_odd: bool) -> None:
    dist.broadcast(tensor(is_odd), 0)


def gather_root(rank: int, ranks: int, is_odd: bool) -> None:
    root = 1 if is_odd else 0
    out = [torch.empty(COUNT) for _ in range(ranks)] if rank == root else None
    dist.gather(torch.ones(COUNT), out, root)


def scatter_root(rank: int, ranks: int, is_odd: bool) -> None:
    root = 1 if is_odd else 0
    given = [torch.ones(COUNT) for _ in range(ranks)] if rank == root else None
    dist.scatter(torch.empty(COUNT), given, root)


def scatter_type(rank: int, ranks: int, is_odd: bool) -> None:
    given = [torch.ones(COUNT) for _ in range(ranks)] if rank == 0 else None
    dist.scatter(tensor(is_odd), given, 0)


def all_gather_type(rank: int, ranks: int, is_odd: bool) -> None:
    dist.all_gather([tensor(is_odd) for _ in range(ranks)], tensor(is_odd))


def all_to_all_type(rank: int, ranks: int, is_odd: bool) -> None:
    given = torch.cat([tensor(is_odd) for _ in range(ranks)])
    dist.all_to_all_single(torch.empty_like(given), given)


def message_type(rank: int, ranks: int, is_odd: bool) -> None:
    if rank == 1:
        dist.send(tensor(is_odd), 0)
    elif rank == 0:
        dist.recv(tensor(is_odd), 1)


def average(rank: int, ranks: int, is_odd: bool) -> None:
    dist.all_reduce(torch.ones(COUNT), dist.ReduceOp.AVG if is_odd else dist.ReduceOp.SUM)


def barrier(rank: int, ranks: int, is_odd: bool) -> None:
    if is_odd:
        dist.barrier()
    else:
        dist.all_reduce(torch.ones(1, dtype=torch.int8))


ACTS: tuple[Callable[[int, int, bool], None], ...] = (
    broadcast_root,
    broadcast_type,
    gather_root,
    scatter_root,
    scatter_type,
    all_gather_type,
    all_to_all_type,
    message_type,
    average,
    barrier,
)


def main(act: Callable[[int, int, bool], None]) -> None:
    dist.init_process_group("fairway", timeout=timedelta(seconds=20))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(list(range(ranks)), timeout=timedelta(seconds=20))
    try:
        act(rank, ranks, rank == 1)
        # A root does not wait; it learns of the divergence from its next operation.
        if act is not message_type:
            dist.all_reduce(torch.ones(1))
        print(act.__name__, "passed", flush=True)
    except dist.DistBackendError as error:
        print(act.__name__, error.kind, error, flush=True)
    # No rank takes its end for an answer.
    dist.barrier(group=group)


if __name__ == "__main__":
    main(next(act for act in ACTS if act.__name__ == sys.argv[1]))
