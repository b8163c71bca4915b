"""Clusters in Kubernetes: their manifests, and what `--on k8s` does with them."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import client_environment, said, until
from typer.testing import CliRunner

from fairway.cli import app
from fairway.cluster.manifests import admin_token, as_yaml, cluster_manifests, read_manifests
from fairway.errors import ConfigError
from fairway.settings import Settings

ON = {"on": "k8s:registry/fairway:1", "data_plane": "tcp"}
SCRIPT = """
import json, jax, jax.numpy as jnp
devices = jax.devices()
total = sum(float(jax.device_put(jnp.ones(4), device).sum()) for device in devices)
print("sums", json.dumps({"devices": len(devices), "total": total}), flush=True)
"""


def manifests(islands: str = "2x2x4", name: str = "fairway", **settings: Any) -> dict[str, Any]:
    known = Settings.parse(islands, **ON, **settings)
    return {one["kind"]: one for one in cluster_manifests(known, "registry/fairway:1", name)}


def test_manifests_follow_the_schemas_of_kubernetes() -> None:
    validate = pytest.importorskip("kubernetes_validate")
    for platform in ("cpu", "cuda"):
        found = manifests(platform=platform)
        jobs = found.pop("JobSet")["spec"]["replicatedJobs"]
        for job in jobs:  # its own schema is not among those of Kubernetes, but that of its Jobs is
            about = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}}
            found[job["name"]] = {**about, **job["template"]}
        assert len(found) == 6
        for one in found.values():
            validate.validate(one, "1.32", strict=True)
        broken = {**found["Deployment"], "spec": {**found["Deployment"]["spec"], "replica": 1}}
        with pytest.raises(validate.ValidationError):
            validate.validate(broken, "1.32", strict=True)


def test_manifests_say_what_the_settings_say(tmp_path: Path) -> None:
    found = manifests("3x2x4", "lab", platform="cuda", timeout_s=20.0, custom_calls=("mine",))
    jobs = found["JobSet"]["spec"]["replicatedJobs"]
    assert [job["template"]["spec"]["parallelism"] for job in jobs] == [2, 2, 2]
    containers = [job["template"]["spec"]["template"]["spec"]["containers"][0] for job in jobs]
    assert [one["resources"]["limits"]["nvidia.com/gpu"] for one in containers] == 3 * ["4"]
    assert [one["command"][4:6] for one in containers] == [
        ["--island", str(number)] for number in range(3)
    ]
    file = tmp_path / "cluster.toml"
    file.write_text(found["ConfigMap"]["data"]["cluster.toml"])
    expected = Settings.parse("3x2x4", platform="cuda", timeout_s=20.0, custom_calls=("mine",))
    assert Settings.read(file) == expected


def test_manifests_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    result = CliRunner().invoke(app, ["manifests", "--image", "image", "-o", str(path)])
    assert result.exit_code == 0, result.output
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    found = read_manifests(path)
    assert as_yaml(found) == path.read_text()
    assert "&id" not in path.read_text()
    assert admin_token(found).startswith("fairway-admin-")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("--image", "x y"), "the image is 'x y'"),
        (("--image", "x", "--on", "ssh:a,b"), "--on says nothing that manifests"),
        (("--image", "x", "--channels", "auto"), "--channels says nothing that manifests"),
    ],
)
def test_options_that_manifests_do_not_have_are_refused(given: tuple[str, ...], says: str) -> None:
    result = CliRunner().invoke(app, ["manifests", *given])
    assert isinstance(result.exception, ConfigError)
    assert says in str(result.exception)
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("settings", "name", "refused"),
    [
        ({"listen": "127.0.0.1:7"}, "fairway", "listen is of one machine"),
        ({"input_path": (Path("/there"),)}, "fairway", "input_path is of one machine"),
        ({}, "My_Cluster", "expected at most 40 lower-case"),
        ({}, "a" * 60, "expected at most 40 lower-case"),
    ],
)
def test_what_kubernetes_does_not_have_is_refused(
    settings: dict[str, Any], name: str, refused: str
) -> None:
    with pytest.raises(ConfigError, match=refused):
        manifests("1x1x1", name, **settings)


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("", "has no manifests"),
        ("[1", "is no YAML"),
        ("kind: Pod", "no Deployment"),
        (None, "cannot read"),
    ],
)
def test_files_without_manifests_are_refused(
    tmp_path: Path, text: str | None, refused: str
) -> None:
    path = tmp_path / "cluster.yaml"
    if text is not None:
        path.write_text(text)
    result = CliRunner().invoke(app, ["up", "--on", f"k8s:{path}"])
    assert isinstance(result.exception, ConfigError)
    assert refused in str(result.exception)


def test_kubectl_that_is_missing_or_fails_is_named(own_runtime: Path) -> None:
    for command, refused in (
        ("no-such-kubectl", "there is no no-such-kubectl"),
        ("false", "fails"),
    ):
        ended = subprocess.run(
            [sys.executable, "-m", "fairway", "up", "--on", "k8s:image"],
            env={**os.environ, "FAIRWAY_KUBECTL": command},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert ended.returncode == 1
        assert refused in ended.stderr
        assert "Traceback" not in ended.stderr


def test_a_script_runs_on_pods(namespaces: dict[str, str], own_runtime: Path) -> None:
    """Containers run as processes, by the commands, variables and files of the manifests."""
    network = next(iter(namespaces))
    subprocess.run(["ip", "-n", network, "link", "set", "lo", "up"], check=True)
    script, kubelet = own_runtime / "script.py", own_runtime / "pods"
    script.write_text(SCRIPT)
    kubelet.mkdir()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {
        **client_environment(None),
        "PATH": path,
        "KUBELET": str(kubelet),
        "KUBELET_NETWORK": network,
        "FAIRWAY_KUBECTL": f"{sys.executable} {Path(__file__).with_name('kubelet.py')}",
    }
    command = ["fairway", "run", "--on", "k8s:image", "--islands", "2x2x1", str(script)]
    assert shutil.which("fairway", path=path), "the command is installed"
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    logs = "\n".join(log.read_text() for log in kubelet.glob("*.log"))
    assert ended.returncode == 0, ended.stderr + logs
    assert said(ended.stdout, "sums") == {"devices": 4, "total": 16.0}
    assert (kubelet / "deleted").exists()
    ran = [int(process) for process in yaml.safe_load((kubelet / "pods.json").read_text()).values()]
    until(lambda: not any(map(is_alive, ran)), 20, "pods end when they are deleted")


def is_alive(process: int) -> bool:
    return Path(f"/proc/{process}").exists()
