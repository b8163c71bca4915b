"""Runs the steps of ``deploy/Containerfile`` without a container engine, in a folder with Debian.

Use: ``python dev/container.py ROOT``, as root, once ``make wheel`` has built the wheel. debootstrap
makes ``ROOT`` if it is not there; its Python stands for that of the image with which the recipe
begins. The steps see nothing of this machine but its network and certificates. The last one, a
script on two islands, runs as the recipe's user, who cannot write the folder.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
RECIPE = CHECKOUT / "deploy" / "Containerfile"
DEBIAN = "bookworm"
PACKAGES = "python3,python3-venv,ca-certificates"
PYTHON = "/opt/python"
"""Where the root folder has the Python of the image."""
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
SCRIPT = """
import jax, jax.numpy as jnp
print("sum", sum(float(jax.device_put(jnp.ones(4), one).sum()) for one in jax.devices()))
"""
ENTER = (
    'mount --rbind "$0" "$0"; mount -t proc proc "$0/proc"; mount --rbind /dev "$0/dev"; '
    'mount -t tmpfs none "$0/run"; mount -t tmpfs none "$0/var/tmp"; '
    'if [ "$1" = read-only ]; then mount -t tmpfs -o mode=1777 none "$0/tmp"; '
    'mount -o remount,ro,bind "$0"; fi; root="$0"; shift; exec chroot "$root" "$@"'
)


def make_root(root: Path) -> None:
    """Makes a folder with Debian, its Python, and what a network needs."""
    if not root.exists():
        bootstrap = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", DEBIAN]
        subprocess.run([*bootstrap, str(root)], check=True)
    for name in ("/etc/resolv.conf", str(CERTIFICATES)):
        shutil.copy(name, f"{root}{name}")
    for left in (f"{root}{PYTHON}", f"{root}/tmp/fairway"):  # by an earlier try
        shutil.rmtree(left, ignore_errors=True)
    inside(root, "python3", "-m", "venv", PYTHON)


def inside(root: Path, *words: str, user: str | None = None) -> str:
    """Runs a command in the folder, and returns what it prints.

    Args:
        root: the folder.
        words: the command.
        user: number of the user and group, for whom the folder cannot be written; None is root.
    """
    path = f"{PYTHON}/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    pip = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    pip.pop("PIP_FIND_LINKS", None)
    given = {"PATH": path, "HOME": "/nonexistent", **pip}
    variables = [f"{name}={value}" for name, value in given.items()]
    who = []
    if user is not None:
        who = ["setpriv", "--reuid", user, "--regid", user, "--clear-groups"]
    access = "writable" if user is None else "read-only"
    command = ["env", "-i", *variables, *who, *words]
    alone = ["unshare", "--mount", "--pid", "--fork", "--uts", "--ipc", "sh", "-ec", ENTER]
    found = subprocess.run(
        [*alone, str(root), access, *command], stdout=subprocess.PIPE, text=True, check=True
    )
    return found.stdout


def steps() -> list[list[str]]:
    """Returns the recipe's lines that do something, each with its keyword."""
    lines = RECIPE.read_text().replace("\\\n", " ").splitlines()
    return [line.split(None, 1) for line in lines if line and not line.startswith("#")]


def carry_out(root: Path) -> str:
    """Carries out the recipe's steps; returns the user for whom the image is."""
    user = "0"
    for keyword, rest in steps():
        print(f"{keyword} {rest}", flush=True)
        match keyword:
            case "COPY":
                *sources, target = rest.split()
                folder = Path(f"{root}{target}")
                folder.mkdir(parents=True, exist_ok=True)
                for path in (path for one in sources for path in CHECKOUT.glob(one)):
                    shutil.copy(path, folder)
            case "RUN":
                print(inside(root, "sh", "-c", f"PACKAGES=; {rest}"), end="")
            case "USER":
                user = rest.split(":")[0]
            case "CMD":
                print(inside(root, "fairway", "--help", user=user)[:400])
    return user


def run_script(root: Path, user: str) -> str:
    """Runs a script on two islands, and returns what it prints."""
    with tempfile.NamedTemporaryFile("w", dir=root / "opt", suffix=".py") as script:
        script.write(SCRIPT)
        script.flush()
        os.chmod(script.name, 0o644)
        path = f"/opt/{Path(script.name).name}"
        return inside(root, "fairway", "run", "--islands", "2x1x2", path, user=user)


def main() -> int:
    """Makes the root folder, carries out the steps, and runs a script as the recipe's user."""
    if len(sys.argv) != 2 or os.geteuid():
        print(__doc__, file=sys.stderr)
        return 2
    root = Path(sys.argv[1]).resolve()
    try:
        make_root(root)
        found = run_script(root, carry_out(root))
    except subprocess.CalledProcessError as error:
        print(f"a step ended with status {error.returncode}", file=sys.stderr)
        return 1
    print(found, end="")
    return 0 if "sum 16.0" in found else 1


if __name__ == "__main__":
    sys.exit(main())
