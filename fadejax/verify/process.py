"""What the pool needs of a worker (`Worker`), and the worker that it starts unless told otherwise.

Another place for workers is a function in the place of `local`, and where talking through a
command's stdin and stdout will not do, a class in the place of `WorkerProcess`.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from fadejax.verify import cgroup
from fadejax.verify.frames import HEADER, frame

# Accelerators belong to the trainer; a grader that imports a framework must not see them.
# One thread a worker: the pool is the parallelism.
ENVIRONMENT = {
  "CUDA_VISIBLE_DEVICES": "",
  "HIP_VISIBLE_DEVICES": "",
  "ROCR_VISIBLE_DEVICES": "",
  "TPU_VISIBLE_DEVICES": "",
  "TPU_VISIBLE_CHIPS": "",
  "JAX_PLATFORMS": "cpu",
  "OMP_NUM_THREADS": "1",
  "OPENBLAS_NUM_THREADS": "1",
  "MKL_NUM_THREADS": "1",
}

FRAME_LIMIT = 2**20  # bytes; a longer answer is no answer of a worker


class Worker(Protocol):
  """What the pool needs of a worker, wherever it runs. Only `kill` may block.

  Requests and answers are those of `fadejax.verify.worker`.
  """

  def send(self, message: dict[str, Any]) -> None:
    """Takes one request; what the channel cannot take at once leaves with later `receive`s."""

  def receive(self) -> Iterable[dict[str, Any]]:
    """The answers that have come since the last time, in their order."""

  def events(self) -> dict[int, int]:
    """When to call `receive` again: `select.poll` events by file descriptor; {}: in 50 ms."""

  def gone(self) -> bool:
    """Whether no more answers can come than have come: it has ended, or broke its channel."""

  def cpu_s(self) -> float | None:
    """CPU seconds used so far. None: not known here, so that deadlines are in wall time."""

  def resident_mb(self) -> float:
    """Resident memory now, in MiB. 0: not known here; the worker bounds its addresses itself."""

  def kill(self) -> str:
    """Ends it and all that it has started; how it ended, such as "exit code -9". Idempotent."""


# Starts a worker, given the arguments of the Python interpreter that runs it.
Executor = Callable[[Sequence[str]], Worker]


def local(arguments: Sequence[str]) -> Worker:
  """A worker on this machine, in this interpreter."""
  return WorkerProcess([sys.executable, *arguments])


class WorkerProcess:
  """A worker behind the stdin and stdout of a command, in a session of its own.

  A session of its own keeps the terminal's Ctrl-C from it (the trainer decides when workers
  die) and lets `kill` take a grader's children along.

  Args:
    command: `python -m fadejax.verify.worker …`, or what runs that elsewhere (ssh, kubectl exec).
    here: whether the command is the worker itself, so that what it uses can be read here.
  """

  def __init__(self, command: Sequence[str], *, here: bool = True):
    # The worker finds whatever the parent can import, wherever it was started.
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    self.process = subprocess.Popen(
      command,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      env={**os.environ, **ENVIRONMENT, "PYTHONPATH": path},
      start_new_session=True,
      bufsize=0,
    )
    assert self.process.stdin is not None and self.process.stdout is not None
    self.stdin, self.stdout = self.process.stdin, self.process.stdout
    os.set_blocking(self.stdin.fileno(), False)
    os.set_blocking(self.stdout.fileno(), False)
    self.pid, self.here = self.process.pid, here
    self._ended = False  # the channel closed or broke
    self._outgoing = b""  # of a request, what the pipe has not taken yet
    self._buffer = bytearray()

  def send(self, message: dict[str, Any]) -> None:
    """Starts to hand over one request."""
    self._outgoing += frame(message)
    self._flush()

  def events(self) -> dict[int, int]:
    """Readable: it has said something or is gone. Writable: there is more of a request."""
    waits = {self.stdout.fileno(): select.POLLIN}
    return {**waits, self.stdin.fileno(): select.POLLOUT} if self._outgoing else waits

  def _flush(self) -> None:
    """Writes what the pipe takes now; a broken pipe shows up as the end of the answers."""
    try:
      while self._outgoing:
        self._outgoing = self._outgoing[os.write(self.stdin.fileno(), self._outgoing) :]
    except BlockingIOError:
      return
    except BrokenPipeError:
      self._outgoing = b""

  def receive(self) -> list[dict[str, Any]]:
    """Moves the channel on, both ways; never blocks."""
    self._flush()
    with contextlib.suppress(BlockingIOError):
      while chunk := os.read(self.stdout.fileno(), 65536):
        self._buffer += chunk
      self._ended = True
    return list(self._messages())

  def _messages(self) -> Iterator[dict[str, Any]]:
    """What is whole in the buffer; what is no message of a worker ends the channel."""
    while len(self._buffer) >= HEADER.size:
      (size,) = HEADER.unpack_from(self._buffer)
      end = HEADER.size + size
      if size > FRAME_LIMIT:
        self._ended = True
        return
      if len(self._buffer) < end:
        return
      body = bytes(self._buffer[HEADER.size : end])
      del self._buffer[:end]
      try:
        message = json.loads(body)
      except ValueError:
        self._ended = True
        return
      if not isinstance(message, dict):
        self._ended = True
        return
      yield message

  def gone(self) -> bool:
    """Its channel has ended, or its process: a grader's children may hold the channel open."""
    return self._ended or self._exited()

  def _exited(self) -> bool:
    """Whether the process has exited; it stays unreaped, so that its group id stays ours."""
    if self.process.returncode is not None:
      return True
    flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
    try:
      return os.waitid(os.P_PID, self.pid, flags) is not None
    except ChildProcessError:
      return True

  def cpu_s(self) -> float | None:
    """Of the process and its reaped children; None without /proc."""
    if not self.here:
      return None
    try:
      with open(f"/proc/{self.pid}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    except OSError:
      return None
    return sum(int(ticks) for ticks in fields[11:15]) / os.sysconf("SC_CLK_TCK")

  def resident_mb(self) -> float:
    """Of the process alone; 0 without /proc."""
    if not self.here:
      return 0.0
    try:
      with open(f"/proc/{self.pid}/statm", "rb") as file:
        pages = int(file.read().split()[1])
    except (OSError, IndexError):
      return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

  def kill(self) -> str:
    """SIGKILL to the whole group, reap, close the pipes. Elsewhere the end of stdin ends it."""
    if self.process.returncode is None:
      with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(self.pid, signal.SIGKILL)
      self.process.wait()
      # What it had started, where orphans come to this process (`sandbox.adopt_orphans`).
      with contextlib.suppress(ChildProcessError):
        while True:
          os.waitpid(-self.pid, 0)
      if self.here:
        cgroup.remove(self.pid)
    code = self.process.wait()
    for pipe in (self.stdin, self.stdout):
      with contextlib.suppress(OSError):
        pipe.close()
    return f"exit code {code}"
