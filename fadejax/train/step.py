"""The jitted update: from a graded rollout to new parameters.

`make_update` fixes what is static and returns a function

    update(state, rollout, rewards, extras) -> (state, metrics)

that updates FADE's running averages, turns them into α and δ, weighs the rollouts, and
takes one optimizer step a minibatch. Micro-batches only bound memory: sums are carried
with their divisor, and the gradient is divided once by the count of the whole minibatch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fadejax.algorithm import fade, losses, masses
from fadejax.algorithm.weights import WEIGHTS
from fadejax.arrays import RewardBatch, RolloutBatch
from fadejax.config import LossConfig, ModelConfig, PolicyWeightConfig, RolloutConfig
from fadejax.policy import model
from fadejax.policy.attention import block_of
from fadejax.policy.lora import LoraConfig, attach
from fadejax.policy.model import Params
from fadejax.policy.sharding import Layout
from fadejax.train.parts import add_up, read_once, split

Metrics = dict[str, jax.Array]

# Weights that have an α and a δ: these are logged. The others have neither.
_KNOBS: dict[str, tuple[float | None, float | None]] = {
  "dr_grpo": (1.0, 1.0),
  "power": (None, 1.0),
  "asym": (1.0, None),
  "power_asym": (None, None),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
  """Everything that an update changes; a checkpoint holds it whole."""

  params: Params  # float32; with LoRA the adapters alone
  opt_state: optax.OptState
  fade: fade.FadeState
  step: jax.Array  # i32[], updates of the loop done: rollout batches, not minibatches


def init_state(
  params: Params, optimizer: optax.GradientTransformation, config: fade.FadeConfig
) -> TrainState:
  """State before the first update. Call it under jit with output shardings."""
  return TrainState(params, optimizer.init(params), fade.init(config), jnp.zeros((), jnp.int32))


@dataclasses.dataclass(frozen=True)
class UpdateSettings:
  """What is static in an update."""

  arch: model.Architecture
  model: ModelConfig
  rollout: RolloutConfig
  policy_weight: PolicyWeightConfig
  fade: fade.FadeConfig
  loss: LossConfig
  total_steps: int
  lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)

  def whole(self, trained: Params, frozen: Params | None) -> Params:
    """The model of what is trained: it itself, or adapters on a frozen model."""
    return trained if frozen is None else attach(frozen, trained, self.lora)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tally:
  """Sums over drawn rollouts, and what to divide them by: the parts of means over them.

  With dynamic sampling a step draws more than it trains on; FADE's averages and the metrics are
  of all that was drawn.
  """

  sums: dict[str, jax.Array]  # f32[]
  groups: jax.Array  # f32[], valid ones
  completions: jax.Array  # f32[], of valid groups
  tokens: jax.Array  # f32[], of valid groups
  length_max: jax.Array  # i32[]
  invalid_groups: jax.Array  # i32[]
  tokens_drawn: jax.Array  # i32[], of invalid groups too

  def __add__(self, other: Tally) -> Tally:
    """Of the rollouts of both."""
    both = jax.tree.map(jnp.add, self, other)
    return dataclasses.replace(both, length_max=jnp.maximum(self.length_max, other.length_max))

  def metrics(self) -> Metrics:
    """The means; NaN where there is nothing to divide by."""
    by = {"solve_rate": self.completions, "reward_mean": self.completions,
          "mixed_share": self.groups, "entropy": self.tokens, "length_mean": self.completions,
          "truncated_share": self.completions}  # fmt: skip
    return {name: total / by[name] for name, total in self.sums.items()} | {
      "length_max": self.length_max,
      "invalid_groups": self.invalid_groups,
      "tokens": self.tokens_drawn,
    }


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Extras:
  """What only some runs give an update."""

  frozen: Params | None = None  # the model below the adapters, where only they are trained
  ref_params: Params | None = None  # of the KL term
  tally: Tally | None = None  # of all that was drawn; None: what is trained on
  demonstrations: RolloutBatch | None = None  # of parallel averaging, groups of one


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Batch:
  """One minibatch or micro-batch; axes as in RolloutBatch."""

  rollout: RolloutBatch
  weights: jax.Array  # f32[P, G]
  mask: jax.Array  # bool[P, G, C]
  old_logprobs: jax.Array | None  # f32[P, G, C]; None: the current ones, ratio exactly 1


# What `params` made of the prompts: keys and values [L, P, K, S, h], and last hidden [P, D].
_Read = tuple[jax.Array, jax.Array, jax.Array]


def _passes(settings: UpdateSettings, rollout: RolloutBatch, layout: Layout) -> dict[str, Any]:
  """Keyword arguments of both forward passes."""
  m = settings.model
  longest = max(rollout.prompts.tokens.shape[1], rollout.tokens.shape[2])
  block = block_of(m.attention, m.attention_block, longest)
  return dict(layout=layout, dtype=jnp.dtype(m.dtype), remat=m.remat, block=block)


def _read(settings: UpdateSettings, params: Params, rollout: RolloutBatch, layout: Layout) -> _Read:
  prompts, how = rollout.prompts, _passes(settings, rollout, layout)
  prefix, last = model.prefill(settings.arch, params, prompts.tokens, prompts.lengths, **how)
  return prefix.keys, prefix.values, last


def completion_logprobs(
  settings: UpdateSettings,
  params: Params,
  rollout: RolloutBatch,
  layout: Layout,
  read: _Read | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Log-probs and entropies, f32[P, G, C], of a rollout's tokens under `params`.

  At the sampling temperature, of the whole distribution; positions past a completion's
  length hold values that mean nothing. Where the prompts are `read` already, they are not again.
  """
  if read is None:
    read = _read(settings, params, rollout, layout)
  keys, values, last = read
  prefix = model.Prefix(keys, values, rollout.prompts.lengths)
  # The state of token t predicts token t + 1, so the last token's state is not needed.
  first = jnp.broadcast_to(last[:, None, None], (*rollout.tokens.shape[:2], 1, last.shape[-1]))
  hidden = first
  if rollout.tokens.shape[2] > 1:
    how = _passes(settings, rollout, layout)
    rest, _ = model.extend(settings.arch, params, prefix, rollout.tokens[:, :, :-1], **how)
    hidden = jnp.concatenate([first, rest], axis=2)
  hidden = layout.constrain(hidden, "prompts", "group", None, "act_embed")
  return losses.token_logprobs(
    hidden,
    model.head(params),
    rollout.tokens,
    temperature=settings.rollout.temperature,
    chunk=settings.loss.logprob_chunk or None,
  )


def negative_log_likelihood(
  params: Params, batch: RolloutBatch, settings: UpdateSettings, layout: Layout
) -> jax.Array:
  """f32[], nats a token of demonstrations, over all their tokens."""
  mask = losses.token_mask(batch.lengths, batch.tokens.shape[2])
  logprobs, _ = completion_logprobs(settings, params, batch, layout)
  return -jnp.sum(jnp.where(mask, logprobs, 0.0)) / jnp.sum(mask)


def _loss_sums(
  trained: Params,
  read: _Read | None,
  batch: _Batch,
  fixed: Extras,
  settings: UpdateSettings,
  layout: Layout,
  ref_read: _Read | None = None,
) -> tuple[jax.Array, Metrics]:
  """Numerator of the loss over one micro-batch, and sums for the metrics."""
  loss, mask, ref_params = settings.loss, batch.mask, fixed.ref_params
  params = settings.whole(trained, fixed.frozen)
  logprobs, _ = completion_logprobs(settings, params, batch.rollout, layout, read)
  logprobs = jnp.where(mask, logprobs, 0.0)
  old = jax.lax.stop_gradient(logprobs) if batch.old_logprobs is None else batch.old_logprobs
  per_token, clipped = losses.clipped_surrogate(
    logprobs,
    old,
    batch.weights,
    mask,
    clip_low=loss.clip_low,
    clip_high=loss.clip_high,
    ratio_cap=loss.ratio_cap or None,
    ratio_level=loss.ratio_level,
    form=loss.form,
  )
  if loss.importance_cap:
    correction = losses.truncated_importance(
      old, batch.rollout.sampler_logprobs, cap=loss.importance_cap
    )
    per_token = per_token * jnp.where(mask, correction, 0.0)
  kl_sum = jnp.zeros(())
  if ref_params is not None:
    ref_params = jax.lax.stop_gradient(ref_params)
    ref, _ = completion_logprobs(settings, ref_params, batch.rollout, layout, ref_read)
    kl = losses.kl_loss(logprobs, jnp.where(mask, ref, 0.0), loss.kl_estimator)
    per_token = per_token + loss.kl_coefficient * kl
    kl_sum = jnp.sum(jnp.where(mask, kl, 0.0))
  total, _ = _aggregate(per_token, mask, settings)
  # `old` is what the trainer says before the first update, unless it is the sampler's own.
  before = logprobs if loss.old_logprobs == "sampler" else old
  gap = jnp.where(mask, jnp.abs(before - batch.rollout.sampler_logprobs), 0.0)
  sums = {
    "loss": total,
    "kl": kl_sum,
    "clipped": jnp.sum(clipped & mask).astype(jnp.float32),
    "gap": jnp.sum(gap),
    "gap_max": jnp.max(gap),
  }
  return total, jax.lax.stop_gradient(sums)


def _aggregate(
  per_token: jax.Array, mask: jax.Array, settings: UpdateSettings
) -> tuple[jax.Array, jax.Array]:
  """(sum, divisor) of the configured normaliser."""
  constant = None
  if settings.loss.normaliser == "constant":
    constant = float(settings.rollout.max_completion_length)
  return losses.aggregate_parts(per_token, mask, settings.loss.normaliser, constant=constant)


def _gradient_of_groups(
  params: Params, batch: _Batch, fixed: Extras, settings: UpdateSettings, layout: Layout
) -> tuple[Params, Metrics]:
  """Gradient of `_loss_sums`, a part of every group at a time."""
  grad = jax.grad(_loss_sums, argnums=(0, 1), has_aux=True)
  if settings.loss.group_parts == 1:
    (gradient, _), sums = grad(params, None, batch, fixed, settings, layout)
    return gradient, sums
  rollout, ref_read = batch.rollout, None
  if fixed.ref_params is not None:
    ref_read = _read(settings, fixed.ref_params, rollout, layout)

  def of_part(params: Params, read: _Read, part: _Batch) -> tuple[Any, Metrics]:
    members = dataclasses.replace(part.rollout, prompts=rollout.prompts)
    part = dataclasses.replace(part, rollout=members)
    return grad(params, read, part, fixed, settings, layout, ref_read)

  no_prompts: Any = None  # they have no group axis: every part has them all
  members = dataclasses.replace(batch, rollout=dataclasses.replace(rollout, prompts=no_prompts))
  read = lambda p: _read(settings, settings.whole(p, fixed.frozen), rollout, layout)  # noqa: E731
  return read_once(read, of_part, params, split(members, settings.loss.group_parts, layout, axis=1))


def _gradient(
  params: Params, batch: _Batch, fixed: Extras, settings: UpdateSettings, layout: Layout
) -> tuple[Params, Metrics]:
  """Gradient of the loss over a minibatch, by micro-batches, and sums for the metrics."""
  parts = settings.loss.microbatches
  of_part = lambda part: _gradient_of_groups(params, part, fixed, settings, layout)  # noqa: E731
  if parts == 1:
    total, sums = of_part(batch)
  else:
    total, sums = add_up(of_part, split(batch, parts, layout), params)
  _, divisor = _aggregate(jnp.zeros(batch.mask.shape), batch.mask, settings)
  divisor = jnp.maximum(divisor, 1.0)
  return jax.tree.map(lambda g: g / divisor, total), {**sums, "loss": sums["loss"] / divisor}


def _optimise(
  params: Params,
  opt_state: optax.OptState,
  gradient: Any,
  optimizer: optax.GradientTransformation,
  something: jax.Array,
) -> tuple[Params, optax.OptState, jax.Array]:
  """One optimizer step, left out where the gradient is not finite, or of nothing.

  Args:
    params: to be updated.
    opt_state: the optimizer's.
    gradient: as the optimizer takes it.
    optimizer: the transformation.
    something: bool[], whether any token is in the loss; without, momentum alone would move it.

  Returns:
    (params, opt_state, whether the gradient was not finite).
  """
  finite = jnp.isfinite(optax.tree.norm(gradient))
  updates, new_opt = optimizer.update(gradient, opt_state, params)
  new_params = optax.apply_updates(params, updates)
  keep = lambda new, old: jnp.where(finite & something, new, old)  # noqa: E731
  return jax.tree.map(keep, new_params, params), jax.tree.map(keep, new_opt, opt_state), ~finite


def _mean(x: jax.Array, where: jax.Array) -> jax.Array:
  """Mean of x over True entries of `where`; NaN where there is none."""
  return jnp.sum(jnp.where(where, x, 0.0)) / jnp.sum(where)


def _valid_tokens(rollout: RolloutBatch, rewards: RewardBatch) -> jax.Array:
  """bool[P, G, C], the tokens of valid groups."""
  inside = losses.token_mask(rollout.lengths, rollout.tokens.shape[2])
  return inside & rewards.valid[:, None, None]


def tally(rollout: RolloutBatch, rewards: RewardBatch) -> Tally:
  """What one rollout batch adds to the means of its step."""
  valid = jnp.broadcast_to(rewards.valid[:, None], rewards.rewards.shape)
  tokens = _valid_tokens(rollout, rewards)
  raw = rewards.rewards
  right = jnp.sum(raw >= 0.5, axis=1)
  mixed = (right > 0) & (right < raw.shape[1])
  total = lambda x, where: jnp.sum(jnp.where(where, x, 0.0))  # noqa: E731
  count = lambda x: jnp.sum(x).astype(jnp.float32)  # noqa: E731
  return Tally(
    sums={
      "solve_rate": total(jnp.clip(raw, 0.0, 1.0), valid),
      "reward_mean": total(raw, valid),
      "mixed_share": count(mixed & rewards.valid),
      "entropy": total(rollout.entropy, tokens),
      "length_mean": total(rollout.lengths.astype(jnp.float32), valid),
      "truncated_share": count(rollout.truncated & valid),
    },
    groups=count(rewards.valid),
    completions=count(valid),
    tokens=count(tokens),
    length_max=jnp.max(jnp.where(valid, rollout.lengths, 0)),
    invalid_groups=jnp.sum(~rewards.valid),
    tokens_drawn=jnp.sum(rollout.lengths),
  )


def weigh(
  settings: UpdateSettings, rollout: RolloutBatch, rewards: RewardBatch, knobs: tuple[Any, Any]
) -> tuple[jax.Array, Metrics]:
  """Weights f32[P, G], zero in invalid groups, with their masses and the α and δ used."""
  name, options = settings.policy_weight.name, settings.policy_weight.settings()
  trained_on = rewards.rewards + rewards.shaping
  if name == "fade":
    options = {"alpha": knobs[0], "delta": knobs[1]}
  if name == "codapo":
    mean_logprob = jnp.sum(rollout.sampler_logprobs, axis=2) / jnp.maximum(rollout.lengths, 1)
    options["confidence"] = jnp.exp(jnp.mean(mean_logprob, axis=1))
  weights = WEIGHTS[name](trained_on, **options)
  weights = jnp.where(rewards.valid[:, None], weights, 0.0)
  m_s, m_f = masses.decompose(weights, rewards.rewards)
  drift = masses.entropy_drift(
    weights, rollout.sampler_logprobs, rollout.entropy, _valid_tokens(rollout, rewards)
  )
  metrics = {
    "m_s": _mean(m_s, rewards.valid),
    "m_f": _mean(m_f, rewards.valid),
    "drift_mass": drift[0],
    "drift_covariance": drift[1],
    "n_eff": masses.n_eff(weights),
    "mean_difficulty": masses.mean_difficulty(weights, rewards.rewards),
  }
  if name == "fade":
    metrics |= {"alpha": knobs[0], "delta": knobs[1]}
  elif name in _KNOBS:
    metrics |= {
      key: jnp.asarray(options.get(key, fixed), jnp.float32)
      for key, fixed in zip(("alpha", "delta"), _KNOBS[name], strict=True)
      if options.get(key, fixed) is not None
    }
  return weights, metrics


def make_update(
  settings: UpdateSettings,
  optimizer: optax.GradientTransformation,
  schedule: optax.Schedule,
  layout: Layout,
  state_shardings: Any = None,
) -> Callable[..., tuple[TrainState, Metrics]]:
  """The jitted update; the state is donated.

  Args:
    settings: what is static.
    optimizer: from `optim.make_optimizer`.
    schedule: its learning rate, for the metrics.
    layout: the training layout.
    state_shardings: TrainState of shardings that the new state must keep.

  Returns:
    The update; `extras.demonstrations` wants `optim.parallel_average`.
  """
  loss = settings.loss

  def update(
    state: TrainState,
    rollout: RolloutBatch,
    rewards: RewardBatch,
    extras: Extras = Extras(),
  ) -> tuple[TrainState, Metrics]:
    metrics = (tally(rollout, rewards) if extras.tally is None else extras.tally).metrics()
    mask = _valid_tokens(rollout, rewards)
    fade_state, alpha, delta = fade.update(
      settings.fade,
      state.fade,
      metrics["solve_rate"],
      metrics["entropy"],
      step=state.step,
      total_steps=settings.total_steps,
    )
    weights, weighed = weigh(settings, rollout, rewards, (alpha, delta))
    metrics |= weighed
    metrics |= {
      "fade_solve_rate": fade_state.solve_rate,
      "fade_entropy": fade_state.entropy,
      "target_entropy": fade.target_entropy(settings.fade, fade_state),
    }
    if loss.mask_truncated:
      mask = mask & ~rollout.truncated[..., None]
    old = None  # the current ones: with one update a batch they are those before the first
    if loss.old_logprobs == "sampler":
      old = rollout.sampler_logprobs
    elif loss.old_logprobs == "recompute" or loss.minibatches > 1:
      whole = settings.whole(state.params, extras.frozen)
      old, _ = completion_logprobs(settings, whole, rollout, layout)
      old = jax.lax.stop_gradient(jnp.where(mask, old, 0.0))

    def one(carry: Any, batch: _Batch) -> tuple[Any, Metrics]:
      params, opt_state = carry
      gradient: Any
      gradient, sums = _gradient(params, batch, extras, settings, layout)
      sums["grad_norm"] = optax.tree.norm(gradient)
      if extras.demonstrations is not None:
        of_trained = lambda p, *rest: negative_log_likelihood(  # noqa: E731
          settings.whole(p, extras.frozen), *rest
        )
        supervised = jax.value_and_grad(of_trained)
        sums["sft_loss"], other = supervised(params, extras.demonstrations, settings, layout)
        sums["sft_grad_norm"] = optax.tree.norm(other)
        gradient = (gradient, other)
      new = _optimise(params, opt_state, gradient, optimizer, jnp.any(batch.mask))
      return new[:2], {**sums, "skipped": new[2]}

    batch = _Batch(rollout, weights, mask, old)
    carry = state.params, state.opt_state
    if loss.minibatches == 1:
      (params, opt_state), sums = one(carry, batch)
      sums = jax.tree.map(lambda x: x[None], sums)
    else:
      (params, opt_state), sums = jax.lax.scan(one, carry, split(batch, loss.minibatches, layout))
    count = jnp.maximum(jnp.sum(mask), 1)
    metrics |= {
      "loss": jnp.mean(sums["loss"]),
      "kl": jnp.sum(sums["kl"]) / count,
      "clip_share": jnp.sum(sums["clipped"]) / count,
      "logprob_gap_mean": jnp.sum(sums["gap"]) / count,
      "logprob_gap_max": jnp.max(sums["gap_max"]),
      **{
        name: jnp.mean(sums[name])
        for name in ("grad_norm", "sft_loss", "sft_grad_norm")
        if name in sums
      },
      "update_skipped": jnp.sum(sums["skipped"]),
      "learning_rate": schedule(state.step * loss.minibatches),
    }
    return TrainState(params, opt_state, fade_state, state.step + 1), metrics

  shardings = None if state_shardings is None else (state_shardings, None)
  return jax.jit(update, donate_argnums=0, out_shardings=shardings)
