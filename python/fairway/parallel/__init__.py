"""Ways to train one model on many devices, as programs."""

from fairway.parallel.pipeline import Pipeline, Stage
from fairway.parallel.schedules import SCHEDULES, Kind, Task, bubble, schedule
from fairway.parallel.splits import Split, split

__all__ = [
    "SCHEDULES",
    "Kind",
    "Pipeline",
    "Split",
    "Stage",
    "Task",
    "bubble",
    "schedule",
    "split",
]
