"""Operations that are under way, as PyTorch sees them."""

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
"""How long a thread for callbacks stays when there are none."""


class Callbacks:
    """Threads that run what waits for futures.

    A callback may itself wait for other operations, so it must not run on the thread that ends
    them. One that is ready never waits for another one to return: there are as many threads as
    callbacks that run at a time, which is at most the number of operations under way.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._ready: deque[Callable[[], object]] = deque()
        self._idle = 0
        self._is_closed = False

    def run(self, act: Callable[[], object]) -> None:
        """Runs this on a thread that nothing else occupies."""
        with self._changed:
            self._ready.append(act)
            if self._idle >= len(self._ready):
                self._changed.notify()
                return
        threads.start(self._serve, "fairway-callbacks")

    def close(self) -> None:
        """Threads that have nothing to do end; what becomes ready later is still run."""
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
    """Tensors of an operation, which lead from the value of its future back to the operation."""

    operation: Operation

    def __reduce__(self) -> Any:
        return list, (list(self),)


class Operation(dist._Work):  # type: ignore[misc]
    """An operation that is under way, or over.

    Args:
        subject: what it is.
        result: tensors that whoever waits gets.
        callbacks: where callbacks of its future run, if they may do so beside what asks for it.
        limit_s: how long to wait for it at most; 0 where something else bounds it.
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
        """It is over; only the first call counts."""
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
        """It is over when something is done; whoever waits gets what goes wrong."""
        try:
            act()
        except Exception as error:
            self.end(error)
        else:
            self.end()

    def expire(self, seconds: float) -> Exception:
        """The error of a wait that was too long."""
        return self.subject.late(seconds)

    def on_end(self, act: Callable[[], None]) -> None:
        """Does something when it is over; that must be short, and wait for nothing."""
        with self._lock:
            if not self._over.is_set():
                self._then.append(act)
                return
        act()

    def wait(self, timeout: datetime.timedelta = NO_TIMEOUT) -> bool:
        """Waits until it is over; raises the error that it ended with."""
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
        """Whoever has waited finds it completed by its future too, which another thread sees to."""
        with self._lock:
            outcome = self._outcome
        if outcome is not None and self._error is None:
            outcome.wait()

    def is_completed(self) -> bool:
        """Is it over, well or not?"""
        return self._over.is_set()

    def is_success(self) -> bool:
        """Is it over, and well?"""
        return self._over.is_set() and self._error is None

    def exception(self) -> Exception | None:
        """The error that it ended with, if it did."""
        return self._error

    def result(self) -> list[Tensor]:
        """The tensors that it has filled."""
        return list(self._result)

    def source_rank(self) -> int:
        """The rank in the group that a message came from; -1 of all else."""
        return self.source

    _source_rank = source_rank

    def synchronize(self) -> None:
        """Waits until it is over."""
        self.wait()

    def get_future(self) -> Any:
        """A future that has the result, or the error also for C++.

        PyTorch's ``Future.set_exception`` leaves the exception as the future's value, which only
        Python raises; the reducer of DDP would read it as a list of tensors. What a callback
        raises becomes an error of the future that the callback makes, in C++ as in Python.

        Callbacks may ask for collectives, in an order that must be the same on all ranks. So the
        future of a collective is over when it is returned, and callbacks run where they are added,
        as with NCCL. PyTorch's default hooks ask for nothing, and go on meanwhile.
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
        """Ends it with an error after its limit, if nobody waits for it but by its future."""

        def expire() -> None:
            if not self._over.is_set():
                self.end(self.expire(self._limit_s))

        timer = threading.Timer(self._limit_s, expire)
        timer.daemon = True
        self._then.append(timer.cancel)
        timer.start()


def joined(subject: Subject, parts: Sequence[Operation], result: Sequence[Tensor]) -> Operation:
    """Operations as one, which is over when all are."""
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
"""Where Python is when C++ asks for a future by itself: the reducer of DDP."""
HOOKS = "ddp_comm_hooks/default_hooks.py"


def _is_harmless(asks: FrameType) -> bool:
    """Does who asks for a future add no callbacks that ask for collectives?"""
    code = asks.f_code
    return code.co_name == ENGINE or code.co_filename == __file__ or HOOKS in code.co_filename


@functools.cache
def _listing() -> Any:
    """What makes a future's value a list of tensors.

    Values that Python gives to a future are Python objects to C++, which most of PyTorch reads as
    well; the built-in FP16 hook of DDP does not.
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
    """Lets PyTorch's works say whether one of a Python backend is over.

    PyTorch gives callers a holder of what a Python backend returned, which passes on ``wait`` and
    ``get_future`` and nothing else: ``is_completed`` would be false forever. Works of other
    backends know their kind, and are left as they are.
    """

    def held(work: Any) -> Operation | None:
        """The operation of a holder, if it has ended well."""
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
"""The kind of works whose backend did not give one: ``OpType::UNKNOWN``."""


def _is_holder(work: Any) -> bool:
    if type(work) is not Work:
        return False
    return int(work._get_op_type()) == UNKNOWN and _future_of(work) is not None


def _future_of(work: Any) -> Any:
    try:
        return work.get_future()
    except RuntimeError:
        return None
