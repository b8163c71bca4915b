"""Smoke tests of the benchmarks' workers: on plain JAX, with little work, and nothing measured."""

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
TASKS: dict[str, list[dict[str, Any]]] = {
    "pipelines_client.py": [
        {"do": "model", "blocks": 1, "width": 16, "sequence": 8, "rows": 2, "microbatches": 2,
         "seed": 0},
    ],
    "tenancy_client.py": [
        {"do": "compile", "micros": 100},
        {"do": "round", "micros": 100, "count": 4},
        {"do": "enqueue", "micros": 100, "seconds": 0.1, "ahead": 32},
    ],
}  # fmt: skip


@pytest.mark.parametrize("script", TASKS)
def test_workers_do_what_they_are_told(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    common: Any = importlib.import_module("common")
    environment = {
        **{name: value for name, value in os.environ.items() if name != "XLA_FLAGS"},
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    with common.Worker([sys.executable, script], environment) as worker:
        for task in TASKS[script]:
            worker.ask(**task)
