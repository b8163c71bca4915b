"""Reshards arrays of the islands on the islands.

Where the shards of an array are not those that ``jax.device_put`` is to make, JAX reads the array
and puts what it has read: all bytes pass through the client, which waits for them. Here hosts
transfer them, and the client goes on.
"""

import base64
import functools
import json
from collections.abc import Callable
from typing import Any

Array = Any
Sharding = Any

PLANS_MAX = 1024
"""Most reshardings that are kept prepared."""


def reshard_on_hosts(client: Any) -> None:
    """Lets ``jax.device_put`` reshard the client's arrays without reading them."""
    from jax._src import array

    module: Any = array
    through_client: Callable[..., Array] = module.shard_sharded_device_array_slow_path

    @functools.lru_cache(maxsize=PLANS_MAX)
    def plan(before: Sharding, after: Sharding, rank: int) -> Any:
        try:
            return _prepared(client, before, after, rank)
        except Exception:  # such as an uneven one
            return None

    def over_hosts(x: Array, devices: Any, indices: Any, sharding: Sharding) -> Array:
        places = (*x.sharding.device_set, *devices)
        if any(device.client is not client for device in places) or not x.size:
            return through_client(x, devices, indices, sharding)
        prepared = plan(x.sharding, sharding, x.ndim)
        if prepared is None:
            return through_client(x, devices, indices, sharding)
        return _run(prepared, x, sharding)

    module.shard_sharded_device_array_slow_path = over_hosts


def _prepared(client: Any, before: Sharding, after: Sharding, rank: int) -> Any:
    """Returns a resharding, prepared by the controller."""
    from jax.extend.ifrt_programs import ifrt_programs

    def described(sharding: Sharding) -> dict[str, Any]:
        if getattr(getattr(sharding, "spec", None), "unreduced", None):
            raise ValueError("an array of partial sums is no array yet")
        tiles = sharding._to_xla_hlo_sharding(rank).to_proto().SerializeToString()
        found = {
            "devices": {"device_ids": [device.id for device in sharding._device_assignment]},
            "xla_hlo_sharding": base64.b64encode(tiles).decode(),
        }
        if sharding.memory_kind is not None:
            found["memory_kind"] = sharding.memory_kind
        return found

    request = {"inSharding": [described(before)], "outSharding": [described(after)]}
    program = ifrt_programs.make_plugin_program(json.dumps({"reshardRequest": request}))
    return client.compile_ifrt_program(program, ifrt_programs.make_plugin_compile_options())


def _run(prepared: Any, x: Array, sharding: Sharding) -> Array:
    from jax._src.interpreters import pxla

    handlers = pxla.global_avals_to_results_handler([x.aval], [sharding], True).handlers
    results = prepared.execute_sharded([x], with_tokens=False)
    return results.consume_with_handlers(handlers)[0]
