"""The executor: executes the controller's commands in order.

One thread takes the commands. Operations that block (on a computation, on a transfer, on a
compiler) are finished by other threads; a launch waits for its own inputs only.
"""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

import msgpack

from fairway import _native
from fairway.errors import LaunchOrderError
from fairway.host import wire
from fairway.host.backend import Backend
from fairway.host.checking import Checker
from fairway.host.compiler import Compiler
from fairway.host.exchanges import Exchanger
from fairway.host.launches import Launcher
from fairway.host.modules import AllowedModules
from fairway.host.moves import Mover
from fairway.host.objects import Objects, error_text
from fairway.host.plans import Plans
from fairway.host.runs import Runner
from fairway.host.spilling import Spiller
from fairway.host.teams import Teams
from fairway.host.trace import Trace

__all__ = ["Executor", "serve"]

RECEIVE_BYTES = 1 << 20
ANSWERING = {
    "read", "check_ready", "compile", "compile_exchange", "program_text",
    "read_program",
}  # fmt: skip
"""Commands whose first field is the ticket of an answer that the controller waits for."""
MAKING = {"put": 1, "gather": 1, "copy": 2, "bitcast": 2, "receive": 1}
"""Commands that make an array, and the index of the field with its number."""


class Executor:
    """Executes commands on one host.

    Args:
        backend: this host's devices.
        host: this host's number over all islands.
        plane: this host's end of the data plane.
        teams: its teams for collectives.
        connection: connected to the controller; the handshake (hello) has been sent.
        trace: records runs and transfers, if set.
        modules: modules that input functions may come from.
        checker: parses programs before this process does.
    """

    def __init__(
        self,
        backend: Backend,
        host: int,
        plane: _native.DataPlane,
        teams: Teams,
        connection: socket.socket,
        trace: Trace | None,
        modules: AllowedModules,
        checker: Checker,
    ) -> None:
        self._connection = connection
        self._plane = plane
        self._report = report = wire.Reporter(connection)
        self._objects = objects = Objects()
        self._mover = mover = Mover(backend, objects, plane, report, trace)
        compiler = Compiler(backend, host, plane, mover, report, modules, checker, trace)
        self._compiler = compiler
        self._exchanger = exchanger = Exchanger(
            backend, host, objects, plane, teams, compiler.exchanges, report, trace
        )
        launcher = Launcher(backend, objects, compiler.programs, report, trace)
        plans = Plans(teams, host, report)
        self._runner = runner = Runner(objects, launcher, mover, exchanger, plans)
        spiller = Spiller(backend, objects)
        self._commands: dict[str, Callable[..., None]] = {
            "launch": launcher.launch,
            "put": mover.put,
            "gather": mover.gather,
            "copy": mover.copy,
            "bitcast": mover.bitcast,
            "send": mover.send,
            "receive": mover.receive,
            "read": mover.read,
            "check_ready": mover.check_ready,
            "delete": objects.delete,
            "free": objects.free,
            "poison": objects.poison,
            "compile": compiler.compile,
            "free_executable": self._free_executable,
            "program_text": compiler.program_text,
            "peers": self._peers,
            "compile_exchange": compiler.compile_exchange,
            "exchange": exchanger.exchange,
            "tidy": plane.tidy,
            "read_program": compiler.read_program,
            "load_program": runner.load,
            "run": runner.run,
            "spill": spiller.spill,
            "restore": spiller.restore,
            "end_input": compiler.inputs.end,
            "sparse": exchanger.sparse,
            "relay": mover.relay,
            "plan": plans.adopt,
            "report_arrival": mover.report_arrival,
            "report_end": launcher.report_end,
        }

    def run(self) -> None:
        """Executes commands until the controller closes the connection."""
        commands = [self._commands[name] for name in wire.COMMANDS]
        unpacker = msgpack.Unpacker(raw=False, max_buffer_size=0)
        buffer = bytearray(RECEIVE_BYTES)
        view = memoryview(buffer)
        while True:
            received = self._connection.recv_into(buffer)
            if received == 0:
                return
            unpacker.feed(view[:received])
            for command in unpacker:
                try:
                    commands[command[0]](*command[1:])
                except LaunchOrderError:
                    raise
                except Exception as error:  # an invalid command fails alone
                    traceback.print_exc()
                    self._excuse(command, error)

    def _excuse(self, command: list[Any], error: Exception) -> None:
        """Fails the answer or the results of a command that raised an error."""
        name = wire.COMMANDS[command[0]]
        if name in ANSWERING:
            self._report.failed(command[1], error_text(error))
        elif name in MAKING:
            self._objects.poison([command[MAKING[name]]], error_text(error))
        elif name == "exchange":
            _, _, _, first, results, *_ = command
            self._objects.poison(list(range(first, first + len(results))), error_text(error))

    def _free_executable(self, executable: int) -> None:
        self._compiler.free(executable)
        self._runner.unload(executable)

    def _peers(self, peers: list[tuple[int, str]]) -> None:
        for host, address in peers:
            self._plane.add_peer(host, address)


def serve(
    backend: Backend,
    host: int,
    plane: _native.DataPlane,
    teams: Teams,
    connection: socket.socket,
    hello: list[Any],
    trace: Trace | None,
    modules: AllowedModules,
    checker: Checker,
) -> None:
    """Sends the hello (handshake), serves until the controller disconnects, and exits."""
    wire.Reporter(connection).send(*hello)
    executor = Executor(backend, host, plane, teams, connection, trace, modules, checker)
    try:
        executor.run()
    except (ConnectionError, LaunchOrderError):
        pass
    finally:
        if trace is not None:
            trace.close()
        plane.close()
        # Threads may be inside XLA, waiting for a lost peer; there is no state to save.
        os._exit(0)
