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


def _decays(params: dict[str, Any]) -> dict[str, Any]:
  """True for matrices: norms and biases do not decay (stacked layers add one axis)."""

  def one(path: Any, x: jax.Array) -> bool:
    name = path[-1].key
    return x.ndim - (path[0].key == "layers") > 1 and not name.endswith("bias")

  return jax.tree_util.tree_map_with_path(one, params)
