"""Executables on disk, which later runs of like hosts load instead of compiling again.

A file is named by what it was compiled from: the program, its options and devices, and what
compiled it. Loading an executable may run any code, so the folder must be its owner's alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from pathlib import Path

__all__ = ["StoredPrograms", "default_folder"]

DIGEST_BYTES = 32
KEPT = 0.9
"""Part of the limit that is kept when files are removed."""
PARTIAL = ".partial"


def default_folder() -> Path:
    """Returns the folder of this user on this machine (XDG base directories)."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "fairway" / "programs"


class StoredPrograms:
    """Executables in a folder, the least recently used of which are removed.

    Attributes:
        problem: why nothing is stored; empty if it is.

    Args:
        folder: where they are, made if it is missing.
        limit: bytes of all files; 0 stores nothing.
        made_by: what compiles, such as versions and kinds of processors.
    """

    def __init__(self, folder: Path, limit: int, made_by: str) -> None:
        self._folder = folder
        self._limit = limit
        self._made_by = hashlib.sha256(made_by.encode()).digest()
        self.problem = "" if limit else "it is turned off"
        if limit:
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                self.problem = _why_unsafe(folder)
            except OSError as error:
                self.problem = str(error)

    def _path(self, key: str) -> Path:
        return self._folder / hashlib.sha256(self._made_by + key.encode()).hexdigest()

    def get(self, key: str) -> bytes | None:
        """Returns a serialized executable; None if there is none, or it is damaged."""
        if self.problem:
            return None
        path = self._path(key)
        with contextlib.suppress(OSError):
            content = path.read_bytes()
            digest, serialized = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
            if hashlib.sha256(serialized).digest() == digest:
                os.utime(path)
                return serialized
            path.unlink()
        return None

    def put(self, key: str, serialized: bytes) -> None:
        """Stores a serialized executable; a disk that is full, or the like, changes nothing."""
        if self.problem or len(serialized) > self._limit:
            return
        path = self._path(key)
        partial = path.with_name(f"{path.name}.{os.getpid()}{PARTIAL}")
        try:
            with partial.open("wb") as file:
                file.write(hashlib.sha256(serialized).digest())
                file.write(serialized)
            partial.replace(path)
            self._remove_oldest()
        except OSError:
            partial.unlink(missing_ok=True)

    def _remove_oldest(self) -> None:
        found: list[tuple[float, int, Path]] = []
        for path in self._folder.iterdir():
            with contextlib.suppress(OSError):  # another host has removed it
                known = path.stat()
                found.append((known.st_mtime, known.st_size, path))
        total = sum(size for _, size, _ in found)
        if total <= self._limit:
            return
        for _, size, path in sorted(found):
            path.unlink(missing_ok=True)
            total -= size
            if total <= KEPT * self._limit:
                return


def _why_unsafe(folder: Path) -> str:
    """Returns why other users may have written a folder; empty if they may not have."""
    known = folder.lstat()
    if not stat.S_ISDIR(known.st_mode):
        return f"{folder} is no folder"
    if known.st_uid != os.getuid():
        return f"{folder} belongs to another user"
    if known.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"other users may write {folder}; take that away by `chmod 700`"
    return ""
