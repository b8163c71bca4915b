"""One rank of the testbed: joins its team, measures channels, trains workloads under plans."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from typing import Any

import common

from fairway.communication import calibration, steps
from fairway.communication.team import Channel, Listener, Script, Team
from fairway.studies.workloads import dlrm

TIMEOUT_S = 60.0
BEHIND = 19
"""Niceness of the compute thread relative to the communication threads, which began before: it acts
as an accelerator, which would leave the cores alone."""


class Runner:
    """Executes requests on a rank; see :func:`common.serve_methods`."""

    def __init__(self, rank: int, channels: list[Channel]) -> None:
        self._rank = rank
        self._channels = channels
        self._listener = Listener(rank, channels, "testbed")
        self._team: Team | None = None

    def listen(self) -> list[str]:
        """Returns the addresses of this rank."""
        return self._listener.addresses

    def join(self, addresses: list[list[str]]) -> None:
        """Joins the team."""
        self._team = self._listener.join(addresses, TIMEOUT_S)
        os.nice(BEHIND)

    def calibrate(self) -> list[Any]:
        """Measures all channels."""
        assert self._team is not None
        samples = calibration.measure(self._team, len(self._channels))
        return [dataclasses.asdict(sample) for sample in samples]

    def train(self, workload: str, script: str, count: int) -> dict[str, Any]:
        """Trains from the beginning for ``count`` steps under a plan."""
        assert self._team is not None
        config = dlrm.WORKLOADS[workload]
        ranks = self._team.ranks
        program = dlrm.Rank(config, self._rank, ranks)
        program.load(count)
        begun_s = time.process_time()
        report = steps.run(self._team, config.step(ranks), Script.parse(script), program, count)
        found = dataclasses.asdict(report)
        return {**found, "losses": program.losses, "cpu_s": time.process_time() - begun_s}


def main() -> None:
    """Serves rank ``argv[1]``; each of the others is a channel, ``ADDRESS@BITS_PER_SECOND``."""
    rank, *channels = sys.argv[1:]
    parts = [channel.split("@") for channel in channels]
    given = [Channel(address, float(rate) if rate else None) for address, rate in parts]
    common.serve_methods(Runner(int(rank), given))


if __name__ == "__main__":
    main()
