"""A rank's place in a team."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

__all__ = ["TeamMembership"]


@dataclasses.dataclass(frozen=True)
class TeamMembership:
    """A rank's place in a team, and what it needs to join it.

    Attributes:
        name: identifier of the team, the same on all ranks.
        rank: of this process.
        hosts: host of each rank, as the data plane numbers them.
        channels: channels of the data plane that the team uses, each with its rate in bits per
            second if that is known.
        timeout_s: time limit for a rank that keeps its peers waiting.
        meeting_s: the same while ranks join, if it is another.
        names: the numbers by which errors call the ranks, if not their own.
    """

    name: int
    rank: int
    hosts: Sequence[int]
    channels: Sequence[tuple[int, float | None]]
    timeout_s: float
    meeting_s: float | None = None
    names: Sequence[int] | None = None
