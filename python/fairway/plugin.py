"""Makes the platform ``proxy`` known to JAX.

JAX imports this module through the ``jax_plugins`` entry point. A program then needs nothing but
``JAX_PLATFORMS=proxy`` and ``JAX_BACKEND_TARGET=grpc://host:port`` in its environment. Where
clients share islands, ``FAIRWAY_WEIGHT`` (1 if unset) is a client's part of the device time among
those of its priority, and ``FAIRWAY_PRIORITY`` (0) says who goes before whom.
"""

import contextlib
import ctypes
import os
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

__all__ = ["initialize"]

TARGET = "JAX_BACKEND_TARGET"
REACHABLE_WITHIN_S = 5.0
PR_SET_TIMERSLACK = 29
"""Number in <linux/prctl.h>."""
TIMER_SLACK_NS = 5_000_000
"""How late timers of the client's threads may be."""


def initialize() -> None:
    """Registers the backend; connects to nothing until JAX first needs a device."""
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if "proxy" not in platforms.split(","):
        return
    # The stock client's only other choice is ALTS; the server listens on this machine alone.
    os.environ.setdefault("IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS", "true")
    # The client logs a stack trace whenever a program exits; that is no news.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

    import jax
    from jax._src import xla_bridge

    # Executables cannot be serialized by the client, so they cannot be cached either.
    config: Any = jax.config
    if config.jax_compilation_cache_dir is not None:
        config.update("jax_enable_compilation_cache", False)
    xla_bridge.register_backend_factory("proxy", _connect, priority=1000)


def _connect() -> object:
    from jax.extend.backend import ifrt_proxy

    target = os.environ.get(TARGET, "")
    if not target.startswith("grpc://"):
        raise RuntimeError(
            f"JAX_PLATFORMS names 'proxy' but {TARGET} is {target!r}; expected "
            "grpc://HOST:PORT; try `fairway up`, which prints it, or "
            "`fairway run SCRIPT`, which sets it"
        )
    _check_reachable(target)
    options: Any = ifrt_proxy.ClientConnectionOptions()
    options.initialization_data = {
        f"fairway_{name.lower()}": _number(f"FAIRWAY_{name}")
        for name in ("WEIGHT", "PRIORITY")
        if os.environ.get(f"FAIRWAY_{name}")
    }
    with _late_timers():
        client: Any = ifrt_proxy.get_client(target, options)
    _answer_to(client.platform, client)
    return client


@contextlib.contextmanager
def _late_timers() -> Iterator[None]:
    """Lets timers be late in threads that start meanwhile, so that they wake up less often.

    The stock client has a thread that looks every 50 us whether names of arrays are to be given
    back, and sleeps between; while nothing else is asked for, too. That is a fifth of a core for
    every client. Whatever is asked for takes such names with it, so that nobody waits for this.
    """
    if sys.platform != "linux":
        yield
        return
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_TIMERSLACK, TIMER_SLACK_NS)
    try:
        yield
    finally:
        prctl(PR_SET_TIMERSLACK, 0)  # what the thread began with


def _number(variable: str) -> int:
    try:
        return int(os.environ[variable])
    except ValueError as error:
        raise RuntimeError(
            f"{variable} is {os.environ[variable]!r}; expected a whole number"
        ) from error


def _answer_to(platform: str, client: object) -> None:
    """Lets ``jax.devices("cpu")`` and the like find the islands' devices.

    A program that wants its own process's devices beside them names them in ``JAX_PLATFORMS``.
    JAX looks for GPUs by what they are programmed with, whatever a client calls them.
    """
    from jax._src import xla_bridge

    platform = {"gpu": "cuda"}.get(platform, platform)
    wanted = os.environ.get("JAX_PLATFORMS", "").split(",")
    if platform not in wanted:
        xla_bridge._backends.setdefault(platform, client)


def _check_reachable(target: str) -> None:
    """Fails if nobody listens at ``target``; the stock client would try for ever."""
    address = target.removeprefix("grpc://")
    deadline = time.monotonic() + REACHABLE_WITHIN_S
    while True:
        try:
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), REACHABLE_WITHIN_S).close()
        except (OSError, ValueError) as error:
            if isinstance(error, ValueError) or time.monotonic() > deadline:
                raise RuntimeError(
                    f"no Fairway controller is reachable at {TARGET}={target} ({error}); "
                    "`fairway status` shows where islands are up, `fairway up` starts some"
                ) from error
            time.sleep(0.2)
        else:
            return
