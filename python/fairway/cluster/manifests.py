"""The Kubernetes manifests of a cluster: what runs the controller, and what runs its hosts.

A JobSet has a Job for each island, whose pods are agents; a Deployment of one pod is the
controller, which they reach by a Service. A Secret has the controller's authority and tokens, made
here, so that agents know the controller before it starts, and it is the same after a new start.
"""

from __future__ import annotations

import dataclasses
import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from fairway.cluster.gateways import ControllerGateway
from fairway.cluster.logs import Logs
from fairway.cluster.reports import Reports
from fairway.errors import ConfigError
from fairway.settings import Settings

__all__ = [
    "INSTANCE",
    "PORT",
    "admin_token",
    "as_yaml",
    "cluster_manifests",
    "instance_of",
    "read_manifests",
]

PORT = 7000
"""Where the controller's gateway listens."""
INSTANCE = "app.kubernetes.io/instance"
"""Label with the name of a cluster."""
NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
"""Names that Services, and the Jobs and pods of a JobSet, may have, with room for what is added."""
STATE, SETTINGS = "/etc/fairway/state", "/etc/fairway/cluster.toml"
ADMIN, HOST = "admin-token", "host-token"
USER = 1000
WAIT_S = 86_400
"""Time for which agents look for a controller that is away."""
REPLACED_MAX = 1_000_000
"""Pods of an island that may be replaced, because they or their nodes failed."""
IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]*")
OF_MACHINES = ("timeline", "log_folder", "input_path", "allow_users", "listen", "nodes")
"""Settings of the controller's machine, which a pod has nothing of."""


def cluster_manifests(settings: Settings, image: str, name: str) -> list[dict[str, Any]]:
    """Returns the manifests of a cluster.

    Args:
        settings: of the cluster.
        image: with Fairway and what its hosts need (``deploy/Containerfile``).
        name: of the cluster, and of all objects.

    Raises:
        ConfigError: the name or the image is none for Kubernetes, or a setting is of one machine.
    """
    if NAME.fullmatch(name) is None:
        raise ConfigError(
            f"the cluster is named {name!r}; expected at most 40 lower-case letters, digits and "
            "hyphens, for Kubernetes"
        )
    if IMAGE.fullmatch(image) is None:
        raise ConfigError(f"the image is {image!r}; expected such as registry.example/fairway:0.2")
    default = {field.name: field.default for field in dataclasses.fields(Settings)}
    for setting in OF_MACHINES:
        if getattr(settings, setting) != default[setting]:
            raise ConfigError(f"{setting} is of one machine; expected none for Kubernetes")
    for number, island in enumerate(settings.islands):
        if island.prefix or island.channels:
            raise ConfigError(f"island {number} has a prefix or channels; Kubernetes has neither")
    labels = {"app.kubernetes.io/name": "fairway", INSTANCE: name}
    selector = {**labels, "app.kubernetes.io/component": "controller"}
    about = {"name": name, "labels": labels}
    return [
        _object("v1", "Secret", about, type="Opaque", stringData=_secrets()),
        _object("v1", "ConfigMap", about, data={Path(SETTINGS).name: _as_toml(settings)}),
        _object(
            "v1",
            "Service",
            about,
            spec={
                "selector": selector,
                "ports": [{"name": "gateway", "port": PORT, "targetPort": PORT}],
                # The controller is ready once all hosts have joined, by this Service.
                "publishNotReadyAddresses": True,
            },
        ),
        _object("apps/v1", "Deployment", about, spec=_controller(image, name, selector)),
        _object("jobset.x-k8s.io/v1alpha2", "JobSet", about, spec=_hosts(settings, image, about)),
    ]


def instance_of(manifests: list[dict[str, Any]]) -> str:
    """Returns the name of a cluster.

    Raises:
        ConfigError: they are not those of one.
    """
    for one in manifests:
        labels = one.get("metadata", {}).get("labels") or {}
        if one.get("kind") == "Deployment" and INSTANCE in labels:
            return str(labels[INSTANCE])
    raise ConfigError(f"the manifests have no Deployment with the label {INSTANCE}")


def admin_token(manifests: list[dict[str, Any]]) -> str:
    """Returns the token of role ``admin``.

    Raises:
        ConfigError: there is none.
    """
    for one in manifests:
        token = (one.get("stringData") or {}).get(ADMIN)
        if one.get("kind") == "Secret" and isinstance(token, str):
            return token
    raise ConfigError(f"the manifests have no Secret with {ADMIN}")


def as_yaml(manifests: list[dict[str, Any]]) -> str:
    """Returns manifests as text that people read and edit."""
    return yaml.dump_all(manifests, Dumper=_Dumper, sort_keys=False)


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as such, and no references to what is written already."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, data: str) -> yaml.Node:
        style = "|" if "\n" in data else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style)


_Dumper.add_representer(str, _Dumper.represent_text)


def read_manifests(path: Path) -> list[dict[str, Any]]:
    """Reads manifests that were written by :func:`cluster_manifests`, and may have been edited.

    Raises:
        ConfigError: the file cannot be read, or has no manifests.
    """
    try:
        found = list(yaml.safe_load_all(path.read_text()))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is no YAML: {error}") from None
    if not found or not all(isinstance(one, dict) and "kind" in one for one in found):
        raise ConfigError(f"{path} has no manifests; `fairway manifests` prints them")
    return found


def _object(version: str, kind: str, about: dict[str, Any], **rest: Any) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": about, **rest}


def _secrets() -> dict[str, str]:
    """Returns the state of a controller that has not started yet, and the tokens in it."""
    with tempfile.TemporaryDirectory(prefix="fairway-") as folder:
        state, reports = Path(folder) / "state", Reports(Logs())
        try:
            gateway = ControllerGateway("127.0.0.1:0", Path(folder), state, reports)
            try:
                tokens = {
                    key: gateway.create_token(role, None, keep=True)
                    for key, role in ((ADMIN, "admin"), (HOST, "host"))
                }
            finally:
                gateway.close()
        finally:
            reports.close()
        return {path.name: path.read_text() for path in sorted(state.iterdir())} | tokens


def _controller(image: str, name: str, labels: Mapping[str, str]) -> dict[str, Any]:
    state = f"$XDG_STATE_HOME/fairway/{name}"
    command = (
        f'umask 077 && mkdir -p "{state}" "$XDG_RUNTIME_DIR" && cp {STATE}/*.* "{state}" && '
        f"exec fairway up --on pods --name {name} --gateway 0.0.0.0:{PORT} --config {SETTINGS}"
    )
    container = {
        "name": "controller",
        "image": image,
        "command": ["sh", "-c", command],
        "env": [
            {"name": "HOME", "value": "/tmp"},
            {"name": "XDG_STATE_HOME", "value": "/tmp/state"},
            {"name": "XDG_RUNTIME_DIR", "value": "/tmp/run"},
        ],
        "ports": [{"name": "gateway", "containerPort": PORT}],
        "readinessProbe": {
            "exec": {"command": ["fairway", "status", "--json"]},
            "periodSeconds": 5,
            "timeoutSeconds": 5,
            "failureThreshold": 3,
        },
        "resources": {"requests": {"cpu": "1", "memory": "1Gi"}},
        "securityContext": _confined(),
        "volumeMounts": [
            {"name": "state", "mountPath": STATE, "readOnly": True},
            {
                "name": "settings",
                "mountPath": SETTINGS,
                "subPath": Path(SETTINGS).name,
                "readOnly": True,
            },
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }
    volumes = [
        {"name": "state", "secret": {"secretName": name, "defaultMode": 0o440}},
        {"name": "settings", "configMap": {"name": name}},
        {"name": "tmp", "emptyDir": {}},
    ]
    return {
        "replicas": 1,
        "strategy": {"type": "Recreate"},  # never two controllers at a time
        "selector": {"matchLabels": dict(labels)},
        "template": {
            "metadata": {"labels": dict(labels)},
            "spec": {**_pod(), "containers": [container], "volumes": volumes},
        },
    }


def _hosts(settings: Settings, image: str, about: dict[str, Any]) -> dict[str, Any]:
    name = about["name"]
    jobs = []
    for number, island in enumerate(settings.islands):
        room: dict[str, Any] = {"requests": {"cpu": str(island.devices), "memory": "2Gi"}}
        if settings.platform == "cuda":
            room = {"limits": {"nvidia.com/gpu": str(island.devices)}}
        join = ["--join", f"{name}:{PORT}", "--island", str(number), "--wait", str(WAIT_S)]
        secret = {"secretKeyRef": {"name": name, "key": HOST}}
        container = {
            "name": "host",
            "image": image,
            "command": ["fairway", "host", *join],
            "env": [
                {"name": "FAIRWAY_TOKEN", "valueFrom": secret},
                {"name": "HOME", "value": "/tmp"},
                {"name": "XDG_RUNTIME_DIR", "value": "/tmp"},
            ],
            "resources": room,
            "securityContext": _confined(),
            "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
        }
        pod = {
            **_pod(),
            "restartPolicy": "OnFailure",
            "containers": [container],
            "volumes": [{"name": "tmp", "emptyDir": {}}],
        }
        job = {
            "parallelism": island.hosts,
            "completions": island.hosts,
            "completionMode": "Indexed",
            "backoffLimit": REPLACED_MAX,
            "template": {"metadata": {"labels": about["labels"]}, "spec": pod},
        }
        jobs.append({"name": f"island-{number}", "replicas": 1, "template": {"spec": job}})
    return {"replicatedJobs": jobs}


def _pod() -> dict[str, Any]:
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }


def _confined() -> dict[str, Any]:
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def _as_toml(settings: Settings) -> str:
    """Returns settings that are not the default ones as TOML, but for where hosts run."""
    lines = []
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if field.name in ("islands", "on", "gateway", "data_plane") or value == field.default:
            continue
        # Strings, numbers, booleans and lists of strings are the same in JSON and TOML.
        lines.append(f"{field.name} = {json.dumps(value)}")
    for island in settings.islands:
        lines += ["", "[[islands]]", f"hosts = {island.hosts}", f"devices = {island.devices}"]
    return "\n".join(lines).strip() + "\n"
