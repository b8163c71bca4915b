"""Compiles programs and answers queries about them, concurrently with other commands."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fairway import _native, mpmd
from fairway.host import batches, ifrt_ir, inputs, programs, wire
from fairway.host.backend import READING, Backend, Executable
from fairway.host.checking import Checker, CheckKind
from fairway.host.collectives import LoweredExchange, NotOnlyCollectivesError
from fairway.host.modules import AllowedModules
from fairway.host.moves import MESSAGE_TIMEOUT_S, Mover
from fairway.host.objects import Failed, error_text
from fairway.host.trace import Trace
from fairway.shards import Description

COMPILING = 8
"""Programs compiled concurrently, so that a client with slow compilations does not block others."""


class Compiler:
    """Executes commands about programs.

    One host of an island compiles and sends the serialized executable to the others.

    Attributes:
        programs: programs of one island, by number.
        inputs: inputs of this host.
        exchanges: programs over several islands, by number.

    Args:
        backend: this host's devices.
        host: this host's number over all islands.
        plane: its end of the data plane.
        mover: reports that a message will not be sent.
        report: sends reports to the controller.
        modules: modules that input functions may come from.
        checker: parses programs first.
        trace: records compilations, if set.
    """

    def __init__(
        self,
        backend: Backend,
        host: int,
        plane: _native.DataPlane,
        mover: Mover,
        report: wire.Reporter,
        modules: AllowedModules,
        checker: Checker,
        trace: Trace | None = None,
    ) -> None:
        self._trace = trace
        self.programs: dict[int, Executable | inputs.Feed] = {}
        self.inputs = inputs.HostInputs(backend, host, report, modules)
        self.exchanges: dict[int, LoweredExchange] = {}
        self._backend = backend
        self._checker = checker
        self._host = host
        self._plane = plane
        self._mover = mover
        self._report = report
        self._threads = ThreadPoolExecutor(COMPILING, thread_name_prefix="fairway-compile")

    def compile(
        self,
        ticket: int,
        executable: int,
        program: bytes,
        options: bytes,
        devices: list[int],
        grid: tuple[int, int],
        role: tuple[bool, list[Any]],
    ) -> None:
        """Compiles a program, or loads what another host compiled."""
        job = (ticket, executable, program, options, devices, grid, role)
        if not role[0]:
            self._plane.expect(role[1][1], role[1][0])
        self._threads.submit(self._compile_now, *job)

    def _compile_now(
        self,
        ticket: int,
        executable: int,
        program: bytes,
        options: bytes,
        devices: list[int],
        grid: tuple[int, int],
        role: tuple[bool, list[Any]],
    ) -> None:
        leads, others = role
        try:
            bytecode = self._checker.check(CheckKind.ARTIFACT, program)
            with READING:
                module = self._backend.load(bytecode)
                signature = programs.Signature(module)
                description = inputs.find(module)
            begun = time.monotonic_ns()
            if leads:
                loaded = self._compile_first(module, options, devices, grid, others)
            else:
                loaded = self._load_shared(module, options, devices, grid, others[1])
            wrapped, report = programs.describe(self._backend, loaded, signature, len(devices))
            if self._trace is not None:
                self._trace.compiled(begun, wrapped.name, "compiles" if leads else "loads")
            if description is not None:
                opening = (ticket, executable, description, wrapped, devices, report)
                # Not in our thread pool: the imports are the user's, and may take long.
                threading.Thread(target=self._open_input, args=opening, daemon=True).start()
                return
            self.programs[executable] = wrapped
            self._report.done(ticket, wire.COMPILED, *report)
        except Exception as error:
            self._report.failed(ticket, error_text(error))

    def _open_input(
        self,
        ticket: int,
        executable: int,
        description: Description,
        program: Executable,
        devices: list[int],
        report: tuple[Any, ...],
    ) -> None:
        """Makes a program the feed of an input's batches."""
        try:
            *described, _ = report
            feed = self.inputs.open(description, program, devices, report[4])
            self.programs[executable] = feed
            self._report.done(ticket, wire.COMPILED, *described, description.number)
            feed.source.start()
        except Exception as error:
            self._report.failed(ticket, error_text(error))

    def _compile_first(
        self, module: Any, options: bytes, devices: list[int], grid: Any, followers: list[Any]
    ) -> Any:
        try:
            loaded = self._backend.compile(module, options, devices, grid)
            serialized = loaded.serialize() if followers else b""
        except Exception as error:
            for host, tag in followers:
                self._mover.send_failure(host, tag, error_text(error))
            raise
        for host, tag in followers:
            self._plane.send(host, tag, serialized)
        return loaded

    def _load_shared(
        self, module: Any, options: bytes, devices: list[int], grid: Any, tag: int
    ) -> Any:
        serialized = bytes(self._plane.take(tag, MESSAGE_TIMEOUT_S))
        try:
            return self._backend.deserialize(serialized, options, devices, grid)
        except Exception:  # another kind of processor: its executable cannot be used here
            return self._backend.compile(module, options, devices, grid)

    def compile_exchange(
        self, ticket: int, executable: int, program: bytes, owners: list[int]
    ) -> None:
        """Prepares a program over several islands."""
        self._threads.submit(self._compile_exchange_now, ticket, executable, program, owners)

    def _compile_exchange_now(
        self, ticket: int, executable: int, program: bytes, owners: list[int]
    ) -> None:
        try:
            bytecode = self._checker.check(CheckKind.ARTIFACT, program)
            with READING:
                module = self._backend.load(bytecode)
                exchange = LoweredExchange(module, owners, self._host)
                signature = programs.Signature(module)
            self.exchanges[executable] = exchange
            memory = self._backend.memory_kinds()[0]
            report = _describe_exchange(signature, exchange, memory)
            self._report.done(ticket, wire.COMPILED, *report)
        except NotOnlyCollectivesError as error:
            self._report.failed(ticket, f"INVALID_ARGUMENT: {error}")
        except Exception as error:
            self._report.failed(ticket, error_text(error))

    def read_program(self, ticket: int, program: bytes) -> None:
        """Reports the nodes of a whole program, and the code of its functions."""
        self._threads.submit(self._read_program_now, ticket, program)

    def _read_program_now(self, ticket: int, program: bytes) -> None:
        try:
            bytecode = self._checker.check(CheckKind.IFRT_IR, program)
            with READING:
                context = mpmd.context()
                read = ifrt_ir.read(bytecode, context)
                batched = batches.batch(read, context)
                code = [
                    (function.options, self._backend.artifact(function.module, context))
                    for function in batched.functions()
                ]
            self._report.done(ticket, wire.PROGRAM, read.text(), batched.text(), code)
        except Exception as error:
            self._report.failed(ticket, error_text(error))

    def free(self, executable: int) -> None:
        """Frees a program."""
        program = self.programs.pop(executable, None)
        if isinstance(program, inputs.Feed):
            self.inputs.close(program)
        self.exchanges.pop(executable, None)

    def program_text(self, ticket: int, executable: int) -> None:
        """Reports the text of the optimised program."""
        program = self.programs.get(executable)

        def text() -> str:
            return str(_loaded(program).get_hlo_text())

        self._threads.submit(self._tell, ticket, wire.TEXT, text)

    def _tell(self, ticket: int, kind: int, find: Callable[[], Any]) -> None:
        try:
            self._report.done(ticket, kind, find())
        except Exception as error:
            self._report.failed(ticket, error_text(error))


def _loaded(program: Executable | inputs.Feed | None) -> Any:
    """Returns jaxlib's executable of a program."""
    if program is None:
        raise Failed("UNIMPLEMENTED: a program over several islands is not compiled by XLA")
    return program.loaded


def _describe_exchange(
    signature: programs.Signature, exchange: LoweredExchange, memory: str
) -> tuple[Any, ...]:
    """Reports on a program over several islands, like :func:`programs.describe` on others.

    Args:
        signature: signature of the program.
        exchange: the program, ready to run.
        memory: memory kind of its results.
    """
    ranks = [len(shape) for shape in signature.parameters]
    outputs = [(dtype, shape, (cut, b""), memory) for _, dtype, shape, cut in exchange.outputs]
    return (
        signature.name,
        None,
        [(cut, b"") for cut in exchange.parameters],
        [list(range(rank))[::-1] for rank in ranks],
        outputs,
        [list(range(len(shape)))[::-1] for _, shape, _, _ in outputs],
        [],
        len(ranks),
        None,
        0,
        None,
        None,
    )
