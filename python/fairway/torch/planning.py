"""How each collective of a team is carried out, under the name of what PyTorch was asked for.

A team carries bits: it knows neither the type of a tensor that is only copied, nor that a sum is
half of an average. The name knows, and is a part of what ranks compare before they take anything
from each other; so ranks that ask for different things get an error, and no wrong numbers.
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
"""Collectives that are remembered."""

Part = tuple[Collective, _native.ScriptPart]


class Planning:
    """Finds how each collective of a team is carried out alone; keeps what was found.

    Args:
        team: whose collectives.
        costs: what each of its channels takes.
    """

    def __init__(self, team: Team, costs: Sequence[ChannelCost]) -> None:
        self._team = team
        self._costs = costs
        self.part = functools.lru_cache(KEPT_MAX)(self._find)
        self.collective = functools.lru_cache(KEPT_MAX)(self._make)

    def _make(self, kind: tuple[Any, ...]) -> Collective:
        """A collective, by its name and what it takes beside the number of ranks."""
        name, *given = kind
        made: Collective = getattr(Collective, name)(self._team.ranks, *given)
        return made

    def _find(self, kind: tuple[Any, ...], dtype: np.dtype[Any], name: str) -> Part:
        """A collective, and this rank's part of it.

        Args:
            kind: as for :meth:`collective`.
            dtype: of elements, as the team carries them.
            name: what was asked for; the same on all ranks, or the collective fails.
        """
        collective = self.collective(kind)
        script = alone(collective, dtype, self._costs)
        return collective, self._team.prepare(_named(script, name))


def _named(script: Script, name: str) -> Script:
    """The same script, whose one operation has this name."""
    known = json.loads(script.text)
    known["operations"][0]["name"] = name
    return Script.parse(json.dumps(known))
