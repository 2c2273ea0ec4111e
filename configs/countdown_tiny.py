"""Countdown from scratch: a character policy of 0.2M parameters, warmed up, then RL.

Command:   python -m fadejax.sft --config=configs/countdown_tiny.py --workdir=runs/countdown-sft
           python -m fadejax.train --config=configs/countdown_tiny.py --workdir=runs/countdown \\
             --config.init_from=runs/countdown-sft
Hardware:  2 CPU cores.
Measured, one seed, on 64 unseen problems × 64 samples, pass@1/8/64:
           after 1000 supervised steps 0.128/0.475/0.812, after 100 RL steps 0.177/0.457/0.641
"""

from fadejax.config import default_config


def get_config():
  """32 prompts × 16 completions a step, three to five numbers."""
  c = default_config()
  c.steps = 100
  c.model.preset = "tiny"
  c.task.name = "countdown"
  c.task.raw_prompt = True
  c.task.eval_problems = 64
  c.rollout.prompts = 32
  c.rollout.group = 16
  c.rollout.max_prompt_length = 24
  c.rollout.max_completion_length = 28
  c.weight.name = "fade"
  c.fade.beta = 0.05
  c.optimizer.learning_rate = 3e-4
  c.optimizer.warmup_steps = 10
  c.sft.steps = 1000
  c.sft.batch = 128
  c.evaluation.samples = 64
  c.evaluation.ks = (1, 8, 64)
  c.evaluation.batch = 32
  c.checkpoint.every = 50
  return c
