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

    # Of one shape and type each: the stock client takes all results for those of the first run.
    @functools.lru_cache(maxsize=PLANS_MAX)
    def plan(aval: Any, before: Sharding, after: Sharding) -> tuple[Any, Any] | None:
        if any(one.client is not client for one in before.device_set | after.device_set):
            return None
        try:
            return _prepared(client, aval, before, after)
        except Exception:  # such as an uneven one
            return None

    def over_hosts(x: Array, devices: Any, indices: Any, sharding: Sharding) -> Array:
        prepared = plan(x.aval, x.sharding, sharding)
        if prepared is None:
            return through_client(x, devices, indices, sharding)
        executable, handlers = prepared
        results = executable.execute_sharded([x], with_tokens=False)
        return results.consume_with_handlers(handlers)[0]

    module.shard_sharded_device_array_slow_path = over_hosts


def _prepared(client: Any, aval: Any, before: Sharding, after: Sharding) -> tuple[Any, Any]:
    """Returns a resharding, prepared by the controller, and the handlers of its result."""
    from jax._src.interpreters import pxla
    from jax.extend.ifrt_programs import ifrt_programs

    def described(sharding: Sharding) -> dict[str, Any]:
        if getattr(getattr(sharding, "spec", None), "unreduced", None):
            raise ValueError("an array of partial sums is no array yet")
        tiles = sharding._to_xla_hlo_sharding(aval.ndim).to_proto().SerializeToString()
        found = {
            "devices": {"device_ids": [device.id for device in sharding._device_assignment]},
            "xla_hlo_sharding": base64.b64encode(tiles).decode(),
        }
        if sharding.memory_kind is not None:
            found["memory_kind"] = sharding.memory_kind
        return found

    request = {"inSharding": [described(before)], "outSharding": [described(after)]}
    program = ifrt_programs.make_plugin_program(json.dumps({"reshardRequest": request}))
    options = ifrt_programs.make_plugin_compile_options()
    handlers = pxla.global_avals_to_results_handler([aval], [after], True).handlers
    return client.compile_ifrt_program(program, options), handlers
