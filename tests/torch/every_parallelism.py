"""Run by each of two ranks: PyTorch's pipelines, sharded tensors and sharded training."""

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.tensor import Shard, distribute_tensor

HOST = torch.device("cpu")


def pipelines(rank: int, ranks: int) -> None:
    def layer() -> torch.nn.Module:
        return torch.nn.Linear(8, 8)

    loss = torch.nn.functional.mse_loss
    schedules = []
    for kind in (ScheduleGPipe, Schedule1F1B):
        stage = PipelineStage(layer(), rank, ranks, HOST)
        schedules.append(kind(stage, n_microbatches=4, loss_fn=loss))
    for kind in (ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble):
        stages = [PipelineStage(layer(), n, 2 * ranks, HOST) for n in (rank, rank + ranks)]
        schedules.append(kind(stages, n_microbatches=4, loss_fn=loss))
    for schedule in schedules:
        if rank == 0:
            schedule.step(torch.randn(8, 8))
        else:
            losses: list[torch.Tensor] = []
            schedule.step(target=torch.randn(8, 8), losses=losses)
            assert len(losses) == 4


def sharded(rank: int, ranks: int) -> None:
    mesh = init_device_mesh("cpu", (ranks,))
    whole = torch.arange(12.0).view(6, 2)
    tensor = distribute_tensor(whole, mesh, [Shard(0)])
    torch.testing.assert_close(tensor.full_tensor(), whole)
    columns = tensor.redistribute(mesh, [Shard(1)]).to_local()
    torch.testing.assert_close(columns, whole[:, rank : rank + 1])
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    fully_shard(model, mesh=mesh)
    model(torch.randn(3, 8)).sum().backward()
    found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert rank or found["0.weight"].shape == (8, 8)
    half = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    other = FullyShardedDataParallel(torch.nn.Linear(8, 8), mixed_precision=half, device_id=HOST)
    for _ in range(2):
        other(torch.randn(3, 8)).sum().backward()


if __name__ == "__main__":
    dist.init_process_group("fairway")
    for act in (pipelines, sharded):
        act(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
