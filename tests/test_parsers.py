"""Damaged messages to the parsers in Python that face the network.

`FAIRWAY_MESSAGES` is the number of inputs of each, and `FAIRWAY_SEED` determines them. `make fuzz`
sends a million to each.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from test_admin import REQUESTS

from fairway.cluster import admin, agents
from fairway.cluster.agents import FromAgent, ToAgent, Versions, encoded
from fairway.cluster.channels import ChannelNetworks
from fairway.cluster.records import Clock
from fairway.errors import AgentError
from fairway.host.trace import CompileRecord, MoveRecord, RunRecord

pytestmark = pytest.mark.fast

INPUTS = int(os.environ.get("FAIRWAY_MESSAGES", "5000"))
SEED = int(os.environ.get("FAIRWAY_SEED", "20261128"))
WORDS = (
    *(b"-1", b"0", b"4294967296", b"9223372036854775808", b"18446744073709551616"),
    *(b"1e400", b"-0.5", b"null", b"true", b'""', b"[]", b"{}", b"[" * 2000, b"9" * 5000),
    *(b'"type"', b'\\"', b"\\ud800", b"\xff", b"\x00", b"\x1b[2J", "ä".encode(), b"\n", b"x", b","),
)
"""What damaged texts contain."""
INTERFACES = (
    agents.NetworkInterface("eth0", ("10.0.0.1/24", "fd00::1/64"), 1e10),
    agents.NetworkInterface("docker0", ("172.17.0.1/16",), None),
)
RECORDS = (
    RunRecord(1_000_000, 2_000_000, 300, (0, 1), "step", 1, 900_000, 17),
    MoveRecord(2_000_000, 3_000_000, 1, 1 << 20, "out", 2, 40, 18),
    CompileRecord(1, 900_000, "step", "compiled"),
)
FROM_AGENT = (
    agents.AgentHello("m", "10.0.0.1", 7, Versions("1", "3.12", "0.10.2"), 1, True),
    agents.AgentHello("m", "10.0.0.1", 7, Versions("1", "3.12", "0.10.2"), interfaces=INTERFACES),
    agents.AgentHeartbeat(),
    agents.AgentHeartbeat(123_456_789),
    agents.RecordsPart(3, RECORDS),
    agents.NeedModules("0af9" * 16, 131_072),
    agents.HostEnded(3, "with status 1"),
    agents.HostOutput(3, "a line\nand one more\n"),
)
TO_AGENT = (
    agents.AgentAccepted(2.5),
    agents.LeaseRenewed(),
    agents.LeaseRenewed(123_456_789, 987_654_321),
    agents.ControllerEnded(),
    agents.StartHost({"host": 1, "token": "t", "channels": ["tcp:1.2.3.4:5"]}),
    agents.StartHost({"host": 1}, ("0af9" * 16,)),
    agents.ModulesPart("0af9" * 16, 0, b"PK\x03\x04", 4),
    agents.StopHost(),
    agents.StopHost(7),
    agents.AgentRefused("too old"),
)


def damaged(chance: random.Random, valid: Sequence[bytes]) -> bytes:
    """Returns a valid text with up to four damages, or noise."""
    if chance.random() < 0.05:
        return chance.randbytes(chance.randrange(64))
    data = bytearray(chance.choice(valid))
    for _ in range(chance.randrange(5)):
        at = chance.randrange(len(data) + 1)
        end = min(len(data), at + chance.randrange(12))
        match chance.randrange(6):
            case 0:
                data[at : at + 1] = bytes([chance.randrange(256)])
            case 1:
                data[at:end] = chance.choice(WORDS)
            case 2:
                other = chance.choice(valid)
                data[at:end] = other[chance.randrange(len(other)) :]
            case 3:
                data[at:at] = data[at:end] * chance.randrange(8)
            case 4:
                del data[at:end]
            case _:
                del data[at if chance.random() < 0.2 else end :]
    return bytes(data)


def sent(name: str, valid: Sequence[bytes], parse: Callable[[bytes], Any], refused: Any) -> None:
    """Parses damaged texts; each is read, or refused with one of the documented errors."""
    chance, read = random.Random(f"{SEED} {name}"), 0
    for number in range(INPUTS):
        data = damaged(chance, valid)
        try:
            parse(data)
            read += 1
        except refused:
            continue
        except BaseException as error:
            raise AssertionError(f"{name}: input {number} of seed {SEED}: {data!r}") from error
    assert INPUTS // 20 < read < INPUTS, f"{read} of {INPUTS} inputs of {name} were read"


def test_messages_of_agents() -> None:
    decoder, sound = msgspec.json.Decoder(FromAgent), FROM_AGENT[1]
    assert isinstance(sound, agents.AgentHello)

    def parse(line: bytes) -> None:
        message = agents._decoded(decoder, line)
        assert agents._decoded(decoder, encoded(message)) == message
        if isinstance(message, agents.AgentHello):
            message.versions.remedy(Versions.here())
            networks = ChannelNetworks("auto")
            networks.agree([message, sound])
            networks.of(message)
        if isinstance(message, agents.RecordsPart):
            for record in message.records:
                msgspec.json.encode(record.moved(-(1 << 61)))

    sent("agents", [encoded(one) for one in FROM_AGENT], parse, AgentError)


def test_messages_to_agents() -> None:
    decoder = msgspec.json.Decoder(ToAgent)
    lines = [encoded(one) for one in TO_AGENT]
    clock = Clock()

    def parse(line: bytes) -> None:
        message = agents._decoded(decoder, line)
        if isinstance(message, agents.LeaseRenewed):
            clock.add(message.sent_ns, message.there_ns, 200_000_000)

    sent("controller", lines, parse, AgentError)


def test_requests_to_the_admin_socket() -> None:
    lines = [text.encode() for text in REQUESTS]
    sent("admin", lines, admin.read_request, ValueError)
