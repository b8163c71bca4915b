"""Checks that imports follow the layers.

Crates: base <- ir, topology <- cost <- {place, plan} <- route <- control <- {sim, run} <- ifrt
<- py; ir, topology <- protocol <- control; transport <- run. Python: only ``fairway.host`` and the
adapters of jaxlib's client side use jaxlib's internals, code that runs on hosts does not import
cluster or command line, and the product does not import the studies of the papers. A visible type
has a unique name.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CRATES = {
    "fuzzing": set(),
    "base": set(),
    "ir": {"base"},
    "topology": {"base"},
    "cost": {"base", "ir", "topology"},
    "place": {"base", "ir", "topology", "cost"},
    "plan": {"base", "ir", "topology", "cost"},
    "route": {"base", "ir", "topology", "cost", "plan"},
    "protocol": {"base", "ir", "topology"},
    "control": {"base", "ir", "topology", "place", "route", "protocol"},
    "sim": {"base", "ir", "topology", "place", "route", "protocol", "control"},
    "transport": set(),
    "run": {"base", "ir", "topology", "cost", "plan", "route", "protocol", "control", "transport"},
    "ifrt": {"base", "ir", "topology", "route", "protocol", "control", "run", "transport"},
    "py": {
        "base", "ir", "topology", "cost", "place", "plan", "route", "protocol", "control", "sim",
        "run", "ifrt", "transport",
    },
}  # fmt: skip
"""Crates that each crate may depend on."""

FORBIDDEN = {
    "fairway.host": {"fairway.cli", "fairway.cluster"},
    "fairway.errors": {"fairway"},
    "fairway.shards": {"fairway"},
    "fairway.settings": {"fairway.cli", "fairway.cluster", "fairway.host"},
    "fairway.cluster": {"fairway.cli"},
    "fairway.cluster.launchers": {"fairway.cluster.supervisor"},
    "fairway.formats": {"fairway.cli", "fairway.cluster", "fairway.host"},
}
"""Modules that each module, including its submodules, may not import."""

ONLY_FROM = {
    "fairway.studies": {
        "fairway.cli",
        # Below: modules that run workloads by name. An entry goes when they take programs instead.
        "fairway.placement.simulating",
        "fairway.routes",
        "fairway.simulation",
    },
}
"""Modules that only these modules, and their own submodules, may import."""

VISIBLE_TYPE = re.compile(
    r"^ *pub(?:\([^)]*\))? (?:struct|enum|type|trait|union) (\w+)", re.MULTILINE
)
"""The definition of a type visible to other modules; types of trait impls are not marked public."""

PROSE = ("crates", "python", "docs", "tests", "benchmarks", "examples", "README.md")
"""Where words are checked."""
PRIVATE = re.compile(r"\b(whoever|somebody|nobody|so many|tells? each other)\b", re.IGNORECASE)
"""Words that never name a thing: a host, a client, a rank, a number of them."""
NAMES = {("docs/reference/settings.md", "nobody")}
"""Where one is a name: that of a Unix user."""

JAX_INTERNALS = ("jaxlib", "jax._src")
TOUCH_INTERNALS = ("fairway.host", "fairway.plugin", "fairway.mpmd", "fairway.propagation")


def crate_errors() -> list[str]:
    """Returns dependencies of crates that violate the layers."""
    errors = []
    for manifest in sorted((ROOT / "crates").glob("*/Cargo.toml")):
        name = manifest.parent.name
        if name not in CRATES:
            errors.append(f"crate {name} has no place in the layers; give it one in {__file__}")
            continue
        used = set(tomllib.loads(manifest.read_text()).get("dependencies", {})) & set(CRATES)
        errors += [f"crate {name} may not use {other}" for other in sorted(used - CRATES[name])]
    return errors


def imports(path: Path) -> set[str]:
    """Returns the modules that a file imports, at any nesting level."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def is_below(module: str, top: str) -> bool:
    """Returns whether ``module`` is the module ``top`` or inside it."""
    return module == top or module.startswith(f"{top}.")


def closed_errors(module: str, used: set[str]) -> list[str]:
    """Returns imports of modules that are open to some others only."""
    return [
        f"{module} may not import {name}; only {', '.join(sorted(users))} may"
        for closed, users in ONLY_FROM.items()
        if not any(is_below(module, user) for user in {closed, *users})
        for name in sorted(used)
        if is_below(name, closed)
    ]


def python_errors() -> list[str]:
    """Returns imports of Python modules that violate the layers."""
    errors = []
    for path in sorted((ROOT / "python").rglob("*.py")):
        parts = path.relative_to(ROOT / "python").with_suffix("").parts
        module = ".".join(parts).removesuffix(".__init__")
        used = imports(path)
        for top, forbidden in FORBIDDEN.items():
            if not is_below(module, top):
                continue
            bad = {name for name in used for other in forbidden if is_below(name, other)}
            errors += [f"{module} may not import {name}" for name in sorted(bad)]
        errors += closed_errors(module, used)
        if not any(is_below(module, top) for top in TOUCH_INTERNALS):
            bad = {name for name in used if name.startswith(JAX_INTERNALS)}
            errors += [f"{module} may not touch {name}" for name in sorted(bad)]
    return errors


def name_errors() -> list[str]:
    """Returns names of visible types that several files define: each name must be unique."""
    places: dict[str, list[str]] = {}
    for path in sorted((ROOT / "python").rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(f"fairway.{node.name}", []).append(str(path.relative_to(ROOT)))
    for path in sorted((ROOT / "crates").glob("*/src/**/*.rs")):
        for name in VISIBLE_TYPE.findall(path.read_text()):
            places.setdefault(name, []).append(str(path.relative_to(ROOT)))
    twice = {name: found for name, found in places.items() if len(found) > 1}
    return [f"type {name} is defined in {' and in '.join(found)}" for name, found in twice.items()]


def word_errors() -> list[str]:
    """Words of a private language, which readers of the field would not search for."""
    errors = []
    for path in sorted(ROOT.rglob("*")):
        parts = path.relative_to(ROOT).parts
        if path.suffix not in (".rs", ".py", ".pyi", ".md") or parts[0] not in PROSE:
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            found = [word for word in PRIVATE.findall(line) if ("/".join(parts), word) not in NAMES]
            errors += [
                f"{'/'.join(parts)}:{number} says {word!r}; name the thing" for word in found
            ]
    return errors


def main() -> int:
    """Prints violations of the layers; returns the exit status."""
    errors = crate_errors() + python_errors() + name_errors() + word_errors()
    for error in errors:
        print(f"layers: {error}", file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    raise SystemExit(main())
