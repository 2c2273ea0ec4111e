"""Sampling: a jitted loop that draws a group of completions for every prompt.

The random number of completion g of a prompt at position t is
`uniform(fold_in(fold_in(fold_in(root, draw), g), t))`, with the prompt's global draw
index. So it depends on nothing else: not on the row, the batch, the host or the number
of devices, and no draw ever repeats another's noise.

A token is found by inverting the cumulative distribution in two levels: first the block
of the vocabulary, then the token inside. That costs one pass over the probabilities,
where Gumbel noise would want a random number for every entry.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from fadejax.algorithm.losses import logprobs_and_entropy
from fadejax.arrays import PromptBatch, RolloutBatch, einsum32
from fadejax.policy import model
from fadejax.policy.sharding import Layout


@dataclasses.dataclass(frozen=True)
class SamplerConfig:
  """What one compiled sampler does; hashable, so it is static.

  `greedy` takes the most probable token; log-probs and entropies are then those of
  temperature `temperature` all the same.
  """

  group: int
  max_completion_length: int
  stop_ids: tuple[int, ...]
  pad_id: int = 0
  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  greedy: bool = False
  dtype: str = "float32"
  block: int = 0  # of attention while the prompts are read, as in the update; 0: the plain form


def top_k_mask(logits: jax.Array, k: int) -> jax.Array:
  """bool[..., V]: the k largest logits, and any that equal the k-th."""
  return logits >= jax.lax.top_k(logits, k)[0][..., -1:]


def top_p_mask(logits: jax.Array, p: float) -> jax.Array:
  """bool[..., V]: the fewest most probable tokens whose probabilities reach p.

  A token stays while the mass of the more probable ones is under p, so the first always
  does; tokens as probable as the last that stays do too.
  """
  ordered = jnp.sort(jax.nn.softmax(logits, axis=-1), axis=-1, descending=True)
  before = jnp.cumsum(ordered, axis=-1) - ordered
  lowest = jnp.min(jnp.where(before < p, ordered, jnp.inf), axis=-1, keepdims=True)
  return jax.nn.softmax(logits, axis=-1) >= lowest


def filter_logits(logits: jax.Array, top_k: int, top_p: float) -> jax.Array:
  """Logits with what top-k, then top-p, leave out at -inf."""
  if 0 < top_k < logits.shape[-1]:
    logits = jnp.where(top_k_mask(logits, top_k), logits, -jnp.inf)
  if top_p < 1.0:
    logits = jnp.where(top_p_mask(logits, top_p), logits, -jnp.inf)
  return logits


def _first_past(cumulative: jax.Array, target: jax.Array, mass: jax.Array) -> jax.Array:
  """Index of the first entry whose cumulative sum exceeds target; never one without mass.

  Rounding may leave target at or past the last sum: then the last entry with mass.
  """
  last = mass.shape[-1] - 1 - jnp.argmax(jnp.flip(mass, -1) > 0, axis=-1)
  past = (cumulative > target[..., None]) & (mass > 0)
  return jnp.where(past.any(axis=-1), jnp.argmax(past, axis=-1), last).astype(jnp.int32)


def inverse_cdf(logits: jax.Array, uniform: jax.Array) -> jax.Array:
  """The token at which the cumulative distribution passes a uniform number.

  Args:
    logits: f32[..., V]; -inf where a token may not be drawn, finite somewhere.
    uniform: f32[...], in [0, 1).

  Returns:
    i32[...]. A token of probability zero is never returned.
  """
  size = logits.shape[-1]
  block = max(1, round(size**0.5))
  mass = jnp.exp(logits - logits.max(axis=-1, keepdims=True))
  spare = -size % block
  mass = jnp.pad(mass, [(0, 0)] * (mass.ndim - 1) + [(0, spare)])
  mass = mass.reshape(*logits.shape[:-1], -1, block)
  block_mass = mass.sum(axis=-1)
  block_sums = jnp.cumsum(block_mass, axis=-1)
  target = uniform * block_sums[..., -1]
  chosen = _first_past(block_sums, target, block_mass)
  inside = jnp.take_along_axis(mass, chosen[..., None, None], axis=-2)[..., 0, :]
  before = jnp.take_along_axis(block_sums - block_mass, chosen[..., None], axis=-1)[..., 0]
  return chosen * block + _first_past(jnp.cumsum(inside, axis=-1), target - before, inside)


def completion_keys(root: jax.Array, draw: jax.Array, group: int) -> jax.Array:
  """Keys [P, G], one a completion, from the root and the draw indices i32[P]."""
  fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
  prompt_keys = fold(root, draw)
  return jax.vmap(fold, in_axes=(0, None))(prompt_keys, jnp.arange(group))


def _uniforms(keys: jax.Array, position: jax.Array) -> jax.Array:
  """f32[P, G] for completion position `position`."""
  one = lambda key: jax.random.uniform(jax.random.fold_in(key, position))  # noqa: E731
  return jax.vmap(jax.vmap(one))(keys)


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["t", "tokens", "logprobs", "entropy", "lengths", "done", "own"],
  meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class _Drawn:
  """What the loop carries: t tokens of every row, fewer of one that has ended."""

  t: jax.Array  # i32[]
  tokens: jax.Array  # i32[P, G, C]
  logprobs: jax.Array  # f32[P, G, C]
  entropy: jax.Array  # f32[P, G, C]
  lengths: jax.Array  # i32[P, G]
  done: jax.Array  # bool[P, G]
  own: model.OwnCache


def _nothing_drawn(arch: model.Architecture, config: SamplerConfig, prompts: int) -> _Drawn:
  p, g, c = prompts, config.group, config.max_completion_length
  return _Drawn(
    t=jnp.zeros((), jnp.int32),
    tokens=jnp.full((p, g, c), config.pad_id, jnp.int32),
    logprobs=jnp.zeros((p, g, c)),
    entropy=jnp.zeros((p, g, c)),
    lengths=jnp.zeros((p, g), jnp.int32),
    done=jnp.zeros((p, g), bool),
    # One shorter: the last token is never read.
    own=model.init_own_cache(arch, p, g, c - 1, jnp.dtype(config.dtype)),
  )


def _draw(config: SamplerConfig, drawn: _Drawn, logits: jax.Array, uniforms: jax.Array) -> _Drawn:
  """One token more of every row that is alive.

  Args:
    config: temperature, filters and stop tokens.
    drawn: up to token t - 1.
    logits: f32[P, G, V], at the temperature.
    uniforms: f32[P, G], in [0, 1).
  """
  t, alive = drawn.t, ~drawn.done
  if config.greedy:
    token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
  else:
    token = inverse_cdf(filter_logits(logits, config.top_k, config.top_p), uniforms)
  logprob, entropy = logprobs_and_entropy(logits, token)
  stop = jnp.asarray(config.stop_ids, jnp.int32)
  put = lambda to, new, empty: to.at[:, :, t].set(jnp.where(alive, new, empty))  # noqa: E731
  return dataclasses.replace(
    drawn,
    t=t + 1,
    tokens=put(drawn.tokens, token, config.pad_id),
    logprobs=put(drawn.logprobs, logprob, 0.0),
    entropy=put(drawn.entropy, entropy, 0.0),
    lengths=drawn.lengths + alive.astype(jnp.int32),
    done=drawn.done | (token[..., None] == stop[None, None, :]).any(axis=-1),
  )


@functools.partial(jax.jit, static_argnames=("arch", "config", "layout"))
def sample(
  params: model.Params,
  prompts: PromptBatch,
  root: jax.Array,
  *,
  arch: model.Architecture,
  config: SamplerConfig,
  layout: Layout,
) -> RolloutBatch:
  """Draws `config.group` completions of every prompt.

  The loop ends early when every completion has ended. A completion ends with a stop
  token, which is part of it; one that has none after C tokens is flagged as truncated,
  and nothing is written over its last token. Log-probs and entropies are those of the
  whole distribution at the temperature, before top-k and top-p.

  Args:
    params: in the sampler's layout and dtype.
    prompts: tokens i32[P, S], lengths and draw i32[P].
    root: the PRNG key of the run (or of the evaluation).
    arch: the architecture.
    config: group, lengths, temperature, filters and stop tokens.
    layout: where arrays live.

  Returns:
    RolloutBatch with completions of C = config.max_completion_length.
  """
  p, g, c = prompts.tokens.shape[0], config.group, config.max_completion_length
  dtype = jnp.dtype(config.dtype)
  prefix, last = model.prefill(
    arch, params, prompts.tokens, prompts.lengths, layout=layout, dtype=dtype, block=config.block
  )
  keys = completion_keys(root, prompts.draw, g)

  def draw(drawn: _Drawn, hidden: jax.Array) -> _Drawn:
    """hidden [P, G or 1, D] predicts the next token."""
    logits = einsum32("pgd,vd->pgv", hidden, model.head(params).astype(dtype))
    logits = jnp.broadcast_to(logits / config.temperature, (p, g, logits.shape[-1]))
    logits = layout.constrain(logits, "prompts", "group", None)
    return _draw(config, drawn, logits, _uniforms(keys, drawn.t))

  def step(drawn: _Drawn) -> _Drawn:
    token = jax.lax.dynamic_slice_in_dim(drawn.tokens, drawn.t - 1, 1, axis=2)
    hidden, own = model.extend(arch, params, prefix, token, drawn.own, layout=layout, dtype=dtype)
    assert own is not None
    return draw(dataclasses.replace(drawn, own=own), hidden[:, :, 0])

  drawn = draw(_nothing_drawn(arch, config, p), last[:, None])
  if c > 1:
    unfinished = lambda drawn: (drawn.t < c) & ~drawn.done.all()  # noqa: E731
    drawn = jax.lax.while_loop(unfinished, step, drawn)
  place = lambda x: layout.constrain(x, *("prompts", "group", None)[: x.ndim])  # noqa: E731
  return RolloutBatch(
    prompts=prompts,
    tokens=place(drawn.tokens),
    lengths=place(drawn.lengths),
    truncated=place(~drawn.done),
    sampler_logprobs=place(drawn.logprobs),
    entropy=place(drawn.entropy),
  )
