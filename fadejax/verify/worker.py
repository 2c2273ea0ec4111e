"""One verifier worker: `python -m fadejax.verify.worker`, started by the pool.

Requests come on stdin and answers go to stdout, each a 4-byte big-endian length and that many
bytes of JSON. Before anything else both descriptors move out of a grader's reach: its prints
go to the null device, its reads see the end of the file.

Answers: {"ready": true} once; {"id": n, "start": true} when the imports of a grader are done
and the clock of the item starts; {"id": n, "verdict": {...}} or {"id": n, "error": text}.
"""

from __future__ import annotations

import contextlib
import os
import queue
import resource
import sys
import threading
import traceback
from typing import Any, BinaryIO

from fadejax.verify import graders, walls
from fadejax.verify.frames import frame, read_frame, warm_key


def _take_channels() -> tuple[BinaryIO, BinaryIO]:
  """Private copies of stdin and stdout; 0 and 1 then point at the null device."""
  requests, answers = os.dup(0), os.dup(1)  # not inherited by a grader's children
  null = os.open(os.devnull, os.O_RDWR)
  os.dup2(null, 0)
  os.dup2(null, 1)
  os.close(null)
  sys.stdin = open(0, closefd=False)  # noqa: SIM115 - lives as long as the process
  return os.fdopen(requests, "rb"), os.fdopen(answers, "wb", buffering=0)


def _read_requests(stream: BinaryIO, requests: queue.SimpleQueue[dict[str, Any]]) -> None:
  """Feeds the main thread; the end of stdin means that the parent is gone or done with us."""
  while (message := read_frame(stream)) is not None:
    requests.put(message)
  os._exit(0)


def _limit_cpu(seconds: float) -> None:
  """A kernel-side bound on the item, for a worker whose parent is no longer there to kill it."""
  usage = resource.getrusage(resource.RUSAGE_SELF)
  used = usage.ru_utime + usage.ru_stime
  hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
  soft = int(used + 2 * seconds) + 10
  if hard == resource.RLIM_INFINITY or soft < hard:
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def _warm(name: str, problem: dict[str, Any]) -> None:
  """Imports what a grader needs, so that its first item does not pay for it."""
  if name == "math":
    from fadejax.verify import math_answer  # noqa: F401
  elif name == "reasoning_gym":
    from fadejax.verify import gym

    if gym.available() == "":
      import reasoning_gym  # noqa: F401
  elif name == "python" and isinstance(function := problem.get("function"), str):
    import importlib

    importlib.import_module(function.partition(":")[0])


def _grade(request: dict[str, Any]) -> dict[str, Any]:
  """One answer: a verdict, or the traceback of a grader that crashed."""
  try:
    verdict = graders.run(request["name"], request["completion"], request["problem"])
  except MemoryError:
    detail = "out of memory in the grader"
    return {"verdict": {"reward": 0.0, "status": "memory", "detail": detail}}
  except (Exception, SystemExit) as error:
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{os.path.basename(last.filename)}:{last.lineno}"
    # Short, so that the frame is written in one piece.
    return {"error": f"{type(error).__name__} at {where}: {error}"[:500]}
  parts = {"reward": verdict.reward, "status": verdict.status, "detail": verdict.detail}
  return {"verdict": parts}


def main() -> None:
  """Serves requests until stdin ends."""
  stream, answers = _take_channels()
  seconds, memory_mb = float(sys.argv[1]), int(sys.argv[2])
  walls.choose(sys.argv[3])
  # The parent polls the resident size; this stops one allocation from outrunning its polls.
  space = (memory_mb + 2048) * 2**20
  hard = resource.getrlimit(resource.RLIMIT_AS)[1]
  if hard == resource.RLIM_INFINITY or space < hard:
    resource.setrlimit(resource.RLIMIT_AS, (space, hard))
  resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
  requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
  warmed: set[str] = set()
  for name in sys.argv[4:]:
    _warm(name, {})
    warmed.add(name)
  threading.Thread(target=_read_requests, args=(stream, requests), daemon=True).start()
  answers.write(frame({"ready": True}))
  os.dup2(1, 2)  # start-up errors reach the user's terminal, a grader's prints do not
  while True:
    request = requests.get()
    name = request["name"]
    key = warm_key(name, request["problem"])
    if key not in warmed:
      with contextlib.suppress(Exception):  # the grader itself reports it
        _warm(name, request["problem"])
      warmed.add(key)
      answers.write(frame({"id": request["id"], "start": True}))
    _limit_cpu(seconds)
    answers.write(frame({"id": request["id"], **_grade(request)}))


if __name__ == "__main__":
  main()
