"""The one way to run untrusted code: bubblewrap around it, limits on its whole tree, a deadline.

`Sandbox(script, limits)` starts a module of `inside/` behind the wall and talks to it in messages.
Outside it is one process group and one PID namespace: killing it leaves nothing. docs/verifiers.md
says what this protects against and what it does not.

Source for the list of attacks: public reports of other trainers' graders, in the tests.
"""

from __future__ import annotations

import compileall
import contextlib
import dataclasses
import fcntl
import functools
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fadejax.verify import cgroup, seccomp, walls
from fadejax.verify.cgroup import Cgroup
from fadejax.verify.inside import plain
from fadejax.verify.inside.plain import HEADER
from fadejax.verify.tree import Tree, children

KEYS = 10_000  # entries of the dicts of one message, which may be chosen to collide
FIRST_UID = 70_000  # of the users that programs run as where the trainer is root: two a process
UIDS = 100_000
POLL_S = 0.02
WALL_FACTOR = 4.0  # wall seconds, in units of the CPU limit, of a program that has the machine
GRACE_S = 2.0  # wall seconds to start
NEVER = 10.0  # wall limit whatever the machine does, in units of the other one
OWNER = "FADEJAX_OWNER"  # in bubblewrap's environment, to tell whose it is; not seen inside


@dataclasses.dataclass(frozen=True)
class Limits:
  """What one program and all its children may use."""

  cpu_s: float = 5.0  # of the whole tree
  memory_mb: int = 512  # resident, of the whole tree
  processes: int = 32
  file_mb: int = 16  # of one file, and of all scratch files together
  output_mb: float = 4.0  # read from it, over all messages
  files: int = 64  # open at once, a process

  def __post_init__(self) -> None:
    for field, value in dataclasses.asdict(self).items():
      if not 0 < value <= 1e9:
        raise ValueError(f"sandbox limit {field} must be above 0 and at most 1e9, got {value!r}")


class SandboxError(RuntimeError):
  """No sandbox could be started: the machine's fault, never a program's."""


class Stopped(Exception):
  """The program was stopped, or is gone; `status` is a verdict's."""

  def __init__(self, status: str, detail: str):
    super().__init__(detail)
    self.status, self.detail = status, detail


def why_not() -> str:
  """Why no program can be run here as chosen (`walls.choose`), or ""; tried once in a process."""
  return _why_not(walls.chosen())


@functools.cache
def _why_not(chosen: str) -> str:
  if sys.platform != "linux":
    return "running untrusted programs needs Linux and bubblewrap"
  if chosen == "none":
    return ""
  if shutil.which("bwrap") is None:
    return walls.INSTALL
  known = subprocess.run(["bwrap", "--help"], capture_output=True, text=True, check=False).stdout
  if "--size" not in known or "--perms" not in known:
    return "running untrusted programs needs bubblewrap 0.7 or newer, which bounds scratch space"
  try:
    compileall.compile_dir(walls.INSIDE, quiet=2)
    with Sandbox("candidate", Limits()) as box:
      box.start({"program": "", "form": "calls"})
      reply = box.receive()
  except (SandboxError, Stopped, OSError) as error:
    return (
      f"bubblewrap is installed and does not work here ({error}). Many containers forbid user "
      "namespaces: docs/verifiers.md, 'Where the sandbox does not start'"
    )
  return "" if reply == {"ready": True} else f"the sandbox answered {reply!r}"


@functools.cache
def adopt_orphans() -> None:
  """Makes this process the one that inherits orphaned descendants, so that it can reap them."""
  import ctypes

  set_child_subreaper = 36
  ctypes.CDLL(None).prctl(set_child_subreaper, 1, 0, 0, 0)
  cgroup.remove_orphaned()
  for path in Path(tempfile.gettempdir()).glob(f"{cgroup.GROUP}*-*"):  # of walls "none"
    if cgroup.orphaned(path):
      shutil.rmtree(path, ignore_errors=True)


class Sandbox:
  """One script of `inside/` behind the wall. Use as a context manager: leaving kills it all.

  Args:
    script: a module of `inside/`.
    limits: of its whole tree.
  """

  def __init__(self, script: str, limits: Limits):
    self.limits, self.began = limits, time.monotonic()
    self._buffer, self._read = bytearray(), 0
    self._first: list[int] = []  # the first process inside, by its number outside
    owner = os.environ.get(OWNER, str(os.getpid()))
    # A program and its judge at a time: two users, so that neither counts against the other.
    user = FIRST_UID + (2 * os.getpid() + (script == "judge")) % UIDS
    self._bare = walls.chosen() == "none"
    self._uid = user if os.geteuid() == 0 and not self._bare else 0
    mine = f"{cgroup.GROUP}{os.getpid()}-"
    self._scratch = tempfile.mkdtemp(prefix=mine) if self._bare else "/tmp"
    self._seen: dict[int, float] = {}  # CPU seconds by process, of those that are gone too
    self._before: Tree | None = None  # what it had used when its present task began
    self._cgroup = Cgroup(limits.memory_mb, limits.processes + 8)
    bpf = None if self._bare else seccomp.program()
    # Its stderr: the wall's own words, and what a judge and this process say aside. The lock closes
    # it for programs, a judge for the tests.
    self._aside, theirs = socket.socketpair()
    with contextlib.ExitStack() as stack:
      stack.enter_context(theirs)
      handle = None
      if bpf is not None:
        file = stack.enter_context(tempfile.TemporaryFile())
        file.write(bpf)
        file.seek(0)
        handle = file.fileno()
      environment = {"PATH": os.environ.get("PATH", "/usr/bin:/bin")}
      line = walls.bubblewrap(script, limits.file_mb, handle)
      if self._bare:
        line, environment = walls.bare(script), {**walls.ENVIRONMENT, "HOME": self._scratch}
      try:
        self.process = subprocess.Popen(
          self._cgroup.around(line),
          stdin=subprocess.PIPE,
          stdout=subprocess.PIPE,
          stderr=theirs.fileno(),
          env={**environment, OWNER: owner},
          pass_fds=() if handle is None else (handle,),
          start_new_session=True,
          bufsize=0,
        )
      except BaseException:
        self._aside.close()
        self._clear()
        raise
    assert self.process.stdin is not None and self.process.stdout is not None
    self._in, self._out = self.process.stdin, self.process.stdout
    os.set_blocking(self._in.fileno(), False)
    os.set_blocking(self._out.fileno(), False)

  def __enter__(self) -> Sandbox:
    return self

  def __exit__(self, *exception: object) -> None:
    self.kill()

  def kill(self) -> None:
    """Kills the tree and reaps it.

    The first process inside goes first: its namespace dies with it, and its parent, bubblewrap
    itself, ends by reaping it. So nothing is left to whoever inherits orphans here.
    """
    give_up = time.monotonic() + 2.0
    self._end_others()
    while self.process.poll() is None:
      self._end_others()
      for child in self._first or children(f"/proc/{self.process.pid}"):
        _kill(child)
      if time.monotonic() > give_up:
        _kill(self.process.pid)
      self._wait(0.05)  # it may not have started its first process yet
    # Where bubblewrap ended first, an orphan: ours, after `adopt_orphans`.
    for child in self._first:
      with contextlib.suppress(ChildProcessError):
        os.waitpid(child, 0)
    for pipe in (self._in, self._out, self._aside):
      with contextlib.suppress(OSError):
        pipe.close()
    self._reap_others()
    self._clear()

  def _end_others(self) -> None:
    """With nothing around it: kills its descendants, its control group and its process group.

    Those of the last two outlive the first process. Call it before that one is reaped, after which
    its number may be another's.
    """
    if not self._bare:
      return
    for pid in (*Tree(self.process.pid).own_cpu_s, *self._cgroup.members()):
      _kill(pid)
    if self.process.returncode is None:
      with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(self.process.pid, signal.SIGKILL)

  def _reap_others(self) -> None:
    """Those of its process group that this process inherited, and that are dying."""
    with contextlib.suppress(ChildProcessError):
      for _ in range(100 if self._bare else 0):
        if os.waitpid(-self.process.pid, os.WNOHANG)[0] == 0:
          time.sleep(0.01)

  def _clear(self) -> None:
    self._cgroup.remove()
    if self._bare:
      shutil.rmtree(self._scratch, ignore_errors=True)

  def _wait(self, seconds: float) -> None:
    """Waits for its end; `Popen.wait` would sleep between looks."""
    try:
      handle = os.pidfd_open(self.process.pid)
    except OSError:  # a kernel before 5.3
      with contextlib.suppress(subprocess.TimeoutExpired):
        self.process.wait(seconds)
      return
    select.select([handle], [], [], seconds)
    os.close(handle)

  def fileno(self) -> int:
    """Readable when there is something to receive."""
    return self._out.fileno()

  def start(self, task: dict[str, Any]) -> None:
    """Hands over the task and waits until the inner lock has closed.

    Raises:
      SandboxError: it did not close. Nothing untrusted has run.
    """
    try:
      self.send({**task, "limits": self._inner_limits()})
      if self.receive() == {"locked": True}:
        self._first = children(f"/proc/{self.process.pid}")
        self.began = time.monotonic()
        return
      said = "its first word was another"
    except Stopped as stopped:
      said = self._last_words() or stopped.detail
    raise SandboxError(f"the sandbox did not start: {said}")

  def begin(self, task: dict[str, Any]) -> None:
    """Hands a judge its next task; the limits hold for each alone.

    Raises:
      Stopped: it is gone.
    """
    self._before = Tree(self.process.pid)
    self._seen = dict(self._before.own_cpu_s)
    self.began, self._read = time.monotonic(), 0
    try:
      self._aside.send(b".")  # until then it reads nothing, so that what is left over is seen
    except OSError:
      raise self._gone() from None
    self.send(task)

  def _over(self) -> bool:
    """Whether a judge has ended its task: nobody will take what is sent now."""
    with contextlib.suppress(BlockingIOError):
      return self._aside.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b"."
    return False

  def settled(self, wait_s: float = 1.0) -> bool:
    """Whether a judge has ended its task with nothing left of it, as `inside/judge.py` says.

    Nor on the channel: an answer that the tests did not take would be read as the next task, and a
    program has written it.
    """
    said, _, _ = select.select([self._aside], [], [], wait_s)
    if not said or self._aside.recv(2) != b".":
      return False
    unread = fcntl.ioctl(self._in.fileno(), termios.FIONREAD, bytes(4))
    more, _, _ = select.select([self._out], [], [], 0)
    return not any(unread) and not more and not self._buffer

  def cpu_s(self) -> float:
    """CPU seconds of all its tasks."""
    return Tree(self.process.pid).cpu_s

  def send(self, message: dict[str, Any]) -> None:
    """Sends one message.

    Raises:
      Stopped: it is gone, or over a limit before it has taken the message.
    """
    body = plain.encode(message)
    data = memoryview(HEADER.pack(len(body)) + body)
    checked = time.monotonic()
    while data:
      try:
        data = data[os.write(self._in.fileno(), data) :]
      except BlockingIOError:
        select.select([], [self._in], [], POLL_S)
        if self._over():
          return
        if time.monotonic() - checked > POLL_S:
          self.check()
          checked = time.monotonic()
      except BrokenPipeError:
        raise self._gone() from None

  def _inner_limits(self) -> dict[str, Any]:
    own = self.limits
    return {
      "cpu_s": int(own.cpu_s) + 1,
      "memory_mb": 4 * own.memory_mb + 1024,  # of addresses, which are more than memory
      "processes": 0 if self._bare else own.processes,  # it would count all of this user's
      "scratch": self._scratch,
      "die_with_parent": self._bare,
      "file_mb": own.file_mb,
      "files": own.files,
      "stack_mb": 100,
      "uid": self._uid,
    }

  def receive(self, watch: Sequence[Sandbox] = ()) -> dict[str, Any]:
    """The next message.

    Args:
      watch: others whose limits are to be enforced meanwhile.

    Raises:
      Stopped: it or another is over a limit, it said too much, broke the channel, or is gone.
    """
    checked = time.monotonic()
    while True:
      if (message := self._next()) is not None:
        return message
      ready, _, _ = select.select([self._out], [], [], POLL_S)
      if time.monotonic() - checked > POLL_S:  # by the clock: it may talk without end
        for box in (self, *watch):
          box.check()
        checked = time.monotonic()
      if not ready:
        continue
      chunk = os.read(self._out.fileno(), 65536)
      if not chunk:
        raise self._gone()
      self._read += len(chunk)
      self._buffer += chunk
      if self._read > self.limits.output_mb * 2**20:
        raise Stopped("runtime_error", f"over {self.limits.output_mb:g} MiB of output")

  def _next(self) -> dict[str, Any] | None:
    if len(self._buffer) < HEADER.size:
      return None
    (size,) = HEADER.unpack_from(self._buffer)
    end = HEADER.size + size
    if size > self.limits.output_mb * 2**20:
      raise Stopped("runtime_error", "the program broke the channel")
    if len(self._buffer) < end:
      return None
    body = bytes(self._buffer[HEADER.size : end])
    del self._buffer[:end]
    try:
      message = plain.decode(body, digits=8, keys=KEYS)
    except (ValueError, ArithmeticError, RecursionError, MemoryError):
      raise Stopped("runtime_error", "the program broke the channel") from None
    if not isinstance(message, dict):
      raise Stopped("runtime_error", "the program broke the channel")
    return message

  def _gone(self) -> Stopped:
    """Why it ended: the kernel may have stopped it for a limit."""
    self._wait(1.0)
    self._end_others()
    code = self.process.poll()
    if code in (128 + signal.SIGXCPU, -signal.SIGXCPU):
      return Stopped("timeout", f"over {self.limits.cpu_s:g} s of CPU time")
    if code in (128 + signal.SIGKILL, -signal.SIGKILL):
      if self._cgroup.killed():
        return Stopped("memory", f"over {self.limits.memory_mb} MiB of memory")
      return Stopped("runtime_error", "the program was killed")
    return Stopped("runtime_error", f"the program ended (exit code {code})")

  def check(self) -> None:
    """Enforces the limits of the tree; call it while waiting.

    Raises:
      Stopped: over one of them.
    """
    tree, before = Tree(self.process.pid), self._before
    own = self.limits
    for pid, seconds in tree.own_cpu_s.items():
      self._seen[pid] = max(seconds, self._seen.get(pid, 0.0))
    # Children that nobody waits for are in no parent's account: they count while they are seen.
    waited_for, seen, queued = tree.cpu_s, sum(self._seen.values()), tree.queued_s
    if before is not None:
      waited_for, seen = waited_for - before.cpu_s, seen - sum(before.own_cpu_s.values())
      queued = {pid: s - before.queued_s.get(pid, 0.0) for pid, s in queued.items()}
    if max(waited_for, seen) > own.cpu_s:
      raise Stopped("timeout", f"over {own.cpu_s:g} s of CPU time")
    if tree.resident_mb > own.memory_mb:
      raise Stopped("memory", f"over {own.memory_mb} MiB of memory")
    if tree.processes > own.processes + 8:
      raise Stopped("runtime_error", f"over {own.processes} processes")
    wall, limit = time.monotonic() - self.began, WALL_FACTOR * own.cpu_s + GRACE_S
    # A busy machine is not the program's fault: time in the queue for a core does not count.
    # The most delayed process counts.
    if wall - max(queued.values(), default=0.0) > limit or wall > NEVER * limit:
      raise Stopped("timeout", f"over {limit:g} s of wall time ({waited_for:.1f} s of CPU time)")

  def _last_words(self) -> str:
    """What bubblewrap said, for telling why no sandbox starts."""
    _kill(self.process.pid)
    with self._aside.makefile("rb") as words:
      return words.read(2000).decode(errors="replace").strip()[-300:]


def _kill(pid: int) -> None:
  with contextlib.suppress(ProcessLookupError, PermissionError):
    os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
  sys.exit(f"No sandbox: {why_not()}" if why_not() else print("The sandbox works here."))
