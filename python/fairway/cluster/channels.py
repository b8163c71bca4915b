"""The channels of hosts on other machines: networks on which each machine has an address.

Each such network is a path of its own between any two machines, so it is a channel. Which they are
is agreed on once, when the first machines are there; machines that come later have to be on them.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fairway.cluster.agents import AgentHello
from fairway.cluster.interfaces import Address
from fairway.quantities import Network, parse_networks

__all__ = ["ChannelNetworks"]

UNKNOWN_BPS = 10e9
"""Rate of interfaces whose drivers do not say it, as those of many virtual machines. Assumed: only
how rates compare matters much."""


@dataclass(frozen=True)
class _Found:
    """An address of a machine, and the rate of its interface if that is known."""

    machine: tuple[str, str, int]
    interface: str
    address: Address
    rate_bps: float | None


class ChannelNetworks:
    """The networks that are channels.

    Args:
        wanted: the setting ``channels``.

    Raises:
        ConfigError: it is malformed.
    """

    def __init__(self, wanted: str) -> None:
        self._said = parse_networks(wanted)
        self._rates: dict[Network, float] | None = {} if not wanted else None

    @property
    def are_agreed(self) -> bool:
        """Whether it is known which they are."""
        return self._rates is not None

    def agree(self, machines: Sequence[AgentHello]) -> str:
        """Chooses the networks; with ``auto`` those on which all machines have addresses.

        Returns:
            A sentence on what was chosen.
        """
        chosen = self._said or dict.fromkeys(_shared(machines))
        self._rates = {}
        for network, said in chosen.items():
            known = [one.rate_bps for one in _on(network, machines) if one.rate_bps is not None]
            self._rates[network] = said or min(known, default=UNKNOWN_BPS)
        if not self._rates:
            return "channels: the machines have no network in common; each host uses one address"
        parts = [f"{network} ({rate / 1e9:g} Gbit/s)" for network, rate in self._rates.items()]
        return f"channels: {', '.join(parts)}"

    def missing(self, machine: AgentHello) -> str | None:
        """Returns why a machine does not fit, and what to do; None if it does."""
        for network in self._rates or self._said:
            if not _on(network, [machine]):
                return (
                    f"it has no address on {network}, which is a channel of this cluster; connect "
                    "it, or leave that network out of `channels`"
                )
        return None

    def of(self, machine: AgentHello) -> tuple[tuple[str, float], ...]:
        """Returns address and rate (bits per second) of each channel of a machine."""
        return tuple(
            (str(_on(network, [machine])[0].address.ip), rate)
            for network, rate in (self._rates or {}).items()
        )


def _addresses(machines: Iterable[AgentHello]) -> list[_Found]:
    return [
        _Found(
            (machine.machine, machine.kernel, machine.network),
            interface.name,
            ipaddress.ip_interface(address),
            interface.rate_bps,
        )
        for machine in machines
        for interface in machine.interfaces
        for address in interface.addresses
    ]


def _on(network: Network, machines: Iterable[AgentHello]) -> list[_Found]:
    return [one for one in _addresses(machines) if one.address.ip in network]


def _shared(machines: Sequence[AgentHello]) -> list[Network]:
    """Returns the networks on which each machine has an address that no other one has.

    A container bridge has one network everywhere, with the same address on all machines. Of two
    networks on one interface, such as those of IPv4 and of IPv6, the second is no other path.
    """
    shared: list[Network] = []
    taken: set[tuple[object, str]] = set()
    networks = {found.address.network for found in _addresses(machines)}
    for network in sorted(networks, key=lambda one: (one.version, str(one))):
        on = [_on(network, [machine]) for machine in machines]
        if network.num_addresses == 1 or not all(on):
            continue
        first = [found[0] for found in on]
        owners = {(found.address.ip, found.machine) for found in first}
        used = {(found.machine, found.interface) for found in first}
        if len({address for address, _ in owners}) == len(owners) and not used & taken:
            shared.append(network)
            taken |= used
    return shared
