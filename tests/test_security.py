"""Isolation: another user of the same machine gets access to nothing of a run.

The attacker is a process that drops root for a user of its own, so these tests need root.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Up, client, connect_unix, hosts_of, is_alive
from test_hostile import listening_ports

from fairway.cluster.admin import ReadLogs, read_logs
from fairway.cluster.registry import runs_directory
from fairway.errors import FairwayError

STRANGER = 54321
"""A user that owns nothing."""

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")

ATTACK = """
import glob, json, os, select, socket, struct, sys, time

port, user, directory = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
pids = sys.argv[4].split(",")
ports, old_port = [int(p) for p in sys.argv[5].split(",")], int(sys.argv[6])
if user:
    os.setgroups([]); os.setgid(user); os.setuid(user)
SETTINGS = b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n" + bytes(3) + b"\\4" + bytes(5)
CALL = SETTINGS + b"\\0\\0\\1\\1\\4\\0\\0\\0\\1\\x82"
found = {}

def kind(name):
    def run(attempt):
        try:
            got = attempt()
        except OSError as error:
            got = ""
        found[name] = got if isinstance(got, str) else repr(got)
    return run

def answer(sock, wait=3.0):
    sock.settimeout(wait)
    try:
        got = sock.recv(1 << 16)
    except TimeoutError:
        return "kept open"
    except OSError:
        return ""
    return f"{len(got)} bytes" if got else ""

def tcp(to=None, source=None):
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if source:
        sock.bind(("127.0.0.1", source))
    sock.settimeout(3)
    sock.connect(("127.0.0.1", to or port))
    return sock

def send(data, **how):
    sock = tcp(**how)
    sock.sendall(data)
    return answer(sock)

kind("preface")(lambda: send(SETTINGS))
kind("call")(lambda: send(CALL))
kind("silence")(lambda: answer(tcp()))
kind("http1")(lambda: send(b"GET / HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n"))

@kind("half-closed")
def half():
    sock = tcp(); sock.sendall(CALL); sock.shutdown(socket.SHUT_WR)
    return answer(sock)

@kind("many at once")
def many():
    socks = [tcp() for _ in range(600)]
    for sock in socks:
        try:
            sock.sendall(SETTINGS)
        except OSError:
            pass
    return "".join(answer(sock, 0.5) for sock in socks)

@kind("in a child that inherits")
def inherited():
    sock = tcp(); sock.set_inheritable(True)
    child = os.fork()
    if child == 0:
        try:
            sock.sendall(CALL); got = answer(sock)
        except OSError:
            got = ""
        os._exit(1 if got else 0)
    return "" if os.waitpid(child, 0)[1] == 0 else "answered"

kind("the owner's old port")(lambda: send(CALL, source=old_port))
kind("a privileged port's place")(lambda: send(CALL, source=old_port + 1))
kind("sent and closed at once")(lambda: [tcp().sendall(CALL) for _ in range(50)] and "")

for other in ports:
    kind(f"port {other}")(lambda: send(CALL, to=other))

def unix(name):
    sock = socket.socket(socket.AF_UNIX); sock.settimeout(3)
    sock.connect(os.path.join(directory, name))
    sock.sendall(b'{"type": "overview"}\\n' if name == "admin.sock" else b"x" * 64)
    return answer(sock) or "connected"

for name in ("control.sock", "controller-data.sock", "data-0.sock", "admin.sock"):
    kind(name)(lambda: unix(name))
kind("list the folder")(lambda: os.listdir(directory))
kind("list its parent")(lambda: os.listdir(os.path.dirname(directory)))
kind("write into it")(lambda: open(os.path.join(directory, "x"), "w").close() or "written")
kind("abstract sockets")(
    lambda: [line for line in open("/proc/net/unix") if "@" in line and "fairway" in line] or "")

for what in ("environ", "mem", "fd", "maps"):
    def peek():
        for pid in pids:
            path = f"/proc/{pid}/{what}"
            if os.path.isdir(path):
                return os.listdir(path)
            if open(path, "rb").read(64):
                return "read"
        return ""
    kind(what)(peek)
lines = lambda: [open(f"/proc/{pid}/cmdline").read().split("\\0") for pid in pids]
kind("tokens")(lambda: [part for line in lines() for part in line if len(part) == 64] or "")
kind("signals")(lambda: [os.kill(int(pid), 0) for pid in pids])
kind("shared memory")(lambda: [p for p in glob.glob("/dev/shm/*") if os.access(p, os.R_OK)] or "")
print(json.dumps(found))
"""


def attack(up: Up, user: int) -> dict[str, str]:
    """Runs the attempts; returns the result of each that was not refused."""
    hosts = [host["process"] for host in hosts_of(up)]
    ports = listening_ports([up.pid, *hosts])
    assert up.port in ports
    with socket_of_owner(up) as owner:
        old_port = owner.getsockname()[1]
    arguments = [str(up.port), str(user), str(up.directory), ",".join(map(str, [up.pid, *hosts]))]
    arguments += [",".join(map(str, sorted(ports))), str(old_port)]
    result = subprocess.run(
        [sys.executable, "-c", ATTACK, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return dict(json.loads(result.stdout))


def socket_of_owner(up: Up) -> Any:
    """An address pair that belonged to a connection of the owner's shortly before."""
    import socket

    return socket.create_connection(("127.0.0.1", up.port), 5)


def test_another_user_gets_past_no_listener(own_runtime: Path) -> None:
    with Up("--islands", "2x1x1", runtime=own_runtime) as running:
        os.chmod(own_runtime, 0o755)  # protection must not come from the test's own folder
        os.chmod(own_runtime.parent, 0o755)
        got = attack(running, STRANGER)
        assert len(got) >= 20
        assert {kind: text for kind, text in got.items() if text} == {}
        assert f"user {STRANGER} of this machine is not admitted" in running.errors.read_text()
        # Positive control: the same attempts by the owner succeed.
        own = attack(running, 0)
        assert own["preface"].endswith("bytes")
        assert own["admin.sock"].endswith("bytes")
        assert own["environ"] == "read"
        assert own["write into it"] == "written"
        result = client(running, "say('sum', value=float(jax.numpy.arange(4.).sum()))")
        assert '"value": 6.0' in result.stdout
        assert all(is_alive(host["process"]) for host in hosts_of(running))


def test_users_that_are_named_may_connect(own_runtime: Path, tmp_path: Path) -> None:
    config = tmp_path / "fairway.toml"
    config.write_text(f'islands = "1x1x1"\nallow_users = ["{STRANGER}"]\n')
    with Up("--config", str(config), runtime=own_runtime) as running:
        os.chmod(own_runtime, 0o755)
        os.chmod(own_runtime.parent, 0o755)
        got = attack(running, STRANGER)
        assert got["preface"].endswith("bytes")
        assert got["admin.sock"] == ""
        assert got["control.sock"] == ""


def test_sockets_of_this_machine_answer_their_owner_alone(own_runtime: Path) -> None:
    """Even where the folder's mode would admit other users."""
    with Up("--islands", "1x1x1", runtime=own_runtime) as running:
        for place in (own_runtime.parent, own_runtime, running.directory.parent, running.directory):
            os.chmod(place, 0o755)
        for path in running.directory.glob("*.sock"):
            os.chmod(path, 0o777)
        got = attack(running, STRANGER)
        names = [name for name in got if name.endswith(".sock")]
        assert len(names) == 4
        assert {name: got[name] for name in names if got[name] not in ("", "connected")} == {}
        logged = [record.text for record in read_logs(running.directory, ReadLogs())]
        for line in (
            f"a connection for hosts was refused: user {STRANGER}",
            f"a data-plane connection from this machine was refused: user {STRANGER}",
            f"refused user {STRANGER} of this machine at the admin socket",
        ):
            assert any(line in text for text in logged), line
        with connect_unix(running.directory / "admin.sock") as owner:
            owner.sendall(b'{"type": "overview"}\n')
            assert owner.recv(10)


@pytest.mark.parametrize("kind", ["link", "file", "foreign"])
def test_a_runtime_folder_that_somebody_prepared_is_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    place = tmp_path / f"fairway-{os.getuid()}"
    if kind == "link":
        (tmp_path / "mine").mkdir()
        place.symlink_to(tmp_path / "mine")
    elif kind == "file":
        place.write_text("")
    else:
        place.mkdir()
        os.chown(place, STRANGER, STRANGER)
    with pytest.raises(FairwayError, match=re.escape(str(place))):
        runs_directory()


def test_a_runtime_folder_that_others_could_enter_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / f"fairway-{os.getuid()}").mkdir(mode=0o755)
    assert runs_directory().stat().st_mode & 0o777 == 0o700


def test_hosts_import_nothing_from_the_current_folder(
    own_runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proof = tmp_path / "proof"
    for name in ("msgspec", "sitecustomize", "fairway", "ml_dtypes"):
        (tmp_path / f"{name}.py").write_text(f"open({str(proof)!r}, 'a').write({name!r})\n")
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "own" / "script.py"
    script.parent.mkdir()
    script.write_text("import jax\nprint(jax.numpy.ones(3).sum())\n")
    command = Path(sys.executable).parent / "fairway"
    result = subprocess.run(
        [command, "run", "--islands", "1x1x1", script],
        env={**os.environ, "XDG_RUNTIME_DIR": str(own_runtime)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    planted = proof.read_text() if proof.exists() else ""
    assert result.returncode == 0, result.stderr
    assert not planted


def test_hosts_of_an_island_meet_where_nobody_else_is(own_runtime: Path) -> None:
    """XLA's collectives accept any connection, so other users must reach none of their ports."""
    with Up("--islands", "2x2x1", runtime=own_runtime) as running:
        result = client(
            running,
            """
            for half in (jax.devices()[:2], jax.devices()[2:]):
                sharding = NamedSharding(Mesh(np.array(half), ("x",)), P("x"))
                x = jax.device_put(np.arange(4.0), sharding)
                say("sum", value=float(jax.jit(lambda x: x.sum())(x)))
            """,
        )
        assert result.stdout.count('"value": 6.0') == 2, result.stderr
        hosts = [host["process"] for host in hosts_of(running)]
        networks = [os.readlink(f"/proc/{process}/ns/net") for process in hosts]
        assert networks[0] == networks[1] != networks[2] == networks[3]
        assert os.readlink("/proc/self/ns/net") not in networks
        assert "can reach collectives" not in running.errors.read_text()
        for process in hosts:
            assert ports_in_network_of(process), "collectives listen"
            assert not listening_ports([process]), "nothing that can be reached from here"


def ports_in_network_of(process: int) -> set[int]:
    """Ports on which any process listens in the network namespace of a process."""
    lines = Path(f"/proc/{process}/net/tcp").read_text().splitlines()[1:]
    rows = [line.split() for line in lines]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A"}


def test_ranks_import_nothing_from_the_current_folder(tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    (tmp_path / "fairway").mkdir()
    for name in ("fairway/__init__", "msgspec", "sitecustomize", "numpy"):
        (tmp_path / f"{name}.py").write_text(f"open({str(proof)!r}, 'a').write({name!r})\n")
    command = Path(sys.executable).parent / "fairway"
    result = subprocess.run(
        [command, "calibrate", "--islands", "2x1x1", "--out", tmp_path / "costs.json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    planted = proof.read_text() if proof.exists() else ""
    assert not planted
    assert result.returncode == 0, result.stderr
