"""Archives of modules for hosts on other machines."""

from __future__ import annotations

import hashlib
import io
import os
import zipfile
from pathlib import Path

import pytest

from fairway.cluster import modules
from fairway.cluster.modules import ArchiveCache, ModuleArchive
from fairway.errors import AgentError, ConfigError

pytestmark = pytest.mark.fast


def folder(tmp_path: Path) -> Path:
    for name in ("corpus/__init__.py", "corpus/text.py", "other.py", "corpus/data.json", ".own.py"):
        path = tmp_path / "code" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"NAME = {name!r}\n")
    for name in ("venv/pyvenv.cfg", "venv/lib/x.py", ".git/hook.py", "corpus/__pycache__/a.py"):
        path = tmp_path / "code" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return tmp_path / "code"


def names(archive: ModuleArchive) -> list[str]:
    return zipfile.ZipFile(io.BytesIO(archive.data)).namelist()


def test_an_archive_has_the_modules_that_are_allowed(tmp_path: Path) -> None:
    code = folder(tmp_path)
    every = ModuleArchive.of(code, None)
    assert names(every) == ["corpus/__init__.py", "corpus/text.py", "other.py"]
    assert names(ModuleArchive.of(code, ["corpus"])) == ["corpus/__init__.py", "corpus/text.py"]
    assert names(ModuleArchive.of(code, ["corpus.text"])) == [
        "corpus/__init__.py",
        "corpus/text.py",
    ]
    assert names(ModuleArchive.of(code, ["corp"])) == []
    (code / "other.py").touch()
    assert ModuleArchive.of(code, None) == every, "its name depends on its content alone"
    (code / "other.py").write_text("NAME = 1\n")
    assert ModuleArchive.of(code, None).digest != every.digest


def test_what_was_unpacked_is_kept(tmp_path: Path) -> None:
    archive, cache = ModuleArchive.of(folder(tmp_path), None), ArchiveCache(tmp_path / "cache")
    assert cache.find(archive.digest) is None
    kept = cache.add(archive.digest, archive.data)
    assert cache.find(archive.digest) == kept == cache.add(archive.digest, archive.data)
    assert (kept / "corpus" / "text.py").read_text() == "NAME = 'corpus/text.py'\n"
    assert [one.name for one in kept.parent.iterdir()] == [archive.digest]
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700


def test_what_no_host_asked_for_is_removed(tmp_path: Path) -> None:
    code, cache = folder(tmp_path), ArchiveCache(tmp_path / "cache")
    archives = []
    for number in range(3):
        (code / "other.py").write_text(f"NAME = {number}\n")
        archives.append(ModuleArchive.of(code, None))
        os.utime(cache.add(archives[-1].digest, archives[-1].data), (0, 0) if number < 2 else None)
        if number == 0:
            assert cache.find(archives[0].digest), "it is in use again"
    (code / "other.py").write_text("NAME = 3\n")
    newest = ModuleArchive.of(code, None)
    cache.add(newest.digest, newest.data)
    kept = [cache.find(one.digest) is not None for one in (*archives, newest)]
    assert kept == [True, False, True, True]


@pytest.mark.parametrize("name", ["../out.py", "/etc/out.py", "a/../../out.py", "data.so", "x"])
def test_files_elsewhere_and_other_files_are_refused(tmp_path: Path, name: str) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr(name, "x = 1")
    data, cache = packed.getvalue(), ArchiveCache(tmp_path / "cache")
    digest = hashlib.sha256(data).hexdigest()
    with pytest.raises(AgentError, match="an archive of modules has"):
        cache.add(digest, data)
    assert list((tmp_path / "cache").iterdir()) == []
    assert not (tmp_path / "out.py").exists()


def test_other_and_damaged_archives_are_refused(tmp_path: Path) -> None:
    archive, cache = ModuleArchive.of(folder(tmp_path), None), ArchiveCache(tmp_path / "cache")
    with pytest.raises(AgentError, match="another one"):
        cache.add(archive.digest, archive.data + b"x")
    damaged = archive.data[:40] + bytes(60) + archive.data[100:]
    with pytest.raises(AgentError, match=r"an archive of modules (is damaged|has)"):
        cache.add(hashlib.sha256(damaged).hexdigest(), damaged)


def test_folders_of_more_than_modules_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = folder(tmp_path)
    for limit, value in (("SIZE_MAX", 40), ("FILES_MAX", 2), ("ENTRIES_MAX", 5)):
        with monkeypatch.context() as patch:
            patch.setattr(modules, limit, value)
            with pytest.raises(ConfigError, match="a folder of their own"):
                ModuleArchive.of(code, None)
