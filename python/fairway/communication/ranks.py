"""Rank processes on the hosts of the settings, to measure the network between them.

Requests are lines of JSON on a rank's standard input, and answers likewise on its output; it ends
when its input does. The shared secret of the team (the token) is passed that way too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import queue
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import IO, Any, Self

from fairway import children
from fairway.communication import calibration
from fairway.communication.calibration import Sample
from fairway.communication.team import Channel, Listener, Team
from fairway.errors import ConfigError, TeamError
from fairway.settings import Settings

__all__ = ["Ranks"]

TIMEOUT_S = 30.0
"""Deadline for a rank to start, and for a rank that keeps others waiting."""
MEASURING_S = 300.0
END_S = 5.0


@dataclasses.dataclass(frozen=True)
class Host:
    """Location of one rank.

    Attributes:
        prefix: words before its command.
        channels: address of each network path to it, and rate in bits per second, if known.
    """

    prefix: tuple[str, ...]
    channels: list[tuple[str, float | None]]


def hosts(settings: Settings) -> list[Host]:
    """Returns all hosts of all islands, with their channels.

    Raises:
        ConfigError: there is only one host, or hosts differ in the number of channels.
    """
    found = []
    for island in settings.islands:
        for rank in range(island.hosts):
            channels: list[tuple[str, float | None]] = [
                (_listening(address), rate_bps) for address, rate_bps in island.channels_of(rank)
            ]
            plain: list[tuple[str, float | None]] = [(_listening(island.address_of(rank)), None)]
            found.append(Host(island.prefix_of(rank), channels or plain))
    counts = {len(host.channels) for host in found}
    if len(found) < 2 or len(counts) > 1:
        raise ConfigError(
            f"{len(found)} hosts have {' or '.join(map(str, sorted(counts)))} channels; expected "
            "at least two hosts, all with as many channels"
        )
    return found


def _listening(address: str) -> str:
    return f"tcp:[{address}]:0" if ":" in address else f"tcp:{address}:0"


class Ranks:
    """A team of processes, one on each host.

    Args:
        settings: the islands and their hosts.

    Raises:
        ConfigError: these hosts cannot form a team.
        TeamError: a rank does not start, or the ranks do not connect.
    """

    def __init__(self, settings: Settings) -> None:
        self._processes: list[_Process] = []
        given = hosts(settings)
        token = secrets.token_hex(16)
        try:
            for rank, host in enumerate(given):
                self._processes.append(_Process(rank, host))
            requests = [
                {"rank": r, "channels": h.channels, "token": token} for r, h in enumerate(given)
            ]
            # One after the other: of ranks that cannot run, the error names the first.
            addresses = [
                process.ask(request, TIMEOUT_S)
                for process, request in zip(self._processes, requests, strict=True)
            ]
            self._all(
                [{"addresses": addresses, "timeout_s": TIMEOUT_S}] * len(given), 2 * TIMEOUT_S
            )
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._processes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all rank processes."""
        for process in self._processes:
            process.end()
        for process in self._processes:
            process.wait()

    def measure(self) -> list[Sample]:
        """Measures motifs on each channel; returns the samples of rank 0.

        Raises:
            TeamError: a rank has ended, or is stalled.
        """
        found = self._all([{"measure": True}] * len(self), MEASURING_S)[0]
        return [Sample(**sample) for sample in found]

    def _all(self, requests: Sequence[Any], timeout_s: float) -> list[Any]:
        for process, request in zip(self._processes, requests, strict=True):
            process.tell(request)
        return [process.answer(timeout_s) for process in self._processes]


class _Process:
    def __init__(self, rank: int, host: Host) -> None:
        self._rank = rank
        self._lines: queue.Queue[str] = queue.Queue(maxsize=16)
        self._words: list[str] = []
        command = [*host.prefix, *children.command("fairway.communication.ranks")]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=children.environment(),
                start_new_session=True,
            )
        except OSError as error:
            text = f"rank {rank} cannot be started by {command[0]!r}: {error}"
            raise TeamError("Lost", text) from None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._readers = [
            _reading(self._process.stdout, self._lines.put, ends=True),
            _reading(self._process.stderr, self._words.append),
        ]

    def ask(self, request: Any, timeout_s: float) -> Any:
        self.tell(request)
        return self.answer(timeout_s)

    def tell(self, request: Any) -> None:
        assert self._process.stdin is not None
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise self._failure("has ended") from None

    def answer(self, timeout_s: float) -> Any:
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise self._failure(f"has not answered for {timeout_s:.0f} s") from None
        if not line:
            raise self._failure("has ended")
        answer = json.loads(line)
        if "error" in answer:
            raise TeamError(answer["kind"], answer["error"])
        return answer["found"]

    def _failure(self, what: str) -> TeamError:
        self.end()
        self.wait()
        words = "".join(self._words[-5:]).strip() or "it said nothing"
        return TeamError("Lost", f"rank {self._rank} {what}: {words}")

    def end(self) -> None:
        assert self._process.stdin is not None
        # The process may have exited already.
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def wait(self) -> None:
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for reader in self._readers:
            reader.join(END_S)


def _reading(stream: IO[str], put: Callable[[str], None], ends: bool = False) -> threading.Thread:
    def read() -> None:
        with stream:
            for line in stream:
                put(line)
        if ends:
            put("")

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread


def main() -> None:
    """Serves one rank: reports its addresses, joins, measures."""
    listener: Listener | None = None
    team: Team | None = None
    channels = 0
    for line in sys.stdin:
        request = json.loads(line)
        found: Any = None
        try:
            if "token" in request:
                channels = len(request["channels"])
                opened = [Channel(address, rate) for address, rate in request["channels"]]
                listener = Listener(request["rank"], opened, request["token"])
                found = listener.addresses
            elif "addresses" in request:
                assert listener is not None
                team = listener.join(request["addresses"], request["timeout_s"])
            else:
                assert team is not None
                found = [dataclasses.asdict(one) for one in calibration.measure(team, channels)]
        except (TeamError, OSError, ValueError) as error:
            kind = error.kind if isinstance(error, TeamError) else "Lost"
            print(json.dumps({"error": str(error), "kind": kind}), flush=True)
            continue
        print(json.dumps({"found": found}), flush=True)
    if team is not None:
        team.close()


if __name__ == "__main__":
    main()
