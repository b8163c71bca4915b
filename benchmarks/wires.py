"""Network namespaces of this machine as hosts, joined by networks of given rates.

Every namespace has one veth on the bridge of each network, and ``tc tbf`` (token bucket filter)
shapes both of its ends: egress of the namespace, and of the bridge towards it. This process reaches
all of them over the bridges. Needs root, and ``ip`` and ``tc`` of iproute2.
"""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import itertools
import json
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence

from fairway.settings import ChannelSettings, IslandSettings

__all__ = ["Place", "can_join", "free_subnets", "islands", "joined"]

ENDING = (signal.SIGTERM, signal.SIGHUP)
BURST_BYTES = 128 << 10
"""Default burst after a pause; less loses throughput while the cores are busy."""
QUEUE_BYTES = 4 << 20
TUNING = (
    "cd /proc/sys/net/ipv4; echo reno > tcp_congestion_control; echo 0 > tcp_slow_start_after_idle"
)
"""As in clusters: senders fill links, and keep their rate after a pause."""


@dataclasses.dataclass(frozen=True)
class Place:
    """The namespaces of an island: one per host, with ``{rank}`` in place of its rank.

    Attributes:
        name: name of a namespace.
        addresses: address on each network.
        hosts: number of hosts.
    """

    name: str
    addresses: tuple[str, ...]
    hosts: int

    @property
    def prefix(self) -> tuple[str, ...]:
        """Prefix of a command that must run there."""
        return ("ip", "netns", "exec", self.name)

    def sent_bytes(self) -> int:
        """Returns the bytes that it has sent over the first network."""
        return sum(
            int(json.loads(shown)[0]["stats64"]["rx"]["bytes"])
            for rank in range(self.hosts)
            for shown in [_run("ip", "-json", "-statistics", "link", "show", self.link(rank, 0))]
        )

    def link(self, rank: int, network: int) -> str:
        """Returns the name of a link's outer end."""
        return f"{_of_rank(self.name, rank)}e{network}"


def _of_rank(text: str, rank: int) -> str:
    return text.replace("{rank}", str(rank))


def can_join() -> bool:
    """Returns whether the privileges and tools to make namespaces are there."""
    return os.geteuid() == 0 and all(shutil.which(tool) for tool in ("ip", "tc"))


def islands(places: Sequence[Place], mbit: Sequence[int]) -> tuple[IslandSettings, ...]:
    """Returns islands of one host and one device, with a channel for each network by its rate."""
    found = []
    for place in places:
        ways = zip(place.addresses, mbit, strict=False)
        channels = tuple(ChannelSettings(address, f"{rate}Mbit/s") for address, rate in ways)
        found.append(IslandSettings(1, 1, place.prefix, place.addresses[0], channels))
    return tuple(found)


@contextlib.contextmanager
def joined(
    islands: int,
    rates_bps: Sequence[int | None],
    hosts: int = 1,
    burst_bytes: int = BURST_BYTES,
) -> Iterator[list[Place]]:
    """Creates namespaces for islands, on rate-limited networks, while the context lasts.

    A process may have several sets of different sizes at a time. They are removed however this
    process ends, by a watcher that outlives it. SIGTERM and SIGHUP raise ``SystemExit`` meanwhile.

    Args:
        islands: at most 24.
        rates_bps: of the links of each network in each direction, at most 4 networks; None is
            unlimited.
        hosts: of each island, at most 9.
        burst_bytes: maximum burst after a pause.

    Raises:
        CalledProcessError: the namespaces cannot be created.
    """
    unique = f"f{islands}{hosts}{os.getpid() % 10_000:04}"
    networks = range(len(rates_bps))
    subnets = free_subnets(len(rates_bps))
    places = [
        Place(
            f"{unique}n{island}{{rank}}",
            tuple(f"{subnet}.{island}{{rank}}" for subnet in subnets),
            hosts,
        )
        for island in range(1, islands + 1)
    ]
    names = [_of_rank(place.name, rank) for place in places for rank in range(hosts)]
    bridges = [f"{unique}b{network}" for network in networks]
    links = [
        place.link(rank, network)
        for place, rank, network in itertools.product(places, range(hosts), networks)
    ]
    with _ending_by_exception(), _removed_at_the_end(names, [*links, *bridges]):
        for name in names:
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "netns", "exec", name, "sh", "-c", TUNING)
        for network, (bridge, rate) in enumerate(zip(bridges, rates_bps, strict=True)):
            _run("ip", "link", "add", bridge, "type", "bridge")
            _run("ip", "addr", "add", f"{subnets[network]}.254/24", "dev", bridge)
            _run("ip", "link", "set", bridge, "up")
            for place, rank in itertools.product(places, range(hosts)):
                _join(place, rank, (network, bridge), rate, burst_bytes)
        yield places


def free_subnets(count: int) -> list[str]:
    """Returns the first three numbers of /24 subnets in which this machine has no address.

    Another run, or one that was killed, may have the addresses of ours: of two interfaces with
    addresses in one subnet, all packets to it leave by one.
    """
    shown = json.loads(_run("ip", "-json", "-4", "addr"))
    taken = [
        ipaddress.ip_interface(f"{address['local']}/{address['prefixlen']}").network
        for interface in shown
        for address in interface["addr_info"]
    ]
    first = os.getpid() * 4  # so that runs that begin together differ
    found = []
    for place in range(1 << 12):
        number = (first + place) % (1 << 12)
        subnet = ipaddress.ip_network(f"10.{64 + (number >> 8)}.{number & 255}.0/24")
        if not any(subnet.overlaps(one) for one in taken):
            found.append(str(subnet.network_address).rpartition(".")[0])
        if len(found) == count:
            return found
    raise RuntimeError("this machine has addresses in all subnets of 10.64.0.0/12")


WATCHER = """
trap '' INT TERM HUP
read -r _
for name in $NAMES; do ip netns del "$name"; done 2>/dev/null
for link in $LINKS; do ip link del "$link"; done 2>/dev/null
exit 0
"""
"""Waits until its parent closes the pipe or dies, then removes namespaces and links."""


@contextlib.contextmanager
def _removed_at_the_end(names: Sequence[str], links: Sequence[str]) -> Iterator[None]:
    """Removes namespaces and links when the context ends, or this process does, even by SIGKILL."""
    watcher = subprocess.Popen(
        ["sh", "-c", WATCHER],
        env={**os.environ, "NAMES": " ".join(names), "LINKS": " ".join(links)},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        watcher.communicate()


@contextlib.contextmanager
def _ending_by_exception() -> Iterator[None]:
    """Turns signals that end this process into an exception, so that contexts end in order."""

    def end(number: int, _: object) -> None:
        for one in ENDING:
            signal.signal(one, signal.SIG_IGN)  # ignore repeated signals
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {one: signal.signal(one, end) for one in ENDING}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def _join(
    place: Place, rank: int, onto: tuple[int, str], rate_bps: int | None, burst_bytes: int
) -> None:
    network, bridge = onto
    name, address = (_of_rank(text, rank) for text in (place.name, place.addresses[network]))
    inside, link, own = ("ip", "-n", name), place.link(rank, network), f"eth{network}"
    peer = ("peer", "name", own, "netns", name)
    _run("ip", "link", "add", link, "type", "veth", *peer)
    _run("ip", "link", "set", link, "master", bridge, "up")
    _run(*inside, "addr", "add", f"{address}/24", "dev", own)
    _run(*inside, "link", "set", own, "up")
    if rate_bps is None:
        return
    sizes = ("burst", str(burst_bytes), "limit", str(QUEUE_BYTES))
    shape = ("root", "tbf", "rate", f"{rate_bps}bit", *sizes)
    _run("tc", "qdisc", "add", "dev", link, *shape)
    _run("tc", "-n", name, "qdisc", "add", "dev", own, *shape)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
