"""PATHWAYS' Figures 5 to 9 at its sizes: the controller's own code over modelled hosts.

Everything here is discrete-event simulation in virtual time, with the costs that :func:`costs`
returns; real hosts, a few of them, are measured by ``benchmarks``. Source: PATHWAYS §5.1-5.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairway import _native
from fairway.errors import ConfigError
from fairway.studies.reproduce import Figure, Progress, check_figures, write_figure

__all__ = ["FIGURES", "Figure", "costs", "reproduce"]

MILLISECOND = 1_000_000
CHAIN = 128
PARITY = 0.98
"""Fraction of JAX's throughput that counts as parity."""
WARM_UP_NS = 50 * MILLISECOND
WEIGHTS = {"1:1:1:1": (1, 1, 1, 1), "1:2:4:8": (1, 2, 4, 8)}


def costs(changes: dict[str, int] | None = None) -> dict[str, int]:
    """Returns the costs that the simulations assume, in nanoseconds.

    Raises:
        ConfigError: ``changes`` names an unknown cost.
    """
    known = _native.simulation_costs()
    for name, value in (changes or {}).items():
        if name not in known:
            raise ConfigError(f"there is no cost {name!r}; there are {', '.join(known)}")
        known[name] = value
    return known


@dataclass(frozen=True)
class DispatchScenario:
    """What the dispatch simulator simulates.

    Attributes:
        islands: hosts and devices of each host.
        clients: what each client does, how many of it, computation in ns, weight and priority.
        costs: those that replace measured ones, in ns.
        warm_up_ns: simulated time before the measurement.
        measured_ns: simulated time of the measurement.
        sequential: whether a computation is dispatched only when its arguments are there.
        trace: whether the work of the first host's devices is returned.
    """

    islands: list[tuple[int, int]]
    clients: list[tuple[str, int, int, int, int]]
    costs: list[tuple[str, int]]
    warm_up_ns: int
    measured_ns: int
    sequential: bool = False
    trace: bool = False


class _Model:
    def __init__(self, known: dict[str, int]) -> None:
        self._costs = known

    def rate(
        self,
        hosts: int,
        devices: int,
        work: str,
        computation_ns: int = 0,
        *,
        count: int = CHAIN,
        clients: int = 1,
        sequential: bool = False,
    ) -> float:
        """Returns simulated computations per second."""
        measured = max(100 * MILLISECOND, 40 * computation_ns)
        outcome = _native.simulate_dispatch(
            DispatchScenario(
                [(hosts, devices)],
                [(work, count, computation_ns, 1, 0)] * clients,
                list(self._costs.items()),
                WARM_UP_NS + 4 * computation_ns,
                measured,
                sequential=sequential,
            )
        )
        return float(sum(outcome["computations"]) / outcome["measured_ns"] * 1e9)

    def jax(self, hosts: int, computation_ns: int = 0, fused: int = 1) -> float:
        """Returns the same of a model of multi-controller JAX: each host dispatches by itself."""
        doublings = math.ceil(math.log2(hosts))
        collective = self._costs["collective"] + doublings * self._costs["collective_per_doubling"]
        run = fused * (computation_ns + collective)
        return fused * 1e9 / max(self._costs["jax_dispatch"], run)

    def shares(self, hosts: int, weights: tuple[int, ...]) -> list[tuple[int, int, int]]:
        """Simulates four clients; returns client, start, end of computations on one host."""
        outcome = _native.simulate_dispatch(
            DispatchScenario(
                [(hosts, 8)],
                [("op_by_op", 1, 330_000, weight, 0) for weight in weights],
                list(self._costs.items()),
                500 * MILLISECOND,
                1000 * MILLISECOND,
                trace=True,
            )
        )
        begin = outcome["spans"][-1][2] - 1000 * MILLISECOND
        return [span for span in outcome["spans"] if span[1] >= begin]


def figure_5(model: _Model, progress: Progress) -> Figure:
    """Dispatch throughput: op by op, chained, fused, compared with JAX."""
    rows = []
    for hosts in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
        progress(f"Figure 5: {hosts} hosts")
        rows.append(
            {
                "hosts": hosts,
                "devices": 4 * hosts,
                "Fairway op by op": model.rate(hosts, 4, "op_by_op"),
                "Fairway chained": model.rate(hosts, 4, "chained"),
                "Fairway fused": model.rate(hosts, 4, "fused"),
                "JAX op by op": model.jax(hosts),
                "JAX fused": model.jax(hosts, fused=CHAIN),
            }
        )
    ahead = max(row["devices"] for row in rows if row["Fairway chained"] > row["JAX op by op"])
    even = max(row["devices"] for row in rows if row["Fairway fused"] >= PARITY * row["JAX fused"])
    return Figure(
        "5",
        "computations a second, by devices",
        rows,
        f"chained is ahead of JAX op by op up to {ahead} devices (paper: 256); fused is even with "
        f"JAX's up to {even} (paper: 1,000)",
    )


def figure_6(model: _Model, progress: Progress) -> Figure:
    """The smallest computation that hides the single controller's overhead."""
    sizes_ms = [round(0.05 * 1.25**step, 3) for step in range(31)]
    rows = []
    for hosts, devices in ((16, 8), (512, 4)):
        for size in sizes_ms:
            progress(f"Figure 6: {hosts} hosts, {size} ms")
            nanos = int(size * MILLISECOND)
            part = model.rate(hosts, devices, "op_by_op", nanos) / model.jax(hosts, nanos)
            rows.append({"hosts": hosts, "computation ms": size, "part of JAX": part})
    found = {hosts: _parity(rows, hosts) for hosts in (16, 512)}
    return Figure(
        "6",
        "throughput as a part of JAX's, by the time of one computation",
        rows,
        f"{PARITY:.0%} is reached from {found[16]} ms on 16 hosts (paper: 2.3) and from "
        f"{found[512]} ms on 512 hosts (paper: 35)",
    )


def _parity(rows: list[dict[str, Any]], hosts: int) -> float:
    """Returns the smallest size from which all reach parity; counting launches costs 1 %."""
    found = math.inf
    for row in reversed([row for row in rows if row["hosts"] == hosts]):
        if row["part of JAX"] < PARITY - 0.01:
            break
        found = float(row["computation ms"])
    return found


def figure_7(model: _Model, progress: Progress) -> Figure:
    """Pipeline stages on separate hosts: parallel and sequential dispatch."""
    rows = []
    for stages in (1, 2, 4, 8, 16, 32, 64, 128):
        progress(f"Figure 7: {stages} stages")
        rows.append(
            {
                "stages": stages,
                "parallel": model.rate(stages, 4, "pipeline", count=stages),
                "sequential": model.rate(stages, 4, "pipeline", count=stages, sequential=True),
            }
        )
    last = rows[-1]
    gain = last["parallel"] / last["sequential"]
    return Figure(
        "7",
        "computations a second, by pipeline stages",
        rows,
        f"parallel dispatch is {gain:.0f} times as fast at {last['stages']} stages",
    )


def figure_8(model: _Model, progress: Progress) -> Figure:
    """Several concurrent clients, compared with one of JAX."""
    rows = []
    for size in (0.04, 0.33, 1.2, 4.0):
        nanos = int(size * MILLISECOND)
        for clients in (1, 2, 4, 8, 16):
            progress(f"Figure 8: {size} ms, {clients} clients")
            rate = model.rate(64, 8, "op_by_op", nanos, clients=clients)
            part = rate / model.jax(64, nanos)
            rows.append({"computation ms": size, "clients": clients, "part of JAX": part})
    most = [row["part of JAX"] for row in rows if row["clients"] == 16]
    return Figure(
        "8",
        "aggregate throughput as a part of one JAX client's, 64 hosts of 8 devices",
        rows,
        f"16 clients reach {min(most):.2f} to {max(most):.2f} of JAX's rate",
    )


def figure_9(model: _Model, progress: Progress) -> Figure:
    """Proportional shares of four clients of 0.33 ms on 16 hosts of 8 devices."""
    rows = []
    off = 0.0
    for name, weights in WEIGHTS.items():
        progress(f"Figure 9: shares {name}")
        spans = model.shares(16, weights)
        busy = [sum(end - start for who, start, end in spans if who == c + 1) for c in range(4)]
        for client, (had, weight) in enumerate(zip(busy, weights, strict=True), 1):
            share, wanted = had / sum(busy), weight / sum(weights)
            off = max(off, abs(share - wanted))
            rows.append({"weights": name, "client": client, "share": share, "wanted": wanted})
        middle = spans[len(spans) // 2][1]
        rows[-1]["spans"] = [
            (who, start - middle, end - middle)
            for who, start, end in spans
            if middle <= start < middle + 12 * MILLISECOND
        ]
    summary = f"shares are met within {100 * off:.2f} % of the device time"
    return Figure("9", "device time of four clients", rows, summary)


FIGURES: dict[str, Callable[[_Model, Progress], Figure]] = {
    "5": figure_5,
    "6": figure_6,
    "7": figure_7,
    "8": figure_8,
    "9": figure_9,
}


def reproduce(
    directory: Path, names: list[str], known: dict[str, int], progress: Progress
) -> Iterator[Figure]:
    """Reproduces figures and writes each as ``pathways-<n>.json`` and ``.png``.

    Args:
        directory: output folder.
        names: numbers of the figures.
        known: costs in nanoseconds, as :func:`costs` returns them.
        progress: called with a description of each stage.

    Raises:
        ConfigError: a figure is unknown.
    """
    check_figures(names, FIGURES)
    directory.mkdir(parents=True, exist_ok=True)
    model = _Model(known)
    for name in names:
        figure = FIGURES[name](model, progress)
        path = directory / f"pathways-{name}"
        write_figure(path, figure, {"costs_ns": known}, "PATHWAYS", _DRAWERS[name])
        yield figure


def _draw_lines(axes: Any, rows: list[dict[str, Any]], across: str, names: list[str]) -> None:
    for name in names:
        style = "--" if name.startswith("JAX") or name == "sequential" else "-"
        places = [row[across] for row in rows]
        axes.plot(places, [row[name] for row in rows], style, marker="o", ms=3, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel(across)
    axes.set_ylabel("computations/s")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)


def _draw_5(axes: Any, rows: list[dict[str, Any]]) -> None:
    _draw_lines(axes, rows, "devices", [name for name in rows[0] if " " in name])


def _draw_6(axes: Any, rows: list[dict[str, Any]]) -> None:
    _draw_groups(axes, rows, "hosts", "computation ms")
    axes.set_xscale("log")
    axes.axhline(PARITY, color="grey", lw=0.8)


def _draw_7(axes: Any, rows: list[dict[str, Any]]) -> None:
    _draw_lines(axes, rows, "stages", ["parallel", "sequential"])


def _draw_8(axes: Any, rows: list[dict[str, Any]]) -> None:
    _draw_groups(axes, rows, "computation ms", "clients")
    axes.axhline(1.0, color="grey", lw=0.8)


def _draw_groups(axes: Any, rows: list[dict[str, Any]], group: str, across: str) -> None:
    for value in dict.fromkeys(row[group] for row in rows):
        chosen = [row for row in rows if row[group] == value]
        places = [row[across] for row in chosen]
        parts = [row["part of JAX"] for row in chosen]
        axes.plot(places, parts, marker="o", ms=3, label=f"{value} {group}")
    axes.set_xlabel(across)
    axes.set_ylabel("part of JAX's throughput")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)


def _draw_9(axes: Any, rows: list[dict[str, Any]]) -> None:
    colours = ("tab:blue", "tab:orange", "tab:green", "tab:red")
    names = list(WEIGHTS)
    for row in rows:
        for who, start, end in row.get("spans", ()):
            place = names.index(row["weights"])
            axes.barh(place, (end - start) / 1e6, 0.6, start / 1e6, color=colours[who - 1])
    axes.set_yticks(range(len(names)), names)
    for who, colour in enumerate(colours, 1):
        axes.scatter([], [], marker="s", color=colour, label=f"client {who}")
    axes.legend(fontsize=8, loc="center", ncols=4)
    axes.set_xlabel("ms")
    axes.set_ylabel("weights of the clients")
    axes.invert_yaxis()


_DRAWERS = {"5": _draw_5, "6": _draw_6, "7": _draw_7, "8": _draw_8, "9": _draw_9}
