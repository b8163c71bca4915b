"""Islands in network namespaces of their own communicate over the network alone."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import wires
from conftest import client, ip, received_bytes, said, until

from fairway.cluster.supervisor import Run
from fairway.communication import calibration
from fairway.communication.ranks import Ranks
from fairway.errors import ConfigError, StartError
from fairway.settings import ChannelSettings, IslandSettings, Settings


def sent_bytes(name: str) -> tuple[int, int]:
    """Bytes that were sent out of a namespace, and between its processes."""
    return received_bytes(f"{name}e0"), received_bytes("-n", name, "lo")


@pytest.mark.parametrize("data_plane", ["tcp", "both"])
def test_islands_in_namespaces_send_to_each_other_over_the_network(namespaces, data_plane):
    """Two hosts each: XLA's collectives stay inside; transfers between islands are on the wire.

    Inside an island transfers are on the wire too, unless shared memory is enabled as well.
    """
    islands = tuple(
        IslandSettings(2, 1, ("ip", "netns", "exec", name), address)
        for name, address in namespaces.items()
    )
    with Run(Settings(islands, data_plane=data_plane)) as run:
        before = [sent_bytes(name) for name in namespaces]
        ended = client(
            run,
            """
meshes = [Mesh(np.array(jax.devices()[at:at + 2]), ("x",)) for at in (0, 2)]
x = np.arange(1 << 21, dtype=np.float32)
near = jax.device_put(x, NamedSharding(meshes[0], P("x")))
far = jax.device_put(near, NamedSharding(meshes[1], P("x")))
total = jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(meshes[1], P()))(far)
beside = jax.device_put(jax.device_put(x, jax.devices()[0]), jax.devices()[1])
say("moved", same=bool((np.asarray(far) == x).all() and (np.asarray(beside) == x).all()),
    total=float(total))
""",
            120,
        )
        after = [sent_bytes(name) for name in namespaces]
    moved = said(ended.stdout, "moved")
    assert moved["same"]
    assert moved["total"] == pytest.approx(2**41, rel=1e-3)
    assert after[0][0] - before[0][0] >= 8 << 20  # what the first island sent to the second
    inside = after[0][1] - before[0][1]
    assert inside >= 8 << 20 if data_plane == "tcp" else inside < 4 << 20, inside


def test_namespaces_avoid_the_addresses_that_a_killed_run_has_left():
    """Two bridges with addresses in one subnet: packets to it would all leave by one of them."""
    if not wires.can_join():
        pytest.skip("namespaces need root, ip and tc")
    left, taken = f"fwl{os.getpid() % 100_000}", wires.free_subnets(1)[0]
    ip("link", "add", left, "type", "bridge")
    try:
        ip("addr", "add", f"{taken}.254/24", "dev", left)
        ip("link", "set", left, "up")
        with wires.joined(1, (None,)) as places:
            address = places[0].addresses[0].format(rank=0)
            with pytest.raises(ConnectionRefusedError):  # it is reached, and has no listener
                socket.create_connection((address, 9), timeout=5)
    finally:
        ip("link", "del", left)


def test_a_prefix_that_is_no_command_says_so():
    island = IslandSettings(1, 1, ("no-such-command",))
    with pytest.raises(StartError, match="cannot start host 0 with no-such-command: No such file"):
        Run(Settings((island,)))


def test_islands_that_cannot_be_reached_are_refused():
    with pytest.raises(ConfigError, match="a numeric address"):
        Settings((IslandSettings(1, 1, address="elsewhere"),))


def test_channels_that_share_a_link_are_found_out(namespaces):
    """Two addresses on one link: concurrent traffic on both takes twice as long."""
    islands = []
    for place, (name, address) in enumerate(namespaces.items(), 1):
        beside = f"{address.rpartition('.')[0]}.{place + 100}"
        ip("-n", name, "addr", "add", f"{beside}/24", "dev", "eth0")
        shape = ("tbf", "rate", "200mbit", "burst", "128kb", "limit", "4mb")
        inside = ["ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "eth0", "root", *shape]
        try:
            subprocess.run(inside, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"links cannot be shaped here: {error}")
        channels = tuple(ChannelSettings(one, "200Mbit/s") for one in (address, beside))
        islands.append(IslandSettings(1, 1, ("ip", "netns", "exec", name), address, channels))
    with Ranks(Settings(tuple(islands))) as ranks:
        found = calibration.fit(ranks.measure(), len(ranks))
    for number, cost in enumerate(found.costs):
        assert 150e6 < cost.rate_bps < 220e6, cost
        assert 0.6 < cost.overlap[1 - number] < 1.4, cost
        assert cost.overlap[number] == 0, cost


JOINED = """
import sys, time
sys.path.insert(0, sys.argv[1])
import wires
with wires.joined(1, (None,)) as places:
    print(places[0].name.replace("{rank}", "0"), flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGKILL])
def test_a_benchmark_that_is_ended_leaves_no_namespaces(namespaces, number):
    folder = Path(__file__).parents[1] / "benchmarks"
    with subprocess.Popen(
        [sys.executable, "-c", JOINED, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        name = process.stdout.readline().strip()
        assert name in ip("netns", "list")
        assert name.removesuffix("n10") in ip("link", "show")
        process.send_signal(number)
        process.wait(30)

    def is_gone():
        return name not in ip("netns", "list") and name[:-3] not in ip("link", "show")

    until(is_gone, 10, "its namespaces and links are gone")
