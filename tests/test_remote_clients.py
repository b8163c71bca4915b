"""Clients on other machines: what reaches a cluster through its gateway, and what is refused."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import PREAMBLE, Up, client, client_environment, hosts_of, said, until

from fairway.cluster import admin
from fairway.cluster.remotes import RemoteCluster
from fairway.cluster.supervisor import Run
from fairway.errors import ConfigError, FairwayError, NotRunningError, SliceError, TokenError
from fairway.settings import Settings

SUM = 'say("sum", of=float(jax.device_put(np.arange(64.0), jax.devices()[-1]).sum()))'


class Gated(Up):
    """A cluster with a gateway on the loopback interface."""

    def __init__(self, runtime: Path, *arguments: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.gateway = f"127.0.0.1:{free.getsockname()[1]}"
        super().__init__(
            "--islands", "2x1x2", "--gateway", self.gateway, *arguments, runtime=runtime
        )

    def token(self, role: str, **given: int) -> str:
        """A token of this role."""
        return admin.create_token(self.directory, admin.CreateToken(role, **given))  # type: ignore[arg-type]

    def remote(self, role: str, **given: int) -> RemoteCluster:
        """A connection with a token of this role."""
        return RemoteCluster(self.gateway, self.token(role, **given))


@pytest.fixture(scope="module")
def gated(runtime: Path) -> Iterator[Gated]:
    """A cluster with a gateway."""
    with Gated(runtime) as up:
        yield up


def fairway(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "fairway", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def on(remote: RemoteCluster, **environment: str) -> dict[str, str]:
    """The environment of a client of this connection."""
    return {"JAX_PLATFORMS": "proxy", "JAX_BACKEND_TARGET": remote.target, **environment}


def test_a_script_runs_on_a_cluster_that_is_reached_by_its_gateway(
    gated: Gated, tmp_path: Path, own_runtime: Path
) -> None:
    """As another machine's user types it: with the address, and the token in a file."""
    (tmp_path / "token").write_text(gated.token("client") + "\n")
    script = tmp_path / "sum.py"
    script.write_text(PREAMBLE + SUM)
    apart = {"XDG_RUNTIME_DIR": str(own_runtime)}
    joining = ("--cluster", gated.gateway, "--token-file", str(tmp_path / "token"))
    ended = fairway("run", *joining, str(script), **apart)
    assert said(ended.stdout, "sum") == {"of": 2016.0}, ended.stderr
    shown = fairway("status", *joining, **apart)
    assert f"main@{gated.gateway}" in shown.stdout
    assert not list(own_runtime.glob("fairway-*/run-*")), "a connection leaves nothing"


def test_a_connected_cluster_is_found_as_a_local_one(gated: Gated, own_runtime: Path) -> None:
    """``fairway connect`` prints what clients need, and other commands find it."""
    apart = {
        **os.environ,
        "XDG_RUNTIME_DIR": str(own_runtime),
        "FAIRWAY_TOKEN": gated.token("client"),
    }
    connecting = [sys.executable, "-m", "fairway", "connect", gated.gateway]
    with subprocess.Popen(connecting, env=apart, stdout=subprocess.PIPE, text=True) as connected:
        assert connected.stdout is not None
        lines = [connected.stdout.readline() for _ in range(2)]
        given = dict(re.findall(r"export (\w+)=(\S+)", "".join(lines)))
        assert set(given) == {"JAX_PLATFORMS", "JAX_BACKEND_TARGET"}
        for _ in range(2):  # each connection is made anew
            assert said(client(None, SUM, environment=given).stdout, "sum") == {"of": 2016.0}
        shown = fairway("status", "--json", XDG_RUNTIME_DIR=str(own_runtime))
        [seen] = json.loads(shown.stdout)
        assert seen["target"] == given["JAX_BACKEND_TARGET"]
        connected.send_signal(2)
        assert connected.wait(20) == 0


OWN_CODE = """
import os
from jax.experimental import colocated_python
here = colocated_python.colocated_python(
    lambda x: jax.device_put(np.int32(os.getuid()), x.sharding)
)
try:
    say("user", number=int(here(jax.device_put(np.int32(1), jax.devices()[0]))), error="")
except Exception as error:
    say("user", number=-1, error=str(error))
"""


def test_code_of_clients_runs_on_hosts_only_where_the_owner_allows_it(
    gated: Gated, own_runtime: Path, tmp_path: Path
) -> None:
    with gated.remote("client") as remote:
        refused = said(client(None, OWN_CODE, environment=on(remote)).stdout, "user")
        assert "PERMISSION_DENIED" in refused["error"]
        assert "client_code" in refused["error"]
        assert "sum" in client(None, SUM, environment=on(remote)).stdout, (
            "what else it may do is as before"
        )
    with gated.remote("admin") as remote:
        assert (
            said(client(None, OWN_CODE, environment=on(remote)).stdout, "user")["number"]
            == os.getuid()
        )
    config = tmp_path / "fairway.toml"
    config.write_text("client_code = true\n")
    with Gated(own_runtime, "--config", str(config)) as up, up.remote("client") as remote:
        assert (
            said(client(None, OWN_CODE, environment=on(remote)).stdout, "user")["number"]
            == os.getuid()
        )


@pytest.mark.skipif(os.getuid() != 0, reason="needs another user of this machine")
def test_code_of_another_user_runs_as_that_user(own_runtime: Path, tmp_path: Path) -> None:
    other = 54321
    config = tmp_path / "fairway.toml"
    config.write_text(f'islands = "1x1x1"\nallow_users = ["{other}"]\n')
    with Up("--config", str(config), runtime=own_runtime) as up:
        ended = subprocess.run(
            [
                "setpriv",
                f"--reuid={other}",
                "--clear-groups",
                sys.executable,
                "-c",
                PREAMBLE + OWN_CODE,
            ],
            env={**client_environment(up), "HOME": "/nonexistent"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert said(ended.stdout, "user") == {"number": other, "error": ""}, ended.stderr


def test_slices_are_allocated_through_the_gateway(gated: Gated) -> None:
    code = """
    import fairway
    with fairway.slice((2,)) as slice:
        mesh = Mesh(slice.devices, "x")
        x = jax.device_put(np.arange(8.0), NamedSharding(mesh, P("x")))
        say("sum", of=float(x.sum()))
    """
    with gated.remote("client") as remote:
        assert said(client(None, code, environment=on(remote)).stdout, "sum") == {"of": 28.0}


def test_clients_of_other_machines_are_shown_with_their_machine(gated: Gated) -> None:
    code = 'jax.devices(); say("ready"); sys.stdin.readline()'
    with gated.remote("client") as remote:
        environment = {**os.environ, **on(remote)}
        command = [sys.executable, "-c", PREAMBLE + code]
        with subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as working:
            assert working.stdout is not None
            assert working.stdout.readline().startswith("ready")
            [one] = gated.overview()["clients"]
            assert (one["machine"], one["process"]) == ("127.0.0.1", None)
            assert re.fullmatch("[0-9a-f]{16}", one["token"])
            working.communicate("\n", timeout=30)


def test_clients_ask_for_no_more_than_their_token_grants(gated: Gated) -> None:
    code = 'kind, text = fails(jax.devices); say("error", text=text)'
    with gated.remote("client", weight=3, priority=1) as remote:
        granted = client(None, SUM, environment=on(remote, FAIRWAY_WEIGHT="3"))
        assert said(granted.stdout, "sum") == {"of": 2016.0}
        for name, value in [("FAIRWAY_WEIGHT", "4"), ("FAIRWAY_PRIORITY", "2")]:
            refused = client(None, code, environment=on(remote, **{name: value}))
            text = said(refused.stdout, "error")["text"]
            assert "the controller refuses this client" in text, text
            assert "grants at most 3 and 1" in text, text


def directory_of(remote: RemoteCluster) -> Path:
    """The directory in which a connection's admin socket is."""
    return remote.directory


def test_clients_may_not_change_the_cluster(gated: Gated) -> None:
    with gated.remote("client") as remote:
        directory = directory_of(remote)
        assert admin.overview(directory)["islands"]
        refused = [
            lambda: admin.add_island(directory, admin.AddIsland(1, 1)),
            lambda: admin.remove_island(directory, admin.RemoveIsland(0, force=True)),
            lambda: admin.create_token(directory, admin.CreateToken("admin")),
            lambda: admin.list_tokens(directory),
            lambda: admin.revoke_token(directory, "0" * 16),
            lambda: admin.read_logs(directory, admin.ReadLogs()),
        ]
        for ask in refused:
            with pytest.raises(FairwayError, match="has role client, and this is for role admin"):
                ask()
    assert len(gated.overview()["islands"]) == 2


def test_clients_have_no_slices_of_others(gated: Gated) -> None:
    """Neither those of a local client, nor of one with another token."""
    code = 'jax.devices(); say("ready"); sys.stdin.readline()'
    with (
        gated.remote("client") as remote,
        gated.remote("client") as other,
        subprocess.Popen(
            [sys.executable, "-c", PREAMBLE + code],
            env={**os.environ, **on(other)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as working,
    ):
        assert working.stdout is not None
        assert working.stdout.readline().startswith("ready")
        number = max(one["id"] for one in gated.overview()["clients"])
        request = admin.AllocateSlice(number, [1])
        with pytest.raises(SliceError, match=f"client {number} is none of token"):
            admin.allocate_slice(directory_of(remote), request)
        with pytest.raises(SliceError, match=f"client {number} is none of token"):
            admin.release_slice(directory_of(remote), admin.ReleaseSlice(number, [0]))
        assert len(admin.allocate_slice(directory_of(other), request).devices) == 1
        working.communicate("\n", timeout=30)


def test_administrators_change_the_cluster_from_elsewhere(gated: Gated) -> None:
    with gated.remote("admin") as remote:
        directory = directory_of(remote)
        number = admin.add_island(directory, admin.AddIsland(1, 1))
        admin.remove_island(directory, admin.RemoveIsland(number))
        token = admin.create_token(directory, admin.CreateToken("client", 3600.0))
        listed = {one.id: one for one in admin.list_tokens(directory)}
        assert listed[token.split("-")[2]].role == "client"
        admin.revoke_token(directory, token.split("-")[2])
        with pytest.raises(TokenError, match="there is no token"):
            admin.revoke_token(directory, token.split("-")[2])
        with pytest.raises(NotRunningError, match="no such token, or it was revoked"):
            RemoteCluster(gated.gateway, token)


def test_tokens_of_hosts_are_no_tokens_of_clients(gated: Gated) -> None:
    with pytest.raises(NotRunningError, match="admin is for tokens of role client; token"):
        gated.remote("host")
    refused = "refused 127.0.0.1:[0-9]+: admin is for tokens of role client"
    until(lambda: re.search(refused, gated.errors.read_text()), 5, "there is a line about it")
    with pytest.raises(ConfigError, match="is no token"):
        RemoteCluster(gated.gateway, "secret")


def test_a_revoked_token_ends_its_clients(gated: Gated) -> None:
    code = """
    step = jax.jit(lambda x: x + 1)
    x = step(jax.device_put(np.ones(4), jax.devices()[0]))
    say("ready", of=float(step(x)[0]))
    sys.stdin.readline()
    say("error", text=fails(lambda: np.asarray(step(x)))[1])
    """
    with gated.remote("client") as remote:
        command = [sys.executable, "-c", PREAMBLE + "\n".join(map(str.strip, code.splitlines()))]
        with subprocess.Popen(
            command,
            env={**os.environ, **on(remote)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as working:
            assert working.stdout is not None
            assert working.stdout.readline().startswith("ready")
            [one] = gated.overview()["clients"]
            admin.revoke_token(gated.directory, one["token"])
            until(lambda: not gated.overview()["clients"], 10, "it is a client no more")
            output, _ = working.communicate("\n", timeout=60)
            assert "UNAVAILABLE" in said(output, "error")["text"]


def test_other_users_of_the_machine_get_nothing_from_a_connection(gated: Gated) -> None:
    """Of the machine that is connected: the port is open to all, and closes to others at once."""
    probe = """
import socket, sys
for port in sys.argv[1:]:
    with socket.create_connection(("127.0.0.1", int(port)), 10) as connection:
        connection.settimeout(10)
        print("closed" if connection.recv(1) == b"" else "open")
"""
    with gated.remote("client") as remote:
        port = remote.target.rpartition(":")[2]
        other = subprocess.run(
            ["setpriv", "--reuid=4242", "--clear-groups", sys.executable, "-c", probe, port],
            capture_output=True,
            text=True,
            timeout=60,
            cwd="/",
        )
        if "Permission denied" in other.stderr or "not permitted" in other.stderr:
            pytest.skip(f"another user cannot run Python here: {other.stderr}")
        assert other.stdout == "closed\n", other.stderr
        assert directory_of(remote).stat().st_mode & 0o077 == 0
        assert said(client(None, SUM, environment=on(remote)).stdout, "sum") == {"of": 2016.0}


def test_tokens_outlive_a_controller(own_runtime: Path) -> None:
    """A cluster of the same name keeps its authority, and the tokens that were asked for."""
    with Gated(own_runtime, "--name", "kept") as first:
        token = first.token("client")
        state = Path(os.environ["XDG_STATE_HOME"]) / "fairway" / "kept"
        for name in ("authority.pem", "tokens.json"):
            assert (state / name).stat().st_mode & 0o777 == 0o600
    with (
        Gated(own_runtime, "--name", "kept") as again,
        RemoteCluster(again.gateway, token) as remote,
    ):
        assert remote.check() is None
        kept = [one.id for one in admin.list_tokens(again.directory)]
        assert kept == [token.split("-")[2]]


def test_logs_are_read_from_elsewhere(gated: Gated, own_runtime: Path) -> None:
    """What a host has printed, by an administrator on another machine."""
    process = hosts_of(gated)[1]["process"]
    with Path(f"/proc/{process}/fd/1").open("w") as output:
        output.write("the answer is 42\n")
    shown = {"XDG_RUNTIME_DIR": str(own_runtime), "FAIRWAY_TOKEN": gated.token("admin")}
    where = ("--cluster", gated.gateway)

    def logs(*arguments: str) -> str:
        return fairway("logs", *where, *arguments, **shown).stdout

    until(lambda: "island 1 host 1: the answer is 42" in logs(), 30, "it is kept")
    assert "the answer is 42" in logs("--host", "1")
    assert "the answer is 42" not in logs("--island", "0")
    absent = fairway("logs", *where, "--host", "77", **shown)
    assert "there is no host 77; expected one of [0, 1" in absent.stderr
    records = [json.loads(line) for line in logs("--host", "1", "--json").splitlines()]
    assert records[-1]["text"] == "the answer is 42"
    assert records[-1]["island"] == 1


def test_clients_of_a_revoked_token_are_told_at_once(gated: Gated) -> None:
    """Not after the two minutes for which the stock client tries."""
    code = 'kind, text = fails(jax.devices); say("error", text=text)'
    with gated.remote("client") as remote:
        for one in admin.list_tokens(gated.directory):
            admin.revoke_token(gated.directory, one.id)
        text = said(client(None, code, 30, environment=on(remote)).stdout, "error")["text"]
    assert "refuses: there is no such token, or it was revoked" in text, text


def test_many_tokens_are_made_at_a_time(gated: Gated) -> None:
    """None is lost, in memory or in the file."""
    before = {one.id for one in admin.list_tokens(gated.directory)}
    with ThreadPoolExecutor(8) as threads:
        made = set(threads.map(lambda _: gated.token("host").split("-")[2], range(40)))
    after = {one.id for one in admin.list_tokens(gated.directory)}
    assert len(made) == 40
    assert after - before == made
    file = Path(os.environ["XDG_STATE_HOME"]) / "fairway" / "main" / "tokens.json"
    assert {one["id"] for one in json.loads(file.read_text())} == after


def test_a_reader_that_stops_holds_up_nothing(own_runtime: Path) -> None:
    """Refusals are printed to a pipe that is full; clients of other machines go on."""
    reading, writing = os.pipe()
    settings = Settings.parse("1x1x1", gateway="127.0.0.1:0")
    before = os.dup(2)
    os.dup2(writing, 2)
    try:
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
        with Run(settings) as run:
            assert run.gateway is not None
            [address] = run.gateway.addresses
            host, _, port = address.rpartition(":")
            os.set_blocking(writing, False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    os.write(writing, b"x" * 512)
            os.set_blocking(writing, True)
            for _ in range(50):
                with socket.create_connection((host, int(port))) as connection:
                    connection.sendall(b"hello\n")
            token = run.gateway.create_token("client", None)
            with RemoteCluster(address, token) as remote:
                found = client(None, SUM, 60, environment=on(remote))
            assert said(found.stdout, "sum") == {"of": 2016.0}
            assert len([one for one in run.logs.read() if "refused" in one.text]) >= 10
            os.set_blocking(reading, False)
            with contextlib.suppress(BlockingIOError):
                while os.read(reading, 1 << 16):
                    pass
    finally:
        os.dup2(before, 2)
        for descriptor in (before, reading, writing):
            os.close(descriptor)
