"""Agents in pods, which Kubernetes starts, watches, and starts anew."""

from __future__ import annotations

from fairway.cluster.launchers.launcher import AgentEnding, AgentRequest

__all__ = ["PodsLauncher"]


class PodsLauncher:
    """Waits for agents; a Job of the manifests keeps as many as its island has hosts."""

    start_timeout_s = 86_400.0
    """Time within which nodes have room for the pods."""

    def start(self, request: AgentRequest) -> None:
        """Starts nothing: a pod whose agent or node has ended is replaced by its Job."""

    def watch(self) -> list[AgentEnding]:
        """Returns nothing: why a pod does not start, Kubernetes says."""
        return []

    def stop(self) -> None:
        """Ends nothing: agents end when they hear that their controller has."""
