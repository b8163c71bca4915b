"""Sizes, rates, times and networks as people write them."""

from __future__ import annotations

import ipaddress
import re
import reprlib

from fairway.errors import ConfigError

__all__ = ["AUTO", "Network", "parse_duration", "parse_networks", "parse_rate", "parse_size"]

SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]i?B|B)")
SIZE_MAX = 2.0**62
"""Largest size, in bytes."""
UNITS = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)},
}
RATE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]?)bit/s")
RATES_BPS = (1e6, 1e15)
DURATION = re.compile(r"(\d{1,12}(?:\.\d{1,9})?)(ns|us|ms|s)")
UNITS_NS = {"ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9}
PREFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
AUTO = "auto"
NETWORKS_FORM = "'auto', or networks such as '10.1.0.0/16=100Gbit/s,10.2.0.0/16'"


def parse_size(name: str, text: str) -> int:
    """Returns the bytes of a size such as ``"512MiB"`` or ``"80GB"``.

    Raises:
        ConfigError: it is malformed; the text has ``name``, the value and what was expected.
    """
    found = SIZE.fullmatch(text)
    size = float(found[1]) * UNITS[found[2]] if found else 0.0
    if not 1 <= size <= SIZE_MAX:
        shown = reprlib.repr(text)
        raise ConfigError(f"{name} is {shown}; expected a size like '512MiB' or '80GB'")
    return int(size)


def parse_rate(name: str, text: object) -> float:
    """Returns the bits per second of a rate such as ``"10Gbit/s"``.

    Raises:
        ConfigError: it is malformed; the text has ``name``, the value and what was expected.
    """
    found = RATE.fullmatch(text) if isinstance(text, str) else None
    rate = float(found[1]) * PREFIXES[found[2]] if found else 0.0
    if not RATES_BPS[0] <= rate <= RATES_BPS[1]:
        shown = reprlib.repr(text)
        raise ConfigError(f"{name} is {shown}; expected 1Mbit/s to 1000Tbit/s, like '10Gbit/s'")
    return rate


def parse_duration(name: str, text: str) -> int:
    """Returns the nanoseconds of a duration such as ``"50us"``, rounded.

    Raises:
        ConfigError: it is malformed; the text has ``name``, the value and what was expected.
    """
    found = DURATION.fullmatch(text)
    if found is None:
        shown = reprlib.repr(text)
        raise ConfigError(f"{name} is {shown}; expected a time such as '50us'")
    return round(float(found[1]) * UNITS_NS[found[2]])


def parse_networks(text: str) -> dict[Network, float | None]:
    """Reads networks with commas between them, each with its rate behind ``=`` if that is given.

    Neither an empty text nor ``auto`` names one.

    >>> parse_networks("10.1.0.0/16=100Gbit/s")
    {IPv4Network('10.1.0.0/16'): 100000000000.0}

    Raises:
        ConfigError: a network or rate is malformed, or a network is part of another.
    """
    given: dict[Network, float | None] = {}
    if text in ("", AUTO):
        return given
    for part in text.split(","):
        name, _, rate = part.partition("=")
        try:
            network = ipaddress.ip_network(name.strip())
        except ValueError as error:
            raise ConfigError(f"channels is {text!r}: {error}; expected {NETWORKS_FORM}") from None
        if any(network.version == one.version and network.overlaps(one) for one in given):
            raise ConfigError(f"channels is {text!r}: {network} is part of another of its networks")
        given[network] = parse_rate(f"the rate of {network}", rate.strip()) if rate else None
    return given
