"""`python -m fadejax.sft --config=… --workdir=…`: supervised warm-up on demonstrations.

Trains the policy of a config on the demonstrations of its tasks (Countdown writes its own),
by the mean negative log-likelihood of their tokens. A run of `fadejax.train` starts from it
with `--config.init_from=WORKDIR`. Resumes where the workdir holds an earlier part.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags

from fadejax import command
from fadejax.algorithm import losses
from fadejax.arrays import PromptBatch, RolloutBatch
from fadejax.config import RolloutConfig, RunConfig, resolve, to_json
from fadejax.policy import model, sharding
from fadejax.train import setup
from fadejax.train import workdir as workdirs
from fadejax.train.checkpoint import Checkpoints
from fadejax.train.evaluation import evaluate
from fadejax.train.metrics import open_writers
from fadejax.train.optim import make_optimizer, make_schedule
from fadejax.train.step import UpdateSettings, completion_logprobs


def make_sft_update(
  settings: UpdateSettings,
  optimizer: optax.GradientTransformation,
  layout: sharding.Layout,
  state_shardings: Any,
) -> Callable[[Any, RolloutBatch], tuple[Any, dict[str, jax.Array]]]:
  """The jitted supervised update; the state {"params", "opt_state", "step"} is donated."""

  def loss_of(params: Any, batch: RolloutBatch) -> jax.Array:
    mask = losses.token_mask(batch.lengths, batch.tokens.shape[2])
    logprobs, _ = completion_logprobs(settings, params, batch, layout)
    return -jnp.sum(jnp.where(mask, logprobs, 0.0)) / jnp.sum(mask)

  def update(state: Any, batch: RolloutBatch) -> tuple[Any, dict[str, jax.Array]]:
    loss, gradient = jax.value_and_grad(loss_of)(state["params"], batch)
    updates, opt_state = optimizer.update(gradient, state["opt_state"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    metrics = {"loss": loss, "grad_norm": optax.tree.norm(gradient)}
    return {"params": params, "opt_state": opt_state, "step": state["step"] + 1}, metrics

  return jax.jit(update, donate_argnums=0, out_shardings=(state_shardings, None))


def demonstrations(
  problems: tuple[dict[str, Any], ...], run: setup.Policy, tasks: list, size: int
) -> tuple[np.ndarray, np.ndarray]:
  """Tokens i32[P, 1, C] and lengths i32[P, 1] of the problems' demonstrations, each ended.

  Raises:
    ValueError: a demonstration that is longer than `size`.
  """
  by_task = {task.name: task.demonstrations for _, task in tasks}
  tokens = np.full((len(problems), 1, size), run.tokenizer.pad_id, np.int32)
  lengths = np.zeros((len(problems), 1), np.int32)
  for i, problem in enumerate(problems):
    text = by_task[problem["task"]](problem)
    ids = [*run.tokenizer.encode(text), run.tokenizer.stop_ids[0]]
    if len(ids) > size:
      raise ValueError(
        f"demonstration {text!r} has {len(ids)} tokens, more than "
        f"rollout.max_completion_length = {size}"
      )
    tokens[i, 0, : len(ids)], lengths[i, 0] = ids, len(ids)
  return tokens, lengths


def place(host: Any, completions: tuple[np.ndarray, np.ndarray], layout: Any) -> RolloutBatch:
  """A batch of demonstrations on the devices, as completions of groups of one."""
  prompts: PromptBatch = setup.place_prompts(host, layout)
  tokens, lengths = completions
  put = lambda x: jax.device_put(x, layout.sharding(("prompts",) + (None,) * (x.ndim - 1), x.shape))  # noqa: E731
  empty = np.zeros(tokens.shape, np.float32)
  return RolloutBatch(prompts, put(tokens), put(lengths), put(lengths < 0), put(empty), put(empty))


def run_sft(config: RunConfig, workdir: Path) -> dict[str, float]:
  """Trains on demonstrations; returns the metrics of the evaluation at the end.

  Raises:
    ValueError: a task without demonstrations, or as `fadejax.train` does.
  """
  setup.enable_compilation_cache(config.compilation_cache)
  tasks = setup.build_tasks(config)
  missing = [task.name for _, task in tasks if task.demonstrations is None]
  if missing:
    raise ValueError(f"config.task: {', '.join(missing)} has no demonstrations to learn from")
  policy = setup.build_policy(config, setup.build_tokenizer(config, tasks))
  workdirs.check(workdir, config, policy.arch, "sft")
  s, r = config.sft, config.rollout
  layout = sharding.make_layout(policy.mesh, sharding.TRAIN_RULES, s.batch, 1)
  # Another seed, so that RL does not meet the same problems in the same order.
  pipeline = setup.build_pipeline(
    config, tasks, policy.tokenizer, prompts=s.batch, seed=config.seed + 1_000_003
  )
  schedule = make_schedule(s.learning_rate, s.warmup_steps, s.steps, s.schedule)
  optimizer = make_optimizer(schedule, weight_decay=s.weight_decay)
  settings = UpdateSettings(
    policy.arch, config.model, RolloutConfig(), config.weight, config.fade, config.loss, s.steps
  )
  params, source = setup.initial_params(config, policy)

  def make_state(params: model.Params) -> dict[str, Any]:
    step = jnp.zeros((), jnp.int32)
    return {"params": params, "opt_state": optimizer.init(params), "step": step}

  shardings = setup.state_shardings(policy, make_state, params)
  state = jax.jit(make_state, out_shardings=shardings, donate_argnums=0)(params)
  update = make_sft_update(settings, optimizer, layout, shardings)
  workdir.mkdir(parents=True, exist_ok=True)
  checkpoints = Checkpoints(workdir / "checkpoints", config.checkpoint)
  start = checkpoints.latest()
  if start is not None:
    state, _ = checkpoints.restore(start, state)
    print(f"resuming {workdir} from step {start}")
  workdirs.note(workdir, config, policy.arch, "sft")
  policy.tokenizer.save(workdir / "tokenizer")
  print(f"sft: {s.steps} updates of {s.batch} demonstrations, policy from {source}", flush=True)
  with open_writers(workdir, {"run": to_json(config)}, start) as writers:
    began, done = time.perf_counter(), start or 0  # at the last row: updates run ahead of it
    for step in range((start or 0) + 1, s.steps + 1):
      host = pipeline.batch((step - 1) * s.batch)
      batch = place(
        host, demonstrations(host.problems, policy, tasks, r.max_completion_length), layout
      )
      state, metrics = update(state, batch)
      every = config.checkpoint.every
      if step == s.steps or (every and step % every == 0):
        checkpoints.save(step, state, {"draws": step * s.batch, "seed": config.seed}, None)
      if step % s.log_every == 0 or step == s.steps:
        row = {k: float(v) for k, v in jax.device_get(metrics).items()}
        row |= {"step": step, "learning_rate": float(schedule(step - 1))}
        now = time.perf_counter()
        row |= {"time/step": (now - began) / (step - done)}
        began, done = now, step
        writers.row(row)
        print(f"step {step}: loss {row['loss']:.4f} nats a token", flush=True)
  checkpoints.close()
  with setup.build_pool(config, tasks) as pool:
    sampler_params = setup.to_sampler(policy, config.model.dtype)(state["params"])
    report = evaluate(policy, sampler_params, tasks, pool, config)
  return report["metrics"]


def main() -> None:
  """Resolves the config, trains, prints the evaluation."""
  metrics = run_sft(resolve(flags.FLAGS.config), command.workdir())
  print("  ".join(f"{key} {value:.3f}" for key, value in metrics.items()))
  print(f"start RL from it with --config.init_from={flags.FLAGS.workdir}")


if __name__ == "__main__":
  command.define_flags(workdir=True)
  command.run("sft", main)
