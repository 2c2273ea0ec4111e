"""Attention in blocks is the plain form: values and gradients, whatever the sizes."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fadejax.policy import attention, model, sharding

P, G, K, R, H = 2, 3, 2, 2, 4


def inputs(n, s, seed=0, dtype=jnp.float32):
  rng = np.random.default_rng(seed)
  draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)  # noqa: E731
  q = draw(P, G, n, K * R, H)
  own = draw(P, G, K, n, H), draw(P, G, K, n, H)
  prefix = (draw(P, K, s, H), draw(P, K, s, H)) if s else None
  lengths = jnp.array([s, max(1, s // 2)]) if s else None
  return q, own, prefix, lengths


def plain(q, own, prefix, lengths):
  n = q.shape[2]
  mask = None if prefix is None else jnp.arange(prefix[0].shape[2])[None] < lengths[:, None]
  return attention.attend(q, own, jnp.tril(jnp.ones((n, n), bool)), prefix, mask)


@jax.jit
def in_blocks(q, own, prefix, lengths):
  return attention.attend_in_blocks(q, own, prefix, lengths, 8)


def weighed(form, q, own, prefix, lengths, *rest):
  """A scalar of every entry, so that no gradient is hidden by symmetry."""
  out = form(q, own, prefix, lengths, *rest).astype(jnp.float32)
  return jnp.sum(jnp.sin(out) * jnp.arange(1, out.size + 1).reshape(out.shape) / out.size)


@pytest.mark.parametrize(
  ("n", "s", "block"), [(1, 1, 8), (7, 5, 8), (9, 17, 8), (16, 0, 8), (33, 24, 16), (24, 40, 64)]
)
def test_values_and_gradients_are_the_plain_form_s(n, s, block):
  data = inputs(n, s)

  def both(form, *rest):
    of = functools.partial(weighed, form)
    grad = jax.value_and_grad(lambda *x: of(*x, data[3], *rest), argnums=(0, 1, 2))
    return jax.jit(grad)(*data[:3])

  want, got = both(plain), both(attention.attend_in_blocks, block)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)
  blocked = jax.jit(attention.attend_in_blocks, static_argnums=4)(*data, block)
  np.testing.assert_allclose(blocked, plain(*data), rtol=1e-5, atol=1e-6)


def test_in_float64_they_agree_to_its_rounding():
  """What is left in float32 is rounding, not a term that is missing."""
  with jax.enable_x64(True):
    data = inputs(19, 11, dtype=jnp.float64)
    values = in_blocks(*data) - plain(*data)
  assert np.abs(values).max() < 1e-6  # the sums are float32 in both


def test_large_scores_neither_overflow_nor_vanish():
  q, own, prefix, lengths = inputs(20, 9)
  big = (60.0 * q, own, prefix, lengths)
  out = in_blocks(*big)
  np.testing.assert_allclose(out, plain(*big), rtol=1e-4, atol=1e-5)
  grads = jax.grad(lambda x: weighed(attention.attend_in_blocks, x, *big[1:], 8))(big[0])
  assert np.isfinite(grads).all()


def test_bfloat16_stays_within_its_rounding():
  data = inputs(24, 10, dtype=jnp.bfloat16)
  exact = plain(*jax.tree.map(lambda x: x.astype(jnp.float32), data[:3]), data[3])
  for form, rest in ((plain, ()), (attention.attend_in_blocks, (8,))):
    error = np.abs(np.asarray(form(*data, *rest), np.float32) - np.asarray(exact))
    assert error.max() < 0.03


def test_no_token_sees_a_later_one_or_padding():
  q, own, prefix, lengths = inputs(20, 12)
  out = in_blocks(q, own, prefix, lengths)
  late = tuple(x.at[:, :, :, 11:].add(9.0) for x in own)
  padded = tuple(x.at[1, :, 6:].add(9.0) for x in prefix)
  again = in_blocks(q, late, padded, lengths)
  np.testing.assert_array_equal(out[:, :, :11], again[:, :, :11])
  assert (out[:, :, 11:] != again[:, :, 11:]).any()


def test_split_over_eight_devices_it_is_the_same():
  mesh = sharding.make_mesh(2, 1, 2) if len(jax.devices()) == 4 else sharding.make_mesh(2, 2, 2)
  layout = sharding.make_layout(mesh, sharding.TRAIN_RULES, P, G + 1)
  rng = np.random.default_rng(5)
  draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
  q, lengths = draw(4, 4, 20, K * R, H), jnp.array([9, 4, 1, 7])
  own, prefix = (draw(4, 4, K, 20, H),) * 2, (draw(4, K, 9, H),) * 2
  put = lambda x, *axes: jax.device_put(x, layout.sharding(axes, x.shape))  # noqa: E731
  placed = (
    put(q, "prompts", "group", None, "heads", None),
    tuple(put(x, "prompts", "group", "kv_heads", None, None) for x in own),
    tuple(put(x, "prompts", "kv_heads", None, None) for x in prefix),
    put(lengths, "prompts"),
  )
  grads = jax.jit(
    jax.grad(lambda *x: weighed(attention.attend_in_blocks, *x, 8), argnums=(0, 1, 2))
  )
  want = jax.grad(lambda *x: weighed(plain, *x, lengths), argnums=(0, 1, 2))(q, own, prefix)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), grads(*placed), want
  )


def test_the_policy_is_the_same_in_both_forms(policy, layout):
  """Hidden states and the parameters' gradient, through prefill and extend."""
  arch, params = policy
  rng = np.random.default_rng(3)
  prompts, lengths = jnp.asarray(rng.integers(0, 31, (2, 21))), jnp.array([21, 6])
  tokens = jnp.asarray(rng.integers(0, 31, (2, 3, 19)))

  def loss(params, block):
    prefix, last = model.prefill(arch, params, prompts, lengths, layout=layout, block=block)
    hidden, _ = model.extend(arch, params, prefix, tokens, layout=layout, block=block)
    return jnp.sum(jnp.sin(hidden)) + jnp.sum(jnp.sin(last))

  (a, ga), (b, gb) = (
    jax.jit(jax.value_and_grad(loss), static_argnums=1)(params, x) for x in (0, 8)
  )
  np.testing.assert_allclose(a, b, rtol=1e-5)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-3, atol=2e-4), ga, gb)
