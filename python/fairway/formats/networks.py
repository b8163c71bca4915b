"""Networks from files of others: a graph, NCCL's topology or ASTRA-sim's network.

=====================  ============================================================================
``graph.json``         ``{"endpoints": 3, "switches": 0, "links": [{"from": 0, "to": 1,
                       "gbit_s": 100, "latency_ns": 241}]}``; a link is bidirectional unless it
                       has ``"both": false``
``topology.xml``       what NCCL writes to ``NCCL_TOPO_DUMP_FILE``: GPUs, NVLinks, PCI, NICs
``network.yml``        ASTRA-sim's analytical network: Ring, FullyConnected and Switch dimensions
=====================  ============================================================================
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import reprlib
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import yaml

from fairway import _native
from fairway.errors import TopologyError

__all__ = ["READERS", "read_network"]

Link = tuple[int, int, float, int]
SIZE_MAX = 64 << 20
"""Largest file that is read, in bytes."""
LINKS_MAX = 1 << 21
LATENCY_MAX_NS = 60_000_000_000

ASTRA_GIGABYTE = 1 << 30
"""ASTRA-sim's GB/s are of 2^30 bytes."""

NVLINK_BYTES_PER_S = {60: 18e9, 70: 20e9, 80: 20e9, 86: 12e9, 89: 12e9, 90: 20.6e9, 100: 40.1e9}
"""Bandwidth of an NVLink per direction, by compute capability. Source: NCCL, graph/topo.h."""
PCI_GIGATRANSFERS_BYTES = {2.5: 0.25e9, 5.0: 0.5e9, 8.0: 1e9, 16.0: 2e9, 32.0: 4e9, 64.0: 8e9}
"""Bandwidth of a PCI lane per direction, by its gigatransfers per second."""
SOCKET_BYTES_PER_S = 22e9
"""Bandwidth between sockets. Assumed: what NCCL uses for recent x86."""
LINK_KEYS = {"from", "to", "gbit_s", "latency_ns", "both"}
LOCAL_NS = 700
"""Latency of NVLink and PCI hops. Assumed: topology files have no latencies; of the order of a hop
of the multi-TSP system (§5.6)."""


def read_network(path: Path) -> _native.Topology:
    """Reads the topology that a file describes.

    Raises:
        TopologyError: it is no file of a known format, or describes no network.
    """
    try:
        if path.exists() and not path.is_file():
            raise TopologyError(f"{path} is no regular file")
        with path.open("rb") as file:
            data = file.read(SIZE_MAX + 1)
        if len(data) > SIZE_MAX:
            raise TopologyError(f"{path} has more than {SIZE_MAX >> 20} MiB")
        graph = READERS[path.suffix.lower()](data)
        return _native.Topology.of_links(str(path), graph.endpoints, graph.switches, graph.links)
    except OSError as error:
        raise TopologyError(f"cannot read the fabric {path}: {error.strerror}") from error
    except RecursionError as error:
        raise TopologyError(f"cannot make a fabric of {path}: it is nested too deep") from error
    except (ValueError, OverflowError, TypeError) as error:
        raise TopologyError(f"cannot make a fabric of {path}: {error}") from error


@dataclasses.dataclass
class _Graph:
    endpoints: int
    switches: int
    links: list[Link]

    def join(self, one: int, other: int, bytes_per_s: float, latency_ns: int) -> None:
        """Adds a bidirectional link, as two directed ones."""
        if len(self.links) > LINKS_MAX:
            raise ValueError(f"more than {LINKS_MAX} links")
        rate = 8 * bytes_per_s
        self.links += [(one, other, rate, latency_ns), (other, one, rate, latency_ns)]


def _number(found: object, what: str, most: float = 1e15) -> float:
    if isinstance(found, (int, float)) and not isinstance(found, bool) and 0 <= found <= most:
        return float(found)
    shown = reprlib.repr(found)
    raise ValueError(f"{what} is {shown}; expected a number from 0 to {most:g}")


def _whole(found: object, what: str, most: int) -> int:
    number = _number(found, what, most)
    if number != int(number):
        raise ValueError(f"{what} is {number}; expected a whole number")
    return int(number)


def _read_graph(text: bytes) -> _Graph:
    found = json.loads(text)
    if not isinstance(found, dict) or not isinstance(found.get("links"), list):
        raise ValueError('expected {"endpoints": ..., "links": [...]}')
    most = 1 << 22
    endpoints = _whole(found.get("endpoints"), "the number of endpoints", most)
    switches = _whole(found.get("switches", 0), "the number of switches", most)
    graph = _Graph(endpoints, switches, [])
    for number, link in enumerate(found["links"]):
        if not isinstance(link, dict) or not set(link) <= LINK_KEYS:
            shown = reprlib.repr(link)
            raise ValueError(f"link {number} is {shown}; expected {', '.join(sorted(LINK_KEYS))}")
        both = link.get("both", True)
        if not isinstance(both, bool):
            raise ValueError(f"'both' of link {number} is {both!r}; expected true or false")
        ends = [_whole(link.get(end), f"{end!r} of link {number}", most) for end in ("from", "to")]
        rate = _number(link.get("gbit_s"), f"'gbit_s' of link {number}", 1e6)
        latency = _whole(
            link.get("latency_ns", 241), f"'latency_ns' of link {number}", LATENCY_MAX_NS
        )
        graph.join(ends[0], ends[1], rate * 1e9 / 8, latency)
        if not both:
            graph.links.pop()
    return graph


def _read_astra(text: bytes) -> _Graph:
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    keys = ("topology", "npus_count", "bandwidth", "latency")
    if not isinstance(found, dict) or not all(isinstance(found.get(key), list) for key in keys):
        raise ValueError(f"expected lists {', '.join(keys)}")
    if len({len(found[key]) for key in keys}) != 1:
        raise ValueError(
            f"{', '.join(keys)} differ in length; expected an entry for each dimension"
        )
    extents = [_whole(count, "npus_count", 1 << 20) for count in found["npus_count"]]
    endpoints = math.prod(extents)
    if not 0 < endpoints <= 1 << 20:
        raise ValueError(f"{endpoints} NPUs; expected 1 to {1 << 20}")
    rates = [_number(rate, "bandwidth", 1e6) * ASTRA_GIGABYTE for rate in found["bandwidth"]]
    latencies = [_whole(latency, "latency", LATENCY_MAX_NS) for latency in found["latency"]]
    per_chip = {"Ring": 1.0, "Switch": 1.0}
    kinds = [str(kind)[:40] for kind in found["topology"]]
    cables = sum(
        endpoints * per_chip.get(kind, (extent - 1) / 2)
        for kind, extent in zip(kinds, extents, strict=True)
    )
    if 2 * cables > LINKS_MAX:
        raise ValueError(f"{2 * cables:,.0f} links; expected at most {LINKS_MAX:,}")
    graph = _Graph(endpoints, 0, [])
    stride = 1
    for kind, extent, rate, latency in zip(kinds, extents, rates, latencies, strict=True):
        for base in range(endpoints):
            if base // stride % extent == 0:
                members = [base + stride * member for member in range(extent)]
                _join_dimension(graph, kind, members, rate, latency)
        stride *= extent
    return graph


def _join_dimension(
    graph: _Graph, kind: str, members: list[int], rate: float, latency: int
) -> None:
    match kind:
        case "Ring":
            pairs = list(itertools.pairwise(members))
            pairs += [(members[-1], members[0])] * (len(members) > 2)
        case "FullyConnected":
            pairs = list(itertools.combinations(members, 2))
        case "Switch":
            switch = graph.endpoints + graph.switches
            graph.switches += 1
            pairs = [(member, switch) for member in members]
        case _:
            raise ValueError(f"topology {kind!r}; expected Ring, FullyConnected or Switch")
    for one, other in pairs:
        graph.join(one, other, rate, latency)


def _read_nccl(text: bytes) -> _Graph:
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise ValueError(str(error)) from error
    if root.tag != "system":
        raise ValueError(f"expected <system>, got <{root.tag}>")
    return _Nccl(root).graph


class _Nccl:
    """Reads an NCCL topology: GPUs are endpoints; sockets, PCI, NICs and NVSwitch switches."""

    def __init__(self, root: ElementTree.Element) -> None:
        gpus = list(root.iter("gpu"))
        self.graph = _Graph(len(gpus), 0, [])
        self._gpus = {id(gpu): number for number, gpu in enumerate(gpus)}
        self._by_bus: dict[str, int] = {}
        self._nvswitch: int | None = None
        self._outside: int | None = None
        sockets = [self._socket(cpu) for cpu in root.iter("cpu")]
        for one, other in itertools.combinations(sockets, 2):
            self.graph.join(one, other, SOCKET_BYTES_PER_S, LOCAL_NS)
        for gpu in gpus:
            self._nvlinks(gpu)

    def _switch(self) -> int:
        self.graph.switches += 1
        return self.graph.endpoints + self.graph.switches - 1

    def _socket(self, cpu: ElementTree.Element) -> int:
        vertex = self._switch()
        for device in cpu.findall("pci"):
            self._pci(device, vertex)
        for card in cpu.findall("nic"):
            self._card(card, vertex, math.inf)
        return vertex

    def _pci(self, device: ElementTree.Element, above: int) -> None:
        rate = _pci_bytes_per_s(device)
        bus = device.get("busid", "")
        gpu = device.find("gpu")
        if gpu is not None:
            vertex = self._gpus[id(gpu)]
            self._by_bus[bus] = vertex
            self.graph.join(vertex, above, rate, LOCAL_NS)
            return
        if device.find("nic") is None and device.find("pci") is None:
            return
        vertex = self._switch()
        self._by_bus[bus] = vertex
        self.graph.join(vertex, above, rate, LOCAL_NS)
        for below in device.findall("pci"):
            self._pci(below, vertex)
        for card in device.findall("nic"):
            self._card(card, vertex, rate)

    def _card(self, card: ElementTree.Element, above: int, most: float) -> None:
        for port in card.findall("net"):
            speed = _attribute(port, "speed", 10_000.0) * 1e6 / 8
            if self._outside is None:
                self._outside = self._switch()
            self.graph.join(above, self._outside, min(speed, most), LOCAL_NS)

    def _nvlinks(self, gpu: ElementTree.Element) -> None:
        vertex = self._gpus[id(gpu)]
        capability = int(_attribute(gpu, "sm", 80.0))
        known = max((one for one in NVLINK_BYTES_PER_S if one <= capability), default=60)
        for nvlink in gpu.findall("nvlink"):
            count = int(_attribute(nvlink, "count", 1.0))
            if not 0 < count <= 64:
                raise ValueError(f"an <nvlink> of count {count}; expected 1 to 64")
            rate = count * NVLINK_BYTES_PER_S[known]
            if nvlink.get("tclass", "").startswith("0x0680"):
                if self._nvswitch is None:
                    self._nvswitch = self._switch()
                self.graph.join(vertex, self._nvswitch, rate, LOCAL_NS)
                continue
            target = nvlink.get("target", "")
            if target not in self._by_bus:
                raise ValueError(f"an <nvlink> to {target!r}, which is no bus of a GPU")
            other = self._by_bus[target]
            # Both ends list the link; it is added once, from the GPU with the lower number.
            if vertex < other:
                self.graph.join(vertex, other, rate, LOCAL_NS)


def _attribute(element: ElementTree.Element, name: str, default: float) -> float:
    found = element.get(name)
    if found is None:
        return default
    try:
        return _number(float(found), name)
    except ValueError as error:
        raise ValueError(f"{name} of <{element.tag}> is {found!r}; expected a number") from error


def _pci_bytes_per_s(device: ElementTree.Element) -> float:
    speed = device.get("link_speed", "").split()
    try:
        transfers = float(speed[0]) if speed else 16.0
    except ValueError:
        raise ValueError(f"link_speed is {speed[0]!r}; expected such as '16.0 GT/s PCIe'") from None
    known = [rate for rate in PCI_GIGATRANSFERS_BYTES if rate <= transfers + 0.1]
    lane = PCI_GIGATRANSFERS_BYTES[max(known, default=2.5)]
    return lane * max(1.0, _attribute(device, "link_width", 16.0))


READERS: dict[str, Callable[[bytes], _Graph]] = {
    ".json": _read_graph,
    ".xml": _read_nccl,
    ".yml": _read_astra,
    ".yaml": _read_astra,
}
"""Readers of networks, by suffix."""
