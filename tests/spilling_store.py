"""A host's object store whose devices and host memory refuse allocations as full ones do.

The store is real, on devices of jaxlib; only the controller is simulated.
"""

from __future__ import annotations

import os
import secrets
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from jaxlib.mlir import ir

from fairway import _native, mpmd
from fairway.host import messages
from fairway.host.backend import Backend, JaxRuntimeError
from fairway.host.elements import bytes_of, dtype_of
from fairway.host.inputs import Feed
from fairway.host.launches import Launcher
from fairway.host.local import LocalHost
from fairway.host.messages import Acknowledge, HostArray, HostShard
from fairway.host.moves import Mover, Places
from fairway.host.objects import Failed, Lazy, Objects, resolve
from fairway.host.parts import BatchPart
from fairway.host.reporter import Reporter
from fairway.host.sources import Source
from fairway.host.spilling import Spilled, Spiller
from fairway.host.stored import StoredPrograms
from fairway.shards import Description

CASES = int(os.environ.get("FAIRWAY_SPILL_CASES", "150"))
"""Number of random histories of the object store."""

KINDS = {
    "bool": "i1", "int8": "i8", "int32": "i32", "int64": "i64", "uint8": "ui8", "uint32": "ui32",
    "int2": "i2", "uint2": "ui2", "int4": "i4", "uint4": "ui4", "float16": "f16",
    "bfloat16": "bf16", "float32": "f32", "float64": "f64", "complex64": "complex<f32>",
    "complex128": "complex<f64>", "float8_e3m4": "f8E3M4", "float8_e4m3": "f8E4M3",
    "float8_e4m3fn": "f8E4M3FN", "float8_e4m3b11fnuz": "f8E4M3B11FNUZ",
    "float8_e4m3fnuz": "f8E4M3FNUZ", "float8_e5m2": "f8E5M2", "float8_e5m2fnuz": "f8E5M2FNUZ",
    "float8_e8m0fnu": "f8E8M0FNU", "float4_e2m1fn": "f4E2M1FN",
}  # fmt: skip
"""Element types, and their names in MLIR."""
SHAPES = [(), (0,), (64,), (2, 0), (3, 5), (2, 2, 3)] if CASES > 1000 else [(0,), (3, 5)]
"""Shapes of one shard."""
LAYOUTS = {
    "single": ((2,), "", 1),
    "replicated": ((0, 1, 2, 3), "", 1),
    "sharded": ((0, 1, 2, 3), "{'x', 'y'}", 4),
    "partly replicated": ((0, 1, 2, 3), "{'x'}", 2),
    "sub-mesh": ((3, 1), "{'x'}", 2),
}
"""Devices, the axes that shard the first dimension, and the number of its parts."""
ROUTINE = ["put", "put in place", "put in place", "receive", "exchange", "input", "copy", "bitcast"]
PROGRAMS = ["jit", "donate", "two results", "constant", "shard_map", "collective", "token"]
IS_LONG = CASES > 1000
PROGRAM_KINDS = sorted(KINDS) if IS_LONG else ["float32", "int4"]
"""Element types of programs' results; each costs a compilation, as each shape and layout does."""
PROGRAM_SHAPES = [(), (2, 0), (3, 5)] if IS_LONG else [(3, 5)]
PROGRAM_LAYOUTS = sorted(LAYOUTS) if IS_LONG else ["single", "partly replicated"]


class Full(Backend):
    """Fault injection: devices whose memory, or whose host's memory, is refused at times."""

    def __init__(self) -> None:
        super().__init__("cpu", 4)
        self.refuse: dict[str, int] = {}
        """For each kind of allocation, the calls until memory is refused, from then on."""
        self.refused = 0

    def _ask(self, what: str, error: Exception) -> None:
        if what in self.refuse:
            self.refuse[what] -= 1
            if self.refuse[what] < 0:
                self.refused += 1
                raise error

    def view(self, shard: Any) -> Any:
        self._ask("host", MemoryError("no memory to map"))
        return Backend.view(shard)

    def put(self, *what: Any, **how: Any) -> Any:
        self._ask("device", JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating"))
        return super().put(*what, **how)

    def join(self, *what: Any) -> Any:
        self._ask("join", JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating"))
        return super().join(*what)


class Heard:
    """A fake connection to a controller; records answers."""

    def __init__(self) -> None:
        self.reports: list[Any] = []

    def sendall(self, data: bytes) -> None:
        (length,) = struct.unpack_from("<I", data)
        report: Any = msgspec.msgpack.decode(data[4:][:length], type=messages.Report)
        # Inputs and launches report others at any time.
        if isinstance(report, messages.CommandDone | messages.CommandFailed):
            self.reports.append(report)


class Store:
    """One host's object store, and its controller's view of it.

    Attributes:
        expected: bytes of the shards of each buffer as it was made; none for a failed one.
        spilled: buffers that are in host memory as far as the controller knows.
    """

    def __init__(self) -> None:
        self.backend = Full()
        self.heard = Heard()
        report = Reporter(self.heard)  # type: ignore[arg-type]
        self.objects = Objects()
        token = secrets.token_hex(16)
        self.planes = [_native.DataPlane(host, "tcp:127.0.0.1:0", [], token) for host in (0, 1)]
        self.planes[1].add_peer(0, self.planes[0].address)
        self.planes[0].add_peer(1, self.planes[1].address)
        plane = self.planes[0]
        stored = StoredPrograms(Path(), 0, "")
        self.host = LocalHost(0, self.backend, plane, report, stored)
        self.mover = Mover(self.backend, self.objects, plane, report, None)
        self.programs: dict[int, Any] = {}
        self.launcher = Launcher(self.backend, self.objects, self.programs, plane, report, None)
        self.numbers: dict[Any, int] = {}
        self.next = 1
        self.launches = 0
        self.begin()

    def begin(self) -> None:
        """Forgets all buffers."""
        self.objects.free(list(self.objects.values))
        self.spiller = Spiller(self.backend, self.objects)
        self.backend.refuse.clear()
        self.heard.reports.clear()
        self.expected: dict[int, list[bytes] | None] = {}
        self.specs: dict[int, HostArray] = {}
        self.group: dict[int, set[int]] = {}
        self.spilled: set[int] = set()
        self.memory: dict[Any, Any] = {}
        self.shared: list[tuple[int, int, int, int]] = []

    def number(self, count: int = 1) -> int:
        self.next += count
        return self.next - count

    def close(self) -> None:
        for plane in self.planes:
            plane.close()

    # Commands of the controller

    def made(self, number: int, spec: HostArray) -> int:
        """Records the contents of a new buffer, before anything happens to it."""
        array = resolve(self.objects.get(number))
        array.block_until_ready()
        self.specs[number] = spec
        self.group[number] = {number}
        shards = self.backend.shards(array)
        self.expected[number] = [bytes(bytes_of(Backend.view(shard))) for shard in shards]
        assert self.backend.places(array) == tuple(shard.device for shard in spec.shards)
        return number

    def use(self, *numbers: int) -> None:
        """Has the buffers swapped in that a command needs."""
        wanted = sorted({one for number in numbers for one in self.group[number]} & self.spilled)
        if wanted:
            self.spilled -= set(wanted)
            self.spiller.restore(wanted)

    def spill(self, *numbers: int) -> None:
        chosen = {one for number in numbers for one in self.group[number]} - self.spilled
        chosen = {one for one in chosen if not self.group[one] & self.spilled}
        self.spilled |= chosen
        self.spiller.spill(sorted(chosen))

    def address(self, number: int, index: int) -> int:
        shard = self.backend.shard(resolve(self.objects.get(number)), index)
        return int(shard.unsafe_buffer_pointer())

    def forget(self, number: int) -> None:
        self.group[number].discard(number)
        self.spilled.discard(number)
        for known in (self.group, self.specs, self.expected):
            known.pop(number)

    def read(self, number: int) -> None:
        """Reads all shards; may fail only if memory was refused during the read."""
        before = self.backend.refused
        self.use(number)
        expected = self.expected[number]
        assert expected is not None
        for index, data in enumerate(expected):
            self.mover.read(messages.Read(7, number, index, None))
            self.objects.finish_waits([number])
            answer = self.heard.reports.pop()
            assert answer.ticket == 7
            if isinstance(answer, messages.CommandDone):
                assert answer.reply == messages.ShardData(data), (self.specs[number], index)
            else:
                assert answer.error.startswith("RESOURCE_EXHAUSTED: "), answer
                assert self.backend.refused > before, answer
                value = self.objects.values[number]
                if isinstance(value, Spilled) and len(self.group[number]) == 1:
                    # All shards may be there, where only the host's memory for reading is refused.
                    on_devices = len(value.keys(0))
                    assert on_devices in (0, len(expected)), "half an array holds device memory"

    def launch(self, number: int, kind: str, keep: bool) -> list[int]:
        """Runs a program on a buffer; returns the results, or nothing if memory was refused."""
        spec = self.specs[number]
        dtype, shards = spec.dtype, spec.shards
        devices, shape = tuple(shard.device for shard in shards), tuple(shards[0].shape)
        program = self.program(kind, dtype, shape, devices, "", 1)
        before = self.backend.refused
        self.use(number)
        results = 2 if kind in ("two results", "token") else 1
        first = self.run(program, [number], results, [0] if keep else [])
        failed = isinstance(self.objects.values[first], Failed)
        if kind == "donate" and not keep:
            self.objects.free([number])
            self.forget(number)
        if failed:
            text = self.objects.values[first].text
            assert text.startswith("RESOURCE_EXHAUSTED"), text
            assert self.backend.refused > before, text
            self.objects.free(list(range(first, first + results)))
            return []
        last = first + (results if kind != "token" else 1)
        return [self.made(one, spec) for one in range(first, last)]

    def run(self, program: int, args: list[int], results: int, keep: Sequence[int] = ()) -> int:
        first = self.number(results)
        self.launches += 1
        self.launch_now(program, args, first, results, [*keep])
        return first

    def launch_now(
        self,
        program: int,
        args: list[int],
        first: int,
        results: int,
        keep: list[int],
        completion: int | None = None,
    ) -> None:
        sequence = self.launches
        self.launcher.launch(
            messages.Launch(
                sequence=sequence,
                previous=sequence - 1,
                acknowledge=Acknowledge.FINISHED,
                executable=program,
                args=args,
                first_result=first,
                results=results,
                keep=keep,
                completion=completion,
                client=1,
            )
        )

    # How buffers are made

    def program(
        self,
        kind: str,
        dtype: str,
        shape: tuple[int, ...],
        devices: tuple[int, ...],
        axes: str,
        cuts: int,
    ) -> int:
        key = kind, dtype, shape, devices, axes
        if key not in self.numbers:
            whole = (shape[0] * cuts, *shape[1:]) if shape and axes else shape
            text = module(kind, KINDS[dtype], whole, shape, len(devices), axes if shape else "")
            context = mpmd.context()
            with context:
                parsed = ir.Module.parse(text, context)
                loaded = self.backend.compile(parsed, b"", list(devices), (1, len(devices)))
            outputs: list[Any] = [(dtype_of(dtype), shape, None)] * (2 if "two" in kind else 1)
            outputs += [(dtype_of("token"), (), None)] if kind == "token" else []
            self.numbers[key] = len(self.numbers) + 1
            self.programs[self.numbers[key]] = self.backend.wrap(loaded, "program", outputs)
        return self.numbers[key]

    def make(self, maker: str, dtype: str, shape: tuple[int, ...], layout: str, seed: int) -> int:
        """Makes a buffer by one of all the operations that make buffers."""
        devices, axes, cuts = LAYOUTS[layout]
        shards = [HostShard(at, device, [*shape]) for at, device in enumerate(devices)]
        spec = HostArray(dtype, None, shards)
        number = self.number()
        if maker in PROGRAMS:
            args = [self.make("put", dtype, shape, layout, seed)] if maker != "constant" else []
            program = self.program(maker, dtype, shape, devices, axes, cuts)
            results = 2 if maker in ("two results", "token") else 1
            number = self.run(program, args, results)
            if maker == "token":
                self.specs[number + 1] = HostArray("token", None, spec.shards)
                self.group[number + 1] = {number + 1}
                self.expected[number + 1] = None
            for one in args:
                self.objects.free([one])
                self.forget(one)
            return self.made(number, spec)
        parts = [elements(dtype, shape, seed + at) for at in range(len(devices))]
        make: Callable[..., None] = getattr(self, "_" + maker.replace(" ", "_"))
        make(number, spec, parts)
        return self.made(number, spec)

    def _put(self, number: int, spec: HostArray, parts: list[Any]) -> None:
        given = [
            messages.ShardUpload([at], part.tobytes(), list(part.shape), None)
            for at, part in enumerate(parts)
        ]
        self.mover.put(messages.Put(number, spec, given))

    def _put_in_place(self, number: int, spec: HostArray, parts: list[Any]) -> None:
        """All shards are views of one aligned memory, as are those of other arrays of the kind."""
        if (spec.dtype, parts[0].shape) not in self.memory:
            memory = np.zeros(parts[0].nbytes + 64, np.uint8)
            memory = memory[-memory.ctypes.data % 64 :][: parts[0].nbytes]
            memory[:] = parts[0].reshape(-1).view(np.uint8)
            part = memory.view(parts[0].dtype).reshape(parts[0].shape)
            self.memory[spec.dtype, part.shape] = part
        part = self.memory[spec.dtype, parts[0].shape]
        places = Places(spec)
        self.objects.attempt(number, lambda: places.make(self.backend, [part] * len(parts)))

    def _receive(self, number: int, spec: HostArray, parts: list[Any]) -> None:
        """Receives as from another island; a message has two shards, if there are two left."""
        shards = []
        for at in range(0, len(parts), 2):
            tag = self.number()
            shape = list(parts[at].shape)
            positions = list(range(at, min(at + 2, len(parts))))
            piece = messages.ShardPiece(tag, 1, messages.Region([0] * len(shape), shape))
            shards.append(messages.ReceivedShard(positions, [piece]))
        self.mover.receive(messages.Receive(number, spec, shards, []))
        for shard in shards:
            part = parts[shard.positions[0]]
            self.planes[1].send(0, shard.pieces[0].tag, bytes_of(part))

    def _exchange(self, number: int, spec: HostArray, parts: list[Any]) -> None:
        places = Places(spec)
        self.objects.values[number] = Lazy(lambda: places.make(self.backend, parts))

    def _input(self, number: int, spec: HostArray, parts: list[Any]) -> None:
        dtype, shards = spec.dtype, spec.shards
        shape = parts[0].shape
        whole = np.stack(parts)
        regions = [(slice(at, at + 1),) for at in range(len(parts))]
        box = tuple(slice(0, extent) for extent in whole.shape)
        part = BatchPart("", dtype_of(dtype), len(parts), box, regions, shape, None)
        description = Description(1, "m:f", {}, [""], 1)
        local = tuple(shard.device for shard in shards)
        batches = iter([whole])
        source = Source(self.host, description, lambda _: batches, [part], local)
        source.start()
        program = len(self.numbers) + 1
        self.numbers[object()] = program
        self.programs[program] = Feed(source, None, "input")
        first = self.number()
        self.launches += 1
        self.launch_now(program, [], first, 1, [], number)
        self.objects.values[number] = self.objects.values.pop(first)

    def _copy(self, number: int, spec: HostArray, parts: list[Any]) -> None:
        self._put(0, spec, parts)
        self.mover.copy(messages.Copy(0, number, spec))
        self.objects.free([0])

    def _bitcast(self, number: int, spec: HostArray, parts: list[Any]) -> None:
        """Of an array that stays, and whose memory it may share."""
        source = self.number()
        size = [parts[0].nbytes]
        shards = [HostShard(shard.position, shard.device, size) for shard in spec.shards]
        flat = HostArray("uint8", None, shards)
        self._put(source, flat, [part.reshape(-1).view(np.uint8) for part in parts])
        self.made(source, flat)
        self.mover.bitcast(messages.Bitcast(source, number, spec))

    def share(self, number: int, index: int) -> int:
        """Makes an alias of one shard of a buffer, or of all of them."""
        whole = self.specs[number]
        shards = whole.shards
        chosen = shards[index : index + 1] if index < len(shards) else shards
        first = min(index, len(shards)) % len(shards)
        renumbered = [HostShard(at, one.device, one.shape) for at, one in enumerate(chosen)]
        spec = HostArray(whole.dtype, whole.memory, renumbered)
        before = self.backend.refused
        self.use(number)
        named = self.number()
        sources = [messages.AssembledShard(at, number, first + at) for at in range(len(chosen))]
        self.mover.assemble_shards(messages.AssembleShards(named, spec, sources))
        if isinstance(value := self.objects.values[named], Failed):
            assert value.text.startswith("RESOURCE_EXHAUSTED"), value.text
            assert self.backend.refused > before
            self.objects.free([named])
            return number
        refuse, self.backend.refuse = self.backend.refuse, {}
        self.made(named, spec)
        self.backend.refuse = refuse
        self.group[named] = self.group[number]
        self.group[named].add(named)
        self.shared += [(named, at, number, first + at) for at in range(len(chosen))]
        return named


def elements(dtype: str, shape: tuple[int, ...], seed: int) -> Any:
    """Random elements that are valid bit patterns of the type."""
    random = np.random.default_rng(seed)
    kind = dtype_of(dtype)
    if dtype == "bool":
        return random.integers(0, 2, shape).astype(kind)
    if dtype.startswith(("int", "uint", "float4")):
        return random.integers(0, 2, shape).astype(kind)
    raw = random.integers(0, 255, (*shape, kind.itemsize), np.uint8)
    return np.ascontiguousarray(raw).reshape(-1).view(kind).reshape(shape)


def module(
    kind: str, mlir: str, whole: tuple[int, ...], shard: tuple[int, ...], devices: int, axes: str
) -> str:
    """A program that reverses its argument, or gathers it, or returns a constant."""

    def tensor(shape: tuple[int, ...]) -> str:
        return f"tensor<{''.join(f'{extent}x' for extent in shape)}{mlir}>"

    def turned(value: str, result: str, shape: tuple[int, ...], by: list[int]) -> str:
        if not by:
            return f"{result} = stablehlo.optimization_barrier {value} : {tensor(shape)}"
        return f"{result} = stablehlo.reverse {value}, dims = {by} : {tensor(shape)}"

    mesh = '["x"=2, "y"=2]' if devices == 4 else f'["x"={devices}]'
    cut = axes.replace("'", '"')
    cut_dims = ", ".join([cut or "{}", *["{}"] * (len(whole) - 1)]) if whole else ""
    by = list(range(1 if axes else 0, len(whole)))
    where = f" {{sdy.sharding = #sdy.sharding<@mesh, [{cut_dims}]>}}"
    donated = where.replace("{sdy", "{jax.buffer_donor = true, sdy", 1)
    t = tensor(whole)
    head = f"sdy.mesh @mesh = <{mesh}>\n"
    taken = f"(%a: {t}{donated if kind == 'donate' else where})"
    one = f"{t}{where}"
    if kind == "constant":
        value = {"i1": "true"}.get(mlir, "1" if "i" in mlir.replace("complex", "") else "1.0")
        value = "(1.0, 0.5)" if mlir.startswith("complex") else value
        body = f"%b = stablehlo.constant dense<{value}> : {t}\nreturn %b : {t}"
        return f"{head}func.func public @main() -> ({one}) {{\n{body}\n}}"
    if kind == "token":
        body = f"{turned('%a', '%b', whole, by)}\n%t = stablehlo.create_token : !stablehlo.token\n"
        results = f"({one}, !stablehlo.token)"
        body += f"return %b, %t : {t}, !stablehlo.token"
        return f"{head}func.func public @main{taken} -> {results} {{\n{body}\n}}"
    if kind == "two results":
        body = f"{turned('%a', '%b', whole, by)}\nreturn %b, %a : {t}, {t}"
        return f"{head}func.func public @main{taken} -> ({one}, {one}) {{\n{body}\n}}"
    if kind in ("shard_map", "collective") and devices > 1:
        local = shard if axes else whole
        inner = turned("%p", "%q", local, list(range(len(local))))
        if kind == "collective":
            pairs = [[at, (at + 1) % devices] for at in range(devices)]
            inner = (
                f'%q = "stablehlo.collective_permute"(%p) <{{source_target_pairs = dense<{pairs}>'
                f" : tensor<{devices}x2xi64>, channel_handle = #stablehlo.channel_handle<"
                f"handle = 1, type = 1>}}> : ({tensor(local)}) -> {tensor(local)}"
            )
        inside = f"<@mesh, [{cut_dims}]>" if whole else "<@mesh, []>"
        names = '{"x", "y"}' if devices == 4 else '{"x"}'
        body = (
            f"%b = sdy.manual_computation(%a) in_shardings=[{inside}] out_shardings=[{inside}] "
            f"manual_axes={names} (%p: {tensor(local)}) {{\n{inner}\nsdy.return %q : "
            f"{tensor(local)}\n}} : ({t}) -> {t}\nreturn %b : {t}"
        )
        return f"{head}func.func public @main{taken} -> ({one}) {{\n{body}\n}}"
    body = f"{turned('%a', '%b', whole, by)}\nreturn %b : {t}"
    return f"{head}func.func public @main{taken} -> ({one}) {{\n{body}\n}}"
