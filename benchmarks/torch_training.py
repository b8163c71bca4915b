"""Compares training of PyTorch over Fairway and over gloo, with only the backend changed.

Ranks are processes in network namespaces, each with a link to a network of 200 Mbit/s and one to
another of 100. ``examples/train_torch.py`` trains there, as DDP and with weights sharded (FSDP):
over Fairway on both networks, over Fairway on the first only, and over gloo on the first, in turn,
in random order each round. The losses must agree.

Needs root, ``ip`` and ``tc``, and PyTorch: ``make torch-training``.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import random
import statistics
import subprocess
from typing import Any

import wires
from common import (
    ROOT,
    Goal,
    Spread,
    environment_without,
    interleave,
    provenance,
    ratios,
    run_main,
    write_json,
)
from rich.console import Console
from rich.table import Table

from fairway.cli.consoles import working

RATES_BPS = (200_000_000, 100_000_000)
BOTH, ONE, GLOO = "fairway, both networks", "fairway, one network", "gloo, one network"
GOALS = {BOTH: 1.3, ONE: 0.97}
"""Required speed-up of a step over gloo."""
LOSS_TOLERANCE = 1e-5
"""Allowed relative deviation of losses from those over gloo: sums are in another order."""
TIMEOUT_S = 300.0
PORT = "29400"


def train(
    places: list[wires.Place], python: str, system: str, parallel: str, given: argparse.Namespace
) -> dict[str, Any]:
    """Trains once; returns the report of rank 0."""
    command = [python, str(ROOT / "examples" / "train_torch.py"), "--parallel", parallel]
    command += ["--backend", "gloo" if system == GLOO else "fairway", "--width", str(given.width)]
    command += ["--steps", str(given.steps)]
    used = RATES_BPS if system == BOTH else RATES_BPS[:1]
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank, place in enumerate(places):
            addresses = [address.replace("{rank}", "0") for address in place.addresses]
            channels = [
                f"tcp:{address}:0@{rate // 10**6}Mbit/s"
                for address, rate in zip(addresses, used, strict=False)
            ]
            environment = {
                **environment_without("FAIRWAY_COSTS"),
                "OMP_NUM_THREADS": "1",
                "RANK": str(rank),
                "WORLD_SIZE": str(len(places)),
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": places[0].addresses[0].replace("{rank}", "0"),
                "MASTER_PORT": PORT,
                "GLOO_SOCKET_IFNAME": "eth0",
                "FAIRWAY_CHANNELS": ",".join(channels),
            }
            prefix = [word.replace("{rank}", "0") for word in place.prefix]
            pipe = subprocess.PIPE
            process = subprocess.Popen(
                [*prefix, *command], stdout=pipe, stderr=pipe, text=True, env=environment
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            ranks.append(process)
        words = [process.communicate(timeout=TIMEOUT_S) for process in ranks]
        for process, (_, error) in zip(ranks, words, strict=True):
            if process.returncode:
                raise SystemExit(f"a rank over {system} has failed:\n{error[-2000:]}")
    found: dict[str, Any] = json.loads(words[0][0])
    return found


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--torch-python", required=True, help="a Python that has PyTorch and Fairway"
    )
    parser.add_argument("--ranks", type=int, default=4, help="hosts")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each system")
    parser.add_argument("--steps", type=int, default=12, help="of each training")
    parser.add_argument("--width", type=int, default=512, help="of the model; more is more to send")
    parser.add_argument("--seed", type=int, default=0, help="of the order of turns")
    return parser.parse_args()


def main() -> None:
    """Measures, prints and writes ``out/torch.json``."""
    given = arguments()
    if not wires.can_join():
        raise SystemExit("this needs root, and ip and tc of iproute2, to make namespaces")
    report: dict[str, Any] = provenance(given.seed, "numpy")
    order = random.Random(given.seed)
    console = Console()
    table = Table(title=f"{given.ranks} ranks: seconds of a step, median \\[lowest..highest]")
    for name in ("parallel", "system", "step", "times less than gloo", "losses"):
        table.add_column(name)
    with (
        wires.joined(given.ranks, RATES_BPS) as places,
        working("training") as work,
    ):
        done = 0
        for parallel in ("ddp", "fsdp"):
            losses: dict[str, list[float]] = {}

            def turn(system: str, parallel: str, losses: dict[str, list[float]]) -> float:
                found = train(places, given.torch_python, system, parallel, given)
                losses[system] = found["losses"]
                nonlocal done
                done += 1
                work.update(done, 2 * 3 * given.rounds, f"{parallel} by {system}")
                return float(found["step_s"])

            turns = {
                system: functools.partial(turn, system, parallel, losses)
                for system in (BOTH, ONE, GLOO)
            }
            times = interleave(turns, given.rounds, order)
            report[parallel] = {}
            for system, step_s in times.items():
                gain = ratios(times[GLOO], step_s)
                apart = max(
                    abs(ours / theirs - 1)
                    for ours, theirs in zip(losses[system], losses[GLOO], strict=True)
                )
                verdict = "same" if apart <= LOSS_TOLERANCE else "[red]differ[/]"
                table.add_row(
                    parallel, system, step_s.show(".3f"), gain.show(), f"{verdict} {apart:.0e}"
                )
                report[parallel][system] = {
                    "step_s": step_s.as_json(),
                    "gain": gain.as_json(),
                    "loss_error": apart,
                }
    console.print(table)
    for system, least in GOALS.items():
        gains = [
            Spread(tuple(report[parallel][system]["gain"]["rounds"]))
            for parallel in ("ddp", "fsdp")
        ]
        worst = min(gain.median for gain in gains)
        mean = statistics.geometric_mean(gain.median for gain in gains)
        goal = Goal(least, f"{system}, the least of both")
        console.print(f"{system}: {mean:.2f} in the mean, {worst:.2f} {goal.verdict(worst)}")
    write_json("torch.json", report)


if __name__ == "__main__":
    run_main(main)
