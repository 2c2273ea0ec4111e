"""FADE's schedule: two running averages, and the α and δ that they give (arXiv:2607.01490).

    α = clip(3 (1 - p̂) / (2 p̂), 1, α_max)        p̂ running solve rate
    δ = clip(1 + (Ĥ - H*) / u, δ_min, 1)          Ĥ running token entropy in nats, H* its target

Early the solve rate is low and the entropy high: α is large (hard focus) and δ is 1 (balanced).
Later α falls to 1, and δ below 1 weighs failures up. `update` is called once a rollout batch,
before the batch is weighed. The configuration is static, the state is a pytree of f32 scalars.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from fadejax.algorithm.weights import check_choice, check_number

_TINY = 1e-6  # floor of a solve rate or an entropy that is divided by


@dataclasses.dataclass(frozen=True)
class FadeConfig:
  """What the schedule is made of; ValueError names a field that is out of range."""

  beta: float = 0.02  # rate of both running averages, in (0, 1]
  initial_solve_rate: float = 0.5  # p̂ before the first batch
  target_entropy: str | float = "half_initial"  # H* in nats, or initial_fraction × first entropy
  initial_fraction: float = 0.5  # with half_initial
  entropy_unit: str | float = 1.0  # u in nats (the paper: 1), or "initial", which is ours
  alpha_max: float = 3.0  # >= 1
  delta_min: float = 0.3  # in (0, 1]
  ema_form: str = "rate"  # rate: x += β (new - x) | literal: x = β x + (1 - β) new
  use_alpha: bool = True  # False: α = 1
  use_delta: bool = True  # False: δ = 1
  driver: str = "paper"  # paper | entropy: α by entropy too | log_decay: both by step alone

  def __post_init__(self) -> None:
    check_number("FadeConfig.beta", self.beta, 0.0, 1.0, above=True)
    check_number("FadeConfig.initial_solve_rate", self.initial_solve_rate, 0.0, 1.0)
    if self.target_entropy != "half_initial":
      check_number("FadeConfig.target_entropy (or 'half_initial')", self.target_entropy, 0.0)
    check_number("FadeConfig.initial_fraction", self.initial_fraction, 0.0)
    if self.entropy_unit != "initial":
      check_number("FadeConfig.entropy_unit (or 'initial')", self.entropy_unit, 0.0, above=True)
    check_number("FadeConfig.alpha_max", self.alpha_max, 1.0)
    check_number("FadeConfig.delta_min", self.delta_min, 0.0, 1.0, above=True)
    check_choice("FadeConfig.ema_form", self.ema_form, ("rate", "literal"))
    check_choice("FadeConfig.driver", self.driver, ("paper", "entropy", "log_decay"))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FadeState:
  """The running averages; part of the checkpoint."""

  solve_rate: jax.Array  # f32[], p̂
  entropy: jax.Array  # f32[], Ĥ in nats; NaN until the first update
  initial_entropy: jax.Array  # f32[], that of the first batch, in nats; NaN until then


def init(config: FadeConfig) -> FadeState:
  """State before the first batch."""
  # Two arrays, not one twice: the state is donated, and a buffer can be donated only once.
  entropy, initial = (jnp.full((), jnp.nan, jnp.float32) for _ in range(2))
  return FadeState(jnp.asarray(config.initial_solve_rate, jnp.float32), entropy, initial)


def target_entropy(config: FadeConfig, state: FadeState) -> jax.Array:
  """H* in nats, f32[]; NaN while it depends on a first batch that has not come."""
  if isinstance(config.target_entropy, str):
    return config.initial_fraction * state.initial_entropy
  return jnp.asarray(config.target_entropy, jnp.float32)


def update(
  config: FadeConfig,
  state: FadeState,
  solve_rate: jax.Array | float,
  entropy: jax.Array | float,
  *,
  step: jax.Array | int | None = None,
  total_steps: int | None = None,
) -> tuple[FadeState, jax.Array, jax.Array]:
  """Takes one batch into the running averages, then gives α and δ for that batch.

  Args:
    config: static.
    state: f32 scalars.
    solve_rate: f32[], mean reward of all valid rollouts, before filters and shaping; it is
      clipped to [0, 1].
    entropy: f32[], mean entropy of their tokens, nats. Where either measurement is not finite
      (no valid group), the state stays as it was.
    step: i32[], updates done before this one; only `log_decay` reads it.
    total_steps: updates of the whole run, >= 1; only `log_decay` reads it.

  Returns:
    (state, α f32[], δ f32[]). While no entropy was ever measured, δ is 1 and an α driven by
    entropy is α_max.

  Raises:
    ValueError: driver log_decay without step or without a positive total_steps.
  """
  new_rate = jnp.clip(jnp.asarray(solve_rate, jnp.float32), 0.0, 1.0)
  new_entropy = jnp.asarray(entropy, jnp.float32)
  measured = jnp.isfinite(new_rate) & jnp.isfinite(new_entropy)
  first = jnp.isnan(state.initial_entropy)
  old_entropy = jnp.where(first, new_entropy, state.entropy)
  seen = FadeState(
    _average(config, state.solve_rate, new_rate),
    _average(config, old_entropy, new_entropy),
    jnp.where(first, new_entropy, state.initial_entropy),
  )
  state = jax.tree.map(lambda new, old: jnp.where(measured, new, old), seen, state)
  alpha, delta = _knobs(config, state, step, total_steps)
  one = jnp.ones((), jnp.float32)
  return state, alpha if config.use_alpha else one, delta if config.use_delta else one


def _average(config: FadeConfig, old: jax.Array, new: jax.Array) -> jax.Array:
  # As a step from one value, so that an average that has arrived stays put exactly.
  if config.ema_form == "rate":
    return old + config.beta * (new - old)
  return new + config.beta * (old - new)


def _knobs(
  config: FadeConfig, state: FadeState, step: jax.Array | int | None, total_steps: int | None
) -> tuple[jax.Array, jax.Array]:
  """α and δ of a state, before ablation."""
  span = config.alpha_max - 1.0
  if config.driver == "log_decay":
    if step is None or total_steps is None or total_steps < 1:
      raise ValueError(
        "fade.driver = 'log_decay' needs step and total_steps >= 1 in update(), "
        f"got step = {step!r}, total_steps = {total_steps!r}"
      )
    done = jnp.log1p(jnp.asarray(step, jnp.float32)) / math.log1p(total_steps)
    done = jnp.clip(done, 0.0, 1.0)
    return config.alpha_max - span * done, 1.0 - (1.0 - config.delta_min) * done
  target = target_entropy(config, state)
  excess = state.entropy - target
  if config.driver == "entropy":
    # A target at or over the first entropy leaves no way to go: the floor makes α a step there.
    way = jnp.maximum(state.initial_entropy - target, _TINY)
    alpha = jnp.clip(1.0 + span * excess / way, 1.0, config.alpha_max)
    alpha = jnp.where(jnp.isnan(alpha), config.alpha_max, alpha)
  else:
    rate = jnp.maximum(state.solve_rate, _TINY)
    alpha = jnp.clip(3.0 * (1.0 - rate) / (2.0 * rate), 1.0, config.alpha_max)
  unit: jax.Array | float
  if isinstance(config.entropy_unit, str):
    unit = jnp.maximum(state.initial_entropy, _TINY)
  else:
    unit = config.entropy_unit
  delta = jnp.clip(1.0 + excess / unit, config.delta_min, 1.0)
  return alpha, jnp.where(jnp.isnan(delta), 1.0, delta)


def delta_range(config: FadeConfig, initial_entropy: float) -> tuple[float, float]:
  """(lowest, highest) δ that a run can reach, for whatever its entropy does from here.

  Under a target of 0.7 units the floor δ_min is out of reach: print this at the start.

  Args:
    config: the schedule.
    initial_entropy: entropy of the first batch, nats, >= 0.

  Raises:
    ValueError: the entropy is negative or not finite.
  """
  if not math.isfinite(initial_entropy) or initial_entropy < 0.0:
    raise ValueError(f"initial_entropy must be a number in [0, inf), got {initial_entropy!r}")
  if not config.use_delta:
    return 1.0, 1.0
  if config.driver == "log_decay":
    return config.delta_min, 1.0
  initial = float(initial_entropy)
  target, unit = config.initial_fraction * initial, max(initial, _TINY)
  if not isinstance(config.target_entropy, str):
    target = config.target_entropy
  if not isinstance(config.entropy_unit, str):
    unit = config.entropy_unit
  return min(max(1.0 - target / unit, config.delta_min), 1.0), 1.0
