"""Fabrics from files: graphs, NCCL's topologies, ASTRA-sim's networks."""

import contextlib
import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from fairway.analysis.topologies import read_routed
from fairway.cli import app
from fairway.errors import TopologyError
from fairway.routes import Transfer, route

GRAPH = {
    "endpoints": 3,
    "switches": 1,
    "links": [
        {"from": 0, "to": 3, "gbit_s": 100},
        {"from": 1, "to": 3, "gbit_s": 100, "latency_ns": 500},
        {"from": 2, "to": 3, "gbit_s": 10},
        {"from": 0, "to": 1, "gbit_s": 50, "both": False},
    ],
}

# Two GPUs with two NVLinks between them, each with four to an NVSwitch, and a NIC of 200 Gbit/s.
TOPOLOGY = """<system version="1">
  <cpu numaid="0" arch="x86_64">
    <pci busid="0000:00:00.0" link_speed="16.0 GT/s PCIe" link_width="16">
      <pci busid="0000:01:00.0" link_speed="16.0 GT/s PCIe" link_width="16">
        <gpu dev="0" sm="80" rank="0">
          <nvlink target="0000:02:00.0" count="2" tclass="0x030200"/>
          <nvlink target="0000:c0:00.0" count="4" tclass="0x068000"/>
        </gpu>
      </pci>
      <pci busid="0000:02:00.0" link_speed="16.0 GT/s PCIe" link_width="16">
        <gpu dev="1" sm="80" rank="1">
          <nvlink target="0000:01:00.0" count="2" tclass="0x030200"/>
          <nvlink target="0000:c0:00.0" count="4" tclass="0x068000"/>
        </gpu>
      </pci>
      <pci busid="0000:03:00.0" link_speed="16.0 GT/s PCIe" link_width="16">
        <nic><net name="mlx5_0" dev="0" speed="200000"/></nic>
      </pci>
    </pci>
  </cpu>
</system>
"""

NETWORK = "topology: [ Ring, Switch ]\nnpus_count: [ 4, 2 ]\nbandwidth: [ 50.0, 25.0 ]\n"
NETWORK += "latency: [ 500.0, 700 ]\n"


def written(tmp_path, name, text):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def test_a_graph_has_its_links(tmp_path):
    fabric = read_routed(written(tmp_path, "graph.json", json.dumps(GRAPH)))
    assert (fabric.endpoints, fabric.vertices) == (3, 4)
    assert len(fabric.links()) == 7, "one is only there and not back"
    assert (1, 3, 100e9, 500) in fabric.links()
    found = route(written(tmp_path, "again.json", json.dumps(GRAPH)), [Transfer(0, 2, 1 << 20)])
    assert found.ratio < 1.01, "the narrow link is full"


def test_a_topology_has_its_gpus_and_what_joins_them(tmp_path):
    fabric = read_routed(written(tmp_path, "topology.xml", TOPOLOGY))
    assert fabric.endpoints == 2
    between = [link for link in fabric.links() if link[:2] == (0, 1)]
    assert [link[2] for link in between] == [2 * 20e9 * 8]
    rates = sorted(link[2] / 8e9 for link in fabric.links() if link[0] == 0)
    assert rates == [32.0, 40.0, 80.0], "PCI, the other GPU, the switch"
    # Socket, two PCI switches, NVSwitch, and the external network.
    assert fabric.vertices == 2 + 5


def test_a_network_has_its_dimensions(tmp_path):
    fabric = read_routed(written(tmp_path, "network.yml", NETWORK))
    assert (fabric.endpoints, fabric.vertices) == (8, 8 + 4)
    of_one = {
        (target, rate, latency) for source, target, rate, latency in fabric.links() if not source
    }
    gigabyte = 8 * (1 << 30)
    ring = {(1, 50.0 * gigabyte, 500), (3, 50.0 * gigabyte, 500)}
    assert of_one == ring | {(8, 25.0 * gigabyte, 700)}
    full = NETWORK.replace("Ring", "FullyConnected")
    assert read_routed(written(tmp_path, "full.yaml", full)).diameter() == 3


def test_the_command_shows_what_a_fabric_has(tmp_path):
    shown = CliRunner().invoke(app, ["fabric", "dragonfly:264"])
    assert shown.exit_code == 0, shown.output
    for part in ("2,904", "50.77", "6,800.00", "33"):
        assert part in shown.output
    graph = written(tmp_path, "graph.json", json.dumps(GRAPH))
    printed = CliRunner().invoke(app, ["fabric", graph, "--json"])
    found = json.loads(printed.output)
    assert (found["chips"], found["switches"], found["hops between chips at most"]) == (3, 1, 2)


def with_link(**changes):
    return json.dumps(
        {**GRAPH, "links": [*GRAPH["links"], {"from": 0, "to": 1, "gbit_s": 1, **changes}]}
    )


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.json", "{", "cannot make a fabric"),
        ("a.json", "[]", "expected"),
        ("a.json", with_link(gbit_s=-5), "'gbit_s' of link 4 is -5"),
        ("a.json", with_link(gbit_s=0), "moves 0e0 bit/s"),
        ("a.json", with_link(gbit_s=1e300), "gbit_s"),
        ("a.json", with_link(both="false"), "'both' of link 4"),
        ("a.json", with_link(latency=5), "expected both, from"),
        ("a.json", "[" * 100_000, "nested too deep"),
        ("a.yml", NETWORK.replace("Ring", "FullyConnected").replace("[ 4,", "[ 9000,"), "links"),
        (
            "a.yml",
            "a: &a [x, x]\nb: &b [*a, *a]\nnpus_count: [*b]\ntopology: [Ring]\n"
            "bandwidth: [1]\nlatency: [1]\n",
            "npus_count is",
        ),
        ("a.json", with_link(to=9), "vertices 0 to 3"),
        ("a.json", with_link(to=0), "joins vertex 0 to itself"),
        ("a.json", with_link(latency_ns=-1), "latency_ns"),
        ("a.json", with_link(latency_ns=10**12), "latency_ns"),
        ("a.json", json.dumps({**GRAPH, "endpoints": 5}), "cannot be reached"),
        ("a.json", json.dumps({**GRAPH, "endpoints": 0, "links": []}), "no endpoints"),
        ("a.json", json.dumps({**GRAPH, "endpoints": True}), "number of endpoints"),
        ("a.json", b"\xff\xfe", "cannot make a fabric"),
        ("a.xml", TOPOLOGY[:200], "cannot make a fabric"),
        ("a.xml", "<graph/>", "expected <system>"),
        ("a.xml", "<system/>", "no endpoints"),
        ("a.xml", TOPOLOGY.replace('count="2"', 'count="-2"'), "count"),
        ("a.xml", TOPOLOGY.replace('speed="200000"', 'speed="much"'), "speed of <net>"),
        ("a.xml", TOPOLOGY.replace("16.0 GT/s", "fast"), "link_speed"),
        ("a.xml", TOPOLOGY.replace('target="0000:01:00.0"', 'target="elsewhere"'), "elsewhere"),
        ("a.yml", "topology: [", "cannot make a fabric"),
        ("a.yml", "topology: [ Ring ]", "expected lists"),
        ("a.yml", NETWORK.replace("Ring", "Moebius"), "Moebius"),
        ("a.yml", NETWORK.replace("50.0", "-50"), "bandwidth"),
        ("a.yml", NETWORK.replace("[ 4, 2 ]", "[ 4 ]"), "differ in length"),
        ("a.yml", NETWORK.replace("[ 4, 2 ]", "[ 1048576, 1048576 ]"), "NPUs"),
        ("a.yml", NETWORK.replace("[ 4, 2 ]", "[ 0, 2 ]"), "NPUs"),
    ],
)
def test_what_describes_no_fabric_is_refused(tmp_path, name, text, words):
    with pytest.raises(TopologyError, match=words):
        read_routed(written(tmp_path, name, text))


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["a.json", "a.xml", "a.yml"])
def test_what_is_no_file_is_not_read(tmp_path, name):
    (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(TopologyError, match="no regular file"):
        read_routed(str(tmp_path / name))


def test_a_file_that_is_not_there_is_said():
    with pytest.raises(TopologyError, match="cannot read the fabric"):
        read_routed("nowhere/graph.json")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=12,
)
LINKS = st.lists(
    st.fixed_dictionaries(
        {"from": st.integers(-1, 5) | JSON, "to": st.integers(-1, 5) | JSON, "gbit_s": JSON}
    ),
    max_size=6,
)


@settings(max_examples=150, deadline=None)
@given(
    found=JSON
    | st.fixed_dictionaries(
        {
            "endpoints": st.integers(-1, 5) | JSON,
            "switches": st.integers(-1, 3),
            "links": LINKS | JSON,
        }
    )
)
def test_any_json_is_a_fabric_or_refused(tmp_path_factory, found):
    text = json.dumps(found)
    with contextlib.suppress(TopologyError):
        read_routed(written(tmp_path_factory.mktemp("any"), "any.json", text))


@settings(max_examples=150, deadline=None)
@given(
    place=st.integers(0, 2000),
    wrong=st.binary(min_size=1, max_size=6),
    known=st.sampled_from([("a.xml", TOPOLOGY), ("a.yml", NETWORK), ("a.json", json.dumps(GRAPH))]),
)
def test_a_damaged_file_is_a_fabric_or_refused(tmp_path_factory, place, wrong, known):
    name, text = known
    data = bytearray(text.encode())
    place %= len(data)
    data[place : place + len(wrong)] = wrong
    with contextlib.suppress(TopologyError):
        read_routed(written(tmp_path_factory.mktemp("damaged"), name, bytes(data)))


def test_the_reference_names_every_option() -> None:
    """Each row of the tables has the options that the error for an unknown one lists."""
    page = (Path(__file__).parents[1] / "docs" / "reference" / "fabrics.md").read_text()
    sizes = {"torus": "4x4", "cluster": "2x4", "sip-rings": "4x4", "fattree": "4"}
    rows = re.findall(r"^\| `([\w-]+)` \|[^|]*\|([^|]*)\|$", page, re.MULTILINE)
    assert len(rows) == 11
    for kind, options in rows:
        with pytest.raises(TopologyError) as refused:
            route(f"{kind}:{sizes.get(kind, '16')},nosuch=1", [Transfer(0, 1, 320)])
        listed = set(str(refused.value).partition("there are ")[2].split(", "))
        assert set(re.findall(r"`([a-z-]+)(?:=[^`]*)?`", options)) - {"sip-ring"} == listed, kind
        for option, default in re.findall(r"`([a-z-]+)=([^`]*)`", options):
            with_leaves = ",leaf=4" if (kind, option) == ("sip-ocs", "oversubscription") else ""
            fabric = f"{kind}:{sizes.get(kind, '16')},{option}={default}{with_leaves}"
            ended = CliRunner().invoke(app, ["fabric", fabric])
            assert ended.exit_code == 0, ended.output


def test_an_odd_number_of_ports_is_refused() -> None:
    with pytest.raises(TopologyError, match="have 7 ports; expected an even number, such as 8"):
        route("fattree:7", [Transfer(0, 1, 320)])
