"""Parallelism strategies for training one model on many devices, as programs."""

from fairway.parallel.experts import Experts
from fairway.parallel.parts import Stage
from fairway.parallel.pipeline import Pipeline
from fairway.parallel.replicas import Replicas
from fairway.parallel.schedules import SCHEDULES, PassKind, ScheduleTask, bubble, schedule
from fairway.parallel.sharded import Sharded
from fairway.parallel.splits import Split, split

__all__ = [
    "SCHEDULES",
    "Experts",
    "PassKind",
    "Pipeline",
    "Replicas",
    "ScheduleTask",
    "Sharded",
    "Split",
    "Stage",
    "bubble",
    "schedule",
    "split",
]
