"""SmolLM2-135M-Instruct learns to write small Python functions, by RL with FADE, graded by asserts.

Command:   make demo-code
           python -m fadejax.convert
           python -m fadejax.train --config=configs/smollm2_code_demo.py --workdir=runs/code
Needs:     bubblewrap, which `make sandbox` installs; without it the run does not start.
Hardware:  2 CPU cores, about 7 GB of memory.
Time:      52 and 61 min on a machine that other jobs shared, 7 and 12 of them in the evaluations; a
           step 112 and 124 s (rollout 36, update 79, grading 2.7: 2.3 %), 74 s at best
Expected, on 40 functions that training never draws, zero-shot, 8 samples each at temperature 0.7:
           before  pass@1 0.284, pass@8 0.750, greedy 0.525, entropy 0.43 nats, truncated 0.50
           after   pass@1 0.528 / 0.562, pass@8 0.800 / 0.850, greedy 0.600 / 0.650,
                   entropy 0.25 / 0.33 nats, truncated 0.02 / 0.05, seeds 0 / 1
"""

from fadejax import recipes
from fadejax.cache import SMOLLM2, cache_dir
from fadejax.config import default_config


def get_config(recipe="fade"):
  """8 prompts × 8 completions × 96 tokens a step, on the 110 training problems."""
  c = default_config()
  c.steps = 24
  c.model.path = str(cache_dir() / SMOLLM2)
  c.task.name = "small_functions"
  c.task.system_prompt = "You are an expert Python programmer. Answer with Python code only."
  c.task.eval_problems = 0  # all 40
  c.rollout.prompts = 8
  c.rollout.group = 8
  c.rollout.max_prompt_length = 88
  c.rollout.max_completion_length = 96
  c.rollout.temperature = 0.7  # at 1 the model solves one in five to begin with, not one in three
  c.loss.microbatches = 8  # for memory
  c.fade.beta = 0.2  # a short run: the averages must follow within a few steps
  c.optimizer.learning_rate = 1.5e-5
  c.optimizer.warmup_steps = 4
  c.optimizer.schedule = "linear"
  c.optimizer.final_fraction = 0.3
  c.evaluation.samples = 8
  c.evaluation.ks = (1, 8)
  c.evaluation.batch = 20
  c.evaluation.temperature = c.rollout.temperature
  c.checkpoint.every = 12
  c.checkpoint.keep = 1
  c.checkpoint.keep_best = 1
  return recipes.apply(c, recipe)
