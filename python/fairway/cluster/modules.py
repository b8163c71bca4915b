"""Modules of input functions, sent to hosts on other machines as archives named by their content.

An archive has the Python files of a folder of ``input_path``, and nothing else. A machine keeps the
archives that it has received, unpacked, and asks only for those that it does not know.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
import tempfile
import time
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from fairway.errors import AgentError, ConfigError

__all__ = ["SIZE_MAX", "ArchiveCache", "ModuleArchive"]

SIZE_MAX = 16 << 20
"""Most bytes of an archive's files; modules are small, and data are no modules."""
FILES_MAX, ENTRIES_MAX = 20_000, 100_000
UNUSED_S_MAX = 30 * 24 * 3600.0
"""Time for which an archive is kept that no host asks for."""
NOT_OURS = ("__pycache__", "site-packages", "node_modules")
"""Folders without modules of the user's."""
ENVIRONMENT = "pyvenv.cfg"
"""A file of virtual environments, which are not the user's either."""


@dataclass(frozen=True)
class ModuleArchive:
    """The modules of one folder.

    Attributes:
        digest: SHA-256 of the data, in hexadecimal.
        data: a ZIP file; the same for the same modules.
    """

    digest: str
    data: bytes

    @classmethod
    def of(cls, folder: Path, modules: Sequence[str] | None) -> ModuleArchive:
        """Packs a folder.

        Args:
            folder: one of ``input_path``.
            modules: prefixes of names of modules to pack; None packs all.

        Raises:
            ConfigError: there is more than modules of input functions are.
            OSError: a file cannot be read.
        """
        names = sorted(file.relative_to(folder) for file in _files(folder))
        if modules is not None:
            names = [name for name in names if _is_of(name, modules)]
        packed, total = io.BytesIO(), 0
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
            for name in names:
                text = (folder / name).read_bytes()
                total += len(text)
                if total > SIZE_MAX or len(names) > FILES_MAX:
                    raise _too_much(folder)
                archive.writestr(zipfile.ZipInfo(name.as_posix()), text, zipfile.ZIP_DEFLATED)
        data = packed.getvalue()
        return cls(hashlib.sha256(data).hexdigest(), data)


class ArchiveCache:
    """The archives that a machine keeps.

    Args:
        folder: where; None for the user's cache.
    """

    def __init__(self, folder: Path | None = None) -> None:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        self._folder = Path(home) / "fairway" / "modules" if folder is None else folder

    def find(self, digest: str) -> Path | None:
        """Returns the folder of an archive; None if it is not kept."""
        path = self._folder / digest
        if not path.is_dir():
            return None
        with contextlib.suppress(OSError):  # it is only not known that it is in use
            os.utime(path)
        return path

    def add(self, digest: str, data: bytes) -> Path:
        """Unpacks an archive; returns its folder. Removes those that were not used for long.

        Raises:
            AgentError: it is another archive, or has more than modules.
            OSError: it cannot be written.
        """
        if hashlib.sha256(data).hexdigest() != digest:
            raise AgentError("an archive of modules is another one than was asked for")
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._prune()
        partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=self._folder))
        try:
            _unpack(data, partial)
            try:
                partial.rename(self._folder / digest)
            except OSError:
                if self.find(digest) is None:  # otherwise another agent of this user was faster
                    raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return self._folder / digest

    def _prune(self) -> None:
        oldest_s = time.time() - UNUSED_S_MAX
        for path in self._folder.iterdir():
            with contextlib.suppress(OSError):  # another agent of this user was faster
                if path.stat().st_mtime < oldest_s:
                    shutil.rmtree(path)


def _too_much(folder: Path) -> ConfigError:
    return ConfigError(
        f"{folder} has more than hosts on other machines are sent: {SIZE_MAX >> 20} MiB of "
        f"modules, {FILES_MAX:,} of them, or {ENTRIES_MAX:,} files in all; put modules with input "
        "functions into a folder of their own"
    )


def _unpack(data: bytes, folder: Path) -> None:
    """Writes the files of an archive below a folder."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = archive.infolist()
            if sum(entry.file_size for entry in entries) > SIZE_MAX or len(entries) > FILES_MAX:
                raise AgentError("an archive of modules is too large")
            for entry in entries:
                name = PurePosixPath(entry.filename)
                if name.is_absolute() or ".." in name.parts or name.suffix != ".py":
                    raise AgentError(f"an archive of modules has {entry.filename!r}")
                path = folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(archive.read(entry))
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError) as error:
        raise AgentError(f"an archive of modules is damaged: {error}") from None


def _files(folder: Path) -> Iterator[Path]:
    """Yields the Python files of a folder, but for hidden ones and those of environments.

    Raises:
        ConfigError: it has more files than one looks through before each start.
    """
    seen = 0
    for place, folders, files in os.walk(folder):
        seen += len(files) + len(folders)
        if seen > ENTRIES_MAX:
            raise _too_much(folder)
        if ENVIRONMENT in files:
            folders.clear()
            continue
        folders[:] = [one for one in folders if not one.startswith(".") and one not in NOT_OURS]
        for name in files:
            file = Path(place, name)
            if name.endswith(".py") and not name.startswith(".") and file.is_file():
                yield file


def _is_of(file: Path, modules: Sequence[str]) -> bool:
    """Whether a file is of one of these modules, below one, or makes a package around one."""
    parts = file.with_suffix("").parts
    if parts[-1] == "__init__":
        parts = parts[:-1]
    name = ".".join(parts)
    return any(
        name == one or name.startswith(f"{one}.") or one.startswith(f"{name}.") for one in modules
    )
