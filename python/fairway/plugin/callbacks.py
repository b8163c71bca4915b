"""Functions of this process that hosts call while they run its programs (host callbacks).

``jax.pure_callback``, ``io_callback``, ``jax.debug.print`` and the like give the compiler Python
functions. The stock client cannot send them, so a program names them by number instead, and a
connection beside the client's session brings the calls. It is opened with the first program that
has such functions.
"""

import collections
import contextlib
import itertools
import queue
import secrets
import struct
import threading
import traceback
import weakref
from collections.abc import (
    Callable,
    Collection,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from typing import Any

from . import buffers, calls
from .connection import open_stream
from .local import give_callbacks_a_device, run_as_callback

GREETING = b"fairway callbacks 1\n"
CALL = struct.Struct("<QQQ")
ANSWER = struct.Struct("<QQ")
THREADS_MAX = 64
"""Most calls that run at a time; a function may wait for calls of other devices."""
NEWEST_MAX = 256
"""Programs whose functions are kept in any case: one may be freed before its run has ended."""

Function = Callable[..., Any]


class CallbackFunctions:
    """The functions of this process that hosts may call.

    Attributes:
        key: proves that the connection for calls is this client's.

    Args:
        target: the controller, as ``grpc://HOST:PORT``.
    """

    def __init__(self, target: str) -> None:
        self.key = secrets.token_bytes(32)
        self._target = target
        # JAX refers to a program's functions as long as the program can run.
        self._functions: MutableMapping[int, Function] = weakref.WeakValueDictionary()
        self._newest: collections.deque[list[Function]] = collections.deque(maxlen=NEWEST_MAX)
        self._spanning: weakref.WeakSet[Function] = weakref.WeakSet()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._connection: _Connection | None = None
        give_callbacks_a_device()

    @contextlib.contextmanager
    def named_in(self, module: Any, functions: Sequence[Function], spans: bool) -> Iterator[None]:
        """Names functions in a module while it is compiled.

        Args:
            module: the module.
            functions: those that it calls, by index.
            spans: whether its devices are on several islands.
        """
        if not functions:
            yield
            return
        from jax.extend.mlir import ir

        self._connect()
        functions = _with_arrays(module, functions)
        numbers = [next(self._numbers) for _ in functions]
        self._functions.update(zip(numbers, functions, strict=True))
        self._newest.append(list(functions))
        if spans:
            self._spanning.update(functions)
        attributes = module.operation.attributes
        with module.context:
            attributes[calls.ATTRIBUTE] = ir.DenseI64ArrayAttr.get(numbers)
        try:
            yield
        finally:
            del attributes[calls.ATTRIBUTE]

    def _connect(self) -> None:
        """Opens the connection for calls, unless it is open.

        Raises:
            RuntimeError: the controller does not take it.
        """
        with self._lock:
            if self._connection is None or self._connection.is_closed:
                known = self._functions, self._spanning
                self._connection = _Connection(self._target, self.key, *known)


def _with_arrays(module: Any, functions: Sequence[Function]) -> list[Function]:
    """Returns functions that take arrays; those of buffer callbacks take buffers."""
    from jax.extend.mlir import ir

    found = list(functions)

    def visit(operation: Any) -> Any:
        if operation.name == "stablehlo.custom_call":
            target = ir.StringAttr(operation.attributes["call_target_name"]).value
            if target.startswith("xla_buffer_python_"):
                index = ir.IntegerAttr(operation.attributes["mhlo.backend_config"]["index"]).value
                function = functions[index]
                aliases = _aliases_of(operation)
                found[index] = buffers.on_buffers(function, len(operation.operands), aliases)
                vars(function)["fairway_on_arrays"] = found[index]  # lives as long as it
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return found


def _aliases_of(call: Any) -> dict[int, int]:
    """Returns the operand whose memory each result shares, for those that share any."""
    name = "output_operand_aliases"
    if name not in call.attributes:
        return {}
    from jaxlib.mlir.dialects import stablehlo

    found = map(stablehlo.OutputOperandAlias, call.attributes[name])
    return {(*one.output_tuple_indices, 0)[0]: one.operand_index for one in found}


class _Connection:
    """A connection that brings calls, and takes their results.

    Its threads are no ``ThreadPoolExecutor``, which takes no work once the interpreter ends: that
    is when JAX waits for the effects of programs.
    """

    def __init__(
        self,
        target: str,
        key: bytes,
        functions: Mapping[int, Function],
        spanning: Collection[Function],
    ) -> None:
        self.is_closed = False
        self._spanning = spanning
        self._functions = functions
        stream = open_stream(target, GREETING + key)
        if stream is None:
            raise RuntimeError(
                f"the controller at {target} takes no host callbacks of this client; it is older "
                "than the client, or the connection has ended"
            )
        self._socket = stream
        self._sending = threading.Lock()
        self._waiting: queue.SimpleQueue[tuple[int, int, bytes] | None] = queue.SimpleQueue()
        self._idle = 0
        self._threads = 0
        self._counting = threading.Lock()
        threading.Thread(target=self._receive, name="fairway-calls", daemon=True).start()

    def _receive(self) -> None:
        """Takes calls until the connection ends."""
        with self._socket, self._socket.makefile("rb", 1 << 20) as stream:
            with contextlib.suppress(OSError):
                while len(header := stream.read(CALL.size)) == CALL.size:
                    number, function, length = CALL.unpack(header)
                    operands = stream.read(length)
                    if len(operands) < length:
                        break
                    self._start(number, function, operands)
            self.is_closed = True
        for _ in range(self._threads):
            self._waiting.put(None)

    def _start(self, number: int, function: int, operands: bytes) -> None:
        """Lets a thread run a call."""
        with self._counting:
            if self._idle:
                self._idle -= 1
            elif self._threads < THREADS_MAX:
                self._threads += 1
                name = f"fairway-callback-{self._threads}"
                threading.Thread(target=self._run, name=name, daemon=True).start()
        self._waiting.put((number, function, operands))

    def _run(self) -> None:
        while (call := self._waiting.get()) is not None:
            number, function, operands = call
            called = self._functions.get(function)
            data = _answer_of(called, called in self._spanning, operands)
            del called
            with self._sending, contextlib.suppress(OSError):
                # Small answers as one segment.
                if len(data) < 1 << 16:
                    self._socket.sendall(ANSWER.pack(number, len(data)) + data)
                else:
                    self._socket.sendall(ANSWER.pack(number, len(data)))
                    self._socket.sendall(data)
            del call, operands, data
            with self._counting:
                self._idle += 1


def _answer_of(function: Function | None, spans: bool, operands: bytes) -> bytes:
    """Calls a function; returns its results, or its error with the traceback."""
    try:
        if function is None:
            raise RuntimeError("the program of this host callback was freed while it ran")
        return calls.answer(run_as_callback(function, spans, calls.unpack(operands)))
    except BaseException as error:
        shown = traceback.TracebackException.from_exception(error)
        return calls.failure("".join(shown.format()).rstrip())
