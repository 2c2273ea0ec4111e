"""What a run prints."""

from __future__ import annotations

import io

import pytest

from fadejax.train.progress import Progress, duration, evaluation_rows, final_table

BEFORE = {"step": 0, "eval/pass@8": 0.25, "eval/pass@1": 0.0625, "eval/greedy": 0.1}
AFTER = {"step": 9, "eval/pass@8": 0.75, "eval/pass@1": 0.5, "eval/entropy": 0.5, "solve_rate": 1.0}


class Clock:
  def __init__(self):
    self.now = 0.0

  def __call__(self) -> float:
    return self.now


class Terminal(io.StringIO):
  def isatty(self) -> bool:
    return True


@pytest.mark.parametrize(
  ("seconds", "text"),
  [(0.4, "0s"), (59.6, "1m00s"), (312, "5m12s"), (3599.7, "1h00m"), (11220, "3h07m")],
)
def test_duration(seconds, text):
  assert duration(seconds) == text


def test_time_left_leaves_out_the_step_that_compiles():
  clock, stream = Clock(), io.StringIO()
  with Progress(5, stream=stream, clock=clock) as progress:
    assert progress.time_left() is None
    clock.now = 100.0
    progress.update({"step": 1, "solve_rate": 0.5})
    assert progress.time_left() == 400.0  # all that is known: 100 s a step, 4 to go
    clock.now = 110.0
    progress.update({"step": 2})
    clock.now = 120.0
    progress.update({"step": 3})
    assert progress.time_left() == 20.0  # 10 s a step, 2 to go


def test_time_left_after_a_resume_counts_only_this_process():
  clock = Clock()
  with Progress(10, start_step=6, stream=io.StringIO(), clock=clock) as progress:
    for step in (7, 8):
      clock.now += 3.0
      progress.update({"step": step})
    assert progress.time_left() == 6.0


def test_one_line_a_step_without_a_terminal():
  stream = io.StringIO()
  with Progress(12, stream=stream, clock=Clock()) as progress:
    progress.update(BEFORE)
    progress.update({"step": 1, "solve_rate": 0.5, "entropy": float("nan"), "alpha": 3})
  first, second = stream.getvalue().splitlines()
  assert first == "step  0/12 pass@1 0.062, pass@8 0.250, greedy accuracy 0.100"
  assert second == "step  1/12 solve 0.50 entropy – α 3.00 δ – – tok/s left 0s"


def test_a_skipped_update_is_said():
  stream = io.StringIO()
  with Progress(2, stream=stream) as progress:
    progress.update({"step": 1, "solve_rate": 0.5, "update_skipped": 1})
  assert "UPDATE SKIPPED" in stream.getvalue()


def test_the_bar_of_a_terminal(monkeypatch):
  monkeypatch.setenv("TERM", "xterm")
  monkeypatch.setenv("COLUMNS", "80")
  monkeypatch.delenv("NO_COLOR", raising=False)
  stream = Terminal()
  with Progress(3, stream=stream) as progress:
    progress.update(BEFORE)
    progress.update({"step": 1, "solve_rate": 0.5, "tokens_per_s": 412.4})
  assert "step 0: pass@1 0.062" in stream.getvalue()
  assert "1/3" in stream.getvalue() and "solve 0.50" in stream.getvalue()
  assert "412 tok/s" in stream.getvalue()


def test_evaluation_rows_are_ordered_by_k():
  rows = {"eval/pass@64": 0.9, "eval/pass@8": 0.5, "eval/pass@1": 0.25, "eval/add/pass@2": 1.0}
  assert [label for label, _, _ in evaluation_rows(rows, {})] == ["pass@1", "pass@8", "pass@64"]
  assert evaluation_rows(BEFORE, AFTER)[0] == ("pass@1", 0.0625, 0.5)


def test_final_table_holds_before_after_and_change():
  stream = io.StringIO()
  final_table(BEFORE, AFTER, stream)
  lines = {
    line.split("│")[1].strip(): line.split("│")
    for line in stream.getvalue().splitlines()
    if line.startswith("│")
  }
  assert [cell.strip() for cell in lines["pass@1"][2:5]] == ["0.062", "0.500", "+0.438"]
  assert [cell.strip() for cell in lines["greedy accuracy"][2:5]] == ["0.100", "–", "–"]
  assert [cell.strip() for cell in lines["entropy (nats)"][2:5]] == ["–", "0.500", "–"]
