"""A run that trains adapters alone: what moves, what is saved, and what comes out of it."""

from __future__ import annotations

import shutil
import zlib
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from fadejax.config import default_config, resolve
from fadejax.evaluate import run_evaluation
from fadejax.policy import hf, lora
from fadejax.sft import run_sft
from fadejax.train import ends, loop, setup
from fadejax.train.metrics import TIME_FIELDS, read_jsonl
from fadejax.verify import Verdict


def config(workdir=None, **changes):
  c = default_config()
  c.steps = 3
  c.model.preset = "nano"
  c.task.name = "countdown"
  c.task.raw_prompt = True
  c.task.eval_problems = 8
  c.rollout.prompts = 8
  c.rollout.group = 4
  c.rollout.max_prompt_length = 16
  c.rollout.max_completion_length = 8
  c.lora.rank = 4
  c.policy_weight.name = "reinforce"
  c.loss.kl_coefficient = 0.1
  c.optimizer.learning_rate = 1e-2
  c.optimizer.warmup_steps = 0
  c.checkpoint.every = 1
  c.checkpoint.keep = 3
  c.evaluation.at_start = False
  c.evaluation.samples = 0
  c.evaluation.ks = ()
  c.evaluation.batch = 8
  c.checkpoint.best_metric = "greedy"
  c.log.tensorboard = c.log.progress = False
  for path, value in changes.items():
    section, _, field = path.partition("__")
    setattr(c[section], field, value) if field else setattr(c, section, value)
  return resolve(c)


def state_of(workdir, step):
  with ocp.PyTreeCheckpointer() as reader:
    return reader.restore(Path(workdir) / "checkpoints" / f"step_{step}" / "state")


class Pool:
  """Right or wrong by the text alone, half of each: a policy that knows nothing gets some right."""

  def __enter__(self):
    return self

  def __exit__(self, *exception):
    pass

  def grade(self, items):
    return [Verdict(float(zlib.crc32(text.encode()) % 2), "ok", "") for _, text, _ in items]


@pytest.fixture(scope="module", autouse=True)
def stub_pool():
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(setup, "build_pool", lambda *_: Pool())
    yield


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("lora")
  loop.train(config(), workdir)
  return workdir


def test_only_adapters_are_trained_and_saved(run):
  first, last = (state_of(run, step)["params"] for step in (1, 3))
  assert set(last) == set(lora.LoraConfig().targets)
  moved = [np.abs(last[n][k] - first[n][k]).max() for n in last for k in ("a", "b")]
  assert min(moved) > 0
  numbers = sum(np.size(x) for x in jax.tree.leaves(state_of(run, 3)))
  trained = sum(np.size(x) for x in jax.tree.leaves(last))
  assert 3 * trained <= numbers < 3 * trained + 20  # the adapters, and Adam's two moments of them


def test_the_kl_is_to_the_model_below_and_begins_at_zero(run):
  rows, _ = read_jsonl(run / "metrics.jsonl")
  assert abs(rows[0]["kl"]) < 1e-9 < rows[2]["kl"]
  assert rows[0]["logprob_gap_max"] < 1e-4 and rows[2]["logprob_gap_max"] < 1e-4
  assert not (run / "first_params").exists()


def test_the_export_is_the_model_below_with_its_adapters(run):
  settings = config()
  tasks = setup.build_tasks(settings)
  policy = setup.build_policy(settings, setup.build_tokenizer(settings, tasks))
  exported = hf.load_params(run / "export", policy.arch, policy.train_layout)
  merged = ends.run_params(run, policy, 3)
  below = ends.initial_params(settings, policy).params
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), exported, merged)
  assert np.abs(np.asarray(exported["layers"]["q"] - below["layers"]["q"])).max() > 1e-4
  np.testing.assert_array_equal(exported["embedding"], below["embedding"])
  assert (run / "adapters" / "adapter_model.safetensors").exists()


def test_a_stopped_run_goes_on_bit_by_bit(run, tmp_path):
  again = tmp_path / "again"
  shutil.copytree(run, again)
  for step in (2, 3):
    shutil.rmtree(again / "checkpoints" / f"step_{step}")
  loop.train(config(), again)
  a, b = (read_jsonl(d / "metrics.jsonl")[0] for d in (run, again))
  strip = lambda rows: [{k: v for k, v in r.items() if k not in TIME_FIELDS} for r in rows]  # noqa: E731
  assert strip(a) == strip(b)
  jax.tree.map(np.testing.assert_array_equal, state_of(run, 3), state_of(again, 3))


def test_others_take_up_the_merged_model(run, tmp_path):
  """An evaluation of the run, and a run without adapters that begins from it."""
  report = run_evaluation(config(), str(run), None)
  assert report["metrics"]["n_problems"] == 8
  settings = config(lora__rank=0, steps=1, init_from=str(run))
  tasks = setup.build_tasks(settings)
  policy = setup.build_policy(settings, setup.build_tokenizer(settings, tasks))
  begun = ends.initial_params(settings, policy)
  merged = ends.run_params(run, policy, 3)
  jax.tree.map(np.testing.assert_array_equal, begun.params, merged)
  assert begun.step == 3


def test_what_does_not_go_with_adapters(run, tmp_path):
  with pytest.raises(ValueError, match=r"log\.head_every: with lora\.rank"):
    config(log__head_every=1)
  with pytest.raises(ValueError, match=r"config\.lora: supervised warm-up trains all"):
    run_sft(config(), tmp_path)
  with pytest.raises(ValueError, match=r"lora\.rank: 4 there, 2 now"):
    loop.train(config(lora__rank=2), run)
