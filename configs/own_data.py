"""Your own data: a file of prompts and answers, graded by the math verifier.

Command:   python -m fadejax.train --config=configs/own_data.py --workdir=runs/mine \\
             --config.model.path=HF_DIRECTORY --config.task.path=problems.jsonl

Rows: {"prompt": "What is 17 + 5?", "answer": "22"}; docs/data.md lists what else is read.
"""

from fadejax import recipes
from fadejax.cache import SMOLLM2, cache_dir
from fadejax.config import default_config


def get_config(recipe="fade"):
  """A starting point: one group of 8 for each of 8 prompts, 64 tokens."""
  c = default_config()
  c.steps = 100
  c.model.path = str(cache_dir() / SMOLLM2)
  c.task.name = "jsonl"
  c.task.path = "problems.jsonl"
  c.task.verifier = "math"
  c.rollout.prompts = 8
  c.rollout.group = 8
  c.rollout.max_prompt_length = 128
  c.rollout.max_completion_length = 64
  c.loss.microbatches = 4  # two prompts at a time: a quarter of the memory, the same update
  c.optimizer.learning_rate = 5e-6
  c.optimizer.warmup_steps = 5
  c.evaluation.every = 50
  return recipes.apply(c, recipe)
