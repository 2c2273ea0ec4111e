"""The loss, piece by piece: surrogate, KL, divisors, masks, log-probs over the vocabulary.

Every piece is a pure function of arrays with any leading axes; C is the completion axis
and comes last. Each is its own switch, and a published method is a preset of switches:

    DAPO      clip 0.2 / 0.28, token ratio, `token_mean`, overlong penalty
    GRPO      clip 0.2 / 0.2, token ratio, `sequence_mean`, KL
    Dr. GRPO  clip 0.2 / 0.2, token ratio, `constant` = the maximum length
    GSPO      clip 3e-4 / 4e-4, sequence ratio, `sequence_mean`
    CISPO     form `cispo`, token ratio, `token_mean`

Only places where the mask is True count. Functions that take a mask give 0 elsewhere, value
and gradient, even where a padded entry holds NaN.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

RATIO_LEVELS = ("token", "sequence")
FORMS = ("clip", "cispo")
NORMALISERS = ("token_mean", "sequence_mean", "constant")
KL_ESTIMATORS = ("k1", "k2", "k3", "k3_value_k2_gradient")

# Bound of a log-ratio before exp: e^20 = 4.9e8. Bounding the result instead would leave
# 0 · inf = NaN in the gradient.
MAX_LOG_RATIO = 20.0
CISPO_RATIO_CAP = 5.0


def token_mask(lengths: jax.Array, size: int) -> jax.Array:
  """True for the first `lengths` places of each row.

  Args:
    lengths: i32[...], the stop token included: it was sampled, so it is trained.
    size: C, the padded length.

  Returns:
    bool[..., C].
  """
  lengths = jnp.asarray(lengths)
  places = jax.lax.broadcasted_iota(lengths.dtype, (*lengths.shape, size), lengths.ndim)
  return places < lengths[..., None]


def masked_sum(values: jax.Array, mask: jax.Array, axis: int | None = None) -> jax.Array:
  """Sum of the values (f32[...], or bool to count) where the mask (bool[...]) is True."""
  values, mask = _floats(values), jnp.asarray(mask).astype(bool)
  _same_shape("masked_sum", values=values, mask=mask)
  return jnp.where(mask, values, 0.0).sum(axis)


def masked_mean(values: jax.Array, mask: jax.Array, axis: int | None = None) -> jax.Array:
  """Mean of the values where the mask is True; 0 where it is True nowhere."""
  return _divide(masked_sum(values, mask, axis), jnp.asarray(mask).astype(bool).sum(axis))


def clipped_surrogate(
  logprobs: jax.Array,
  old_logprobs: jax.Array,
  weights: jax.Array,
  mask: jax.Array,
  *,
  clip_low: float,
  clip_high: float,
  ratio_cap: float | None = None,
  ratio_level: str = "token",
  form: str = "clip",
) -> tuple[jax.Array, jax.Array]:
  """Policy loss of each token, and where its bound holds.

  With the ratio ρ = π / π_old of a token, or of a sequence, exp(mean_t log ρ_t):

      clip    -min(ρ A, clip(ρ, 1 - clip_low, 1 + clip_high) A), gradient 0 where it binds
      cispo   -stop_gradient(min(ρ, ratio_cap)) · A · log π; every token keeps a gradient

  At ρ = 1 both have the policy gradient, that of -A log π. Gradient flows through
  `logprobs` only. log ρ is bounded to ±20 before exp, without gradient beyond.

  Args:
    logprobs: f32[..., C], nats, of the policy in training.
    old_logprobs: f32[..., C], of π_old; may be `logprobs` itself (ρ = 1).
    weights: f32[...], A of each completion; broadcast over C only.
    mask: bool[..., C].
    clip_low: how far ρ may fall for A < 0, in [0, 1]; unused by `cispo`.
    clip_high: how far ρ may rise for A > 0, at least 0; unused by `cispo`.
    ratio_cap: bound of ρ for A < 0, at least 1 (None: none); in `cispo` of all (None: 5).
    ratio_level: `token`, or `sequence`: one ratio repeated over the tokens, so that
      `sequence_mean` gives GSPO's loss.
    form: `clip` or `cispo`.

  Returns:
    (loss f32[..., C] to be minimised, clipped bool[..., C]), both 0 off the mask.
    `clipped` is True only where a bound changes the loss.

  Raises:
    ValueError: unknown `ratio_level` or `form`, bounds out of range, or shapes that differ.

  Source: PPO, arXiv:1707.06347; DAPO, 2503.14476 (two bounds); dual clip, 1912.09729;
  GSPO, 2507.18071; CISPO, 2506.13585.
  """
  _one_of("ratio_level", ratio_level, RATIO_LEVELS)
  _one_of("form", form, FORMS)
  _check_bounds(clip_low, clip_high, ratio_cap, form)
  logprobs, old_logprobs, weights = _floats(logprobs), _floats(old_logprobs), _floats(weights)
  mask = jnp.asarray(mask).astype(bool)
  _same_shape("clipped_surrogate", logprobs=logprobs, old_logprobs=old_logprobs, mask=mask)
  weights = _over_tokens(weights, logprobs.shape)
  logprobs = jnp.where(mask, logprobs, 0.0)
  ratio = _ratio(logprobs, old_logprobs, mask, ratio_level)
  if form == "cispo":
    loss, clipped = _cispo(ratio, logprobs, weights, ratio_cap)
  else:
    loss, clipped = _clip(ratio, weights, clip_low, clip_high, ratio_cap)
  return jnp.where(mask, loss, 0.0), clipped & mask


def aggregate_parts(
  per_token: jax.Array, mask: jax.Array, normaliser: str, *, constant: float | None = None
) -> tuple[jax.Array, jax.Array]:
  """A loss as (sum, divisor), so that parts of a batch add up and are divided once.

  Adding both over micro-batches and devices and dividing at the end gives the loss of the
  whole batch exactly, however it was cut; averages of averages do not.

  Args:
    per_token: f32[..., C].
    mask: bool[..., C].
    normaliser: the divisor's name.
      `token_mean` (DAPO): the number of tokens.
      `sequence_mean` (GRPO): the number of sequences with any token, each averaged over
        its own tokens first.
      `constant` (Dr. GRPO): that number × `constant`, the maximum length.
    constant: needed by `constant`, positive; the others do not look at it.

  Returns:
    (sum f32[], divisor f32[]). The divisor has no gradient; it is 0 where no mask is True.

  Raises:
    ValueError: unknown normaliser, `constant` missing or not positive, shapes that differ.
  """
  _one_of("normaliser", normaliser, NORMALISERS)
  per_token, mask = _floats(per_token), jnp.asarray(mask).astype(bool)
  _same_shape("aggregate", per_token=per_token, mask=mask)
  if normaliser == "token_mean":
    return masked_sum(per_token, mask), mask.sum().astype(per_token.dtype)
  sequences = mask.any(axis=-1).sum().astype(per_token.dtype)
  if normaliser == "sequence_mean":
    return masked_mean(per_token, mask, axis=-1).sum(), sequences
  if constant is None or _not_above(constant, 0):
    raise ValueError(f"normaliser 'constant' needs constant > 0 (a length), got {constant}")
  return masked_sum(per_token, mask), sequences * constant


def aggregate(
  per_token: jax.Array, mask: jax.Array, normaliser: str, *, constant: float | None = None
) -> jax.Array:
  """The loss f32[] of a whole batch; 0 where no mask is True. See `aggregate_parts`."""
  return _divide(*aggregate_parts(per_token, mask, normaliser, constant=constant))


def kl(logprobs: jax.Array, ref_logprobs: jax.Array, estimator: str) -> jax.Array:
  """Estimates of KL(π ‖ π_ref) from sampled tokens, one a token.

  With d = log π - log π_ref: k1 = d, k2 = d²/2, k3 = e^-d - 1 + d, with d bounded to ±20
  in k3. k1 and k3 have the right mean, k2 the right gradient: the mean of ∇k2 is ∇KL,
  that of ∇k1 is zero and that of ∇k3 is the gradient of the other KL, KL(π_ref ‖ π).
  `k3_value_k2_gradient` has the value of k3 and the gradient of k2.

  Args:
    logprobs: f32[..., C], nats.
    ref_logprobs: f32[..., C], at the same temperature; no gradient flows to it.
    estimator: one of KL_ESTIMATORS.

  Returns:
    f32[..., C], nats.

  Raises:
    ValueError: unknown estimator, or shapes that differ.

  Source: J. Schulman, "Approximating KL divergence" (2020); gradients by enumeration.
  """
  _one_of("estimator", estimator, KL_ESTIMATORS)
  logprobs, ref_logprobs = _floats(logprobs), _floats(ref_logprobs)
  _same_shape("kl", logprobs=logprobs, ref_logprobs=ref_logprobs)
  d = logprobs - jax.lax.stop_gradient(ref_logprobs)
  if estimator == "k1":
    return d
  k2 = 0.5 * d * d
  if estimator == "k2":
    return k2
  bounded = jnp.clip(d, -MAX_LOG_RATIO, MAX_LOG_RATIO)
  k3 = jnp.expm1(-bounded) + bounded  # expm1: near d = 0 the 1 would swallow d²/2
  if estimator == "k3":
    return k3
  return jax.lax.stop_gradient(k3) + (k2 - jax.lax.stop_gradient(k2))  # the bracket is exactly 0


def kl_loss(logprobs: jax.Array, ref_logprobs: jax.Array, estimator: str) -> jax.Array:
  """`kl` as a term of the loss, f32[..., C]: the same, without k1.

  Raises:
    ValueError: as `kl`, and for `k1`.
  """
  if estimator == "k1":
    raise ValueError(
      "kl estimator 'k1' cannot be a loss: its gradient is the score, whose mean is zero, so it "
      "would add noise and no pull to the reference; use 'k2' or 'k3_value_k2_gradient'"
    )
  return kl(logprobs, ref_logprobs, estimator)


def truncated_importance(
  old_logprobs: jax.Array, sampler_logprobs: jax.Array, cap: float = 2.0
) -> jax.Array:
  """min(π_old / π_sampler, cap), to multiply the loss of a token.

  Corrects for a sampler that is not the trainer (stale, or another engine).

  Args:
    old_logprobs: f32[..., C], the trainer's before the update.
    sampler_logprobs: f32[..., C], recorded while sampling.
    cap: positive.

  Returns:
    f32[..., C], without gradient.

  Raises:
    ValueError: cap not positive, or shapes that differ.

  Source: truncated importance sampling, as verl and TRL have it (C = 2).
  """
  if _not_above(cap, 0):
    raise ValueError(f"truncated_importance: cap must be positive, got {cap}")
  old_logprobs, sampler_logprobs = _floats(old_logprobs), _floats(sampler_logprobs)
  _same_shape("truncated_importance", old_logprobs=old_logprobs, sampler_logprobs=sampler_logprobs)
  return jax.lax.stop_gradient(jnp.minimum(jnp.exp(old_logprobs - sampler_logprobs), cap))


def overlong_penalty(lengths: jax.Array, max_length: int, buffer: int) -> jax.Array:
  """DAPO's soft penalty: 0 up to max_length - buffer, then linear to -1 at max_length.

  Args:
    lengths: i32[...], tokens.
    max_length: tokens, where the penalty reaches -1; it stays there beyond.
    buffer: tokens, 1 <= buffer <= max_length.

  Returns:
    f32[...] in [-1, 0], to be added to the reward.

  Raises:
    ValueError: buffer out of range.

  Source: DAPO, arXiv:2503.14476.
  """
  if not 1 <= buffer <= max_length:
    raise ValueError(f"overlong: buffer must be in 1..max_length ({max_length}), got {buffer}")
  over = _floats(jnp.asarray(lengths) - (max_length - buffer))
  return -jnp.clip(over / buffer, 0.0, 1.0)


def logprobs_and_entropy(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Log-prob of each target and entropy of the whole softmax.

  Sampler and trainer both come here, so that their numbers are the same.

  Args:
    logits: f[..., V], already divided by the temperature; -inf (not everywhere in a row)
      is probability 0, and 0 · log 0 = 0.
    targets: i32[...], each in 0..V-1 (padding included).

  Returns:
    (logprobs f32[...], entropy f32[...]), in nats. The entropy is a diagnostic and has no
    gradient.

  Raises:
    ValueError: shapes that do not match.
  """
  logits, targets = _floats(logits), jnp.asarray(targets)
  if logits.shape[:-1] != targets.shape:
    raise ValueError(f"targets {targets.shape} must be logits {logits.shape} without the last axis")
  top = jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True))
  shifted = logits - top
  exps = jnp.exp(shifted)
  total = exps.sum(axis=-1)
  # Compare and sum, not gather: no scatter in the backward pass, and it stays local to each
  # device when V is sharded.
  chosen = jax.lax.broadcasted_iota(targets.dtype, logits.shape, targets.ndim) == targets[..., None]
  logprobs = jnp.where(chosen, shifted, 0.0).sum(axis=-1) - jnp.log(total)
  # log Σe^s - Σ e^s s / Σe^s with s <= 0: both terms are at least 0, nothing cancels. The bound is
  # for a compiled log(1) that is a rounding error below 0.
  moment = jnp.where(exps > 0, exps * shifted, 0.0).sum(axis=-1)
  entropy = jnp.maximum(jnp.log(total) - moment / total, 0.0)
  return logprobs, jax.lax.stop_gradient(entropy)


def token_logprobs(
  hidden: jax.Array,
  head: jax.Array,
  targets: jax.Array,
  *,
  temperature: float | jax.Array = 1.0,
  chunk: int | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Log-prob of each target and full-softmax entropy, from hidden states.

  `hidden[..., t, :]` must be the state that predicts `targets[..., t]`: the shift by one
  is the caller's. With `chunk`, logits of `chunk` places of C are alive at a time, in the
  forward and in the backward pass, instead of [..., C, V]; leading axes stay whole, so
  that their sharding does too. The padded end of the last chunk is cut off.

  Args:
    hidden: f[..., C, D], any float dtype; the product with the head runs in it and
      accumulates in float32.
    head: f32[V, D].
    targets: i32[..., C], each in 0..V-1.
    temperature: divides the logits; positive.
    chunk: places of C at a time; None, 0 or >= C: all at once, nothing recomputed.

  Returns:
    (logprobs f32[..., C], entropy f32[..., C]), nats. Gradient flows from the log-probs to
    `hidden` and `head`; the entropy is a diagnostic and has none.

  Raises:
    ValueError: temperature not positive (when a number), negative chunk, shapes that do not match.
  """
  if _not_above(temperature, 0):
    raise ValueError(f"temperature must be positive, got {temperature}")
  if chunk is not None and chunk < 0:
    raise ValueError(f"chunk must be None, 0 or positive, got {chunk}")
  if hidden.shape[:-1] != targets.shape or hidden.shape[-1] != head.shape[-1]:
    raise ValueError(
      f"hidden [..., C, D], head [V, D] and targets [..., C] do not match: {hidden.shape}, "
      f"{head.shape}, {targets.shape}"
    )
  size = targets.shape[-1]
  if not chunk or chunk >= size:
    return _project(head, temperature, hidden, targets)

  @functools.partial(jax.checkpoint, prevent_cse=False)  # the scan already keeps CSE out
  def one(head: jax.Array, chunk_of: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    return _project(head, temperature, *chunk_of)

  axis = targets.ndim - 1
  chunks = (_split(hidden, axis, chunk), _split(targets, axis, chunk))
  _, results = jax.lax.scan(lambda _, chunk_of: (None, one(head, chunk_of)), None, chunks)
  logprobs, entropy = (_join(part, axis, size) for part in results)
  return logprobs, entropy


def _project(
  head: jax.Array, temperature: float | jax.Array, hidden: jax.Array, targets: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """token_logprobs of one chunk."""
  # The head is cast here, inside the scan: its gradient is then summed over chunks in float32.
  logits = jnp.einsum(
    "...cd,vd->...cv", hidden, head.astype(hidden.dtype), preferred_element_type=jnp.float32
  )
  return logprobs_and_entropy(logits / temperature, targets)


def _split(x: jax.Array, axis: int, chunk: int) -> jax.Array:
  """[..., C, ...] -> [n, ..., chunk, ...], padded with zeros to n * chunk."""
  count = -(-x.shape[axis] // chunk)
  padding = [(0, 0)] * x.ndim
  padding[axis] = (0, count * chunk - x.shape[axis])
  padded = jnp.pad(x, padding)
  shape = (*x.shape[:axis], count, chunk, *x.shape[axis + 1 :])
  return jnp.moveaxis(padded.reshape(shape), axis, 0)


def _join(x: jax.Array, axis: int, size: int) -> jax.Array:
  """[n, ..., chunk] -> [..., size]: undoes `_split`, the padding cut off."""
  x = jnp.moveaxis(x, 0, axis)
  return x.reshape(*x.shape[:axis], -1)[..., :size]


def _over_tokens(weights: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """Constants f32[...] -> f32[..., C]; no other axis is broadcast."""
  if weights.shape != shape[:-1]:
    raise ValueError(
      f"clipped_surrogate: weights {weights.shape} must have the shape of logprobs {shape} "
      "without its last axis"
    )
  return jax.lax.stop_gradient(jnp.broadcast_to(weights[..., None], shape))


def _clip(
  ratio: jax.Array,
  weights: jax.Array,
  clip_low: float,
  clip_high: float,
  ratio_cap: float | None,
) -> tuple[jax.Array, jax.Array]:
  """(loss, clipped) of the clipped form: the sign of a weight says which bound can bind."""
  cap = jnp.inf if ratio_cap is None else ratio_cap
  upper = jnp.where(weights > 0, 1 + clip_high, jnp.where(weights < 0, cap, jnp.inf))
  lower = jnp.where(weights < 0, 1 - clip_low, 0.0)
  clipped = (ratio > upper) | (ratio < lower)
  # A select, not `minimum`: ties of `minimum` and `clip` would halve the gradient at a bound.
  return -jnp.where(clipped, jnp.clip(ratio, lower, upper), ratio) * weights, clipped


def _cispo(
  ratio: jax.Array, logprobs: jax.Array, weights: jax.Array, ratio_cap: float | None
) -> tuple[jax.Array, jax.Array]:
  """(loss, clipped) of CISPO: the capped ratio only scales the score."""
  cap = CISPO_RATIO_CAP if ratio_cap is None else ratio_cap
  loss = -jax.lax.stop_gradient(jnp.minimum(ratio, cap)) * weights * logprobs
  return loss, (ratio > cap) & (weights != 0)


def _ratio(logprobs: jax.Array, old_logprobs: jax.Array, mask: jax.Array, level: str) -> jax.Array:
  """π / π_old f32[..., C], of the token or of its sequence; 1 off the mask at token level."""
  old_logprobs = jax.lax.stop_gradient(jnp.where(mask, old_logprobs, 0.0))
  log_ratio = logprobs - old_logprobs
  if level == "sequence":
    mean = masked_mean(log_ratio, mask, axis=-1)
    log_ratio = jnp.broadcast_to(mean[..., None], log_ratio.shape)
  return jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def _divide(total: jax.Array, count: jax.Array) -> jax.Array:
  """total / count, 0 where count is 0."""
  return jnp.where(count > 0, total / jnp.where(count > 0, count, 1), 0.0)


def _floats(x: jax.Array) -> jax.Array:
  """At least float32, so that sums and ratios of bfloat16 inputs are not rounded to 8 bits."""
  x = jnp.asarray(x)
  return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _not_above(value: float | jax.Array, bound: float) -> bool:
  """True for a Python number that is not > bound (NaN included); traced values pass unchecked."""
  return isinstance(value, int | float) and not value > bound


def _check_bounds(clip_low: float, clip_high: float, ratio_cap: float | None, form: str) -> None:
  if not (0 <= clip_low <= 1 and clip_high >= 0):
    raise ValueError(
      f"clip_low must be in [0, 1] and clip_high at least 0, got {clip_low} and {clip_high}"
    )
  if ratio_cap is None:
    return
  if form == "clip" and not ratio_cap >= 1:
    raise ValueError(f"ratio_cap must be at least 1 (None for none), got {ratio_cap}")
  if not ratio_cap > 0:
    raise ValueError(f"ratio_cap must be positive in form 'cispo' (None for 5), got {ratio_cap}")


def _one_of(field: str, value: str, allowed: tuple[str, ...]) -> None:
  if value not in allowed:
    raise ValueError(f"{field} must be one of {', '.join(allowed)}; got {value!r}")


def _same_shape(where: str, **arrays: jax.Array) -> None:
  shapes = {name: array.shape for name, array in arrays.items()}
  if len(set(shapes.values())) > 1:
    raise ValueError(f"{where}: shapes must be equal, got {shapes}")
