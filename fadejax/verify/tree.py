"""What the processes of a tree have used, read from /proc."""

from __future__ import annotations

import contextlib
import os


class Tree:
  """What a process and all its descendants have used, from /proc.

  Attributes:
    cpu_s: seconds, of the dead that were waited for too.
    own_cpu_s: seconds of each process alone.
    resident_mb: MiB.
    queued_s: seconds that each process has waited for a core.
    processes: how many there are.
  """

  def __init__(self, pid: int):
    self.cpu_s = self.resident_mb = 0.0
    self.processes = 0
    self.own_cpu_s: dict[int, float] = {}
    self.queued_s: dict[int, float] = {}
    page, tick = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")
    waiting = [pid]
    while waiting:
      number = waiting.pop()
      at = f"/proc/{number}"
      try:
        stat = _read(f"{at}/stat").rpartition(b")")[2].split()
        self.own_cpu_s[number] = sum(map(int, stat[11:13])) / tick
        self.cpu_s += sum(map(int, stat[11:15])) / tick
        self.resident_mb += int(stat[21]) * page / 2**20
        self.processes += 1
        self.queued_s[number] = int(_read(f"{at}/schedstat").split()[1]) / 1e9
        waiting += children(at)
      except (OSError, IndexError, ValueError):
        continue  # it ended meanwhile


def children(at: str) -> list[int]:
  """Numbers of the processes started by the one of folder `at`, such as "/proc/7".

  By the kernel's list, else by every process's parent.
  """
  try:
    threads = os.listdir(f"{at}/task")
    return [int(c) for t in threads for c in _read(f"{at}/task/{t}/children").split()]
  except FileNotFoundError:
    if os.path.exists("/proc/thread-self/children"):
      return []  # the process has ended
  mine, found = at.rpartition("/")[2].encode(), []
  for name in filter(str.isdigit, os.listdir("/proc")):
    with contextlib.suppress(OSError, IndexError):
      if _read(f"/proc/{name}/stat").rpartition(b")")[2].split()[1] == mine:
        found.append(int(name))
  return found


def _read(path: str) -> bytes:
  with open(path, "rb") as file:
    return file.read()
