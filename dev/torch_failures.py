"""Fault injection into DDP: the error of every survivor, and whether any is killed by a signal.

    python dev/torch_failures.py killed|late|networks|network [--rounds 20]

Three ranks train; at the sixth step rank 1 is killed, misses the timeout, or loses all networks or
one of two (as root: `unshare -n` before the command). Exit status 0 means that in every round each
survivor raised a `BackendError` that names the failed rank, or continued if a network was left.
"""

import argparse
import datetime
import importlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

RANKS = 3
STEPS, FAILING = 10, 5
TIMEOUT_S = 5
ADDRESSES = ("10.1.0.1", "10.2.0.1")
HOWS = ("killed", "late", "networks", "network")
FIRST = ("torch._dynamo", "torch._functorch.aot_autograd", "fairway.torch")
"""Modules imported before ranks are forked, which would otherwise each import them."""


def change(what: str, addresses: tuple[str, ...]) -> None:
    """Adds addresses to the loopback device of this network namespace, or removes them."""
    for address in addresses:
        command = ["ip", "addr", what, f"{address}/32", "dev", "lo"]
        subprocess.run(command, check=False, capture_output=True)


def fail(how: str) -> None:
    """Injects the failure into rank 1."""
    match how:
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "late":
            time.sleep(TIMEOUT_S + 2)
        case "networks":
            change("del", ADDRESSES)
        case "network":
            change("del", ADDRESSES[1:])


def train(rank: int, how: str) -> None:
    """Trains on one rank."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("fairway", timeout=datetime.timedelta(seconds=TIMEOUT_S))
    layers = [torch.nn.Linear(256, 256) for _ in range(4)]
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(*layers), bucket_cap_mb=0.2
    )
    for step in range(STEPS):
        if step == FAILING and rank == 1:
            fail(how)
        model(torch.randn(4, 256)).sum().backward()
    dist.destroy_process_group()


def fork(rank: int, how: str, port: int, words: Path) -> int:
    """Forks a rank with its output redirected to a file."""
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        with words.open("wb") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), **where)
        train(rank, how)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def complaint(rank: int, how: str, status: int, text: str) -> str | None:
    """Returns what is wrong with the end of a rank, or None."""
    if how == "killed" and rank == 1:
        return None
    code = os.waitstatus_to_exitcode(status)
    if how == "network":
        return None if code == 0 else f"rank {rank} ended with {code}"
    if code != 1 or "BackendError: all_reduce" not in text:
        return f"rank {rank} ended with {code} and no error of the backend"
    if how != "networks" and rank != 1 and "rank 1" not in text:
        return f"rank {rank} does not name rank 1"
    return None


def main() -> int:
    """Runs rounds of fault injection; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("how", choices=HOWS)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    has_networks = options.how.startswith("network")
    if has_networks:
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        os.environ["FAIRWAY_CHANNELS"] = ",".join(f"tcp:{one}:0" for one in ADDRESSES)
    for name in FIRST:
        importlib.import_module(name)
    bad, times = 0, []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            if has_networks:
                change("add", ADDRESSES)
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            words = [Path(folder, str(rank)) for rank in range(RANKS)]
            began = time.monotonic()
            ranks = [fork(rank, options.how, port, words[rank]) for rank in range(RANKS)]
            ends = [os.waitpid(process, 0)[1] for process in ranks]
            times.append(time.monotonic() - began)
            found = [
                complaint(rank, options.how, end, words[rank].read_text())
                for rank, end in enumerate(ends)
            ]
            wrong = [text for text in found if text]
            bad += bool(wrong)
            for text in wrong:
                print(f"round {number}: {text}", flush=True)
        lines = [line for line in words[0].read_text().splitlines() if "rank" in line]
    times.sort()
    print(f"{options.how}: {options.rounds - bad} of {options.rounds} rounds are as they should be")
    print(f"a round took {times[len(times) // 2]:.1f} s [{times[0]:.1f}..{times[-1]:.1f}]")
    print("rank 0 said last:", lines[-1] if lines else "nothing")
    return 0 if bad == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
