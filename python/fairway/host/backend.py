"""Wraps jaxlib's private interfaces.

A host needs jaxlib but not jax to start, which keeps the start short. All differences between the
supported versions of jaxlib are in one place below.

The shards of an array on this host are one jaxlib array whose declared shape is that of a shard.
Each device has a shard of its own (XLA calls that sharding manual). The controller knows which
region of a larger array each shard is; XLA needs only the buffers.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxlib import _hlo, _jax, cpu_sparse, lapack, xla_client
from jaxlib.cpu import _lapack
from jaxlib.mlir import ir
from jaxlib.mlir._mlir_libs import _jax_mlir_ext
from jaxlib.mlir.dialects import chlo, sdy, stablehlo

from fairway.errors import ConfigError
from fairway.host import without_jax
from fairway.host.elements import is_string
from fairway.host.executable import Executable
from fairway.host.overrides import UnreadableError, check_overrides
from fairway.plugin import check_jaxlib

__all__ = [
    "BORDERS",
    "JAXLIB_VERSION",
    "READING",
    "Backend",
    "JaxRuntimeError",
    "UnreadableError",
    "collect_garbage",
    "coordination_service",
    "tiled",
]

ARTIFACT_HEADER = re.compile(rb"ML\xefR.StableHLO_v(\d+\.\d+\.\d+)\0", re.DOTALL)
"""Header of a portable artifact: bytecode's magic number and version, and StableHLO's version."""

BORDERS = "fairway.borders"
"""Marks a module whose optimisation barriers separate functions."""

PASSES_OFF = "xla_disable_hlo_passes"
BARRIER_EXPANDER = "cse_barrier_expander"
"""XLA's pass that removes barriers; on CPUs before fusion, which these barriers must outlive."""

JAXLIB_VERSION: str = __import__("jaxlib").__version__
JaxRuntimeError = _jax.JaxRuntimeError

Array = Any
"""A jaxlib array: the shards of one logical array on this host.

Without jax it has no `shape`, `dtype` or operators; what describes it is its `aval`."""

# Differences between versions. Tested: 0.10.2 (467) and 0.11.2 (495).

INTERFACES: int = xla_client._version
"""Version of jaxlib's private interfaces, which jax checks as well; it grows within a release."""

HANDLER_OPTIONS: dict[str, bool] = {"_skip_checks": True} if INTERFACES < 489 else {}
"""Makes result handlers accept shards unchecked; newer versions always do."""


LAPACK = {f"{target.partition('_')[0]}_".encode() for target in _lapack.registrations()}
"""How custom calls of LAPACK's routines begin; programs that have them need scipy's."""


READING = threading.RLock()
"""Held while MLIR is parsed: its Python bindings occasionally crash the process if two threads use
them at once, even in contexts of their own (jaxlib 0.10.2)."""

_SHARDS_LOCK = threading.Lock()
_IMPORTING = threading.Lock()

DESCRIPTIONS = 4096
"""Number of descriptions of arrays, by shape and element type, that jaxlib keeps for new ones."""


def tiled(op_sharding: Any) -> Any:
    """Returns a sharding as tiles of devices.

    For clients of jaxlib 0.11.2 the compiler returns axes of a mesh instead; asking such a
    sharding for its tiles crashes the process (0.10.2).
    """
    return _hlo.HloSharding.from_proto(op_sharding).v3_to_v2_sharding()


def _processor_features() -> str:
    """Returns what the kernel says of this machine's processors, for which XLA compiles."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(names)}))


class _Aval:
    """Shape and element type, in the form that jaxlib expects.

    Weakly typed, which means nothing here, but for jaxlib, which keeps descriptions by these three:
    one that a running program keeps in use could otherwise describe an array of a user's function.
    """

    __slots__ = ("dtype", "shape", "weak_type")

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.shape = shape
        self.dtype = dtype
        self.weak_type = True


def _describe(shape: tuple[int, ...], dtype: np.dtype[Any], weak_type: bool) -> Any:
    """Makes what describes an array that is a shard of another: jax's own type once jax is here."""
    if without_jax.is_imported():
        return sys.modules["jax.core"].ShapedArray(shape, dtype, weak_type)
    return _Aval(shape, dtype)


@dataclasses.dataclass(frozen=True)
class IslandMembership:
    """A host's place in its island.

    Attributes:
        rank: the host's rank.
        hosts: number of hosts of the island.
        coordinator: address of the island's coordination service, if it has several hosts.
        address: where XLA's collectives listen for the island's other hosts.
    """

    rank: int = 0
    hosts: int = 1
    coordinator: str | None = None
    address: str = "127.0.0.1"


ALONE = IslandMembership()


class Backend:
    """This host's devices.

    Args:
        platform: ``cpu`` or ``cuda``.
        devices: number of local devices.
        membership: this host's place in its island; by default the island's only one.
        first_device: number of its first GPU among those of the machine.

    Raises:
        ConfigError: there are fewer devices.
        RuntimeError: this version of jaxlib is known not to work.
    """

    def __init__(
        self,
        platform: str,
        devices: int,
        membership: IslandMembership = ALONE,
        first_device: int = 0,
    ) -> None:
        check_jaxlib(JAXLIB_VERSION)
        distributed = None
        if membership.hosts > 1:
            distributed = _jax.get_distributed_runtime_client(
                membership.coordinator,
                membership.rank,
                init_timeout=60,
                heartbeat_timeout=100,
                shutdown_on_destruction=False,
                use_compression=True,
            )
            distributed.connect()
        self._distributed = distributed
        if platform == "cpu":
            self.client = _make_cpu_client(devices, membership, distributed)
        else:
            numbers = range(first_device, first_device + devices)
            self.client = _make_accelerator_client(platform, numbers, membership, distributed)
        self.platform: str = platform
        self.local_devices: list[Any] = sorted(self.client.local_devices(), key=lambda d: d.id)
        self._order = {device.id: index for index, device in enumerate(self.local_devices)}
        self.all_devices: list[Any] = sorted(
            self.client.devices(), key=lambda d: (d.process_index, d.id)
        )
        if len(self.local_devices) != devices:
            raise ConfigError(
                f"there are {len(self.local_devices)} {platform} devices from number "
                f"{first_device} on; expected {devices}"
            )
        for module in (lapack, cpu_sparse):
            for target, registrations in module.registrations().items():
                for name, value, version in registrations:
                    xla_client.register_custom_call_target(
                        name, value, platform=target, api_version=version
                    )
        for name in lapack.batch_partitionable_targets():
            xla_client.register_custom_call_as_batch_partitionable(name)

    @property
    def device_kind(self) -> str:
        """The vendor's name of the devices."""
        return str(self.local_devices[0].device_kind)

    @property
    def version(self) -> str:
        """Version text of the platform."""
        return str(self.client.platform_version)

    def kind(self) -> str:
        """Returns what an executable depends on besides its program, options and devices."""
        processors = [device.process_index for device in self.all_devices]
        flags = os.environ.get("XLA_FLAGS", "")
        made_by = (JAXLIB_VERSION, self.platform, self.version, self.device_kind, flags)
        features = _processor_features() if self.platform == "cpu" else ""
        return repr((*made_by, processors, features))

    def memory_kinds(self) -> list[str]:
        """Returns the memory kinds of the devices, the default first."""
        device = self.local_devices[0]
        default = device.default_memory().kind
        kinds = [memory.kind for memory in device.addressable_memories()]
        return [default, *(kind for kind in kinds if kind != default)]

    def device_memory(self) -> int | None:
        """Returns the bytes of each device that programs may use; None if unknown."""
        if self.platform == "cpu":
            return None
        stats = self.local_devices[0].memory_stats() or {}
        return stats.get("bytes_limit")

    # Arrays

    @functools.lru_cache(maxsize=4096)  # noqa: B019 - one backend lives as long as its process
    def sharding(self, local: tuple[int, ...], memory: str | None) -> Any:
        """Returns a sharding that gives each of these local devices an array of its own."""
        devices = [self.local_devices[index] for index in local]
        return _jax.GSPMDSharding(
            _jax.DeviceList(tuple(devices)), _hlo.HloSharding.manual(), memory_kind=memory
        )

    def put(
        self,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        local: tuple[int, ...],
        memory: str | None,
        shards: list[Any],
        keeps: bool = True,
    ) -> Array:
        """Makes an array of one numpy array (or device array) per local device.

        With ``keeps`` the array may alias aligned host memory, which must not change afterwards.
        """
        semantics = _jax.HostBufferSemantics
        keeps = keeps or 0 in shape  # jaxlib fails to copy nothing to several devices (0.10.2)
        return _jax.batched_device_put(
            _Aval(shape, dtype),
            self.sharding(local, memory),
            shards,
            [self.local_devices[index] for index in local],
            committed=True,
            force_copy=False,
            host_buffer_semantics=(
                semantics.ZERO_COPY if keeps else semantics.IMMUTABLE_ONLY_DURING_CALL
            ),
            enable_x64=True,
        )

    def join(
        self,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        local: tuple[int, ...],
        memory: str | None,
        shards: list[Array],
    ) -> Array:
        """Makes an array that shares the buffers of single-device arrays."""
        return _jax.ArrayImpl(
            _Aval(shape, dtype), self.sharding(local, memory), shards, True, _skip_checks=True
        )

    def copy(self, array: Array, local: tuple[int, ...], memory: str | None) -> Array:
        """Copies each shard to the device at the same index of ``local``, never aliasing it."""
        devices = [self.local_devices[index] for index in local]
        return _jax.batched_copy_array_to_devices_with_sharding(
            [array],
            [_jax.DeviceList(tuple(devices))],
            [self.sharding(local, memory)],
            [_jax.ArrayCopySemantics.ALWAYS_COPY],
        )[0]

    def warm_up(self) -> None:
        """Accesses the shards of an array, for which jaxlib imports jax the first time."""
        without_jax.answer_imports(_describe)
        self._access((), np.dtype(np.float32))

    def _access(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        """Accesses the shards of an array of this type, of which jaxlib keeps the description."""
        list(self.put(dtype, shape, (0,), None, [np.zeros(shape, dtype)])._arrays)

    def import_jax(self) -> None:
        """Imports jax for functions of users, unless it is imported; takes a second.

        Afterwards no array of theirs is described by what describes those of this host.
        """
        with _IMPORTING:
            if not without_jax.import_jax():
                return
            with _SHARDS_LOCK:  # those that programs use all the time are replaced as well
                for number in range(2 * DESCRIPTIONS):
                    self._access((0, number), np.dtype(np.uint8))

    @staticmethod
    def shards(array: Array) -> list[Array]:
        """Returns this host's shards as single-device arrays."""
        # The first call fills a list in place, and another thread may see it partially filled.
        with _SHARDS_LOCK:
            return list(array._arrays)

    def places(self, array: Array) -> tuple[int, ...]:
        """Returns the local device of each shard here.

        Read from the array, as a shard may be the array itself: whether a shard gives its single
        device depends on which function made the array.
        """
        order = self._order
        return tuple(order[device.id] for device in array._sharding._internal_device_list)

    @classmethod
    def shard(cls, array: Array, index: int) -> Array:
        """Returns the single-device array at ``index`` among this host's shards."""
        return cls.shards(array)[index]

    @staticmethod
    def view(shard: Array) -> np.ndarray[Any, Any]:
        """Returns the elements of a single-device array, without a copy if the memory allows it."""
        elements: np.ndarray[Any, Any] = shard._single_device_array_to_np_array_did_copy()[0]
        return elements

    @staticmethod
    def memory_kind(array: Array) -> str | None:
        """Returns the memory kind of an array; None is the default."""
        kind: str | None = array._sharding._memory_kind
        return kind

    @staticmethod
    def size(array: Array) -> int:
        """Returns the bytes of device memory that an array holds; 0 of strings, unknown to XLA."""
        return 0 if is_string(array.aval.dtype) else int(array.on_device_size_in_bytes())

    # Programs

    def compile(
        self,
        module: Any,
        options: bytes,
        devices: list[int],
        grid: tuple[int, int],
        callbacks: Sequence[Callable[..., Any]] = (),
    ) -> Any:
        """Compiles a module for devices of the island.

        Args:
            module: the program.
            options: serialized compile options.
            devices: island-local numbers of its devices.
            grid: replicas and partitions.
            callbacks: the functions that it calls, by index.
        """
        chosen = _jax.DeviceList(tuple(self.all_devices[index] for index in devices))
        given = self._options(options, devices, grid)
        if BORDERS in module.operation.attributes and self.client.platform == "cpu":
            others = dict(given.env_option_overrides)
            off = [str(others[PASSES_OFF])] if PASSES_OFF in others else []
            others[PASSES_OFF] = ",".join([*off, BARRIER_EXPANDER])
            given.env_option_overrides = list(others.items())
        if callbacks:
            return self.client.compile_and_load(module, chosen, given, list(callbacks))
        return self.client.compile_and_load(module, chosen, given)

    def deserialize(
        self, serialized: bytes, options: bytes, devices: list[int], grid: tuple[int, int]
    ) -> Any:
        """Loads a program that a host of the same kind compiled."""
        chosen = _jax.DeviceList(tuple(self.all_devices[index] for index in devices))
        return self.client.deserialize_executable(
            serialized, chosen, self._options(options, devices, grid)
        )

    def _options(self, serialized: bytes, devices: list[int], grid: tuple[int, int]) -> Any:
        options = _jax.CompileOptions.ParseFromString(serialized)
        check_overrides(options.env_option_overrides)
        # Dumps are written by the client's XLA, not here.
        options.executable_build_options.debug_options.xla_dump_to = ""
        build = options.executable_build_options
        if serialized and (options.num_replicas, options.num_partitions) != grid:
            # Options of a program over several islands, for a part of it.
            build.allow_spmd_sharding_propagation_to_parameters = [False]
            build.allow_spmd_sharding_propagation_to_output = [False]
            build.num_replicas, build.num_partitions = grid
            options.num_replicas, options.num_partitions = grid
        if not serialized:
            options.num_replicas, options.num_partitions = grid
            options.executable_build_options.use_spmd_partitioning = True
            options.executable_build_options.use_shardy_partitioner = True
        ids = np.array([self.all_devices[index].id for index in devices]).reshape(grid)
        assignment = _jax.DeviceAssignment.create(ids)
        options.device_assignment = assignment
        options.compile_portable_executable = False
        options.executable_build_options.device_assignment = assignment
        return options

    def wrap(
        self,
        loaded: Any,
        name: str,
        outputs: list[tuple[np.dtype[Any], tuple[int, ...], str | None]],
    ) -> Executable:
        """Prepares a loaded program for running.

        Args:
            loaded: jaxlib's executable.
            name: of the program.
            outputs: element type, shard shape and memory kind of each result.
        """
        local = tuple(self._order[device.id] for device in loaded.local_devices())
        handlers = [
            _jax.array_result_handler(
                _Aval(shape, dtype), self.sharding(local, memory), True, **HANDLER_OPTIONS
            )
            for dtype, shape, memory in outputs
        ]
        return Executable(loaded, handlers, local, name)

    def zeros(self, program: Executable, index: int) -> Array:
        """Returns zeros in place of a program's argument."""
        module = program.loaded.hlo_modules()[0].as_serialized_hlo_module_proto()
        shapes = xla_client.XlaComputation(module).program_shape().parameter_shapes()
        shape = shapes[program.bound + index]
        zeros = np.zeros(shape.dimensions(), shape.numpy_dtype())
        parts = [zeros] * len(program.local)
        return self.put(zeros.dtype, zeros.shape, program.local, None, parts, keeps=False)

    @staticmethod
    def parse(program: bytes) -> Any:
        """Returns the module of a portable artifact, in a context of its own.

        Modules that are compiled concurrently must not share a context (jaxlib 0.10.2).

        Raises:
            UnreadableError: this jaxlib cannot read it.
        """
        try:
            with READING, Backend.context() as context:
                return stablehlo.deserialize_portable_artifact(context, program)
        except ValueError as error:
            raise UnreadableError(_why_unreadable(program)) from error

    @staticmethod
    def load(bytecode: bytes) -> Any:
        """Returns the module that a :class:`fairway.host.checking.Checker` wrote."""
        with READING:
            if any(family in bytecode for family in LAPACK):
                with without_jax.own_path():
                    _lapack.initialize()  # imports scipy.linalg, which takes half a second
            context = Backend.context()
            registry = ir.DialectRegistry()
            _jax_mlir_ext.register_dialects(registry)
            context.append_dialect_registry(registry)
            return ir.Module.parse(bytecode, context)

    @staticmethod
    def context() -> Any:
        """Returns a context with the dialects in which clients write programs."""
        made = ir.Context()
        chlo.register_dialect(made)
        stablehlo.register_dialect(made)
        sdy.register_dialect(made)
        return made

    @staticmethod
    def artifact(module: Any, context: Any) -> bytes:
        """Returns a module of ``context`` as a portable artifact."""
        with context:
            artifact: bytes = stablehlo.serialize_portable_artifact(
                module, stablehlo.get_current_version(), allow_other_dialects=True
            )
            return artifact


def _why_unreadable(program: bytes) -> str:
    written = ARTIFACT_HEADER.match(program)
    if written is None:
        return "INVALID_ARGUMENT: the program is not a StableHLO portable artifact"
    version, readable = written[1].decode(), stablehlo.get_current_version()
    if _numbers(version) <= _numbers(readable):
        return f"INVALID_ARGUMENT: the program is a damaged artifact of StableHLO {version}"
    return (
        f"FAILED_PRECONDITION: the client wrote its program in StableHLO {version}, but this "
        f"host's jaxlib {JAXLIB_VERSION} reads no newer than {readable}; give hosts a jaxlib as "
        "new as the client's, or the client an older one"
    )


def _numbers(version: str) -> list[int]:
    return [int(number) for number in version.split(".")]


def _make_cpu_client(devices: int, membership: IslandMembership, distributed: Any) -> Any:
    collectives = None
    if distributed is not None:
        collectives = _jax.make_gloo_tcp_collectives(
            distributed_client=distributed, hostname=membership.address, interface=None
        )
    return xla_client.make_cpu_client(
        asynchronous=True,
        distributed_client=distributed,
        node_id=membership.rank,
        num_nodes=membership.hosts,
        collectives=collectives,
        num_devices=devices,
    )


def _make_accelerator_client(
    platform: str, numbers: range, membership: IslandMembership, distributed: Any
) -> Any:
    """Makes a client by jax, which discovers accelerators as plugins."""
    import jax
    import jax.extend.backend
    from jax._src.distributed import global_state

    if distributed is not None:
        global_state.client = distributed
        global_state.process_id = membership.rank
        global_state.num_processes = membership.hosts
    config: Any = jax.config
    config.update("jax_cuda_visible_devices", ",".join(map(str, numbers)))
    return jax.extend.backend.get_backend(platform)


def coordination_service(address: str, hosts: int) -> Any:
    """Starts the coordination service of an island, by which its hosts find each other."""
    return _jax.get_distributed_runtime_service(
        address,
        hosts,
        heartbeat_timeout=100,
        cluster_register_timeout=60,
        shutdown_timeout=1,
        recoverable=True,
    )


def collect_garbage() -> None:
    """Frees host memory that freed arrays aliased; jaxlib would defer that to its next call."""
    _jax.collect_garbage()
