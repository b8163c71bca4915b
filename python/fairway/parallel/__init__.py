"""Parallelism strategies for training one model on many devices, as programs."""

from fairway.parallel.experts import Experts
from fairway.parallel.parts import Stage
from fairway.parallel.pipeline import Pipeline
from fairway.parallel.replicas import Replicas
from fairway.parallel.schedules import SCHEDULES, Kind, Task, bubble, schedule
from fairway.parallel.sharded import Sharded
from fairway.parallel.splits import Split, split

__all__ = [
    "SCHEDULES",
    "Experts",
    "Kind",
    "Pipeline",
    "Replicas",
    "Sharded",
    "Split",
    "Stage",
    "Task",
    "bubble",
    "schedule",
    "split",
]
