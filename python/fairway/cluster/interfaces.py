"""The network interfaces of this machine: their addresses and rates."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Interface", "interfaces", "reachable_addresses"]

SIOCGIFADDR = 0x8915
"""``SIOCGIFADDR`` in <linux/sockios.h>: the IPv4 address of an interface."""
NAME_BYTES = 16
"""``IFNAMSIZ`` in <linux/if.h>."""
SYSTEM = Path("/sys/class/net")
ADDRESSES_V6 = Path("/proc/net/if_inet6")


@dataclass(frozen=True)
class Interface:
    """A network interface.

    Attributes:
        name: such as ``eth0``.
        addresses: numeric, those of IPv4 first.
        rate_bps: bits per second in each direction; None if its driver does not say.
    """

    name: str
    addresses: tuple[str, ...]
    rate_bps: float | None


def interfaces() -> list[Interface]:
    """Returns the interfaces that have addresses, in the kernel's order."""
    found = []
    for _, name in socket.if_nameindex():
        if addresses := (*_addresses_v4(name), *_addresses_v6(name)):
            found.append(Interface(name, addresses, _rate(name)))
    return found


def reachable_addresses() -> list[str]:
    """Returns the addresses by which other machines may reach this one; loopback if there is none.

    Those of IPv4 come first; addresses that mean something on one link only are left out.
    """
    every = [address for interface in interfaces() for address in interface.addresses]
    wide = [address for address in map(ipaddress.ip_address, every) if not _is_near(address)]
    ordered = sorted(wide, key=lambda address: address.version)
    return [str(address) for address in ordered] or ["127.0.0.1"]


def _is_near(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    return address.is_loopback or address.is_link_local


def _addresses_v4(name: str) -> tuple[str, ...]:
    request = struct.pack("256s", name.encode()[: NAME_BYTES - 1])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket.fileno(), SIOCGIFADDR, request)
        except OSError:
            return ()
    return (socket.inet_ntoa(answer[20:24]),)


def _addresses_v6(name: str) -> tuple[str, ...]:
    try:
        rows = [line.split() for line in ADDRESSES_V6.read_text().splitlines()]
    except OSError:
        return ()  # the kernel has no IPv6
    digits = [row[0] for row in rows if len(row) == 6 and row[5] == name]
    return tuple(str(ipaddress.IPv6Address(int(text, 16))) for text in digits)


def _rate(name: str) -> float | None:
    with contextlib.suppress(OSError, ValueError):  # a device that is down, or virtual
        megabits = int((SYSTEM / name / "speed").read_text())
        if megabits > 0:
            return megabits * 1e6
    return None
