"""Ways to train one model on many devices, as programs."""

from fairway.parallel.pipeline import Pipeline, Stage
from fairway.parallel.schedules import SCHEDULES, Kind, Task, bubble, schedule

__all__ = ["SCHEDULES", "Kind", "Pipeline", "Stage", "Task", "bubble", "schedule"]
