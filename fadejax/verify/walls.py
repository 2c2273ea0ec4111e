"""What stands around untrusted programs: bubblewrap, or nothing where the user spells that out."""

from __future__ import annotations

import os
import sys
from pathlib import Path

INSIDE = Path(__file__).resolve().parent / "inside"
WALLS = ("bubblewrap", "none")
ENVIRONMENT = {
  "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1",
}  # fmt: skip
INSTALL = (
  "running untrusted programs needs bubblewrap: install the package 'bubblewrap' (Debian, Ubuntu, "
  "Fedora: apt-get or dnf install bubblewrap), or run `make sandbox`"
)
UNPROTECTED = (
  "sandbox = 'none': programs that the model writes run as this user, with its files and "
  "its network. Only their time, memory and number of processes are bounded"
)

_chosen = WALLS[0]


def choose(walls: str) -> None:
  """Says what this process, and the workers that it starts from now on, puts around programs.

  Raises:
    ValueError: neither "bubblewrap" nor "none".
  """
  global _chosen
  if walls not in WALLS:
    raise ValueError(f"sandbox {walls!r}: expected one of {', '.join(WALLS)}")
  _chosen = walls


def chosen() -> str:
  """ "bubblewrap", unless another was chosen."""
  return _chosen


def _python() -> tuple[str, list[str]]:
  """(interpreter as seen inside, arguments that bring it there).

  The one that the environment was made from, without its packages. Outside /usr its folder gets a
  name of its own, since the way to it may be closed to other users.
  """
  executable = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
  prefix = os.path.realpath(sys.base_prefix)
  if executable.startswith("/usr/"):
    return executable, []
  inside = "/python/" + os.path.relpath(executable, prefix)
  return inside, ["--ro-bind", prefix, "/python", "--setenv", "LD_LIBRARY_PATH", "/python/lib"]


def bubblewrap(script: str, file_mb: int, filter_fd: int | None) -> list[str]:
  """The command line of bubblewrap around a script of `inside/`, which closes the rest itself.

  Args:
    script: its name.
    file_mb: MiB of scratch space.
    filter_fd: of a file that holds the system-call filter.
  """
  python, bring_python = _python()
  root = os.geteuid() == 0
  line = ["bwrap", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
  line += ["--unshare-cgroup-try", "--die-with-parent", "--new-session", "--clearenv"]
  if root:  # keeps only what changing the user takes, which the script does first
    line += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
  else:
    line += ["--unshare-user", "--uid", "65534", "--gid", "65534", "--cap-drop", "ALL"]
  line += ["--hostname", "sandbox"]
  for path in ("/usr", "/lib", "/lib64", "/bin"):
    if os.path.islink(path):
      line += ["--symlink", os.readlink(path), path]
    elif os.path.isdir(path):
      line += ["--ro-bind", path, path]
  line += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
  line += ["--ro-bind-try", "/etc/alternatives", "/etc/alternatives"]
  line += [*bring_python, "--ro-bind", str(INSIDE), "/fadejax"]
  line += ["--proc", "/proc", "--dev", "/dev"]
  line += ["--perms", "1777", "--size", str(file_mb * 2**20), "--tmpfs", "/tmp"]
  line += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/"]
  for name, value in {**ENVIRONMENT, "HOME": "/tmp"}.items():
    line += ["--setenv", name, value]
  if filter_fd is not None:
    line += ["--seccomp", str(filter_fd)]
  if script == "judge":  # out of its children's reach: they can neither stop nor kill it
    line += ["--as-pid-1"]
  return [*line, "--", python, *_arguments(script, "/fadejax")]


def bare(script: str) -> list[str]:
  """The command line of a script of `inside/` with nothing around it."""
  return [sys.executable, *_arguments(script, str(INSIDE))]


def _arguments(script: str, folder: str) -> list[str]:
  # As modules, so that the compiled files beside them serve.
  run = (
    f"import sys; sys.path.insert(0, {folder!r}); import {script}; sys.path.pop(0); {script}.main()"
  )
  return ["-I", "-S", "-B", "-c", run]
