"""One rank of a process group: the interface that PyTorch calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C._distributed_c10d import ReduceOp

from fairway.communication.team import Team, Vector
from fairway.torch import exchanging
from fairway.torch.collecting import CollectiveRequest
from fairway.torch.errors import BackendError, Subject
from fairway.torch.exchanging import Carry
from fairway.torch.membership import GroupMember
from fairway.torch.requests import (
    are_small,
    check_types,
    copy_back,
    counts,
    limit_of,
    named,
    reduction_of,
    scale,
    scatter_flat,
)
from fairway.torch.tensors import (
    added,
    added_type,
    check,
    divide,
    fill,
    finish_kernels,
    moved,
    moved_type,
    name_of,
    rows,
    split,
)
from fairway.torch.works import Operation, joined

__all__ = ["FairwayBackend"]

LOOK_S = 0.002
GRACE_S = 2.0
PASSED = "passed"


class FairwayBackend(GroupMember):
    """One rank of a process group, with the operations that PyTorch calls."""

    # Execution

    def _subject(
        self,
        name: str,
        tensors: Sequence[Tensor],
        with_rank: str = "",
        other: int | None = None,
    ) -> Subject:
        return Subject(name, tensors, self._where, with_rank, other)

    def _operation(self, name: str, tensors: Sequence[Tensor], opts: Any) -> Operation:
        """Returns a collective that begins now."""
        self._sequence += 1
        finish_kernels(tensors)
        limit_s = limit_of(opts)
        # The team itself enforces the timeout of the group.
        limit_s = limit_s if limit_s < self._timeout_s else 0.0
        return Operation(self._subject(name, tensors), tensors, limit_s=limit_s)

    def _carry(
        self,
        kind: tuple[Any, ...],
        name: str,
        vector: Vector,
        operation: Operation,
        opts: Any,
        then: Callable[[Vector], None] = lambda _: None,
        reduction: str = "sum",
    ) -> Operation:
        """Runs a collective on a vector.

        Args:
            kind: name of the collective, and its arguments besides the number of ranks.
            name: the requested operation, which must be the same on all ranks.
            vector: input and output.
            operation: completed with the collective.
            opts: PyTorch's options, which say whether the call is synchronous.
            then: receives the vector of the result.
            reduction: the reduction operator.
        """
        waits = not getattr(opts, "asyncOp", True) and not operation._limit_s
        asked = CollectiveRequest(kind, name, vector, reduction, then, operation)
        self._collector.run(asked, waits=waits)
        return operation

    # Collectives

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Operation:
        """Broadcasts the root's tensor to all ranks."""
        (tensor,) = tensors
        self._check_root("broadcast", opts.rootRank)
        vector, back = moved(tensor), copy_back(tensor)
        kind = ("broadcast", vector.size, opts.rootRank)
        operation = self._operation("broadcast", tensors, opts)
        name = named("broadcast", tensor, root=opts.rootRank)
        return self._carry(kind, name, vector, operation, opts, back)

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Operation:
        """Reduces tensors; every rank gets the result."""
        (tensor,) = tensors
        if tensor.is_sparse:
            return self.allreduce_sparse(tensors, opts)
        reduction, factor = reduction_of("all_reduce", opts.reduceOp, tensor)
        if factor is not None:
            tensor.mul_(factor)
        vector, back = added(tensor), copy_back(tensor)

        def then(result: Vector) -> None:
            back(result)
            self._average(opts.reduceOp, tensor)

        operation = self._operation("all_reduce", tensors, opts)
        kind, name = ("all_reduce", vector.size), named("all_reduce", tensor, opts.reduceOp)
        return self._carry(kind, name, vector, operation, opts, then, reduction)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> Operation:
        """Reduces each of several tensors; every rank gets the results."""

        def flat(given: list[Tensor]) -> Operation:
            whole = torch.cat([one.reshape(-1) for one in given])
            operation = self.allreduce([whole], opts)
            return self._after(operation, given, lambda: scatter_flat(given, whole))

        if are_small(tensors):
            return flat(tensors)
        parts = [self.allreduce([one], opts) for one in tensors]
        return self._joined("all_reduce", parts, tensors)

    def allreduce_sparse(self, tensors: list[Tensor], opts: Any) -> Operation:
        """Sums sparse tensors; every rank gets the result."""
        (tensor,) = tensors
        if opts.reduceOp != ReduceOp.SUM:
            raise ValueError(
                f"all_reduce of sparse tensors was given {opts.reduceOp}; expected SUM"
            )
        given = tensor.coalesce()
        indices, values = given.indices(), given.values()
        kind = added_type(values.dtype)
        operation = self._operation("all_reduce (sparse)", tensors, opts)
        own = moved(indices.contiguous()), added(values.contiguous())

        def act(team: Team, carry: Carry) -> None:
            places, parts = (exchanging.gather_vectors(team, carry, one) for one in own)
            total = torch.zeros_like(given)
            for place, part in zip(places, parts, strict=True):
                count = place.size // max(1, indices.size(0))
                at = indices.new_empty((indices.size(0), count))
                what = values.new_empty((count, *values.shape[1:]))
                fill(at, place)
                fill(what, part.view(kind))
                total = total + torch.sparse_coo_tensor(at, what, given.shape)
            with torch.no_grad():
                tensor.copy_(total.coalesce())

        name = f"all_reduce of sparse {name_of(tensor.dtype)}"
        self._exchanges.put(act, operation, name)
        return operation

    def reduce(self, tensors: list[Tensor], opts: Any) -> Operation:
        """Reduces tensors; the root gets the result."""
        (tensor,) = tensors
        self._check_root("reduce", opts.rootRank)
        reduction, factor = reduction_of("reduce", opts.reduceOp, tensor)
        given = added(tensor)
        # Other ranks accumulate partial sums in their vectors, so these are copies.
        kind = ("reduce", given.size, opts.rootRank)
        vector = self._empty(kind, given.dtype)
        vector[:] = given
        scale(vector, factor)

        def then(result: Vector) -> None:
            if self.rank() == opts.rootRank:
                fill(tensor, result)
                self._average(opts.reduceOp, tensor)

        operation = self._operation("reduce", tensors, opts)
        name = named("reduce", tensor, opts.reduceOp, opts.rootRank)
        return self._carry(kind, name, vector, operation, opts, then, reduction)

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any) -> Operation:
        """Gathers the blocks of all ranks on every rank."""
        check_types("all_gather", [output, given])
        check(output.numel() == self.size() * given.numel(), "all_gather", output, given)
        vector, back = moved(output), copy_back(output)
        self._put_own(vector, moved(given))
        operation = self._operation("all_gather", [output], opts)
        kind, name = ("all_gather", vector.size), named("all_gather", given)
        return self._carry(kind, name, vector, operation, opts, back)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any
    ) -> Operation:
        """Does :meth:`all_gather_single` for several tensors."""
        parts = [
            self.all_gather_single(output, given, opts)
            for output, given in zip(outputs, inputs, strict=True)
        ]
        return self._joined("all_gather", parts, outputs)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Operation:
        """Gathers the tensors of all ranks, which may differ in size, on every rank."""
        ((given,), (out,)) = (inputs, outputs)
        check(len(out) == self.size(), "all_gather", *out)
        check_types("all_gather", [given, *out])
        check(out[self.rank()].numel() == given.numel(), "all_gather", given, *out)
        if len({one.numel() for one in out}) > 1:
            sizes = np.tile(counts(out)[:, None], (1, self.size()))
            name = f"all_gather of {name_of(given.dtype)}"
            return self._exchange(name, [given] * self.size(), out, sizes, opts)
        own = moved(given)
        kind = ("all_gather", own.size * self.size())
        vector = self._empty(kind, own.dtype)
        self._put_own(vector, own)
        operation = self._operation("all_gather", out, opts)

        def then(result: Vector) -> None:
            split(out, np.split(result, self.size()))

        return self._carry(kind, named("all_gather", given), vector, operation, opts, then)

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any
    ) -> Operation:
        """Does :meth:`allgather` for several tensors; ``outputs`` has a list of them per rank."""
        if len(outputs) != self.size() or any(len(one) != len(inputs) for one in outputs):
            counts = [len(one) for one in outputs]
            raise ValueError(
                f"all_gather_coalesced was given lists of {counts} tensors; expected "
                f"{self.size()} lists of {len(inputs)}, one for each rank"
            )
        parts = [
            self.allgather([[one[number] for one in outputs]], [given], opts)
            for number, given in enumerate(inputs)
        ]
        return self._joined("all_gather", parts, [one for each in outputs for one in each])

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any) -> Operation:
        """Reduces tensors; each rank gets one block of the result."""
        check_types("reduce_scatter", [output, given])
        check(given.numel() == self.size() * output.numel(), "reduce_scatter", given, output)
        reduction_of("reduce_scatter", opts.reduceOp, given)
        return self._scatter_sums([added(given)], output, opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any
    ) -> Operation:
        """Does :meth:`reduce_scatter_single` for several tensors."""
        parts = [
            self.reduce_scatter_single(output, given, opts)
            for output, given in zip(outputs, inputs, strict=True)
        ]
        return self._joined("reduce_scatter", parts, outputs)

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any
    ) -> Operation:
        """Reduces a list of tensors, one per rank; each rank gets the result of its own."""
        ((output,), (given,)) = (outputs, inputs)
        check_types("reduce_scatter", [output, *given])
        fits = len(given) == self.size() and {one.numel() for one in given} == {output.numel()}
        check(fits, "reduce_scatter", output, *given)
        reduction_of("reduce_scatter", opts.reduceOp, output)
        return self._scatter_sums([added(one) for one in given], output, opts)

    def _scatter_sums(self, given: Sequence[Vector], output: Tensor, opts: Any) -> Operation:
        reduction, factor = reduction_of("reduce_scatter", opts.reduceOp, output)
        kind = ("reduce_scatter", sum(one.size for one in given))
        vector = self._empty(kind, given[0].dtype)
        at = 0
        for one in given:
            vector[at : at + one.size] = one
            at += one.size
        scale(vector, factor)

        def then(result: Vector) -> None:
            fill(output, result)
            self._average(opts.reduceOp, output)

        operation = self._operation("reduce_scatter", [output], opts)
        name = named("reduce_scatter", output, opts.reduceOp)
        return self._carry(kind, name, vector, operation, opts, then, reduction)

    def all_to_all_single(
        self,
        output: Tensor,
        given: Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        opts: Any,
    ) -> Operation:
        """Exchanges a block with every other rank; sizes are in rows, and may differ."""
        check_types("all_to_all", [output, given])
        # Sizes may be given on some ranks only: those whose sizes differ.
        if not output_sizes and not input_sizes:
            fits = output.numel() == given.numel() and given.numel() % self.size() == 0
            check(fits, "all_to_all", output, given)
        inputs = rows(given, input_sizes, self.size())
        outputs = rows(output, output_sizes, self.size())
        name = f"all_to_all of {name_of(given.dtype)}"
        return self._exchange(name, inputs, outputs, None, opts, [output])

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Operation:
        """Exchanges a tensor with every other rank."""
        if len(outputs) != self.size() or len(inputs) != self.size():
            raise ValueError(
                f"all_to_all was given {len(inputs)} tensors and {len(outputs)} for results; "
                f"expected {self.size()} of each, one for each rank"
            )
        check_types("all_to_all", [*outputs, *inputs])
        name = f"all_to_all of {name_of(inputs[0].dtype)}"
        return self._exchange(name, inputs, outputs, None, opts)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Operation:
        """Gathers the tensors of all ranks on the root."""
        (given,), size, root = inputs, self.size(), opts.rootRank
        self._check_root("gather", root)
        is_root = self.rank() == root
        out = outputs[0] if is_root else []
        check_types("gather", [given, *out])
        if is_root:
            fits = len(out) == size and all(one.numel() == given.numel() for one in out)
            check(fits, "gather", given, *out)
        none = given.new_empty(0)
        sizes = np.zeros((size, size), np.int64)
        sizes[:, root] = given.numel()
        sent = [given if to == root else none for to in range(size)]
        name = named("gather", given, root=root)
        return self._exchange(name, sent, out or [none] * size, sizes, opts, out)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Operation:
        """Sends each rank its tensor from the root."""
        (output,), size, root = outputs, self.size(), opts.rootRank
        self._check_root("scatter", root)
        is_root = self.rank() == root
        given = inputs[0] if is_root else []
        check_types("scatter", [output, *given])
        if is_root:
            fits = len(given) == size and all(one.numel() == output.numel() for one in given)
            check(fits, "scatter", output, *given)
        none = output.new_empty(0)
        sizes = np.zeros((size, size), np.int64)
        sizes[root] = output.numel()
        out = [output if source == root else none for source in range(size)]
        name = named("scatter", output, root=root)
        return self._exchange(name, given or [none] * size, out, sizes, opts, outputs)

    def barrier(self, opts: Any) -> Operation:
        """Waits for all ranks."""
        operation = self._operation("barrier", [], opts)
        return self._carry(("all_reduce", 1), "barrier", np.zeros(1, np.int8), operation, opts)

    def monitored_barrier(self, opts: Any, wait_all_ranks: bool = False) -> None:
        """Waits for all ranks; rank 0 finds out which ones do not arrive.

        Raises:
            BackendError: some ranks do not arrive in time.
        """
        store = self._store
        self._barriers += 1
        given_s = opts.timeout.total_seconds()
        given_s = given_s if given_s >= 0 else self._timeout_s
        # The other ranks wait longer, since rank 0 publishes its verdict at the end of its timeout.
        grace_s = 0.0 if self.rank() == 0 else GRACE_S
        deadline = time.monotonic() + given_s + grace_s
        key = f"fairway/barrier{self._barriers}"
        limit = f"{given_s * 1000:.0f} ms"

        def wait_for(name: str, until: float = deadline) -> bool:
            while not store.check([name]):
                if time.monotonic() >= until:
                    return False
                time.sleep(LOOK_S)
            return True

        def publish(verdict: str) -> None:
            # The store may end with this rank, so it waits until the present ranks have read the
            # verdict.
            store.set(key, verdict)
            until = time.monotonic() + GRACE_S
            for number in range(1, self.size()):
                if store.check([f"{key}/{number}"]):
                    wait_for(f"{key}/{number}/read", until)

        own = self._members[self.rank()]
        if self.rank() > 0:
            store.set(f"{key}/{self.rank()}", "")
            verdict = f"nothing came within {limit}"
            if wait_for(key):
                verdict = store.get(key).decode()
                store.set(f"{key}/{self.rank()}/read", "")
            if verdict != PASSED:
                raise BackendError(
                    "Reported",
                    f"Rank {own} successfully reached monitoredBarrier, but received errors while "
                    f"waiting for send/recv from rank {self._members[0]}: {verdict}",
                )
            return
        if given_s == 0:
            text = f"Rank {own} timed out in monitoredBarrier after {limit}"
            publish(text)
            raise BackendError("Late", text)
        missing: list[int] = []
        for number in range(1, self.size()):
            if not wait_for(f"{key}/{number}"):
                missing.append(self._members[number])
                if not wait_all_ranks:
                    break
        if not missing:
            publish(PASSED)
            return
        ranks = ", ".join(map(str, missing))
        several = "s" if wait_all_ranks else ""
        text = f"Rank{several} {ranks} failed to pass monitoredBarrier in {limit}"
        publish(text)
        raise BackendError("Late", text, missing[0])

    def _exchange(
        self,
        name: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        sizes: Any,
        opts: Any,
        result: Sequence[Tensor] | None = None,
    ) -> Operation:
        """Exchanges blocks; ``sizes[i, j]`` elements from rank ``i`` to ``j``, if known."""
        result = list(outputs if result is None else result)
        operation = self._operation(name.partition(" ")[0], result, opts)
        sent = [moved(one) for one in inputs]
        dtype = moved_type((inputs or outputs)[0].dtype)
        width = (inputs or outputs)[0].element_size() // dtype.itemsize
        if sizes is None:
            expected = [one.numel() * width for one in outputs]

            def act(team: Team, carry: Carry) -> None:
                split(outputs, exchanging.all_to_all(team, carry, sent, expected, dtype))

            self._exchanges.put(act, operation, name)
            return operation
        sizes = sizes * width
        kind = ("all_to_all_of", tuple(int(one) for one in sizes.reshape(-1)))
        vector = self._empty(kind, dtype)
        at = 0
        for one in sent:
            vector[at : at + one.size] = one
            at += one.size

        def then(found: Vector) -> None:
            split(outputs, np.split(found, np.cumsum(sizes[:, self.rank()])[:-1]))

        return self._carry(kind, name, vector, operation, opts, then)

    # Point-to-point

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> Operation:
        """Sends a tensor to one rank."""
        (tensor,) = tensors
        self._check_other("send", to)
        finish_kernels(tensors)
        other = self._members[to]
        subject = self._subject("send", tensors, f" to rank {other} (tag {tag})", other)
        return self._messages.send(subject, tensors, moved(tensor), to, tag)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Operation:
        """Receives from one rank; messages with the same tag arrive in order."""
        self._check_other("recv", source)
        whom = f" from rank {self._members[source]} (tag {tag})"
        return self._receive(tensors, source, tag, whom)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Operation:
        """Receives from any rank."""
        return self._receive(tensors, None, tag, f" from any rank (tag {tag})")

    def _receive(self, tensors: list[Tensor], source: int | None, tag: int, whom: str) -> Operation:
        (tensor,) = tensors
        finish_kernels(tensors)
        other = None if source is None else self._members[source]
        subject = self._subject("recv", tensors, whom, other)
        vector, back = moved(tensor), copy_back(tensor)
        return self._messages.receive(subject, tensors, vector, back, source, tag)

    # Helpers

    def _check_root(self, what: str, root: int) -> None:
        if not 0 <= root < self.size():
            raise ValueError(
                f"{what} {self._where} was given root {root}; expected a rank of the group, "
                f"from 0 to {self.size() - 1}"
            )

    def _check_other(self, what: str, other: int) -> None:
        if not 0 <= other < self.size() or other == self.rank():
            raise ValueError(
                f"{what} {self._where} was given rank {other} of the group; expected another one, "
                f"from 0 to {self.size() - 1}"
            )

    def _empty(self, kind: tuple[Any, ...], dtype: Any) -> Vector:
        return self._team.vector(self._collector.planning.collective(kind), dtype)

    def _put_own(self, vector: Vector, given: Vector) -> None:
        """Copies this rank's block into a vector of equal blocks."""
        vector[self.rank() * given.size : (self.rank() + 1) * given.size] = given

    def _average(self, op: Any, tensor: Tensor) -> None:
        if op == ReduceOp.AVG:
            divide(tensor, self.size())

    def _joined(self, name: str, parts: Sequence[Operation], result: Sequence[Tensor]) -> Operation:
        if not parts:
            done = self._operation(name, result, None)
            done.end()
            return done
        return joined(self._subject(name, result), parts, result)

    def _after(
        self, part: Operation, result: Sequence[Tensor], act: Callable[[], None]
    ) -> Operation:
        """Returns an operation that runs ``act`` after another operation has ended."""
        whole = Operation(part.subject, result)

        def over() -> None:
            if part.exception() is not None:
                whole.end(part.exception())
            else:
                whole.end_by(act)

        part.on_end(over)
        return whole
