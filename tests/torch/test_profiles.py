"""A step that PyTorch's profiler recorded, placed."""

import json
from pathlib import Path

import torch
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile
from typer.testing import CliRunner

from fairway.cli import app
from fairway.formats.kineto import of_pytorch

WIDTH, SAMPLES = 256, 64


def record(folder: Path) -> tuple[Path, Path]:
    """Records an execution trace of one step on this processor, and the profile of the same run."""
    trace, found = folder / "trace.json", folder / "profile.json"
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    model = torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1], torch.nn.ReLU(), layers[2])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(SAMPLES, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    step()
    observer = ExecutionTraceObserver().register_callback(str(trace))
    with profile(activities=[ProfilerActivity.CPU], execution_trace_observer=observer) as recorded:
        step()
    recorded.export_chrome_trace(str(found))
    return trace, found


def test_a_step_that_was_recorded_is_placed(tmp_path: Path) -> None:
    trace, found = record(tmp_path)
    graph = of_pytorch(trace, found, SAMPLES)
    names = [op.name.split()[0] for op in graph.ops]
    # Three layers forward; two products of each backward, except one of the first; six updates.
    assert [names.count(f"aten::{name}") for name in ("linear", "mm", "add_")] == [3, 5, 6], names
    # All weights and biases, and the batch, are resident when the step begins.
    held = sum(op.resident for op in graph.ops)
    assert held >= 4 * (3 * (WIDTH * WIDTH + WIDTH) + SAMPLES * WIDTH)
    products = ("aten::linear", "aten::mm")
    assert all(op.times_ns[0] > 0 for op in graph.ops if op.name.startswith(products))
    arguments = ["place", str(trace), "--profile", str(found), "--samples", str(SAMPLES)]
    placed = CliRunner().invoke(app, [*arguments, "--fabric", "elect-flat:4", "--json"])
    assert placed.exit_code == 0, placed.output
    best = json.loads(placed.stdout)[0]
    assert best["batch"] == SAMPLES
    assert best["step_s"] >= best["bound_s"] > 0
