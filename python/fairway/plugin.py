"""Registers the platform ``proxy`` with JAX.

JAX imports this module through the ``jax_plugins`` entry point, or where Fairway is not installed
through the folder ``bare`` beside it. A program then needs only ``JAX_PLATFORMS=proxy`` and
``JAX_BACKEND_TARGET=grpc://host:port`` in its environment, or the same in ``jax.config``. Where
clients share islands, ``FAIRWAY_WEIGHT`` (default 1) is a client's share of the device time within
its priority, and ``FAIRWAY_PRIORITY`` (default 0) its scheduling priority; higher is first.
"""

import contextlib
import ctypes
import functools
import inspect
import itertools
import logging
import math
import os
import select
import socket
import stat
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["BARE", "check_jaxlib", "initialize"]

BARE = Path(__file__).parent / "bare"
"""Where JAX finds this plugin if it is in ``PYTHONPATH`` of a Python without Fairway."""
LOG = logging.getLogger("fairway")
TARGET = "JAX_BACKEND_TARGET"
REFUSED_JAXLIBS = {"0.11.1": "its loops (jax.lax.fori_loop) never end on CPU devices"}
"""Versions that neither clients nor hosts may use, and why."""
REACHABLE_WITHIN_S = 5.0
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""What a client of HTTP/2 begins with (RFC 9113, section 3.4), with an empty frame of settings."""
REFUSAL = "fairway: "
PR_SET_TIMERSLACK = 29
"""Constant of <linux/prctl.h>."""
TIMER_SLACK_NS = 5_000_000
"""Timer slack of the client's threads: how late their timers may fire."""


def initialize() -> None:
    """Registers the backend; connects only when JAX first needs a device.

    Whether a program selects it is checked only then, since ``jax.config`` may change until then.
    """
    from jax._src import xla_bridge

    # Replaces the factory of newer versions of JAX. Where the platform is not selected, it fails at
    # once, and JAX continues with other platforms.
    xla_bridge.register_backend_factory("proxy", _connect, priority=-1, fail_quietly=True)


def check_jaxlib(version: str) -> None:
    """Rejects versions of jaxlib that are known not to work.

    Raises:
        RuntimeError: this is one of them.
    """
    if version in REFUSED_JAXLIBS:
        raise RuntimeError(
            f"jaxlib {version} cannot be used with Fairway: {REFUSED_JAXLIBS[version]}; install "
            "another version of jax and jaxlib, such as 0.11.2"
        )


def _platforms() -> list[str]:
    """Returns the platforms selected by the environment or ``jax.config``."""
    import jax

    config: Any = jax.config
    return (config.jax_platforms or "").split(",")


def _target() -> str:
    """Returns the controller's address; JAX stores the environment's value in lower case."""
    from jax._src import xla_bridge

    given, configured = os.environ.get(TARGET, ""), str(xla_bridge.BACKEND_TARGET.value or "")
    return given if configured in ("", given.lower()) else configured


def _connect() -> object:
    import jax
    from jax.extend.backend import ifrt_proxy
    from jaxlib import utils
    from jaxlib.version import __version__ as jaxlib_version

    if "proxy" not in _platforms():
        raise RuntimeError("JAX_PLATFORMS does not name 'proxy'")
    check_jaxlib(jaxlib_version)
    target = _target()
    if not target.startswith("grpc://"):
        raise RuntimeError(
            f"JAX_PLATFORMS names 'proxy' but {TARGET} is {target!r}; expected "
            "grpc://HOST:PORT; try `fairway up`, which prints it, or "
            "`fairway run SCRIPT`, which sets it"
        )
    # The stock client's only alternative is ALTS; the server listens on this machine only.
    os.environ.setdefault("IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS", "true")
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    # The client warns of insecure credentials, and logs a stack trace at exit; both are expected.
    # jaxlib has read the variable already; 1 is JAX's default where it was not set.
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1") == "1":
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
        utils.absl_set_min_log_level(2)
    # The client cannot serialize executables, so they cannot be cached either.
    config: Any = jax.config
    if config.jax_compilation_cache_dir is not None:
        config.update("jax_enable_compilation_cache", False)
    _check_reachable(target)
    options: Any = ifrt_proxy.ClientConnectionOptions()
    options.initialization_data = {
        f"fairway_{name.lower()}": _number(f"FAIRWAY_{name}")
        for name in ("WEIGHT", "PRIORITY")
        if os.environ.get(f"FAIRWAY_{name}")
    }
    _accept_again()
    with _late_timers():
        client: Any = ifrt_proxy.get_client(target, options)
    if refusal := getattr(client._get_all_devices()[0], "fairway_refusal", None):
        raise RuntimeError(f"the controller refuses this client: {refusal}")
    _watch_connection(target)
    _answer_to(client.platform, client)
    _take_any_strides()
    _look_before_compiling(client)
    _span_islands()
    os.register_at_fork(after_in_child=_refuse_after_fork)
    return client


@contextlib.contextmanager
def _late_timers() -> Iterator[None]:
    """Increases the timer slack of threads that start meanwhile, so that they wake up less often.

    The stock client has a thread that checks every 50 us whether array handles are to be released,
    and sleeps between, even while the client is idle. That is a fifth of a core per client. Any
    other request carries such handles along, so that no operation waits for this thread.
    """
    if sys.platform != "linux":
        yield
        return
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_TIMERSLACK, TIMER_SLACK_NS)
    try:
        yield
    finally:
        prctl(PR_SET_TIMERSLACK, 0)  # resets to the thread's default


def _number(variable: str) -> int:
    try:
        return int(os.environ[variable])
    except ValueError as error:
        raise RuntimeError(
            f"{variable} is {os.environ[variable]!r}; expected a whole number"
        ) from error


def _answer_to(platform: str, client: object) -> None:
    """Lets ``jax.devices("cpu")`` and the like find the islands' devices.

    A program that also wants its own process's devices names them in ``JAX_PLATFORMS``.
    JAX looks up GPUs by the platform ``cuda``, whatever name a client gives them.
    """
    from jax._src import xla_bridge

    platform = {"gpu": "cuda"}.get(platform, platform)
    if platform not in _platforms():
        xla_bridge._backends.setdefault(platform, client)


def _take_any_strides() -> None:
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


def _look_before_compiling(client: Any) -> None:
    """Makes a compilation on a closed connection raise the same error as other calls.

    The stock client aborts the process there. So it is asked for a layout first, which costs one
    round trip; it caches layouts, so each request is for another size.
    """
    import numpy as np
    from jax._src import compiler

    compile_now: Callable[..., Any] = compiler.backend_compile_and_load
    device, byte, sizes = client.devices()[0], np.dtype(np.int8), itertools.count(1)

    def look_and_compile(backend: Any, *others: Any, **named: Any) -> Any:
        if backend is client:
            client.get_default_layout(byte, (next(sizes),), device)
        compiled = compile_now(backend, *others, **named)
        if backend is client:
            _warn_of_exchanges(compiled)
        return compiled

    compiler.backend_compile_and_load = look_and_compile


def _mesh_over_islands(make: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Makes a mesh as ``jax.make_mesh`` does, also of devices of several islands.

    JAX refuses devices with different ``slice_index``, since it knows of no computation over them.

    Args:
        make: JAX's function.
        given: its positional arguments.
        named: its other arguments.
    """
    import jax
    import numpy as np

    try:
        return make(*given, **named)
    except ValueError as error:
        if "multi-slice" not in str(error):
            raise
    arguments = inspect.signature(make).bind(*given, **named).arguments
    shape, names = tuple(arguments["axis_shapes"]), arguments["axis_names"]
    devices = list(jax.devices() if (own := arguments.get("devices")) is None else own)
    kinds = arguments.get("axis_types")
    if kinds is None:
        kinds = make((1,) * len(shape), names, devices=devices[:1]).axis_types
    mesh: Any = jax.sharding.Mesh
    return mesh(np.array(devices[: math.prod(shape)]).reshape(shape), names, axis_types=kinds)


def _span_islands() -> None:
    """Lets ``jax.make_mesh`` take devices of all islands, also where it was imported before."""
    from jax._src import sharding_impls

    function: Any = sharding_impls.make_mesh
    if hasattr(function, "fairway_over_islands"):
        return

    def replaced(*given, **named):  # type: ignore[no-untyped-def]
        from jax._src.sharding_impls import make_mesh

        return make_mesh.fairway_over_islands(*given, **named)  # type: ignore[attr-defined]

    original: Any = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__
    )
    original.__kwdefaults__ = function.__kwdefaults__
    function.fairway_over_islands = functools.partial(_mesh_over_islands, original)
    function.__signature__ = inspect.signature(original)
    # The code is replaced, not the name: scripts have imported the function by now.
    function.__code__, function.__defaults__ = replaced.__code__, None
    function.__kwdefaults__ = None


def _warn_of_exchanges(compiled: Any) -> None:
    """Warns of operations that a program over several islands exchanges their operands for."""
    islands = {getattr(device, "island", 0) for device in compiled.local_devices()}
    if len(islands) < 2:
        return
    costs: dict[str, float] = {}
    with contextlib.suppress(Exception):  # where XLA counts none, there are none to warn of
        costs = dict(compiled.cost_analysis())
    for name, size in costs.items():
        if " at " in name:
            text = "over %d islands, %s (%s bytes of an island in a run)"
            LOG.warning(text, len(islands), name, f"{int(size):,}")


_replaced: list[tuple[Any, str, Any]] = []
"""Attributes that :func:`_refuse` replaced: object, name and original value."""


def _refuse(refuse: Callable[..., Any], *more: tuple[Any, tuple[str, ...]]) -> None:
    """Replaces the functions by which JAX sends work to a client, and ``more``, by ``refuse``."""
    import jax
    from jax._src import array
    from jax._src.interpreters import pxla
    from jaxlib import xla_client

    batched = ("batched_device_put", "batched_copy_array_to_devices_with_sharding")
    places: list[tuple[Any, tuple[str, ...]]] = [
        (pxla, ("shard_args", "batched_device_put")),
        (pxla.ExecuteReplicated, ("__call__",)),
        (xla_client, batched),
        (array.ArrayImpl, ("copy_to_host_async",)),
        *more,
    ]
    for place, names in places:
        for name in names:
            if hasattr(place, name):
                _replaced.append((place, name, getattr(place, name)))
                setattr(place, name, refuse)
    # Compiled functions run without Python (pjit's fast path) until a config value they depend on
    # changes.
    config: Any = jax.config
    config.update("jax_xla_profile_version", config.jax_xla_profile_version + 1)


def _accept_again() -> None:
    """Undoes :func:`_refuse`: there is a new connection."""
    while _replaced:
        setattr(*_replaced.pop())


def _watch_connection(target: str) -> None:
    """Makes calls raise that would send after the connection has ended.

    The stock client notices the end where it waits for a response. One-way requests, such as
    launches and puts, it still accepts, and queues: a loop that reads nothing would run forever.
    """
    connections = _sockets_to(target)
    from jax.errors import JaxRuntimeError

    def refuse(*_: Any, **__: Any) -> Any:
        raise JaxRuntimeError(
            f"UNAVAILABLE: the connection to the Fairway controller at {target} has ended; what "
            "was on its devices is gone. Once islands are up again, start the program anew, or "
            "call jax.extend.backend.clear_backends() and make its arrays again"
        )

    def watch() -> None:
        for connection in connections:
            with connection:
                ends = select.poll()
                ends.register(connection, select.POLLRDHUP)  # errors are always reported
                ends.poll()
        _refuse(refuse)

    if connections:
        threading.Thread(target=watch, name="fairway-connection", daemon=True).start()


def _sockets_to(target: str) -> list[socket.socket]:
    """Returns this process's connections to the controller, as duplicated descriptors."""
    host, _, text = target.removeprefix("grpc://").rpartition(":")
    wanted = {info[4][:2] for info in socket.getaddrinfo(host.strip("[]"), int(text))}
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            connection = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue  # closed meanwhile
        with contextlib.suppress(OSError):
            address, port = connection.getpeername()[:2]
            if (address.removeprefix("::ffff:"), port) in wanted:
                found.append(connection)
                continue
        connection.close()
    return found


def _refuse_after_fork() -> None:
    """Makes JAX fail at once in a forked child, which has none of its threads.

    The connection is the parent's: a call that waits for a response would block forever.
    """
    from jax._src import array, compiler, xla_bridge
    from jaxlib import xla_client

    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError(
            "JAX cannot be used in a process that was forked from one that is connected to "
            f"Fairway (process {os.getpid()} has its parent's connection but none of its threads); "
            "start it with subprocess or multiprocessing.get_context('spawn'), or fork before JAX "
            "is first used"
        )

    _refuse(
        refuse,
        (xla_bridge, ("backends", "get_backend", "get_device_backend")),
        (compiler, ("compile_or_get_cached", "backend_compile_and_load")),
        (xla_client, ("batched_block_until_ready",)),
        (array.ArrayImpl, ("block_until_ready", "delete")),
    )
    array.ArrayImpl._value = property(refuse)  # type: ignore[method-assign]


def _check_reachable(target: str) -> None:
    """Fails if no server listens at ``target``; the stock client would retry forever."""
    address = target.removeprefix("grpc://")
    deadline = time.monotonic() + REACHABLE_WITHIN_S
    while True:
        try:
            host, _, port = address.rpartition(":")
            with socket.create_connection((host, int(port)), REACHABLE_WITHIN_S) as connection:
                refusal = _refusal_of(connection)
        except (OSError, ValueError) as error:
            if isinstance(error, ValueError) or time.monotonic() > deadline:
                raise RuntimeError(
                    f"no Fairway controller is reachable at {TARGET}={target} ({error}); "
                    "`fairway status` shows where islands are up, `fairway up` starts some"
                ) from error
            time.sleep(0.2)
        else:
            break
    if refusal:
        raise RuntimeError(f"the Fairway controller behind {TARGET}={target} {refusal}")


def _refusal_of(connection: socket.socket) -> str:
    """Returns why a connection to a controller on another machine is refused; empty if it is not.

    What carries the connection answers with a sentence if it cannot, where a server of HTTP/2
    answers with a frame. The stock client would try again for two minutes, and give no reason.
    """
    connection.settimeout(REACHABLE_WITHIN_S)
    with contextlib.suppress(OSError):
        connection.sendall(HTTP2_PREFACE)
        answer = connection.recv(1 << 10).decode(errors="replace")
        if answer.startswith(REFUSAL):
            return answer.removeprefix(REFUSAL).strip()
    return ""
