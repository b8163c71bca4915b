"""``fairway.inputs``: hosts make batches themselves, by a function that is named and not sent.

Source: PATHWAYS §3, which runs input processing on the hosts' CPUs. A batch is the result of an
ordinary program of no arguments, so requesting one takes one message, ordered with all others, and
may be a call inside a ``fairway.program``. No element of it passes through this process.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import NamedSharding, SingleDeviceSharding

from fairway.errors import InputError
from fairway.shards import TARGET, Description

__all__ = ["Inputs", "inputs"]

_struct: Any = jax.ShapeDtypeStruct
_wait: Any = jax.block_until_ready


def inputs(function: str, *, like: Any, prefetch: int = 2, **config: Any) -> Inputs:
    """Makes an input pipeline that runs on hosts.

    Every host that owns a device of a batch imports the function and calls it once as
    ``function(shard, **config)``. It returns any iterable of pytrees of numpy arrays: the host's
    part of one batch after another. :class:`fairway.Shard` describes that part.

    Args:
        function: ``package.module:name``. Hosts find modules beside the script of ``fairway run``,
            in the setting ``input_path``, and where Python finds them; the setting
            ``input_modules`` says which are allowed.
        like: a pytree that describes a batch: leaves with ``shape``, ``dtype`` and ``sharding``,
            such as :class:`jax.ShapeDtypeStruct`. All shardings are over the same devices, of one
            island, in the same order.
        prefetch: batches that each host makes ahead, at least 1; they occupy memory of its devices.
        **config: keyword arguments of the function, serializable as JSON. State that must be
            reproducible or resumable goes here: a seed, the number of the first batch.

    Returns:
        The input; hosts make batches until it is deleted or this process ends.

    Raises:
        InputError: ``like`` or ``config`` is invalid.
        jax.errors.JaxRuntimeError: a host cannot load the function: ``PERMISSION_DENIED`` if the
            module is not allowed, ``NOT_FOUND`` if it or the function does not exist, ``UNKNOWN``
            with the host's traceback if importing the module raises.

    Example:
        >>> like = jax.ShapeDtypeStruct((64, 129), np.int32, sharding=sharding)
        >>> for tokens in fairway.inputs("corpus:windows", like=like, seed=0):
        ...     state = step(state, tokens)
    """
    return Inputs(function, like, prefetch, config)


class Inputs:
    """Batches in one order, regardless of which call requests them.

    Calling it returns the next batch at once, before it is ready: nothing blocks. An exception of
    the function on any host is raised where that batch or a later one is used, as a
    ``jax.errors.JaxRuntimeError`` with the code ``UNKNOWN`` and the host's traceback; so is the
    end of the data, with the code ``OUT_OF_RANGE``. The first host whose iterator ends ends all.

    Iterating over it stops at the end of the data. For that it requests each batch one step early
    and waits for the batch that it returns.
    """

    def __init__(self, function: str, like: Any, prefetch: int, config: dict[str, Any]) -> None:
        flat, tree = jax.tree_util.tree_flatten_with_path(like)
        keystr = jax.tree_util.keystr
        paths = [keystr(path, simple=True, separator="/") for path, _ in flat]
        leaves = [_checked(path, leaf) for path, (_, leaf) in zip(paths, flat, strict=True)]
        _check_devices(paths, leaves)
        module, _, name = function.partition(":")
        if not (name.isidentifier() and all(part.isidentifier() for part in module.split("."))):
            raise InputError(f"the function is {function!r}; expected 'package.module:name'")
        if prefetch < 1:
            raise InputError(f"prefetch is {prefetch}; expected at least 1 batch")
        number = secrets.randbits(62) + 1
        try:
            text = Description(number, function, config, paths, prefetch).text()
        except (TypeError, ValueError) as error:
            raise InputError(f"config must be made of what JSON knows: {error}") from error

        def batch() -> Any:
            made = jax.ffi.ffi_call(TARGET, leaves)(description=text)
            return jax.tree.unflatten(tree, made)

        batch.__name__ = batch.__qualname__ = f"input_{name}"
        shardings = jax.tree.unflatten(tree, [leaf.sharding for leaf in leaves])
        self._function = function
        self._batch = jax.jit(batch, out_shardings=shardings)
        self._program = self._batch.lower().compile()  # hosts make batches as long as this exists
        self._early: list[Any] = []

    def __call__(self) -> Any:
        """Returns the next batch, which may not be ready yet."""
        return self._early.pop() if self._early else self._batch()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """Returns the next batch once it is ready.

        Raises:
            StopIteration: the data have ended.
            jax.errors.JaxRuntimeError: the function failed on a host.
        """
        batch = self()
        self._early.append(self._batch())
        try:
            return _wait(batch)
        except jax.errors.JaxRuntimeError as error:
            if str(error).startswith("OUT_OF_RANGE"):
                raise StopIteration from None
            raise

    def __repr__(self) -> str:
        return f"Inputs({self._function!r})"


def _checked(path: str, leaf: Any) -> Any:
    """Returns the shape, sharding and canonical JAX type of a leaf of a batch."""
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, (NamedSharding, SingleDeviceSharding)):
        raise InputError(
            f"leaf {path!r} of `like` has the sharding {sharding}; expected a NamedSharding; try "
            "jax.ShapeDtypeStruct(shape, dtype, sharding=...)"
        )
    return _struct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype), sharding=sharding)


def _check_devices(paths: list[str], leaves: list[Any]) -> None:
    """Checks that all leaves are over the same devices, of one island of Fairway."""
    if not leaves:
        raise InputError("`like` has no leaves; expected at least one array")
    first, *others = [tuple(leaf.sharding._device_assignment) for leaf in leaves]
    for path, devices in zip(paths[1:], others, strict=True):
        if devices != first:
            ids, wanted = ([device.id for device in each] for each in (devices, first))
            raise InputError(
                f"leaf {path!r} of `like` is over devices {ids}, leaf {paths[0]!r} over {wanted}; "
                "expected the same in the same order"
            )
    islands = sorted({getattr(device, "island", None) for device in first}, key=str)
    if islands == [None]:
        raise InputError(
            f"inputs are made on hosts of Fairway, but these are {first[0].platform!r} devices of "
            "this process; run the script with `fairway run`"
        )
    if len(islands) > 1:
        raise InputError(
            f"`like` is over devices of islands {islands}; expected those of one; make an input "
            "for each island, and tell the function which in its config"
        )
