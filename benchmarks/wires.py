"""Network namespaces of this machine, joined by links of a given rate: an island lives in each.

Every namespace has one veth onto a bridge, and ``tc tbf`` shapes both of its ends: what leaves the
namespace, and what the bridge sends into it. This process reaches all of them over the bridge.
Needs root, and ``ip`` and ``tc`` of iproute2.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
from collections.abc import Iterator

__all__ = ["Place", "can_join", "joined"]

BURST_BYTES = 128 << 10
"""What passes at once after a pause; less loses throughput while the cores are busy."""
QUEUE_BYTES = 4 << 20


@dataclasses.dataclass(frozen=True)
class Place:
    """One namespace.

    Attributes:
        name: of the namespace, and of its link.
        address: where it is reached.
    """

    name: str
    address: str

    @property
    def prefix(self) -> tuple[str, ...]:
        """What a command begins with that shall run there."""
        return ("ip", "netns", "exec", self.name)

    def sent_bytes(self) -> int:
        """Bytes that have left it over its link."""
        shown = _run("ip", "-json", "-statistics", "link", "show", self.name)
        return int(json.loads(shown)[0]["stats64"]["rx"]["bytes"])


def can_join() -> bool:
    """Is there what it takes?"""
    return os.geteuid() == 0 and all(shutil.which(tool) for tool in ("ip", "tc"))


@contextlib.contextmanager
def joined(count: int, rate_bps: int | None) -> Iterator[list[Place]]:
    """Namespaces whose links to one another carry ``rate_bps`` each way, as long as this lasts.

    A process may have several such networks of different counts.

    Raises:
        CalledProcessError: they cannot be made.
    """
    unique = f"fw{count}-{os.getpid() % 100_000}"
    network = f"10.{os.getpid() % 64 + 64}.{count}"
    bridge = f"{unique}br"
    places = [Place(f"{unique}n{turn}", f"{network}.{turn + 1}") for turn in range(count)]
    with contextlib.ExitStack() as stack:
        _run("ip", "link", "add", bridge, "type", "bridge")
        stack.callback(_run, "ip", "link", "del", bridge)
        _run("ip", "addr", "add", f"{network}.254/24", "dev", bridge)
        _run("ip", "link", "set", bridge, "up")
        for place in places:
            _run("ip", "netns", "add", place.name)
            stack.callback(_run, "ip", "netns", "del", place.name)
            _join(place, bridge, rate_bps)
            stack.callback(_run, "ip", "link", "del", place.name)
        yield places


def _join(place: Place, bridge: str, rate_bps: int | None) -> None:
    inside = ("ip", "-n", place.name)
    peer = ("peer", "name", "eth0", "netns", place.name)
    _run("ip", "link", "add", place.name, "type", "veth", *peer)
    _run("ip", "link", "set", place.name, "master", bridge, "up")
    _run(*inside, "addr", "add", f"{place.address}/24", "dev", "eth0")
    _run(*inside, "link", "set", "lo", "up")
    _run(*inside, "link", "set", "eth0", "up")
    if rate_bps is None:
        return
    sizes = ("burst", str(BURST_BYTES), "limit", str(QUEUE_BYTES))
    shape = ("root", "tbf", "rate", f"{rate_bps}bit", *sizes)
    _run("tc", "qdisc", "add", "dev", place.name, *shape)
    _run("tc", "-n", place.name, "qdisc", "add", "dev", "eth0", *shape)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
