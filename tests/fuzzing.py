"""Random requests in the grammar of the IFRT proxy's protocol; and that a client still computes."""

from __future__ import annotations

import random
import re
import struct
import tempfile
import time
from pathlib import Path
from typing import ClassVar

from conftest import Up, client, hosts_of, is_alive, said, until
from grpc_client import (
    Caller,
    announce,
    array_request,
    begin_session,
    field,
    fields_of,
    fixed64,
    grpc_message,
    request,
    varint,
)

PROTO = Path(__file__).parents[1] / "crates/ifrt/proto/ifrt_proxy.proto"

COMPUTE = """
    first, last = jax.devices()[0], jax.devices()[-1]
    x = jax.device_put(np.arange(1 << 18, dtype=np.float32) % 7, first)
    y = jax.jit(lambda x: x * 2 + 1)(jax.device_put(x, last))
    assert (np.asarray(y) == (np.arange(1 << 18) % 7) * 2 + 1).all()
    say("right", at=time.monotonic())
"""


def check_computes(up: Up, timeout_s: float = 60) -> float:
    """A new client connects, computes, moves a megabyte and reads it; returns the seconds taken."""
    began = time.monotonic()
    result = client(up, COMPUTE, timeout_s)
    took = float(said(result.stdout, "right")["at"]) - began
    assert not any(host["lost"] for host in hosts_of(up)), up.overview()
    assert all(is_alive(host["process"]) for host in hosts_of(up))
    assert up.panics() == []
    return took


def up_for_nonsense(runtime: Path) -> Up:
    """Islands for fuzzing; a memory limit protects the machine from requests for all memory."""
    directory = Path(tempfile.mkdtemp(prefix="nonsense-", dir=runtime))
    return Up("--islands", "2x1x2", runtime=directory, limits=(f"--as={8 << 30}",))


class Nonsense:
    """Fuzzer: random requests in the protocol's grammar, many of them almost valid.

    Args:
        seed: the same seed makes the same requests.
        devices: devices that exist; others are named as well.
    """

    SHARDINGS: ClassVar = {
        "SingleDeviceSharding": "SingleDeviceShardingProto",
        "HloSharding": "HloShardingProto",
        "ConcreteEvenSharding": "ConcreteEvenShardingProto",
        "ConcreteSharding": "ConcreteShardingProto",
    }
    HANDLES = 12
    # No number in the gigabytes: the machine would allocate them, and disturb other tests.
    NUMBERS = (0, 0, 1, 1, 1, 2, 2, 3, 4, 5, 8, -1, 1 << 40, 1 << 62, (1 << 63) - 1, -(1 << 63))

    def __init__(self, seed: int, devices: int) -> None:
        self.random = random.Random(seed)
        self._devices = devices
        self._messages = read_grammar(PROTO.read_text())
        self._uploads: list[int] = []
        self._last_upload = 100

    def request(self, op: int) -> tuple[str, list[int], bytes]:
        """Returns the name of a random request, the uploads that it names, and the request."""
        kinds = self._messages["IfrtRequest"]
        _, kind, _, number = self.random.choice(kinds[1:])
        self._uploads = []
        body = self._message(kind, 0)
        # A request that names no upload waits for number 0.
        uploads = [0, *self._uploads] if "FromHostBuffer" in kind else []
        return kind, uploads, request(op, number, body)

    def upload(self) -> int:
        """Returns an unused number for an upload."""
        self._last_upload += 1
        self._uploads.append(self._last_upload)
        return self._last_upload

    def _message(self, name: str, depth: int) -> bytes:
        if name == "Serialized":
            return self._serialized()
        if depth > 6:
            return b""
        written = b""
        for label, kind, field_name, number in self._messages[name]:
            if label == "repeated":
                count = self.random.choice((0, 1, 1, 2, 2, 3, 4))
            else:
                count = int(self.random.random() < 0.9)
            for _ in range(count):
                written += self._field(kind, field_name, number, depth)
        return written

    def _field(self, kind: str, name: str, number: int, depth: int) -> bytes:
        if kind in self._messages:
            return field(number, self._message(kind, depth + 1))
        if kind in ("string", "bytes"):
            texts = [b"", b"device", b"unpinned_host", "ä".encode()]
            if kind == "bytes":
                texts.append(self.random.randbytes(9))
            return field(number, self.random.choice(texts))
        value = self._number(name)
        if kind in ("fixed64", "sfixed64"):
            return fixed64(number, value)
        if kind in ("fixed32", "float"):
            return varint(number << 3 | 5) + struct.pack("<I", value & 0xFFFFFFFF)
        return field(number, value & 1 if kind == "bool" else value)

    def _number(self, name: str) -> int:
        chance = self.random.random()
        if name == "version_number":
            return 0
        if name == "host_buffer_handle":
            return self.upload()
        if "handle" in name and chance < 0.95:
            return self.random.randint(1, self.HANDLES)
        if "device" in name and chance < 0.9:
            return self.random.randrange(self._devices)
        if name == "dims" and chance < 0.8:
            return self.random.choice((1, 2, 4, 4, 8))
        if name == "kind":
            return 11 if chance < 0.6 else self.random.randint(-1, 40)
        return self.random.choice(self.NUMBERS)

    def _serialized(self) -> bytes:
        name, kind = self.random.choice(list(self.SHARDINGS.items()))
        if self.random.random() < 0.3:
            name, kind = "SingleDeviceSharding", self.SHARDINGS["SingleDeviceSharding"]
        data = self._message(kind, 2)
        if self.random.random() < 0.1:
            data = self.random.randbytes(12)
        name = self.random.choice((name,) * 9 + ("XlaProgram", "XlaCompileOptions"))
        return field(1, b"xla::ifrt::" + name.encode()) + field(2, data)


def read_grammar(text: str) -> dict[str, list[tuple[str, str, str, int]]]:
    """Label, type, name and number of the fields of each message; nested ones by their own name."""
    text = re.sub(r"//[^\n]*", "", text)
    messages: dict[str, list[tuple[str, str, str, int]]] = {}
    open_blocks: list[str | None] = []
    token = re.compile(
        r"message (?P<message>\w+) \{|(?:oneof|service) \w+ \{|(?P<end>\})|"
        r"(?P<label>optional |repeated |)(?P<kind>\w+)\s+(?P<name>\w+) = (?P<number>\d+);"
    )
    for found in token.finditer(text):
        if found["message"]:
            open_blocks.append(found["message"])
            messages[found["message"]] = []
        elif found["end"]:
            open_blocks.pop()
        elif found["kind"]:
            owner = next(name for name in reversed(open_blocks) if name)
            entry = (found["label"].strip(), found["kind"], found["name"], int(found["number"]))
            messages[owner].append(entry)
        else:
            open_blocks.append(None)
    return messages


def upload(caller: Caller, key: int, handle: int) -> None:
    """Uploads 16 bytes under a handle."""
    call = announce(caller, key, handle, 16)
    caller.send(call, grpc_message(field(1, bytes(16))), end=True)


def talk_nonsense(up: Up, seed: int, requests: int) -> None:
    """Runs one session: valid arrays, then invalid requests."""
    nonsense = Nonsense(seed, devices=4)
    caller, stream, key = begin_session(up)
    with caller:
        asked = {1: "the first request"}
        for op in range(2, requests):
            if op <= nonsense.HANDLES or op % 4 == 0:
                number = nonsense.upload()
                array = nonsense.random.randint(1, nonsense.HANDLES)
                sound = request(op, 4, array_request(11, [4], op % 4, number, array))
                asked[op], uploads, message = "a sound array", [number], sound
            else:
                asked[op], uploads, message = nonsense.request(op)
            for number in uploads:
                upload(caller, key, number)
            caller.send(stream, grpc_message(message))
            while caller.listen(0):
                continue
        answer = caller.answers[stream]
        deadline = time.monotonic() + 30
        while asked and time.monotonic() < deadline:
            caller.listen(0.1)
            assert not answer.ended, f"the session was ended; seed {seed}"
            for message in answer.messages:
                metadata = dict(fields_of(message))[1]
                assert isinstance(metadata, bytes)
                op = dict(fields_of(metadata))[1]
                assert isinstance(op, bytes)
                asked.pop(int.from_bytes(op, "little"), None)
            answer.messages.clear()
        left = list(asked.items())
        assert not left, f"{len(left)} requests are never answered, first {left[:8]}; seed {seed}"
    until(lambda: not up.overview()["clients"], 1, f"the session is gone; seed {seed}")
    assert up.panics() == [], f"seed {seed}"
    assert all(is_alive(host["process"]) for host in hosts_of(up)), f"seed {seed}"
    assert not any(host["lost"] for host in hosts_of(up)), f"seed {seed}: {hosts_of(up)}"
