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
SIOCGIFFLAGS = 0x8913
"""In <linux/sockios.h>: the flags of an interface."""
IFF_UP, IFF_RUNNING = 0x1, 0x40
"""In <linux/if.h>: it is turned on, and its link is there."""
NAME_BYTES = 16
"""``IFNAMSIZ`` in <linux/if.h>."""
RTM_NEWADDR, RTM_GETADDR, NLM_F_REQUEST_DUMP = 20, 22, 0x301
IFA_ADDRESS, IFA_LOCAL = 1, 2
"""In <linux/rtnetlink.h>, <linux/netlink.h> and <linux/if_addr.h>: a question for addresses."""
ANSWER_S = 5.0
SYSTEM = Path("/sys/class/net")


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

    Loopback, interfaces without a link, and addresses that mean something on one link only are left
    out.
    """
    found = []
    addresses = _addresses()
    for number, name in socket.if_nameindex():
        every = sorted(addresses.get(number, ()), key=lambda address: address.version)
        wide = tuple(one for one in every if not (one.is_loopback or one.is_link_local))
        if wide and _has_link(name):
            found.append(Interface(name, wide, _rate(name)))
    return found


def reachable_addresses() -> list[str]:
    """Returns the addresses by which other machines may reach this one; loopback if there is none.

    Those of IPv4 come first.
    """
    every = [address for interface in interfaces() for address in interface.addresses]
    ordered = sorted(every, key=lambda address: address.version)
    return [str(address.ip) for address in ordered] or ["127.0.0.1"]


def _addresses() -> dict[int, list[Address]]:
    """Returns all addresses of this machine, by the number of their interface."""
    found: dict[int, list[Address]] = {}
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel:
        kernel.settimeout(ANSWER_S)
        kernel.sendall(struct.pack("=IHHII8x", 24, RTM_GETADDR, NLM_F_REQUEST_DUMP, 1, 0))
        while True:
            data = kernel.recv(1 << 18)
            while data:
                length, kind = struct.unpack_from("=IH", data)
                if kind != RTM_NEWADDR:  # the end, or an error
                    return found
                number, address = _address(data[16:length])
                if address is not None:
                    found.setdefault(number, []).append(address)
                data = data[(length + 3) & ~3 :]


def _address(message: bytes) -> tuple[int, Address | None]:
    """Returns the interface and the address of a message (``struct ifaddrmsg`` and attributes)."""
    family, prefix, number = struct.unpack_from("=BB2xI", message)
    at, values = 8, {}
    while at + 4 <= len(message):
        length, kind = struct.unpack_from("=HH", message, at)
        values[kind] = message[at + 4 : at + length]
        at += max(4, (length + 3) & ~3)
    # Of a point-to-point link the local one is this machine's.
    packed = values.get(IFA_LOCAL, values.get(IFA_ADDRESS))
    if family not in (socket.AF_INET, socket.AF_INET6) or packed is None:
        return number, None
    return number, ipaddress.ip_interface((packed, prefix))


def _has_link(name: str) -> bool:
    request = struct.pack("256s", name.encode()[: NAME_BYTES - 1])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket.fileno(), SIOCGIFFLAGS, request)
        except OSError:
            return False
    flags = int(struct.unpack_from("=H", answer, NAME_BYTES)[0])
    return flags & IFF_UP != 0 and flags & IFF_RUNNING != 0


def _rate(name: str) -> float | None:
    with contextlib.suppress(OSError, ValueError):  # a device that is down, or virtual
        megabits = int((SYSTEM / name / "speed").read_text())
        if megabits > 0:
            return megabits * 1e6
    return None
