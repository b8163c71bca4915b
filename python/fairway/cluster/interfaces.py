"""The network interfaces of this machine: their addresses and rates."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Address", "Interface", "interfaces", "reachable_addresses"]

Address = ipaddress.IPv4Interface | ipaddress.IPv6Interface
"""An address, and the network that it is of."""
SIOCGIFADDR, SIOCGIFNETMASK = 0x8915, 0x891B
"""In <linux/sockios.h>: the IPv4 address of an interface, and the mask of its network."""
NAME_BYTES = 16
"""``IFNAMSIZ`` in <linux/if.h>."""
SYSTEM = Path("/sys/class/net")
ADDRESSES_V6 = Path("/proc/net/if_inet6")


@dataclass(frozen=True)
class Interface:
    """A network interface.

    Attributes:
        name: such as ``eth0``.
        addresses: those of IPv4 first.
        rate_bps: bits per second in each direction; None if its driver does not say.
    """

    name: str
    addresses: tuple[Address, ...]
    rate_bps: float | None


def interfaces() -> list[Interface]:
    """Returns the interfaces that other machines may reach, in the kernel's order.

    Loopback and addresses that mean something on one link only are left out.
    """
    found = []
    for _, name in socket.if_nameindex():
        every = (*_addresses_v4(name), *_addresses_v6(name))
        if wide := tuple(one for one in every if not (one.is_loopback or one.is_link_local)):
            found.append(Interface(name, wide, _rate(name)))
    return found


def reachable_addresses() -> list[str]:
    """Returns the addresses by which other machines may reach this one; loopback if there is none.

    Those of IPv4 come first.
    """
    every = [address for interface in interfaces() for address in interface.addresses]
    ordered = sorted(every, key=lambda address: address.version)
    return [str(address.ip) for address in ordered] or ["127.0.0.1"]


def _addresses_v4(name: str) -> tuple[Address, ...]:
    request = struct.pack("256s", name.encode()[: NAME_BYTES - 1])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            address, mask = (
                socket.inet_ntoa(fcntl.ioctl(any_socket.fileno(), what, request)[20:24])
                for what in (SIOCGIFADDR, SIOCGIFNETMASK)
            )
        except OSError:
            return ()
    return (ipaddress.IPv4Interface(f"{address}/{mask}"),)


def _addresses_v6(name: str) -> tuple[Address, ...]:
    try:
        rows = [line.split() for line in ADDRESSES_V6.read_text().splitlines()]
    except OSError:
        return ()  # the kernel has no IPv6
    found = [(int(row[0], 16), int(row[2], 16)) for row in rows if len(row) == 6 and row[5] == name]
    return tuple(ipaddress.IPv6Interface(one) for one in found)


def _rate(name: str) -> float | None:
    with contextlib.suppress(OSError, ValueError):  # a device that is down, or virtual
        megabits = int((SYSTEM / name / "speed").read_text())
        if megabits > 0:
            return megabits * 1e6
    return None
