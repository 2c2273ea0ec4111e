"""The arrays that travel between rooms, and the legend of their axes.

Axes, one letter each, the same everywhere:

    P  prompts in a batch            G  completions a prompt (the group)
    S  prompt length                 C  completion length
    B  = P * G completions           T  = S + C positions
    V  vocabulary                    D  width of the residual stream
    L  layers                        N  query heads
    K  key-value heads               h  size of a head

Completions keep the group axis, `[P, G, ...]`: a prompt is held once for its
whole group and is never copied. Everything is padded on the right; lengths say
where a row ends, and no value depends on what lies beyond.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


def einsum32(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
  """einsum with float32 sums and result, whatever the operands' dtype.

  XLA on CPU has no bfloat16 product with a float32 result: there the operands are cast.
  """
  if a.dtype == jnp.bfloat16 and jax.default_backend() == "cpu":
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
  return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PromptBatch:
  """Prompts of one step; their problem records stay on the host."""

  tokens: jax.Array  # i32[P, S], right-padded
  lengths: jax.Array  # i32[P], 1 <= length <= S
  draw: jax.Array  # i32[P], global draw index: names the prompt's random numbers


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RolloutBatch:
  """A group of sampled completions for every prompt."""

  prompts: PromptBatch
  tokens: jax.Array  # i32[P, G, C], right-padded
  lengths: jax.Array  # i32[P, G], the stop token included
  truncated: jax.Array  # bool[P, G], True where no stop token came within C
  sampler_logprobs: jax.Array  # f32[P, G, C], unfiltered, at the temperature; 0 past the length
  entropy: jax.Array  # f32[P, G, C], nats, of the same distribution; 0 past the length


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RewardBatch:
  """What the verifiers said of a RolloutBatch, as numbers.

  A group with a verdict that could not be reached (`grader_error`) is invalid: it
  leaves the loss, its divisor, the running averages and every metric.
  """

  rewards: jax.Array  # f32[P, G], in [0, 1]; 0 where invalid
  shaping: jax.Array  # f32[P, G], added to the reward that is trained on
  valid: jax.Array  # bool[P]
