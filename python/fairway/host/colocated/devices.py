"""CPU devices of a process that runs a client's functions, in place of the cluster's.

Functions of ``colocated_python`` see arrays over devices of several hosts and have the shards of
this one. So JAX must know the others' devices too, as devices of another process. That process
need not exist: this one plays both at start, over a socket that only it can reach.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Sequence
from typing import Any

from jax._src import xla_bridge
from jax._src.lib import _jax, xla_client
from jax.experimental.colocated_python import serialization

__all__ = ["Devices"]

TIMEOUT_S = 60
"""Timeout of the start of JAX's devices."""


class Devices:
    """This process's devices and those that it only knows.

    Args:
        numbers: the number of each device of the cluster.
        own: the number of each device of this host.

    Attributes:
        own: this host's devices.
    """

    def __init__(self, numbers: Sequence[int], own: Sequence[int]) -> None:
        others = [number for number in numbers if number not in own]
        self._keep, client = _clients(len(own), len(others))
        xla_bridge.register_backend_factory("cpu", lambda: client, priority=0)
        found = sorted(client.devices(), key=lambda device: (device.process_index, device.id))
        self.own = found[: len(own)]
        self._by_number = dict(zip([*own, *others], found, strict=True))
        self._numbers = {device: number for number, device in self._by_number.items()}

    def by_number(self, number: int) -> Any:
        """Returns the device of a number of the cluster's."""
        return self._by_number[number]

    def answer_to_numbers(self) -> None:
        """Lets pickled meshes and shardings name devices by the cluster's numbers."""
        replaced: Any = serialization
        replaced._get_cpu_device_map = lambda: self._by_number
        once = serialization._make_reduce_func_with_common_obj

        def mesh(mesh: Any) -> tuple[Any, Any]:
            numbers = serialization.np.vectorize(self._numbers.__getitem__, otypes=[int])
            given = numbers(mesh.devices), mesh.axis_names, mesh.axis_types
            return serialization._unreduce_mesh, given

        def devices(devices: Any) -> tuple[Any, Any]:
            numbers = [self._numbers[device] for device in devices]
            return serialization._unreduce_device_list, (numbers,)

        def single(sharding: Any) -> tuple[Any, Any]:
            [device] = sharding.device_set
            given = self._numbers[device], sharding.memory_kind
            return serialization._unreduce_single_device_sharding, given

        replaced._reduce_mesh = once(mesh)
        replaced._reduce_device_list = once(devices)
        replaced._reduce_single_device_sharding = once(single)


def _clients(own: int, others: int) -> tuple[Any, Any]:
    """Returns JAX's client of CPU devices, and what must live as long."""
    if not others:
        return None, xla_client.make_cpu_client(asynchronous=True, num_devices=own)
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix:{os.path.join(folder, 'devices')}"
        service = _jax.get_distributed_runtime_service(address, 2)
        made: dict[int, tuple[Any, Any]] = {}

        def join(process: int, devices: int) -> None:
            member = _jax.get_distributed_runtime_client(
                address, process, init_timeout=TIMEOUT_S, shutdown_on_destruction=False
            )
            member.connect()
            client = xla_client.make_cpu_client(
                asynchronous=True,
                distributed_client=member,
                node_id=process,
                num_nodes=2,
                num_devices=devices,
            )
            made[process] = client, member

        other = threading.Thread(target=join, args=(1, others))
        other.start()
        join(0, own)
        other.join()
    return (service, made), made[0][0]
