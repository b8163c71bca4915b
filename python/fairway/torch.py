"""A backend of ``torch.distributed`` whose collectives are planned, over one or several channels.

A script uses it by its name, with nothing else changed; PyTorch finds it where Fairway is
installed::

    torch.distributed.init_process_group("fairway")

How a rank is reached is said by its environment:

- ``FAIRWAY_CHANNELS``: its own address on each network with commas between them, as
  ``tcp:ADDRESS:PORT`` or ``unix:PATH``, and what the channel carries if that is known, as in
  ``tcp:10.1.0.3:0@200Mbit/s,tcp:10.2.0.3:0@100Mbit/s``; port 0 is any free one. Every rank has as
  many channels. Without it ranks must be on one machine, and share memory.
- ``FAIRWAY_COSTS``: on rank 0, what `fairway calibrate` wrote; without it rates decide.

Every collective goes in the way that takes least alone, by all channels if that is quicker. Tensors
of a GPU go by way of the host's memory. Streams are not encrypted; use networks that you trust.
"""

from __future__ import annotations

import atexit
import dataclasses
import datetime
import functools
import json
import os
import queue
import secrets
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Backend, ReduceOp

from fairway.communication import files
from fairway.communication.steps import NETWORK, ChannelCost, Solo, memory_cost
from fairway.communication.team import Channel, Listener, Team, Vector
from fairway.errors import ConfigError, TeamError
from fairway.settings import ChannelSettings

__all__ = ["register"]

REDUCTIONS = {
    ReduceOp.SUM: "sum",
    ReduceOp.AVG: "sum",
    ReduceOp.PREMUL_SUM: "sum",
    ReduceOp.PRODUCT: "product",
    ReduceOp.MAX: "max",
    ReduceOp.MIN: "min",
}
WAITING_MAX = 48
"""Collectives that may be under way at a time; more wait for them."""


def register() -> None:
    """Makes ``fairway`` a backend; PyTorch calls this when somebody asks for it."""
    if not hasattr(dist.Backend, "FAIRWAY"):
        dist.Backend.register_backend("fairway", _made, devices=["cpu", "cuda"])


def _made(store: Any, rank: int, size: int, timeout: datetime.timedelta) -> Backend:
    return FairwayBackend(store, rank, size, timeout)


def _own_channels(size: int) -> tuple[list[Channel], str | None]:
    """This rank's channels, and a folder that was made for them."""
    given = os.environ.get("FAIRWAY_CHANNELS")
    if given:
        channels = []
        for one in given.split(","):
            address, _, rate = one.strip().partition("@")
            rate_bps = ChannelSettings("", rate).rate_bps if rate else None
            channels.append(Channel(address, rate_bps))
        return channels, None
    world = int(os.environ.get("WORLD_SIZE", size))
    if int(os.environ.get("LOCAL_WORLD_SIZE", world)) != world:
        raise ConfigError(
            f"{world} ranks are on several machines, and FAIRWAY_CHANNELS is not set; expected "
            "each rank's addresses, such as tcp:10.1.0.3:0@10Gbit/s"
        )
    folder = tempfile.mkdtemp(prefix="fairway-")
    return [Channel(f"unix:{folder}/channel")], folder


def _costs(channels: Sequence[Channel], ranks: int) -> list[ChannelCost]:
    path = os.environ.get("FAIRWAY_COSTS")
    if path:
        costs = files.read_costs(path)
        if len(costs) != len(channels):
            raise ConfigError(f"{path} is of {len(costs)} channels; there are {len(channels)}")
        return costs

    def cost(channel: Channel) -> ChannelCost:
        usual = memory_cost(ranks) if channel.address.startswith("unix:") else NETWORK
        rate = channel.rate_bps
        return dataclasses.replace(usual, rate_bps=rate) if rate else usual

    return [cost(channel) for channel in channels]


class _Done(dist._Work):  # type: ignore[misc]
    """A collective that is under way, or over."""

    def __init__(self, result: list[Tensor]) -> None:
        super().__init__()
        self._result = result
        self._error: Exception | None = None
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._future: Any = None

    def end(self, error: Exception | None = None) -> None:
        """It is over."""
        self._error = error
        with self._lock:
            self._over.set()
            future = self._future
        if future is not None:
            self._settle(future)

    def end_by(self, act: Callable[[], None]) -> None:
        """It is over when something is done; whoever waits gets what goes wrong."""
        try:
            act()
        except Exception as error:
            self.end(error)
        else:
            self.end()

    def _settle(self, future: Any) -> None:
        if self._error is None:
            future.set_result(self._result)
        else:
            future.set_exception(self._error)

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        seconds = timeout.total_seconds() if timeout else 0
        if not self._over.wait(seconds if seconds > 0 else None):
            raise TeamError("Late", f"a collective is not over after {seconds:.1f} s")
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._over.is_set()

    def is_success(self) -> bool:
        return self._over.is_set() and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def result(self) -> list[Tensor]:
        return self._result

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> Any:
        with self._lock:
            if self._future is None:
                places = {one.device for one in self._result if one.is_cuda}
                self._future = torch.futures.Future(devices=sorted(places, key=str))
                if self._over.is_set():
                    self._settle(self._future)
            return self._future


@dataclasses.dataclass(frozen=True)
class _Waiting:
    """A collective that was submitted, and what is to be done with its result."""

    ticket: Any
    then: Callable[[Vector], None]
    done: _Done


class FairwayBackend(Backend):  # type: ignore[misc]
    """One rank of a process group.

    Args:
        store: by which ranks find each other.
        rank: which this is.
        size: of how many.
        timeout: how long a rank may keep others waiting.

    Raises:
        ConfigError: channels are said that cannot be.
        TeamError: some rank cannot be reached.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: datetime.timedelta) -> None:
        super().__init__(rank, size)
        self._options = Backend.Options("fairway", timeout=timeout)
        self._timeout_s = timeout.total_seconds()
        channels, folder = _own_channels(size)
        try:
            if rank == 0:
                costs = [dataclasses.asdict(cost) for cost in _costs(channels, size)]
                token = secrets.token_hex(16)
                store.set("fairway/team", json.dumps({"costs": costs, "token": token}))
            agreed = json.loads(store.get("fairway/team"))
            self._costs = [ChannelCost(**cost) for cost in agreed["costs"]]
            self._listener = Listener(rank, channels, agreed["token"])
            store.set(f"fairway/rank{rank}", json.dumps(self._listener.addresses))
            self._addresses = [json.loads(store.get(f"fairway/rank{n}")) for n in range(size)]
            if {len(ways) for ways in self._addresses} != {len(self._costs)}:
                counts = [len(ways) for ways in self._addresses]
                raise ConfigError(
                    f"ranks have {counts} channels; expected {len(self._costs)} of each, as rank 0 "
                    "knows of"
                )
            self._team = self._listener.join(self._addresses, self._timeout_s)
            self._part = Solo(self._team, self._costs).part
        except BaseException:
            _remove(folder)
            raise
        self._folder = folder
        self._has_left = False
        self._messages: dict[tuple[int, int], _Messages] = {}
        self._queue: queue.Queue[_Waiting | None] = queue.Queue(WAITING_MAX)
        # What must be done in the order in which it was asked for.
        self._thread = threading.Thread(target=self._collect, daemon=True)
        self._thread.start()
        # Ranks that wait for this one are told at once that it ends.
        atexit.register(_close, weakref.ref(self))

    @property
    def options(self) -> Any:
        """What PyTorch asks for."""
        return self._options

    def getBackendName(self) -> str:  # noqa: N802 - PyTorch's name
        """What it is called."""
        return "fairway"

    def shutdown(self) -> None:
        """Waits for what is under way, and leaves."""
        self._leave(waits=True)

    def abort(self) -> None:
        """Leaves at once."""
        self._leave(waits=False)

    def _leave(self, *, waits: bool) -> None:
        if self._has_left:
            return
        self._has_left = True
        self._queue.put(None)
        if waits:
            self._thread.join()
        for messages in self._messages.values():
            messages.close(waits=waits)
        self._team.close()
        _remove(self._folder)

    # Carrying out

    def _carry(
        self,
        kind: tuple[Any, ...],
        vector: Vector,
        result: list[Tensor],
        opts: Any,
        then: Callable[[Vector], None] = lambda _: None,
        reduction: str = "sum",
    ) -> _Done:
        """Carries a collective out on a vector.

        Args:
            kind: name of the collective, and what it takes beside the number of ranks.
            vector: what it works on.
            result: tensors that are given to whoever waits.
            opts: whether to wait here.
            then: what is done with the vector's result.
            reduction: how elements become one.
        """
        _finish_kernels(result)
        done = _Done(result)
        collective, part = self._part(kind, vector.dtype)
        if not getattr(opts, "asyncOp", True) and self._queue.empty():
            then(self._team.call(part, vector, reduction))
            done.end()
            return done
        step = self._team.begin(part)
        ticket = self._team.submit((step, 0), collective, vector, reduction)
        self._queue.put(_Waiting(ticket, then, done))
        return done

    def _collect(self) -> None:
        """Ends collectives in the order in which they were asked for."""
        while (one := self._queue.get()) is not None:
            ticket, then = one.ticket, one.then
            one.done.end_by(lambda: then(self._team.wait(ticket)))  # noqa: B023 - called at once

    # Collectives

    def broadcast(self, tensors: list[Tensor], opts: Any) -> _Done:
        """From the root to all."""
        (tensor,) = tensors
        flat, back = _flat(tensor)
        kind = ("broadcast", flat.size, opts.rootRank)
        return self._carry(kind, flat, tensors, opts, back)

    def allreduce(self, tensors: list[Tensor], opts: Any) -> _Done:
        """Sums, or the like, for all."""
        (tensor,) = tensors
        reduction, factor = _reduction(opts.reduceOp, tensor)
        if factor is not None:
            tensor.mul_(factor)
        flat, back = _flat(tensor)

        def then(result: Vector) -> None:
            back(result)
            self._average(opts.reduceOp, tensor)

        return self._carry(("all_reduce", flat.size), flat, tensors, opts, then, reduction)

    def reduce(self, tensors: list[Tensor], opts: Any) -> _Done:
        """Sums, or the like, for the root."""
        (tensor,) = tensors
        reduction, factor = _reduction(opts.reduceOp, tensor)
        # Other ranks pass sums on in their vectors, which are theirs.
        kind = ("reduce", tensor.numel(), opts.rootRank)
        flat = _scaled(self._copy(kind, tensor), factor)

        def then(result: Vector) -> None:
            if self.rank() == opts.rootRank:
                _fill(tensor, result)
                self._average(opts.reduceOp, tensor)

        return self._carry(kind, flat, tensors, opts, then, reduction)

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any) -> _Done:
        """All blocks for all."""
        _check(output.numel() == self.size() * given.numel(), "all_gather", output, given)
        flat, back = _flat(output)
        self._put_own(flat, given)
        return self._carry(("all_gather", flat.size), flat, [output], opts, back)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> _Done:
        """All tensors for all, which may differ in size."""
        ((given,), (out,)) = (inputs, outputs)
        if len({one.numel() for one in out}) > 1:
            sizes = [one.numel() for one in out for _ in out]
            return self._exchange([given] * self.size(), out, sizes, opts)
        kind = ("all_gather", given.numel() * self.size())
        flat = self._empty(kind, given)
        self._put_own(flat, given)
        return self._carry(kind, flat, out, opts, lambda result: _split(out, result))

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any) -> _Done:
        """Sums, or the like, of which each rank gets a block."""
        _check(given.numel() == self.size() * output.numel(), "reduce_scatter", given, output)
        reduction, factor = _reduction(opts.reduceOp, given)
        flat = self._copy(("reduce_scatter", given.numel()), given)
        return self._scatter_sums(flat, output, opts, reduction, factor)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> _Done:
        """The same of a tensor for each rank."""
        ((output,), (given,)) = (outputs, inputs)
        _check({one.numel() for one in given} == {output.numel()}, "reduce_scatter", output, *given)
        reduction, factor = _reduction(opts.reduceOp, output)
        flat = self._empty(("reduce_scatter", output.numel() * self.size()), output)
        for rank, one in enumerate(given):
            flat[rank * output.numel() : (rank + 1) * output.numel()] = _view(one)
        return self._scatter_sums(flat, output, opts, reduction, factor)

    def _scatter_sums(
        self, flat: Vector, output: Tensor, opts: Any, reduction: str, factor: float | None
    ) -> _Done:
        _scaled(flat, factor)

        def then(result: Vector) -> None:
            _fill(output, result)
            self._average(opts.reduceOp, output)

        kind = ("reduce_scatter", flat.size)
        return self._carry(kind, flat, [output], opts, then, reduction)

    def all_to_all_single(
        self,
        output: Tensor,
        given: Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        opts: Any,
    ) -> _Done:
        """A block for each other; sizes are rows, and may differ."""
        if not output_sizes and not input_sizes:
            fits = output.numel() == given.numel() and given.numel() % self.size() == 0
            _check(fits, "all_to_all", output, given)
            kind = ("all_to_all", given.numel())
            flat = self._empty(kind, given)
            flat[: given.numel()] = _view(given)
            return self._carry(kind, flat, [output], opts, lambda result: _fill(output, result))
        inputs = _rows(given, input_sizes, self.size())
        outputs = _rows(output, output_sizes, self.size())
        return self._exchange(inputs, outputs, None, opts)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> _Done:
        """A tensor for each other."""
        return self._exchange(inputs, outputs, None, opts)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> _Done:
        """All tensors for the root."""
        (given,), size, root = inputs, self.size(), opts.rootRank
        out = outputs[0] if self.rank() == root else []
        none = given.new_empty(0)
        sizes = [given.numel() * (to == root) for _ in range(size) for to in range(size)]
        sent = [given if to == root else none for to in range(size)]
        return self._exchange(sent, out or [none] * size, sizes, opts)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> _Done:
        """A tensor of the root's for each."""
        (output,), size, root = outputs, self.size(), opts.rootRank
        none = output.new_empty(0)
        sent = inputs[0] if self.rank() == root else [none] * size
        sizes = [output.numel() * (source == root) for source in range(size) for _ in range(size)]
        out = [output if source == root else none for source in range(size)]
        return self._exchange(sent, out, sizes, opts)

    def barrier(self, opts: Any) -> _Done:
        """Waits for all."""
        flat = np.zeros(1, np.int8)
        return self._carry(("all_reduce", 1), flat, [], opts)

    def _exchange(
        self,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        sizes: list[int] | None,
        opts: Any,
    ) -> _Done:
        """Blocks of any sizes: from rank ``i`` to ``j`` at ``i * ranks + j``, if that is known."""
        ranks, rank = self.size(), self.rank()
        if sizes is None:
            table = np.zeros(ranks * ranks, np.int64)
            table[rank * ranks : (rank + 1) * ranks] = [one.numel() for one in inputs]
            waited = self._carry(("all_gather", table.size), table, [], None)
            waited.wait()
            sizes = table.tolist()
        found = [one.numel() for one in outputs]
        expected = [sizes[source * ranks + rank] for source in range(ranks)]
        if found != expected:
            raise ValueError(f"{expected} elements come from ranks; there is room for {found}")
        kind = ("all_to_all_of", tuple(sizes))
        flat = self._empty(kind, (inputs or outputs)[0])
        at = 0
        for one in inputs:
            flat[at : at + one.numel()] = _view(one)
            at += one.numel()
        return self._carry(kind, flat, list(outputs), opts, lambda result: _split(outputs, result))

    # From one to another

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> _Done:
        """To one rank."""
        return self._direct(tensors, (self.rank(), to), tag)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> _Done:
        """From one rank; what it sends comes in the order in which it was sent, by each tag."""
        return self._direct(tensors, (source, self.rank()), tag)

    def _direct(self, tensors: list[Tensor], pair: tuple[int, int], tag: int) -> _Done:
        (tensor,) = tensors
        if tag:
            raise ValueError(f"a message has tag {tag}; expected 0, as messages keep their order")
        if pair not in self._messages:
            name = 1 + pair[0] * self.size() + pair[1]
            join = functools.partial(
                self._listener.join, self._addresses, self._timeout_s, pair, name
            )
            self._messages[pair] = _Messages(join, self._costs)
        flat, back = _flat(tensor)
        _finish_kernels(tensors)
        done = _Done(tensors)
        self._messages[pair].put(flat, back, done)
        return done

    # Memory

    def _empty(self, kind: tuple[Any, ...], like: Tensor) -> Vector:
        dtype = _dtype(like)
        collective, _ = self._part(kind, dtype)
        return self._team.vector(collective, dtype)

    def _copy(self, kind: tuple[Any, ...], tensor: Tensor) -> Vector:
        flat = self._empty(kind, tensor)
        flat[:] = _view(tensor)
        return flat

    def _put_own(self, flat: Vector, given: Tensor) -> None:
        """This rank's block, of as many that are as large."""
        flat[self.rank() * given.numel() : (self.rank() + 1) * given.numel()] = _view(given)

    def _average(self, op: Any, tensor: Tensor) -> None:
        if op == ReduceOp.AVG:
            tensor.div_(self.size())


class _Messages:
    """What goes from one rank to another, one after another, beside everything else.

    Args:
        join: meets the other rank; the first of the two sends.
        costs: what channels take.
    """

    def __init__(self, join: Callable[[], Team], costs: Sequence[ChannelCost]) -> None:
        self._join = join
        self._costs = costs
        self._team: Team | None = None
        self._queue: queue.Queue[tuple[Vector, Callable[[Vector], None], _Done] | None]
        self._queue = queue.Queue()
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def put(self, flat: Vector, then: Callable[[Vector], None], done: _Done) -> None:
        """One more message."""
        self._queue.put((flat, then, done))

    def close(self, *, waits: bool) -> None:
        """There are no more; those that are under way end first, if somebody waits for that."""
        self._queue.put(None)
        if waits:
            self._thread.join()
        if self._team is not None:
            self._team.close()

    def _carry(self) -> None:
        while (message := self._queue.get()) is not None:
            flat, then, done = message
            done.end_by(lambda: then(self._call(flat)))  # noqa: B023 - called at once

    def _call(self, flat: Vector) -> Vector:
        if self._team is None:
            self._team = self._join()
            self._part = Solo(self._team, self._costs).part
        _, part = self._part(("broadcast", flat.size, 0), flat.dtype)
        return self._team.call(part, flat)


def _remove(folder: str | None) -> None:
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def _close(backend: weakref.ref[FairwayBackend]) -> None:
    found = backend()
    if found is not None:
        found.abort()


def _reduction(op: Any, tensor: Tensor) -> tuple[str, float | None]:
    """How elements become one, and by what they are multiplied before."""
    kind = op.op if hasattr(op, "op") else op
    if kind not in REDUCTIONS:
        names = ", ".join(known.name for known in REDUCTIONS)
        raise ValueError(f"the reduction {kind} of {tensor.dtype} is not there; there are {names}")
    factor = getattr(op, "factor", None) if kind == ReduceOp.PREMUL_SUM else None
    return REDUCTIONS[kind], factor


def _scaled(flat: Vector, factor: Any) -> Vector:
    """The same elements, multiplied in their place if there is a factor."""
    if factor is not None:
        flat *= np.asarray(float(factor)).astype(flat.dtype)
    return flat


def _check(holds: bool, what: str, *tensors: Tensor) -> None:
    if not holds:
        sizes = [one.numel() for one in tensors]
        raise ValueError(
            f"{what} was given tensors of {sizes} elements, which do not fit each other"
        )


def _view(tensor: Tensor) -> Vector:
    """The elements of a tensor as numpy has them; a copy if that cannot be where they lie."""
    flat = tensor.detach().contiguous().view(-1).cpu()
    if flat.dtype == torch.bfloat16:
        flat = flat.view(torch.int16)
        halves: Vector = flat.numpy().view(ml_dtypes.bfloat16)
        return halves
    found: Vector = flat.numpy()
    return found


def _flat(tensor: Tensor) -> tuple[Vector, Callable[[Vector], None]]:
    """The elements of a tensor, and what brings a result back if they are not in their place."""
    if tensor.is_contiguous() and tensor.device.type == "cpu":
        return _view(tensor), lambda _: None
    return _view(tensor), lambda result: _fill(tensor, result)


def _finish_kernels(tensors: Sequence[Tensor]) -> None:
    """Waits for what a GPU was asked to do with tensors that another thread will write to."""
    for place in {one.device for one in tensors if one.is_cuda}:
        torch.cuda.current_stream(place).synchronize()


def _dtype(tensor: Tensor) -> Any:
    return _view(tensor.new_empty(0)).dtype


def _fill(tensor: Tensor, result: Vector) -> None:
    if result.dtype == ml_dtypes.bfloat16:
        flat = torch.from_numpy(result.view(np.int16)).view(torch.bfloat16)
    else:
        flat = torch.from_numpy(result)
    with torch.no_grad():
        tensor.detach().copy_(flat.view(tensor.shape))


def _split(tensors: Sequence[Tensor], result: Vector) -> None:
    at = 0
    for one in tensors:
        _fill(one, result[at : at + one.numel()])
        at += one.numel()


def _rows(tensor: Tensor, sizes: list[int], ranks: int) -> list[Tensor]:
    if not sizes:
        sizes = [tensor.size(0) // ranks] * ranks
    _check(sum(sizes) == tensor.size(0), "all_to_all", tensor)
    return list(torch.split(tensor, sizes))


register()
