"""Fits the constants of an accelerator model to a few measured steps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fairway.placement.transformers import (
    Accelerator,
    Machine,
    Parallelism,
    Transformer,
    step_time,
)

__all__ = ["MeasuredStep", "errors", "fit"]

SPREAD = {
    "efficiency": 0.1,
    "narrow": 0.5,
    "passes": 0.3,
    "weights_passes": 0.5,
    "launch_s": 0.1,
    "straggle": 0.5,
    "unfused_s": 0.3,
    "reduces": 0.2,
    "update": 0.3,
    "head": 0.3,
    "overhead_s": 0.5,
    "reaches": 0.3,
    "sharpness": 0.2,
}
"""Expected relative deviation of each constant from its prior, so that few rows suffice
(regularization)."""
STEP = 1e-3
"""Relative step of numeric derivatives, large because times are whole nanoseconds."""
TRUST = 0.03
"""Relative error of a row that weighs as much as a constant one spread from its prior."""
OUTLIER = 0.05
"""Relative error beyond which rows weigh linearly, not quadratically (soft L1 loss)."""


@dataclasses.dataclass(frozen=True)
class MeasuredStep:
    """A measured step.

    Attributes:
        model: what was trained.
        cut: its parallelism.
        machine: its machine; only the data-sheet values of its accelerator are used.
        seconds: time of a step.
    """

    model: Transformer
    cut: Parallelism
    machine: Machine
    seconds: float


def fit(
    rows: Sequence[MeasuredStep], expected: Accelerator, reaches: float
) -> tuple[Accelerator, float]:
    """Fits constants by least squares of log errors.

    Args:
        rows: measured steps; few suffice.
        expected: prior of the constants.
        reaches: prior of the fraction of rates attained between servers.

    Returns:
        Both, fitted.

    Raises:
        PlacementError: a row cannot be predicted at all.
    """
    # Imported here, because the import is slow.
    from scipy.optimize import least_squares

    start = {name: getattr(expected, name, reaches) for name in SPREAD}
    logs = np.log(list(start.values()))
    spreads = np.array(list(SPREAD.values()))

    def residuals(values: np.ndarray) -> np.ndarray:
        with_ = _constants(dict(zip(SPREAD, np.exp(values), strict=True)), expected)
        errors = [math.log(_predicted_s(row, *with_) / row.seconds) for row in rows]
        return np.concatenate([errors, TRUST * (values - logs) / spreads])

    found = least_squares(residuals, logs, loss="soft_l1", f_scale=OUTLIER, diff_step=STEP)
    return _constants(dict(zip(SPREAD, np.exp(found.x), strict=True)), expected)


def errors(rows: Sequence[MeasuredStep], accelerator: Accelerator, reaches: float) -> list[float]:
    """Returns the relative error of each row's prediction; negative if it is too short."""
    return [_predicted_s(row, accelerator, reaches) / row.seconds - 1 for row in rows]


def _constants(values: dict[str, float], expected: Accelerator) -> tuple[Accelerator, float]:
    reaches = values.pop("reaches")
    changed: dict[str, Any] = dict(values)
    return dataclasses.replace(expected, **changed), reaches


def _predicted_s(row: MeasuredStep, accelerator: Accelerator, reaches: float) -> float:
    machine = dataclasses.replace(row.machine, accelerator=accelerator, reaches=reaches)
    return step_time(row.model, machine, row.cut).total_s
