"""Runs tests with hosts on machines that a launcher reaches: namespaces with networks of their own.

Use: ``python tests/on_machines.py ssh|ray [ARGUMENTS OF PYTEST]``, as root.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / name) for name in ("tests", "benchmarks")]

import wires  # noqa: E402
from machines import Machines, Ray, have_ssh, networked, with_ssh  # noqa: E402

SLOTS = 32
"""Most hosts on a machine."""


class WideRay(Ray):
    """A Ray cluster with many hosts on each machine, and none beside the controller."""

    slots = (0, SLOTS)
    start_s = 300.0


def environment() -> dict[str, str]:
    """Variables of hosts, so that they run this code, and compile as quickly as others in tests.

    They find the modules of ``benchmarks`` as if they were installed.
    """
    path = [
        str(ROOT / "python"),
        str(ROOT / "benchmarks"),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
    return {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "PYTHONPATH": os.pathsep.join(path)}


def run_pytest(
    on: str, controller: str, prefix: Sequence[str], variables: Mapping[str, str]
) -> int:
    """Runs the tests, and returns the status.

    Args:
        on: what runs the hosts.
        controller: address of the controller's machine.
        prefix: of the command, which runs it there.
        variables: more for its environment.
    """
    own = os.pathsep.join([str(ROOT / "dev"), environment()["PYTHONPATH"]])
    where = ["--hosts-on", on, "--gateway", f"{controller}:0"]
    command = [sys.executable, "-m", "pytest", "-p", "hosts_elsewhere", *where, *sys.argv[2:]]
    given = {**os.environ, **variables, "PYTHONPATH": own}
    return subprocess.run([*prefix, *command], cwd=ROOT, env=given, check=False).returncode


INSTEAD_OF_SSH = """#!/bin/sh
for last; do :; done
while [ $# -gt 2 ]; do shift; done
exec nsenter --net=/run/netns/"$1" unshare --uts sh -c 'hostname "$0"; exec sh -c "$1"' "$1" "$last"
"""
"""Runs the last argument on the machine that is the one before."""


@contextmanager
def entered(folder: Path) -> Iterator[Machines]:
    """Two machines without an ssh server, and a command in place of ssh that enters them."""
    command = folder / "ssh"
    command.write_text(INSTEAD_OF_SSH)
    command.chmod(0o700)
    os.environ |= environment()
    with wires.joined(2, (None,)) as places:
        names = [place.name.format(rank=0) for place in places]
        addresses = [place.addresses[0].format(rank=0) for place in places]
        controller = addresses[0].rpartition(".")[0] + ".254"
        yield Machines(names, addresses, controller, str(command))


def on_ssh() -> int:
    """Runs the tests with hosts that ssh starts."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="s-")))
        making = with_ssh(folder, 2, environment()) if have_ssh() else entered(folder)
        machines = stack.enter_context(making)
        print(f"machines are reached by {machines.ssh}", flush=True)
        listed = folder / "hosts.txt"
        listed.write_text("\n".join(machines.names * SLOTS))  # hosts of an island alternate
        ssh = {"FAIRWAY_SSH": machines.ssh}
        return run_pytest(f"ssh:{listed}", machines.controller, (), ssh)


def on_ray() -> int:
    """Runs the tests beside the first node of a Ray cluster, with hosts on the two others."""
    os.environ |= environment()
    with networked(WideRay, 3) as ray:
        for name in ray.names:
            ray.join(name)
        return run_pytest(f"ray:{ray.address}", ray.addresses[ray.names[0]], ray.inside, {})


def main() -> int:
    """Runs tests on machines of the engine that is named first."""
    engines = {"ssh": on_ssh, "ray": on_ray}
    if sys.argv[1:2] and sys.argv[1] in engines:
        return engines[sys.argv[1]]()
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
