"""Loss pieces against handed values, closed forms, enumeration and their own gradients."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fadejax.algorithm import losses

DAPO = {"clip_low": 0.2, "clip_high": 0.28}

# Jitted: one program a call instead of dozens is what makes these tests quick.
clipped_surrogate = jax.jit(
  losses.clipped_surrogate,
  static_argnames=("clip_low", "clip_high", "ratio_cap", "ratio_level", "form"),
)
aggregate = jax.jit(losses.aggregate, static_argnames=("normaliser", "constant"))
kl = jax.jit(losses.kl, static_argnames="estimator")


def grad(function, static=(), **settings):
  return jax.jit(jax.grad(function, **settings), static_argnums=static)


def value_and_grad(function, static=(), **settings):
  return jax.jit(jax.value_and_grad(function, **settings), static_argnums=static)


def surrogate(ratios, weights, mask=None, **settings):
  """One token a sequence, at the ratios given."""
  log_ratio = jnp.log(jnp.asarray(ratios, jnp.float32))[:, None]
  mask = jnp.ones(log_ratio.shape, bool) if mask is None else mask
  old = jnp.full(log_ratio.shape, -1.5)
  return clipped_surrogate(
    log_ratio + old, old, jnp.asarray(weights, jnp.float32), mask, **{**DAPO, **settings}
  )


def batch(seed=0, shape=(3, 4, 6)):
  """Log-probs, old ones nearby, weights of both signs, and a ragged mask with an empty row."""
  rng = np.random.default_rng(seed)
  logprobs = -rng.exponential(1.0, shape).astype(np.float32)
  old = logprobs + rng.normal(0, 0.3, shape).astype(np.float32)
  weights = rng.normal(size=shape[:-1]).astype(np.float32)
  lengths = rng.integers(1, shape[-1] + 1, shape[:-1])
  lengths.flat[0] = 0
  return logprobs, old, weights, np.asarray(losses.token_mask(jnp.asarray(lengths), shape[-1]))


# Masks


@pytest.mark.parametrize(
  ("length", "mask"),
  [
    (3, [1, 1, 1, 0, 0]),  # 5 6 <eos> pad pad: the stop token is trained
    (5, [1, 1, 1, 1, 1]),  # truncated: all of it was sampled
    (2, [1, 1, 0, 0, 0]),  # the second of two stop ids ended it
    (0, [0, 0, 0, 0, 0]),
  ],
)
def test_token_mask(length, mask):
  np.testing.assert_array_equal(losses.token_mask(jnp.array(length), 5), np.array(mask, bool))
  np.testing.assert_array_equal(
    losses.token_mask(jnp.array([[length]]), 5), np.array([[mask]], bool)
  )


def test_masked_reductions_do_not_see_what_is_masked():
  values = jnp.array([[1.0, 2.0, jnp.nan], [4.0, jnp.inf, jnp.nan], [jnp.nan] * 3])
  mask = jnp.array([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
  assert losses.masked_sum(values, mask) == 7.0
  np.testing.assert_allclose(losses.masked_mean(values, mask), 7 / 3, rtol=1e-6)
  np.testing.assert_array_equal(losses.masked_mean(values, mask, axis=-1), [1.5, 4.0, 0.0])
  gradient = grad(lambda x: losses.masked_mean(x, mask, axis=-1).sum())(values)
  np.testing.assert_array_equal(gradient, [[0.5, 0.5, 0], [1, 0, 0], [0, 0, 0]])


# Surrogate

CLIP_CASES = [(1.5, 1), (1.25, 1), (0.5, 1), (1.5, -1), (0.5, -1), (10, -1)]


@pytest.mark.parametrize(
  ("cap", "expected"),
  [(None, [-1.28, -1.25, -0.5, 1.5, 0.8, 10.0]), (4.0, [-1.28, -1.25, -0.5, 1.5, 0.8, 4.0])],
)
def test_handed_clip_values(cap, expected):
  ratios, weights = zip(*CLIP_CASES, strict=True)
  loss, clipped = surrogate(ratios, weights, ratio_cap=cap)
  np.testing.assert_allclose(loss[:, 0], expected, rtol=1e-6)
  np.testing.assert_array_equal(clipped[:, 0], [1, 0, 0, 0, 1, cap is not None])


def test_handed_clip_fraction_counts_only_where_the_clip_binds():
  _, clipped = surrogate([1.5, 1.5, 0.5, 0.5], [1, -1, 1, -1])
  np.testing.assert_array_equal(clipped[:, 0], [True, False, False, True])
  assert losses.masked_mean(clipped, jnp.ones((4, 1), bool)) == 0.5
  _, clipped = surrogate([1.5, 0.5], [0, 0])
  assert not clipped.any()


def test_surrogate_is_the_published_minimum():
  logprobs, old, weights, mask = batch()
  loss, clipped = clipped_surrogate(logprobs, old, weights, mask, **DAPO)
  ratio, w = np.exp(logprobs - old), weights[..., None]
  expected = -np.minimum(ratio * w, np.clip(ratio, 0.8, 1.28) * w)
  np.testing.assert_allclose(loss, np.where(mask, expected, 0), rtol=1e-5)
  np.testing.assert_array_equal(clipped, mask & (expected > -ratio * w))
  assert 0 < clipped.sum() < mask.sum()


def test_gradient_is_the_ratio_times_the_weight_and_zero_where_clipped():
  logprobs, old, weights, mask = batch(1)
  total = lambda x: clipped_surrogate(x, old, weights, mask, **DAPO)[0].sum()  # noqa: E731
  _, clipped = clipped_surrogate(logprobs, old, weights, mask, **DAPO)
  expected = np.where(mask & ~clipped, -np.exp(logprobs - old) * weights[..., None], 0)
  np.testing.assert_allclose(grad(total)(logprobs), expected, rtol=1e-5)
  others = lambda o, w: losses.clipped_surrogate(logprobs, o, w, mask, **DAPO)[0].sum()  # noqa: E731
  for still in grad(others, argnums=(0, 1))(old, weights):
    assert not still.any()


@pytest.mark.parametrize("clip", [0.0, 0.2])
@pytest.mark.parametrize("form", ["clip", "cispo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_at_ratio_one_the_gradient_is_the_policy_gradient(clip, form, level):
  """Also with no room at all, and when the old log-probs are the very same array."""
  logprobs, _, weights, mask = batch(2)

  def total(x, normaliser):
    loss, clipped = clipped_surrogate(
      x, x, weights, mask, clip_low=clip, clip_high=clip, form=form, ratio_level=level
    )
    return aggregate(loss, mask, normaliser), clipped

  for normaliser in ("token_mean", "sequence_mean"):
    plain = grad(
      lambda x, normaliser=normaliser: aggregate(-x * weights[..., None], mask, normaliser)
    )(logprobs)
    gradient, clipped = grad(total, static=1, has_aux=True)(logprobs, normaliser)
    np.testing.assert_allclose(gradient, plain, rtol=1e-5, atol=1e-8)
    assert np.abs(plain).max() > 0.01 and not clipped.any()


def test_at_ratio_one_the_loss_of_a_softmax_policy_follows_reinforce():
  """Enumerated: E[∇ surrogate] = -∇ E[A] for three actions."""
  theta, rewards = jnp.array([0.3, -0.5, 0.1]), jnp.array([1.0, 0.0, 0.4])
  objective = lambda t: (jax.nn.softmax(t) * rewards).sum()  # noqa: E731

  def expected_loss(t):
    logprobs = jax.nn.log_softmax(t)[:, None]
    loss, _ = clipped_surrogate(
      logprobs, jax.lax.stop_gradient(logprobs), rewards, jnp.ones((3, 1), bool), **DAPO
    )
    return (jax.nn.softmax(theta) * loss[:, 0]).sum()

  np.testing.assert_allclose(grad(expected_loss)(theta), -grad(objective)(theta), atol=1e-7)


def test_handed_gspo_ratio_and_its_gradient():
  """exp of the mean over tokens that count; each token gets 1/length of the sequence's gradient."""
  difference = jnp.array([[0.1, -0.2, 0.3, 9.0]])
  mask = jnp.array([[True, True, True, False]])
  old = jnp.full((1, 4), -1.0)

  def gspo(x, low=0.2, high=0.2):
    loss, clipped = clipped_surrogate(
      x, old, jnp.array([2.0]), mask, clip_low=low, clip_high=high, ratio_level="sequence"
    )
    return aggregate(loss, mask, "sequence_mean"), clipped

  (loss, clipped), gradient = value_and_grad(gspo, has_aux=True)(old + difference)
  np.testing.assert_allclose(loss, -2 * 1.068939, rtol=1e-6)
  np.testing.assert_allclose(gradient, [[-2 * 1.068939 / 3] * 3 + [0]], rtol=1e-5)
  assert not clipped.any()
  # GSPO's own bounds are narrow: the whole sequence is clipped, and only its real tokens count.
  (loss, clipped), gradient = value_and_grad(gspo, static=(1, 2), has_aux=True)(
    old + difference, 3e-4, 4e-4
  )
  np.testing.assert_allclose(loss, -2 * 1.0004, rtol=1e-6)
  np.testing.assert_array_equal(gradient, np.zeros((1, 4)))
  np.testing.assert_array_equal(clipped, mask)


def test_cispo_keeps_every_gradient_and_caps_its_size():
  ratios, weights = [0.01, 1.0, 3.0, 80.0, 80.0, 80.0], [1.0, -1.0, 2.0, 1.0, -1.0, 0.0]
  old = jnp.full((6, 1), -2.0)
  logprobs = old + jnp.log(jnp.array(ratios))[:, None]

  def cispo(x, **settings):
    mask = jnp.ones((6, 1), bool)
    loss, clipped = clipped_surrogate(
      x, old, jnp.array(weights), mask, clip_low=0.2, clip_high=0.2, form="cispo", **settings
    )
    return loss.sum(), (loss, clipped)

  for settings, cap in [({}, 5.0), ({"ratio_cap": 2.0}, 2.0)]:
    gradient, (loss, clipped) = grad(functools.partial(cispo, **settings), has_aux=True)(logprobs)
    used = np.minimum(ratios, cap)
    np.testing.assert_allclose(gradient[:, 0], -used * weights, rtol=1e-5)
    np.testing.assert_allclose(loss[:, 0], -used * weights * logprobs[:, 0], rtol=1e-5)
    bound = (np.array(ratios) > cap) & (np.array(weights) != 0)
    np.testing.assert_array_equal(clipped[:, 0], bound)


@pytest.mark.parametrize("form", ["clip", "cispo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_nothing_depends_on_what_lies_past_the_length(form, level):
  logprobs, old, weights, mask = batch(3)
  settings = {**DAPO, "form": form, "ratio_level": level}

  def total(x, old):
    loss, clipped = clipped_surrogate(x, old, weights, mask, **settings)
    return aggregate(loss, mask, "token_mean"), (loss, clipped)

  run = value_and_grad(total, has_aux=True)
  clean = run(logprobs, old)
  for junk in (np.nan, np.inf, -np.inf, 1e30):
    dirty = run(np.where(mask, logprobs, np.float32(junk)), np.where(mask, old, np.float32(-junk)))
    jax.tree.map(np.testing.assert_array_equal, clean, dirty)
  (_, (loss, clipped)), gradient = clean
  assert all(not np.any(np.asarray(x)[~mask]) for x in (loss, clipped, gradient))


@pytest.mark.parametrize("weight", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [-300.0, 300.0])
@pytest.mark.parametrize("form", ["clip", "cispo"])
def test_extreme_ratios_stay_finite(weight, log_ratio, form):
  def total(x):
    loss, _ = clipped_surrogate(
      x, jnp.zeros((1, 1)), jnp.array([weight]), jnp.ones((1, 1), bool), **DAPO, form=form
    )
    return loss.sum()

  value, gradient = value_and_grad(total)(jnp.full((1, 1), log_ratio))
  assert np.isfinite(value) and np.isfinite(gradient).all()


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    ({"form": "ppo"}, "form must be one of clip, cispo"),
    ({"ratio_level": "word"}, "ratio_level must be one of"),
    ({"clip_low": 1.5}, "clip_low must be in"),
    ({"clip_high": -0.1}, "clip_high at least 0"),
    ({"ratio_cap": 0.5}, "ratio_cap must be at least 1"),
    ({"ratio_cap": 0.0, "form": "cispo"}, "ratio_cap must be positive"),
  ],
)
def test_bad_settings_are_refused(settings, message):
  with pytest.raises(ValueError, match=message):
    surrogate([1.0], [1.0], **settings)


def test_weights_of_another_shape_are_refused():
  logprobs, old, weights, mask = batch()
  for wrong in (weights[0], weights[..., None], weights.T):
    with pytest.raises(ValueError, match="without its last axis"):
      clipped_surrogate(logprobs, old, wrong, mask, **DAPO)
  with pytest.raises(ValueError, match="shapes must be equal"):
    clipped_surrogate(logprobs, old[0], weights, mask, **DAPO)


# Divisors


@pytest.mark.parametrize(
  ("normaliser", "expected"),
  [("sequence_mean", 0.0), ("token_mean", 0.6), ("constant", 0.1875)],
)
def test_handed_normalisers(normaliser, expected):
  mask = losses.token_mask(jnp.array([2, 8]), 16)
  zeros = jnp.zeros((2, 16))
  loss, _ = clipped_surrogate(zeros, zeros, jnp.array([1.0, -1.0]), mask, **DAPO)
  assert aggregate(loss, mask, normaliser, constant=16) == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("normaliser", losses.NORMALISERS)
def test_parts_add_up_to_the_whole_however_it_is_cut(normaliser):
  """Gradients too: ragged lengths, where a mean of means is wrong."""
  rng = np.random.default_rng(5)
  mask = np.asarray(losses.token_mask(rng.integers(0, 9, (8, 2)), 8))
  x = rng.normal(size=(8, 2, 8)).astype(np.float32)
  parts = jax.jit(lambda x, m: losses.aggregate_parts(x**2, m, normaliser, constant=8.0))
  slope_of_sum = grad(lambda x, m: losses.aggregate_parts(x**2, m, normaliser, constant=8.0)[0])
  average = lambda x, m: losses.aggregate(x**2, m, normaliser, constant=8.0)  # noqa: E731
  whole, slope = value_and_grad(average)(x, mask)
  for sizes in ([1, 7], [1] * 8):
    cut = [slice(a, b) for a, b in itertools.pairwise(np.cumsum([0, *sizes]))]
    sums, divisors = np.array([parts(x[i], mask[i]) for i in cut]).T
    np.testing.assert_allclose(sums.sum() / divisors.sum(), whole, rtol=1e-6)
    slopes = np.concatenate([slope_of_sum(x[i], mask[i]) for i in cut])
    np.testing.assert_allclose(slopes / divisors.sum(), slope, rtol=1e-6)
  averages = np.array([jax.jit(average)(x[i : i + 1], mask[i : i + 1]) for i in range(8)])
  assert abs(averages.mean() - whole) > 1e-3 * abs(whole)


@pytest.mark.parametrize("normaliser", losses.NORMALISERS)
def test_an_empty_mask_gives_zero_loss_and_gradient(normaliser):
  mask = jnp.zeros((2, 3), bool)
  value, gradient = value_and_grad(lambda x: losses.aggregate(x, mask, normaliser, constant=3.0))(
    jnp.ones((2, 3))
  )
  assert value == 0 and not gradient.any()


def test_a_sequence_that_is_masked_out_leaves_the_divisor():
  """Overlong filtering: the truncated completion is in neither the loss nor its divisor."""
  lengths, truncated = jnp.array([2, 4, 3]), jnp.array([False, True, False])
  loss = jnp.array([[1.0] * 4, [100.0] * 4, [3.0] * 4])
  mask = losses.token_mask(lengths, 4) & ~truncated[:, None]
  assert aggregate(loss, mask, "token_mean") == pytest.approx((2 * 1 + 3 * 3) / 5)
  assert aggregate(loss, mask, "sequence_mean") == pytest.approx((1 + 3) / 2)
  assert aggregate(loss, mask, "constant", constant=4.0) == pytest.approx(11 / (2 * 4))


def test_normalisers_refuse_what_they_cannot_mean():
  x, mask = jnp.ones((2, 3)), jnp.ones((2, 3), bool)
  with pytest.raises(ValueError, match="normaliser must be one of token_mean"):
    aggregate(x, mask, "mean")
  for constant in (None, 0, -4.0):
    with pytest.raises(ValueError, match="needs constant > 0"):
      aggregate(x, mask, "constant", constant=constant)
  with pytest.raises(ValueError, match="shapes must be equal"):
    aggregate(x, mask[:1], "token_mean")


# KL


@pytest.mark.parametrize(
  ("logprob", "ref", "values"),
  [
    (-1.0, -1.5, {"k1": 0.5, "k2": 0.125, "k3": 0.106531}),
    (-1.5, -1.0, {"k1": -0.5, "k2": 0.125, "k3": 0.148721}),
  ],
)
def test_handed_kl_values(logprob, ref, values):
  values = {**values, "k3_value_k2_gradient": values["k3"]}
  for estimator, value in values.items():
    assert kl(jnp.array([logprob]), jnp.array([ref]), estimator) == pytest.approx(value, abs=5e-7)


def test_kl_estimators_over_an_enumerated_softmax():
  """Means over samples of π, and the means of their gradients, against KL itself."""
  theta, ref = (
    jnp.array([0.4, -1.0, 0.2, 0.9]),
    jax.nn.log_softmax(jnp.array([-0.3, 0.5, 0.0, 0.1])),
  )
  policy = jax.nn.softmax(theta)
  true_kl = lambda t: (jax.nn.softmax(t) * (jax.nn.log_softmax(t) - ref)).sum()  # noqa: E731
  other_kl = lambda t: (jnp.exp(ref) * (ref - jax.nn.log_softmax(t))).sum()  # noqa: E731

  def mean(t, estimator):  # the samples' own probabilities are not differentiated
    return (policy * kl(jax.nn.log_softmax(t), ref, estimator)).sum()

  for estimator in ("k1", "k3", "k3_value_k2_gradient"):
    np.testing.assert_allclose(mean(theta, estimator), true_kl(theta), rtol=1e-5)
  gradient = {e: grad(mean, static=1)(theta, e) for e in losses.KL_ESTIMATORS}
  wanted = grad(true_kl)(theta)
  assert np.abs(wanted).max() > 0.1
  np.testing.assert_allclose(gradient["k2"], wanted, atol=1e-6)
  np.testing.assert_array_equal(gradient["k3_value_k2_gradient"], gradient["k2"])
  np.testing.assert_allclose(gradient["k1"], np.zeros(4), atol=1e-7)
  np.testing.assert_allclose(gradient["k3"], grad(other_kl)(theta), atol=1e-6)
  assert np.abs(gradient["k3"] - wanted).max() > 0.01


@pytest.mark.parametrize("difference", [-200.0, 200.0])
@pytest.mark.parametrize("estimator", ["k2", "k3", "k3_value_k2_gradient"])
def test_kl_of_far_policies_is_finite_and_k2_still_pulls(difference, estimator):
  loss = lambda x: 0.01 * losses.kl_loss(x, jnp.zeros(()), estimator)  # noqa: E731
  value, gradient = value_and_grad(loss)(jnp.array(difference, jnp.float32))
  assert np.isfinite(value) and np.isfinite(gradient)
  if estimator != "k3":
    assert gradient == pytest.approx(0.01 * difference)


def test_k3_keeps_its_digits_near_zero():
  d = jnp.array([1e-3, -1e-3, 1e-4])
  np.testing.assert_allclose(kl(d, jnp.zeros(3), "k3"), d**2 / 2 - d**3 / 6, rtol=1e-3)


def test_k1_is_refused_as_a_loss_and_only_there():
  x = jnp.zeros(2)
  with pytest.raises(ValueError, match=r"'k1' cannot be a loss.*mean is zero"):
    losses.kl_loss(x, x, "k1")
  np.testing.assert_array_equal(kl(x, x, "k1"), [0, 0])
  with pytest.raises(ValueError, match="estimator must be one of k1, k2, k3"):
    losses.kl_loss(x, x, "k4")
  np.testing.assert_array_equal(grad(lambda r: losses.kl_loss(x, r, "k2").sum())(x + 1), [0, 0])


# Sampler correction, overlong penalty


def test_handed_truncated_importance():
  difference = jnp.array([-1.0, 0.0, 0.5, 1.0, 300.0])
  sampler = jnp.full(5, -3.0)
  weights = losses.truncated_importance(sampler + difference, sampler)
  np.testing.assert_allclose(weights, [0.367879, 1.0, 1.648721, 2.0, 2.0], rtol=1e-5)
  gradient = grad(lambda x: losses.truncated_importance(x, sampler).sum())(sampler)
  np.testing.assert_array_equal(gradient, np.zeros(5))
  assert losses.truncated_importance(sampler + difference, sampler, cap=1.2).max() == np.float32(
    1.2
  )
  with pytest.raises(ValueError, match="cap must be positive"):
    losses.truncated_importance(sampler, sampler, cap=0.0)


def test_handed_overlong_penalties():
  lengths = {
    (20, 4): ([10, 16, 17, 18, 20, 25], [0, 0, -0.25, -0.5, -1.0, -1.0]),
    (20480, 4096): (
      [100, 16384, 16385, 18432, 20480, 20481],
      [0, 0, -0.000244140625, -0.5, -1.0, -1.0],
    ),
  }
  for (longest, buffer), (given, expected) in lengths.items():
    penalty = losses.overlong_penalty(jnp.array(given), longest, buffer)
    np.testing.assert_array_equal(penalty, np.array(expected, np.float32))
  for buffer in (0, 21):
    with pytest.raises(ValueError, match=r"buffer must be in 1\.\.max_length \(20\)"):
      losses.overlong_penalty(jnp.array([3]), 20, buffer)
