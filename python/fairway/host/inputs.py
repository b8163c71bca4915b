"""Inputs: programs that return the next batch that this host has made from a user's data.

Such a program consists of a call of ``fairway_input``. XLA compiles it with zeros in place of the
call, for the compiler's description of its results. The controller issues a launch of it when all
hosts of the island have made the batch.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

from jaxlib.mlir import ir

from fairway.host import messages
from fairway.host.executable import Executable
from fairway.host.local import LocalHost
from fairway.host.modules import AllowedModules
from fairway.host.parts import part_of
from fairway.host.screening import RefusedError
from fairway.host.sources import Source, status_text
from fairway.shards import TARGET, Description

__all__ = ["Feed", "HostInputs", "find"]


def find(module: Any) -> Description | None:
    """Returns the input whose next batch a program returns, or None; replaces the call by zeros.

    Raises:
        RefusedError: the program does more than that, or the call is malformed.
    """
    calls: list[Any] = []

    def visit(operation: Any) -> Any:
        if operation.name == "stablehlo.custom_call":
            name = ir.StringAttr(operation.attributes["call_target_name"]).value
            calls.extend([operation] if name == TARGET else [])
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    if not calls:
        return None
    call, *more = calls
    block = call.operation.block
    *_, last = block.operations
    alone = len(list(block.operations)) == 2 and list(last.operands) == list(call.results)
    if more or not alone or len(call.operands):
        raise RefusedError(
            "UNIMPLEMENTED: the next batch of an input is asked for inside a jitted function; "
            "call the input outside of it and hand it the batch"
        )
    try:
        given = ir.DictAttr(call.attributes["mhlo.backend_config"])
        description = Description.read(ir.StringAttr(given["description"]).value)
    except (KeyError, ValueError) as error:
        raise RefusedError(f"INVALID_ARGUMENT: {TARGET} is called otherwise: {error}") from error
    _replace_by_zeros(module, call)
    return description


def _replace_by_zeros(module: Any, call: Any) -> None:
    with module.context, ir.Location.unknown(), ir.InsertionPoint(call):
        for result in call.results:
            result.replace_all_uses_with(_zeros(ir.RankedTensorType(result.type)))
        call.operation.erase()


def _zeros(kind: Any) -> Any:
    element = kind.element_type
    if isinstance(element, ir.ComplexType):  # Python's bindings support no constants of these
        part = _zeros(ir.RankedTensorType.get(kind.shape, ir.ComplexType(element).element_type))
        return ir.Operation.create("stablehlo.complex", [kind], [part, part]).results[0]
    zero = "false" if str(element) == "i1" else 0 if isinstance(element, ir.IntegerType) else "0.0"
    value = {"value": ir.Attribute.parse(f"dense<{zero}> : {kind}")}
    return ir.Operation.create("stablehlo.constant", [kind], attributes=value).results[0]


@dataclasses.dataclass(frozen=True)
class Feed:
    """A program that returns the next batch of an input.

    Attributes:
        source: source of the batches.
        loaded: jaxlib's executable of the same program with zeros.
        name: name of the program.
    """

    source: Source
    loaded: Any
    name: str


class HostInputs:
    """All inputs of this host.

    Args:
        host: this host.
        modules: modules that functions may come from.
    """

    def __init__(self, host: LocalHost, modules: AllowedModules) -> None:
        self._host = host
        self._modules = modules
        self._sources: dict[int, Source] = {}
        self._lock = threading.Lock()

    def open(
        self,
        description: Description,
        program: Executable,
        devices: list[int],
        outputs: list[messages.OutputSpec],
    ) -> Feed:
        """Returns a feed of an input's batches; makes the source unless it exists.

        Args:
            description: description of the input.
            program: the same program with zeros.
            devices: the island's numbers of its devices.
            outputs: the report on each result.

        Raises:
            RefusedError: the function cannot be loaded, or another input has the same number.
        """
        function = self._function(description.function)
        position = {self._host.backend.all_devices[n].id: place for place, n in enumerate(devices)}
        mine = [position[self._host.backend.local_devices[index].id] for index in program.local]
        if len(outputs) != len(description.paths):
            raise RefusedError(f"INVALID_ARGUMENT: an input of {len(outputs)} results has others")
        parts = [
            part_of(path, output, mine)
            for path, output in zip(description.paths, outputs, strict=True)
        ]
        with self._lock:
            source = self._sources.get(description.number)
            if source is None:
                source = Source(self._host, description, function, parts, program.local)
                self._sources[description.number] = source
            elif (source.description, source.parts, source.local) != (
                description, parts, program.local
            ):  # fmt: skip
                raise RefusedError("INVALID_ARGUMENT: another input has this one's number")
            source.programs += 1
        return Feed(source, program.loaded, program.name)

    def close(self, feed: Feed) -> None:
        """Closes a feed; the source ends with its last feed."""
        with self._lock:
            feed.source.programs -= 1
            if feed.source.programs:
                return
            del self._sources[feed.source.description.number]
        feed.source.end(0, "CANCELLED: the input was freed")

    def end(self, command: messages.EndInput) -> None:
        """Ends an input after some batches: every later batch is an error."""
        with self._lock:
            source = self._sources.get(command.input)
        if source is not None:
            source.end(command.batches, command.error)

    def _function(self, path: str) -> Callable[..., Any]:
        """Imports a function, if that is allowed."""
        module, _, name = path.partition(":")
        number = self._host.number
        try:
            function: Callable[..., Any] = getattr(self._modules.load(module), name)
            # A module that an allowed module merely imported is not thereby allowed.
            self._modules.check(str(getattr(function, "__module__", module)))
        except PermissionError as error:
            raise RefusedError(
                f"PERMISSION_DENIED: host {number} may not import the input {path}: {error}"
            ) from error
        except (ModuleNotFoundError, AttributeError) as error:
            raise RefusedError(
                f"NOT_FOUND: host {number} cannot import the input {path}: {error}; hosts find "
                "modules beside the script of `fairway run`, in the setting input_path, and where "
                "Python finds them"
            ) from error
        except BaseException as error:
            who = f"the module of the input {path} on host {number}"
            raise RefusedError(status_text(who, error)) from error
        if not callable(function):
            raise RefusedError(f"INVALID_ARGUMENT: the input {path} is no function")
        return function
