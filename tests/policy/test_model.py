"""The forward pass against a plain NumPy reference; padding, caches, gradients."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fadejax.policy import model

P, G, S, C = 3, 2, 7, 5
LENGTHS = np.array([7, 4, 1])


@pytest.fixture
def ids():
  rng = np.random.default_rng(0)
  return rng.integers(0, 31, (P, S)), rng.integers(0, 31, (P, G, C))


@functools.partial(jax.jit, static_argnames=("arch", "layout", "dtype", "remat"))
def all_logits(arch, params, prompts, completions, lengths, layout, **settings):
  """Logits [P, G, C + 1, V]: what predicts each completion token and the one after the last."""
  prefix, last = model.prefill(
    arch, params, jnp.asarray(prompts), jnp.asarray(lengths), layout=layout, **settings
  )
  hidden, _ = model.extend(
    arch, params, prefix, jnp.asarray(completions), layout=layout, **settings
  )
  first = jnp.broadcast_to(last[:, None, None], (*hidden.shape[:2], 1, hidden.shape[-1]))
  return jnp.concatenate([first, hidden], axis=2) @ model.head(params).T


def test_matches_the_reference(policy, ids, layout, reference):
  arch, params = policy
  logits = all_logits(arch, params, *ids, LENGTHS, layout)
  for p in range(P):
    for g in range(G):
      row = [*ids[0][p, : LENGTHS[p]], *ids[1][p, g]]
      expected = reference(arch, params, row)[LENGTHS[p] - 1 :]
      np.testing.assert_allclose(logits[p, g], expected, atol=2e-5)


def test_padding_changes_nothing(llama, ids, layout):
  arch, params = llama
  prompts, completions = ids
  wide = np.full((P, S + 6), 30)
  for p in range(P):
    wide[p, : LENGTHS[p]] = prompts[p, : LENGTHS[p]]
  a = all_logits(arch, params, prompts, completions, LENGTHS, layout)
  b = all_logits(arch, params, wide, completions, LENGTHS, layout)
  np.testing.assert_allclose(a, b, atol=1e-5)


def test_decoding_with_a_cache_equals_one_pass(llama, ids, layout):
  arch, params = llama
  prompts, completions = jnp.asarray(ids[0]), jnp.asarray(ids[1])
  extend = jax.jit(functools.partial(model.extend, layout=layout), static_argnums=0)
  prefix, _ = model.prefill(arch, params, prompts, jnp.asarray(LENGTHS), layout=layout)
  whole, none = extend(arch, params, prefix, completions)
  assert none is None
  own = model.init_own_cache(arch, P, G, C + 2, jnp.float32)
  parts = []
  for start, stop in ((0, 1), (1, 2), (2, 5)):
    hidden, own = extend(arch, params, prefix, completions[:, :, start:stop], own)
    parts.append(hidden)
  assert int(own.used) == C
  np.testing.assert_allclose(jnp.concatenate(parts, 2), whole, atol=1e-5)


@pytest.mark.parametrize("remat", ["full", "dots"])
def test_rematerialisation_changes_no_gradient(llama, ids, layout, remat):
  arch, params = llama

  def loss(params, remat):
    return jnp.mean(all_logits(arch, params, *ids, LENGTHS, layout, remat=remat) ** 2)

  a, b = (jax.grad(loss)(params, name) for name in ("none", remat))
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), a, b)


def test_gradient_reaches_the_shared_prompt(llama, ids, layout):
  """The gradient of a group is the sum over its members' own prompts."""
  arch, params = llama
  prompts, completions = ids

  def loss(params, completions):
    return jnp.sum(jnp.sin(all_logits(arch, params, prompts, completions, LENGTHS, layout)))

  together = jax.grad(loss)(params, completions)
  apart = [jax.grad(loss)(params, completions[:, g : g + 1]) for g in range(G)]
  summed = jax.tree.map(lambda *x: sum(x), *apart)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-3), together, summed
  )


def test_bfloat16_is_close_and_keeps_float32_parameters(llama, ids, layout):
  arch, params = llama
  a = all_logits(arch, params, *ids, LENGTHS, layout)
  b = all_logits(arch, params, *ids, LENGTHS, layout, dtype=jnp.bfloat16)
  assert 0 < np.abs(a - b).max() < 0.3
  assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}


def test_every_parameter_has_axes_of_its_rank(policy):
  arch, params = policy
  axes = model.logical_axes(arch)
  is_axes = lambda x: isinstance(x, tuple)  # noqa: E731
  jax.tree.map(lambda a, x: len(a) == x.ndim or pytest.fail(f"{a} {x.shape}"), axes, params,
               is_leaf=is_axes)  # fmt: skip
  assert model.count_params(arch) == sum(x.size for x in jax.tree.leaves(params))


def test_smollm2_has_as_many_parameters_as_its_authors_say():
  from fadejax.policy.presets import preset

  assert model.count_params(preset("smollm2-135m", 49152)) == 134_515_008


def test_wrong_shapes_are_named():
  with pytest.raises(ValueError, match=r"heads \(3\) must be a multiple of kv_heads \(2\)"):
    model.Architecture(8, 8, 1, 3, 2, 4, 8)
