"""Hosts that join from other machines: agents, the gateway, and what is refused."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from conftest import client, received_bytes, said, until
from typer.testing import CliRunner

from fairway import _native
from fairway.cli import app
from fairway.cluster.agents import SERVICE, AgentHello, AgentRefused, LineReader, Versions, send
from fairway.cluster.supervisor import Run
from fairway.errors import ConfigError, StartError
from fairway.settings import Settings

SCRIPT = """
islands = np.array([[d for d in jax.devices() if d.island == i] for i in (0, 1)])
both = Mesh(islands, ("island", "x"))
total = jax.jit(jax.shard_map(
    lambda x: jax.lax.psum(x, "island"),
    mesh=both, in_specs=P("island", "x"), out_specs=P(None, "x"),
))
x = jax.device_put(np.arange(64.0).reshape(2, 32), NamedSharding(both, P("island", "x")))
first, second = (NamedSharding(Mesh(devices, "x"), P("x")) for devices in islands)
y = jax.jit(lambda x: x - x.mean() + 1)(jax.device_put(np.arange(1 << 16, dtype="f4"), first))
say("sums", total=float(np.asarray(total(x)).sum()), moved=float(jax.device_put(y, second).sum()))
"""


ETH_P_ALL = 3
"""All protocols, in <linux/if_ether.h>."""
MARK = b"this is in clear"
SUMS = {"total": 64 * 63 / 2, "moved": 1 << 16}


def joined(
    islands: str = "2x2x1", address: str = "127.0.0.1", script: Path | None = None, **given: Any
) -> Run:
    """A controller that waits for the hosts of these islands to join."""
    known = {"on": "agents", "gateway": f"{address}:0", "data_plane": "tcp", "timeout_s": 3.0}
    settings = Settings.parse(islands, **known, **given)
    return Run(settings if script is None else settings.serving(script))


@contextmanager
def agents(
    run: Run, *prefixes: Sequence[str], offering: Sequence[str] = ()
) -> Iterator[list[subprocess.Popen[str]]]:
    """An agent for each command prefix, which are ended afterwards."""
    assert run.gateway is not None
    command = [sys.executable, "-P", "-m", "fairway", "host", "--join", *run.gateway.addresses]
    environment = {**os.environ, "FAIRWAY_TOKEN": run.gateway.token_file.read_text()}
    with ExitStack() as ending:
        found = []
        for prefix in prefixes:
            agent = subprocess.Popen(
                [*prefix, *command, *offering], env=environment, stderr=subprocess.PIPE, text=True
            )
            ending.enter_context(agent)
            ending.callback(agent.kill)
            found.append(agent)
        yield found


def run_script(run: Run, script: str = SCRIPT, mark: str = "sums") -> dict[str, float]:
    """Returns what a client says."""
    return said(client(run, script, 90).stdout, mark)


def test_a_script_runs_on_hosts_that_join(own_runtime: Path) -> None:
    """Islands of two hosts each, whose coordination service is carried as well."""
    run = joined()
    with agents(run, *4 * [()]) as there:
        with run:
            assert run_script(run) == SUMS
        for agent in there:
            assert agent.wait(20) == 0, "an agent ends with its controller"
            assert agent.stderr is not None
            assert "the controller has ended" in agent.stderr.read()


def test_hosts_join_from_machines_that_share_nothing(
    namespaces: dict[str, str], own_runtime: Path
) -> None:
    """Namespaces with a network, a name and temporary folders of their own; each island is on both
    of them."""
    address = next(iter(namespaces.values())).rpartition(".")[0] + ".254"
    run = joined("2x2x1", address)
    own = (
        'hostname "$0"; mkdir -p "$1"; export TMPDIR="$1"; unset XDG_RUNTIME_DIR; shift; exec "$@"'
    )
    machines = [
        [
            *("nsenter", f"--net=/run/netns/{name}", "unshare", "--uts"),
            *("sh", "-c", own, name, str(own_runtime / name)),
        ]
        for name in namespaces
    ]
    before = [received_bytes("-n", name, "eth0") for name in namespaces]
    with agents(run, *machines, *machines) as there, run:
        assert run_script(run) == SUMS
        assert run_script(run) == SUMS, "and for another client"
        assert all(agent.poll() is None for agent in there)
    after = [received_bytes("-n", name, "eth0") for name in namespaces]
    assert all(there - here > 100_000 for here, there in zip(before, after, strict=True))


@contextmanager
def listening(text: bytes) -> Iterator[list[int]]:
    """Counts packets on this machine's links, and those with a text."""
    counts = [0, 0]
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(ETH_P_ALL)) as every:
        every.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 20)
        every.settimeout(0.2)
        over = threading.Event()

        def listen() -> None:
            while not over.is_set():
                with suppress(TimeoutError):
                    packet, (interface, *_) = every.recvfrom(1 << 16)
                    if interface != "lo":
                        counts[0] += 1
                        counts[1] += text in packet

        listener = threading.Thread(target=listen)
        listener.start()
        yield counts
        over.set()
        listener.join()


@pytest.mark.parametrize("encryption", ["auto", "off"])
def test_what_hosts_send_between_machines_is_encrypted(
    namespaces: dict[str, str], own_runtime: Path, encryption: str
) -> None:
    address = next(iter(namespaces.values())).rpartition(".")[0] + ".254"
    run = joined("2x1x1", address, encryption=encryption)
    machines = [["nsenter", f"--net=/run/netns/{name}"] for name in namespaces]
    code = f"""
text = np.frombuffer({MARK!r} * 4096, np.uint8)
x = jax.device_put(text, jax.devices()[0])
y = jax.device_put(jax.jit(lambda x: x + 0)(x), jax.devices()[1])
say("moved", same=bool((np.asarray(y) == text).all()))
"""
    with agents(run, *machines), run, listening(MARK) as counts:
        assert said(client(run, code, 90).stdout, "moved") == {"same": True}
    packets, readable = counts
    assert packets > 10
    assert (readable > 0) == (encryption == "off")


def test_machines_that_do_not_reach_each_other_are_named(
    namespaces: dict[str, str], own_runtime: Path
) -> None:
    """As by a firewall between two hosts only: both reach the controller, and it reaches them."""
    (first, one), (_, other) = list(namespaces.items())[:2]
    away = ["ip", "-n", first, "neigh", "replace", other, "dev", "eth0", "nud", "permanent"]
    subprocess.run([*away, "lladdr", "02:00:00:00:00:99"], check=True)
    run = joined("2x1x1", one.rpartition(".")[0] + ".254")
    machines = [["nsenter", f"--net=/run/netns/{name}"] for name in namespaces]
    with agents(run, *machines[:2]), pytest.raises(StartError) as raised, run:
        pass
    text = str(raised.value)
    assert "host 0 cannot reach host 1" in text
    assert "host 1 cannot reach host 0" in text
    assert f"tcp:{other}" in text
    assert f"tcp:{one}" in text
    assert "the controller cannot" not in text


def test_a_wrong_address_is_named(own_runtime: Path) -> None:
    """Of a network that this machine has no interface of."""
    run = joined("1x1x1")
    with agents(run, (), offering=("--address", "192.0.2.7")), pytest.raises(StartError) as raised:
        run.__enter__()
    assert "cannot listen at tcp:192.0.2.7" in str(raised.value)
    run.close()


BESIDE = """
import itertools, numpy as np
from parts.numbers import START
def rows(shard, value):
    return itertools.repeat(np.full(4 // shard.count, START + value, np.int32))
"""
READS = """
import fairway
mesh = Mesh(np.array(jax.devices()), ("x",))
like = jax.ShapeDtypeStruct((4,), np.int32, sharding=NamedSharding(mesh, P("x")))
say("batch", of=np.asarray(fairway.inputs("beside:rows", like=like, value=3)()).tolist())
"""


def test_modules_of_input_functions_are_sent(
    own_runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machines have nothing in the script's folder, and keep what they were sent."""
    code, cache = own_runtime / "code", own_runtime / "cache"
    (code / "parts").mkdir(parents=True)
    (code / "beside.py").write_text(BESIDE)
    (code / "parts" / "numbers.py").write_text("START = 40\n")
    (code / "data.bin").write_bytes(b"no module")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    hiding = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(code)]
    if os.geteuid():
        pytest.skip("mounts need root")
    for _ in range(2):
        run = joined("1x2x1", script=code / "script.py")
        with agents(run, hiding, hiding), run:
            assert said(client(run, READS, 90).stdout, "batch") == {"of": [43, 43, 43, 43]}
        [kept] = (cache / "fairway" / "modules").iterdir()
        files = sorted(str(one.relative_to(kept)) for one in kept.rglob("*") if one.is_file())
        assert [one for one in files if not one.endswith(".pyc")] == [
            "beside.py",
            "parts/numbers.py",
        ]


def test_a_lost_agent_is_a_lost_host(own_runtime: Path) -> None:
    """And another agent that joins brings the island back."""
    run = joined("2x1x1")
    with agents(run, (), ()) as there, run:
        there[0].send_signal(signal.SIGKILL)

        def lost() -> list[int]:
            return [one["id"] for one in run.overview()["islands"] if one["state"] == "lost"]

        until(lost, 20, "the loss is noticed within the timeout")
        with agents(run, ()):
            [island] = lost()
            assert run.add_island(run.settings.islands[0]) == island
            code = 'say("sum", of=sum(float(jax.device_put(1.0, d)) for d in jax.devices()))'
            assert said(client(run, code, 90).stdout, "sum") == {"of": 2.0}


@contextmanager
def waiting() -> Iterator[tuple[Run, str, str]]:
    """A run that waits for its only host, with the gateway's address and the token."""
    run = joined("1x1x1")
    try:
        assert run.gateway is not None
        [address], file = run.gateway.addresses, run.gateway.token_file
        assert file.stat().st_mode & 0o777 == 0o600
        yield run, address, file.read_text().strip()
    finally:
        run.close()


def invoke(*arguments: str, **environment: str) -> str:
    found = CliRunner(env=environment).invoke(app, ["host", "--wait", "0", *arguments])
    assert found.exit_code != 0
    return str(found.exception)


def test_tokens_that_are_wrong_are_refused(own_runtime: Path, tmp_path: Path) -> None:
    with waiting() as (_, address, token):
        prefix, role, number, secret, pin = token.split("-")
        wrong = "-".join((prefix, role, number, secret[::-1], pin))
        other = "-".join((prefix, role, number, secret, pin[::-1]))
        assert "refuses: the token is wrong" in invoke("--join", address, FAIRWAY_TOKEN=wrong)
        assert "is not the controller that made this token" in invoke(
            "--join", address, FAIRWAY_TOKEN=other
        )
        assert "is no token" in invoke("--join", address, FAIRWAY_TOKEN="secret")
        assert "no token is given" in invoke("--join", address, FAIRWAY_TOKEN="")
        absent = invoke("--join", address, "--token-file", str(tmp_path / "absent"))
        assert "cannot read the token" in absent
    assert "cannot connect to" in invoke("--join", address, FAIRWAY_TOKEN=token)


def test_agents_of_other_versions_are_refused(own_runtime: Path, tmp_path: Path) -> None:
    here = Versions.here()
    assert "missing" not in msgspec.structs.astuple(here)
    with waiting() as (_, address, token):
        remote = _native.Remote(address, token)
        remote.carry(tmp_path / "agents.sock", SERVICE)
        for name, how in [("jaxlib", "pip install jaxlib=="), ("python", "use Python ")]:
            older = msgspec.structs.replace(here, **{name: "0.1"})
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(10)
                connection.connect(str(tmp_path / "agents.sock"))
                send(connection, AgentHello("old", "127.0.0.1", 1, older))
                answer = LineReader(connection, AgentRefused).read()
            assert f"it has {name} 0.1 and the controller {getattr(here, name)}" in answer.reason
            assert how + getattr(here, name) in answer.reason
        remote.close()


def test_agents_that_send_nonsense_are_closed(own_runtime: Path, tmp_path: Path) -> None:
    with waiting() as (_, address, token):
        remote = _native.Remote(address, token)
        remote.carry(tmp_path / "agents.sock", SERVICE)
        refused = 0
        hello = b'{"type":"hello","machine":"%s","address":"x","process":1,"versions":{}}\n'
        for text in (
            b"hello\n",
            b'{"type": "ended", "host": 0, "how": "x"}\n',
            b"a" * 400_000,
            b"[" * 100_000 + b"\n",
            hello % b"\xff",
            hello % b"a\\u001b[2J",
        ):
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(15)
                connection.connect(str(tmp_path / "agents.sock"))
                try:
                    connection.sendall(text)
                    [answer] = connection.makefile().readlines()
                except (BrokenPipeError, ConnectionResetError):
                    continue  # closed before all of it was sent
            assert msgspec.json.decode(answer, type=AgentRefused).reason
            refused += 1
        assert refused >= 4
        remote.close()


def test_services_are_not_for_other_roles(own_runtime: Path, tmp_path: Path) -> None:
    refusals: list[str] = []
    gateway = _native.Gateway("127.0.0.1:0", refusals.append)
    gateway.offer("control", "host", f"unix:{tmp_path}/control.sock")
    token = gateway.create_token("client", None)
    with pytest.raises(PermissionError, match="control is for tokens of role host"):
        _native.Remote(gateway.address, token).check("control")
    assert gateway.revoke_token(token.split("-")[2])
    with pytest.raises(PermissionError, match="it was revoked"):
        _native.Remote(gateway.address, token).check("control")
    with pytest.raises(ValueError, match="there is no role"):
        gateway.create_token("king", None)
    until(lambda: len(refusals) == 2, 5, "they are reported once the peer has its answer")
    gateway.close()
    assert [text.partition(": ")[2] for text in refusals] == [
        f"control is for tokens of role host; token {token.split('-')[2]} has role client",
        "there is no such token, or it was revoked",
    ]
    assert all(text.startswith("refused 127.0.0.1:") for text in refusals)
    with pytest.raises(ConnectionError):
        _native.Remote(gateway.address, token).check("control")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data_plane": "unix"}, "'tcp' where hosts are on other machines"),
        ({"capture": True, "on": "k8s:image"}, "not 'k8s' for a timeline or a capture"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes: dict[str, object], message: str) -> None:
    settings = {"on": "agents", "data_plane": "tcp", **changes}
    with pytest.raises(ConfigError, match=message):
        Settings.parse("1x1x1", **settings)
