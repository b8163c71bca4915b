"""A pytest plugin that puts the hosts of tests on other machines; the tests stay as they are.

Every run whose settings say ``local`` gets the launcher of ``--hosts-on`` instead, streams as its
data plane, and a gateway at ``--gateway``. Lost islands stay lost, as those of this machine do,
until a test adds them: that launchers replace them has tests of its own. Tests marked ``local`` are
about what only processes of this machine have; they are left out, and the reasons are printed. Use:
``tests/on_machines.py``.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from fairway.cluster import supervisor
from fairway.cluster.supervisor import Run
from fairway.settings import Settings

MARK = "local"
NEVER_S = 1e6
LEFT_OUT = pytest.StashKey[Counter[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options."""
    group = parser.getgroup("hosts")
    group.addoption("--hosts-on", metavar="ON", help="what runs hosts, as the setting `on`")
    group.addoption("--gateway", metavar="ADDRESS:PORT", help="where machines reach this one")


def elsewhere(settings: Settings, on: str, gateway: str) -> Settings:
    """Returns the same settings with hosts on other machines, if they say nothing on that."""
    if not settings.is_local:
        return settings
    return settings.replace(on=on, gateway=settings.gateway or gateway, data_plane="tcp")


@pytest.fixture(scope="session", autouse=True)
def _hosts_elsewhere(request: pytest.FixtureRequest) -> Iterator[None]:
    """Changes the settings of runs in this process, and of ``fairway up`` in others."""
    on, gateway = (request.config.getoption(name) for name in ("--hosts-on", "--gateway"))
    assert on, "--hosts-on says where hosts are"
    assert gateway, "--gateway says where machines reach this one"
    up = sys.modules["conftest"].Up
    run_init, up_init = Run.__init__, up.__init__

    @functools.wraps(run_init)
    def start_run(run: Run, settings: Settings, *arguments: Any, **named: Any) -> None:
        run_init(run, elsewhere(settings, on, gateway), *arguments, **named)

    @functools.wraps(up_init)
    def start_up(self: Any, *arguments: str, **named: Any) -> None:
        up_init(self, *arguments, "--on", on, "--gateway", gateway, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "__init__", start_run)
        patch.setattr(up, "__init__", start_up)
        patch.setattr(supervisor, "REPLACE_EVERY_S", NEVER_S)
        yield


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out tests marked ``local``."""
    marked = [(item, item.get_closest_marker(MARK)) for item in items]
    config.stash[LEFT_OUT] = Counter(mark.args[0] for _, mark in marked if mark)
    config.hook.pytest_deselected(items=[item for item, mark in marked if mark])
    items[:] = [item for item, mark in marked if not mark]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Prints why tests were left out."""
    for reason, count in sorted(config.stash[LEFT_OUT].items()):
        terminalreporter.write_line(f"{count} tests left out: {reason}")
