"""TASKS: the table from a task's name to its builder.

A builder is a function (TaskConfig, seed: int) -> Task. docs/data.md describes every task,
its options and the formats of files.
"""

from __future__ import annotations

from collections.abc import Callable

from fadejax.data.files import jsonl
from fadejax.data.generated import arithmetic, countdown, reasoning_gym
from fadejax.data.programs import human_eval, small_functions
from fadejax.data.records import Record, Source, Task, TaskConfig

__all__ = ["TASKS", "Record", "Source", "Task", "TaskConfig"]

TASKS: dict[str, Callable[[TaskConfig, int], Task]] = {
  "arithmetic": arithmetic,
  "countdown": countdown,
  "human_eval": human_eval,
  "jsonl": jsonl,
  "reasoning_gym": reasoning_gym,
  "small_functions": small_functions,
}
