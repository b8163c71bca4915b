"""A backend of ``torch.distributed`` whose collectives are planned, over one or several channels.

A script selects it by name, with nothing else changed; PyTorch finds it where Fairway is
installed::

    torch.distributed.init_process_group("fairway")

The environment gives the addresses of a rank (``docs/reference/settings.md``):

- ``FAIRWAY_CHANNELS``: the rank's own address on each network, separated by commas, as
  ``tcp:ADDRESS:PORT`` or ``unix:PATH``, with the channel's rate if it is known, as in
  ``tcp:10.1.0.3:0@200Mbit/s,tcp:10.2.0.3:0@100Mbit/s``; port 0 is any free port. Every rank has
  the same number of channels. Without it all ranks must be on one machine, and use shared memory.
- ``FAIRWAY_COSTS``: on rank 0, the file that `fairway calibrate` wrote; without it the rates
  are used.

Every collective uses the strategy with the lowest predicted time in isolation, striped over all
channels if that is faster. GPU tensors are staged through host memory. Streams are not encrypted;
use networks that you trust.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from fairway.torch.backend import FairwayBackend
from fairway.torch.errors import BackendError
from fairway.torch.works import look_through_holders

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend

__all__ = ["BackendError", "FairwayBackend", "register"]


def register() -> None:
    """Registers ``fairway`` as a backend; PyTorch calls this when it is first requested by name."""
    look_through_holders()
    if not hasattr(dist.Backend, "FAIRWAY"):
        dist.Backend.register_backend("fairway", create, extended_api=True, devices=["cpu", "cuda"])


def create(given: Any, options: Any) -> Backend:
    """Creates one rank of a process group.

    Args:
        given: what PyTorch knows of the group: store, rank, size, timeout, name and members.
        options: options of the backend; not used.
    """
    return FairwayBackend(
        given.store,
        given.group_rank,
        given.group_size,
        given.timeout,
        name=given.group_id,
        members=given.global_ranks_in_group,
    )


register()
