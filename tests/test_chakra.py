"""Chakra's traces become steps that can be planned."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from fairway.cli import app
from fairway.communication import steps
from fairway.communication.steps import After, ChannelCost
from fairway.errors import StepError
from fairway.formats import chakra

COMPUTES, COLLECTIVE, METADATA = 4, 7, 1
ALL_REDUCE, ALL_GATHER, BROADCAST, ALL_TO_ALL, BARRIER = 0, 2, 5, 6, 9
RANKS = 4


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def node(
    number: int, name: str, kind: int, after: Iterable[int] = (), micros: int = 0, **attributes: Any
) -> bytes:
    text = field(1, number) + field(2, name.encode()) + field(3, kind) + field(7, micros)
    text += field(5, b"".join(varint(one) for one in after))
    for key, value in attributes.items():
        kinds = {bool: 27, int: 9}
        text += field(10, field(1, key.encode()) + field(kinds[type(value)], int(value)))
    return text


def write(path: Path, *nodes: bytes) -> Path:
    messages = [field(1, b"0.0.4"), *nodes]
    path.write_bytes(b"".join(varint(len(one)) + one for one in messages))
    return path


def trace(path: Path) -> Path:
    """Forward, backward of two layers with a bucket each, and nodes that are to be ignored."""
    return write(
        path,
        node(1, "load", METADATA),
        node(2, "launch", COMPUTES, [1], 50, is_cpu_op=True),
        node(3, "forward", COMPUTES, [2], 1000, is_cpu_op=False),
        node(4, "more", COMPUTES, [3], 500, is_cpu_op=False),
        node(5, "back 2", COMPUTES, [4], 2000, is_cpu_op=False),
        node(6, "bucket 2", COLLECTIVE, [5], comm_type=ALL_REDUCE, comm_size=4 << 20),
        node(7, "back 1", COMPUTES, [5], 3000, is_cpu_op=False),
        node(8, "bucket 1", COLLECTIVE, [7], comm_type=ALL_REDUCE, comm_size=8 << 20),
        node(9, "barrier", COLLECTIVE, [8], comm_type=BARRIER),
    )


def test_a_trace_is_a_step(tmp_path: Path) -> None:
    step = chakra.read(trace(tmp_path / "rank.et"), RANKS)
    assert [task.name for task in step.tasks] == [
        "forward 3",
        "bucket 2 6",
        "back 1 7",
        "bucket 1 8",
    ]
    forward, first, back, second = step.tasks
    # Consecutive computations are merged, up to a dependency of a collective.
    assert forward.compute_s == pytest.approx(0.0035)
    assert back.compute_s == pytest.approx(0.003)
    assert str(first.collective) == str(steps.Collective.all_reduce(RANKS, 1 << 20))
    assert first.after == (After("forward 3"),)
    assert second.after == (After("back 1 7"),)
    # Gradients have arrived before the next step begins.
    assert forward.after == (After("bucket 2 6", 1), After("bucket 1 8", 1))
    planned = steps.plan(step, [ChannelCost(1e10), ChannelCost(5e9)], evaluations=200, chains=1)
    assert planned["joint+striping"].period_ns <= planned["fifo"].period_ns


def test_what_waits_for_nothing_waits_for_the_step_before(tmp_path: Path) -> None:
    path = write(
        tmp_path / "rank.et",
        node(1, "weights", COLLECTIVE, comm_type=ALL_GATHER, comm_size=1 << 20),
        node(2, "forward", COMPUTES, [1], 1000),
        node(3, "rows", COLLECTIVE, [2], comm_type=ALL_TO_ALL, comm_size=1 << 20),
        node(4, "rest", COMPUTES, [3], 1000),
        node(5, "news", COLLECTIVE, [4], comm_type=BROADCAST, comm_size=100, root=2),
    )
    weights, forward, rows, rest, news = chakra.read(path, RANKS).tasks
    assert weights.after == (After("rest 4", 1),)
    assert forward.after == (After("weights 1"), After("news 5", 1))
    assert (rows.after, rest.after) == ((After("forward 2"),), (After("rows 3"),))
    assert str(news.collective) == str(steps.Collective.broadcast(RANKS, 25, 2))


def test_it_is_planned_by_command(tmp_path: Path) -> None:
    path = trace(tmp_path / "rank.et")
    found = CliRunner().invoke(app, ["plan", str(path), "--evaluations", "100", "--ranks", "4"])
    assert found.exit_code == 0, found.output
    assert "joint+striping" in found.output


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ([], "communicates nothing"),
        ([node(1, "a", COMPUTES, micros=5)], "communicates nothing"),
        ([node(1, "a", COLLECTIVE, comm_type=ALL_REDUCE)], "no comm_size"),
        ([node(1, "a", COLLECTIVE, comm_type=4, comm_size=4)], "of type 4"),
        ([node(1, "a", COMPUTES, [7])], "waits for 7"),
        ([node(1, "a", COMPUTES, [2]), node(2, "b", COMPUTES, [1])], "waits for itself"),
        ([node(1, "a", COMPUTES), node(1, "b", COMPUTES)], "one number"),
    ],
)
def test_what_makes_no_sense_is_told(tmp_path: Path, nodes: list[bytes], words: str) -> None:
    with pytest.raises(StepError, match=words):
        chakra.read(write(tmp_path / "rank.et", *nodes), RANKS)


@given(cut=st.integers(0, 400), turned=st.integers(0, 400), bits=st.integers(0, 255))
def test_damaged_traces_are_refused_or_read(
    tmp_path_factory: pytest.TempPathFactory, cut: int, turned: int, bits: int
) -> None:
    path = trace(tmp_path_factory.mktemp("chakra") / "rank.et")
    data = bytearray(path.read_bytes())
    data[turned % len(data)] ^= bits
    path.write_bytes(bytes(data[: len(data) - cut % len(data)]))
    with contextlib.suppress(StepError):
        step = chakra.read(path, RANKS)
        steps.plan(step, [ChannelCost(1e10)], evaluations=1, chains=1)


def test_numbers_of_fixed_length_are_read(tmp_path: Path) -> None:
    text = field(1, b"comm_size") + varint(21 << 3 | 1) + struct.pack("<Q", 400)
    kind = field(1, b"comm_type") + varint(17 << 3) + varint(ALL_GATHER << 1)
    one = field(1, 1) + field(3, COLLECTIVE) + field(10, text) + field(10, kind)
    (task,) = chakra.read(write(tmp_path / "rank.et", one), RANKS).tasks
    assert str(task.collective) == str(steps.Collective.all_gather(RANKS, 100))
