"""The last lock, from inside: limits, another user, and the channel out of a program's way.

Runs in a sandbox that bubblewrap has made, before anything untrusted. As root it takes the user id
that it is given, which drops every capability and makes the bound on processes hold.
"""

from __future__ import annotations

import builtins
import os
import resource
import sys

import plain


def close_in(limits):
  """Sets the limits of this process and its children, and gives up root.

  Args:
    limits: {"cpu_s", "memory_mb", "processes", "file_mb", "files", "stack_mb", "uid", "scratch",
      "die_with_parent"}; `uid` is 0 where the user stays, `processes` where their number is not
      bounded here.
  """
  mb = 2**20
  for name, value in (
    (resource.RLIMIT_CPU, limits["cpu_s"]),
    (resource.RLIMIT_AS, limits["memory_mb"] * mb),
    (resource.RLIMIT_FSIZE, limits["file_mb"] * mb),
    (resource.RLIMIT_NOFILE, limits["files"]),
    (resource.RLIMIT_NPROC, limits["processes"]),
    (resource.RLIMIT_CORE, 0),
    (resource.RLIMIT_MEMLOCK, 0),
    (resource.RLIMIT_MSGQUEUE, 0),
  ):
    if name == resource.RLIMIT_NPROC and not value:
      continue
    value = int(value)
    hard = resource.getrlimit(name)[1]
    # The hard limit on CPU time is SIGKILL's, which would not tell that it was for time.
    above = value + (name == resource.RLIMIT_CPU)
    if hard != resource.RLIM_INFINITY:
      value, above = min(value, hard), min(above, hard)
    resource.setrlimit(name, (value, above))
  hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
  stack = limits["stack_mb"] * mb
  if hard == resource.RLIM_INFINITY or stack <= hard:
    resource.setrlimit(resource.RLIMIT_STACK, (stack, hard))
  if limits["die_with_parent"]:
    die_with_parent()
  if limits["uid"]:
    os.setgroups([])
    os.setresgid(limits["uid"], limits["uid"], limits["uid"])
    os.setresuid(limits["uid"], limits["uid"], limits["uid"])
  os.umask(0o077)
  if hasattr(sys, "set_int_max_str_digits"):
    sys.set_int_max_str_digits(0)


def take_channel():
  """(requests, answers): private copies of stdin and stdout; 0, 1 and 2 then lead nowhere."""
  requests = os.fdopen(os.dup(0), "rb")
  answers = os.fdopen(os.dup(1), "wb")
  null = os.open(os.devnull, os.O_RDWR)
  for number in (0, 1, 2):
    os.dup2(null, number)
  os.close(null)
  sys.stdin, sys.stdout, sys.stderr = (
    open(number, mode, closefd=False)  # noqa: SIM115
    for number, mode in ((0, "r"), (1, "w"), (2, "w"))
  )
  return requests, answers


def die_with_parent():
  """A namespace does that, where there is one. Forked children need it anew."""
  _prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL


def hide():
  """Closes this process's memory and files to others of its user; False where that cannot be."""
  try:
    return _prctl(4, 0) == 0  # PR_SET_DUMPABLE
  except ImportError:
    return False


def _prctl(option, value):
  import ctypes  # takes time

  return ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def add_site_builtins():
  """`exit` and `quit`, which `python -S` leaves out and programs use."""
  import _sitebuiltins

  builtins.exit = _sitebuiltins.Quitter("exit", "")
  builtins.quit = _sitebuiltins.Quitter("quit", "")


def enter():
  """(requests, answers, task): takes the channel and the task, and closes the lock."""
  requests, answers = take_channel()
  task = plain.read(requests)
  close_in(task["limits"])
  plain.write(answers, {"locked": True})
  add_site_builtins()
  os.chdir(task["limits"]["scratch"])
  return requests, answers, task
