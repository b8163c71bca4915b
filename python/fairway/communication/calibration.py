"""Channel costs: measured by all ranks of a team (micro-benchmarks), and fitted to a cost model.

Every pattern is executed several times back to back on one channel, as a plan keeps a channel busy;
the time of one motif is that between consecutive ends. Then each pair of channels is measured
concurrently, which is slower if they share a resource.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Mapping, Sequence

import numpy as np

from fairway.communication.steps import ChannelCost
from fairway.communication.team import Collective, Script, Team

__all__ = ["Calibration", "Sample", "fit", "measure"]

SIZES = (64 << 10, 256 << 10, 1 << 20, 2 << 20)
"""Bytes of a rank's vector, or of all its blocks in an exchange."""
WARM_BYTES = 1 << 19
"""What every rank sends as warm-up: shaped links (token buckets) pass that burst after a pause."""
COUNTED_BYTES = 1 << 20
COUNTED_MIN = 3
COUNTED_S = 0.03
COUNTED_BYTES_MAX = 128 << 20
PATTERNS = ("all_gather", "broadcast", "exchange")
BESIDE_S = 0.2
"""How long two channels are measured concurrently, at least."""
BESIDE_MIN = 8
"""Motifs on each of two channels measured concurrently, at least."""
BESIDE_PARTS = 5
"""Equal parts of the time for which two channels are measured concurrently; their median counts, as
the scheduler may stop a rank for one of them."""
NOTICED = 0.03
"""Slowdown by a concurrent channel, as a fraction, below which it is treated as noise."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """Measured time of one motif.

    Attributes:
        channel: the channel that carried it.
        pattern: ``all_gather`` around a ring, ``broadcast`` to all at once, or ``exchange``.
        size_bytes: of a rank's vector.
        time_s: from the end of the preceding motif to its own, on the slowest rank.
        beside: the channel that was busy concurrently, if any; ``time_s`` is then what it would be
            if both had a fair share of what they carried together.
    """

    channel: int
    pattern: str
    size_bytes: int
    time_s: float
    beside: int | None = None


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Fitted channel costs, and how well they predict the measurements.

    Attributes:
        costs: cost model of each channel.
        error_median: median relative error of predicted against measured times.
        error_worst: worst relative error.
        samples: the measurements.
    """

    costs: list[ChannelCost]
    error_median: float
    error_worst: float
    samples: list[Sample]


def measure(team: Team, channels: int, sizes: Sequence[int] = SIZES) -> list[Sample]:
    """Measures all patterns on all channels; a collective call: every rank must make it."""
    asked = itertools.product(range(channels), PATTERNS, sizes)
    found = [Sample(*which, _time(team, *which)) for which in asked]
    alone = {
        one.channel: one.time_s
        for one in found
        if (one.pattern, one.size_bytes) == ("all_gather", sizes[-1])
    }
    for pair in itertools.combinations(range(channels), 2):
        found += _beside(team, pair, sizes[-1], alone)
    return found


def _beside(
    team: Team, pair: tuple[int, int], size: int, alone: Mapping[int, float]
) -> list[Sample]:
    """Measures rings on two channels concurrently."""
    collective = Collective.all_gather(team.ranks, size)
    # All ranks have the same times, and so choose the same counts. Both channels must stay busy for
    # as long as the slower one needs for enough motifs.
    lasts_s = max(BESIDE_S, *((BESIDE_MIN + 1) * alone[channel] for channel in pair))
    counts = {
        channel: max(
            BESIDE_MIN + 1,
            min(math.ceil(lasts_s / alone[channel]), COUNTED_BYTES_MAX // size),
        )
        for channel in pair
    }
    ends = _series(team, collective, counts)
    took = fair_times(
        [ends[channel] for channel in pair], [1e-9 / alone[channel] for channel in pair]
    )
    return [
        Sample(channel, "all_gather", size, slowest_s, other)
        for channel, other, slowest_s in zip(
            pair, reversed(pair), _slowest(team, took), strict=True
        )
    ]


def fair_times(
    ends_ns: Sequence[Sequence[int]], alone_per_ns: Sequence[float]
) -> tuple[float, float]:
    """Returns the time of a motif on each of two busy channels, in ns, had they shared fairly.

    Which of two flows gets more of a link that both use is chance, and changes; what they carry
    together is not. The fair share is the max-min one: no channel gets more than alone, and none
    more than another that wants more.

    Args:
        ends_ns: end times of at least two motifs on each channel.
        alone_per_ns: motifs that each carries alone.
    """
    begin, end = max(each[0] for each in ends_ns), min(each[-1] for each in ends_ns)
    if begin >= end:  # one was over before the other began, so they never shared
        return 1 / alone_per_ns[0], 1 / alone_per_ns[1]
    edges = np.linspace(begin, end, BESIDE_PARTS + 1)
    carried = sum(np.diff(np.interp(edges, each, np.arange(len(each)))) for each in ends_ns)
    together = statistics.median((carried / np.diff(edges)).tolist())
    one, other = (
        min(own, max(together / 2, together - others))
        for own, others in zip(alone_per_ns, reversed(alone_per_ns), strict=True)
    )
    return 1 / one, 1 / other


def _collective(pattern: str, ranks: int, size: int) -> Collective:
    if pattern == "all_gather":
        return Collective.all_gather(ranks, size)
    if pattern == "broadcast":
        return Collective.broadcast(ranks, size, 0)
    return Collective.all_to_all(ranks, size)


def _time(team: Team, channel: int, pattern: str, size: int) -> float:
    collective = _collective(pattern, team.ranks, size)
    sent = size if pattern == "broadcast" else size * (team.ranks - 1) // team.ranks
    warm, counted = -(-WARM_BYTES // sent), max(COUNTED_MIN, -(-COUNTED_BYTES // sent))
    took_s = _time_of(team, channel, collective, (warm, counted))
    # Fast channels need more repetitions; all ranks know the same time.
    more = min(math.ceil(COUNTED_S / max(took_s, 1e-9)), COUNTED_BYTES_MAX // size)
    return took_s if more <= counted else _time_of(team, channel, collective, (counted, more))


def _time_of(team: Team, channel: int, collective: Collective, counts: tuple[int, int]) -> float:
    """Returns the time of one collective, of ``counts[1]`` after ``counts[0]`` warm-ups."""
    warm, count = counts[0], sum(counts)
    ends = _series(team, collective, {channel: count})[channel]
    # A broadcast ends on its root long before it reaches the others, so the slowest rank's time
    # counts.
    took = (ends[count - 1] - ends[warm - 1]) / (count - warm)
    (slowest_s,) = _slowest(team, [took])
    return slowest_s


def _series(team: Team, collective: Collective, counts: Mapping[int, int]) -> dict[int, list[int]]:
    """Repeats a collective ``counts[channel]`` times on each channel; returns the end times."""
    steps = {
        team.begin(team.prepare(Script.series(collective, channel, count))): channel
        for channel, count in counts.items()
    }
    team.take_spans()
    places = [(step, n) for step, channel in steps.items() for n in range(counts[channel])]
    vectors = [team.vector(collective, np.uint8) for _ in places]
    tickets = [
        team.submit(at, collective, vector) for at, vector in zip(places, vectors, strict=True)
    ]
    for ticket in tickets:
        team.wait(ticket)
    ends: dict[int, list[int]] = {channel: [] for channel in counts}
    for step, *_, end in sorted(team.take_spans()):
        ends[steps[step]].append(end)
    return ends


def _slowest(team: Team, took_ns: Sequence[float]) -> list[float]:
    """Returns the time of the slowest rank for each entry, in seconds; the same on all ranks."""
    collective = Collective.all_reduce(team.ranks, len(took_ns))
    slowest = team.run(collective, np.array(took_ns, np.float64), "max")
    return [float(one) / 1e9 for one in slowest]


def _model(cost: ChannelCost, sample: Sample, ranks: int) -> float:
    latency_s, rate = cost.latency_ns / 1e9, cost.rate_bps / 8
    others = ranks - 1
    if sample.pattern == "all_gather":
        shared = 1 + (cost.overlap[sample.beside] if sample.beside is not None else 0.0)
        return shared * others * (latency_s + sample.size_bytes / ranks / rate)
    if sample.pattern == "broadcast":
        return latency_s + others * sample.size_bytes / rate
    incast = 1 + cost.incast * (others - 1)
    return latency_s + others * sample.size_bytes / ranks / rate * incast


def fit(samples: Sequence[Sample], ranks: int) -> Calibration:
    """Fits channel costs to measurements.

    Rate and latency minimize the relative error over rings (least squares); what exchanges take
    beyond that is attributed to incast, and what rings take longer beside those of other channels,
    to shared resources.
    """
    costs = []
    channels = sorted({sample.channel for sample in samples})
    for channel in channels:
        every = [sample for sample in samples if sample.channel == channel]
        here = [sample for sample in every if sample.beside is None]
        rings = [sample for sample in here if sample.pattern == "all_gather"]
        latency_s, rate_bps = _latency_and_rate(rings, ranks)
        cost = ChannelCost(rate_bps, round(latency_s * 1e9), sums_rate_bps())
        longer = [
            sample.time_s / _model(cost, sample, ranks) - 1
            for sample in here
            if sample.pattern == "exchange"
        ]
        incast = max(0.0, statistics.median(longer)) / max(1, ranks - 2)
        overlap = [0.0] * len(channels)
        for sample in every:
            if sample.beside is not None:
                longer_by = sample.time_s / _model(
                    cost, dataclasses.replace(sample, beside=None), ranks
                )
                overlap[sample.beside] = longer_by - 1 if longer_by > 1 + NOTICED else 0.0
        costs.append(dataclasses.replace(cost, incast=incast, overlap=tuple(overlap)))
    errors = [
        abs(_model(costs[sample.channel], sample, ranks) / sample.time_s - 1) for sample in samples
    ]
    return Calibration(costs, statistics.median(errors), max(errors), list(samples))


def _latency_and_rate(rings: Sequence[Sample], ranks: int) -> tuple[float, float]:
    """Returns latency in seconds and bits per second that fit rings with the least relative error.

    Neither is negative: where the best fit would be, as where a large vector took no longer than a
    small one because of other load on the machine, all is attributed to the rate.
    """
    moved = [(ranks - 1, (ranks - 1) * ring.size_bytes * 8 / ranks) for ring in rings]
    matrix = np.array(moved) / np.array([[ring.time_s] for ring in rings])
    (latency_s, inverse), *_ = np.linalg.lstsq(matrix, np.ones(len(rings)), rcond=None)
    if latency_s < 0 or inverse <= 0:
        (inverse,), *_ = np.linalg.lstsq(matrix[:, 1:], np.ones(len(rings)), rcond=None)
        latency_s = 0
    return float(latency_s), float(1 / inverse)


def sums_rate_bps() -> float:
    """Measures bits per second that this machine adds, for vectors that exceed its caches."""
    ones = np.ones(1 << 22, np.float32)
    total = ones.copy()
    begun = time.perf_counter()
    for _ in range(3):
        total += ones
    return 3 * ones.nbytes * 8 / (time.perf_counter() - begun)
