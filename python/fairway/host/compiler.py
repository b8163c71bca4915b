"""Compiles programs and answers queries about them, concurrently with other commands."""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np

from fairway import mpmd
from fairway.host import batches, ifrt_ir, inputs, messages, programs
from fairway.host.backend import READING
from fairway.host.callbacks import HostCallbacks
from fairway.host.checking import Checker, CheckKind
from fairway.host.collectives import LoweredExchange
from fairway.host.compiled import CompiledProgram, CompiledPrograms, fingerprint, has_state
from fairway.host.executable import Executable
from fairway.host.local import LocalHost
from fairway.host.modules import AllowedModules
from fairway.host.moves import MESSAGE_TIMEOUT_S, Mover
from fairway.host.objects import Failed, error_text
from fairway.host.partition import Crossing, Partitioned
from fairway.host.shard_maps import NotOnlyCollectivesError
from fairway.shards import Description

COLLECTIVES_BYTES = 1 << 16
"""Size of a program above which it certainly computes."""
STORED_S = 0.1
"""Time from which on a compilation is worth a file."""
COMPILING = 8
"""Programs compiled concurrently, so that a client with slow compilations does not block others."""


class Compiler:
    """Executes commands about programs.

    One host of an island compiles and sends the serialized executable to the others. Equal programs
    are compiled once, and loaded from disk where that was before this host started.

    Attributes:
        programs: programs of one island, by number.
        inputs: inputs of this host.
        exchanges: programs over several islands, by number.

    Args:
        host: this host.
        mover: reports that a message will not be sent.
        modules: modules that input functions may come from.
        checker: parses programs first.
    """

    def __init__(
        self, host: LocalHost, mover: Mover, modules: AllowedModules, checker: Checker
    ) -> None:
        self._trace = host.trace
        self.programs: dict[int, Executable | inputs.Feed] = {}
        self.inputs = inputs.HostInputs(host, modules)
        self.exchanges: dict[int, LoweredExchange] = {}
        self._compiled = CompiledPrograms()
        self._stored = host.stored
        self._callbacks = HostCallbacks(host.plane, host.report)
        self._backend = host.backend
        self._checker = checker
        self._host = host.number
        self._plane = host.plane
        self._mover = mover
        self._report = host.report
        self._threads = ThreadPoolExecutor(COMPILING, thread_name_prefix="fairway-compile")

    def compile(self, command: messages.Compile) -> None:
        """Compiles a program, or loads what another host compiled."""
        if not command.role.leads:
            [leader] = command.role.peers
            self._plane.expect(leader.tag, leader.host)
        self._threads.submit(self._compile_now, command)

    def _compile_now(self, command: messages.Compile) -> None:
        ticket, devices, leads = command.ticket, command.devices, command.role.leads
        try:
            bytecode = self._checker.check(CheckKind.ARTIFACT, command.program)
            with READING:
                module = self._backend.load(bytecode)
                signature = programs.Signature(module)
                description = inputs.find(module)
                calls = self._callbacks.program(module, len(devices))
            begun = time.monotonic_ns()
            if calls is not None:
                # No executable with functions can be serialized, and each client has its own.
                if not leads:
                    self._plane.discard(command.role.peers[0].tag)
                loaded, how = self._compile_module(module, command, calls.functions), "compiles"
            elif not leads:
                loaded, how = self._load_shared(module, command)
            elif command.role.peers:
                loaded, how = self._compile_first(module, command)
            else:
                compiled, how = self._compile_alone(module, command)
                loaded = compiled.loaded
            wrapped, metadata = programs.describe(self._backend, loaded, signature, len(devices))
            wrapped.calls = calls
            if command.island is not None:
                metadata = self._bind(wrapped, metadata, command.island)
            if self._trace is not None:
                self._trace.compiled(begun, wrapped.name, how)
            if description is not None:
                opening = (command, description, wrapped, metadata)
                # Not in our thread pool: the imports are the user's, and may take long.
                threading.Thread(target=self._open_input, args=opening, daemon=True).start()
                return
            self.programs[command.executable] = wrapped
            self._report.done(ticket, messages.ProgramCompiled(metadata))
        except Exception as error:
            self._report.failed(ticket, error_text(error))

    def _bind(
        self, program: Executable, metadata: messages.ProgramMetadata, island: int
    ) -> messages.ProgramMetadata:
        """Gives a program the number of its island; returns the metadata of what is left."""
        shape: tuple[int, ...] = ()
        numbers = [np.array(island, np.int32) for _ in program.local]
        number = self._backend.put(np.dtype(np.int32), shape, program.local, None, numbers)
        program.bind(number)
        parameters = metadata.parameters
        return msgspec.structs.replace(
            metadata,
            parameters=None if parameters is None else parameters[1:],
            parameter_layouts=metadata.parameter_layouts[1:],
            parameter_count=metadata.parameter_count - 1,
            donated=[index - 1 for index in metadata.donated],
        )

    def _open_input(
        self,
        command: messages.Compile,
        description: Description,
        program: Executable,
        metadata: messages.ProgramMetadata,
    ) -> None:
        """Makes a program the feed of an input's batches."""
        try:
            feed = self.inputs.open(description, program, command.devices, metadata.outputs)
            self.programs[command.executable] = feed
            metadata = msgspec.structs.replace(metadata, input=description.number)
            self._report.done(command.ticket, messages.ProgramCompiled(metadata))
            feed.source.start()
        except Exception as error:
            self._report.failed(command.ticket, error_text(error))

    def _compile_alone(self, module: Any, command: messages.Compile) -> tuple[CompiledProgram, str]:
        """Compiles a program, unless an equal one is known or stored; returns how it was made."""
        if has_state(module, self._checker.custom_calls):
            return CompiledProgram(self._compile_module(module, command)), "compiles"
        key, size = fingerprint(module, command)
        how = "reuses"

        def compile_program() -> CompiledProgram:
            nonlocal how
            options, devices, grid = command.options, command.devices, command.grid
            if (serialized := self._stored.get(key)) is not None:
                with contextlib.suppress(Exception):  # another build of jaxlib has stored it
                    loaded = self._backend.deserialize(serialized, options, devices, grid)
                    how = "loads"
                    return CompiledProgram(loaded, serialized)
            begun, how = time.monotonic(), "compiles"
            loaded = self._compile_module(module, command)
            if time.monotonic() - begun >= STORED_S:
                with contextlib.suppress(Exception):  # a platform that can serialize none
                    self._stored.put(key, loaded.serialize())
            return CompiledProgram(loaded)

        return self._compiled.get(key, size, compile_program), how

    def _compile_module(
        self,
        module: Any,
        command: messages.Compile,
        callbacks: Sequence[Callable[..., Any]] = (),
    ) -> Any:
        options, devices, grid = command.options, command.devices, command.grid
        return self._backend.compile(module, options, devices, grid, callbacks)

    def _compile_first(self, module: Any, command: messages.Compile) -> tuple[Any, str]:
        """Compiles a program, and sends it to the other hosts."""
        unsent = list(command.role.peers)
        try:
            compiled, how = self._compile_alone(module, command)
            serialized = compiled.to_bytes()
            while unsent:
                self._plane.send(unsent[0].host, unsent[0].tag, serialized)
                unsent.pop(0)
        except Exception as error:
            for follower in unsent:
                self._mover.send_failure(follower.host, follower.tag, error_text(error))
            raise
        return compiled.loaded, how

    def _load_shared(self, module: Any, command: messages.Compile) -> tuple[Any, str]:
        """Loads what another host has compiled, unless an equal program is known."""
        options, devices, grid = command.options, command.devices, command.grid
        [leader] = command.role.peers
        how = "reuses"

        def load() -> CompiledProgram:
            nonlocal how
            how = "loads"
            serialized = bytes(self._plane.take(leader.tag, MESSAGE_TIMEOUT_S))
            try:
                loaded = self._backend.deserialize(serialized, options, devices, grid)
                return CompiledProgram(loaded, serialized)
            except Exception:  # another kind of processor: its executable cannot be used here
                return CompiledProgram(self._compile_module(module, command))

        if has_state(module, self._checker.custom_calls):
            return load().loaded, how
        compiled = self._compiled.get(*fingerprint(module, command), load)
        if how == "reuses":
            self._plane.discard(leader.tag)
        return compiled.loaded, how

    def compile_exchange(self, command: messages.CompileExchange) -> None:
        """Prepares a program over several islands."""
        self._threads.submit(self._compile_exchange_now, command)

    def _compile_exchange_now(self, command: messages.CompileExchange) -> None:
        ticket = command.ticket
        try:
            memory = self._backend.memory_kinds()[0]
            if command.is_crossing:
                crossing = msgspec.msgpack.decode(command.program, type=Crossing)
                exchange = LoweredExchange.of_crossing(crossing, command.owners, self._host)
                ranks, name = [len(shape) for shape in crossing.shapes], crossing.kind
            else:
                bytecode = self._checker.check(CheckKind.ARTIFACT, command.program)
                with READING:
                    module = self._backend.load(bytecode)
                    exchange = LoweredExchange(module, command.owners, self._host)
                    signature = programs.Signature(module)
                ranks = [len(shape) for shape in signature.parameters]
                name = signature.name
            self.exchanges[command.executable] = exchange
            metadata = _describe_exchange((name, ranks), exchange, memory)
            self._report.done(ticket, messages.ProgramCompiled(metadata))
        except NotOnlyCollectivesError as error:
            self._report.failed(ticket, f"INVALID_ARGUMENT: {error}")
        except Exception as error:
            self._report.failed(ticket, error_text(error))

    def partition(self, command: messages.PartitionProgram) -> None:
        """Reports the parts of a program over several islands."""
        self._threads.submit(self._partition_now, command)

    def _partition_now(self, command: messages.PartitionProgram) -> None:
        try:
            if self._is_only_collectives(command):
                self._report.done(command.ticket, messages.OnlyCollectives())
                return
            islands = struct.pack(f"<{len(command.islands)}I", *command.islands)
            count = len(command.islands).to_bytes(4, "little")
            read = self._checker.check(CheckKind.SPANNING, count + islands + command.program)
            parts = msgspec.msgpack.decode(read, type=Partitioned)
            functions = [
                messages.PartitionedFunction(part.is_exchange, part.uses_island, part.code)
                for part in parts.functions
            ]
            reply = messages.ProgramPartitioned(parts.text, functions, parts.members, parts.costs)
            self._report.done(command.ticket, reply)
        except Exception as error:
            self._report.failed(command.ticket, error_text(error))

    def _is_only_collectives(self, command: messages.PartitionProgram) -> bool:
        """Returns whether a program has collectives only, so that no computation is left."""
        if len(command.program) > COLLECTIVES_BYTES:
            return False
        bytecode = self._checker.check(CheckKind.ARTIFACT, command.program)
        with READING:
            try:
                LoweredExchange(self._backend.load(bytecode), command.islands, command.islands[0])
            except NotOnlyCollectivesError:
                return False
        return True

    def read_program(self, command: messages.ReadProgram) -> None:
        """Reports the nodes of a whole program, and the code of its functions."""
        self._threads.submit(self._read_program_now, command.ticket, command.program)

    def _read_program_now(self, ticket: int, program: bytes) -> None:
        try:
            bytecode = self._checker.check(CheckKind.IFRT_IR, program)
            with READING:
                context = mpmd.context()
                read = ifrt_ir.read(bytecode, context)
                batched = batches.batch(read, context)
                code = [
                    messages.FunctionCode(
                        function.options, self._backend.artifact(function.module, context)
                    )
                    for function in batched.functions()
                ]
            reply = messages.ProgramRead(read.text(), batched.text(), code)
            self._report.done(ticket, reply)
        except Exception as error:
            self._report.failed(ticket, error_text(error))

    def free(self, executable: int) -> None:
        """Frees a program."""
        program = self.programs.pop(executable, None)
        if isinstance(program, inputs.Feed):
            self.inputs.close(program)
        elif program is not None and program.calls is not None:
            program.calls.close()
        self.exchanges.pop(executable, None)

    def program_text(self, command: messages.ProgramText) -> None:
        """Reports the text of optimised programs, one after another."""
        found = [self.programs.get(executable) for executable in command.executables]
        self._threads.submit(self._program_text_now, command.ticket, found)

    def _program_text_now(self, ticket: int, found: list[Executable | inputs.Feed | None]) -> None:
        try:
            text = "\n\n".join(str(_loaded(program).get_hlo_text()) for program in found)
            self._report.done(ticket, messages.OptimisedText(text))
        except Exception as error:
            self._report.failed(ticket, error_text(error))


def _loaded(program: Executable | inputs.Feed | None) -> Any:
    """Returns jaxlib's executable of a program."""
    if program is None:
        raise Failed("UNIMPLEMENTED: a program over several islands is not compiled by XLA")
    return program.loaded


def _describe_exchange(
    signature: tuple[str, list[int]], exchange: LoweredExchange, memory: str
) -> messages.ProgramMetadata:
    """Describes a program over several islands, like :func:`programs.describe` on others.

    Args:
        signature: name of the program, and rank of each parameter.
        exchange: the program, ready to run.
        memory: memory kind of its results.
    """
    name, ranks = signature
    outputs = [
        messages.OutputSpec(dtype, list(shape), messages.CompiledSharding(cut, b""), memory)
        for _, dtype, shape, cut in exchange.outputs
    ]
    return messages.ProgramMetadata(
        name=name,
        fingerprint=None,
        parameters=[messages.CompiledSharding(cut, b"") for cut in exchange.parameters],
        parameter_layouts=[list(range(rank))[::-1] for rank in ranks],
        outputs=outputs,
        output_layouts=[list(range(len(output.dims)))[::-1] for output in outputs],
        donated=[],
        parameter_count=len(ranks),
        memory=None,
        code_bytes=0,
        costs=None,
        input=None,
        collectives=exchange.host_collectives(),
    )
