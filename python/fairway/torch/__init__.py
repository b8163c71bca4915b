"""A backend of ``torch.distributed`` whose collectives are planned, over one or several channels.

A script selects it by name, with nothing else changed; PyTorch finds it where Fairway is
installed::

    torch.distributed.init_process_group("fairway")

The environment says how a rank is reached (``docs/reference/settings.md``):

- ``FAIRWAY_CHANNELS``: the rank's own address on each network, with commas between them, as
  ``tcp:ADDRESS:PORT`` or ``unix:PATH``, and the channel's rate if that is known, as in
  ``tcp:10.1.0.3:0@200Mbit/s,tcp:10.2.0.3:0@100Mbit/s``; port 0 is any free one. Every rank has the
  same number of channels. Without it all ranks must be on one machine, and share memory.
- ``FAIRWAY_COSTS``: on rank 0, the file that `fairway calibrate` wrote; without it rates decide.

Every collective is carried out by the strategy that takes least time alone, over all channels if
that is faster. Tensors of a GPU go through the host's memory. Streams are not encrypted; use
networks that you trust.
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
    """Makes ``fairway`` a backend; PyTorch calls this when it is first asked for by name."""
    look_through_holders()
    if not hasattr(dist.Backend, "FAIRWAY"):
        dist.Backend.register_backend("fairway", create, extended_api=True, devices=["cpu", "cuda"])


def create(given: Any, options: Any) -> Backend:
    """Makes one rank of a process group.

    Args:
        given: what PyTorch knows of the group: store, rank, size, timeout, name and members.
        options: of the backend, which are not used.
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
