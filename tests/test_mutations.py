"""Mutation fuzzing: valid programs and messages with changed bytes.

The seed `FAIRWAY_SEED` determines the input; `FAIRWAY_PROGRAMS` and `FAIRWAY_MESSAGES` are the
numbers of inputs. `make mutations` sends a hundred thousand programs and a million messages.
"""

from __future__ import annotations

import base64
import os
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from conftest import Measured, Up, hosts_of, is_alive, rss_bytes, until
from fuzzing import Nonsense, check_computes, up_for_nonsense, upload
from grpc_client import (
    Caller,
    begin_session,
    field,
    fields_of,
    fixed64,
    grpc_message,
    open_session,
    request,
)
from jax._src.lib import xla_client
from jaxlib.mlir.dialects import stablehlo

PROGRAMS = int(os.environ.get("FAIRWAY_PROGRAMS", "300"))
MESSAGES = int(os.environ.get("FAIRWAY_MESSAGES", "5000"))
SEED = int(os.environ.get("FAIRWAY_SEED", "20261124"))
COMPILE, FREE = 13, 18
"""Numbers of requests in the protocol."""
UNREADABLE = re.compile(rb"damaged|cannot be read|is not a StableHLO")
OPEN = 32
"""Maximum number of unanswered requests."""
A_SESSION = 2000
"""Number of requests of one session."""
GROWTH_BYTES = 100 << 20
"""Maximum growth of the controller's memory from the first tenth to the end."""
IDENTITY = """
TUzvUg1TdGFibGVITE9fdjEuMTcuMAABFwUBBQcBAwsDBQ8TAykTBwELCxMTExMDCQsLCwsDBw8XBwJHBQsXAQMDFwEDFRcBA0MX
AQOHAwEjAx0NHQ8pAQURAwEDAQkEPQUBUAMBBwQtAwEFA1AFAwcEGQMDBwMDBwAFBAkDAQYDAQUBAHsRDwsFFREPCxFidWlsdGlu
AHZobG8AbW9kdWxlAGZ1bmNfdjEAcmV0dXJuX3YxAC0AbWFpbgBwdWJsaWMACBUFBQEBCwsNCw8R
"""
"""The portable artifact of a function of one ``tensor<f32>`` that returns its argument."""


@pytest.fixture(scope="module")
def own(runtime: Path) -> Iterator[Up]:
    with up_for_nonsense(runtime) as up:
        yield up


def sound_programs() -> list[bytes]:
    """Valid programs as clients write them: portable artifacts of StableHLO."""

    def loop(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 3, lambda i, y: jnp.sin(y) * i + x.sum(), x)

    def attend(q: jax.Array, k: jax.Array) -> jax.Array:
        return jax.nn.softmax(q @ k.T) @ k

    def pick(x: jax.Array, at: jax.Array) -> jax.Array:
        return jax.lax.cond(at[0] > 0, lambda: x[at], lambda: x[at][::-1])

    x = jnp.ones((8, 8))
    lowered = [
        jax.jit(lambda x: x + 1).lower(1.0),
        jax.jit(loop).lower(x),
        jax.jit(jax.grad(lambda q, k: attend(q, k).sum())).lower(x, x),
        jax.jit(pick).lower(x, jnp.arange(3)),
        jax.jit(lambda x: jnp.sort(x, axis=0).astype(jnp.bfloat16)).lower(x),
    ]
    version = stablehlo.get_current_version()
    return [
        stablehlo.serialize_portable_artifact(one.compiler_ir("stablehlo"), version)
        for one in lowered
    ]


def mutated(chance: random.Random, sound: bytes) -> bytes:
    """Returns the data with a few bits, bytes or ranges changed, doubled or cut off."""
    data = bytearray(sound)
    for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
        at = chance.randrange(len(data))
        until_at = min(len(data), at + chance.choice((1, 2, 4, 16)))
        match chance.randrange(7):
            case 0 | 1:
                data[at] ^= 1 << chance.randrange(8)
            case 2:
                data[at] = chance.choice((0, 1, 0x7F, 0x80, 0xFF))
            case 3:
                data[at:until_at] = chance.randbytes(until_at - at)
            case 4:
                data[at:at] = data[at:until_at]
            case 5:
                del data[at:until_at]
            case _:
                del data[at if chance.random() < 0.2 else until_at - 1 :]
        data = data or bytearray(b"\0")
    return bytes(data)


class Talk:
    """A session with a bounded number of unanswered requests.

    Args:
        up: the islands.
    """

    def __init__(self, up: Up) -> None:
        self.caller, self.stream, self.key = begin_session(up)
        self._open: set[int] = set()
        self.answers: list[bytes] = []
        self._op = 1

    def next_op(self) -> int:
        """Returns the number of the next request."""
        self._op += 1
        return self._op

    def ask(self, op: int, message: bytes) -> None:
        """Sends a request once few others are unanswered."""
        while len(self._open) >= OPEN:
            self.listen()
        self._open.add(op)
        self.caller.send(self.stream, grpc_message(message))

    def listen(self) -> None:
        """Receives answers.

        Raises:
            AssertionError: none comes for 60 s, or the session has ended.
        """
        assert self.caller.listen(60), f"{len(self._open)} requests are not answered"
        answer = self.caller.answers[self.stream]
        for message in answer.messages:
            metadata = dict(fields_of(message))[1]
            assert isinstance(metadata, bytes)
            op = dict(fields_of(metadata))[1]
            assert isinstance(op, bytes)
            self._open.discard(int.from_bytes(op, "little"))
            self.answers.append(message)
            answer.data = answer.data[5 + len(message) :]
        assert not answer.ended, "the session was ended"

    def end(self) -> None:
        """Waits for all answers."""
        while self._open:
            self.listen()
        self.caller.close()


def compile_request(op: int, program: bytes, options: bytes) -> bytes:
    """Encodes a CompileRequest."""
    given = field(1, options)
    body = field(1, field(1, b"xla::ifrt::XlaProgram") + field(2, program))
    body += field(2, field(1, b"xla::ifrt::XlaCompileOptions") + field(2, given))
    return request(op, COMPILE, body)


def check_alive(up: Up, processes: list[int]) -> None:
    hosts = hosts_of(up)
    assert [host["process"] for host in hosts] == processes, "a host was replaced"
    assert all(is_alive(process) for process in processes)
    assert not any(host["lost"] for host in hosts), hosts
    assert up.panics() == []


@pytest.mark.parametrize(
    ("byte", "bit"),
    [
        pytest.param(38, 4, id="aborts"),
        pytest.param(59, 4, id="reads elsewhere"),
        pytest.param(63, 1, id="never ends"),
    ],
)
def test_one_bit_of_a_program_takes_only_its_reader_down(own: Up, byte: int, bit: int) -> None:
    """Uses the smallest programs that were found to do so (docs/design/0013)."""
    processes = [host["process"] for host in hosts_of(own)]
    options = xla_client.CompileOptions().SerializeAsString()
    program = bytearray(base64.b64decode(IDENTITY))
    assert reads(own, bytes(program), options)
    program[byte] ^= 1 << bit
    assert not reads(own, bytes(program), options)
    check_alive(own, processes)
    check_computes(own)


def reads(up: Up, program: bytes, options: bytes) -> bool:
    """Checks whether hosts can read a program."""
    talk = Talk(up)
    talk.ask(op := talk.next_op(), compile_request(op, program, options))
    talk.end()
    return not any(map(UNREADABLE.search, talk.answers))


@pytest.mark.timeout(7200)
def test_mutated_programs(own: Up, measured: Measured) -> None:
    """Hosts read none of them; the sender gets an error."""
    chance = random.Random(SEED)
    options = xla_client.CompileOptions().SerializeAsString()
    programs = sound_programs()
    processes = [host["process"] for host in hosts_of(own)]
    talk = Talk(own)
    for sound in programs:
        talk.ask(op := talk.next_op(), compile_request(op, sound, options))
    talk.end()
    assert not any(map(UNREADABLE.search, talk.answers)), "sound programs are read"
    sizes, refused, sent, began = [], 0, 0, time.monotonic()
    while sent < PROGRAMS:
        talk = Talk(own)
        with talk.caller:
            for _ in range(min(A_SESSION, PROGRAMS - sent)):
                op = talk.next_op()
                program = mutated(chance, chance.choice(programs))
                talk.ask(op, compile_request(op, program, options))
                sent += 1
            talk.end()
            refused += sum(UNREADABLE.search(answer) is not None for answer in talk.answers)
        check_alive(own, processes)
        sizes.append(rss_bytes(own.pid))
        rate = sent / (time.monotonic() - began)
        print(f"{sent} programs, {refused} refused, {rate:.0f} a second", flush=True)
    assert refused > PROGRAMS // 4, "many are unreadable"
    until(lambda: not own.overview()["clients"], 10, "the sessions are gone")
    measured("programs", sent)
    measured("refused", refused)
    measured("memory of the controller in MB", sizes[-1] / 1e6)
    assert sizes[-1] < sizes[len(sizes) // 10] + GROWTH_BYTES
    check_computes(own)


@pytest.mark.timeout(7200)
def test_mutated_messages(own: Up, measured: Measured) -> None:
    """Requests of every kind with mutated bytes: those that can be decoded are answered."""
    processes = [host["process"] for host in hosts_of(own)]
    nonsense = Nonsense(SEED, devices=4)
    sizes, sent, sessions, began = [], 0, 0, time.monotonic()
    while sent < MESSAGES:
        with Caller(own.port) as caller:
            until_here = min(MESSAGES, sent + A_SESSION)
            while sent < until_here:
                sessions += 1
                sent += talk_mutated(caller, nonsense, until_here - sent)
        check_alive(own, processes)
        sizes.append(rss_bytes(own.pid))
        if len(sizes) % 20 == 1:
            rate = sent / (time.monotonic() - began)
            print(f"{sent} messages, {sessions} sessions, {rate:.0f} a second", flush=True)
    until(lambda: not own.overview()["clients"], 10, "the sessions are gone")
    measured("messages", sent)
    measured("sessions", sessions)
    measured("memory of the controller in MB", sizes[-1] / 1e6)
    assert sizes[-1] < sizes[len(sizes) // 10] + GROWTH_BYTES
    check_computes(own)


def talk_mutated(caller: Caller, nonsense: Nonsense, most: int) -> int:
    """Sends a session of them, which ends with an undecodable one. Returns the number sent."""
    stream, key = open_session(caller)
    answer = caller.answers[stream]
    for sent in range(most):
        op = sent + 2
        _, uploads, message = nonsense.request(op)
        for number in uploads:
            upload(caller, key, number)
        head = field(1, fixed64(1, op))
        body = mutated(nonsense.random, message[len(head) :])
        caller.send(stream, grpc_message(head + body))
        while caller.listen(0):
            answer.data = b""
        if answer.ended:
            break
    else:
        caller.send(stream, b"", end=True)
    del caller.answers[stream]
    return sent + 1
