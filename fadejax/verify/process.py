"""The parent's handle on one worker process: start, talk, measure, kill."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

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


class WorkerProcess:
  """One `python -m fadejax.verify.worker`, in a session of its own.

  A session of its own keeps the terminal's Ctrl-C from it (the trainer decides when workers
  die) and lets `kill` take a grader's children along.
  """

  def __init__(self, timeout_s: float, memory_mb: int, warm: Sequence[str]):
    command = [sys.executable, "-m", "fadejax.verify.worker", str(timeout_s), str(memory_mb)]
    # The worker finds whatever the parent can import, wherever it was started.
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    self.process = subprocess.Popen(
      [*command, *warm],
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
    self.pid = self.process.pid
    self.ready = False
    self.warmed: set[str] = set()  # what it has imported, see `frames.warm_key`
    self.graded = 0
    self.ended = False  # the channel closed or broke: nothing more will come
    self.outgoing = b""  # of a request, what the pipe has not taken yet
    self._buffer = bytearray()

  def fileno(self) -> int:
    """For `select`: readable when the worker has said something or has died."""
    return self.stdout.fileno()

  def send(self, message: dict[str, Any]) -> None:
    """Starts to hand over one request; `flush` continues where the pipe is full."""
    self.outgoing += frame(message)
    self.flush()

  def flush(self) -> None:
    """Writes what the pipe takes now; a broken pipe shows up as the end of the answers."""
    try:
      while self.outgoing:
        self.outgoing = self.outgoing[os.write(self.stdin.fileno(), self.outgoing) :]
    except BlockingIOError:
      return
    except BrokenPipeError:
      self.outgoing = b""

  def receive(self) -> Iterator[dict[str, Any]]:
    """The complete messages that have arrived; never blocks. Sets `ended` at the end."""
    with contextlib.suppress(BlockingIOError):
      while chunk := os.read(self.fileno(), 65536):
        self._buffer += chunk
      self.ended = True
    while len(self._buffer) >= HEADER.size:
      (size,) = HEADER.unpack_from(self._buffer)
      end = HEADER.size + size
      if size > FRAME_LIMIT:
        self.ended = True
        return
      if len(self._buffer) < end:
        return
      body = bytes(self._buffer[HEADER.size : end])
      del self._buffer[:end]
      try:
        message = json.loads(body)
      except ValueError:
        self.ended = True
        return
      if not isinstance(message, dict):
        self.ended = True
        return
      yield message

  def dead(self) -> bool:
    """Whether the process has exited; it stays unreaped, so that its group id stays ours."""
    if self.process.returncode is not None:
      return True
    flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
    try:
      return os.waitid(os.P_PID, self.pid, flags) is not None
    except ChildProcessError:
      return True

  def cpu_s(self) -> float | None:
    """CPU seconds used so far by the process and its reaped children; None without /proc."""
    try:
      with open(f"/proc/{self.pid}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    except OSError:
      return None
    return sum(int(ticks) for ticks in fields[11:15]) / os.sysconf("SC_CLK_TCK")

  def resident_mb(self) -> float:
    """Resident memory now, in MiB; 0 without /proc."""
    try:
      with open(f"/proc/{self.pid}/statm", "rb") as file:
        pages = int(file.read().split()[1])
    except (OSError, IndexError):
      return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

  def kill(self) -> int:
    """SIGKILL to the whole group, reap, close the pipes; returns the exit code. Idempotent."""
    if self.process.returncode is None:
      with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(self.pid, signal.SIGKILL)
    code = self.process.wait()
    for pipe in (self.stdin, self.stdout):
      with contextlib.suppress(OSError):
        pipe.close()
    return code
