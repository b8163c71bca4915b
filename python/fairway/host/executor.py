"""The executor: executes the controller's commands in order.

One thread takes the commands. Operations that block (on a computation, on a transfer, on a
compiler) are finished by other threads; a launch waits for its own inputs only.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, get_args

from fairway.errors import LaunchOrderError
from fairway.host import messages
from fairway.host.checking import Checker
from fairway.host.colocated.host import ColocatedFunctions
from fairway.host.compiler import Compiler
from fairway.host.exchanges import Exchanger
from fairway.host.frames import CommandReceiver
from fairway.host.launches import Launcher
from fairway.host.local import LocalHost
from fairway.host.modules import AllowedModules
from fairway.host.moves import Mover
from fairway.host.objects import Objects, error_text
from fairway.host.plans import Plans
from fairway.host.runs import Runner
from fairway.host.spilling import Spiller
from fairway.host.teams import Teams

REACH_S = 5.0
"""Time within which a peer answers."""
REACH_AT_A_TIME = 16

__all__ = ["Executor", "serve"]


class Executor:
    """Executes commands on one host.

    Args:
        host: this host.
        teams: its teams for collectives.
        connection: connected to the controller; the handshake (hello) has been sent.
        modules: modules that input functions may come from.
        checker: parses programs before this process does.
    """

    def __init__(
        self,
        host: LocalHost,
        teams: Teams,
        connection: socket.socket,
        modules: AllowedModules,
        checker: Checker,
    ) -> None:
        backend, plane, report = host.backend, host.plane, host.report
        self._connection = connection
        self._plane = plane
        self._report = report
        self._objects = objects = Objects()
        self._mover = mover = Mover(backend, objects, plane, report, host.trace)
        self._compiler = compiler = Compiler(host, mover, modules, checker)
        self._teams = teams
        self._exchanger = exchanger = Exchanger(host, objects, teams, compiler.exchanges)
        launcher = Launcher(backend, objects, compiler.programs, plane, report, host.trace)
        plans = Plans(teams, host.number, report)
        self._runner = runner = Runner(objects, launcher, mover, exchanger, plans)
        spiller = Spiller(backend, objects)
        self._colocated = colocated = ColocatedFunctions(host, objects)
        self._handlers: dict[type[messages.Command], Callable[[Any], None]] = {
            messages.Launch: launcher.launch,
            messages.Put: mover.put,
            messages.AssembleShards: mover.assemble_shards,
            messages.Copy: mover.copy,
            messages.Bitcast: mover.bitcast,
            messages.Send: mover.send,
            messages.Relay: mover.relay,
            messages.Receive: mover.receive,
            messages.Read: mover.read,
            messages.CheckReady: mover.check_ready,
            messages.Delete: lambda command: objects.delete(command.buffers),
            messages.Free: lambda command: objects.free(command.buffers),
            messages.Compile: compiler.compile,
            messages.CompileExchange: compiler.compile_exchange,
            messages.RunExchange: exchanger.exchange,
            messages.PartitionProgram: compiler.partition,
            messages.Collective: exchanger.collective,
            messages.RowExchange: exchanger.row_exchange,
            messages.FreeExecutable: self._free_executable,
            messages.ReadProgram: compiler.read_program,
            messages.LoadProgram: runner.load,
            messages.RunProgram: runner.run,
            messages.AdoptPlan: plans.adopt,
            messages.ProgramText: compiler.program_text,
            messages.Spill: lambda command: spiller.spill(command.buffers),
            messages.Restore: lambda command: spiller.restore(command.buffers),
            messages.EndInput: compiler.inputs.end,
            messages.ReportArrival: mover.report_arrival,
            messages.ReportEnd: launcher.report_end,
            messages.LoadColocated: colocated.load,
            messages.RunColocated: colocated.run,
            messages.EndClient: self._end_client,
            messages.Peers: self._peers,
        }
        plane.on_undelivered(self._undelivered)
        assert self._handlers.keys() == set(get_args(messages.Command)), "each has its handler"

    def run(self) -> None:
        """Executes commands until the controller closes the connection."""
        handlers, receiver = self._handlers, CommandReceiver(self._connection)
        while (frames := receiver.receive()) is not None:
            for command in itertools.chain.from_iterable(frames):
                try:
                    handlers[type(command)](command)
                except LaunchOrderError:
                    raise
                except Exception as error:  # an invalid command fails alone
                    traceback.print_exc()
                    self._fail_command(command, error)

    def _fail_command(self, command: messages.Command, error: Exception) -> None:
        """Fails the answer or the results of a command that raised an error."""
        ticket = messages.ticket_of(command)
        if ticket is not None:
            self._report.failed(ticket, error_text(error))
        self._objects.poison(messages.made_by(command), error_text(error))

    def _free_executable(self, command: messages.FreeExecutable) -> None:
        self._compiler.free(command.executable)
        self._colocated.free(command.executable)
        self._runner.unload(command.executable)

    def _end_client(self, command: messages.EndClient) -> None:
        self._colocated.end(command.client)
        self._plane.tidy()

    def _undelivered(self, to: int, tag: int, text: str) -> None:
        """Reports to a host that this one does not reach that a message to it has failed."""
        with contextlib.suppress(OSError):  # the controller is gone
            self._report.send(messages.Undelivered(to, tag, text))

    def _peers(self, command: messages.Peers) -> None:
        self._plane.drop_before(command.first_tag)
        for peer in command.peers:
            # A loss overtakes commands: the process that this names may have ended since.
            if self._plane.know_peer(peer.host, peer.first_tag, peer.address):
                self._teams.know(peer.host, peer.first_tag)
        numbers = [peer.host for peer in command.peers]
        threading.Thread(target=self._try_peers, args=(numbers,), daemon=True).start()

    def _try_peers(self, hosts: list[int]) -> None:
        """Reports which hosts cannot be reached; the controller says so before a transfer does."""

        def unreachable(host: int) -> messages.UnreachablePeer | None:
            try:
                self._plane.reach(host, REACH_S)
            except OSError as error:
                return messages.UnreachablePeer(host, str(error))
            return None

        with ThreadPoolExecutor(REACH_AT_A_TIME, thread_name_prefix="fairway-reach") as threads:
            tried = list(threads.map(unreachable, hosts))
        with contextlib.suppress(OSError):  # the controller is gone
            self._report.send(messages.PeersTried([one for one in tried if one is not None]))


def serve(executor: Executor, host: LocalHost) -> None:
    """Executes commands until the controller disconnects, and exits."""
    try:
        executor.run()
    except (ConnectionError, LaunchOrderError):
        pass
    finally:
        if host.trace is not None:
            host.trace.close()
        host.plane.close()
        # Threads may be inside XLA, waiting for a lost peer; there is no state to save.
        os._exit(0)
