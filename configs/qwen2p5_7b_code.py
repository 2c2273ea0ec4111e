"""Qwen2.5-7B-Instruct on code problems: LiveCodeBench, TACO or APPS rows, or your own.

Command:   python -m fadejax.train --config=configs/qwen2p5_7b_code.py --workdir=runs/code \\
             --config.model.path=HF_DIRECTORY --config.task.path=taco.parquet
           HF_DIRECTORY is a download of the model: config.json, tokenizer.json and its companions,
           generation_config.json, *.safetensors. The plan (--plan_only) needs all but the last,
           and XLA_FLAGS=--xla_force_host_platform_device_count=8 shows on a laptop that of a
           machine with 8 devices.
           Another recipe: --config=configs/qwen2p5_7b_code.py:dapo
Hardware:  8 devices of 141 GB, Linux with bubblewrap (`make sandbox`), and cores for the graders
           (config.verifier.workers). The plan counts, a device of 8: parameters 3.81 GB, optimizer
           7.62 GB, cache 15.27 GB, activations about 2.3 GB. Besides, by arithmetic: the sampler's
           bfloat16 copy 15.2 GB, gradients 3.8 GB, and in a layer's backward pass attention scores
           of 8192 tokens, 28 heads × 8192 × 9216 × 4 bytes = 8.5 GB for each array of them.
           On devices of 80 GB shorten config.rollout.max_completion_length or set
           config.mesh.tensor=4.
Not measured: everything but the plan. Nobody has run this config: no step's time, no score, no
           learning rate tried, and not whether the compiler fits a step into that memory.

docs/data.md, "Code data sets", says what is read and how to audit a set first.
"""

from fadejax import recipes
from fadejax.config import default_config


def get_config(recipe="fade"):
  """32 prompts × 8 completions a step, prompts up to 1024 tokens, completions up to 8192."""
  c = default_config()
  c.steps = 200
  c.model.path = "Qwen2.5-7B-Instruct"
  c.model.dtype = "bfloat16"
  c.model.remat = "full"
  c.mesh.data = 1
  c.mesh.fsdp = -1  # parameters, moments and the batch over all devices
  c.task.name = "jsonl"
  c.task.path = "problems.jsonl"
  c.task.verifier = "code"
  # 0: all tests. Sets give each test its own limit, the verifier has one for all of a problem's.
  c.task.options = {"label": "", "max_tests": 0, "time_limit_s": 20.0, "outputs": "auto"}
  c.task.eval_problems = 64
  c.rollout.prompts = 32
  c.rollout.group = 8
  c.rollout.max_prompt_length = 1024
  c.rollout.max_completion_length = 8192
  c.loss.microbatches = 32  # one group at a time: the same update in a 32nd of the activations
  c.loss.logprob_chunk = 512  # 152064 logits a position
  c.optimizer.learning_rate = 1e-6
  c.optimizer.warmup_steps = 10
  c.evaluation.every = 20
  c.evaluation.samples = 4
  c.evaluation.ks = (1, 4)
  c.evaluation.batch = 32
  c.checkpoint.every = 20
  c.checkpoint.keep = 1  # each is 91 GB: float32 parameters and two moments
  c.verifier.workers = 16
  return recipes.apply(c, recipe)
