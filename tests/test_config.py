"""Configs: every file resolves, every mistake is named."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from fadejax import config as configs

FILES = sorted((Path(__file__).resolve().parent.parent / "configs").glob("*.py"))


def load(path):
  spec = importlib.util.spec_from_file_location(path.stem, path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_every_config_file_resolves_and_says_how_to_run_it(path):
  module = load(path)
  run = configs.resolve(module.get_config())
  assert "Command:" in module.__doc__ and run.steps > 0


def test_defaults_resolve_and_json_gives_them_back():
  run = configs.resolve(configs.default_config())
  assert run == configs.RunConfig()
  assert configs.resolve(json.loads(configs.to_json(run))) == run


def test_config_file_cannot_set_a_field_that_is_not_there():
  c = configs.default_config()
  with pytest.raises(AttributeError, match="learning_rate"):
    c.optimizer.learning_rte = 1.0
  with pytest.raises(
    ValueError, match=r"config\.rollout\.grup: no such field; did you mean config\.rollout\.group"
  ):
    configs.resolve({"rollout": {"grup": 3}})


def test_fields_of_several_types():
  c = configs.default_config()
  assert configs.resolve(c).fade.target_entropy == "half_initial"
  c.fade.target_entropy = 1.3
  assert configs.resolve(c).fade.target_entropy == 1.3
  c.fade.target_entropy = "1.0"  # as a flag gives it
  assert configs.resolve(c).fade.target_entropy == 1.0
  c.task.system_prompt = "Be brief."
  assert configs.resolve(c).task.system_prompt == "Be brief."
  c.task.options = {"levels": ("1+1",)}
  c.policy_weight.name = "power"
  c.policy_weight.alpha = 2
  assert configs.resolve(c).policy_weight.settings() == {"alpha": 2.0}


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"rollout": {"group": 0}}, r"config\.rollout\.group: must be at least 1, got 0"),
    ({"rollout": {"temperature": 0.0}}, r"temperature: must be above 0"),
    ({"rollout": {"top_p": 1.5}}, r"top_p: must be at most 1"),
    ({"rollout": {"group": "8"}}, r"config\.rollout\.group: int is wanted, got '8'"),
    ({"optimizer": {"learning_rate": float("nan")}}, r"learning_rate: a finite number is wanted"),
    ({"sft": {"log_every": 0}}, r"sft\.log_every: must be at least 1"),
    ({"steps": 1.5}, r"config\.steps: int is wanted"),
    ({"policy_weight": {"name": "grp"}}, r"did you mean 'grpo'"),
    ({"policy_weight": {"name": "maxpo", "k": 8}}, r"policy_weight \(maxpo\): .*k"),
    (
      {"policy_weight": {"name": "power"}},
      r"config\.policy_weight\.alpha: the weight 'power' needs it",
    ),
    (
      {"policy_weight": {"name": "fade", "alpha": 2}},
      r"fade takes α and δ from the schedule",
    ),
    (
      {"policy_weight": {"name": "grpo", "alpha": 2.0}},
      r"config\.policy_weight\.alpha: the weight 'grpo' does not have it; it takes .*weight\.ddof",
    ),
    ({"fade": {"beta": 0.0}}, r"config\.fade: .*beta"),
    ({"evaluation": {"ks": (1, 16)}}, r"pass@16 cannot be estimated from evaluation\.samples = 8"),
    ({"checkpoint": {"best_metric": "pass@3"}}, r"best_metric: 'pass@3' is not among"),
    ({"rollout": {"prompts": 7}, "loss": {"microbatches": 2}}, r"product may be 1, 7"),
    ({"rollout": {"group": 6}, "loss": {"group_parts": 4}}, r"multiple of loss\.group_parts \(4\)"),
    ({"model": {"path": "a", "preset": "tiny"}}, r"set path or preset, not both"),
    ({"mixture": ({"nam": "arithmetic"},)}, r"config\.mixture\[0\]\.nam: no such field"),
    ({"mixture": ({"name": "arithmetics"},)}, r"task 'arithmetics' is not one of arithmetic"),
    ({"rollout": {"group": 1}}, r"group: 1 trains nothing, since fade compares"),
    ({"reward": {"extra": ({"weight": 1.0},)}}, r"reward\.extra\[0\]: needs 'verifier'"),
    (
      {"reward": {"extra": ({"verifier": "exact", "weight": float("nan")},)}},
      r"weight must be a finite number",
    ),
    (
      {"reward": {"extra": ({"verifier": "exat", "weight": 1.0},)}},
      r"reward\.extra\[0\]: unknown verifier 'exat'",
    ),
    (
      {"reward": {"extra": ({"verifier": "exact", "weight": 1},) * 2}},
      r"names \['exact', 'exact'\] must differ",
    ),
    (
      {"rollout": {"max_batches": 8}},
      r"config\.rollout\.max_batches: it does nothing without dynamic sampling",
    ),
    ({"rollout": {"when_none": "stop"}}, r"config\.rollout\.when_none: it does nothing without"),
    ({"rollout": 3}, r"config\.rollout: a section of fields is wanted"),
  ],
)
def test_mistakes_are_named(fields, message):
  with pytest.raises(ValueError, match=message):
    configs.resolve(fields)


def test_fields_of_dynamic_sampling_go_with_it():
  fields = {"dynamic_sampling": True, "max_batches": 8, "when_none": "stop"}
  run = configs.resolve({"rollout": fields})
  assert (run.rollout.max_batches, run.rollout.when_none) == (8, "stop")


def test_another_task_of_a_mixture_inherits_no_file_and_no_options():
  run = configs.resolve(
    {
      "task": {"name": "jsonl", "path": "a.jsonl", "options": {"label": "a"}, "raw_prompt": True},
      "mixture": ({"name": "arithmetic"}, {"weight": 3.0}, {"path": "b.jsonl"}),
    }
  )
  sums, same, other = configs.task_configs(run)
  assert (sums.path, sums.options, sums.raw_prompt) == ("", {}, True)
  assert (same.name, same.path, same.options, same.weight) == (
    "jsonl",
    "a.jsonl",
    {"label": "a"},
    3.0,
  )
  assert (other.path, other.options) == ("b.jsonl", {"label": "a"})


def test_mixture_lays_its_fields_over_the_task():
  run = configs.resolve(
    {
      "task": {"eval_problems": 5},
      "mixture": ({"name": "arithmetic"}, {"name": "countdown", "weight": 2.0}),
    }
  )
  a, b = configs.task_configs(run)
  assert (a.name, b.name, b.weight, a.eval_problems, b.eval_problems) == (
    "arithmetic",
    "countdown",
    2.0,
    5,
    5,
  )
