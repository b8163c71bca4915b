"""Run by each rank: every collective of `torch.distributed`, beside what it should come to."""

import sys

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as along

TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8)


def of(rank: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(count) % 7 + rank).to(dtype)


def all_of(ranks: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.stack([of(rank, count, dtype) for rank in range(ranks)])


def check(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected.to(found.dtype), rtol=0, atol=0)


def reductions(rank: int, ranks: int) -> None:
    for dtype in TYPES:
        for count in (1, 1000, 70_001):
            given = of(rank, count, dtype)
            dist.all_reduce(given)
            check(given, all_of(ranks, count, dtype).sum(0))
    for op, name in ((dist.ReduceOp.MAX, "amax"), (dist.ReduceOp.MIN, "amin")):
        given = of(rank, 100)
        dist.all_reduce(given, op)
        check(given, getattr(all_of(ranks, 100), name)(0))
    given = of(rank, 100)
    dist.all_reduce(given, dist.ReduceOp.PRODUCT)
    check(given, all_of(ranks, 100).prod(0))
    given = of(rank, 100)
    dist.all_reduce(given, dist.ReduceOp.AVG)
    check(given, all_of(ranks, 100).mean(0))
    given = of(rank, 100)
    dist.reduce(given, 1)
    check(given, all_of(ranks, 100).sum(0) if rank == 1 else of(rank, 100))
    # Elements that do not lie one after another.
    given = torch.zeros(10, 20)
    given[:, ::2] = of(rank, 100).view(10, 10)
    part = given[:, ::2]
    dist.all_reduce(part)
    check(part, all_of(ranks, 100).sum(0).view(10, 10))
    check(given[:, 1::2], torch.zeros(10, 10))
    out = torch.empty(25)
    given = of(rank, 25 * ranks)
    dist.reduce_scatter_tensor(out, given)
    check(out, all_of(ranks, 25 * ranks).sum(0)[25 * rank : 25 * (rank + 1)])
    check(given, of(rank, 25 * ranks))
    dist.reduce_scatter(out, list(of(rank, 25 * ranks).chunk(ranks)), dist.ReduceOp.MAX)
    check(out, all_of(ranks, 25 * ranks).amax(0)[25 * rank : 25 * (rank + 1)])


def copies(rank: int, ranks: int) -> None:
    given = of(rank, 1000)
    dist.broadcast(given, 1)
    check(given, of(1, 1000))
    out = torch.empty(ranks * 10)
    dist.all_gather_into_tensor(out, of(rank, 10))
    check(out, all_of(ranks, 10).flatten())
    tensors = [torch.empty(3, 4) for _ in range(ranks)]
    dist.all_gather(tensors, of(rank, 12).view(3, 4))
    check(torch.stack(tensors), all_of(ranks, 12).view(ranks, 3, 4))
    tensors = [torch.empty(5 + other) for other in range(ranks)]
    dist.all_gather(tensors, of(rank, 5 + rank))
    for other, tensor in enumerate(tensors):
        check(tensor, of(other, 5 + other))
    tensors = [torch.empty(7) for _ in range(ranks)] if rank == 1 else None
    dist.gather(of(rank, 7), tensors, 1)
    if tensors is not None:
        check(torch.stack(tensors), all_of(ranks, 7))
    out = torch.empty(7)
    dist.scatter(out, [of(other, 7) for other in range(ranks)] if rank == 1 else None, 1)
    check(out, of(rank, 7))
    objects = [None] * ranks
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": other} for other in range(ranks)]
    dist.barrier()


def exchanges(rank: int, ranks: int) -> None:
    out = torch.empty(ranks * 6)
    dist.all_to_all_single(out, of(rank, ranks * 6))
    check(out, all_of(ranks, ranks * 6)[:, 6 * rank : 6 * (rank + 1)].flatten())
    # To rank `j` go `j + 1` rows of rank `i`.
    rows = sum(range(1, ranks + 1))
    out = torch.empty(ranks * (rank + 1), 2)
    given = of(rank, rows * 2).view(rows, 2)
    dist.all_to_all_single(out, given, [rank + 1] * ranks, list(range(1, ranks + 1)))
    start = sum(range(1, rank + 1))
    expected = all_of(ranks, rows * 2).view(ranks, rows, 2)[:, start : start + rank + 1]
    check(out, expected.reshape(-1, 2))
    tensors = [torch.empty(source + 1) for source in range(ranks)]
    dist.all_to_all(tensors, [of(rank * 10 + to, rank + 1) for to in range(ranks)])
    for source, tensor in enumerate(tensors):
        check(tensor, of(source * 10 + rank, source + 1))
    # What flows back does so by the same way.
    weight = of(rank, ranks * 4).requires_grad_()
    came = along.all_to_all_single(torch.empty(ranks * 4), weight)
    (came * (rank + 1)).sum().backward()
    assert weight.grad is not None
    check(weight.grad, torch.arange(1, ranks + 1).repeat_interleave(4))


def messages(rank: int, ranks: int) -> None:
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    # Both ways at a time, and several in a row.
    for turn in range(3):
        sent = dist.isend(of(rank + turn, 50), after)
        found = torch.empty(50)
        dist.recv(found, before)
        check(found, of(before + turn, 50))
        sent.wait()
    found = torch.empty(50)
    waited = dist.irecv(found, after)
    dist.send(of(rank, 50), before)
    waited.wait()
    check(found, of(after, 50))


def groups(rank: int, ranks: int) -> None:
    evens = dist.new_group(list(range(0, ranks, 2)))
    if rank % 2 == 0:
        given = of(rank, 10)
        dist.all_reduce(given, group=evens)
        check(given, all_of(ranks, 10)[::2].sum(0))
    dist.barrier()


def many(rank: int, ranks: int) -> None:
    """More at a time than may be under way."""
    tensors = [of(rank + n, 100 + n) for n in range(200)]
    works = [dist.all_reduce(one, async_op=True) for one in tensors]
    for work in works:
        work.wait()
    for n, tensor in enumerate(tensors):
        check(tensor, sum(of(other + n, 100 + n) for other in range(ranks)))


def wrong(rank: int, ranks: int) -> None:
    with pytest.raises(ValueError, match="reduction"):
        dist.all_reduce(torch.ones(3), dist.ReduceOp.BAND)
    with pytest.raises(ValueError, match="root 7"):
        dist.group.WORLD.broadcast(torch.ones(3), 7)
    dist.barrier()


if __name__ == "__main__":
    torch.set_default_device(sys.argv[1])
    dist.init_process_group("fairway")
    own, count = dist.get_rank(), dist.get_world_size()
    for act in (reductions, copies, exchanges, messages, groups, many, wrong):
        act(own, count)
        if own == 0:
            print(act.__name__, flush=True)
    dist.destroy_process_group()
    sys.exit(0)
