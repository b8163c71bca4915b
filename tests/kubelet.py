"""Stands in for ``kubectl`` and what is behind it: runs the containers of manifests as processes.

What is applied says all of it: commands, variables, secrets and mounted files.
All pods are in one network namespace, ``KUBELET_NETWORK``; ``KUBELET`` is a folder for its state.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import yaml

FOLDER, NETWORK = Path(os.environ["KUBELET"]), os.environ["KUBELET_NETWORK"]
PODS, NAME = FOLDER / "pods.json", "fairway"


def apply() -> None:
    manifests = {one["kind"]: one for one in yaml.safe_load_all(sys.stdin.read())}
    files = {**manifests["Secret"]["stringData"], **manifests["ConfigMap"]["data"]}
    pods = [("controller", manifests["Deployment"]["spec"]["template"]["spec"])]
    for job in manifests["JobSet"]["spec"]["replicatedJobs"]:
        spec = job["template"]["spec"]
        assert spec["completions"] == spec["parallelism"]
        pods += [
            (f"{job['name']}-{index}", spec["template"]["spec"])
            for index in range(spec["parallelism"])
        ]
    started = {name: start(name, pod["containers"][0], files) for name, pod in pods}
    PODS.write_text(json.dumps(started))


def start(name: str, container: dict[str, Any], files: dict[str, str]) -> int:
    """Starts a container; returns its process, which leads a group."""
    own, tmp = FOLDER / name / "etc", FOLDER / name / "tmp"
    tmp.mkdir(parents=True)
    subprocess.run(["cp", "-a", "/etc", own], check=True)
    own.joinpath("hosts").write_text(f"127.0.0.1 localhost {NAME}\n")
    for mount in container["volumeMounts"]:
        path = Path(mount["mountPath"])
        if path == Path("/tmp"):
            continue
        there = own / path.relative_to("/etc")
        if "subPath" in mount:
            there.parent.mkdir(parents=True, exist_ok=True)
            there.write_text(files[mount["subPath"]])
        else:
            there.mkdir(parents=True)
            for file, text in files.items():
                there.joinpath(file).write_text(text)
    variables = {}
    for one in container["env"]:
        secret = one.get("valueFrom", {}).get("secretKeyRef", {}).get("key")
        value = files[secret] if secret else one["value"]
        variables[one["name"]] = value.replace("/tmp", str(tmp), 1)
    inside = 'mount --bind "$0" /etc && exec "$@"'
    words = ["nsenter", f"--net=/run/netns/{NETWORK}", "unshare", "--mount", "sh", "-c", inside]
    with (FOLDER / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            [*words, own, *container["command"]],
            env={"PATH": os.environ["PATH"], **variables},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    FOLDER.joinpath(f"{name}.env").write_text(json.dumps(variables))
    return process.pid


def get() -> None:
    pods = json.loads(PODS.read_text())
    items: list[dict[str, Any]] = [
        {"kind": "Pod", "metadata": {"name": name}, "status": {"phase": "Running"}} for name in pods
    ]
    probe = subprocess.run(
        ["nsenter", f"--net=/run/netns/{NETWORK}", "fairway", "status", "--json"],
        env={"PATH": os.environ["PATH"], **json.loads((FOLDER / "controller.env").read_text())},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    ready = {"readyReplicas": 1} if probe.returncode == 0 else {}
    print(json.dumps({"items": [*items, {"kind": "Deployment", "metadata": {}, "status": ready}]}))


def forward(service: str, ports: str) -> None:
    assert service == f"service/{NAME}", service
    near, far = (int(port or 0) for port in ports.split(":"))
    listener = socket.create_server(("127.0.0.1", near))
    with open(f"/run/netns/{NETWORK}") as network:
        assert ctypes.CDLL(None).setns(network.fileno(), 0) == 0
    print(f"Forwarding from 127.0.0.1:{listener.getsockname()[1]} -> {far}", flush=True)
    while True:
        one = listener.accept()[0]
        other = socket.create_connection(("127.0.0.1", far))
        for ends in ((one, other), (other, one)):
            threading.Thread(target=copy, args=ends, daemon=True).start()


def copy(source: socket.socket, target: socket.socket) -> None:
    try:
        while part := source.recv(1 << 16):
            target.sendall(part)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        source.close()
        target.close()


def delete() -> None:
    for process in json.loads(PODS.read_text()).values():
        os.killpg(process, signal.SIGTERM)
    FOLDER.joinpath("deleted").touch()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["apply", "-f", "-"]:
            apply()
        case ["get", "deployments,pods", *_]:
            get()
        case ["port-forward", service, ports]:
            forward(service, ports)
        case ["delete", "-f", "-", *_]:
            delete()
        case other:
            raise SystemExit(f"kubectl is not asked for {other} here")
