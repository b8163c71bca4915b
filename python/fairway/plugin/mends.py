"""Mends what the stock client and JAX cannot do with a controller's devices."""

import contextlib
import functools
import inspect
import itertools
import logging
import sys
import types
from collections.abc import Callable, Collection
from typing import Any

from .callbacks import CallbackFunctions

LOG = logging.getLogger("fairway")


def answer_to(platform: str, client: object, selected: Collection[str]) -> None:
    """Lets ``jax.devices("cpu")`` and the like find the islands' devices.

    A program that also wants its own process's devices names them in ``JAX_PLATFORMS``.
    JAX looks up GPUs by the platform ``cuda``, whatever name a client gives them.
    """
    from jax._src import xla_bridge

    platform = {"gpu": "cuda"}.get(platform, platform)
    if platform not in selected:
        xla_bridge._backends.setdefault(platform, client)


def take_any_strides() -> None:
    """Copies numpy arrays to contiguous ones if the stock client rejects their strides.

    It rejects zero and negative strides, as in views of ``numpy.broadcast_to`` and ``numpy.flip``,
    and ones that are no multiple of the element size, as in fields of packed records.
    """
    import numpy as np
    from jax._src.interpreters import pxla
    from jaxlib import xla_client

    def is_odd(elements: Any) -> Callable[[int], bool]:
        size = max(1, elements.itemsize)
        return lambda stride: stride <= 0 or stride % size != 0

    def plain(elements: Any) -> Any:
        if isinstance(elements, np.ndarray) and any(map(is_odd(elements), elements.strides)):
            return np.ascontiguousarray(elements).reshape(elements.shape)
        return elements

    def of_arguments(shard: Callable[..., Any]) -> Callable[..., Any]:
        def take(arrays: Any, *others: Any, **named: Any) -> Any:
            return shard([plain(array) for array in arrays], *others, **named)

        return take

    def of_shards(put: Callable[..., Any]) -> Callable[..., Any]:
        def take(aval: Any, sharding: Any, shards: Any, *others: Any, **named: Any) -> Any:
            return put(aval, sharding, [plain(shard) for shard in shards], *others, **named)

        return take

    handlers: Any = pxla.shard_arg_handlers
    handlers[np.ndarray] = of_arguments(handlers[np.ndarray])
    client: Any = xla_client
    client.batched_device_put = of_shards(client.batched_device_put)


def mend_compilation(client: Any, calls: CallbackFunctions) -> None:
    """Sends host callbacks along with a program, and makes compilation fail as other calls do.

    The stock client aborts the process if it compiles on a closed connection. So it is asked for
    a layout first, which costs one round trip; it caches layouts, so each request is for another
    size.
    """
    import numpy as np
    from jax._src import compiler

    compile_now: Callable[..., Any] = compiler.backend_compile_and_load
    signature = inspect.signature(compile_now)
    device, byte, sizes = client.devices()[0], np.dtype(np.int8), itertools.count(1)

    def compile_on_islands(*given: Any, **named: Any) -> Any:
        bound = signature.bind(*given, **named)
        if bound.arguments["backend"] is not client:
            return compile_now(*given, **named)
        client.get_default_layout(byte, (next(sizes),), device)
        functions = bound.arguments["host_callbacks"]
        bound.arguments["host_callbacks"] = []
        islands = {getattr(one, "island", 0) for one in bound.arguments["executable_devices"]}
        with calls.named_in(bound.arguments["module"], functions, len(islands) > 1):
            compiled = compile_now(*bound.args, **bound.kwargs)
        if len(islands) > 1:
            _warn_of_exchanges(compiled, len(islands))
        return compiled

    compiler.backend_compile_and_load = compile_on_islands


def span_islands() -> None:
    """Lets ``jax.make_mesh`` take devices of all islands.

    JAX refuses devices with different ``slice_index``, since it knows of no computation over them.
    It looks at what ``create_device_mesh`` returns, which therefore does not show them there. The
    function itself cannot be replaced in time: a program's first call of it is what connects.
    """
    import numpy as np
    from jax._src import mesh_utils

    def is_making_mesh(frame: types.FrameType) -> bool:
        return frame.f_code.co_name == "make_mesh" and frame.f_globals["__name__"].startswith(
            "jax."
        )

    class OfIslands(np.ndarray[Any, Any]):
        """Devices for a mesh."""

        @property
        def flat(self) -> Any:
            if is_making_mesh(sys._getframe(1)):
                return np.zeros(self.size).flat
            return np.asarray(self).flat

        def copy(self, order: Any = "C") -> Any:
            """Returns a plain array."""
            return np.array(self, order=order, subok=False)

    utils: Any = mesh_utils
    create: Callable[..., Any] = utils.create_device_mesh
    if hasattr(create, "fairway_over_islands"):
        return

    @functools.wraps(create)
    def over_islands(*given: Any, **named: Any) -> Any:
        devices = create(*given, **named)
        return devices.view(OfIslands) if is_making_mesh(sys._getframe(1)) else devices

    over_islands.fairway_over_islands = True  # type: ignore[attr-defined]
    utils.create_device_mesh = over_islands


def _warn_of_exchanges(compiled: Any, islands: int) -> None:
    """Warns of operations that a program over several islands exchanges their operands for."""
    costs: dict[str, float] = {}
    with contextlib.suppress(Exception):  # where XLA counts none, there are none to warn of
        costs = dict(compiled.cost_analysis())
    for name, size in costs.items():
        if " at " in name:
            text = "over %d islands, %s (%s bytes of an island in a run)"
            LOG.warning(text, islands, name, f"{int(size):,}")
