"""Control groups of sandboxes: the kernel's own bounds, where this process may make groups."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from pathlib import Path

GROUP = "fadejax-"  # then the number of the process that made it: their names


class Cgroup:
  """A control group that bounds memory and processes of a tree, where one can be made.

  Args:
    memory_mb: MiB, of all its processes.
    tasks: processes and threads.
  """

  def __init__(self, memory_mb: int, tasks: int):
    self.paths: list[Path] = []
    name, memory = f"{GROUP}{os.getpid()}-{uuid.uuid4().hex[:8]}", memory_mb * 2**20
    v1 = {"memory": ("memory.limit_in_bytes", memory), "pids": ("pids.max", tasks)}
    if Path("/sys/fs/cgroup/memory").is_dir():
      for controller, (file, value) in v1.items():
        self._make(Path("/sys/fs/cgroup") / controller / name, {file: value})
    else:
      files = {"memory.max": memory, "memory.swap.max": 0, "pids.max": tasks}
      self._make(own() / name, files)

  def _make(self, path: Path, files: dict[str, int]) -> None:
    try:
      path.mkdir()
    except OSError:
      return
    try:
      for file, value in files.items():
        (path / file).write_text(str(value))
    except OSError:  # a controller that is not delegated: the watcher alone must do
      path.rmdir()
      return
    self.paths.append(path)

  def around(self, line: list[str]) -> list[str]:
    """The command line, entered from a shell that has moved itself in.

    Not between fork and exec: a fork of the trainer, with its many threads, may deadlock.
    """
    if not self.paths:
      return line
    enter = "".join(f'echo 0 > "${i}/cgroup.procs"; ' for i in range(1, len(self.paths) + 1))
    shell = f'{enter}shift {len(self.paths)}; exec "$@"'
    return ["/bin/sh", "-c", shell, "sh", *map(str, self.paths), *line]

  def members(self) -> list[int]:
    """The numbers of its processes."""
    found: list[int] = []
    for path in self.paths:
      with contextlib.suppress(OSError):
        found += map(int, (path / "cgroup.procs").read_text().split())
    return found

  def remove(self) -> None:
    """Removes it once its processes are gone."""
    for path in self.paths:
      _remove(path)

  def killed(self) -> bool:
    """Whether the kernel has killed one of its processes for memory."""
    for path in self.paths:
      for file in ("memory.oom_control", "memory.events"):
        with contextlib.suppress(OSError):
          for line in (path / file).read_text().splitlines():
            if line.startswith("oom_kill ") and int(line.split()[1]) > 0:
              return True
    return False


def own() -> Path:
  """The group that this process is in."""
  try:
    line = Path("/proc/self/cgroup").read_text().splitlines()[-1]
  except (OSError, IndexError):
    return Path("/sys/fs/cgroup")
  return Path("/sys/fs/cgroup") / line.rpartition(":")[2].lstrip("/")


def remove(owner: int) -> None:
  """Removes the control groups that a killed process has left, once what was in them is gone."""
  for path in groups(str(owner)):
    _remove(path)


def remove_orphaned() -> None:
  """Removes the control groups of all processes that have ended."""
  for path in groups("*"):
    if orphaned(path):
      with contextlib.suppress(OSError):
        path.rmdir()


def orphaned(path: Path) -> bool:
  """Whether the process that its name tells has ended."""
  owner = path.name.removeprefix(GROUP).partition("-")[0]
  return owner.isdigit() and not os.path.exists(f"/proc/{owner}")


def groups(owner: str) -> list[Path]:
  """The folders of the control groups that a process has made; "*": that any has."""
  roots = {Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup/pids"), own()}
  return [path for root in roots for path in root.glob(f"{GROUP}{owner}-*")]


def _remove(path: Path) -> None:
  for _ in range(50):
    try:
      path.rmdir()
      return
    except FileNotFoundError:
      return
    except OSError:  # its last process is still being reaped
      time.sleep(0.01)
