"""Supervised warm-up: a run that stopped goes on bit by bit, on eight devices."""

from __future__ import annotations

import shutil

import numpy as np
import orbax.checkpoint as ocp

from fadejax.config import default_config, resolve
from fadejax.sft import run_sft


def config():
  c = default_config()
  c.model.preset = "nano"
  c.task.name = "countdown"
  c.task.raw_prompt = True
  c.task.eval_problems = 8
  c.rollout.prompts = 8
  c.rollout.group = 2
  c.rollout.max_prompt_length = 16
  c.rollout.max_completion_length = 16
  c.sft.steps = 4
  c.sft.batch = 16
  c.sft.warmup_steps = 1
  c.sft.log_every = 1
  c.checkpoint.every = 2
  c.evaluation.samples = 0
  c.evaluation.ks = ()
  c.evaluation.batch = 8
  c.checkpoint.best_metric = "greedy"
  c.verifier.workers = 1
  c.log.tensorboard = False
  return resolve(c)


def state_of(workdir):
  with ocp.PyTreeCheckpointer() as reader:
    return reader.restore(workdir / "checkpoints" / "step_4" / "state")


def test_a_stopped_warm_up_goes_on_bit_by_bit(tmp_path, capsys):
  metrics = run_sft(config(), tmp_path)
  whole, rows = state_of(tmp_path), (tmp_path / "metrics.jsonl").read_text().splitlines()
  assert len(rows) == 4 and 0 <= metrics["greedy"] <= 1
  shutil.rmtree(tmp_path / "checkpoints" / "step_4")  # as if it had stopped after step 2
  assert run_sft(config(), tmp_path) == metrics
  assert "policy from step 2 of" in capsys.readouterr().out
  again = state_of(tmp_path)
  np.testing.assert_array_equal(whole["params"]["head"], again["params"]["head"])
  assert int(again["step"]) == 4
  strip = lambda line: line.split('"time/step"')[0]  # noqa: E731
  lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
  assert list(map(strip, lines)) == list(map(strip, rows))
