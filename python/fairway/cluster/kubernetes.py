"""A cluster in Kubernetes, as long as the context lasts, reached as if it were on this machine."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Self

from fairway import children
from fairway.cluster.admin import overview
from fairway.cluster.logs import Outputs
from fairway.cluster.manifests import INSTANCE, PORT, admin_token, as_yaml, instance_of
from fairway.cluster.remotes import RemoteCluster
from fairway.cluster.supervisor import client_environment
from fairway.errors import StartError
from fairway.interrupts import run_aside

__all__ = ["KUBECTL", "KubernetesCluster"]

KUBECTL = "FAIRWAY_KUBECTL"
"""Environment variable with a command instead of ``kubectl``."""
ANSWER_S = 60.0
LOOK_S = 2.0
FORWARD_S = 30.0
FORWARDING = re.compile(r"Forwarding from 127\.0\.0\.1:(\d+) ->")


class KubernetesCluster:
    """Applies the manifests of a cluster, waits for its hosts, and connects to its gateway.

    Args:
        manifests: what to apply.
        note: called with what Kubernetes says of pods that do not start.
        show: called with the numbers of pods that run and of all.
        check: called several times a second while this waits; an exception that it raises ends it.

    Raises:
        StartError: there is no ``kubectl``, the API server refuses the manifests, or the connection
            to the controller fails.
    """

    def __init__(
        self,
        manifests: list[dict[str, Any]],
        note: Callable[[str], None],
        show: Callable[[int, int], None],
        check: Callable[[], None],
    ) -> None:
        self._command = shlex.split(os.environ.get(KUBECTL, "kubectl"))
        self._text = as_yaml(manifests)
        self._name = instance_of(manifests)
        self._token = admin_token(manifests)
        self._note, self._show, self._check = note, show, check
        self._said: set[str] = set()
        self._outputs = Outputs()
        self._forward: _Forward | None = None
        self._remote: RemoteCluster | None = None
        try:
            self._kubectl("apply", "-f", "-", given=self._text)
            self._wait()
            self._connect()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def environment(self) -> dict[str, str]:
        """What clients of this machine need."""
        assert self._remote is not None
        return client_environment(self._remote.target)

    def overview(self) -> dict[str, Any]:
        """Returns the state of the cluster."""
        assert self._remote is not None
        return overview(self._remote.directory)

    def keep(self) -> None:
        """Connects anew if the connection through Kubernetes has ended, as with its pod.

        Raises:
            StartError: it cannot be made.
        """
        if self._forward is not None and self._forward.has_ended:
            self._note("the connection to the controller has ended; connecting again")
            self._connect()

    def close(self) -> None:
        """Deletes what was applied."""
        if self._remote is not None:
            self._remote.close()
        if self._forward is not None:
            self._forward.close()
        self._outputs.close()
        words = ("delete", "-f", "-", "--ignore-not-found", "--wait=false")
        try:
            self._run(words, self._text)
        except StartError as error:
            self._note(f"{error}; delete what has the label {INSTANCE}={self._name}")

    def _wait(self) -> None:
        """Waits until the controller is ready, which is when all hosts are up."""
        select = ("--selector", f"{INSTANCE}={self._name}")
        while True:
            listed = self._kubectl("get", "deployments,pods", *select, "--output", "json")
            items = json.loads(listed)["items"]
            pods = [one for one in items if one["kind"] == "Pod"]
            running = [one for one in pods if one["status"].get("phase") == "Running"]
            self._show(len(running), len(pods))
            for pod in pods:
                self._explain(pod)
            deployments = [one for one in items if one["kind"] == "Deployment"]
            if any(one["status"].get("readyReplicas") for one in deployments):
                return
            until = time.monotonic() + LOOK_S
            while time.monotonic() < until:
                self._check()
                time.sleep(0.1)

    def _explain(self, pod: dict[str, Any]) -> None:
        """Says once why a pod does not start: no room, no image, or it fails."""
        status, why = pod["status"], []
        why += [
            one.get("message")
            for one in status.get("conditions", ())
            if one.get("reason") == "Unschedulable"
        ]
        for container in status.get("containerStatuses", ()):
            waiting = container.get("state", {}).get("waiting") or {}
            if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
                why.append(": ".join(filter(None, (waiting["reason"], waiting.get("message")))))
        for text in why:
            said = f"pod {pod['metadata']['name']} does not start: {text}"
            if text and said not in self._said:
                self._said.add(said)
                self._note(said)

    def _connect(self) -> None:
        port = 0
        if self._forward is not None:
            port = self._forward.port
            self._forward.close()
        words = ("port-forward", f"service/{self._name}", f"{port or ''}:{PORT}")
        self._forward = _Forward([*self._command, *words], self._outputs)
        run_aside(self._forward.wait, self._check)
        if self._remote is None:
            address = f"127.0.0.1:{self._forward.port}"
            self._remote = RemoteCluster(address, self._token, self._check)

    def _kubectl(self, *words: str, given: str = "") -> str:
        return run_aside(lambda: self._run(words, given), self._check)

    def _run(self, words: Sequence[str], given: str) -> str:
        command = [*self._command, *words]
        try:
            found = subprocess.run(
                command,
                input=given,
                capture_output=True,
                text=True,
                timeout=ANSWER_S,
                check=True,
                start_new_session=True,  # Ctrl-C is for this process
            )
        except FileNotFoundError:
            raise StartError(
                f"there is no {command[0]} here; `fairway manifests` writes what to apply elsewhere"
            ) from None
        except (OSError, subprocess.SubprocessError) as error:
            said = (getattr(error, "stderr", None) or str(error)).strip()
            raise StartError(f"`{' '.join(command[:2])}` fails: {said}") from None
        return found.stdout


class _Forward:
    """A ``kubectl port-forward``, as long as it runs."""

    def __init__(self, command: list[str], outputs: Outputs) -> None:
        self._lines: list[str] = []
        self._heard = threading.Event()
        self.port = 0
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=children.environment(),
                start_new_session=True,
            )
        except OSError as error:
            raise StartError(f"cannot run {command[0]}: {error.strerror}") from error
        assert self._process.stdout is not None
        self._printed = outputs.follow(self._process.stdout, self._hear)

    def _hear(self, line: str) -> None:
        self._lines = [*self._lines, line][-8:]
        if found := FORWARDING.search(line):
            self.port = int(found[1])
            self._heard.set()

    def wait(self) -> None:
        """Waits until connections are forwarded.

        Raises:
            StartError: they are not.
        """
        deadline = time.monotonic() + FORWARD_S
        while not self._heard.wait(0.1):
            if self.has_ended or time.monotonic() > deadline:
                self._printed.wait(1.0)
                said = "\n".join(self._lines) or f"it says nothing for {FORWARD_S:g} s"
                raise StartError(f"`kubectl port-forward` fails: {said}")

    @property
    def has_ended(self) -> bool:
        """Whether it has ended."""
        return self._process.poll() is not None

    def close(self) -> None:
        """Ends it."""
        if not self.has_ended:
            self._process.kill()
        self._process.wait(5)
