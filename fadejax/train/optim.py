"""The optimizer: AdamW with warm-up, a schedule and clipping, from optax."""

from __future__ import annotations

from typing import Any

import jax
import optax

SCHEDULES = ("constant", "linear", "cosine")


def make_schedule(
  learning_rate: float,
  warmup_steps: int,
  total_updates: int,
  schedule: str = "constant",
  final_fraction: float = 0.0,
) -> optax.Schedule:
  """Learning rate by number of updates done.

  Linear from learning_rate / warmup_steps at the first update to learning_rate at update
  `warmup_steps`, then constant, or linear or cosine down to
  final_fraction · learning_rate at `total_updates`.

  Raises:
    ValueError: an unknown schedule.
  """
  rest = max(1, total_updates - warmup_steps)
  final = final_fraction * learning_rate
  if schedule == "constant":
    after = optax.constant_schedule(learning_rate)
  elif schedule == "linear":
    after = optax.linear_schedule(learning_rate, final, rest)
  elif schedule == "cosine":
    after = optax.cosine_decay_schedule(learning_rate, rest, alpha=final_fraction)
  else:
    raise ValueError(f"schedule {schedule!r} is not one of {', '.join(SCHEDULES)}")
  if warmup_steps == 0:
    return after
  first = learning_rate / warmup_steps
  warmup = optax.linear_schedule(first, learning_rate, max(1, warmup_steps - 1))
  return optax.join_schedules([warmup, after], [warmup_steps])


def make_optimizer(
  schedule: optax.Schedule,
  *,
  b1: float = 0.9,
  b2: float = 0.95,
  eps: float = 1e-8,
  weight_decay: float = 0.0,
  clip_norm: float = 1.0,
) -> optax.GradientTransformation:
  """AdamW behind a bound on the global gradient norm (0: none). Matrices decay, vectors do not."""
  mask = _decays if weight_decay else None
  adam = optax.adamw(schedule, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=mask)
  return optax.chain(optax.clip_by_global_norm(clip_norm), adam) if clip_norm else adam


def parallel_average(
  rl: optax.GradientTransformation, sft: optax.GradientTransformation
) -> optax.GradientTransformation:
  """Two optimizers side by side on one set of parameters: θ ← θ + ½ (Δ_RL + Δ_SFT).

  Each gradient passes through its own state and learning rate, and the mean of the two
  *updates* is applied (parallel averaging, arXiv:2606.04272); one Adam on averaged gradients
  would let the larger gradient set the scale of both.

  Args:
    rl: optimizer of the policy gradient.
    sft: optimizer of the supervised gradient.

  Returns:
    A transformation whose updates go in as the pair (gradient_rl, gradient_sft), both of the
    parameters' structure, and come out as one; its state is {"rl": …, "sft": …}.
  """

  def init(params: Any) -> dict[str, Any]:
    return {"rl": rl.init(params), "sft": sft.init(params)}

  def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
    of_rl, rl_state = rl.update(gradients[0], state["rl"], params)
    of_sft, sft_state = sft.update(gradients[1], state["sft"], params)
    mean = jax.tree.map(lambda a, b: 0.5 * (a + b), of_rl, of_sft)
    return mean, {"rl": rl_state, "sft": sft_state}

  return optax.GradientTransformation(init, update)


def _decays(params: dict[str, Any]) -> dict[str, Any]:
  """True for matrices: norms and biases do not decay (stacked layers add one axis)."""

  def one(path: Any, x: jax.Array) -> bool:
    name = path[-1].key
    return x.ndim - (path[0].key == "layers") > 1 and not name.endswith("bias")

  return jax.tree_util.tree_map_with_path(one, params)
