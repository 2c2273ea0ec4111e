"""Graders that misbehave, loaded by import path: `graders_for_tests:name`."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time


def good(completion, problem):
  return float(completion == problem["answer"])


def sleep(completion, problem):
  time.sleep(1000)


def nap(completion, problem):
  time.sleep(float(completion))
  return 1.0


def slow_first_time(completion, problem):
  """Sleeps for ever at its first call, marked by a file, and answers at the second."""
  if os.path.exists(problem["mark"]):
    return 1.0
  open(problem["mark"], "w").close()
  time.sleep(1000)


def busy(completion, problem):
  while True:
    pass


def holds_the_gil(completion, problem):
  return 3 ** (10**9) > 0


def die(completion, problem):
  os.kill(os.getpid(), signal.SIGKILL)


def die_first_time(completion, problem):
  if os.path.exists(problem["mark"]):
    return 1.0
  open(problem["mark"], "w").close()
  os._exit(3)


def segfault(completion, problem):
  ctypes.string_at(0)


def leave(completion, problem):
  sys.exit("leaving")


def crash(completion, problem):
  raise RuntimeError("the grader's own fault")


def eat_memory(completion, problem):
  hoard = []
  while True:
    hoard.append(bytearray(10 * 2**20))
    time.sleep(0.001)


_kept = []


def leaks(completion, problem):
  _kept.append(bytearray(b"x") * (40 * 2**20))
  return 1.0


def allocate(completion, problem):
  return len(bytearray(2**40)) > 0


def prints(completion, problem):
  print("garbage " * 1000)
  sys.stdout.flush()
  os.write(1, b"\x00\x00\x00\x05hello")
  print("more", file=sys.stderr)
  subprocess.run(["echo", "from a child"], check=True)
  return 1.0


def reads(completion, problem):
  return float(sys.stdin.read() == "")


def corrupts(completion, problem):
  """Finds the channel and writes to it."""
  for fd in range(3, 64):
    try:
      os.write(fd, b"\xff\xff\xff\xffnot a frame")
    except OSError:
      continue
  time.sleep(1000)


def spawns(completion, problem):
  """Leaves a child behind and hangs: both must go."""
  child = subprocess.Popen(["sleep", "1000"])
  with open(problem["mark"], "w") as file:
    file.write(str(child.pid))
  time.sleep(1000)


def sees(completion, problem):
  """The environment and the modules of a worker."""
  hidden = os.environ["CUDA_VISIBLE_DEVICES"] == "" and os.environ["JAX_PLATFORMS"] == "cpu"
  return float(hidden and "jax" not in sys.modules and "sympy" not in sys.modules)


def worker_pid(completion, problem):
  with open(problem["mark"], "a") as file:
    file.write(f"{os.getpid()}\n")
  return 1.0


def too_much(completion, problem):
  return 1.5


def not_a_number(completion, problem):
  return float("nan")


def a_list(completion, problem):
  return [1.0]
