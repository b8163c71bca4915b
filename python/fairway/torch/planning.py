"""Plans each collective of a team, under the name of the operation that PyTorch requested.

A team transfers bits: it knows neither the type of a tensor that is only copied, nor that a sum is
half of an average. The name has both, and ranks compare it before they accept data from each other
(a handshake); so ranks that request different operations get an error instead of wrong numbers.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from fairway import _native
from fairway.communication.steps import ChannelCost, alone
from fairway.communication.team import Collective, Script, Team

__all__ = ["Planning"]

KEPT_MAX = 1024
"""Plans that are cached."""

Part = tuple[Collective, _native.ScriptPart]


class Planning:
    """Plans each collective of a team in isolation, and caches the plans.

    Args:
        team: the ranks that communicate.
        costs: cost of each of its channels.
    """

    def __init__(self, team: Team, costs: Sequence[ChannelCost]) -> None:
        self._team = team
        self._costs = costs
        self.part = functools.lru_cache(KEPT_MAX)(self._find)
        self.collective = functools.lru_cache(KEPT_MAX)(self._make)

    def _make(self, kind: tuple[Any, ...]) -> Collective:
        """Returns a collective, given its name and its arguments besides the number of ranks."""
        name, *given = kind
        made: Collective = getattr(Collective, name)(self._team.ranks, *given)
        return made

    def _find(self, kind: tuple[Any, ...], dtype: np.dtype[Any], name: str) -> Part:
        """Returns a collective, and this rank's part of its plan.

        Args:
            kind: as for :meth:`collective`.
            dtype: type of the elements, as the team transfers them.
            name: the requested operation; the same on all ranks, or the collective fails.
        """
        collective = self.collective(kind)
        script = alone(collective, dtype, self._costs)
        return collective, self._team.prepare(_named(script, name))


def _named(script: Script, name: str) -> Script:
    """Returns the same script with another name of its one operation."""
    known = json.loads(script.text)
    known["operations"][0]["name"] = name
    return Script.parse(json.dumps(known))
