"""Rendezvous of the ranks of a process group, and the addresses at which they listen."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import fcntl
import functools
import json
import os
import secrets
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fairway.communication import files
from fairway.communication.steps import NETWORK, ChannelCost, memory_cost
from fairway.communication.team import Channel, Listener
from fairway.errors import ConfigError, FairwayError, TeamError
from fairway.settings import ChannelSettings
from fairway.torch.errors import BackendError

__all__ = ["Folder", "Meeting", "meet"]

PREFIX = "fairway-torch-"
LOCK = "lock"
NEW_S = 60.0
"""Younger folders are never removed, as their process may not have locked them yet."""
SWEPT_MAX = 4096
"""Folders that a process inspects at most when it sweeps."""


class Folder:
    """A temporary folder for sockets; its process holds a lock on it until it ends."""

    def __init__(self) -> None:
        sweep(tempfile.gettempdir())
        self.path = tempfile.mkdtemp(prefix=PREFIX)
        self._process = os.getpid()
        self._lock = os.open(Path(self.path, LOCK), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Removes the folder and its lock; a forked child leaves them to its parent."""
        if os.getpid() != self._process:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.close(self._lock)


@functools.cache
def sweep(parent: str) -> None:
    """Removes folders of this user's processes that have ended without removing them."""
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        found = [entry for entry, _ in zip(entries, range(SWEPT_MAX), strict=False)]
        for entry in found:
            with contextlib.suppress(OSError):
                if entry.name.startswith("fairway-") and _is_left(entry):
                    shutil.rmtree(entry.path, ignore_errors=True)


def _is_left(entry: os.DirEntry[str]) -> bool:
    """Returns whether this is a folder of a process that has ended."""
    known = entry.stat(follow_symlinks=False)
    is_own = stat.S_ISDIR(known.st_mode) and known.st_uid == os.geteuid()
    if not is_own or time.time() - known.st_mtime < NEW_S:
        return False
    if entry.name.startswith(PREFIX):
        return _is_unlocked(Path(entry.path, LOCK))
    # From versions without locks: such a folder has only sockets on which no process listens.
    inside = list(Path(entry.path).iterdir())
    names = {path.name for path in inside}
    return bool(inside) and names <= {"channel", "channel.own"} and all(map(_is_refused, inside))


def _is_unlocked(path: Path) -> bool:
    try:
        lock = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True


def _is_refused(path: Path) -> bool:
    if not stat.S_ISSOCK(path.lstat().st_mode):
        return False
    with socket.socket(socket.AF_UNIX) as trial:
        try:
            trial.connect(str(path))
        except ConnectionRefusedError:
            return True
    return False


@dataclasses.dataclass(frozen=True)
class Meeting:
    """The result of a rendezvous.

    Attributes:
        listener: this rank's listener, at which others connect.
        addresses: addresses of all ranks.
        costs: cost of each channel.
        folder: folder of this rank's sockets, if they are files.
    """

    listener: Listener
    addresses: list[list[str]]
    costs: list[ChannelCost]
    folder: Folder | None

    def close(self) -> None:
        """Stops listening."""
        self.listener.close()
        if self.folder is not None:
            self.folder.remove()


def meet(store: Any, rank: int, members: Sequence[int], timeout_s: float) -> Meeting:
    """Listens, and exchanges addresses with the other ranks (rendezvous).

    Args:
        store: key-value store shared by the ranks.
        rank: index of this rank among the members.
        members: global ranks.
        timeout_s: deadline for the other ranks.

    Raises:
        BackendError: this rank or another one has invalid channels, or does not arrive in time.
    """
    # A store may outlive a group: a group that begins again, or restarts, must not read old keys.
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    count = store.add(f"fairway/{restart}/rank{rank}/count", 1)
    keys = f"fairway/{restart}/{count}"
    folder: Folder | None = None
    listener: Listener | None = None
    try:
        channels, folder = _own_channels()
        if rank == 0:
            costs = [dataclasses.asdict(cost) for cost in _costs(channels, len(members))]
            team = {"costs": costs, "token": secrets.token_hex(16)}
            store.set(f"{keys}/team", json.dumps(team))
        agreed = _get(store, f"{keys}/team", members[0], timeout_s)
        listener = _listen(rank, channels, agreed["token"])
        own = {"addresses": listener.addresses, "host": _host() if folder else None}
        store.set(f"{keys}/rank{rank}", json.dumps(own))
        known = [
            _get(store, f"{keys}/rank{number}", member, timeout_s)
            for number, member in enumerate(members)
        ]
        _check(known, members, len(agreed["costs"]))
    except BaseException as error:
        # The other ranks learn at once that this rank fails.
        with contextlib.suppress(Exception):
            kind = "" if isinstance(error, FairwayError) else f"{type(error).__name__}: "
            failure = json.dumps({"error": f"{kind}{error}"})
            store.set(f"{keys}/rank{rank}", failure)
            if rank == 0:
                store.set(f"{keys}/team", failure)
        if listener is not None:
            listener.close()
        if folder is not None:
            folder.remove()
        if isinstance(error, (FairwayError, ValueError, OSError)):
            raise _refused(error, members[rank]) from None
        raise
    agreed_costs = [ChannelCost(**cost) for cost in agreed["costs"]]
    return Meeting(listener, [one["addresses"] for one in known], agreed_costs, folder)


def _refused(error: Exception, rank: int) -> BackendError:
    """Returns the error of a rank that cannot join."""
    if isinstance(error, BackendError):
        return error
    kind = error.kind if isinstance(error, TeamError) else "Join"
    return BackendError(kind, f"rank {rank} cannot join its process group: {error}", rank)


@functools.cache
def _taken() -> set[str]:
    """Returns the set of addresses at which this process has listened."""
    return set()


def _listen(rank: int, channels: Sequence[Channel], token: str) -> Listener:
    """Listens at the given addresses, or at free ones if this process uses those already."""
    given = {channel.address for channel in channels}
    try:
        listener = Listener(rank, channels, token)
    except TeamError:
        if not given & _taken():
            raise
        listener = Listener(rank, [_elsewhere(channel) for channel in channels], token)
    _taken().update(given)
    return listener


def _elsewhere(channel: Channel) -> Channel:
    """Returns the same channel at a free address, if this process has listened at its own."""
    scheme, _, place = channel.address.partition(":")
    if channel.address not in _taken():
        return channel
    if scheme == "unix":
        free = f"unix:{place}.{secrets.token_hex(4)}"
    else:
        free = f"{scheme}:{place.rpartition(':')[0]}:0"
    return dataclasses.replace(channel, address=free)


def _get(store: Any, key: str, rank: int, timeout_s: float) -> Any:
    try:
        store.wait([key], datetime.timedelta(seconds=timeout_s))
        found = json.loads(store.get(key))
    except RuntimeError as error:
        text = f"rank {rank} has not come to its process group within {timeout_s:.1f} s: {error}"
        raise BackendError("Join", text, rank) from None
    if "error" in found:
        raise BackendError("Join", f"rank {rank} cannot join: {found['error']}", rank)
    return found


def _check(known: Sequence[dict[str, Any]], members: Sequence[int], channels: int) -> None:
    counts = [len(one["addresses"]) for one in known]
    if set(counts) != {channels}:
        raise ConfigError(
            f"ranks have {counts} channels; expected {channels} of each, as rank {members[0]} has"
        )
    hosts: dict[str, list[int]] = {}
    for member, one in zip(members, known, strict=True):
        if one["host"] is not None:
            hosts.setdefault(one["host"]["id"], []).append(member)
    if len(hosts) > 1 or (hosts and any(one["host"] is None for one in known)):
        names = {one["host"]["id"]: one["host"]["name"] for one in known if one["host"]}
        where = "; ".join(f"{names[host]}: {ranks}" for host, ranks in hosts.items())
        raise ConfigError(
            f"ranks are on several machines ({where}), and FAIRWAY_CHANNELS is not set on all of "
            "them; expected each rank's addresses, such as tcp:10.1.0.3:0@10Gbit/s"
        )


def _host() -> dict[str, str]:
    """Identifies this machine and the file system that its processes see, to compare ranks."""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        machine = socket.gethostname()
    seen = os.stat(tempfile.gettempdir())
    return {"id": f"{machine}/{seen.st_dev}/{seen.st_ino}", "name": socket.gethostname()}


def _own_channels() -> tuple[list[Channel], Folder | None]:
    """Returns this rank's channels, and the folder that was created for them, if any."""
    given = os.environ.get("FAIRWAY_CHANNELS")
    if not given:
        folder = Folder()
        return [Channel(f"unix:{folder.path}/channel")], folder
    channels = []
    for one in given.split(","):
        address, _, rate = one.strip().partition("@")
        if not address.partition(":")[2]:
            raise ConfigError(
                f"FAIRWAY_CHANNELS has {one.strip()!r}; expected tcp:ADDRESS:PORT or unix:PATH, "
                "such as tcp:10.1.0.3:0@10Gbit/s"
            )
        rate_bps = ChannelSettings("", rate).rate_bps if rate else None
        channels.append(Channel(address, rate_bps))
    return channels, None


def _costs(channels: Sequence[Channel], ranks: int) -> list[ChannelCost]:
    path = os.environ.get("FAIRWAY_COSTS")
    if path:
        costs = files.read_costs(path)
        if len(costs) != len(channels):
            raise ConfigError(f"{path} is of {len(costs)} channels; there are {len(channels)}")
        return costs

    def cost(channel: Channel) -> ChannelCost:
        usual = memory_cost(ranks) if channel.address.startswith("unix:") else NETWORK
        rate = channel.rate_bps
        return dataclasses.replace(usual, rate_bps=rate) if rate else usual

    return [cost(channel) for channel in channels]
