"""Operations in progress, as PyTorch sees them."""

from __future__ import annotations

import datetime
import functools
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.futures import Future

from fairway.torch import threads
from fairway.torch.errors import Subject

__all__ = ["Callbacks", "Operation", "joined", "look_through_holders"]

NO_TIMEOUT = datetime.timedelta(0)
IDLE_S = 5.0
"""Time after which an idle callback thread ends."""


class Callbacks:
    """Threads that run callbacks of futures.

    A callback may itself wait for other operations, so it must not run on the thread that ends
    them. A callback that is ready never waits for another one to return: there are as many threads
    as callbacks that run concurrently, which is at most the number of operations in progress.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._ready: deque[Callable[[], object]] = deque()
        self._idle = 0
        self._is_closed = False

    def run(self, act: Callable[[], object]) -> None:
        """Runs a callback on an idle or new thread."""
        with self._changed:
            self._ready.append(act)
            if self._idle >= len(self._ready):
                self._changed.notify()
                return
        threads.start(self._serve, "fairway-callbacks")

    def close(self) -> None:
        """Ends idle threads; callbacks that become ready later are still run."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                self._changed.wait_for(lambda: self._ready or self._is_closed, IDLE_S)
                self._idle -= 1
                if not self._ready:
                    return
                act = self._ready.popleft()
            act()
            del act


class _Result(list[Tensor]):
    """Tensors of an operation, with a reference from the value of its future to the operation."""

    operation: Operation

    def __reduce__(self) -> Any:
        return list, (list(self),)


class Operation(dist._Work):  # type: ignore[misc]
    """An operation that is in progress, or has ended.

    Args:
        subject: describes it in errors.
        result: tensors that it fills.
        callbacks: runs callbacks of its future, if they may run concurrently with the caller.
        limit_s: timeout of waiting for it; 0 where another limit applies.
    """

    def __init__(
        self,
        subject: Subject,
        result: Sequence[Tensor],
        callbacks: Callbacks | None = None,
        limit_s: float = 0.0,
    ) -> None:
        super().__init__()
        self.subject = subject
        self.source = -1
        self._result = result
        self._callbacks = callbacks
        self._limit_s = limit_s
        self._error: Exception | None = None
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._promise: Any = None
        self._outcome: Any = None
        self._future: Any = None
        self._then: list[Callable[[], None]] = []

    def end(self, error: Exception | None = None) -> None:
        """Ends the operation, with an error if given; only the first call has an effect."""
        if error is not None:
            error = self.subject.failed(error)
        with self._lock:
            if self._over.is_set():
                return
            self._error = error
            self._over.set()
            promise, then = self._promise, self._then
        for act in then:
            act()
        if promise is None:
            return
        if self._callbacks is None:
            promise.set_result(None)
        else:
            self._callbacks.run(lambda: promise.set_result(None))

    def end_by(self, act: Callable[[], None]) -> None:
        """Runs ``act`` and ends the operation, with the error that ``act`` raises, if any."""
        try:
            act()
        except Exception as error:
            self.end(error)
        else:
            self.end()

    def expire(self, seconds: float) -> Exception:
        """Returns the error of a wait that timed out."""
        return self.subject.late(seconds)

    def on_end(self, act: Callable[[], None]) -> None:
        """Calls ``act`` when the operation has ended; ``act`` must be short and must not block."""
        with self._lock:
            if not self._over.is_set():
                self._then.append(act)
                return
        act()

    def wait(self, timeout: datetime.timedelta = NO_TIMEOUT) -> bool:
        """Waits until the operation has ended; raises its error."""
        seconds = timeout.total_seconds()
        seconds = seconds if seconds > 0 else self._limit_s
        if not self._over.wait(seconds if seconds > 0 else None):
            error = self.expire(seconds)
            if not self._over.is_set():
                raise error
        self._await_promise()
        if self._error is not None:
            raise self._error
        return True

    def _await_promise(self) -> None:
        """Waits until its future is completed too, which another thread does."""
        with self._lock:
            outcome = self._outcome
        if outcome is not None and self._error is None:
            outcome.wait()

    def is_completed(self) -> bool:
        """Returns whether it has ended, with or without an error."""
        return self._over.is_set()

    def is_success(self) -> bool:
        """Returns whether it has ended without an error."""
        return self._over.is_set() and self._error is None

    def exception(self) -> Exception | None:
        """Returns the error that it ended with, or None."""
        return self._error

    def result(self) -> list[Tensor]:
        """Returns the tensors that it has filled."""
        return list(self._result)

    def source_rank(self) -> int:
        """Returns the rank in the group that a message came from; -1 for collectives."""
        return self.source

    _source_rank = source_rank

    def synchronize(self) -> None:
        """Waits until it has ended."""
        self.wait()

    def get_future(self) -> Any:
        """Returns a future with the result, or with the error, for C++ as well.

        PyTorch's ``Future.set_exception`` leaves the exception as the future's value, which only
        Python raises; the reducer of DDP would read it as a list of tensors. An exception of a
        callback becomes an error of the future that ``then`` returns, in C++ as in Python.

        Callbacks may issue collectives, in an order that must be the same on all ranks. So the
        future of a collective is completed when it is returned, unless it times out, and callbacks
        run where they are added, as with NCCL. PyTorch's default hooks issue none, and are not
        blocked.
        """
        asks = sys._getframe().f_back
        is_engine = asks is None or asks.f_code.co_name == ENGINE
        if self._callbacks is None and asks is not None and not _is_harmless(asks):
            self._over.wait(self._limit_s or None)
        with self._lock:
            if self._future is None:
                places = {one.device for one in self._result if one.is_cuda}
                self._promise = Future(devices=sorted(places, key=str))
                self._future = self._outcome = self._promise.then(self._value)
                is_half = any(one.dtype == torch.float16 for one in self._result)
                if is_half and is_engine:
                    self._future = _listing().listed(self._outcome, list(self._result))
                if self._over.is_set():
                    self._promise.set_result(None)
                elif self._limit_s > 0:
                    self._watch()
            return self._future

    def _value(self, _: Any) -> _Result:
        if self._error is not None:
            raise self._error
        result = _Result(self._result)
        result.operation = self
        return result

    def _watch(self) -> None:
        """Starts a watchdog that ends it with an error after its timeout."""

        def expire() -> None:
            if not self._over.is_set():
                self.end(self.expire(self._limit_s))

        timer = threading.Timer(self._limit_s, expire)
        timer.daemon = True
        self._then.append(timer.cancel)
        timer.start()


def joined(subject: Subject, parts: Sequence[Operation], result: Sequence[Tensor]) -> Operation:
    """Returns one operation that ends when all parts have ended."""
    whole = Operation(subject, result)
    missing = len(parts)
    lock = threading.Lock()

    def over() -> None:
        nonlocal missing
        with lock:
            missing -= 1
            if missing:
                return
        whole.end(next((part._error for part in parts if part._error is not None), None))

    for part in parts:
        part.on_end(over)
    return whole


ENGINE = "_engine_run_backward"
"""The Python function that is running when C++ requests a future: the reducer of DDP."""
HOOKS = "ddp_comm_hooks/default_hooks.py"


def _is_harmless(asks: FrameType) -> bool:
    """Returns whether the caller adds no callbacks that issue collectives."""
    code = asks.f_code
    return code.co_name == ENGINE or code.co_filename == __file__ or HOOKS in code.co_filename


@functools.cache
def _listing() -> Any:
    """Returns a script that makes a future's value a list of tensors.

    Values that Python gives to a future are Python objects to C++, which most of PyTorch accepts;
    the built-in FP16 hook of DDP does not.
    """
    return torch.jit.CompilationUnit("""
def then_list(over: Future[int], tensors: List[Tensor]) -> List[Tensor]:
    torch.jit.wait(over)
    return tensors

def listed(over: Future[int], tensors: List[Tensor]) -> Future[List[Tensor]]:
    return torch.jit.fork(then_list, over, tensors)
""")


@functools.cache
def look_through_holders() -> None:
    """Makes PyTorch's works report the state of a Python backend's operations.

    PyTorch wraps what a Python backend returns in a holder, which forwards ``wait`` and
    ``get_future`` and nothing else: ``is_completed`` would be false forever. Works of other
    backends have a known type, and are left unchanged.
    """

    def held(work: Any) -> Operation | None:
        """Returns the operation of a holder, if it has ended without an error."""
        future = _future_of(work)
        value = future.value() if future is not None and future.done() else None
        return value.operation if isinstance(value, _Result) else None

    def replace(name: str, ask: Callable[[Any], Any], default: Callable[[Any], Any]) -> None:
        def found(work: Any) -> Any:
            return ask(work) if _is_holder(work) else default(work)

        found.__name__ = name
        found.__doc__ = default.__doc__
        setattr(Work, name, found)

    def is_completed(work: Any) -> bool:
        future = _future_of(work)
        return future is not None and bool(future.done())

    def exception(work: Any) -> Exception | None:
        try:
            if is_completed(work):
                _future_of(work).value()
        except Exception as error:
            return error
        return None

    def is_success(work: Any) -> bool:
        return is_completed(work) and exception(work) is None

    def result(work: Any) -> list[Tensor]:
        future = _future_of(work)
        return list(future.value()) if future is not None and future.done() else []

    def source_rank(work: Any) -> int:
        operation = held(work)
        return -1 if operation is None else operation.source

    replace("is_completed", is_completed, Work.is_completed)
    replace("exception", exception, Work.exception)
    replace("is_success", is_success, Work.is_success)
    replace("result", result, Work.result)
    replace("source_rank", source_rank, Work.source_rank)
    replace("_source_rank", source_rank, Work._source_rank)


UNKNOWN = 100
"""The type of works whose backend did not give one: ``OpType::UNKNOWN``."""


def _is_holder(work: Any) -> bool:
    if type(work) is not Work:
        return False
    return int(work._get_op_type()) == UNKNOWN and _future_of(work) is not None


def _future_of(work: Any) -> Any:
    try:
        return work.get_future()
    except RuntimeError:
        return None
