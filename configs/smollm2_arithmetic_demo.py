"""SmolLM2-135M-Instruct learns to add, by RL with FADE: the demo.

Command:   make demo
           python -m fadejax.convert
           python -m fadejax.train --config=configs/smollm2_arithmetic_demo.py --workdir=runs/demo
"""

from fadejax.cache import SMOLLM2, cache_dir
from fadejax.config import default_config


def get_config():
  """8 prompts × 8 completions × 16 tokens a step, on one- and two-digit sums."""
  c = default_config()
  c.steps = 22
  c.model.path = str(cache_dir() / SMOLLM2)
  c.task.name = "arithmetic"
  c.task.eval_problems = 64
  c.rollout.prompts = 8
  c.rollout.group = 8
  c.rollout.max_prompt_length = 48
  c.rollout.max_completion_length = 16
  c.reward.require_end = True  # an answer that goes on and on is no answer
  c.weight.name = "fade"
  c.fade.beta = 0.2  # a short run: the averages must follow within a few steps
  c.optimizer.learning_rate = 1.5e-5
  c.optimizer.warmup_steps = 4
  c.optimizer.schedule = "linear"
  c.optimizer.final_fraction = 0.3
  c.evaluation.samples = 8
  c.evaluation.ks = (1, 8)
  c.evaluation.batch = 16
  c.checkpoint.every = 11
  c.checkpoint.keep = 1
  c.checkpoint.keep_best = 1
  return c
