"""Arrays to files and back, as pathwaysutils and Orbax ask for it in JSON.

Each host writes or reads the shards of its devices, in Zarr's format, which every handler of
Orbax's reads. A location is a folder that all hosts see, or what TensorStore takes for one, such as
``gs://bucket/path``.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax._src.lib import _jax, xla_client
from jax._src.sharding_impls import GSPMDSharding

from fairway.host.colocated.devices import Devices
from fairway.host.elements import dtype_of

__all__ = ["PREFIX", "Persistence", "persistence_of"]

PREFIX = b"fairway persistence 1\n"
"""What a request begins with; then the JSON that the client has sent."""
TIMEOUT_S = 3600.0

_struct: Any = jax.ShapeDtypeStruct

NEEDS_TENSORSTORE = (
    "hosts need TensorStore to write and read checkpoints: pip install 'fairway[checkpoints]'"
)


class Persistence(NamedTuple):
    """A request as a function.

    Attributes:
        call: writes its arguments and returns nothing, or returns what it has read.
        arguments: what it takes.
        results: what it returns.
    """

    call: Callable[..., Any]
    arguments: list[Any]
    results: list[Any]


def persistence_of(request: bytes, devices: Devices) -> Persistence:
    """Returns what a request asks for.

    Args:
        request: its JSON.
        devices: the devices that it names by number.

    Raises:
        ModuleNotFoundError: this Python has no TensorStore.
        KeyError: something is missing in it.
    """
    try:
        import tensorstore  # noqa: F401 - whether it is there
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(NEEDS_TENSORSTORE) from error
    [(kind, body)] = json.loads(request).items()
    writes = "write" in kind.lower()
    if kind.startswith("bulk"):
        requests = body["write_requests" if writes else "read_requests"]
    else:
        requests = [body]
    arrays = [_spec_of(one, devices, writes) for one in requests]
    places = [_place_of(one) for one in requests]
    timeout_s = max(_timeout_of(one) for one in requests)
    if writes:
        return Persistence(lambda *given: _write(places, given, timeout_s), arrays, [])
    return Persistence(lambda: _read(places, arrays, timeout_s), [], arrays)


def _spec_of(request: Mapping[str, Any], devices: Devices, writes: bool) -> Any:
    """Returns shape, sharding and element type of an array; no type of one that is written."""
    proto = xla_client.OpSharding()
    proto.ParseFromString(base64.b64decode(request["b64_hlo_sharding_string"], validate=True))
    named = tuple(devices.by_number(number) for number in request["devices"]["device_ids"])
    sharding: Any = GSPMDSharding(_jax.DeviceList(named), proto)
    if writes:
        return _struct(tuple(request["shape"]), np.uint8, sharding=sharding)
    shape = request["shape"]
    kind = dtype_of(_name_of(shape["xla_primitive_type_str"]))
    return _struct(tuple(shape["dimensions"]), kind, sharding=sharding)


def _name_of(kind: str) -> str:
    """Returns numpy's name of XLA's name of a type, such as ``F32``."""
    if kind in ("BF16", "PRED"):
        return {"BF16": "bfloat16", "PRED": "bool"}[kind]
    words = {"F": "float", "S": "int", "U": "uint", "C": "complex"}
    return words[kind[0]] + kind[1:]


def _place_of(request: Mapping[str, Any]) -> Any:
    """Returns where an array is, as TensorStore names it."""
    location, name = (
        base64.b64decode(request[field], validate=True).decode()
        for field in ("b64_location", "b64_name")
    )
    if not location.startswith("/") and "://" not in location:
        raise ValueError(f"the location {location!r} is neither an absolute path nor a URL")
    if "://" in location:
        return f"{location.rstrip('/')}/{name}/"
    return {"driver": "file", "path": f"{location.rstrip('/')}/{name}/"}


def _timeout_of(request: Mapping[str, Any]) -> float:
    given = request.get("timeout")
    return given["seconds"] + given.get("nanos", 0) / 1e9 if given else TIMEOUT_S


def _write(places: Sequence[Any], arrays: Sequence[Any], timeout_s: float) -> list[Any]:
    import tensorstore

    writes: list[Any] = []
    for place, array in zip(places, arrays, strict=True):
        store = tensorstore.open(
            {"driver": "zarr", "kvstore": place},
            create=True,
            open=True,
            dtype=array.dtype,
            shape=array.shape,
            chunk_layout=tensorstore.ChunkLayout(
                chunk_shape=array.sharding.shard_shape(array.shape)
            ),
        ).result(timeout_s)
        writes += [
            store[shard.index].write(np.asarray(shard.data))
            for shard in array.addressable_shards
            if shard.replica_id == 0
        ]
    for write in writes:
        write.result(timeout_s)
    return []


def _read(places: Sequence[Any], arrays: Sequence[Any], timeout_s: float) -> list[Any]:
    import tensorstore

    opened = [
        tensorstore.open({"driver": "zarr", "kvstore": place}, open=True, dtype=array.dtype)
        for place, array in zip(places, arrays, strict=True)
    ]
    reads: list[list[tuple[Any, Any]]] = []
    for store, array in zip(opened, arrays, strict=True):
        stored = store.result(timeout_s)
        if tuple(stored.shape) != array.shape:
            raise ValueError(f"{list(stored.shape)} is stored; {list(array.shape)} is asked for")
        regions = array.sharding.addressable_devices_indices_map(array.shape)
        reads.append([(device, stored[region].read()) for device, region in regions.items()])
    return [
        jax.make_array_from_single_device_arrays(
            array.shape,
            array.sharding,
            [jax.device_put(read.result(timeout_s), device) for device, read in shards],
        )
        for array, shards in zip(arrays, reads, strict=True)
    ]
