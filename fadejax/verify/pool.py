"""VerifierPool: grades items in worker processes, in order, one verdict each, whatever happens.

Source for the shape (spawned workers, accelerators hidden, recycling, kill and replace):
MaxText's math-verify pool; unlike it, a crash of the grader is never a score of 0.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import math
import os
import select
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

from fadejax.verify import walls
from fadejax.verify.frames import frame, warm_key
from fadejax.verify.graders import check_name
from fadejax.verify.process import Executor, Worker, local
from fadejax.verify.verdict import Verdict

Item = tuple[str, str, dict[str, Any]]

WALL_FACTOR = 4.0  # wall deadline of an item, in units of its CPU deadline
LITTLE_CPU = 0.5  # an item at its wall deadline with less than this share of its CPU: busy machine
START_LIMIT_S = 120.0  # wall time for a worker to start, or to import a grader
POLL_S = 0.05
GROWN = 0.5  # share of its memory that a worker may keep between items: the next one has the rest
START_FAILURES = 3  # in a row: the installation is broken, not the item


@dataclasses.dataclass
class _Job:
  """One item on its way to a verdict."""

  index: int
  attempts: int = 0  # crashes so far
  alone: bool = False  # hit its wall deadline among others: gets the machine to itself


@dataclasses.dataclass(eq=False)
class _Slot:
  """A worker, and what the pool knows of it."""

  worker: Worker
  ready: bool = False
  broken: bool = False  # it answered what was not asked
  warmed: set[str] = dataclasses.field(default_factory=set)  # imported, see `frames.warm_key`
  graded: int = 0
  base_mb: float = 0.0  # resident after its last import


@dataclasses.dataclass
class _Running:
  """A slot's item; `since` and `cpu` are the zero of its clocks, in seconds."""

  job: _Job
  limit_s: float  # of CPU time
  since: float
  cpu: float | None
  grading: bool  # False while the worker starts or imports the grader: that is not the item's


def _kill_all(owner: int, slots: list[_Slot]) -> None:
  if os.getpid() == owner:  # a forked child must not kill its parent's workers
    while slots:
      slots.pop().worker.kill()


def program_s(name: str, problem: dict[str, Any]) -> float:
  """CPU seconds that an item may use in a sandbox, whose limits are its own; 0 for most.

  Of a record that its grader will refuse, any number.
  """
  if name != "code":
    return 0.0
  from fadejax.verify.sandbox import Limits

  tests: Any = problem.get("tests")
  try:
    if isinstance(tests, str):
      tests = json.loads(tests) if "time_limit_s" in tests else {}
    limit = float(tests["time_limit_s"])
  except (KeyError, TypeError, ValueError, OverflowError):
    limit = Limits.cpu_s
  return limit if 0 < limit < math.inf else 0.0


class VerifierPool:
  """Grades in persistent worker processes. Thread-safe; calls are served one after another.

  Args:
    workers: number of worker processes, each with one item at a time.
    timeout_s: CPU seconds an item may use; a program (`code`) has the `time_limit_s` of its
      tests besides. The wall deadline is `WALL_FACTOR` times that; an item that hits the wall
      with little CPU used runs once more, alone, before it is a `timeout`.
    memory_mb: resident MiB a worker may reach; an item that exceeds it is a `memory` verdict.
    recycle_after: items after which a worker is replaced, which bounds leaks in graders; one that
      has kept half of `memory_mb` is replaced at once.
    warm: verifier names whose modules a worker imports when it starts; the others are
      imported at their first item, outside that item's deadline.
    executor: starts a worker, see `process.Executor`; the default is a process of this machine.

  Workers start with the first item. Raises ValueError for settings that are not positive.
  """

  def __init__(
    self,
    workers: int = 2,
    timeout_s: float = 10.0,
    *,
    memory_mb: int = 2048,
    recycle_after: int = 2000,
    warm: Sequence[str] = (),
    executor: Executor = local,
  ):
    settings = {
      "workers": workers,
      "timeout_s": timeout_s,
      "memory_mb": memory_mb,
      "recycle_after": recycle_after,
    }
    for name, value in settings.items():
      if not value > 0:
        raise ValueError(f"VerifierPool: {name} must be positive, got {value!r}")
    for name in warm:
      check_name(name)
    self.workers, self.timeout_s, self.memory_mb = workers, timeout_s, memory_mb
    self.recycle_after, self.warm = recycle_after, tuple(warm)
    self._lock = threading.Lock()
    self._closed = False
    self._executor = executor
    self._slots: list[_Slot] = []
    self._start_failures = 0
    self._finalizer = weakref.finalize(self, _kill_all, os.getpid(), self._slots)

  def __enter__(self) -> VerifierPool:
    return self

  def __exit__(self, *exception: object) -> None:
    self.close()

  def close(self) -> None:
    """Kills and reaps every worker. Idempotent; a `grade` in another thread raises ValueError."""
    self._closed = True
    with self._lock:
      self._finalizer()

  def grade(self, items: Sequence[Item]) -> list[Verdict]:
    """One verdict per (verifier name, completion, problem record), in the order given.

    Whatever an item does to its worker becomes its own verdict: a grader or worker that
    crashes is tried once more on a fresh worker, then the item is a `grader_error`.

    Raises:
      ValueError: an unknown verifier name, or the pool is closed.
      TypeError: a completion that is not text, or a record that JSON cannot hold.
      RuntimeError: workers cannot be started at all.
    """
    for index, (name, completion, problem) in enumerate(items):
      check_name(name)
      if not isinstance(completion, str) or not isinstance(problem, dict):
        raise TypeError(
          f"item {index}: expected (name, completion text, problem dict), got "
          f"({name!r}, {type(completion).__name__}, {type(problem).__name__})"
        )
      try:
        frame(problem)
      except (TypeError, ValueError) as error:
        raise TypeError(f"item {index}: the problem record is not JSON data: {error}") from error
    with self._lock:
      if self._closed:
        raise ValueError("the VerifierPool is closed")
      run = _Run(self, items)
      try:
        return run.finish()
      finally:
        for slot in list(run.running):  # only after an exception, such as Ctrl-C
          self._drop(slot)

  def _start(self) -> _Slot:
    settings = [str(self.timeout_s), str(self.memory_mb), walls.chosen()]
    slot = _Slot(self._executor(["-m", "fadejax.verify.worker", *settings, *self.warm]))
    self._slots.append(slot)
    return slot

  def _drop(self, slot: _Slot) -> None:
    self._slots.remove(slot)
    slot.worker.kill()


class _Run:
  """One call of `grade`: hands out jobs, reads answers, enforces deadlines."""

  def __init__(self, pool: VerifierPool, items: Sequence[Item]):
    self.pool, self.items = pool, items
    self.verdicts: list[Verdict | None] = [None] * len(items)
    self.pending = collections.deque(_Job(index) for index in range(len(items)))
    self.lonely: collections.deque[_Job] = collections.deque()
    self.running: dict[_Slot, _Running] = {}

  def finish(self) -> list[Verdict]:
    """Runs until every item has its verdict."""
    while self.pending or self.lonely or self.running:
      if self.pool._closed:  # by another thread
        raise ValueError("the VerifierPool was closed")
      self._assign()
      busy = list(self.running)
      poller = select.poll()  # select() cannot hold descriptors over 1023
      for slot in busy:
        for descriptor, events in slot.worker.events().items():
          poller.register(descriptor, events)
      poller.poll(POLL_S * 1000)
      for slot in busy:
        self._listen(slot)
        if slot in self.running:
          self._check(slot)
    done = [verdict for verdict in self.verdicts if verdict is not None]
    assert len(done) == len(self.items)
    return done

  def _assign(self) -> None:
    idle = [slot for slot in self.pool._slots if slot not in self.running]
    for slot in idle:
      spent = slot.graded >= self.pool.recycle_after or self._grown(slot)
      if spent or slot.broken or slot.worker.gone():
        self.pool._drop(slot)
    idle = [slot for slot in idle if slot in self.pool._slots]
    while self.pending and len(self.running) < self.pool.workers:
      self._give(self.pending.popleft(), idle)
    if self.lonely and not self.running:
      self._give(self.lonely.popleft(), idle)

  def _grown(self, slot: _Slot) -> bool:
    """Whether a leak in a grader would soon cost an item that is not at fault its verdict."""
    return slot.worker.resident_mb() - slot.base_mb > GROWN * self.pool.memory_mb

  def _give(self, job: _Job, idle: list[_Slot]) -> None:
    if idle and (job.attempts or job.alone):
      self.pool._drop(idle.pop())  # makes room for a fresh one
      slot = self.pool._start()
    else:
      slot = idle.pop() if idle else self.pool._start()
    name, completion, problem = self.items[job.index]
    limit_s = self.pool.timeout_s + program_s(name, problem)
    grading = warm_key(name, problem) in slot.warmed
    now, cpu = time.monotonic(), slot.worker.cpu_s()
    self.running[slot] = _Running(job, limit_s, now, cpu, grading)
    slot.worker.send({"id": job.index, "name": name, "completion": completion, "problem": problem})

  def _listen(self, slot: _Slot) -> None:
    """Takes what the worker says; a verdict, a crash or its end settles its item."""
    gone = slot.worker.gone()  # asked first: its last words may be a verdict
    for message in slot.worker.receive():
      running = self.running.get(slot)
      if "ready" in message:
        slot.ready, self.pool._start_failures = True, 0
        slot.warmed.update(self.pool.warm)
        self._restart_clock(slot)
      elif running is None or message.get("id") != running.job.index:
        slot.broken = True
      elif "start" in message:
        slot.warmed.add(self._key(running.job))
        self._restart_clock(slot)
      elif "error" in message:
        self._crashed(slot, str(message["error"]))
      else:
        self._settle(slot, Verdict(**message["verdict"]))
        slot.graded += 1
        if message["verdict"]["status"] == "memory":
          self.pool._drop(slot)
    if (gone or slot.broken) and slot in self.running:
      self._died(slot)

  def _key(self, job: _Job) -> str:
    name, _, problem = self.items[job.index]
    return warm_key(name, problem)

  def _restart_clock(self, slot: _Slot) -> None:
    """Start-up and imports are over: from here on the time is the item's, if it is its turn."""
    slot.base_mb = slot.worker.resident_mb()
    if (running := self.running.get(slot)) is not None:
      running.since, running.cpu = time.monotonic(), slot.worker.cpu_s()
      running.grading = self._key(running.job) in slot.warmed

  def _check(self, slot: _Slot) -> None:
    """Enforces the deadlines and the memory limit of a running item."""
    running, wall = self.running[slot], time.monotonic() - self.running[slot].since
    if wall < POLL_S / 2:
      return
    if not running.grading:
      if wall > START_LIMIT_S:
        self._died(slot)
      return
    limit = running.limit_s
    if slot.worker.resident_mb() > self.pool.memory_mb:
      detail = f"over {self.pool.memory_mb} MiB of memory"
      self._stop(slot, Verdict(0.0, "memory", detail))
      return
    now = slot.worker.cpu_s()
    cpu = wall if now is None or running.cpu is None else now - running.cpu
    if cpu > limit:
      kind = "wall" if running.cpu is None else "CPU"
      self._stop(slot, Verdict(0.0, "timeout", f"over {limit:g} s of {kind} time"))
    elif wall > WALL_FACTOR * limit:
      if cpu < LITTLE_CPU * limit and not running.job.alone:
        running.job.alone = True
        self.lonely.append(running.job)
        self._stop(slot, None)
      else:
        detail = f"over {WALL_FACTOR * limit:g} s of wall time ({cpu:.1f} s of CPU time)"
        self._stop(slot, Verdict(0.0, "timeout", detail))

  def _settle(self, slot: _Slot, verdict: Verdict) -> None:
    self.verdicts[self.running.pop(slot).job.index] = verdict

  def _stop(self, slot: _Slot, verdict: Verdict | None) -> None:
    job = self.running.pop(slot).job
    if verdict is not None:
      self.verdicts[job.index] = verdict
    self.pool._drop(slot)

  def _died(self, slot: _Slot) -> None:
    """The worker is gone, hung at its start, or broke the channel."""
    how = slot.worker.kill()
    if not slot.ready:
      self.pool._start_failures += 1
      if self.pool._start_failures >= START_FAILURES:
        raise RuntimeError(
          f"verifier workers do not start ({how}); run `python -m "
          "fadejax.verify.worker 10 2048` to see why"
        )
    self._crashed(slot, f"the worker died ({how})", blame=slot.ready)

  def _crashed(self, slot: _Slot, reason: str, *, blame: bool = True) -> None:
    """One retry on a fresh worker, then the item is a grader_error."""
    job = self.running.pop(slot).job
    self.pool._drop(slot)
    job.attempts += blame
    if job.attempts < 2:
      self.pending.appendleft(job)
      return
    detail = f"grader {self.items[job.index][0]} failed twice: {reason}"
    self.verdicts[job.index] = Verdict(None, "grader_error", detail)


@functools.cache
def _default_pool() -> VerifierPool:
  return VerifierPool(workers=1)


def grade(name: str, completion: str, problem: dict[str, Any]) -> Verdict:
  """One verdict from a default pool of one worker: bounded like any other.

  Raises:
    ValueError: an unknown verifier name.
  """
  return _default_pool().grade([(name, completion, problem)])[0]
