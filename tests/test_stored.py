"""Compiled programs on disk: later runs load them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from conftest import Start, client, said

from fairway.host.stored import StoredPrograms


def test_what_was_stored_is_found_by_the_same_key_and_compiler(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "programs"
    store = StoredPrograms(folder, 1 << 20, "jaxlib 1")
    assert not store.problem
    assert store.get("a") is None
    store.put("a", b"program")
    assert store.get("a") == b"program"
    assert store.get("b") is None
    assert StoredPrograms(folder, 1 << 20, "jaxlib 1").get("a") == b"program"
    assert StoredPrograms(folder, 1 << 20, "jaxlib 2").get("a") is None
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("damage", [b"", b"x" * 10, b"x" * 100])
def test_damaged_files_are_not_loaded(tmp_path: Path, damage: bytes) -> None:
    store = StoredPrograms(tmp_path / "programs", 1 << 20, "")
    store.put("a", b"program")
    [path] = (tmp_path / "programs").iterdir()
    path.write_bytes(path.read_bytes()[:-1] + damage)
    assert store.get("a") is None
    store.put("a", b"program")
    assert store.get("a") == b"program"


def test_the_least_recently_used_are_removed(tmp_path: Path) -> None:
    store = StoredPrograms(tmp_path / "programs", 1000, "")
    known: set[Path] = set()
    for number in range(4):
        store.put(str(number), bytes(200))
        [path] = set((tmp_path / "programs").iterdir()) - known
        known.add(path)
        os.utime(path, (number, number))
    assert store.get("0") is not None
    store.put("4", bytes(200))
    assert [number for number in range(5) if store.get(str(number)) is None] == [1, 2]
    store.put("large", bytes(2000))
    assert store.get("large") is None
    assert store.get("4") is not None
    assert sum(path.stat().st_size for path in (tmp_path / "programs").iterdir()) <= 1000


def test_folders_that_others_may_write_are_not_used(tmp_path: Path) -> None:
    folder = tmp_path / "programs"
    StoredPrograms(folder, 1 << 20, "").put("a", b"program")
    folder.chmod(0o770)
    store = StoredPrograms(folder, 1 << 20, "")
    assert "other users may write" in store.problem
    assert store.get("a") is None
    file = tmp_path / "file"
    file.touch()
    assert StoredPrograms(file / "programs", 1 << 20, "").problem
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    assert "no folder" in StoredPrograms(link, 1 << 20, "").problem
    if os.getuid() == 0:
        folder.chmod(0o700)
        os.chown(folder, 1, 1)
        assert "another user" in StoredPrograms(folder, 1 << 20, "").problem


def test_nothing_is_stored_where_it_is_off(tmp_path: Path) -> None:
    store = StoredPrograms(tmp_path / "programs", 0, "")
    store.put("a", b"program")
    assert store.get("a") is None
    assert not (tmp_path / "programs").exists()


@pytest.mark.local("a timeline is of hosts of this machine")
@pytest.mark.parametrize("islands", ["1x1x2", "1x2x1", "2x1x2"])
def test_a_run_loads_what_another_has_compiled(start: Start, tmp_path: Path, islands: str) -> None:
    code = """
    mesh = Mesh(np.array(jax.devices()), ("x",))
    x = jax.device_put(np.arange(64.0, dtype="f").reshape(8, 8), NamedSharding(mesh, P("x")))
    @jax.jit
    def deep(x):
        for n in range(40):
            x = jnp.sort(jnp.tanh(x @ x.T + n), axis=-1)
        return x.sum()
    say("sum", of=float(deep(x)))
    """
    sums, done = [], []
    for number in range(2):
        path = tmp_path / f"timeline-{number}.json"
        run = start(islands, timeline=path)
        sums.append(said(client(run, code).stdout, "sum"))
        run.close()
        events = json.loads(path.read_text())["traceEvents"]
        done.append(
            {
                event["name"].split(" ")[0]
                for event in events
                if event.get("cat") == "compile" and "deep" in event["name"]
            }
        )
    assert sums[0] == sums[1]
    assert "compiles" in done[0]
    assert "loads" in done[1]
    assert "compiles" not in done[1] or islands.startswith("2"), "parts may be small"
