"""The judge that a process keeps from one problem to the next, since a sandbox takes time to start.

The judge runs no line of a program, and every problem's tests have a process of their own in it
(`inside/judge.py`). It is kept only after a task that ended well and left nothing behind; anything
else gets the next problem a new one.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Iterator
from typing import Any

from fadejax.verify import walls
from fadejax.verify.sandbox import Limits, Sandbox

TASKS = 100  # that one judge serves
# CPU seconds of all of them: they are added to this process's own when the judge ends, and must not
# cost the item of that moment its deadline.
CPU_S = 1.0

_kept: list[tuple[int, Sandbox]] = []  # at most one: (tasks served, judge)


@contextlib.contextmanager
def judge(limits: Limits, task: dict[str, Any]) -> Iterator[Sandbox]:
  """A judge at work on a task. Leave it after its report; an exception ends the judge.

  Args:
    limits: of this task alone.
    task: see `inside/judge.py::run`.

  Raises:
    SandboxError: none could be started.
    Stopped: it ended.
  """
  served, box = _take(limits)
  try:
    box.begin(task)
    yield box
  except BaseException:
    box.kill()
    raise
  if served + 1 < TASKS and box.cpu_s() < CPU_S and walls.chosen() != "none":
    _kept.append((served + 1, box))
  else:
    box.kill()


def _take(limits: Limits) -> tuple[int, Sandbox]:
  """(tasks served, judge): the kept one where it will do, else a new one."""
  if _kept:
    served, box = _kept.pop()
    if box.limits == limits and box.settled():
      return served, box
    box.kill()
  box = Sandbox("judge", limits)
  try:
    box.start({})
  except BaseException:
    box.kill()
    raise
  return 0, box


@atexit.register
def drop() -> None:
  """Ends the kept judge, if there is one."""
  while _kept:
    _kept.pop()[1].kill()


def forget() -> None:
  """In a forked child: the judge is the parent's."""
  _kept.clear()


os.register_at_fork(after_in_child=forget)
