"""Train with PyTorch over Fairway: `torchrun --nproc-per-node 4 examples/train_torch.py`.

The same script runs with any backend of `torch.distributed`. `--parallel` selects the strategy:
`ddp` replicates the model on every rank, `fsdp` shards each weight over the ranks, and `experts`
sends every row to the rank of its expert, and back (all-to-all).
"""

from __future__ import annotations

import argparse
import json
import time

try:
    import torch
except ModuleNotFoundError:
    raise SystemExit(
        "train_torch.py needs PyTorch, which is not installed; try "
        "`.cache/uv/bin/uv sync --extra jax --extra torch`"
    ) from None
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

CLASSES = 10
EXPERTS = 4


class Block(nn.Module):
    """The unit of sharding: two layers with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Maps rows of `width` numbers to as many."""
        return rows + self.down(torch.relu(self.up(rows)))


class Experts(nn.Module):
    """One expert per rank; each rank has a part of every batch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        # All ranks create all experts, so that these are initialized alike; each uses its own.
        self.all = nn.ModuleList(Block(width) for _ in range(EXPERTS))
        self.own = dist.get_rank()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Routes row `i` to expert `i` modulo their number."""
        group = dist.group.WORLD
        by_expert = rows.view(-1, EXPERTS, rows.size(-1)).transpose(0, 1).contiguous()
        came = all_to_all_single_autograd(by_expert, None, None, group)
        done = all_to_all_single_autograd(self.all[self.own](came), None, None, group)
        return done.transpose(0, 1).reshape(rows.shape)


def model_of(parallel: str, width: int, depth: int) -> nn.Module:
    """Returns a model with the same initial weights on all ranks."""
    torch.manual_seed(0)
    middle = Experts if parallel == "experts" else Block
    return nn.Sequential(*[middle(width) for _ in range(depth)], nn.Linear(width, CLASSES))


def batch_of(step: int, rank: int, rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a rank's training data for a step."""
    drawn = torch.Generator().manual_seed(1000 * step + rank)
    given = torch.randn(rows, width, generator=drawn)
    return given, (given[:, :CLASSES] * 2).argmax(1)


def main() -> None:
    """Trains, and prints the losses and the median time of a step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="fairway", help="of torch.distributed")
    parser.add_argument("--parallel", choices=("ddp", "fsdp", "experts"), default="ddp")
    parser.add_argument("--width", type=int, default=64, help="of each row")
    parser.add_argument("--depth", type=int, default=2, help="blocks of the model")
    parser.add_argument("--rows", type=int, default=32, help="of a batch of each rank")
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(given.backend)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if given.parallel == "experts" and ranks != EXPERTS:
        raise SystemExit(f"there are {EXPERTS} experts; expected as many ranks, not {ranks}")
    model = model_of(given.parallel, given.width, given.depth)
    if given.parallel == "ddp":
        model = DistributedDataParallel(model)
    elif given.parallel == "fsdp":
        for block in model:
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses, times = [], []
    for step in range(given.steps):
        began = time.perf_counter()
        rows, labels = batch_of(step, rank, given.rows, given.width)
        loss = cross_entropy(model(rows), labels)
        optimizer.zero_grad()
        loss.backward()
        if given.parallel == "experts":
            for weight in model.parameters():
                if weight.grad is None:
                    weight.grad = torch.zeros_like(weight)
                dist.all_reduce(weight.grad)
                weight.grad /= ranks
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / ranks)
        times.append(time.perf_counter() - began)
    if rank == 0:
        print(json.dumps({"losses": losses, "step_s": sorted(times)[len(times) // 2]}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
