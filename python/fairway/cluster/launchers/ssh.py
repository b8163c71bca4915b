"""Starts agents by the system's ``ssh``, with keys, users and jumps as the user has set them."""

from __future__ import annotations

import os
import shlex
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from fairway.cluster.admin import START_TIMEOUT_S
from fairway.cluster.launchers.launcher import AgentEnding, AgentProcesses, AgentRequest
from fairway.cluster.logs import Logs
from fairway.errors import ConfigError, StartError, unreadable

__all__ = ["SshLauncher", "SshMachine", "read_machines"]

SSH = "FAIRWAY_SSH"
"""Environment variable with the command to use instead of ``ssh``."""
OPTIONS = (
    *("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"),
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),
)
"""No terminal, no questions, and an end within 15 s where the machine vanishes."""
FORM = "[USER@]NAME [slots=N] [python=PATH]"
SLOTS_MAX = 1024


@dataclass(frozen=True)
class SshMachine:
    """A machine that ``ssh`` reaches.

    Attributes:
        name: as ``ssh`` takes it.
        slots: number of hosts that it may run.
        python: its Python that has Fairway; None for the path of this one, or else the ``fairway``
            that its shell finds.
    """

    name: str
    slots: int = 1
    python: str | None = None

    def command(self, arguments: tuple[str, ...]) -> str:
        """Returns the line for its shell that runs ``fairway`` with these arguments."""
        rest = shlex.join(arguments)
        if self.python is not None:
            return f"exec {shlex.quote(self.python)} -P -m fairway {rest}"
        python = shlex.quote(sys.executable)
        return (
            f"if [ -x {python} ]; then exec {python} -P -m fairway {rest}; fi; exec fairway {rest}"
        )


def read_machines(text: str) -> list[SshMachine]:
    """Reads names with commas between them, or a file with a machine in each line.

    >>> read_machines("m1,ada@m2")
    [SshMachine(name='m1', slots=1, python=None), SshMachine(name='ada@m2', slots=1, python=None)]

    Raises:
        ConfigError: the file cannot be read, or a line is malformed.
    """
    path = Path(text)
    if "," in text and not os.path.exists(text):  # unlike a Path's, False where it is too long
        lines = [(f"ssh:{text}", name) for name in text.split(",") if name]
    else:
        try:
            written = path.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"cannot read machines from {text}: {unreadable(error)}; expected a file with a "
                "machine in each line, or names with commas, as in ssh:m1,m2"
            ) from None
        numbered = enumerate((line.partition("#")[0].strip() for line in written), 1)
        lines = [(f"{text}, line {number}", line) for number, line in numbered if line]
    if not lines:
        raise ConfigError(f"{text} names no machines; expected lines of the form {FORM}")
    return [_read_machine(where, line) for where, line in lines]


def _read_machine(where: str, line: str) -> SshMachine:
    name, *options = line.split()
    if name.startswith("-"):  # to ssh it would be an option
        raise ConfigError(f"{where}: {name!r} is no name of a machine; expected {FORM}")
    slots, python = 1, None
    for option in options:
        match option.partition("="):
            case ("slots", "=", count) if count.isdecimal() and 1 <= int(count) <= SLOTS_MAX:
                slots = int(count)
            case ("python", "=", path) if path:
                python = path
            case _:
                raise ConfigError(
                    f"{where}: cannot read {option!r}; expected {FORM}, with 1 to {SLOTS_MAX} slots"
                )
    return SshMachine(name, slots, python)


class SshLauncher:
    """Starts agents on machines, in the order in which these are listed.

    Args:
        machines: those that there are. More than hosts need are spares: a host whose machine is
            lost is started on one of them.
        logs: takes what agents print.
    """

    start_timeout_s = START_TIMEOUT_S

    def __init__(self, machines: list[SshMachine], logs: Logs) -> None:
        self._machines = machines
        self._processes = AgentProcesses(logs)
        self._lock = threading.Lock()
        self._free = [slot for machine in machines for slot in [machine] * machine.slots]
        self._taken: list[SshMachine] = []
        self._ssh = shlex.split(os.environ.get(SSH, "ssh"))

    def start(self, request: AgentRequest) -> None:
        """Starts agents on the next machines with a free slot.

        Raises:
            StartError: there are too few.
        """
        with self._lock:
            count = request.count
            if len(self._free) < count:
                raise StartError(
                    f"island {request.island} needs {count} more slots of machines, and "
                    f"{len(self._free)} are free; list more machines, or slots=N behind a name"
                )
            machines, self._free = self._free[:count], self._free[count:]
            self._taken += machines
        for machine in machines:
            words = [*self._ssh, *OPTIONS, machine.name, machine.command(request.arguments)]
            self._processes.start(request.island, machine.name, words, request.token)

    def watch(self) -> list[AgentEnding]:
        """Returns the agents that have ended since the last call.

        Their slots are the last to be taken again.
        """
        with self._lock:
            ended = self._processes.watch()
            for _, where in ended:
                machine = next(one for one in self._taken if one.name == where)
                self._taken.remove(machine)
                self._free.append(machine)
        return [ending for ending, _ in ended]

    def stop(self) -> None:
        """Ends all agents."""
        self._processes.stop()
