"""MSCCL's XML: read back as the same schedule, and executed with the right results."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from test_team import as_ranks, team

from fairway.communication import steps
from fairway.communication.steps import ChannelCost, Step, Task
from fairway.communication.team import Collective, Script, Team
from fairway.errors import StepError
from fairway.formats import msccl

RANKS, ELEMENTS = 4, 960
COLLECTIVES = {
    "allreduce": Collective.all_reduce,
    "allgather": Collective.all_gather,
    "reduce_scatter": Collective.reduce_scatter,
    "alltoall": Collective.all_to_all,
}
RING = """
<algo name="ring" nchunksperloop="2" nchannels="1" proto="Simple" ngpus="2" coll="allreduce" inplace="1">
  <gpu id="0" i_chunks="2" o_chunks="2" s_chunks="0">
    <tb id="0" send="1" recv="-1" chan="0">
      <step s="0" type="s" srcbuf="i" srcoff="0" dstbuf="i" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>
      <step s="1" type="s" srcbuf="i" srcoff="1" dstbuf="i" dstoff="1" cnt="1" depid="1" deps="0" hasdep="0"/>
    </tb>
    <tb id="1" send="-1" recv="1" chan="0">
      <step s="0" type="rrc" srcbuf="i" srcoff="1" dstbuf="i" dstoff="1" cnt="1" depid="-1" deps="-1" hasdep="1"/>
      <step s="1" type="r" srcbuf="i" srcoff="0" dstbuf="i" dstoff="0" cnt="1" depid="0" deps="0" hasdep="0"/>
    </tb>
  </gpu>
  <gpu id="1" i_chunks="2" o_chunks="2" s_chunks="0">
    <tb id="0" send="0" recv="-1" chan="0">
      <step s="0" type="s" srcbuf="i" srcoff="1" dstbuf="i" dstoff="1" cnt="1" depid="-1" deps="-1" hasdep="0"/>
      <step s="1" type="s" srcbuf="i" srcoff="0" dstbuf="i" dstoff="0" cnt="1" depid="1" deps="0" hasdep="0"/>
    </tb>
    <tb id="1" send="-1" recv="0" chan="0">
      <step s="0" type="rrc" srcbuf="i" srcoff="0" dstbuf="i" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="1"/>
      <step s="1" type="r" srcbuf="i" srcoff="1" dstbuf="i" dstoff="1" cnt="1" depid="0" deps="0" hasdep="0"/>
    </tb>
  </gpu>
</algo>
"""  # noqa: E501 - as generators write it


def moved(script: Script) -> list[tuple[int, ...]]:
    return sorted(tuple(map(int, one[2:])) for one in script.transfers(0))


def carried_out(script: Script, collective: Collective) -> None:
    """Executes it on real ranks, and checks the semantics of each collective."""

    def act(one: Team) -> Any:
        step = one.begin(one.prepare(script))
        vector = one.vector(collective, np.int64)
        vector[:] = np.arange(len(vector)) * (one.rank + 1)
        return one.wait(one.submit((step, 0), collective, vector)).copy()

    with team(collective.ranks, channels=1) as teams:
        found = as_ranks(teams, act)
    ranks, count = collective.ranks, collective.work(0)
    for rank, result in enumerate(found):
        start, end = collective.result(rank)
        places = np.arange(count)
        if "reduce" in str(collective):
            expected = places[start:end] * sum(range(1, ranks + 1))
        elif "gather" in str(collective):
            owner = places // (count // ranks) + 1
            expected = places * owner
        else:
            block = count // 2 // ranks
            expected = np.concatenate(
                [(rank * block + np.arange(block)) * (source + 1) for source in range(ranks)]
            )
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_what_is_written_is_read_as_the_same_and_does_the_same(kind: str, tmp_path: Path) -> None:
    collective = COLLECTIVES[kind](RANKS, ELEMENTS)
    step = Step((Task("it", (), collective=collective), Task("rest", (), 0.001)))
    # Large latencies favour few rounds, small ones rings and splines.
    for latency_ns in (0, 200, 10**9):
        costs = [ChannelCost(1e9, latency_ns, incast=0.0 if latency_ns else 0.5)]
        plans = steps.plan(step, costs, evaluations=50, chains=1)
        for name in ("fifo", "joint"):
            script = plans[name].script
            path = tmp_path / f"{name}.xml"
            if "one_shot" in script.text:
                assert latency_ns == 10**9
                with pytest.raises(StepError, match="aside"):
                    msccl.write(path, script)
                continue
            msccl.write(path, script)
            root = ElementTree.parse(path).getroot()
            assert root.get("coll") == kind
            for block in root.iter("tb"):
                assert "-1" in (block.get("send"), block.get("recv"))
            read = msccl.read(path, ELEMENTS)
            assert moved(read) == moved(script)
            carried_out(read, collective)


def test_rings_of_others_are_carried_out(tmp_path: Path) -> None:
    path = tmp_path / "ring.xml"
    path.write_text(RING)
    script = msccl.read(path, 100)
    [(name, collective, motifs)] = script.operations
    assert (name, collective.ranks, collective.elements, motifs) == ("ring", 2, 100, 1)
    assert {one[1] for one in script.transfers(0)} == {0, 1}
    carried_out(script, collective)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("</algo>", "", "no element"),
        ("<algo", '<!DOCTYPE algo [<!ENTITY a "b">]><algo', "entities"),
        ('coll="allreduce"', 'coll="allfold"', "'allfold'"),
        ('nchunksperloop="2"', 'nchunksperloop="3"', "are not 3 chunks"),
        ('type="rrc"', 'type="rrs"', "'rrs'"),
        ('type="rrc"', 'type="r"', "something else in element"),
        ('srcbuf="i"', 'srcbuf="s"', "scratch"),
        ('cnt="1" depid="1" deps="0"', 'cnt="2" depid="1" deps="0"', "received"),
        ('type="s"', 'type="nop"', "not what is received"),
        ('depid="-1" deps="-1" hasdep="1"', 'depid="0" deps="1" hasdep="1"', "wait for each other"),
        ('srcoff="1"', 'srcoff="7"', "not there"),
        ('ngpus="2"', 'ngpus="many"', "many"),
    ],
)
def test_what_is_no_algorithm_is_refused(tmp_path: Path, old: str, new: str, says: str) -> None:
    path = tmp_path / "broken.xml"
    assert old in RING
    path.write_text(RING.strip().replace(old, new))
    with pytest.raises(StepError, match=says):
        msccl.read(path, 100)


def test_what_msccl_does_not_have_is_told(tmp_path: Path) -> None:
    for collective, says in (
        (Collective.broadcast(4, 100, 0), "MSCCL has"),
        (Collective.all_reduce(4, 99_991), "chunks"),
    ):
        with pytest.raises(StepError, match=says):
            msccl.write(tmp_path / "it.xml", Script.series(collective, 0))
