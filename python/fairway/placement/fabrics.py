"""Interconnects by name, with options that differ from the defaults behind commas.

==========================  =======================================================================
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
==========================  =======================================================================

All take ``latency=1us``, and faults: ``weak=3:0.5+7:0.9``, degraded devices with the fraction of
link or laser bandwidth that is left; ``weak-servers`` likewise; ``cut=5``, a fibre cut of a ring
behind a device, from which devices are then counted; ``failed-switches=1``. All copies of a model
are as slow as the slowest (straggler). Source of the defaults: SiP-ML §4.1; the latency is assumed.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable

from fairway import _native
from fairway.errors import PlacementError
from fairway.settings import parse_duration, parse_rate

__all__ = ["INTERCONNECTS", "read_interconnect"]

PACKET_NETWORKS = ("dragonfly", "torus", "ring", "switch", "fattree", "cluster")
"""Networks of :mod:`fairway.fabrics`, by name."""
SHAPE = re.compile(r"([a-z-]+):(\d{1,6})(?:x(\d{1,6}))?")


def read_interconnect(text: str) -> _native.Interconnect:
    """Makes an interconnect from a name such as ``sip-ring:1024,wavelengths=320``.

    Raises:
        PlacementError: the interconnect is unknown, or one of its options is invalid.
    """
    name, *given = text.split(",")
    shape = SHAPE.fullmatch(name)
    if (
        shape is None
        or shape[1] not in INTERCONNECTS
        or (shape[3] is None) == (shape[1] == "sip-rings")
    ):
        raise PlacementError(_no_interconnect(name))
    options = _Options(shape[1], given)
    try:
        made = INTERCONNECTS[shape[1]](int(shape[2]), int(shape[3] or 1), options)
        made = _broken(made, options)
    except (ValueError, OverflowError) as error:
        raise PlacementError(f"{reprlib.repr(text)} cannot be: {error}") from None
    options.check()
    return made


def _no_interconnect(name: str) -> str:
    """Explains why a name is unknown, and suggests what to try."""
    kind, colon, _ = name.partition(":")
    shown = f"there is no interconnect {reprlib.repr(name)}"
    if kind in INTERCONNECTS and not colon:
        example = "8x8" if kind == "sip-rings" else "64"
        return f"{shown} without a size; give a size, as in {kind}:{example}"
    if kind in PACKET_NETWORKS:
        shown += ": it is a packet network, which `fairway fabric`, `route` and `simulate` take"
    return (
        f"{shown}; there are elect-flat:DEVICES, elect-cluster:DEVICES, sip-ring:DEVICES, "
        "sip-rings:ROWSxCOLUMNS and sip-ocs:DEVICES"
    )


class _Options:
    """The options of an interconnect; any that is never queried is an error."""

    def __init__(self, name: str, given: list[str]) -> None:
        self._name = name
        self.is_of_rings = name == "sip-rings"
        self._known: dict[str, None] = {}
        pairs = [one.strip().partition("=") for one in given]
        self._values = {key: value for key, _, value in pairs}

    def _of(self, key: str, usual: str) -> str:
        self._known[key] = None
        return self._values.get(key, usual)

    def has(self, key: str) -> bool:
        self._known[key] = None
        return key in self._values

    def rate(self, key: str, usual: str) -> float:
        return parse_rate(f"{key} of {self._name}", self._of(key, usual))

    def time_ns(self, key: str, usual: str) -> int:
        return parse_duration(f"{key} of {self._name}", self._of(key, usual))

    def count(self, key: str, usual: int) -> int:
        found = self._of(key, str(usual))
        if not re.fullmatch(r"\d{1,9}", found):
            raise PlacementError(
                f"{key} of {self._name} is {reprlib.repr(found)}; expected a count"
            )
        return int(found)

    def number(self, key: str, usual: float) -> float:
        found = self._of(key, str(usual))
        try:
            return float(found)
        except ValueError:
            raise PlacementError(
                f"{key} of {self._name} is {reprlib.repr(found)}; expected a number"
            ) from None

    def parts(self, key: str) -> list[tuple[int, float]]:
        """Parses numbers with the remaining fraction of each, such as ``3:0.5+7:0.9``."""
        found = self._of(key, "")
        pairs = [one.partition(":") for one in found.split("+")] if found else []
        try:
            return [(int(number), float(part)) for number, _, part in pairs]
        except ValueError:
            raise PlacementError(
                f"{key} of {self._name} is {reprlib.repr(found)}; expected what is weak and the "
                "part that is left of it, such as 3:0.5+7:0.9"
            ) from None

    def check(self) -> None:
        for key in self._values:
            if key not in self._known:
                names = ", ".join(self._known)
                raise PlacementError(f"{self._name} has no {reprlib.repr(key)}; there are {names}")


def _broken(made: _native.Interconnect, options: _Options) -> _native.Interconnect:
    """Returns the interconnect with its faults."""
    is_cut = options.has("cut")
    first = (options.count("cut", 0) + 1) % made.devices if is_cut else 0
    # Devices are renumbered from the cut; its position makes no other difference.
    weak = [
        ((number - first) % made.devices if number < made.devices else number, part)
        for number, part in options.parts("weak")
    ]
    servers = options.parts("weak-servers")
    if not (weak or servers or is_cut):
        return made
    return made.with_faults(weak, servers, is_cut)


def _flat(devices: int, _: int, options: _Options) -> _native.Interconnect:
    rate, latency = options.rate("rate", "8Tbit/s"), options.time_ns("latency", "1us")
    return _native.Interconnect.flat(devices, rate, latency)


def _cluster(devices: int, _: int, options: _Options) -> _native.Interconnect:
    rate, latency = options.rate("rate", "8Tbit/s"), options.time_ns("latency", "1us")
    per_server = options.count("per-server", min(8, devices))
    server = options.rate("server", "400Gbit/s")
    oversubscription = options.number("oversubscription", 1.0)
    return _native.Interconnect.cluster(
        devices, rate, latency, per_server, server, oversubscription
    )


def _ring(first: int, second: int, options: _Options) -> _native.Interconnect:
    devices = first * second
    wavelengths = options.count("wavelengths", 320)
    rate = wavelengths * options.rate("wavelength", "25Gbit/s")
    latency = options.time_ns("latency", "1us")
    reach = options.count("reach", min(16, max(1, devices - 1)))
    every, delay = options.time_ns("every", "100us"), options.time_ns("delay", "25us")
    columns = second if options.is_of_rings else None
    return _native.Interconnect.ring(
        devices, rate, latency, (wavelengths, reach, every, delay), columns
    )


def _switches(devices: int, _: int, options: _Options) -> _native.Interconnect:
    rate, latency = options.rate("rate", "8Tbit/s"), options.time_ns("latency", "1us")
    every = options.time_ns("every", "10ms") if options.has("every") else None
    delay = options.time_ns("delay", "30ms")
    switches, failed = options.count("switches", 16), options.count("failed-switches", 0)
    if failed >= switches:
        raise PlacementError(f"{failed} of {switches} switches failed; expected one that is left")
    rate *= (switches - failed) / switches
    clos = None
    oversubscription = options.number("oversubscription", 1.0)
    if options.has("leaf"):
        clos = options.count("leaf", 0), oversubscription
    elif options.has("oversubscription"):
        raise PlacementError("oversubscription of sip-ocs is that of a leaf; expected leaf=DEVICES")
    return _native.Interconnect.circuits(
        devices, rate, latency, switches - failed, every, delay, clos
    )


INTERCONNECTS: dict[str, Callable[[int, int, _Options], _native.Interconnect]] = {
    "elect-flat": _flat,
    "elect-cluster": _cluster,
    "sip-ring": _ring,
    "sip-rings": _ring,
    "sip-ocs": _switches,
}
"""Factories, by name."""
