"""`python -m fadejax.sft --config=… --workdir=…`: supervised warm-up on demonstrations.

Trains the policy of a config on the demonstrations of its tasks (Countdown writes its own),
by the mean negative log-likelihood of their tokens. A run of `fadejax.train` starts from it
with `--config.init_from=WORKDIR`. Resumes where the workdir holds an earlier part.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from absl import flags

from fadejax import command
from fadejax.arrays import RolloutBatch
from fadejax.config import RolloutConfig, RunConfig, resolve, to_json
from fadejax.policy import model, sharding
from fadejax.train import ends, setup, supervised
from fadejax.train import workdir as workdirs
from fadejax.train.checkpoint import Checkpoints
from fadejax.train.evaluation import evaluate
from fadejax.train.metrics import open_writers
from fadejax.train.step import UpdateSettings, negative_log_likelihood


def make_sft_update(
  settings: UpdateSettings,
  optimizer: optax.GradientTransformation,
  layout: sharding.Layout,
  state_shardings: Any,
) -> Callable[[Any, RolloutBatch], tuple[Any, dict[str, jax.Array]]]:
  """The jitted supervised update; the state {"params", "opt_state", "step"} is donated."""

  def update(state: Any, batch: RolloutBatch) -> tuple[Any, dict[str, jax.Array]]:
    loss, gradient = jax.value_and_grad(negative_log_likelihood)(
      state["params"], batch, settings, layout
    )
    updates, opt_state = optimizer.update(gradient, state["opt_state"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    metrics = {"loss": loss, "grad_norm": optax.tree.norm(gradient)}
    return {"params": params, "opt_state": opt_state, "step": state["step"] + 1}, metrics

  return jax.jit(update, donate_argnums=0, out_shardings=(state_shardings, None))


def run_sft(config: RunConfig, workdir: Path) -> dict[str, float]:
  """Trains on demonstrations; returns the metrics of the evaluation at the end.

  Raises:
    ValueError: a task without demonstrations, or as `fadejax.train` does.
  """
  if config.lora.rank:
    raise ValueError("config.lora: supervised warm-up trains all parameters; set lora.rank to 0")
  setup.enable_compilation_cache(config.compilation_cache)
  tasks = setup.build_tasks(config)
  policy = setup.build_policy(config, setup.build_tokenizer(config, tasks))
  workdirs.check(workdir, config, policy.arch, "sft")
  with setup.precision(config):
    params = _train(config, workdir, policy, tasks)
    with setup.build_pool(config, tasks) as pool:
      sampler_params = setup.to_sampler(policy, config.model.dtype)(params)
      return evaluate(policy, sampler_params, tasks, pool, config)["metrics"]


def _train(config: RunConfig, workdir: Path, policy: setup.Policy, tasks: list) -> model.Params:
  """The updates, from the newest checkpoint or the start; returns the last parameters."""
  s = config.sft
  layout = sharding.make_layout(policy.mesh, sharding.TRAIN_RULES, s.batch, 1)
  shown = supervised.source(config, tasks, policy)
  schedule, optimizer = setup.sft_optimizer(config, s.steps)
  settings = UpdateSettings(
    policy.arch,
    config.model,
    RolloutConfig(),
    config.policy_weight,
    config.fade,
    config.loss,
    s.steps,
  )

  def make_state(params: model.Params) -> dict[str, Any]:
    step = jnp.zeros((), jnp.int32)
    return {"params": params, "opt_state": optimizer.init(params), "step": step}

  state = setup.abstract_state(policy, make_state)
  shardings = jax.tree.map(lambda x: x.sharding, state)
  update = make_sft_update(settings, optimizer, layout, shardings)
  with (
    workdirs.lock(workdir),
    contextlib.closing(Checkpoints(workdir / "checkpoints", config.checkpoint)) as checkpoints,
  ):
    start = checkpoints.latest()
    if start is None:
      params, source, init_step = ends.initial_params(config, policy)
      state = jax.jit(make_state, out_shardings=shardings, donate_argnums=0)(params)
    else:
      state, _, _ = checkpoints.restore(start, state)
      source, init_step = f"step {start} of {workdir}", workdirs.init_step(workdir)
    workdirs.note(workdir, config, policy.arch, "sft", init_step)
    policy.tokenizer.save(workdir / "tokenizer")
    print(f"sft: {s.steps} updates of {s.batch} demonstrations, policy from {source}", flush=True)
    with open_writers(
      workdir,
      json.loads(to_json(config)),
      start,
      tensorboard=config.log.tensorboard,
      wandb_mode=config.log.wandb,
      wandb_project=config.log.wandb_project,
    ) as writers:
      began, done = time.perf_counter(), start or 0  # at the last row: updates run ahead of it
      for step in range((start or 0) + 1, s.steps + 1):
        state, metrics = update(state, shown(step))
        if step % s.log_every == 0 or step == s.steps:
          row = {k: float(v) for k, v in jax.device_get(metrics).items()}
          row |= {"step": step, "learning_rate": float(schedule(step - 1))}
          now = time.perf_counter()
          row |= {"time/step": (now - began) / (step - done)}
          began, done = now, step
          writers.row(row)
          print(f"step {step}: loss {row['loss']:.4f} nats a token", flush=True)
        every = config.checkpoint.every
        if step == s.steps or (every and step % every == 0):
          checkpoints.save(step, state, {"draws": step * s.batch, "seed": config.seed}, None)
  return state["params"]


def main() -> None:
  """Resolves the config, trains, prints the evaluation."""
  metrics = run_sft(resolve(flags.FLAGS.config), command.workdir())
  print("  ".join(f"{key} {value:.3f}" for key, value in metrics.items()))
  print(f"start RL from it with --config.init_from={flags.FLAGS.workdir}")


if __name__ == "__main__":
  command.define_flags(workdir=True)
  command.run("sft", main)
