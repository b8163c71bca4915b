"""Executables of a host by what they compute: programs that are equal are compiled once.

Equal means the same operations, options and devices; names and locations in source code do not
count. So the layers of a model, the stages of a pipeline on one host, and a script that runs again
on islands that stayed up share executables. XLA's texts and profiles show the name of the first.
"""

from __future__ import annotations

import dataclasses
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any

from jaxlib import _jax
from jaxlib.mlir import ir, passmanager

from fairway.host.backend import READING
from fairway.host.messages import Compile

__all__ = ["CompiledProgram", "CompiledPrograms", "fingerprint", "has_state"]

COUNT_MAX = 256
"""Maximum number of executables that are kept after their programs were freed."""
BYTES_MAX = 64 << 20
"""Maximum size of those, each by its bytecode, or by its code where the platform knows that."""
WITHOUT_LOCATIONS = "builtin.module(strip-debuginfo)"


def fingerprint(module: Any, command: Compile) -> tuple[str, int]:
    """Returns a hash of a program without names and locations, and its size in bytes.

    Args:
        module: the program; it is not changed.
        command: the options and devices for which it is compiled.
    """
    with READING, module.context:
        copy = module.operation.clone()
        passmanager.PassManager.parse(WITHOUT_LOCATIONS).run(copy.operation)
        copy.operation.attributes["sym_name"] = ir.StringAttr.get("main")
        bytecode = bytes(copy.operation.get_asm(binary=True))
    # Clients write the maps among the options in any order; what is read is written in one order.
    options = _jax.CompileOptions.ParseFromString(command.options).SerializeAsString()
    found = hashlib.sha256(bytecode)
    found.update(repr((options, command.devices, command.grid)).encode())
    return found.hexdigest(), len(bytecode)


def has_state(module: Any, custom_calls: Collection[str]) -> bool:
    """Does an executable of a program have state, so that it must not be shared?

    ``stablehlo.rng`` draws from a generator of the executable's own, and custom calls of a module
    of the owner's may keep what they like.

    Args:
        module: the program.
        custom_calls: targets of the owner's custom calls.
    """
    found = False

    def visit(operation: Any) -> Any:
        nonlocal found
        if operation.name == "stablehlo.custom_call":
            target = ir.StringAttr(operation.attributes["call_target_name"]).value
            found = target in custom_calls
        else:
            found = operation.name == "stablehlo.rng"
        return ir.WalkResult.INTERRUPT if found else ir.WalkResult.ADVANCE

    with READING, module.context:
        module.operation.walk(visit)
    return found


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """An executable.

    Attributes:
        loaded: jaxlib's.
        serialized: what it was loaded from; None if it was compiled by this process. What was
            loaded cannot be serialized again (jaxlib 0.10.2).
    """

    loaded: Any
    serialized: bytes | None = None

    def to_bytes(self) -> bytes:
        """Returns it in serialized form."""
        return self.serialized or bytes(self.loaded.serialize())


class CompiledPrograms:
    """Executables by fingerprint; the least recently used are dropped first."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, Future[CompiledProgram]] = OrderedDict()
        self._sizes: dict[str, int] = {}
        self._lock = threading.Lock()

    def get(
        self, key: str, size: int, compile_program: Callable[[], CompiledProgram]
    ) -> CompiledProgram:
        """Returns the executable of a program.

        Of several threads that ask for one program, the first compiles it and the others wait.

        Args:
            key: fingerprint of the program.
            size: bytes of the program.
            compile_program: compiles it; what it raises is raised in all threads that wait.
        """
        with self._lock:
            known = self._known.get(key)
            if known is None:
                made = self._known[key] = Future()
            else:
                self._known.move_to_end(key)
        if known is not None:
            return known.result()
        try:
            compiled = compile_program()
        except BaseException as error:
            with self._lock:
                del self._known[key]
            made.set_exception(error)
            raise
        made.set_result(compiled)
        with self._lock:
            kept = len(compiled.serialized or b"")
            self._sizes[key] = max(size, _code_bytes(compiled.loaded)) + kept
            self._drop()
        return compiled

    def _drop(self) -> None:
        """Drops executables beyond the bounds; those that are being compiled stay."""
        total = sum(self._sizes.values())
        for key in list(self._known):
            if len(self._sizes) <= COUNT_MAX and total <= BYTES_MAX:
                return
            if key in self._sizes:
                total -= self._sizes.pop(key)
                del self._known[key]


def _code_bytes(loaded: Any) -> int:
    """Returns the size of an executable's code; 0 if the platform does not know it."""
    try:
        return int(loaded.get_compiled_memory_stats().generated_code_size_in_bytes)
    except Exception:  # platforms without statistics raise different errors
        return 0
