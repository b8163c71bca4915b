"""Run by each rank: every collective of `torch.distributed`, compared with its expected result."""

import contextlib
import sys

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
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
    # Tensors that are not contiguous.
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
    # Rank `i` sends `j + 1` rows to rank `j`.
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
    # Gradients take the reverse exchange.
    weight = of(rank, ranks * 4).requires_grad_()
    came = along.all_to_all_single(torch.empty(ranks * 4), weight)
    (came * (rank + 1)).sum().backward()
    assert weight.grad is not None
    check(weight.grad, torch.arange(1, ranks + 1).repeat_interleave(4))


def messages(rank: int, ranks: int) -> None:
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    # Both directions at a time, and several in a row.
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


def tags(rank: int, ranks: int) -> None:
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    sent = [dist.isend(of(rank + tag, 5), after, tag=tag) for tag in range(3)]
    for tag in (2, 0, 1):
        found = torch.empty(5)
        waited = dist.irecv(found, before, tag=tag)
        waited.wait()
        assert waited.is_completed()
        check(found, of(before + tag, 5))
    for one in sent:
        one.wait()
        assert one.is_completed()
    if rank == 0:
        sources = set()
        for _ in range(ranks - 1):
            found = torch.empty(3)
            source = dist.recv(found)
            check(found, of(source, 3))
            sources.add(source)
        assert sources == set(range(1, ranks))
    else:
        dist.send(of(rank, 3), 0)
    # Not before rank 0 has them all: any rank's next message has the same tag.
    dist.barrier()
    found = torch.empty(4)
    both = [
        dist.P2POp(dist.isend, of(rank, 4), after),
        dist.P2POp(dist.irecv, found, before),
    ]
    for one in dist.batch_isend_irecv(both):
        one.wait()
    check(found, of(before, 4))
    # Eight-bit types without reductions.
    small = of(rank, 4).to(torch.float8_e4m3fn)
    came = torch.empty_like(small)
    sending = dist.isend(small, after)
    dist.recv(came, before)
    sending.wait()
    check(came.float(), of(before, 4))


def kinds(rank: int, ranks: int) -> None:
    """Types and reductions other than sums of numbers."""
    for op, expected in (
        (dist.ReduceOp.BAND, 8),
        (dist.ReduceOp.BOR, 8 + 2**ranks - 1),
        (dist.ReduceOp.BXOR, 8 * (ranks % 2) + 2**ranks - 1),
    ):
        given = torch.tensor([8 + 2**rank], dtype=torch.int32)
        dist.all_reduce(given, op)
        check(given, torch.tensor([expected]))
    turned = torch.full((2 * ranks,), 1 + 2j)
    dist.reduce(turned, 0)
    check(turned, torch.full_like(turned, (ranks if rank == 0 else 1) * (1 + 2j)))
    out = torch.empty(2, dtype=torch.complex64)
    dist.reduce_scatter_tensor(out, torch.full((2 * ranks,), 1j))
    check(out, torch.full_like(out, ranks * 1j))
    with torch.sparse.check_sparse_tensor_invariants():
        given = torch.sparse_coo_tensor([[rank, 0]], [1.0, 2.0], (ranks,))
        dist.all_reduce(given)
    expected = torch.ones(ranks)
    expected[0] += 2 * ranks
    check(given.to_dense(), expected)


def coalesced(rank: int, ranks: int) -> None:
    world = dist.group.WORLD
    sums = functional.all_reduce_coalesced([of(rank, 2), of(rank, 3)], "sum", world)
    for found, count in zip(sums, (2, 3), strict=True):
        check(functional.wait_tensor(found), all_of(ranks, count).sum(0))
    whole = functional.all_gather_single_coalesced([of(rank, 2), of(rank, 3)], world)
    for found, count in zip(whole, (2, 3), strict=True):
        check(functional.wait_tensor(found), all_of(ranks, count).flatten())
    given = [of(rank, 2 * ranks), of(rank, 3 * ranks)]
    parts = functional.reduce_scatter_single_coalesced(given, "sum", [0, 0], world)
    for found, count in zip(parts, (2, 3), strict=True):
        total = all_of(ranks, count * ranks).sum(0)
        check(functional.wait_tensor(found), total[count * rank : count * (rank + 1)])


def futures(rank: int, ranks: int) -> None:
    # Its value is a list of tensors to C++ as well, and callbacks may submit more.
    def again(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        more = dist.all_reduce(future.value()[0], async_op=True).get_future()
        return more.wait()[0]

    for _ in range(20):
        work = dist.all_reduce(torch.ones(3), async_op=True)
        check(work.get_future().then(again).wait(), torch.full((3,), float(ranks * ranks)))
        assert work.is_completed()
        check(work.result()[0], torch.full((3,), float(ranks * ranks)))
    # Communicated tensors can still be resized.
    given = torch.ones(4)
    dist.all_reduce(given)
    given.untyped_storage().resize_(0)


def crossed(rank: int, ranks: int) -> None:
    """Exchanges of two groups, started in different orders."""
    pair = [dist.new_group(list(range(ranks))) for _ in range(2)]
    works = []
    for group in pair if rank % 2 else pair[::-1]:
        given = torch.cat([torch.full((to + 1,), float(rank)) for to in range(ranks)])
        out = torch.empty(ranks * (rank + 1))
        splits = [rank + 1] * ranks, [to + 1 for to in range(ranks)]
        works.append((out, dist.all_to_all_single(out, given, *splits, group=group, async_op=True)))
    for out, work in works:
        work.wait()
        check(out, torch.arange(ranks).repeat_interleave(rank + 1))
    for group in pair:
        dist.destroy_process_group(group)


def again(rank: int, ranks: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    dist.monitored_barrier(wait_all_ranks=True)
    dist.destroy_process_group()
    if rank > 0:
        # The store at this port is the old one until rank 0 has ended it.
        with contextlib.suppress(dist.DistError):
            while True:
                store.check([""])
    del store
    dist.init_process_group("fairway")
    dist.barrier()


def groups(rank: int, ranks: int) -> None:
    evens = dist.new_group(list(range(0, ranks, 2)))
    if rank % 2 == 0:
        given = of(rank, 10)
        dist.all_reduce(given, group=evens)
        check(given, all_of(ranks, 10)[::2].sum(0))
    dist.barrier()


def many(rank: int, ranks: int) -> None:
    """More than may be in flight at a time."""
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
    own_acts = () if sys.argv[1] == "cuda" else (kinds, futures)
    acts = (reductions, copies, exchanges, messages, tags, coalesced, crossed, again, groups, many)
    for act in (*acts, *own_acts, wrong):
        act(own, count)
        if own == 0:
            print(act.__name__, flush=True)
    dist.destroy_process_group()
    sys.exit(0)
