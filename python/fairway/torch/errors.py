"""Errors of the PyTorch backend."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from fairway.errors import TeamError

__all__ = ["BackendError", "Subject"]


class BackendError(TeamError, dist.DistBackendError):  # type: ignore[misc]
    """An operation of a process group failed; also a ``RuntimeError``, as PyTorch's own are.

    Attributes:
        kind: what happened, such as ``Lost``, ``Late`` or ``Diverged``.
        rank: global rank that caused it, if one is known.
    """


class Subject:
    """Describes an operation, for the error that it may end with.

    Args:
        name: name of the operation.
        tensors: tensors that it works on.
        where: the group and this rank, in words.
        with_rank: the other rank of a message, in words; empty for a collective.
        other: that rank, if it is known.
    """

    __slots__ = ("_name", "_other", "_tensors", "_where", "_with_rank")

    def __init__(
        self,
        name: str,
        tensors: Sequence[Tensor],
        where: str,
        with_rank: str = "",
        other: int | None = None,
    ) -> None:
        self._name = name
        self._tensors = tensors
        self._where = where
        self._with_rank = with_rank
        self._other = other

    def __str__(self) -> str:
        text = self._name
        if self._tensors:
            count = sum(one.numel() for one in self._tensors)
            dtypes = {str(one.dtype).removeprefix("torch.") for one in self._tensors}
            text = f"{text} of {count} {'/'.join(sorted(dtypes))}"
        return f"{text}{self._with_rank} {self._where}"

    def failed(self, error: Exception) -> BackendError:
        """Returns the error that waiting for the operation raises."""
        if isinstance(error, BackendError):
            return error
        if not isinstance(error, TeamError):
            return BackendError("Failed", f"{self} failed: {type(error).__name__}: {error}")
        rank = self._other if error.rank is None else error.rank
        if error.kind == "Late":
            return BackendError("Late", f"{self} failed: Timed out waiting: {error}", rank)
        if error.kind == "Closed":
            return BackendError("Closed", f"{self} failed: the process group is closed")
        return BackendError(error.kind, f"{self} failed: {error}", rank)

    def late(self, seconds: float, reason: str = "") -> BackendError:
        """Returns the error of an operation that has timed out."""
        text = f"{self} failed: Timed out after {seconds:.1f} s{reason}"
        return BackendError("Late", text, self._other)
