"""Topologies by name or from a file: what every ``--fabric`` takes.

A name is ``KIND:SIZE``, with options behind commas that differ from the defaults.

==========================  =======================================================================
``dragonfly:264``           packet networks, whose links have ``rate=100Gbit/s`` and
``torus:8x8``               ``latency=241ns``: chips in nodes and groups, a torus, a ring with the
``ring:8``, ``ring:8x3``    given number of cables between neighbours, one switch, a fat tree of
``switch:8``                switches with that many ports, and nodes of chips, ``between=100Gbit/s``
``fattree:8``
``cluster:4x8``
``elect-flat:1024``         an ideal electrical switch (never congested); ``rate=8Tbit/s`` a device
``elect-cluster:1024``      servers, ``per-server=8`` devices at ``rate=8Tbit/s`` each, and between
                            them ``server=400Gbit/s``, ``oversubscription=1``
``sip-ring:1024``           ``wavelengths=320`` of ``wavelength=25Gbit/s`` on a ring of fibre, which
                            reach ``reach=16`` devices; reconfigured ``every=100us``, and dark for
                            ``delay=25us`` each time
``sip-rings:32x32``         the same, as rings of rows and rings of columns
``sip-ocs:1024``            ``switches=16`` circuit switches, ``rate=8Tbit/s`` of a device over all
                            of them; configured once, or ``every=10ms`` with ``delay=30ms``; single
                            switches, or Clos networks with ``leaf=32`` devices at a leaf and
                            ``oversubscription=1`` above
``graph.json``              a file: ``{"endpoints": 3, "switches": 0, "links": [{"from": 0, "to": 1,
                            "gbit_s": 100, "latency_ns": 241}]}``
``topology.xml``            a file: what NCCL writes to ``NCCL_TOPO_DUMP_FILE``
``network.yml``             a file: ASTRA-sim's analytical network
==========================  =======================================================================

Electrical and optical interconnects take ``latency=1us``, and faults: ``weak=3:0.5+7:0.9``,
degraded devices with the fraction of link or laser bandwidth that is left; ``weak-servers``
likewise; ``cut=5``, a fibre cut of a ring behind a device, from which devices are then counted;
``failed-switches=1``. All copies of a model are as slow as the slowest (straggler). Source of the
defaults: the multi-TSP system §2.3 and Table 2; SiP-ML §4.1, the latency is assumed.
"""

from __future__ import annotations

import os
from pathlib import Path

from fairway import _native
from fairway.errors import TopologyError
from fairway.formats.networks import READERS, read_network

__all__ = ["describe", "read_routed", "read_topology"]


def read_topology(text: str) -> _native.Topology:
    """Returns the topology of a name such as ``dragonfly:264``, or of a file.

    Raises:
        TopologyError: there is no such topology, or the file describes none.
    """
    if not text:
        raise TopologyError("a fabric has no name; expected one such as dragonfly:264, or a file")
    path = Path(text)
    if path.suffix.lower() in READERS:
        return read_network(path)
    suffixes = ", ".join(READERS)
    name = text.partition(",")[0]
    if os.sep in name or (path.suffix and ":" not in name) or path.exists():
        found = "it is there, but of another kind" if path.exists() else "no such file"
        if path.is_dir():
            found = "it is a folder"
        raise TopologyError(
            f"cannot read a fabric from {text}: {found}; expected a file {suffixes}, or a name "
            "such as dragonfly:264"
        )
    try:
        return _native.Topology.parse(text)
    except ValueError as error:
        if str(error).startswith("cannot read a fabric") and "without a size" not in str(error):
            raise TopologyError(f"{error}; or a file {suffixes}") from None
        raise TopologyError(str(error)) from None


def read_routed(text: str) -> _native.Fabric:
    """Returns the links of a packet network, by name or of a file.

    Raises:
        TopologyError: there is no such topology, or it has no links.
    """
    topology = read_topology(text)
    try:
        return topology.fabric
    except ValueError as error:
        raise TopologyError(str(error)) from None


def describe(text: str) -> dict[str, int | float]:
    """Returns properties of a topology, in display order.

    Raises:
        TopologyError: there is no such topology, or the file describes none.
    """
    topology = read_topology(text)
    if not topology.is_routed:
        interconnect = topology.interconnect
        return {
            "devices": topology.devices,
            "GB/s of a device, each way": interconnect.bits_per_s / 8e9,
            "latency, ns": interconnect.latency_ns,
        }
    fabric = topology.fabric
    found: dict[str, int | float] = {"chips": fabric.endpoints}
    if fabric.vertices > fabric.endpoints:
        found["switches"] = fabric.vertices - fabric.endpoints
    found["links, each way"] = len(fabric.links())
    found["hops between chips at most"] = fabric.diameter()
    found["GB/s between halves, both ways"] = fabric.bisection_bits_per_s() / 8e9
    uniform = fabric.uniform_bits_per_s()
    if uniform is not None:
        found["GB/s of a chip, all to all"] = uniform / 8e9
        kinds = ("in nodes", "in racks", "between racks")
        found |= {f"cables {kind}": n for kind, n in zip(kinds, fabric.cables(), strict=True)}
    if fabric.turns() > 1:
        found["parts that are alike"] = fabric.turns()
    return found
