"""What a task is: its settings, its problem records, and helpers that several tasks share.

A problem record is a plain dict: `id`, `prompt` (text or chat messages), `verifier`, `task`
(the task's name), and what the verifier needs.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class TaskConfig:
  """One task of a run.

  Raises:
    ValueError: a value out of its range, or a solve-rate bound without the rates.
  """

  name: str = "arithmetic"  # a name of data/tasks.py::TASKS
  path: str = ""  # training problems of `jsonl`: a .jsonl or .parquet file
  verifier: str = "math"  # of rows of `path` that name none
  system_prompt: str | None = None  # None: whatever the chat template does
  raw_prompt: bool = False  # no chat template (base models)
  template_args: dict[str, Any] = dataclasses.field(default_factory=dict)  # enable_thinking, …
  weight: float = 1.0  # share of the draws, relative to the other tasks of a mixture
  eval_problems: int = 64  # 0: all of eval_path
  eval_path: str = ""  # evaluation problems; "": held out from `path`
  options: dict[str, Any] = dataclasses.field(default_factory=dict)  # of this task; docs/data.md
  solve_rates: str = ""  # JSON of an earlier evaluation of the training problems
  min_solve_rate: float = 0.0  # training problems below it are dropped
  max_solve_rate: float = 1.0  # and above this one

  def __post_init__(self) -> None:
    if not self.weight > 0:
      raise ValueError(f"task.weight must be above 0, got {self.weight}")
    if self.eval_problems < 0:
      raise ValueError(f"task.eval_problems must be at least 0, got {self.eval_problems}")
    low, high = self.min_solve_rate, self.max_solve_rate
    if not 0 <= low <= high <= 1:
      raise ValueError(
        f"task.min_solve_rate {low} and task.max_solve_rate {high}: wanted 0 <= min <= max <= 1"
      )
    if (low > 0 or high < 1) and not self.solve_rates:
      raise ValueError("task.min_solve_rate and task.max_solve_rate need task.solve_rates")


class Source(Protocol):
  """Random access to records."""

  def __len__(self) -> int: ...

  def __getitem__(self, index: int, /) -> Record: ...


@dataclasses.dataclass(frozen=True)
class Task:
  """Where a run's problems come from.

  Attributes:
    name: of the metrics `solve_rate/<name>` and of every record's `task`.
    train: training problems; a generated one is as good as endless.
    eval: evaluation problems, none of which is ever among `train`.
    counts: what was left out: reason -> number of rows.
    demonstrations: a right completion of a record, for supervised warm-up; None if unknown.
    alphabet: every character of prompts and answers, for a character tokenizer; None if unknown.
    generated: `train` is made by index, not read, so it can be neither listed nor filtered.
  """

  name: str
  train: Source
  eval: Sequence[Record]
  counts: Mapping[str, int] = dataclasses.field(default_factory=dict)
  demonstrations: Callable[[Record], str] | None = None
  alphabet: str | None = None
  generated: bool = False


def stable_hash(text: str) -> int:
  """A 64-bit hash that is the same on every machine, Python and day."""
  return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def options_of(config: TaskConfig, defaults: Mapping[str, Any]) -> dict[str, Any]:
  """A task's options laid over their defaults.

  Raises:
    ValueError: an option that the task does not have; names the nearest.
  """
  for key in config.options:
    if key not in defaults:
      near = difflib.get_close_matches(key, defaults, n=1)
      hint = f"did you mean {near[0]!r}?" if near else f"it has {sorted(defaults)}"
      raise ValueError(f"task.options: the task {config.name!r} has no option {key!r}; {hint}")
  return {**defaults, **config.options}


def refuse_files(config: TaskConfig) -> None:
  """For a generated task: settings that only a data set has are errors, never ignored.

  Raises:
    ValueError: names the setting.
  """
  for field in ("path", "eval_path", "solve_rates"):
    if dataclasses.asdict(config)[field]:
      raise ValueError(f"task.{field}: the task {config.name!r} generates its problems")
  if config.eval_problems < 1:
    raise ValueError("task.eval_problems = 0 means all of a file; generated tasks want a number")


@dataclasses.dataclass(frozen=True)
class Generated:
  """Records made by index: `make(index)` is a pure function."""

  make: Callable[[int], Record]
  length: int = 2**30

  def __len__(self) -> int:
    return self.length

  def __getitem__(self, index: int, /) -> Record:
    return self.make(index)


def take_eval(candidates: Iterator[Record], count: int, where: str) -> list[Record]:
  """The first `count` candidates with different ids.

  Raises:
    ValueError: there are not that many; says how many there are.
  """
  found: dict[str, Record] = {}
  for record in candidates:
    found.setdefault(record["id"], record)
    if len(found) == count:
      return list(found.values())
  raise ValueError(
    f"task.eval_problems = {count}, but {where} gives only {len(found)} held-out problems; "
    "lower it or widen task.options"
  )
