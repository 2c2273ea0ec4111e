"""Imports point down, and the host side imports no jax."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "fadejax"

# room -> the rooms that it may import. Any other file of the package is a command, which may import
# everything; train/__main__.py is one too.
MAY_IMPORT = {
  "arrays": set(),
  "cache": set(),
  "algorithm": {"arrays"},
  "verify": set(),
  "data": {"verify", "config"},
  "policy": {"arrays", "algorithm", "config"},
  "config_check": {"algorithm", "data", "verify"},
  "config": {"arrays", "algorithm", "policy", "verify", "data", "config_check"},
  "train": {"arrays", "algorithm", "policy", "verify", "data", "config", "config_check", "cache"},
}
ROOMS = {"algorithm", "verify", "data", "policy", "train"}
MODULES = sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
  """fadejax/train/loop.py -> fadejax.train.loop"""
  return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def room_of(module: str) -> str:
  if module == "fadejax.train.__main__":
    return "command"
  parts = module.split(".")
  room = parts[1] if len(parts) > 1 else ""
  return room if room in MAY_IMPORT else "command"


def imports_in(source: str, module: str, is_package: bool) -> set[str]:
  """Absolute names of everything that the source imports, at any depth of nesting."""
  found = set()
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Import):
      found |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      base = node.module or ""
      if node.level:
        parts = module.split(".")
        parts = parts[: len(parts) - node.level + is_package]
        base = ".".join([*parts, base] if base else parts)
      found |= {f"{base}.{alias.name}" for alias in node.names}
  return found


def imports_of(path: Path) -> set[str]:
  return imports_in(path.read_text(encoding="utf-8"), module_name(path), path.name == "__init__.py")


def upward(module: str, imported: set[str]) -> Iterator[str]:
  """Imports of a module that its room may not have."""
  room = room_of(module)
  for name in sorted(imported):
    # Importing the package itself runs nothing; naming one of its parts is seen as that part.
    if not name.startswith("fadejax.") or room == "command":
      continue
    target = room_of(name)
    if target != room and target not in MAY_IMPORT[room]:
      yield f"{module} imports {name}"


def test_imports_point_down():
  assert [line for path in MODULES for line in upward(module_name(path), imports_of(path))] == []


@pytest.mark.parametrize(
  ("module", "source"),
  [
    ("fadejax.algorithm.fade", "from fadejax.train import step"),
    ("fadejax.algorithm.fade", "def f():\n  import fadejax.policy.model"),
    ("fadejax.algorithm.fade", "from ..verify import pool"),
    ("fadejax.algorithm.fade", "from fadejax import data"),
    ("fadejax.arrays", "import fadejax.algorithm.losses"),
    ("fadejax.policy.model", "from fadejax.train.optim import make"),
    ("fadejax.verify.pool", "from fadejax.data import tasks"),
    ("fadejax.train.loop", "from fadejax import report"),
  ],
)
def test_an_upward_import_is_seen(module, source):
  assert list(upward(module, imports_in(source, module, is_package=False)))


def test_downward_imports_are_allowed():
  source = "from fadejax.algorithm.fade import update\nfrom . import metrics\nimport jax"
  assert not list(upward("fadejax.train.step", imports_in(source, "fadejax.train.step", False)))
  source = "from fadejax.train import loop"
  assert not list(upward("fadejax.train.__main__", {"fadejax.train.loop"}))


def test_algorithm_imports_only_jax_and_numpy():
  standard = set(sys.stdlib_module_names)
  for path in sorted((PACKAGE / "algorithm").glob("*.py")):
    others = {name.split(".")[0] for name in imports_of(path)} - standard
    assert others <= {"jax", "numpy", "fadejax"}, path


def test_no_import_cycle():
  names = {module_name(path) for path in MODULES}

  def module_of(name: str) -> str:  # fadejax.verify.grade -> fadejax.verify
    while name and name not in names:
      name = name.rpartition(".")[0]
    return name

  graph = {
    module_name(path): {module_of(name) for name in imports_of(path)} - {module_name(path), ""}
    for path in MODULES
  }
  graphlib.TopologicalSorter(graph).prepare()  # raises CycleError with the cycle


def test_no_module_shadows_the_standard_library():
  names = {path.stem if path.stem != "__init__" else path.parent.name for path in MODULES}
  assert names & set(sys.stdlib_module_names) - {"__main__"} == set()


def test_the_package_imports_nothing():
  assert imports_of(PACKAGE / "__init__.py") <= {"__future__.annotations"}


def test_every_room_is_a_package():
  """A folder without __init__.py would be left out of a built wheel."""
  for path in MODULES:
    assert (path.parent / "__init__.py").exists(), path


def host_modules() -> list[str]:
  """Every module that must run without jax."""
  host = [path for room in ("verify", "data") for path in sorted((PACKAGE / room).rglob("*.py"))]
  host += [PACKAGE / "train" / "metrics.py", PACKAGE / "train" / "progress.py"]
  host += [PACKAGE / "report.py", PACKAGE / "report_figures.py"]
  # A worker is a program: importing it is fine, running it is not what is tested here. What runs
  # inside the sandbox imports its neighbours by bare names.
  return [
    module_name(path)
    for path in host
    if path.name != "__main__.py" and (path.parent.name != "inside" or path.stem == "plain")
  ]


def test_what_runs_inside_the_sandbox_is_standard_library_only():
  inside = PACKAGE / "verify" / "inside"
  own = {path.stem for path in inside.glob("*.py")}
  for path in inside.glob("*.py"):
    names = {name.split(".")[0] for name in imports_of(path)}
    assert names <= set(sys.stdlib_module_names) | own, path


@pytest.mark.parametrize("room", ["verify", "data", "train", "report"])
def test_the_host_side_imports_no_jax(room):
  modules = [name for name in host_modules() if name.split(".")[1].startswith(room)]
  if not modules:
    pytest.skip(f"{room} is not there")
  program = "\n".join(
    [
      "import sys",
      *(f"import {name}" for name in modules),
      "found = sorted({m.split('.')[0] for m in sys.modules} & {'jax', 'jaxlib', 'flax', 'torch'})",
      "assert not found, found",
    ]
  )
  result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
  assert result.returncode == 0, result.stderr


def test_lock_holds_no_place_and_no_torch():
  lines = (ROOT / "requirements.lock").read_text().splitlines()
  pins = [line for line in lines if line and not line.startswith("#")]
  assert pins and all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+", line) for line in pins)
  assert not any(re.match(r"(torch|nvidia|llama)", line) for line in pins)


def test_lock_holds_every_dependency():
  """pyproject.toml and requirements.lock are changed together."""
  import tomllib

  project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
  wanted = list(project["dependencies"])
  for extra in ("code", "puzzles", "wandb", "test"):
    wanted += [line for line in project["optional-dependencies"][extra] if "fadejax" not in line]
  locked = {line.split("==")[0] for line in (ROOT / "requirements.lock").read_text().splitlines()}
  names = {re.split(r"[\[<>=]", line)[0].lower().replace("_", "-") for line in wanted}
  assert names <= locked, names - locked
