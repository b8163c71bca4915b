"""A program that is loaded on this host's devices."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["Executable", "IssuedRun"]

Array = Any


class IssuedRun(NamedTuple):
    """A run as its client issued it.

    Attributes:
        client: the client.
        first: the first of the buffers of its results and completion.
        buffers: number of these buffers.
        scope: its first buffer, or that of the run of the whole program that it is a part of.
    """

    client: int
    first: int
    buffers: int
    scope: int


class Executable:
    """A loaded program and the handlers of its results.

    Attributes:
        loaded: jaxlib's executable.
        handlers: one per result, converting raw results to arrays.
        local: the local devices that it runs on.
        devices: number of these devices.
        is_shared: whether other hosts run it as well.
        execute: runs it.
        name: name of the program.
        donated: parameters whose buffers results may reuse.
        bound: number of leading parameters that are no arguments of a run.
        calls: its calls to functions of the client (``callbacks.ProgramCalls``); None without any.
    """

    __slots__ = (
        "bound",
        "calls",
        "devices",
        "donated",
        "execute",
        "handlers",
        "is_shared",
        "loaded",
        "local",
        "name",
    )

    def __init__(self, loaded: Any, handlers: list[Any], local: tuple[int, ...], name: str) -> None:
        self.is_shared = False
        self.loaded = loaded
        self.handlers = handlers
        self.local = local
        self.devices = len(local)
        self.execute = loaded.execute_sharded
        self.name = name
        self.donated: tuple[int, ...] = ()
        self.bound = 0
        self.calls: Any = None

    def bind(self, value: Array) -> None:
        """Gives the first parameter a value, which is then no argument of a run."""
        execute = self.loaded.execute_sharded
        self.bound = 1
        self.donated = tuple(index - 1 for index in self.donated)

        def bound(arguments: list[Array], with_tokens: bool) -> Any:
            return execute([value, *arguments], with_tokens=with_tokens)

        self.execute = bound
