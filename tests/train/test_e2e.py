"""Whole commands, in processes of their own, on a policy of a few thousand parameters."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest

from fadejax.train.metrics import TIME_FIELDS, read_jsonl, unknown_keys

ROOT = Path(__file__).resolve().parents[2]
COUNTDOWN = [
  f"--config={ROOT}/configs/countdown_tiny.py",
  "--config.model.preset=nano",
  "--config.rollout.prompts=4",
  "--config.rollout.group=4",
  "--config.evaluation.samples=4",
  "--config.evaluation.ks=(1, 4)",
  "--config.evaluation.batch=8",
  "--config.task.eval_problems=16",
  "--config.sft.batch=16",
  "--config.sft.log_every=10",
  "--config.verifier.workers=1",
]


def command(module, *flags):
  return [sys.executable, "-m", f"fadejax.{module}", *map(str, flags)]


def environment():
  """One device: eight would only compile for longer."""
  flags = " ".join(f for f in os.environ["XLA_FLAGS"].split() if "device_count" not in f)
  return {**os.environ, "XLA_FLAGS": flags, "JAX_NUMPY_RANK_PROMOTION": "raise", "COLUMNS": "100"}


def run(module, *flags, ok=True, cwd=None):
  done = subprocess.run(
    command(module, *flags),
    capture_output=True,
    text=True,
    env=environment(),
    timeout=400,
    cwd=cwd,
  )
  if ok:
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
  return done


@pytest.fixture(scope="module")
def warm_start(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("sft")
  done = run("sft", *COUNTDOWN, f"--workdir={workdir}", "--config.sft.steps=60")
  rows, _ = read_jsonl(workdir / "metrics.jsonl")
  assert rows[-1]["loss"] < 0.8 * rows[0]["loss"]
  assert unknown_keys(rows[-1]) == []
  assert "pass@1" in done.stdout
  return workdir


def training(workdir, warm_start, *flags):
  return [
    *COUNTDOWN,
    f"--workdir={workdir}",
    f"--config.init_from={warm_start}",
    "--config.steps=30",
    "--config.checkpoint.every=3",
    "--config.log.tensorboard=True",
    *flags,
  ]


def without_times(rows):
  return [{k: v for k, v in row.items() if k not in TIME_FIELDS} for row in rows]


def state_of(workdir, step):
  with ocp.PyTreeCheckpointer() as reader:
    return reader.restore(workdir / "checkpoints" / f"step_{step}" / "state")


@pytest.mark.e2e
def test_a_killed_run_goes_on_bit_by_bit(tmp_path, warm_start):
  whole, killed = tmp_path / "whole", tmp_path / "killed"
  run("train", *training(whole, warm_start))
  process = subprocess.Popen(
    command("train", *training(killed, warm_start)),
    env=environment(),
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
    start_new_session=True,
  )
  deadline = time.monotonic() + 300
  while not (killed / "checkpoints" / "step_6").exists():
    assert process.poll() is None, "the run ended before it could be killed"
    assert time.monotonic() < deadline
    time.sleep(0.005)
  process.send_signal(signal.SIGKILL)
  assert process.wait() == -signal.SIGKILL
  # The newest checkpoint is damaged as well: the one before it is taken.
  newest = max((killed / "checkpoints").glob("step_*[0-9]"), key=lambda p: int(p.name[5:]))
  shutil.rmtree(newest / "state")
  done = run("train", *training(killed, warm_start))
  assert "resuming" in done.stdout and "cannot be read" in done.stdout

  for name in ("metrics.jsonl", "samples.jsonl"):
    a, b = (read_jsonl(d / name)[0] for d in (whole, killed))
    assert len(a) > 25 and without_times(a) == without_times(b)
  rows = read_jsonl(killed / "metrics.jsonl")[0]
  assert [row["step"] for row in rows] == list(range(31))
  assert [key for row in rows for key in unknown_keys(row)] == []
  a, b = (
    json.dumps(state_of(d, 30), default=lambda x: np.asarray(x).tolist()) for d in (whole, killed)
  )
  assert a == b
  a, b = ((d / "eval" / "step_000030.json").read_text() for d in (whole, killed))
  assert a == b


@pytest.mark.e2e
def test_second_start_compiles_nothing_and_reports(tmp_path, warm_start):
  cache = tmp_path / "cache"
  short = ["--config.steps=2", f"--config.compilation_cache={cache}"]
  run("train", *training(tmp_path / "a", warm_start, *short))
  entries = {p.name for p in cache.iterdir() if not p.name.endswith("-atime")}
  done = run("train", *training(tmp_path / "b", warm_start, *short))
  assert entries and {p.name for p in cache.iterdir() if not p.name.endswith("-atime")} == entries
  report = tmp_path / "b" / "report.html"
  assert str(report) in done.stdout and "pass@1" in done.stdout
  text = report.read_text()
  assert "<img" in text or "<svg" in text
  assert json.loads((tmp_path / "b" / "config.json").read_text())["steps"] == 2
  # What was exported loads as a model of its own, with the run's tokenizer, and scores the same.
  out = tmp_path / "eval.json"
  flags = [f"--config={ROOT}/configs/countdown_tiny.py", "--n=4", "--ks=1,4", f"--out={out}",
           "--config.task.eval_problems=16", "--config.evaluation.batch=8"]  # fmt: skip
  run("evaluate", *flags, f"--model={tmp_path / 'b' / 'export'}")
  exported = json.loads(out.read_text())
  after = json.loads((tmp_path / "b" / "eval" / "step_000002.json").read_text())
  best = max(
    (json.loads(p.read_text()) for p in (tmp_path / "b" / "eval").iterdir()),
    key=lambda r: r["step"],
  )
  assert best["step"] == 2
  assert exported["problems"] == after["problems"]
  low, high = exported["intervals"]["pass@1"]
  assert low <= exported["metrics"]["pass@1"] <= high
  # A checkpoint brings its run's config, architecture and tokenizer.
  run("evaluate", f"--checkpoint={tmp_path / 'b'}", f"--out={out}")
  assert json.loads(out.read_text())["problems"] == after["problems"]
  run("evaluate", *flags, f"--checkpoint={tmp_path / 'b'}")
  assert json.loads(out.read_text())["problems"] == after["problems"]
  for wrong, message in (
    ([f"--checkpoint={tmp_path / 'none'}"], "is not the workdir of a run"),
    ([], "--config=configs/NAME.py is wanted"),
    ([f"--checkpoint={tmp_path / 'b'}", "--ks=a"], "--ks=a: whole numbers"),
  ):
    done = run("evaluate", *wrong, ok=False)
    assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr


@pytest.mark.e2e
def test_own_data_with_the_math_verifier(tmp_path, warm_start):
  """The README's example: rows of prompt and answer, some of them bad."""
  model = tmp_path / "model"
  run("train", *training(tmp_path / "start", warm_start, "--config.steps=1"))
  (tmp_path / "start" / "export").rename(model)
  rows = [{"id": f"p{i}", "prompt": f"{i} + {i}", "answer": str(2 * i)} for i in range(20)]
  rows += [
    {"id": "long", "prompt": "1 + " * 40 + "1", "answer": "41"},
    {"id": "bad", "prompt": "1", "answer": "see the figure"},
  ]
  data = tmp_path / "problems.jsonl"
  data.write_text("".join(json.dumps(row) + "\n" for row in rows))
  flags = [
    f"--config={ROOT}/configs/own_data.py",
    f"--workdir={tmp_path / 'run'}",
    f"--config.model.path={model}",
    f"--config.task.path={data}",
    "--config.task.raw_prompt=True",
    "--config.steps=2",
    "--config.rollout.group=2",
    "--config.rollout.max_prompt_length=32",
    "--config.rollout.max_completion_length=8",
    "--config.evaluation.samples=2",
    "--config.evaluation.ks=(1, 2)",
    "--config.log.wandb=offline",
  ]
  done = run("train", *flags)
  assert "gold that does not parse" in done.stdout + done.stderr
  rows, _ = read_jsonl(tmp_path / "run" / "metrics.jsonl")
  assert [row["step"] for row in rows] == [0, 1, 2]
  assert rows[-1]["verdict/grader_error"] == 0
  assert (tmp_path / "run" / "wandb").is_dir()

  data.write_text('{"prompt": "1 + 1", "answer": "2"}\n{"prompt": "1 + 1"}\nnot json\n')
  done = run("train", *flags, f"--workdir={tmp_path / 'other'}", ok=False)
  assert done.returncode == 1
  assert "problems.jsonl" in done.stderr and "Traceback" not in done.stderr
  for line in ("2", "3"):
    assert f"line {line}" in done.stderr or f":{line}" in done.stderr


def countdown_with(path, change):
  """COUNTDOWN with a config file at `path` that lays the statement `change` over the config `c`."""
  path.write_text(
    "from configs.countdown_tiny import get_config as base\n"
    "def get_config():\n"
    "  c = base()\n"
    f"  {change}\n"
    "  return c\n"
  )
  return [f"--config={path}" if flag.startswith("--config=") else flag for flag in COUNTDOWN]


@pytest.mark.e2e
def test_a_mixture_is_measured_task_by_task(tmp_path, warm_start):
  mixture = (
    {"options": {"sizes": (3,), "label": "three"}, "weight": 3.0},
    {"options": {"sizes": (4,), "label": "four"}},
  )
  flags = countdown_with(tmp_path / "mixture.py", f"c.mixture = {mixture!r}")
  flags += [f"--workdir={tmp_path / 'run'}", f"--config.init_from={warm_start}"]
  flags += ["--config.steps=1", "--config.rollout.prompts=16", "--config.rollout.group=2"]
  run("train", *flags, cwd=ROOT)
  before, after = read_jsonl(tmp_path / "run" / "metrics.jsonl")[0]
  assert before["eval/n_problems"] == 32
  for name in ("three", "four"):
    assert 0 <= before[f"eval/{name}/pass@1"] <= 1 and f"solve_rate/{name}" in after
  samples, _ = read_jsonl(tmp_path / "run" / "samples.jsonl")
  sizes = {"three": 3, "four": 4}
  for row in samples:
    assert len(row["prompt"].split("=")[0].split()) == sizes[row["task"]]


@pytest.mark.e2e
def test_plan_only_profile_and_mistakes(tmp_path, warm_start):
  done = run("train", *training(tmp_path / "plan", warm_start), "--plan_only")
  zero = run("train", *training(tmp_path / "zero", warm_start, "--config.steps=0"))
  assert "report:" in zero.stdout
  assert "activations about" in done.stdout and not (tmp_path / "plan" / "metrics.jsonl").exists()

  done = run("train", *training(tmp_path / "p", warm_start, "--config.steps=3"), "--profile=2:2")
  assert list((tmp_path / "p" / "profile").rglob("*.xplane.pb"))

  for flags, message in (
    (["--config.rolout.group=4"], 'Did you mean "rollout"'),
    (["--config.rollout.groups=4"], 'Did you mean "group"'),
    (["--profil=1:2"], "Did you mean: profile"),
    (["--profile=5"], "FIRST:LAST"),
    (["--config.loss.normaliser=token_men"], "did you mean 'token_mean'"),
    (["--config.rollout.prompts=7", "--config.loss.microbatches=2"], "must be a multiple"),
    (["--config.policy_weight.name=maxpo", "--config.policy_weight.k=4"], "maxpo"),
    (["--config.mesh.fsdp=-1"], "are both -1"),
  ):
    done = run("train", *training(tmp_path / "m", warm_start), *flags, ok=False)
    assert done.returncode != 0 and message in done.stderr, (flags, done.stderr[-500:])
    assert "Traceback" not in done.stderr
  # The workdir of one run is not another's, nor another command's.
  done = run("train", *training(warm_start, warm_start), ok=False)
  assert done.returncode == 1 and "is the workdir of a run of fadejax.sft" in done.stderr
  done = run("train", *training(tmp_path / "p" / "export", warm_start), ok=False)
  assert done.returncode == 1 and "is not a run's" in done.stderr
  flags = countdown_with(tmp_path / "other.py", "c.model.overrides = {'rope_theta': 50.0}")
  flags += [f"--workdir={tmp_path / 'o'}", f"--config.init_from={warm_start}"]
  done = run("train", *flags, ok=False, cwd=ROOT)
  assert "rope_theta: 10000.0 there, 50.0 in config.model" in done.stderr
  done = run("train", *training(tmp_path / "p", warm_start, "--config.seed=3"), ok=False)
  assert done.returncode == 1 and "seed: 0 there, 3 now" in done.stderr
