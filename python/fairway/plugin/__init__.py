"""Registers the platform ``proxy`` with JAX.

JAX imports this package through the ``jax_plugins`` entry point, or where Fairway is not installed
through the folder ``bare`` beside it. A program then needs only ``JAX_PLATFORMS=proxy`` and
``JAX_BACKEND_TARGET=grpc://host:port`` in its environment, or the same in ``jax.config``. Where
clients share islands, ``FAIRWAY_WEIGHT`` (default 1) is a client's share of the device time within
its priority, and ``FAIRWAY_PRIORITY`` (default 0) its scheduling priority; higher is first.

The package needs nothing but jax, and so imports nothing of Fairway's but its own modules.
"""

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import connection

__all__ = ["BARE", "check_jaxlib", "initialize"]

BARE = Path(__file__).parents[1] / "bare"
"""Where JAX finds this plugin if it is in ``PYTHONPATH`` of a Python without Fairway."""
REFUSED_JAXLIBS = {"0.11.1": "its loops (jax.lax.fori_loop) never end on CPU devices"}
"""Versions that neither clients nor hosts may use, and why."""
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

    given = os.environ.get(connection.TARGET, "")
    configured = str(xla_bridge.BACKEND_TARGET.value or "")
    return given if configured in ("", given.lower()) else configured


def _connect() -> object:
    import jax
    from jax.extend.backend import ifrt_proxy
    from jaxlib import utils
    from jaxlib.version import __version__ as jaxlib_version

    # They import numpy, whose threads must not exist before the command line has blocked signals.
    from . import callbacks, local, mends, modules, readbacks, reshards

    if "proxy" not in _platforms():
        raise RuntimeError("JAX_PLATFORMS does not name 'proxy'")
    check_jaxlib(jaxlib_version)
    target = _target()
    if not target.startswith("grpc://"):
        raise RuntimeError(
            f"JAX_PLATFORMS names 'proxy' but {connection.TARGET} is {target!r}; expected "
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
    connection.check_reachable(target)
    calls = callbacks.CallbackFunctions(target)
    options: Any = ifrt_proxy.ClientConnectionOptions()
    shares = {
        f"fairway_{name.lower()}": _number(f"FAIRWAY_{name}")
        for name in ("WEIGHT", "PRIORITY")
        if os.environ.get(f"FAIRWAY_{name}")
    }
    options.initialization_data = {**shares, "fairway_callbacks": calls.key.hex().encode()}
    connection.accept_again()
    with _late_timers():
        client: Any = ifrt_proxy.get_client(target, options)
    if refusal := getattr(client._get_all_devices()[0], "fairway_refusal", None):
        raise RuntimeError(f"the controller refuses this client: {refusal}")
    connection.watch(target)
    mends.answer_to(client.platform, client, _platforms())
    mends.take_any_strides()
    mends.mend_compilation(client, calls)
    mends.span_islands()
    modules.send_modules()
    local.answer_for_devices(client)
    local.exchange_copies(client)
    reshards.reshard_on_hosts(client)
    readbacks.read_small_arrays(readbacks.Readbacks(client, target, calls.key))
    local.refuse_reads_in_callbacks(client)
    os.register_at_fork(after_in_child=connection.refuse_after_fork)
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
