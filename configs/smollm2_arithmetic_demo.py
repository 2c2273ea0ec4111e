"""SmolLM2-135M-Instruct learns to add, by RL with FADE: the demo.

Command:   make demo
           python -m fadejax.convert
           python -m fadejax.train --config=configs/smollm2_arithmetic_demo.py --workdir=runs/demo
Hardware:  2 CPU cores, about 6 GB of memory.
Time:      7 min 55 s with set-up and downloads; 13.3 s a step (rollout 3.4, update 10.0).
           9 min 35 s on a machine that other jobs share
Expected, over seeds 0, 1, 2, on 64 sums that training never draws (8 samples each):
           before  pass@1 0.033, pass@8 0.203, greedy 0.188, entropy 2.05 nats
           after   pass@1 0.572 / 0.549 / 0.586, pass@8 0.797 / 0.734 / 0.797,
                   greedy 0.594 / 0.609 / 0.625, entropy 0.21 / 0.24 / 0.15 nats
"""

from fadejax import recipes
from fadejax.cache import SMOLLM2, cache_dir
from fadejax.config import default_config


def get_config(recipe="fade"):
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
  return recipes.apply(c, recipe)
