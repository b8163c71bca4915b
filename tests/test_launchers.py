"""Launchers: hosts on machines that ssh reaches, agents' leases, logs, and what is refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Background, client, is_alive, said, until
from machines import Machines, with_ssh

from fairway.cluster import reports
from fairway.cluster.launchers.ssh import SshMachine, read_machines
from fairway.cluster.logs import KEPT_CHARACTERS, Logs, Outputs
from fairway.cluster.supervisor import Run
from fairway.errors import ConfigError, StartError
from fairway.settings import IslandSettings, Settings

SSHD = "/usr/sbin/sshd"
SUM = 'say("sum", of=sum(float(jax.device_put(1.0, d)) for d in jax.devices()))'


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    """Three machines."""
    with with_ssh(tmp_path_factory.mktemp("ssh"), 3) as made:
        yield made


@pytest.fixture
def by_ssh(machines: Machines, monkeypatch: pytest.MonkeyPatch, own_runtime: Path) -> Machines:
    """The machines, for launchers of this process."""
    monkeypatch.setenv("FAIRWAY_SSH", machines.ssh)
    return machines


def on_machines(machines: Machines, islands: str, names: list[str]) -> Settings:
    """Settings for islands on these machines."""
    return Settings.parse(
        islands,
        on="ssh:" + ",".join([*names, ""]),
        gateway=f"{machines.controller}:0",
        data_plane="tcp",
        timeout_s=4.0,
    )


def states(run: Run) -> list[str]:
    """The state of each island."""
    return [island["state"] for island in run.overview()["islands"]]


def test_hosts_run_on_machines_that_ssh_reaches(by_ssh: Machines) -> None:
    """One command, and nothing is left on them."""
    with Run(on_machines(by_ssh, "1x2x1", by_ssh.names[:2])) as run:
        assert said(client(run, SUM, 90).stdout, "sum") == {"of": 2.0}
        assert all(by_ssh.processes(name) for name in by_ssh.names[:2])
        assert not by_ssh.processes(by_ssh.names[2])
    for name in by_ssh.names:
        until(lambda name=name: not by_ssh.processes(name), 10, f"nothing is left on {name}")


STEP = """
import jax
here, away = jax.devices()
step = jax.jit(lambda x: x * 2)
for _ in range(4):
    x = step(jax.device_put(step(jax.device_put(jax.numpy.ones(1 << 16), here)), away))
print(x.sum())
"""


def test_a_step_on_other_machines_is_captured(by_ssh: Machines, tmp_path: Path) -> None:
    script, out = tmp_path / "script.py", tmp_path / "step.fw"
    script.write_text(STEP)
    gateway, names = f'gateway = "{by_ssh.controller}:0"', ",".join([*by_ssh.names[:2], ""])
    (tmp_path / "there.toml").write_text(f'islands = "2x1x1"\ndata_plane = "tcp"\n{gateway}\n')
    command = [sys.executable, "-m", "fairway", "capture", str(script), "-o", str(out)]
    command += ["--on", f"ssh:{names}", "--config", str(tmp_path / "there.toml"), "--"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "on [1] = move" in out.read_text()
    assert out.with_suffix(".report").exists()


def test_a_machine_that_vanishes_is_replaced(by_ssh: Machines) -> None:
    """Its island comes back on a spare one, and is usable again; the other island goes on."""
    with Run(on_machines(by_ssh, "2x1x1", by_ssh.names)) as run:
        assert said(client(run, SUM, 90).stdout, "sum") == {"of": 2.0}
        vanished = by_ssh.names[1]
        by_ssh.cut(vanished)
        try:
            began = time.monotonic()

            def is_back() -> bool:
                return states(run) == ["up", "up"] and bool(by_ssh.processes(by_ssh.names[2]))

            until(is_back, 60, "the island is back on the spare machine")
            print(f"measured back after {time.monotonic() - began:.1f} s")
            assert said(client(run, SUM, 90).stdout, "sum") == {"of": 2.0}
            # The machine that was cut off has ended its host by itself, when its lease ended.
            until(lambda: not by_ssh.processes(vanished), 60, "nothing is left on it")
        finally:
            by_ssh.cut(vanished, down=False)


def test_a_link_that_is_down_for_a_moment_loses_nothing(by_ssh: Machines) -> None:
    with Run(on_machines(by_ssh, "2x1x1", by_ssh.names[:2])) as run:
        hosts = [island["hosts"][0]["process"] for island in run.overview()["islands"]]
        by_ssh.cut(by_ssh.names[1])
        time.sleep(1.5)
        by_ssh.cut(by_ssh.names[1], down=False)
        assert said(client(run, SUM, 90).stdout, "sum") == {"of": 2.0}
        time.sleep(4)
        assert states(run) == ["up", "up"]
        seen = run.overview()["islands"]
        assert [island["hosts"][0]["process"] for island in seen] == hosts


TICKS = """
here, away = jax.devices()
step = jax.jit(lambda x: x + 1)
mine, theirs = (jax.device_put(jnp.zeros(1000), one) for one in (here, away))
jax.block_until_ready((step(mine), step(theirs)))
say("ready", at=0)
last, longest, count, lost = time.monotonic(), 0.0, 0, None
end = last + 14
while time.monotonic() < end:
    mine = jax.block_until_ready(step(mine))
    count, now = count + 1, time.monotonic()
    last, longest = now, max(longest, now - last)
    if lost is None and count % 20 == 0:
        try:
            theirs = jax.device_put(mine, away).block_until_ready()
        except Exception as error:
            lost = f"{type(error).__name__}: {error}"
    time.sleep(0.005)
    last = time.monotonic()
say("ended", longest_s=longest, right=float(mine[0]) == count, lost=lost)
"""


@pytest.mark.parametrize("way", ["both", "out"])
def test_a_link_that_stays_down_loses_its_island_alone(by_ssh: Machines, way: str) -> None:
    """In both directions, or only what the machine sends: named within the timeout."""
    cut = by_ssh.cut if way == "both" else by_ssh.mute
    with Run(on_machines(by_ssh, "2x1x1", by_ssh.names[:2])) as run:
        with Background(run, TICKS) as script:
            script.hear("ready")
            cut(by_ssh.names[1])
            began = time.monotonic()
            until(lambda: states(run) == ["up", "lost"], 15, "the island is lost")
            assert time.monotonic() - began < 1.75 * run.settings.timeout_s
            ended = script.hear("ended", 60)
        cut(by_ssh.names[1], down=False)
        assert ended["right"], "the other island computes on"
        assert ended["longest_s"] < 2.0
        assert "host 0 of island 1 is lost (no answer for" in ended["lost"]


COUNTS = """
here, away = jax.devices()
step = jax.jit(lambda x: x + 1)
x, count, longest, lost = jax.device_put(jnp.zeros(1 << 16), here), 0, 0.0, None
say("ready", at=0)
end = time.monotonic() + SECONDS
while time.monotonic() < end and lost is None:
    began = time.monotonic()
    try:
        x = jax.device_put(step(jax.device_put(step(x), away)), here)
        x.block_until_ready()
        count += 2
    except Exception as error:
        lost = f"{type(error).__name__}: {error}"
    longest = max(longest, time.monotonic() - began)
    time.sleep(0.02)
alone = float(step(jax.device_put(jnp.zeros(8), here)).sum())
right = None if lost else bool((np.asarray(x) == count).all())
say("ended", longest_s=longest, right=right, lost=lost, alone=alone)
"""


@pytest.mark.slow
def test_links_that_are_down_for_3_and_for_30_seconds(by_ssh: Machines) -> None:
    """With the timeout that is the default: nothing is lost, and a loss is named and mended."""
    settings = on_machines(by_ssh, "2x1x1", by_ssh.names[:2]).replace(timeout_s=10.0)
    name = by_ssh.names[1]
    with Run(settings) as run:
        with Background(run, COUNTS.replace("SECONDS", "15")) as script:
            script.hear("ready")
            time.sleep(1)
            by_ssh.cut(name)
            time.sleep(3)
            by_ssh.cut(name, down=False)
            ended = script.hear("ended", 60)
        assert ended["right"], "no move was lost, or overtaken by another"
        assert ended["longest_s"] > 2.5, "the link was down"
        assert states(run) == ["up", "up"]
        with Background(run, COUNTS.replace("SECONDS", "60")) as script:
            script.hear("ready")
            by_ssh.cut(name)
            began = time.monotonic()
            until(lambda: states(run) == ["up", "lost"], 30, "the island is lost")
            took_s = time.monotonic() - began
            ended = script.hear("ended", 60)
            time.sleep(max(0.0, began + 30 - time.monotonic()))
            by_ssh.cut(name, down=False)
        assert took_s < 1.75 * settings.timeout_s
        assert "host 0 of island 1 is lost (no answer for" in ended["lost"]
        assert ended["alone"] == 8.0, "the other island computes on"
        until(lambda: states(run) == ["up", "up"], 60, "the island is back")
        assert said(client(run, SUM, 90).stdout, "sum") == {"of": 2.0}
        print(f"measured lost after {took_s:.1f} s")


@pytest.mark.parametrize(
    ("islands", "names", "says"),
    [
        ("1x1x1", ["absent.invalid"], "the agent on absent.invalid has ended with status 255"),
        ("1x4x1", None, "needs 4 more slots of machines, and 3 are free"),
    ],
)
def test_what_does_not_start_is_explained(
    by_ssh: Machines, islands: str, names: list[str] | None, says: str
) -> None:
    with pytest.raises(StartError, match=says):
        Run(on_machines(by_ssh, islands, names or by_ssh.names)).start()


def test_an_agent_without_fairway_says_so(by_ssh: Machines, tmp_path: Path) -> None:
    file = tmp_path / "hosts.txt"
    file.write_text(f"{by_ssh.names[0]} python=/usr/bin/absent-python\n")
    settings = on_machines(by_ssh, "1x1x1", by_ssh.names).replace(on=f"ssh:{file}")
    with pytest.raises(StartError, match="absent-python"):
        Run(settings).start()


def test_machines_are_read_from_files(tmp_path: Path) -> None:
    file = tmp_path / "hosts.txt"
    file.write_text("# two\nada@m1 slots=2  # big\n\nm2 python=/opt/python\n")
    assert read_machines(str(file)) == [SshMachine("ada@m1", 2), SshMachine("m2", 1, "/opt/python")]
    assert read_machines("m1,m2") == [SshMachine("m1"), SshMachine("m2")]
    many = [f"machine-{number}" for number in range(1000)]
    assert [one.name for one in read_machines(",".join(many))] == many, "no file has such a name"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "names no machines"),
        ("# nothing\n", "names no machines"),
        ("m1 slots=0\n", "line 1: cannot read 'slots=0'"),
        ("m1 slots=many\n", "cannot read 'slots=many'"),
        ("m1\nm2 cores=3\n", "line 2: cannot read 'cores=3'"),
        ("-oProxyCommand=x\n", "is no name of a machine"),
    ],
)
def test_files_that_name_no_machines_are_refused(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "hosts.txt"
    file.write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_machines(str(file))
    with pytest.raises(ConfigError, match=r"cannot read machines from absent\.txt: No such file"):
        read_machines("absent.txt")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"on": "shh:hosts"}, "on is 'shh:hosts'; expected 'local', 'agents', 'ssh:FILE'"),
        ({"on": "ssh"}, "expected machines behind a colon"),
        ({"on": "agents:x"}, "on is 'agents:x'"),
        ({"nodes": 2}, "nodes is 2; expected 0 for all but 'slurm'"),
        ({"gateway": "10.0.0.1"}, "gateway is '10.0.0.1'; expected ADDRESS:PORT"),
        ({"gateway": "http://x:1"}, "expected ADDRESS:PORT"),
    ],
)
def test_settings_of_launchers_are_checked(settings: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Settings.parse("1x1x1", data_plane="tcp", **settings)


def test_engines_that_are_not_there_are_named(
    own_runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(own_runtime))
    with pytest.raises(StartError, match="there is no srun here"):
        Run(Settings.parse("1x1x1", on="slurm", data_plane="tcp"))
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(StartError, match=r"pip install 'fairway\[ray\]'"):
        Run(Settings.parse("1x1x1", on="ray", data_plane="tcp"))


def test_an_agent_ends_with_its_launcher(own_runtime: Path) -> None:
    """Where the token comes from standard input, the end of that ends the agent and its host."""
    settings = Settings.parse("1x1x1", on="agents", gateway="127.0.0.1:0", data_plane="tcp")
    run = Run(settings)
    assert run.gateway is not None
    [address], token = run.gateway.addresses, run.gateway.token_file.read_text()
    command = [sys.executable, "-m", "fairway", "host", "--join", address, "--token-file", "-"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as agent:
        assert agent.stdin is not None
        agent.stdin.write(token)
        agent.stdin.flush()
        with run:
            agent.stdin.close()
            assert agent.wait(10) == 1
            until(lambda: states(run) == ["lost"], 20, "the host has ended with its agent")


def test_an_agent_joins_again_after_a_pause(own_runtime: Path) -> None:
    """A stopped agent loses its lease, says so, and offers its machine anew."""
    settings = Settings.parse(
        "1x1x1", on="agents", gateway="127.0.0.1:0", data_plane="tcp", timeout_s=2.0
    )
    run = Run(settings)
    assert run.gateway is not None
    [address] = run.gateway.addresses
    environment = {**os.environ, "FAIRWAY_TOKEN": run.gateway.token_file.read_text()}
    command = [sys.executable, "-m", "fairway", "host", "--join", address]
    agent = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        with run:
            agent.send_signal(signal.SIGSTOP)
            time.sleep(4)  # its host goes on meanwhile: it is the agent that is stopped
            agent.send_signal(signal.SIGCONT)
            until(lambda: states(run) == ["lost"], 20, "its host has ended with its lease")
            run.add_island(settings.islands[0])
            assert said(client(run, SUM, 90).stdout, "sum") == {"of": 1.0}
    finally:
        agent.kill()
        _, said_by_agent = agent.communicate()
    assert "trying again" in said_by_agent
    assert said_by_agent.count("joined") == 2


def test_what_hosts_print_is_kept_after_their_end(own_runtime: Path) -> None:
    with Run(Settings.parse("1x1x1")) as run:
        [[host]] = [island["hosts"] for island in run.overview()["islands"]]
        with Path(f"/proc/{host['process']}/fd/2").open("w") as output:
            output.write("first\n" + "x" * 5000 + "\nlast")
        os.kill(host["process"], signal.SIGKILL)
        until(lambda: "last" in run.logs.of_host(0), 10, "its output is read to the end")
        kept = run.logs.of_host(0).splitlines()
        assert kept[0] == "first"
        assert "".join(kept[1:-1]) == "x" * 5000
        controller = [one.text for one in run.logs.read() if one.host is None]
        until(
            lambda: any("host 0 has ended by SIGKILL" in one.text for one in run.logs.read()),
            10,
            f"the controller says so: {controller}",
        )


def test_logs_keep_the_last_of_each_source(tmp_path: Path) -> None:
    logs = Logs(tmp_path / "logs")
    logs.add("quiet", 0, 0)
    for number in range(20_000):
        logs.add(f"line {number}", 1, 1)
    assert logs.of_host(0) == "quiet", "a loud host takes no place of others"
    kept = logs.of_host(1).splitlines()
    assert kept[-1] == "line 19999"
    assert KEPT_CHARACTERS - 100 < len(logs.of_host(1)) <= KEPT_CHARACTERS
    assert [one.text for one in logs.read(island=0)] == ["quiet"]
    last = logs.read()[-1].number
    assert logs.read(after=last) == []
    logs.close()
    written = (tmp_path / "logs" / "fairway.jsonl").read_text().splitlines()
    assert len(written) == 20_001


def test_output_without_lines_is_read_too() -> None:
    """Half lines, bytes that are no text, and a process that closes its output and goes on."""
    outputs = Outputs()
    lines: list[str] = []
    code = (
        "import os, time; os.write(1, b'a\\xffb' + b'y' * 200_000 + b'\\nhalf'); os.close(1); "
        "os.close(2); time.sleep(30)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    ended = outputs.follow(process.stdout, lines.append)
    assert ended.wait(10)
    assert "".join(lines).startswith("a\ufffdby")
    assert lines[-1] == "half"
    assert sum(map(len, lines)) == 3 + 200_000 + 4
    process.kill()
    process.wait()
    outputs.close()


def test_many_refusals_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a line of its own while they are few; a flood is counted."""
    monkeypatch.setattr(reports, "PERIOD_S", 0.5)
    logs = Logs()
    reporting = reports.Refusals(reports.Reports(logs))
    for number in range(1000):
        reporting.add(f"refused {number}")

    def lines() -> list[str]:
        return [record.text for record in logs.read()]

    assert lines() == [f"refused {number}" for number in range(reports.LINES)]
    until(lambda: len(lines()) == reports.LINES + 1, 5, "they are summed up")
    assert lines()[-1].startswith(f"refused {1000 - reports.LINES:,} more connections")
    reporting.add("later")
    assert lines()[-1] == "later"
    for _ in range(reports.LINES):
        reporting.add("again")
    reporting.close()
    assert lines()[-1].startswith("refused 1 more")


@pytest.fixture
def here(own_runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command in place of ssh that runs agents on this machine."""
    command = own_runtime / "ssh"
    command.write_text('#!/bin/sh\nfor last; do :; done\nexec sh -c "$last"\n')
    command.chmod(0o700)
    monkeypatch.setenv("FAIRWAY_SSH", str(command))


def in_place(islands: str, machines: str) -> Settings:
    """Settings for islands on machines that are this one."""
    return Settings.parse(
        islands, on=f"ssh:{machines}", gateway="127.0.0.1:0", data_plane="tcp", timeout_s=4.0
    )


@pytest.mark.usefixtures("here")
def test_a_host_that_ends_is_started_by_the_agent_that_it_had() -> None:
    """No other machine is taken for it."""
    with Run(in_place("2x1x1", "m1,m2,m3")) as run:
        host = run.overview()["islands"][0]["hosts"][0]
        os.kill(host["process"], signal.SIGKILL)
        until(lambda: states(run) == ["lost", "up"], 20, "its island is lost")
        until(lambda: states(run) == ["up", "up"], 20, "its island is back")
        assert said(client(run, SUM, 90).stdout, "sum") == {"of": 2.0}
        joined = [one.text for one in run.logs.read() if "joined" in one.text]
        assert sorted(line.partition(":")[0] for line in joined) == ["m1", "m2"]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("how", [signal.SIGABRT, signal.SIGKILL])
def test_the_end_of_a_host_elsewhere_is_explained(how: signal.Signals) -> None:
    """By its agent, which may know it later than the controller that it is lost."""
    with Run(in_place("1x2x1", "m1,m2")) as run:
        first, second = (host["process"] for host in run.overview()["islands"][0]["hosts"])
        with Path(f"/proc/{first}/fd/2").open("w") as output:
            output.write("a last line\n")
        os.kill(first, how)
        until(lambda: states(run) == ["lost"] and not is_alive(second), 20, "its island is lost")
        until(lambda: states(run) == ["up"], 20, "its island is back")
        endings = [one.text for one in run.logs.read() if "has ended" in one.text]
        last = [one.text for one in run.logs.read(island=None) if one.host is None]
        assert any("host 0 has ended on" in one and how.name in one for one in endings), last
        assert "a last line" in last
        assert not any("host 1 has ended on" in one for one in endings), "the controller ended it"


@pytest.mark.usefixtures("here")
def test_a_late_stop_of_a_host_leaves_its_successor() -> None:
    with Run(in_place("1x1x1", "m1,")) as run:
        process = run.overview()["islands"][0]["hosts"][0]["process"]
        run._hosts.stop(0, process - 1)
        time.sleep(1)
        assert states(run) == ["up"]
        run._hosts.stop(0, process)
        until(lambda: states(run) == ["lost"], 10, "its own stop ends it")


@pytest.mark.usefixtures("here")
def test_an_island_that_finds_no_machines_holds_up_no_other() -> None:
    """It is refused each time it is asked for, and others come back meanwhile."""
    with Run(in_place("2x1x1", "m1,m2")) as run:
        for _ in range(2):
            with pytest.raises(StartError, match="needs 1 more slots of machines, and 0 are free"):
                run.add_island(IslandSettings(1, 2))
        host = run.overview()["islands"][0]["hosts"][0]
        os.kill(host["process"], signal.SIGKILL)
        until(lambda: states(run)[:2] == ["lost", "up"], 20, "its island is lost")
        until(lambda: states(run)[:2] == ["up", "up"], 20, "its island is back")
        assert not [one for one in run.logs.read() if "island 2" in one.text and "anew" in one.text]


def test_what_others_print_does_not_change_a_terminal() -> None:
    logs = Logs()
    logs.add("a\x1b[2Jb\r\x07\x9b1m\tc\n\n\x0cd", 0, 0)
    assert logs.of_host(0) == "a\\x1b[2Jb\\x0d\\x07\\x9b1m\tc\n\\x0cd"
