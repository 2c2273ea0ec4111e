"""Whose a workdir is: refuses to write one run over another, and says why."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
from collections.abc import Iterator
from pathlib import Path

from fadejax.config import RunConfig, resolve, to_json
from fadejax.policy.model import Architecture
from fadejax.train.metrics import METRICS_FILE, read_jsonl, write_atomically

CONFIG_FILE = "config.json"
RUN_FILE = "run.json"  # which command made it, and the architecture

# Sections that a resumed run may change; anything else would make it another run.
MAY_CHANGE = (
  "steps", "mesh", "evaluation", "checkpoint", "log", "verifier", "compilation_cache",
  "max_skipped_updates",
)  # fmt: skip


def note(
  workdir: Path, config: RunConfig, arch: Architecture, command: str, init_step: int | None = None
) -> None:
  """Writes config.json and run.json; `check` reads them when the command comes again.

  Args:
    workdir: the run's folder.
    config: the resolved config.
    arch: the policy's architecture.
    command: which command's run it is.
    init_step: the checkpoint of `init_from` that the parameters are from; None: no run's.
  """
  # run.json first: a config.json without it is taken for somebody else's.
  facts = {
    "command": command,
    "architecture": dataclasses.asdict(arch),
    "init_step": init_step,
  }
  text = json.dumps(facts, indent=2)
  write_atomically(workdir / RUN_FILE, text + "\n")
  write_atomically(workdir / CONFIG_FILE, to_json(config) + "\n")


def check(workdir: Path, config: RunConfig, arch: Architecture, command: str) -> None:
  """Refuses a workdir that holds something else than an earlier part of this run.

  Raises:
    ValueError: it is another command's, holds another architecture or config, or is no
      workdir at all (a config.json, such as a Hugging Face model's, without run.json).
  """
  if not (workdir / CONFIG_FILE).exists():
    return
  if not (workdir / RUN_FILE).exists():
    raise ValueError(
      f"{workdir / CONFIG_FILE} is not a run's: {workdir} would be written over. Take another "
      "--workdir."
    )
  there = _read(workdir / RUN_FILE)["command"]
  if there != command:
    raise ValueError(
      f"{workdir} is the workdir of a run of fadejax.{there}: take another --workdir (and "
      f"--config.init_from={workdir} to start from its parameters)"
    )
  if not _begun(workdir):
    return
  check_architecture(workdir, arch)
  earlier = dataclasses.asdict(read_config(workdir))
  now = dataclasses.asdict(resolve(json.loads(to_json(config))))  # tuples are lists there too
  changed = [
    line
    for key in now
    if key not in MAY_CHANGE
    for line in _differences(key, earlier[key], now[key])
  ]
  if changed:
    raise ValueError(
      f"{workdir} holds a run with another config:\n" + "\n".join(changed) + "\n"
      "Take another --workdir, or set these fields back to resume it."
    )


def _differences(name: str, there: object, now: object) -> list[str]:
  """A line for every field that differs."""
  if there == now:
    return []
  if isinstance(there, dict) and isinstance(now, dict):
    keys = sorted(there.keys() | now.keys())
    return [x for k in keys for x in _differences(f"{name}.{k}", there.get(k), now.get(k))]
  return [f"  {name}: {there!r} there, {now!r} now"]


@contextlib.contextmanager
def lock(workdir: Path) -> Iterator[None]:
  """Holds a workdir for one process; the kernel lets go of it however the process ends.

  Raises:
    ValueError: another process has it.
  """
  workdir.mkdir(parents=True, exist_ok=True)
  with (workdir / ".lock").open("w") as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise ValueError(f"{workdir} is in use: another process is training there") from None
    yield


def read_config(workdir: Path) -> RunConfig:
  """The config that a run began with.

  Raises:
    ValueError: no run's workdir, or its config.json is damaged or of another version.
  """
  path = workdir / CONFIG_FILE
  if not (path.exists() and (workdir / RUN_FILE).exists()):
    raise ValueError(
      f"{workdir} is not the workdir of a run: it has no {CONFIG_FILE} and {RUN_FILE}"
    )
  try:
    return resolve(_read(path))
  except ValueError as error:
    raise ValueError(f"{path}, which the run began with, does not resolve: {error}") from error


def read_architecture(workdir: Path) -> Architecture:
  """The architecture of a run's policy; ValueError where run.json is missing or damaged."""
  path = workdir / RUN_FILE
  if not path.exists():
    raise ValueError(f"{workdir} is not the workdir of a run: it has no {RUN_FILE}")
  try:
    return Architecture(**_read(path)["architecture"])
  except (KeyError, TypeError) as error:
    raise ValueError(f"{path} is of another version of fadejax: {error}") from error


def init_step(workdir: Path) -> int | None:
  """The checkpoint of `init_from` that this run's first parameters are from."""
  path = workdir / RUN_FILE
  return _read(path).get("init_step") if path.exists() else None


def check_architecture(workdir: Path, arch: Architecture) -> None:
  """Raises ValueError where a run's parameters are of another architecture.

  Shapes alone would not tell: another rope_theta has the same.
  """
  path = workdir / RUN_FILE
  if not path.exists():
    return
  there, now = _read(path)["architecture"], dataclasses.asdict(arch)
  differ = [
    f"  {name}: {there.get(name)} there, {now[name]} in config.model"
    for name in now
    if there.get(name) != now[name]
  ]
  if differ:
    raise ValueError(f"{workdir} holds another architecture:\n" + "\n".join(differ))


def _begun(workdir: Path) -> bool:
  """Whether there is anything to lose: a checkpoint, or a row of a step."""
  if any((workdir / "checkpoints").glob("step_*")):
    return True
  rows, _ = read_jsonl(workdir / METRICS_FILE)
  return bool(rows) and rows[-1]["step"] > 0


def _read(path: Path) -> dict:
  """A JSON object; ValueError names a file that is damaged."""
  try:
    return json.loads(path.read_text())
  except ValueError as error:
    raise ValueError(f"{path} is damaged: {error}") from error
