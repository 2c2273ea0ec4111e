"""What a run writes while it trains: metrics, TensorBoard events, samples.

`metrics.jsonl` is the one source: a JSON object a line, one row a step, no step
twice. TensorBoard's event files are made from it, again on every resume. Rows
are plain Python numbers; nothing here imports jax. In a run of several hosts
only process 0 opens writers.

Files in the working directory: `metrics.jsonl`, `samples.jsonl`, `tensorboard/`,
and with wandb `wandb/` and `wandb_run_id.txt`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TextIO

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.summary_pb2 import Summary

# Every key a row may have, with its unit; <…> stands for a name. docs/metrics.md
# explains each, and a test keeps the two lists equal.
KNOWN_METRICS: Mapping[str, str] = {
  "step": "updates",
  "loss": "reward",
  "kl": "nats per token",
  "solve_rate": "share",
  "solve_rate/<task>": "share",
  "reward_mean": "reward",
  "reward/<name>": "reward",
  "mixed_share": "share",
  "entropy": "nats per token",
  "alpha": "1",
  "delta": "1",
  "fade_solve_rate": "share",
  "fade_entropy": "nats per token",
  "target_entropy": "nats per token",
  "m_s": "reward",
  "m_f": "reward",
  "sign_ratio": "1",
  "drift_mass": "nats per unit of learning rate",
  "drift_covariance": "nats per unit of learning rate",
  "n_eff": "groups",
  "mean_difficulty": "share",
  "head/rank_one_share": "share",
  "head/update_share": "share",
  "tied_head/rank_one_share": "share",
  "tied_head/update_share": "share",
  "sft_loss": "nats per token",
  "sft_grad_norm": "1",
  "refill/outcome": "full, short or none",
  "refill/batches": "batches",
  "refill/found": "groups",
  "refill/surplus": "groups",
  "refill/all_wrong": "groups",
  "refill/all_right": "groups",
  "clip_share": "share",
  "logprob_gap_mean": "nats per token",
  "logprob_gap_max": "nats per token",
  "grad_norm": "1",
  "update_skipped": "updates",
  "learning_rate": "1",
  "length_mean": "tokens",
  "length_max": "tokens",
  "truncated_share": "share",
  "verdict/<status>": "share",
  "invalid_groups": "groups",
  "prompts_drawn": "prompts",
  "prompts_redrawn": "prompts",
  "tokens": "tokens",
  "tokens_per_s": "tokens per second",
  "time/data": "seconds",
  "time/rollout": "seconds",
  "time/grade": "seconds",
  "time/grade_wait": "seconds",
  "time/update": "seconds",
  "time/eval": "seconds",
  "time/save": "seconds",
  "time/step": "seconds",
  "non_finite": "values",
  "eval/pass@<k>": "share",
  "eval/greedy": "share",
  "eval/entropy": "nats per token",
  "eval/truncated_share": "share",
  "eval/n_problems": "problems",
  "eval/<task>/<metric>": "as eval/<metric>",
}

# What may differ between a resumed and an uninterrupted run; all else is bit-equal.
TIME_FIELDS = (
  "tokens_per_s",
  "time/data",
  "time/rollout",
  "time/grade",
  "time/grade_wait",
  "time/update",
  "time/eval",
  "time/save",
  "time/step",
)

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
TENSORBOARD_DIR = "tensorboard"
WANDB_ID_FILE = "wandb_run_id.txt"


class Clock:
  """Seconds by phase, for one step's row."""

  def __init__(self) -> None:
    self.row: dict[str, float] = {}

  def add(self, phase: str, seconds: float) -> None:
    """Seconds more of a phase."""
    key = f"time/{phase}"
    self.row[key] = self.row.get(key, 0.0) + seconds

  @contextlib.contextmanager
  def __call__(self, phase: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    self.add(phase, time.perf_counter() - start)


def unknown_keys(row: Mapping[str, Any]) -> list[str]:
  """Keys of a row that KNOWN_METRICS (and so docs/metrics.md) does not list, sorted."""
  patterns = [re.sub(r"<\w+>", r"[^/]+", re.escape(key)) for key in KNOWN_METRICS]
  known = re.compile("|".join(patterns))
  return sorted(key for key in row if not known.fullmatch(key))


def read_jsonl(path: Path) -> tuple[list[dict[str, Any]], bool]:
  """Reads rows that each have an integer `step`.

  Args:
    path: a JSONL file. One that is missing reads as empty.

  Returns:
    The rows, and whether a torn last line (a write cut short by a kill) was left out.

  Raises:
    ValueError: a line other than the last is not such an object; names file and line.
  """
  if not path.exists():
    return [], False
  lines = path.read_bytes().split(b"\n")
  filled = [number for number, line in enumerate(lines) if line.strip()]
  rows = []
  for number in filled:
    try:
      row = json.loads(lines[number], parse_constant=lambda _: None)
    except ValueError:  # JSONDecodeError and UnicodeDecodeError are both
      row = None
    if isinstance(row, dict) and isinstance(row.get("step"), int):
      rows.append(row)
    elif number == filled[-1]:
      return rows, True
    else:
      raise ValueError(
        f"{path}, line {number + 1}: not a JSON object with an integer 'step'. "
        "The file is damaged; delete that line or restore the file."
      )
  return rows, False


def write_atomically(path: Path, text: str) -> None:
  """Replaces `path` by `text` so that a crash leaves the old file or the new one."""
  path.parent.mkdir(parents=True, exist_ok=True)
  scratch = path.with_name(path.name + ".tmp")
  with scratch.open("w", encoding="utf-8") as file:
    file.write(text)
    file.flush()
    os.fsync(file.fileno())
  os.replace(scratch, path)


def cut_back(workdir: Path, step: int) -> dict[str, int]:
  """Rewrites metrics.jsonl and samples.jsonl to their rows with `row["step"] <= step`.

  Args:
    workdir: the run's folder.
    step: the restored number of updates; -1 empties both files.

  Returns:
    file name -> number of lines dropped, a torn last line included.

  Raises:
    ValueError: a file is damaged (see `read_jsonl`); neither file is changed then.
  """
  contents = {name: read_jsonl(workdir / name) for name in (METRICS_FILE, SAMPLES_FILE)}
  dropped = {}
  for name, (rows, torn) in contents.items():
    kept = [row for row in rows if row["step"] <= step]
    dropped[name] = len(rows) - len(kept) + torn
    write_atomically(workdir / name, "".join(_to_json(row, name)[0] + "\n" for row in kept))
  return dropped


def _to_json(value: Any, where: str) -> tuple[str, int]:
  """Standard JSON of `value`, and how many NaN or infinite numbers became null."""
  non_finite = 0

  def plain(value: Any, where: str) -> Any:
    nonlocal non_finite
    if value is None or isinstance(value, str | bool):
      return value
    if isinstance(value, Integral):
      return int(value)
    if isinstance(value, Real):
      number = float(value)
      if math.isfinite(number):
        return number
      non_finite += 1
      return None
    if isinstance(value, Mapping):
      return {str(key): plain(item, f"{where}/{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
      return [plain(item, where) for item in value]
    raise TypeError(f"{where}: {type(value).__name__} is not plain data; convert it on the host")

  return json.dumps(plain(value, where), ensure_ascii=False, allow_nan=False), non_finite


@dataclass
class Writers:
  """The open files of a run; made by `open_writers`, usable as a context manager.

  Attributes:
    last_step: the newest step in metrics.jsonl, -1 for none.
    dropped: file name -> lines that opening dropped, to be printed by the caller.
  """

  metrics_file: TextIO
  samples_file: TextIO
  tensorboard: EventsWriter | None
  wandb_run: Any | None
  last_step: int
  dropped: dict[str, int]

  def row(self, row: Mapping[str, Any]) -> None:
    """Writes one step's row everywhere, on disk when this returns.

    A NaN or infinite value is written as null (JSON has neither) and counted in
    the row's `non_finite`, which is there only when it is not zero.

    Args:
      row: metric name -> plain number, with `step`.

    Raises:
      ValueError: the step is not above the last one written.
      TypeError: a value is not plain data (a jax array, say); names the key.
    """
    step = int(row["step"])
    if step <= self.last_step:
      raise ValueError(f"metrics.jsonl holds step {self.last_step}; step {step} cannot follow it")
    text, non_finite = _to_json(row, "row")
    if non_finite:
      text, _ = _to_json({**row, "non_finite": non_finite}, "row")
    self.metrics_file.write(text + "\n")
    self.metrics_file.flush()
    self.last_step = step
    stored = json.loads(text)
    if self.tensorboard is not None:
      self.tensorboard.write_event(_event(stored))
      self.tensorboard.flush()
    if self.wandb_run is not None:
      self.wandb_run.log({key: v for key, v in stored.items() if v is not None}, step=step)

  def samples(self, samples: Iterable[Mapping[str, Any]]) -> None:
    """Appends rollouts to samples.jsonl; each needs `step`."""
    for sample in samples:
      if "step" not in sample:
        raise ValueError("a row of samples.jsonl needs 'step', else it cannot be cut back")
      self.samples_file.write(_to_json(sample, "sample")[0] + "\n")
    self.samples_file.flush()

  def close(self, exit_code: int = 0) -> None:
    """Closes the files and ends the wandb run (failed if `exit_code` is not 0)."""
    self.metrics_file.close()
    self.samples_file.close()
    if self.tensorboard is not None:
      self.tensorboard.close()
    if self.wandb_run is not None:
      self.wandb_run.finish(exit_code=exit_code)

  def __enter__(self) -> Writers:
    return self

  def __exit__(self, kind: Any, *_: Any) -> None:
    self.close(exit_code=int(kind is not None))


def open_writers(
  workdir: Path,
  config: Mapping[str, Any],
  resume_step: int | None = None,
  *,
  tensorboard: bool = True,
  wandb_mode: str = "disabled",
  wandb_project: str = "fadejax",
  wandb_name: str | None = None,
) -> Writers:
  """Opens a run's files, cut back to where training goes on.

  Args:
    workdir: the run's folder, made if missing.
    config: the resolved config as plain data, for wandb.
    resume_step: the restored step; None starts afresh, so rows that an earlier
      start left without a checkpoint are dropped (and counted in `dropped`); a copy of them
      stays in metrics.jsonl.old and samples.jsonl.old.
    tensorboard: also write TensorBoard events.
    wandb_mode: "disabled", "offline" or "online". A resumed run goes on under the
      run id in wandb_run_id.txt; wandb ignores steps that it has already.
    wandb_project: wandb's project.
    wandb_name: wandb's display name; None lets wandb choose.

  Raises:
    ValueError: a file is damaged, or `wandb_mode` is none of the three.
    ImportError: wandb is asked for and not installed.
  """
  if wandb_mode not in ("disabled", "offline", "online"):
    raise ValueError(f"wandb mode is {wandb_mode!r}; use 'disabled', 'offline' or 'online'")
  workdir = Path(workdir)
  if resume_step is None:
    _keep_old(workdir)
  dropped = cut_back(workdir, -1 if resume_step is None else resume_step)
  rows, _ = read_jsonl(workdir / METRICS_FILE)
  wandb_run = None
  if wandb_mode != "disabled":
    wandb_run = _open_wandb(
      workdir, config, resume_step is not None, wandb_mode, wandb_project, wandb_name
    )
  return Writers(
    metrics_file=(workdir / METRICS_FILE).open("a", encoding="utf-8"),
    samples_file=(workdir / SAMPLES_FILE).open("a", encoding="utf-8"),
    tensorboard=_rebuild_tensorboard(workdir, rows) if tensorboard else None,
    wandb_run=wandb_run,
    last_step=rows[-1]["step"] if rows else -1,
    dropped=dropped,
  )


def _keep_old(workdir: Path) -> None:
  """Copies the rows of a run that starts again without its checkpoints to FILE.old."""
  for name in (METRICS_FILE, SAMPLES_FILE):
    rows, _ = read_jsonl(workdir / name)
    if rows and rows[-1]["step"] > 0:
      shutil.copy2(workdir / name, workdir / f"{name}.old")


def _event(row: Mapping[str, Any]) -> Event:
  """One TensorBoard event with every finite number of a row."""
  values = [
    Summary.Value(tag=key, simple_value=value)
    for key, value in row.items()
    if key != "step" and isinstance(value, int | float)
  ]
  return Event(wall_time=time.time(), step=row["step"], summary=Summary(value=values))


def _rebuild_tensorboard(workdir: Path, rows: Iterable[Mapping[str, Any]]) -> EventsWriter:
  """Replaces the event files by one made from `rows`, left open for more."""
  folder = workdir / TENSORBOARD_DIR
  folder.mkdir(parents=True, exist_ok=True)
  for old in folder.glob("*.out.tfevents.*"):
    old.unlink()
  # The plain writer, without tensorboardX's queue and thread: on disk when flushed.
  writer = EventsWriter(str(folder / "events"))
  for row in rows:
    writer.write_event(_event(row))
  writer.flush()
  return writer


def _open_wandb(
  workdir: Path,
  config: Mapping[str, Any],
  resumed: bool,
  mode: str,
  project: str,
  name: str | None,
) -> Any:
  """Starts or continues the wandb run whose id the workdir keeps."""
  try:
    import wandb
  except ImportError as error:
    raise ImportError("wandb is not installed: pip install 'fadejax[wandb]'") from error
  id_file = workdir / WANDB_ID_FILE
  if not (resumed and id_file.exists()):
    write_atomically(id_file, uuid.uuid4().hex[:12] + "\n")
  return wandb.init(
    project=project,
    name=name,
    id=id_file.read_text(encoding="utf-8").strip(),
    resume="allow",
    dir=str(workdir),
    mode="offline" if mode == "offline" else "online",
    config=json.loads(_to_json(config, "config")[0]),
  )
