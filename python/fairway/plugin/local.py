"""What only devices of this process can do, done on a CPU device of its own or on copies.

The client of that device is made when it is first needed, and unknown to JAX otherwise.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

_context = threading.local()
"""``is_callback``: whether this thread runs a host callback; ``spans``: whether the program that
calls it is one over several islands."""


@functools.cache
def local_client() -> Any:
    """Returns a client of this process's CPU."""
    from jaxlib import xla_client

    return xla_client.make_cpu_client()


def run_as_callback(function: Callable[..., Any], spans: bool, arguments: list[Any]) -> Any:
    """Calls a function whose thread's CPU device is this process's.

    Args:
        function: the function.
        spans: whether the program that calls it is one over several islands.
        arguments: what it is called with.
    """
    _context.is_callback, _context.spans = True, spans
    try:
        return function(*arguments)
    finally:
        _context.is_callback = _context.spans = False


def refuse_reads_in_callbacks(client: Any) -> None:
    """Makes reads of islands' arrays raise where they would not end.

    A host that runs a program over several islands takes no other commands until the functions have
    returned that the program's communication needs.
    """
    from jax._src import array

    place: Any = array.ArrayImpl
    read: Callable[[Any], Any] = place._value.fget

    def value(self: Any) -> Any:
        waits = getattr(_context, "spans", False) and self._npy_value is None
        if waits and any(device.client is client for device in self.sharding.device_set):
            raise RuntimeError(
                "a host callback of a program over several islands cannot read other arrays on the "
                "islands, whose hosts wait for it; make them operands of the callback"
            )
        return read(self)

    place._value = property(value)


def give_callbacks_a_device() -> None:
    """Gives callbacks a CPU device of this process, which JAX puts their arguments on.

    It asks for the first device of the platform ``cpu``. Those are the islands' here, which wait
    for the callback.
    """
    from jax._src import xla_bridge

    bridge: Any = xla_bridge
    find: Callable[..., Any] = bridge.local_devices
    if hasattr(find, "fairway_original"):
        return

    def local_devices(*given: Any, **named: Any) -> Any:
        if getattr(_context, "is_callback", False) and named.get("backend") == "cpu":
            return local_client().local_devices()
        return find(*given, **named)

    local_devices.fairway_original = find  # type: ignore[attr-defined]
    bridge.local_devices = local_devices


def answer_for_devices(client: Any) -> None:
    """Answers what the stock client refuses, about its devices and programs.

    Statistics of memory are not known, as on CPUs. Costs of a program that is not compiled are
    counted here.
    """
    from jaxlib import _jax

    statistics: Callable[..., Any] = _jax.Device.memory_stats
    costs: Callable[..., Any] = _jax.hlo_module_cost_analysis

    def memory_stats(device: Any) -> Any:
        return None if device.client is client else statistics(device)

    def hlo_module_cost_analysis(backend: Any, module: Any) -> Any:
        return costs(local_client() if backend is client else backend, module)

    interface: Any = _jax
    interface.Device.memory_stats = memory_stats
    interface.hlo_module_cost_analysis = hlo_module_cost_analysis


def exchange_copies(client: Any) -> None:
    """Lets arrays be exchanged with other libraries by DLPack, as copies in this process."""
    import jax
    from jax._src import array
    from jax._src import dlpack as jax_dlpack

    dlpack: Any = jax_dlpack
    place: Any = array.ArrayImpl
    export, where = place.__dlpack__, place.__dlpack_device__
    take: Callable[..., Any] = dlpack.from_dlpack

    def is_ours(one: Any) -> bool:
        devices = one.sharding.device_set
        return len(devices) == 1 and next(iter(devices)).client is client

    def to_dlpack(self: Any, **options: Any) -> Any:
        if not is_ours(self):
            return export(self, **options)
        if options.get("copy") is False:
            raise BufferError("the array is on another process's device, so it must be copied")
        kept = {name: options[name] for name in ("max_version",) if name in options}
        return np.array(self).__dlpack__(**kept)

    def device_of(self: Any) -> Any:
        return (dlpack.DLDeviceType.kDLCPU, 0) if is_ours(self) else where(self)

    @functools.wraps(take)
    def from_dlpack(external: Any, device: Any = None, copy: bool | None = None) -> Any:
        kind = getattr(external, "__dlpack_device__", lambda: (None, 0))()[0]
        if kind != dlpack.DLDeviceType.kDLCPU or jax.devices()[0].client is not client:
            return take(external, device, copy)
        if copy is False:
            raise BufferError("the array goes to another process's device, so it must be copied")
        return jax.device_put(np.array(np.from_dlpack(external)), device)

    place.__dlpack__, place.__dlpack_device__ = to_dlpack, device_of
    modules: tuple[Any, ...] = (dlpack, jax.dlpack, jax.numpy)
    for module in modules:
        module.from_dlpack = from_dlpack
