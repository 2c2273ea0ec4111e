"""Log-probs and entropies over the vocabulary: float64 references, gradients, chunks, shards."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fadejax.algorithm import losses

logprobs_and_entropy = jax.jit(losses.logprobs_and_entropy)


def grad(function, **settings):
  return jax.jit(jax.grad(function, **settings))


def reference(logits, targets):
  """float64 NumPy."""
  logits = np.asarray(logits, np.float64)
  top = logits.max(-1, keepdims=True)
  logp = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
  p = np.exp(logp)
  entropy = -np.where(p > 0, p * np.where(p > 0, logp, 0), 0).sum(-1)
  return np.take_along_axis(logp, np.asarray(targets)[..., None], -1)[..., 0], entropy


def test_handed_temperatures():
  """Logits come out of the head as [2, 0, 0]: log p of token 0 at three temperatures."""
  hidden, head = jnp.ones((1, 1)), jnp.array([[2.0], [0.0], [0.0]])
  for temperature, expected in [(1, -0.239545), (0.5, -0.035976), (2, -0.551445)]:
    logprobs, _ = losses.token_logprobs(hidden, head, jnp.array([0]), temperature=temperature)
    assert logprobs[0] == pytest.approx(expected, abs=1e-6)

  def at(token, temperature):
    return losses.token_logprobs(hidden, head, jnp.array([token]), temperature=temperature)[0][0]

  # Trainer and sampler at one temperature: ratio 1. At two, the ratio is wrong, and how.
  assert jnp.exp(at(0, 0.6) - at(0, jnp.float32(0.6))) == pytest.approx(1.0, abs=1e-6)
  assert jnp.exp(at(0, 1.0) - at(0, 0.6)) == pytest.approx(0.843136, abs=1e-5)
  assert jnp.exp(at(1, 1.0) - at(1, 0.6)) == pytest.approx(3.198578, abs=1e-4)


def test_logprobs_and_entropy_against_float64():
  rng = np.random.default_rng(0)
  for scale in (0.01, 1.0, 30.0, 1e4):
    logits = (scale * rng.normal(size=(3, 4, 50))).astype(np.float32) + np.float32(scale)
    targets = rng.integers(0, 50, (3, 4))
    logprobs, entropy = logprobs_and_entropy(jnp.asarray(logits), jnp.asarray(targets))
    expected = reference(logits, targets)
    np.testing.assert_allclose(logprobs, expected[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(entropy, expected[1], rtol=1e-5, atol=1e-6)
    assert (entropy >= 0).all()


def test_a_forbidden_token_counts_as_zero():
  logits = jnp.array([[0.0, -jnp.inf, 0.0, -jnp.inf], [5.0, -jnp.inf, -jnp.inf, -jnp.inf]])
  logprobs, entropy = logprobs_and_entropy(logits, jnp.array([2, 0]))
  np.testing.assert_allclose(logprobs, [-np.log(2), 0], rtol=1e-6)
  np.testing.assert_allclose(entropy, [np.log(2), 0], rtol=1e-6)
  never, _ = logprobs_and_entropy(logits, jnp.array([1, 3]))
  np.testing.assert_array_equal(never, [-np.inf, -np.inf])
  gradient = grad(lambda x: logprobs_and_entropy(x, jnp.array([2, 0]))[0].sum())(logits)
  np.testing.assert_allclose(gradient, [[-0.5, 0, 0.5, 0], [0, 0, 0, 0]], atol=1e-7)


def test_gradient_is_the_score_and_entropy_has_none():
  rng = np.random.default_rng(1)
  logits = jnp.asarray(rng.normal(size=(2, 3, 7)).astype(np.float32))
  targets = jnp.asarray(rng.integers(0, 7, (2, 3)))
  weights = jnp.asarray(rng.normal(size=(2, 3)).astype(np.float32))
  gradient = grad(lambda x: (weights * logprobs_and_entropy(x, targets)[0]).sum())(logits)
  score = jax.nn.one_hot(targets, 7) - jax.nn.softmax(logits)
  np.testing.assert_allclose(gradient, weights[..., None] * score, atol=1e-6)
  still = grad(lambda x: logprobs_and_entropy(x, targets)[1].sum())(logits)
  np.testing.assert_array_equal(still, np.zeros_like(logits))


def world(dtype=jnp.float32, shape=(2, 3, 7), width=5, vocabulary=11):
  rng = np.random.default_rng(2)
  hidden = jnp.asarray(rng.normal(size=(*shape, width)), dtype)
  head = jnp.asarray(rng.normal(size=(vocabulary, width)), jnp.float32)
  targets = jnp.asarray(rng.integers(0, vocabulary, shape), jnp.int32)
  cotangent = jnp.asarray(rng.normal(size=shape), jnp.float32)
  return hidden, head, targets, cotangent


@functools.cache
def run_with_gradient(chunk, dtype=jnp.float32, shape=(2, 3, 7)):
  hidden, head, targets, cotangent = world(dtype, shape)

  def total(hidden, head):
    logprobs, entropy = losses.token_logprobs(hidden, head, targets, temperature=0.7, chunk=chunk)
    # The entropy's factor must not show in the gradient.
    return (cotangent * logprobs).sum() + 3.0 * entropy.sum(), (logprobs, entropy)

  gradient = grad(total, argnums=(0, 1), has_aux=True)
  return gradient(hidden, head)


def test_token_logprobs_and_their_gradient_against_numpy():
  hidden, head, targets, cotangent = world()
  (dhidden, dhead), (logprobs, entropy) = run_with_gradient(None)
  logits = np.einsum("pgcd,vd->pgcv", np.float64(hidden), np.float64(head)) / 0.7
  expected = reference(logits, targets)
  np.testing.assert_allclose(logprobs, expected[0], rtol=1e-5)
  np.testing.assert_allclose(entropy, expected[1], rtol=1e-5)
  p = np.exp(logits - logits.max(-1, keepdims=True))
  score = (np.eye(11)[np.asarray(targets)] - p / p.sum(-1, keepdims=True)) / 0.7
  dlogits = np.asarray(cotangent)[..., None] * score
  np.testing.assert_allclose(dhidden, dlogits @ np.asarray(head), rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(
    dhead, np.einsum("pgcv,pgcd->vd", dlogits, np.asarray(hidden)), rtol=1e-4, atol=1e-5
  )


@pytest.mark.parametrize(
  ("chunk", "dtype"),
  [(1, jnp.float32), (3, jnp.float32), (100, jnp.float32), (3, jnp.bfloat16)],
)
def test_chunked_is_unchunked(chunk, dtype):
  """Value and gradient; 3 does not divide 7. Low precision only re-rounds the gradient."""
  whole, cut = run_with_gradient(None, dtype), run_with_gradient(chunk, dtype)
  for a, b in zip(whole[1], cut[1], strict=True):
    assert a.dtype == b.dtype == jnp.float32 and a.shape == b.shape == (2, 3, 7)
    np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6)
  tolerance = 2e-5 if dtype == jnp.float32 else 2e-2
  for a, b in zip(whole[0], cut[0], strict=True):
    assert a.dtype == b.dtype
    a, b = np.float32(a), np.float32(b)
    np.testing.assert_allclose(a, b, atol=tolerance * np.abs(a).max())


def test_leading_axes_may_be_none_or_many():
  for shape in [(5,), (1, 2, 3, 5)]:
    whole, cut = run_with_gradient(None, shape=shape), run_with_gradient(2, shape=shape)
    assert whole[1][0].shape == shape
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), whole, cut)


def largest_array(function, *arguments):
  """Elements of the largest array that the function's program names, inner programs included."""

  def sizes(jaxpr):
    for equation in jaxpr.eqns:
      yield from (variable.aval.size for variable in equation.outvars)
      for parameter in equation.params.values():
        inner = getattr(parameter, "jaxpr", parameter)
        if hasattr(inner, "eqns"):
          yield from sizes(inner)

  return max(sizes(jax.make_jaxpr(function)(*arguments).jaxpr))


def test_only_one_chunk_of_logits_is_alive():
  """The backward program of 64 places at 4 a time holds no array of more than 4 × V a row."""
  rows, places, vocabulary, width = 2, 64, 50, 3
  hidden, head, targets, _ = world(shape=(rows, places), width=width, vocabulary=vocabulary)

  def gradient(chunk):
    total = lambda h, w: losses.token_logprobs(h, w, targets, chunk=chunk)[0].sum()  # noqa: E731
    return grad(total, argnums=(0, 1))

  assert largest_array(gradient(None), hidden, head) == rows * places * vocabulary
  # The hidden states themselves, rows * places * width = 384, are below one chunk of logits.
  assert largest_array(gradient(4), hidden, head) == rows * 4 * vocabulary


def test_head_gradient_of_low_precision_is_summed_over_chunks_in_float32():
  """512 equal places: a bfloat16 running sum would stop growing at 256 steps of the same size."""
  places = 512
  hidden, head = jnp.ones((1, places, 1), jnp.bfloat16), jnp.zeros((2, 1))
  targets = jnp.zeros((1, places), jnp.int32)
  total = lambda w: losses.token_logprobs(hidden, w, targets, chunk=1)[0].sum()  # noqa: E731
  np.testing.assert_array_equal(grad(total)(head), [[places / 2], [-places / 2]])


def test_shards_of_the_batch_give_the_same_numbers():
  if len(jax.devices()) < 4:
    pytest.skip("needs 4 devices")
  hidden, head, targets, _ = world(shape=(4, 2, 6))
  mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
  spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
  call = jax.jit(lambda h, t: losses.token_logprobs(h, head, t, chunk=4))
  one = call(hidden, targets)
  many = call(jax.device_put(hidden, spread), jax.device_put(targets, spread))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), one, many)
  assert all(x.sharding.is_equivalent_to(spread, x.ndim) for x in many)


def test_bad_calls_are_refused():
  hidden, head, targets, _ = world()
  for temperature in (0, -1.0, float("nan")):
    with pytest.raises(ValueError, match="temperature must be positive"):
      losses.token_logprobs(hidden, head, targets, temperature=temperature)
  with pytest.raises(ValueError, match="chunk must be"):
    losses.token_logprobs(hidden, head, targets, chunk=-1)
  for wrong in [(hidden[0], head, targets), (hidden, head.T, targets), (hidden, head, targets[0])]:
    with pytest.raises(ValueError, match="do not match"):
      losses.token_logprobs(*wrong)
  with pytest.raises(ValueError, match="without the last axis"):
    logprobs_and_entropy(hidden, targets[0])
