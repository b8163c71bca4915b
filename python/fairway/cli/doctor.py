"""``fairway doctor``: checks of this machine and installation."""

from __future__ import annotations

import json

from rich.text import Text

from fairway import __version__
from fairway.cli.consoles import results, working
from fairway.cli.options import Json
from fairway.doctor import Finding, Level, examine, report
from fairway.interrupts import run_aside

__all__ = ["check_machine"]


def check_machine(
    as_json: Json = False,
) -> None:
    """Check this machine and installation, and say what to do about each problem.

    Ends with 1 if something that Fairway needs is missing or does not work; warnings do not count.
    """
    with working("checking this machine") as work:
        findings = run_aside(lambda: examine(lambda name: work.update(text=f"checking {name}")))
    if as_json:
        print(json.dumps(_record(findings), indent=2))
    else:
        console = results()
        for line in report(findings):
            shown = Text(line)
            shown.highlight_regex("^ok", "green")
            shown.highlight_regex("^warning", "yellow")
            shown.highlight_regex("^problem", "bold red")
            console.print(shown, soft_wrap=True)
    if any(one.level is Level.PROBLEM for one in findings):
        raise SystemExit(1)


def _record(findings: list[Finding]) -> dict[str, object]:
    """Returns the findings as values that JSON has."""
    checks = [
        {"name": one.name, "level": one.level.value, "found": one.found, "try": one.advice}
        for one in findings
    ]
    return {"version": __version__, "checks": checks}
