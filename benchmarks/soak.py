"""Thousands of items, honest and hostile, through one pool: every verdict, and what is left behind.

Commands:  python benchmarks/soak.py                        (or make soak; minutes)
           python benchmarks/soak.py --flat --items=10000

Items are shuffled by --seed and carry the verdict that they must get (soak_items.py). The exit
status is 1 where a verdict is another, or where the run leaves a process, a control group, a
temporary file or an open file. --flat grades cheap honest items without recycling, which would hide
a leak, and prints the slope of resident memory over the second half of the run.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import soak_items
from soak_items import Case

from fadejax.verify import Verdict, VerifierPool, cgroup, sandbox
from fadejax.verify.process import WorkerProcess, local

TIMEOUT_S = 2.0
MEMORY_MB = 512
RECYCLE_AFTER = 400
SAMPLE_EVERY = 500  # items a call of `grade`: between calls memory is read


class Watched:
  """An executor that remembers its workers."""

  def __init__(self) -> None:
    self.workers: list[WorkerProcess] = []

  def __call__(self, arguments: Sequence[str]) -> WorkerProcess:
    self.workers.append(local(arguments))
    return self.workers[-1]


def resident_mb(pid: int) -> float:
  pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
  return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def descriptors(pid: int) -> int:
  return len(os.listdir(f"/proc/{pid}/fd"))


def processes(mark: str) -> Iterator[str]:
  """What runs in an environment with `mark`, and this process's children, zombies too."""
  for pid in filter(str.isdigit, os.listdir("/proc")):
    with contextlib.suppress(OSError, IndexError):
      name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition(")")
      state, parent = rest.split()[:2]
      marked = mark.encode() in Path(f"/proc/{pid}/environ").read_bytes()
      if marked or int(parent) == os.getpid():
        yield f"{name}) in state {state}"


def left_over(mark: str, workers: Sequence[WorkerProcess], scratch: Path) -> list[str]:
  """Processes, control groups and temporary files of this run that are still there."""
  deadline = time.monotonic() + 5
  while list(processes(mark)) and time.monotonic() < deadline:
    time.sleep(0.05)
  found = [f"process {line}" for line in processes(mark)]
  owners = {str(worker.pid) for worker in workers}
  for path in Path("/sys/fs/cgroup").rglob(f"{cgroup.GROUP}*-*"):
    if path.name.removeprefix(cgroup.GROUP).partition("-")[0] in owners:
      found.append(f"control group {path}")
  return found + [f"temporary file {path}" for path in scratch.iterdir()]


@dataclasses.dataclass
class Tally:
  """What came of every kind of item; verdicts are counted and let go, which keeps memory flat.

  Attributes:
    statuses: kind -> verdicts by status.
    right: verdicts with reward 1, by kind.
    wrong: a line for every verdict that is not as expected.
  """

  statuses: dict[str, collections.Counter[str]] = dataclasses.field(default_factory=dict)
  right: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
  wrong: list[str] = dataclasses.field(default_factory=list)

  def add(self, kind: str, case: Case, verdict: Verdict) -> None:
    self.statuses.setdefault(kind, collections.Counter())[verdict.status] += 1
    self.right[kind] += verdict.reward == 1.0
    expected = verdict.reward == case.reward and verdict.status in case.statuses
    if not expected or case.says not in verdict.detail:
      self.wrong.append(f"{kind}: {verdict} for {case.completion[:200]!r}")

  def table(self) -> Iterator[str]:
    """A line a kind: items, how many were right, verdicts by status."""
    yield f"{'kind':28}{'items':>6}{'right':>7}   statuses"
    for kind in [*soak_items.HONEST, *soak_items.ATTACKS]:
      if counts := self.statuses.get(kind):
        words = ", ".join(f"{status} {count}" for status, count in counts.most_common())
        yield f"{kind:28}{counts.total():6}{self.right[kind]:7}   {words}"


class Sample(NamedTuple):
  """Of one process, after so many items."""

  items: int
  pid: int
  resident_mb: float
  files: int  # open


def sample(items: int, pool: VerifierPool, watched: Watched) -> list[Sample]:
  """This process and every worker that lives; an item each first, so that one does."""
  pool.grade([("integer", "7", {"answer": 7})] * pool.workers)
  pids = [os.getpid(), *(worker.pid for worker in watched.workers if not worker.gone())]
  return [Sample(items, pid, resident_mb(pid), descriptors(pid)) for pid in pids]


def grade(
  cases: Sequence[tuple[str, Case]], pool: VerifierPool, watched: Watched
) -> tuple[Tally, list[Sample]]:
  """What came of the items, and memory from the first to the last."""
  tally, samples = Tally(), sample(0, pool, watched)
  for start in range(0, len(cases), SAMPLE_EVERY):
    part = cases[start : start + SAMPLE_EVERY]
    verdicts = pool.grade([(case.verifier, case.completion, case.problem) for _, case in part])
    for (kind, case), verdict in zip(part, verdicts, strict=True):
      tally.add(kind, case, verdict)
    samples += sample(start + len(part), pool, watched)
    print(f"  {start + len(part)} of {len(cases)}", file=sys.stderr)
  return tally, samples


def slope(samples: Sequence[Sample]) -> float:
  """KB a thousand items, by least squares, over the second half; NaN of a single sample."""
  if len(samples) < 2:
    return math.nan
  half = samples[-max(2, len(samples) // 2) :]
  items, sizes = [one.items for one in half], [one.resident_mb for one in half]
  return 1024 * 1000 * statistics.linear_regression(items, sizes).slope


def memory(samples: Sequence[Sample], slopes: bool) -> Iterator[str]:
  """A line on this process and one on the workers; with `slopes`, one on each worker."""
  mine = [one for one in samples if one.pid == os.getpid()]
  theirs = [one for one in samples if one.pid != os.getpid()]
  lives = [("this process", mine), ("workers", theirs)]
  if slopes:
    pids = sorted({one.pid for one in theirs})
    lives[1:] = [(f"worker {pid}", [one for one in theirs if one.pid == pid]) for pid in pids]
  for name, life in lives:
    first, last, most = life[0], life[-1], max(one.resident_mb for one in life)
    line = f"{name:14}{first.resident_mb:7.1f} MiB and {first.files} files at first, "
    line += f"{last.resident_mb:.1f} and {last.files} at last, {most:.1f} MiB at most"
    yield line + (f", slope {slope(life):+.0f} KB a 1000 items" if slopes else "")


def main() -> int:
  """Runs it; returns the exit status."""
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--items", type=int, default=2000)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--workers", type=int, default=os.cpu_count() or 2)
  parser.add_argument("--flat", action="store_true", help="cheap items: is memory flat?")
  options = parser.parse_args()
  if reason := sandbox.why_not():
    sys.exit(f"soak: {reason}")
  mark = os.environ[sandbox.OWNER] = f"soak-{os.getpid()}"  # inherited by all that is started
  cases = soak_items.mixed(options.items, options.seed, flat=options.flat)
  watched = Watched()
  memory_mb, recycle = (2**16, 2**31) if options.flat else (MEMORY_MB, RECYCLE_AFTER)
  pool = VerifierPool(
    options.workers, TIMEOUT_S, memory_mb=memory_mb, recycle_after=recycle, executor=watched
  )
  with tempfile.TemporaryDirectory() as scratch:
    os.environ["TMPDIR"] = tempfile.tempdir = scratch
    before, began = descriptors(os.getpid()), time.perf_counter()
    with pool:
      tally, samples = grade(cases, pool, watched)
    took = time.perf_counter() - began
    left = left_over(mark, watched.workers, Path(scratch))
    if (after := descriptors(os.getpid())) != before:
      left.append(f"open files: {before} before, {after} after")
  print("\n".join(tally.table()))
  for line in tally.wrong:
    print(f"NOT AS EXPECTED: {line}")
  for line in left:
    print(f"LEFT: {line}")
  print(f"{len(tally.wrong)} verdicts not as expected, {len(left)} things left behind")
  print("\n".join(memory(samples, options.flat)))
  print(
    f"{len(cases)} items in {took:.0f} s: {len(cases) / took:.1f} a second; {options.workers} "
    f"workers at a time, {len(watched.workers)} in all"
  )
  return 1 if tally.wrong or left else 0


if __name__ == "__main__":
  sys.exit(main())
