"""`python -m fadejax.evaluate`: pass@k and greedy accuracy of a checkpoint or a model.

  python -m fadejax.evaluate --checkpoint=WORKDIR --out=eval.json
  python -m fadejax.evaluate --config=configs/NAME.py --model=HF_DIRECTORY --n=64 --ks=1,8,64

A checkpoint brings its run's architecture and tokenizer, and without --config the run's whole
config, so that it is measured as it was trained. Writes JSON with n and c of every problem, and
pass@k with a 95 % bootstrap interval over problems. Its `problems` can filter a later run's data
(`config.task.solve_rates`).
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from fadejax import command
from fadejax.algorithm import passk
from fadejax.config import RunConfig, resolve
from fadejax.data import tokenizer as tokenizers
from fadejax.data.records import TaskConfig
from fadejax.train import ends, setup
from fadejax.train.evaluation import evaluate
from fadejax.train.metrics import write_atomically
from fadejax.train.workdir import read_architecture, read_config


def with_intervals(report: dict[str, Any], ks: tuple[int, ...]) -> dict[str, Any]:
  """The report with `intervals`: {"pass@k": [low, high]}, 95 %, over problems."""
  n = np.array([p["n"] for p in report["problems"]])
  c = np.array([p["c"] for p in report["problems"]])
  intervals = {}
  for k in ks:
    values = passk.pass_at_k(n, c, k)
    intervals[f"pass@{k}"] = list(passk.bootstrap_interval(values[~np.isnan(values)]))
  return {**report, "intervals": intervals}


def run_evaluation(config: RunConfig, checkpoint: str, step: int | None) -> dict[str, Any]:
  """Evaluates a run's checkpoint (the newest, or `step`), or the config's own model.

  Raises:
    ValueError, FileNotFoundError: as the config, model or checkpoint demand.
  """
  setup.enable_compilation_cache(config.compilation_cache)
  tasks = setup.build_tasks(config)
  if checkpoint:
    arch = read_architecture(Path(checkpoint))
    policy = setup.build_policy(config, tokenizers.load(Path(checkpoint) / "tokenizer"), arch)
    params = ends.run_params(Path(checkpoint), policy, step)
  else:
    policy = setup.build_policy(config, setup.build_tokenizer(config, tasks))
    params = ends.initial_params(config, policy).params
  params = setup.to_sampler(policy, config.model.dtype)(params)
  with setup.precision(config), setup.build_pool(config, tasks) as pool:
    report = evaluate(policy, params, tasks, pool, config)
  return with_intervals(report, config.evaluation.ks if config.evaluation.samples else ())


def _settings(values: Any) -> RunConfig:
  """The config with the command's own flags laid over it."""
  config = resolve(values.config) if values.config else read_config(Path(values.checkpoint))
  if values.model:
    config = dataclasses.replace(
      config, model=dataclasses.replace(config.model, path=values.model, preset=""), init_from=""
    )
  task = config.task
  if values.task.endswith((".jsonl", ".parquet")):
    options = task.options if task.name == "jsonl" else {}
    task = dataclasses.replace(
      task, name="jsonl", path=values.task, eval_path=values.task, eval_problems=0,
      options=options, solve_rates="", min_solve_rate=0.0, max_solve_rate=1.0,
    )  # fmt: skip
  elif values.task:
    task = TaskConfig(
      name=values.task,
      system_prompt=task.system_prompt,
      raw_prompt=task.raw_prompt,
      template_args=task.template_args,
      eval_problems=task.eval_problems,
    )
  evaluation = config.evaluation
  samples = evaluation.samples if values.n is None else values.n
  if not all(k.isdigit() for k in values.ks):
    raise ValueError(f"--ks={','.join(values.ks)}: whole numbers are wanted, such as 1,8")
  ks = tuple(int(k) for k in values.ks) or tuple(k for k in evaluation.ks if k <= samples)
  if not samples and values.ks:
    raise ValueError("--n=0 samples nothing, so that --ks has nothing to estimate from")
  evaluation = dataclasses.replace(evaluation, ks=ks, samples=samples)
  mixture = () if values.task else config.mixture
  keep = dataclasses.replace(config.checkpoint, keep_best=0)  # nothing is kept here
  config = dataclasses.replace(
    config, task=task, mixture=mixture, evaluation=evaluation, checkpoint=keep
  )
  return resolve(dataclasses.asdict(config))


def main() -> None:
  """Evaluates, prints the metrics and writes the JSON."""
  values = flags.FLAGS
  if values.checkpoint and values.model:
    raise ValueError("--checkpoint and --model: give one of them")
  if not values.config and not values.checkpoint:
    raise ValueError("--config=configs/NAME.py is wanted (only --checkpoint goes without)")
  if values.step is not None and not values.checkpoint:
    raise ValueError("--step chooses among the checkpoints of a run: give --checkpoint too")
  if values.out and Path(values.out).is_dir():
    raise ValueError(f"--out={values.out} is a directory; name a file")
  report = run_evaluation(_settings(values), values.checkpoint, values.step)
  for key, value in report["metrics"].items():
    low, high = report["intervals"].get(key, (None, None))
    print(f"{key:16} {value:.4f}" + ("" if low is None else f"  [{low:.4f}, {high:.4f}]"))
  if values.out:
    Path(values.out).parent.mkdir(parents=True, exist_ok=True)
    write_atomically(Path(values.out), json.dumps(report, indent=1) + "\n")
    print(f"written: {values.out}")


if __name__ == "__main__":
  command.define_flags(workdir=False, config_required=False)
  flags.DEFINE_string("checkpoint", "", "Workdir of a run: its newest checkpoint is evaluated.")
  flags.DEFINE_integer("step", None, "Step of the checkpoint, instead of the newest.")
  flags.DEFINE_string("model", "", "Hugging Face directory to evaluate.")
  flags.DEFINE_string("task", "", "Task name, or a .jsonl or .parquet file; default: the config's.")
  flags.DEFINE_integer("n", None, "Samples a problem; default: evaluation.samples.")
  flags.DEFINE_list("ks", [], "k of pass@k, such as 1,8; default: evaluation.ks.")
  flags.DEFINE_string("out", "", "JSON file to write.")
  command.run("evaluate", main)
