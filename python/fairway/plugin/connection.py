"""The connection to a controller: whether it can be made, and what happens when it has ended."""

import contextlib
import os
import select
import socket
import stat
import threading
import time
from collections.abc import Callable
from typing import Any

TARGET = "JAX_BACKEND_TARGET"
REACHABLE_WITHIN_S = 5.0
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""What a client of HTTP/2 begins with (RFC 9113, section 3.4), with an empty frame of settings."""
REFUSAL = "fairway: "

_replaced: list[tuple[Any, str, Any]] = []
"""Attributes that :func:`_refuse` replaced: object, name and original value."""


def address_of(target: str) -> tuple[str, int]:
    """Returns host and port of ``grpc://HOST:PORT``.

    Raises:
        ValueError: the port is no number.
    """
    host, _, port = target.removeprefix("grpc://").rpartition(":")
    return host.strip("[]"), int(port)


def open_stream(target: str, greeting: bytes) -> socket.socket | None:
    """Opens a connection beside the client's session; None if the controller does not take it.

    Args:
        target: the controller, as ``grpc://HOST:PORT``.
        greeting: what it begins with: its purpose, and the key that the session has named.

    Raises:
        OSError: the controller cannot be reached.
    """
    stream = socket.create_connection(address_of(target), REACHABLE_WITHIN_S)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream.sendall(greeting)
    if stream.recv(1) != b"\1":
        stream.close()
        return None
    stream.settimeout(None)
    return stream


def check_reachable(target: str) -> None:
    """Fails if no server listens at ``target``; the stock client would retry forever."""
    deadline = time.monotonic() + REACHABLE_WITHIN_S
    while True:
        try:
            with socket.create_connection(address_of(target), REACHABLE_WITHIN_S) as connection:
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


def accept_again() -> None:
    """Undoes :func:`_refuse`: there is a new connection."""
    while _replaced:
        setattr(*_replaced.pop())


def watch(target: str) -> None:
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
    wanted = {info[4][:2] for info in socket.getaddrinfo(*address_of(target))}
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


def refuse_after_fork() -> None:
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
