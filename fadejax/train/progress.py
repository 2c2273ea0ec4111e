"""What a run shows on the screen: a line or a bar a step, and the table at its end."""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as RichProgress
from rich.table import Table


def evaluation_rows(
  before: Mapping[str, Any], after: Mapping[str, Any]
) -> list[tuple[str, float | None, float | None]]:
  """Lines of the before/after table, from two metrics rows that hold `eval/…` keys.

  Returns:
    (label, before, after) for each pass@k by rising k, greedy accuracy, entropy and
    truncated share that at least one of the rows has; None where a row has not.
  """
  ks = {int(m[1]) for key in {*before, *after} if (m := re.fullmatch(r"eval/pass@(\d+)", key))}
  labels = {f"pass@{k}": f"pass@{k}" for k in sorted(ks)}
  labels |= {
    "greedy": "greedy accuracy",
    "entropy": "entropy (nats)",
    "truncated_share": "truncated share",
  }
  keys = [(f"eval/{metric}", label) for metric, label in labels.items()]
  return [
    (label, before.get(key), after.get(key)) for key, label in keys if key in before or key in after
  ]


def final_table(
  before: Mapping[str, Any], after: Mapping[str, Any], stream: TextIO | None = None
) -> None:
  """Prints pass@k, greedy accuracy and entropy before and after training.

  Args:
    before: the first metrics row with `eval/…` keys.
    after: the last one.
    stream: where to; None is standard output.
  """
  table = Table(title=f"Evaluation, step {before.get('step')} and step {after.get('step')}")
  table.add_column("")
  for column in ("before", "after", "change"):
    table.add_column(column, justify="right")
  for label, first, last in evaluation_rows(before, after):
    change = "–" if first is None or last is None else f"{last - first:+.3f}"
    table.add_row(label, _number(first), _number(last), change)
  Console(file=stream or sys.stdout).print(table)


def _number(value: float | None, digits: int = 3) -> str:
  return "–" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def duration(seconds: float) -> str:
  """Seconds for people: 42s, 5m12s, 3h07m."""
  whole = round(seconds)
  if whole < 60:
    return f"{whole}s"
  if whole < 3600:
    return f"{whole // 60}m{whole % 60:02d}s"
  return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def step_text(row: Mapping[str, Any]) -> str:
  """The training metrics of a row that belong on the screen, in under 60 characters."""
  if "solve_rate" not in row:
    return ""
  skipped = " UPDATE SKIPPED" if row.get("update_skipped") else ""
  return (
    f"solve {_number(row['solve_rate'], 2)} entropy {_number(row.get('entropy'), 2)}"
    f" α {_number(row.get('alpha'), 2)} δ {_number(row.get('delta'), 2)}"
    f" {_number(row.get('tokens_per_s'), 0)} tok/s{skipped}"
  )


def evaluation_text(row: Mapping[str, Any]) -> str:
  """The evaluation metrics of a row, "" where it has none."""
  return ", ".join(f"{label} {_number(value)}" for label, value, _ in evaluation_rows(row, {}))


class Progress:
  """The screen of a run: a bar on a terminal, else one line a step.

  The time left is the mean wall time of this process's steps, the first one apart
  (it compiles), times the steps to go; evaluations and saves are in it.
  """

  def __init__(
    self,
    total_steps: int,
    start_step: int = 0,
    *,
    stream: TextIO | None = None,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Starts the display.

    Args:
      total_steps: the step at which the run ends.
      start_step: the step that it starts from (the restored one).
      stream: where to draw; None is standard output.
      clock: seconds, rising.
    """
    self._total = total_steps
    self._stream = stream or sys.stdout
    self._clock = clock
    self._first: tuple[int, float] | None = None  # step and time of the first update here
    self._last_step = start_step
    self._start = (start_step, clock())
    self._bar: RichProgress | None = None
    if self._stream.isatty():
      self._bar = RichProgress(
        MofNCompleteColumn(),
        BarColumn(bar_width=10),
        TextColumn("{task.fields[text]}", markup=False),
        console=Console(file=self._stream),
        refresh_per_second=2,
      )
      self._task = self._bar.add_task("", total=total_steps, completed=start_step, text="")
      self._bar.start()

  def time_left(self) -> float | None:
    """Seconds to go; None before the first update."""
    since = self._first if self._first and self._last_step > self._first[0] else self._start
    done = self._last_step - since[0]
    if done <= 0:
      return None
    return (self._clock() - since[1]) / done * (self._total - self._last_step)

  def update(self, row: Mapping[str, Any]) -> None:
    """Shows the row of a step that has just ended."""
    step = int(row["step"])
    if step > self._start[0] and self._first is None:
      self._first = (step, self._clock())
    self._last_step = max(step, self._last_step)
    left = self.time_left()
    text = step_text(row) + ("" if left is None else f" left {duration(left)}")
    evaluated = evaluation_text(row)
    if self._bar is not None:
      self._bar.update(self._task, completed=step, text=text, refresh=True)
      if evaluated:
        self._bar.console.print(f"step {step}: {evaluated}", markup=False, highlight=False)
      return
    line = f"step {step:>{len(str(self._total))}}/{self._total} {text}"
    if evaluated:
      line += f"{' | ' if text else ''}{evaluated}"
    print(line, file=self._stream, flush=True)

  def close(self) -> None:
    """Ends the display; the bar stays as it was last drawn."""
    if self._bar is not None:
      self._bar.stop()

  def __enter__(self) -> Progress:
    return self

  def __exit__(self, *_: Any) -> None:
    self.close()
