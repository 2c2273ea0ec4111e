"""The plan's lines that no other test reads, and a plan for what this machine could not hold."""

import json

import jax
import pytest

from fadejax.config import default_config, resolve
from fadejax.data import tokenizer
from fadejax.data.records import Generated, Task, TaskConfig
from fadejax.policy import hf
from fadejax.train import ends, setup
from fadejax.train.plan import _task_line


def test_the_line_of_a_task_says_how_often_training_goes_through_its_problems():
  c = default_config()
  c.steps, c.rollout.prompts = 30, 8
  rows = [{"id": str(i)} for i in range(20)]
  listed = Task("listed", rows, rows[:5], {"rows over the limit": 2, "others": 0})
  endless = Task("endless", Generated(lambda i: {"id": str(i)}), rows[:7])
  tasks = [(TaskConfig(weight=3.0), listed), (TaskConfig(weight=1.0), endless)]
  # 30 × 8 draws, three quarters of them from 20 problems.
  assert _task_line(resolve(c), tasks, 0) == (
    "listed: 20 training problems, each drawn about 9 times; 5 evaluation problems; "
    "2 rows over the limit"
  )
  assert _task_line(resolve(c), tasks, 1) == "endless: 7 evaluation problems"


def test_where_planned_parameters_would_come_from(tmp_path):
  c = default_config()
  c.model.preset = "nano"
  run = resolve(c)
  policy = setup.build_policy(run, tokenizer.characters("0123456789"))
  planned, words, _ = ends.initial_params(run, policy, abstract=True)
  made = ends.initial_params(run, policy)
  assert words == made.source == "random, seed 0"
  like = lambda x: (x.shape, x.dtype, x.sharding)  # noqa: E731
  assert jax.tree.map(like, planned) == jax.tree.map(like, made.params)
  hf.save_params(tmp_path, policy.arch, made.params)
  (tmp_path / "config.json").write_text(json.dumps(hf.config_json(policy.arch, {}, None)))
  c.model.preset, c.model.path = "", str(tmp_path)
  policy = setup.build_policy(resolve(c), policy.tokenizer)
  words = ends.initial_params(resolve(c), policy, abstract=True).source
  assert words == f"Hugging Face directory {tmp_path}"
  c.init_from = str(tmp_path / "nowhere")
  with pytest.raises(FileNotFoundError, match=r"config\.init_from: .*nowhere does not exist"):
    ends.initial_params(resolve(c), policy, abstract=True)
