"""Channels of hosts on other machines: networks that are found, or given."""

from __future__ import annotations

import contextlib
import ipaddress
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import msgspec
import pytest
import wires
from conftest import Background, ip, received_bytes, until
from test_joining import agents, joined, run_script

from fairway.cluster.agent import machine_interfaces
from fairway.cluster.agents import AgentHello, NetworkInterface, Versions
from fairway.cluster.channels import UNKNOWN_BPS, ChannelNetworks
from fairway.cluster.interfaces import Interface, interfaces
from fairway.cluster.supervisor import Run
from fairway.errors import ConfigError
from fairway.settings import Settings

MOVE = """
first, second = ([d for d in jax.devices() if d.island == i] for i in (0, 1))
x = jax.device_put(np.arange(1 << 22, dtype="f4"), first[0])
y = jax.device_put(x, second[0])
say("moved", same=bool((np.asarray(y) == np.arange(1 << 22, dtype="f4")).all()))
"""
BYTES = 4 << 22


@pytest.fixture(scope="module")
def machines() -> Iterator[list[wires.Place]]:
    """Two machines on two networks."""
    if not wires.can_join():
        pytest.skip("machines need root, ip and tc")
    with wires.joined(2, (None, None)) as places:
        yield places


def inside(places: Sequence[wires.Place]) -> list[list[str]]:
    """Returns prefixes of commands that run on machines."""
    naming = ("unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"')
    return [["ip", "netns", "exec", name, *naming, name] for name in names(places)]


def names(places: Sequence[wires.Place]) -> list[str]:
    return [place.name.format(rank=0) for place in places]


def subnets(places: Sequence[wires.Place]) -> list[str]:
    return [address.rpartition(".")[0] for address in places[0].addresses]


def received(places: Sequence[wires.Place]) -> list[list[int]]:
    """Returns the bytes that each machine has received on each network."""
    return [[received_bytes("-n", name, f"eth{n}") for n in (0, 1)] for name in names(places)]


def moved(run: Run) -> bool:
    return bool(run_script(run, MOVE, "moved")["same"])


@pytest.mark.parametrize("wanted", ["auto", "said"])
def test_transfers_are_striped_over_networks(
    machines: list[wires.Place], own_runtime: None, wanted: str
) -> None:
    first, second = subnets(machines)
    rates = f"{first}.0/24=1Gbit/s,{second}.0/24=3Gbit/s"
    run = joined("2x1x4", f"{first}.254", channels="auto" if wanted == "auto" else rates)
    with agents(run, *inside(machines)), run:
        before = received(machines)
        assert moved(run)
        grown = [
            [there - here for here, there in zip(*both, strict=True)]
            for both in zip(before, received(machines), strict=True)
        ]
        said = [record.text for record in run.logs.read(0)]
    # Whichever agent joined first has the first island; what a client uploads comes by one network.
    target = max(grown, key=lambda machine: machine[1])
    share = [part / sum(target) for part in target]
    wide = [0.5, 0.5] if wanted == "auto" else [0.25, 0.75]
    assert sum(target) > BYTES, "it went from one machine to the other"
    assert share == pytest.approx(wide, abs=0.1)
    chosen = [line for line in said if line.startswith("channels: ")]
    assert len(chosen) == 1
    assert f"{first}.0/24" in chosen[0]
    assert f"{second}.0/24" in chosen[0]


MOVES = """
import time
first, second = ([d for d in jax.devices() if d.island == i][0] for i in (0, 1))
x = np.arange(1 << 20, dtype="f4")
sent, wrong, longest = jax.device_put(x, first), 0, 0.0
say("ready", at=0)
end = time.monotonic() + 25
while time.monotonic() < end:
    began = time.monotonic()
    for there in (second, first):
        y = jax.device_put(jax.device_put(sent, there), first if there == second else second)
        wrong += not (np.asarray(y) == x).all()
    longest = max(longest, time.monotonic() - began)
say("ended", wrong=wrong, longest_s=longest)
"""


def test_a_network_that_goes_down_fails_no_transfer(
    machines: list[wires.Place], own_runtime: None
) -> None:
    first = subnets(machines)[0]
    link = machines[1].link(0, 1)

    def carried() -> list[int]:
        return [networks[1] for networks in received(machines)]

    def heard(run: Run, text: str) -> bool:
        return any(text in record.text for record in run.logs.read(0))

    run = joined("2x1x1", f"{first}.254", channels="auto")
    with agents(run, *inside(machines)), run, Background(run, MOVES) as moving:
        moving.hear("ready")
        time.sleep(1)
        ip("link", "set", link, "down")
        try:
            until(lambda: heard(run, "channel 2 does not reach host"), 12, "it is noticed")
            before = carried()
            time.sleep(2)
            up, down = (now - was for was, now in zip(before, carried(), strict=True))
            assert down == 0, "nothing comes by it"
            assert up < 4096, "the other end has no more than what a bridge sends by itself"
        finally:
            ip("link", "set", link, "up")
        until(lambda: heard(run, "channel 2 reaches host"), 10, "it is back")

        def both_carry() -> bool:
            return all(now - was > BYTES for was, now in zip(before, carried(), strict=True))

        until(both_carry, 10, "it carries transfers in both directions again")
        ended = moving.hear("ended", 60)
    assert ended["wrong"] == 0
    assert ended["longest_s"] < 12.0


@contextlib.contextmanager
def apart(machines: Sequence[wires.Place]) -> Iterator[None]:
    """Two machines do not reach each other: what they send has a wrong hardware address."""
    others = [
        (
            "-n",
            names(machines)[of],
            "neigh",
            machines[1 - of].addresses[n].format(rank=0),
            f"eth{n}",
        )
        for of in (0, 1)
        for n in (0, 1)
    ]
    for *where, address, device in others:
        wrong = ("lladdr", "02:00:00:00:00:99", "nud", "permanent")
        ip(*where, "replace", address, "dev", device, *wrong)
    try:
        yield
    finally:
        for *where, address, device in others:
            ip(*where, "del", address, "dev", device)


ACROSS = """
import time
first, second = ([d for d in jax.devices() if d.island == i][0] for i in (0, 1))
x = np.arange(1 << 12, dtype="f4")  # small enough that TCP takes it without its receiver

def moved(source, target):
    began, same, errors = time.monotonic(), 0, []
    for y in [jax.device_put(jax.device_put(x + n, source), target) - n for n in range(20)]:
        try:
            same += bool((np.asarray(y) == x).all())
        except jax.errors.JaxRuntimeError as error:
            errors.append(str(error))
    return {"same": same, "errors": errors, "waited_s": time.monotonic() - began}

while True:
    sys.stdin.readline()
    say("there", **moved(first, second))
    say("back", **moved(second, first))
    say("alone", same=bool((np.asarray(jax.device_put(x, second)) == x).all()))
"""


@pytest.fixture
def crossing(machines: list[wires.Place], own_runtime: None) -> Iterator[tuple[Run, Background]]:
    """A program that moves arrays between two machines, and has done so once."""
    run = joined("2x1x1", subnets(machines)[0] + ".254", channels="auto")
    with agents(run, *inside(machines)), run, Background(run, ACROSS) as moving:
        moving.tell("")
        assert moving.hear("alone")["same"]
        yield run, moving


def test_machines_that_do_not_reach_each_other_for_a_moment_lose_nothing(
    machines: list[wires.Place], crossing: tuple[Run, Background]
) -> None:
    _, moving = crossing
    with apart(machines):
        moving.tell("")
        time.sleep(8)
    there = moving.hear("there", 30)
    assert there["same"] == 20
    assert there["waited_s"] > 7, "they were apart"
    assert moving.hear("back")["same"] == 20


@pytest.mark.slow
def test_machines_that_no_longer_reach_each_other_fail_their_transfers_alone(
    machines: list[wires.Place], crossing: tuple[Run, Background]
) -> None:
    """Both reach the controller, by which the receiver hears of it: a minute, and attempts."""
    run, moving = crossing
    with apart(machines):
        moving.tell("")
        for way, receiver in (("there", 1), ("back", 0)):
            moved = moving.hear(way, 150)
            assert (moved["same"], len(moved["errors"])) == (0, 20)
            for error in moved["errors"]:
                assert f"UNAVAILABLE: sending to host {receiver} failed" in error
            assert 60 < moved["waited_s"] < 100, "all at the end of a minute"
        assert moving.hear("alone")["same"], "the controller reaches it"
    time.sleep(1.5)  # for a second, a failed attempt stands for others
    moving.tell("")
    assert moving.hear("there")["same"] == 20
    assert moving.hear("back")["same"] == 20
    assert [island["state"] for island in run.overview()["islands"]] == ["up", "up"]


def test_a_machine_that_lacks_a_network_is_refused(
    machines: list[wires.Place], own_runtime: None
) -> None:
    first = subnets(machines)[0]
    run = joined("2x1x1", f"{first}.254", channels=f"{first}.0/24,192.0.2.0/24")
    try:
        with agents(run, inside(machines)[0]) as (agent,):
            assert agent.wait(30) == 1
            assert agent.stderr is not None
            said = agent.stderr.read()
        assert "no address on 192.0.2.0/24" in said
        refused = "an agent on .* was refused: it has no address on 192.0.2.0/24"
        until(
            lambda: any("192.0.2.0/24" in record.text for record in run.logs.read(0)), 10, refused
        )
    finally:
        run.close()


def hello(machine: str, *interfaces: tuple[str, float | None], kernel: str = "-") -> AgentHello:
    """Returns an agent on a machine with interfaces of one address each."""
    described = tuple(
        NetworkInterface(f"eth{number}", (address,), rate)
        for number, (address, rate) in enumerate(interfaces)
    )
    versions = Versions("1", "3.11", "1")
    return AgentHello(machine, "10.0.0.1", 1, versions, interfaces=described, kernel=kernel)


def test_networks_with_one_address_everywhere_are_no_channels() -> None:
    """As bridges of container engines, pod networks with a part for each machine, and loopback."""
    machines = [
        hello("a", ("10.0.0.1/24", 1e9), ("172.17.0.1/16", None), ("10.244.1.1/24", None)),
        hello("b", ("10.0.0.2/24", 2e9), ("172.17.0.1/16", None), ("10.244.2.1/24", None)),
    ]
    networks = ChannelNetworks("auto")
    assert not networks.are_agreed
    assert networks.agree([*machines, machines[0]]) == "channels: 10.0.0.0/24 (1 Gbit/s)"
    assert networks.of(machines[1]) == (("10.0.0.2", 1e9),)
    assert networks.missing(hello("c", ("10.0.1.3/24", None))) is not None
    assert networks.missing(hello("c", ("10.0.0.3/24", None))) is None


def test_machines_with_one_name_are_told_apart() -> None:
    """As those of one image: the bridge is no channel, nor is a network that one of them lacks."""
    bridge = ("172.17.0.1/16", None)
    machines = [
        hello("localhost", ("10.0.0.1/24", 1e9), bridge, ("10.1.0.1/24", None), kernel="a"),
        hello("localhost", ("10.0.0.2/24", 1e9), bridge, kernel="b"),
    ]
    networks = ChannelNetworks("auto")
    assert networks.agree(machines) == "channels: 10.0.0.0/24 (1 Gbit/s)"
    assert [networks.of(machine)[0][0] for machine in machines] == ["10.0.0.1", "10.0.0.2"]


def test_networks_on_one_interface_are_one_channel() -> None:
    """IPv4 and IPv6 of one link, and networks that two machines believe to be of different size."""
    machines = [
        AgentHello(
            name,
            "10.0.0.1",
            1,
            Versions("1", "3.11", "1"),
            interfaces=(
                NetworkInterface("eth0", (f"10.0.0.{number}/{size}", f"fd00::{number}/64"), None),
                NetworkInterface("eth1", (f"fd01::{number}/64",), 1e9),
            ),
        )
        for name, number, size in (("a", 1, 24), ("b", 2, 16))
    ]
    said = ChannelNetworks("auto").agree(machines)
    assert said == "channels: 10.0.0.0/16 (10 Gbit/s), fd01::/64 (1 Gbit/s)"


def test_machines_without_a_common_network_have_no_channels() -> None:
    networks = ChannelNetworks("auto")
    said = networks.agree([hello("a", ("10.0.0.1/24", None)), hello("b", ("10.0.1.1/24", None))])
    assert "no network in common" in said
    assert networks.are_agreed
    assert networks.of(hello("a", ("10.0.0.1/24", None))) == ()


def test_rates_that_no_driver_says_are_assumed() -> None:
    networks = ChannelNetworks("10.0.0.0/16")
    networks.agree([hello("a", ("10.0.0.1/24", None))])
    assert networks.of(hello("b", ("10.0.7.1/24", 1e9))) == (("10.0.7.1", UNKNOWN_BPS),)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("all", "expected 'auto', or networks"),
        ("10.1.0.1/16", "has host bits set"),
        ("10.1.0.0/16,10.1.2.0/24", "is part of another"),
        ("10.1.0.0/16=fast", "the rate of 10.1.0.0/16"),
    ],
)
def test_networks_that_cannot_be_read_are_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Settings.parse("2x1x1", on="agents", data_plane="tcp", channels=text)


def test_hosts_of_this_machine_have_channels_of_their_islands() -> None:
    with pytest.raises(ConfigError, match="channels is 'auto'"):
        Settings.parse("2x1x1", channels="auto")


def test_interfaces_of_this_machine_have_networks(machines: list[wires.Place]) -> None:
    found = {str(address) for one in interfaces() for address in one.addresses}
    assert {f"{subnet}.254/24" for subnet in subnets(machines)} <= found
    assert not any(address.startswith("127.") for address in found)


SHOW = (
    "from fairway.cluster.interfaces import interfaces\n"
    "print(*(str(address) for one in interfaces() for address in one.addresses))"
)


def test_interfaces_have_all_of_their_addresses_and_a_link(machines: list[wires.Place]) -> None:
    name = names(machines)[0]

    def shown() -> list[str]:
        show = ["ip", "netns", "exec", name, sys.executable, "-c", SHOW]
        return subprocess.run(show, check=True, capture_output=True, text=True).stdout.split()

    ip("-n", name, "addr", "add", "198.51.100.7/24", "dev", "eth1")
    first, second = (place.rpartition(".")[0] for place in machines[0].addresses)
    found = shown()
    assert "198.51.100.7/24" in found
    assert any(address.startswith(f"{second}.") for address in found)
    ip("-n", name, "link", "set", "eth1", "down")
    try:
        [left] = [address for address in shown() if ":" not in address]
        assert left.startswith(f"{first}.")
    finally:
        ip("-n", name, "link", "set", "eth1", "up")
        ip("-n", name, "addr", "del", "198.51.100.7/24", "dev", "eth1")


def test_names_of_interfaces_may_have_any_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    address = ipaddress.ip_interface("10.0.0.1/24")
    found = [Interface("brücke", (address,), None)]
    monkeypatch.setattr("fairway.cluster.agent.interfaces", lambda: found)
    described = AgentHello(
        "a", "10.0.0.1", 1, Versions("1", "3.11", "1"), interfaces=machine_interfaces()
    )
    assert msgspec.json.decode(msgspec.json.encode(described), type=AgentHello) == described
