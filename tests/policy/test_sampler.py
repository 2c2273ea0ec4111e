"""The sampler: the right distribution, the right numbers, noise that never repeats."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fadejax.algorithm import losses
from fadejax.arrays import PromptBatch
from fadejax.policy import model, sampler

P, S = 4, 6
PROMPTS = PromptBatch(
  jnp.asarray(np.random.default_rng(3).integers(2, 31, (P, S))),
  jnp.array([6, 2, 4, 1]),
  jnp.arange(10, 10 + P),
)
CONFIG = sampler.SamplerConfig(group=3, max_completion_length=8, stop_ids=(1,))
ROOT = jax.random.key(7)


def draw(policy, layout, prompts=PROMPTS, root=ROOT, **changes):
  arch, params = policy
  config = dataclasses.replace(CONFIG, **changes)
  return sampler.sample(params, prompts, root, arch=arch, config=config, layout=layout)


def rows(batch, order):
  return jax.tree.map(lambda x: x[np.asarray(order)], batch)


def test_greedy_is_the_naive_loop(policy, layout, reference):
  arch, params = policy
  out = draw(policy, layout, group=1, greedy=True, stop_ids=(1, 5))
  for p in range(P):
    ids = list(np.asarray(PROMPTS.tokens[p, : PROMPTS.lengths[p]]))
    start = len(ids)
    for _ in range(CONFIG.max_completion_length):
      ids.append(int(np.argmax(reference(arch, params, ids)[-1])))
      if ids[-1] in (1, 5):
        break
    length = int(out.lengths[p, 0])
    assert np.asarray(out.tokens[p, 0, :length]).tolist() == ids[start:]
    assert bool(out.truncated[p, 0]) == (ids[-1] not in (1, 5))


def test_logprobs_and_entropies_are_the_references(policy, layout, reference):
  arch, params = policy
  out = draw(policy, layout, temperature=0.7, top_k=5, top_p=0.8)  # recorded: unfiltered
  for p in range(P):
    for g in range(CONFIG.group):
      n, length = int(PROMPTS.lengths[p]), int(out.lengths[p, g])
      tokens = np.asarray(out.tokens[p, g, :length])
      ids = [*np.asarray(PROMPTS.tokens[p, :n]), *tokens]
      logits = reference(arch, params, ids)[n - 1 : -1] / 0.7
      log = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
      np.testing.assert_allclose(
        out.sampler_logprobs[p, g, :length], log[np.arange(length), tokens], atol=1e-5
      )
      np.testing.assert_allclose(
        out.entropy[p, g, :length], -(np.exp(log) * log).sum(-1), atol=1e-5
      )
      assert not np.asarray(out.sampler_logprobs[p, g, length:]).any()
      assert not np.asarray(out.entropy[p, g, length:]).any()


def test_sampler_and_trainer_agree(llama, layout):
  arch, params = llama
  out = draw(llama, layout)
  prefix, last = model.prefill(arch, params, PROMPTS.tokens, PROMPTS.lengths, layout=layout)
  hidden, _ = model.extend(arch, params, prefix, out.tokens[:, :, :-1], layout=layout)
  first = jnp.broadcast_to(last[:, None, None], (P, CONFIG.group, 1, last.shape[-1]))
  hidden = jnp.concatenate([first, hidden], 2)
  logprobs, _ = losses.token_logprobs(hidden, model.head(params), out.tokens)
  mask = losses.token_mask(out.lengths, CONFIG.max_completion_length)
  np.testing.assert_allclose(jnp.where(mask, logprobs, 0.0), out.sampler_logprobs, atol=1e-5)


def test_ids_follow_rows_under_any_permutation(llama, layout):
  out = draw(llama, layout)
  order = [2, 0, 3, 1]
  moved = draw(llama, layout, prompts=rows(PROMPTS, order))
  np.testing.assert_array_equal(moved.tokens, out.tokens[np.asarray(order)])


def test_noise_is_named_by_draw_group_and_position_alone(llama, layout):
  out = draw(llama, layout)
  wide = draw(llama, layout, group=5)
  np.testing.assert_array_equal(wide.tokens[:, :3], out.tokens)
  same_prompt = PromptBatch(
    jnp.broadcast_to(PROMPTS.tokens[:1], (P, S)), jnp.full(P, 6), jnp.array([4, 4, 5, 6])
  )
  again = np.asarray(draw(llama, layout, prompts=same_prompt, group=4).tokens)
  np.testing.assert_array_equal(again[0], again[1])  # the same draw index: the same noise
  assert len({row.tobytes() for row in again[1:].reshape(12, -1)}) == 12
  other_root = draw(llama, layout, root=jax.random.key(8))
  assert (np.asarray(other_root.tokens) != np.asarray(out.tokens)).any()


def test_stops_flags_and_padding(llama, layout):
  out = draw(llama, layout, group=64, stop_ids=(1, 4), pad_id=30)
  tokens, lengths = np.asarray(out.tokens), np.asarray(out.lengths)
  ended = 0
  for p in range(P):
    for g in range(64):
      row, length = tokens[p, g], lengths[p, g]
      stops = np.flatnonzero(np.isin(row[:length], (1, 4)))
      if out.truncated[p, g]:
        assert length == CONFIG.max_completion_length and len(stops) == 0
      else:
        ended += 1
        assert stops.tolist() == [length - 1]
        assert (row[length:] == 30).all()
  assert 10 < ended < 4 * 64


@pytest.mark.parametrize(
  ("said", "stops", "mask", "truncated"),
  [
    ([5, 6, 2, 9, 9], (2,), [1, 1, 1, 0, 0], False),  # C124: the stop token itself is trained on
    ([5, 6, 7, 8, 9], (2,), [1, 1, 1, 1, 1], True),  # C126: the last token is what was sampled
    ([5, 7, 2, 9, 9], (2, 7), [1, 1, 0, 0, 0], False),  # C127: either of two stop tokens ends it
  ],
)
def test_handed_ends_of_completions(llama, said, stops, mask, truncated):
  arch, _ = llama
  config = dataclasses.replace(CONFIG, group=1, max_completion_length=5, stop_ids=stops, pad_id=0)
  drawn = sampler._nothing_drawn(arch, config, 1)
  for token in said:  # all but certain to be drawn
    logits = 50.0 * jax.nn.one_hot(jnp.full((1, 1), token), arch.vocab_size)
    drawn = sampler._draw(config, drawn, logits, jnp.full((1, 1), 0.5))
  ours = losses.token_mask(drawn.lengths, 5)[0, 0]
  assert ours.astype(int).tolist() == mask and bool(~drawn.done[0, 0]) == truncated
  kept = [token if kept else 0 for token, kept in zip(said, mask, strict=True)]
  assert drawn.tokens[0, 0].tolist() == kept


def test_early_exit_changes_nothing(llama, layout):
  """With every token a stop, the loop ends after one; a longer limit gives the same."""
  every = tuple(range(31))
  out = draw(llama, layout, stop_ids=every)
  assert (np.asarray(out.lengths) == 1).all() and not np.asarray(out.truncated).any()
  one = draw(llama, layout, stop_ids=every, max_completion_length=1)
  np.testing.assert_array_equal(one.tokens[..., 0], out.tokens[..., 0])


# ------------------------------------------------------------ the inverse CDF


@pytest.mark.parametrize("size", [1, 2, 7, 16, 1000])
def test_inverse_cdf_is_the_plain_search(size):
  rng = np.random.default_rng(size)
  logits = rng.normal(0, 3, (50, size)).astype(np.float32)
  uniform = rng.random(50).astype(np.float32)
  got = np.asarray(sampler.inverse_cdf(jnp.asarray(logits), jnp.asarray(uniform)))
  mass = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
  cdf = np.cumsum(mass, -1) / mass.sum(-1, keepdims=True)
  expected = (cdf <= uniform[:, None]).sum(-1)
  # float32 sums may differ at an edge: there the distance to it must be tiny.
  for i in np.flatnonzero(got != expected):
    low = cdf[i, got[i] - 1] if got[i] else 0.0
    assert low - 1e-6 <= uniform[i] <= cdf[i, got[i]] + 1e-6


def test_frequencies_are_the_probabilities():
  p = np.array([0.5, 0.2, 0.15, 0.1, 0.05])
  n = 200_000
  uniform = jax.random.uniform(jax.random.key(0), (n,))
  logits = jnp.broadcast_to(jnp.log(jnp.asarray(p, jnp.float32)), (n, 5))
  counts = np.bincount(np.asarray(sampler.inverse_cdf(logits, uniform)), minlength=5)
  chi2 = ((counts - n * p) ** 2 / (n * p)).sum()
  assert chi2 < 18.5  # 99.9 % point with 4 degrees of freedom


@pytest.mark.parametrize("uniform", [0.0, 0.25, 0.5, np.nextafter(np.float32(1), np.float32(0))])
def test_a_token_without_probability_is_never_drawn(uniform):
  for alive in ([0], [3], [99], [5, 60], [98, 99], [0, 99]):
    logits = np.full(100, -np.inf, np.float32)
    logits[alive] = 0.0
    got = int(sampler.inverse_cdf(jnp.asarray(logits), jnp.float32(uniform)))
    assert got in alive


def test_filters():
  logits = jnp.log(jnp.array([0.4, 0.3, 0.2, 0.1]))
  kept = lambda **k: np.isfinite(np.asarray(sampler.filter_logits(logits, **k))).tolist()  # noqa: E731
  assert kept(top_k=0, top_p=1.0) == [True] * 4
  assert kept(top_k=2, top_p=1.0) == [True, True, False, False]
  assert kept(top_k=9, top_p=1.0) == [True] * 4
  assert kept(top_k=0, top_p=0.6) == [True, True, False, False]
  assert kept(top_k=0, top_p=0.75) == [True, True, True, False]
  assert kept(top_k=0, top_p=1e-6) == [True, False, False, False]
  assert kept(top_k=3, top_p=0.5) == [True, True, False, False]


def test_flat_logits_give_distinct_completions(layout):
  """Sixteen rows of one prompt differ (a default top_k or one key for all would not)."""
  arch = model.Architecture(64, 8, 1, 1, 1, 8, 8)
  params = jax.tree.map(jnp.zeros_like, model.init_params(arch, jax.random.key(0)))
  prompts = PromptBatch(jnp.zeros((1, 2), jnp.int32), jnp.array([2]), jnp.array([0]))
  config = sampler.SamplerConfig(group=16, max_completion_length=8, stop_ids=())
  out = sampler.sample(params, prompts, ROOT, arch=arch, config=config, layout=layout)
  assert len({row.tobytes() for row in np.asarray(out.tokens[0])}) == 16
  np.testing.assert_allclose(out.entropy, np.log(64), rtol=1e-6)
