"""Attention to a shared prefix and to a row's own tokens, under one softmax: two forms of one sum.

`attend` holds all scores at once, [P, G, K, n, N / K, S + n] of them: short rows, and decoding.
`attend_in_blocks` holds those of one block of queries and one of keys, and computes them again in
the backward pass, so that memory grows with n and not with its square. The running maximum and sum
are those of FlashAttention (arXiv:2205.14135, section 3.1).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from fadejax.arrays import einsum32

Pair = tuple[jax.Array, jax.Array]  # keys and values
FORMS = ("auto", "plain", "blocks")
LONG = 1024  # positions of a row from which `auto` takes blocks
_LOWEST = jnp.finfo(jnp.float32).min


def block_of(form: str, block: int, length: int) -> int:
  """The block for rows of `length` positions by a setting of `FORMS`; 0: the plain form."""
  if form == "auto":
    return block if length >= LONG else 0
  return block if form == "blocks" else 0


def attend(
  q: jax.Array,
  own: Pair,
  own_mask: jax.Array,
  prefix: Pair | None,
  prefix_mask: jax.Array | None,
) -> jax.Array:
  """The plain form.

  Args:
    q: [P, G, n, N, h]; query head i reads key-value head i // (N / K).
    own: keys and values [P, G, K, m, h] of the row itself.
    own_mask: bool[n, m], True where query n may see own position m.
    prefix: keys and values [P, K, S, h] of the group's prompt, or None.
    prefix_mask: bool[P, S], True on the prompt's tokens.

  Returns:
    [P, G, n, N, h]. Scores and the softmax are float32; every query must see at least
    one position (its own).
  """
  p, g, n, heads, size = q.shape
  k = own[0].shape[2]
  q = q.reshape(p, g, n, k, heads // k, size) * size**-0.5

  own_scores = einsum32("pgnkrh,pgkmh->pgknrm", q, own[0])
  own_scores = jnp.where(own_mask[None, None, None, :, None, :], own_scores, _LOWEST)
  top = own_scores.max(axis=-1, keepdims=True)
  if prefix is not None:
    assert prefix_mask is not None
    scores = einsum32("pgnkrh,pksh->pgknrs", q, prefix[0])
    scores = jnp.where(prefix_mask[:, None, None, None, None, :], scores, _LOWEST)
    top = jnp.maximum(top, scores.max(axis=-1, keepdims=True))
  top = jax.lax.stop_gradient(top)

  own_exp = jnp.exp(own_scores - top)
  total = own_exp.sum(axis=-1, keepdims=True)
  out = einsum32("pgknrm,pgkmh->pgknrh", own_exp.astype(q.dtype), own[1])
  if prefix is not None:
    exp = jnp.exp(scores - top)
    total = total + exp.sum(axis=-1, keepdims=True)
    out = out + einsum32("pgknrs,pksh->pgknrh", exp.astype(q.dtype), prefix[1])
  out = (out / total).astype(q.dtype)
  return out.transpose(0, 1, 3, 2, 4, 5).reshape(p, g, n, heads, size)


# ------------------------------------------------------------------ in blocks


def attend_in_blocks(
  q: jax.Array, own: Pair, prefix: Pair | None, lengths: jax.Array | None, block: int
) -> jax.Array:
  """The same for whole rows (m = n, causal), in memory that grows with n.

  Args:
    q: [P, G, n, N, h].
    own: keys and values [P, G, K, n, h]; query i sees own positions up to i.
    prefix: keys and values [P, K, S, h] of the group's prompt, or None.
    lengths: i32[P], the prompts'.
    block: positions in a block, of queries and of keys.

  Returns:
    [P, G, n, N, h].
  """
  p, g, n, heads, size = q.shape
  kv_heads = own[0].shape[2]
  q = q.reshape(p, g, n, kv_heads, heads // kv_heads, size) * size**-0.5
  q = q.transpose(0, 1, 3, 2, 4, 5)  # [P, G, K, n, R, h]
  size_of = lambda length: min(block, -(-length // 8) * 8)  # noqa: E731 - no block of padding
  own_block = size_of(n)
  q, own = _padded(q, 3, own_block), _padded_pair(own, 3, own_block)
  prefix_block = 0
  if prefix is not None:
    prefix_block = size_of(prefix[0].shape[2])
    prefix = _padded_pair(prefix, 2, prefix_block)
  out = _blocked(q, own, prefix, lengths, (own_block, prefix_block))
  return out[:, :, :, :n].transpose(0, 1, 3, 2, 4, 5).reshape(p, g, n, heads, size)


def _padded(x: jax.Array, axis: int, block: int) -> jax.Array:
  """Up to a multiple of the block. No query sees a padded key, and no one reads a padded query."""
  width = [(0, 0)] * x.ndim
  width[axis] = (0, -x.shape[axis] % block)
  return jnp.pad(x, width)


def _padded_pair(pair: Pair, axis: int, block: int) -> Pair:
  return _padded(pair[0], axis, block), _padded(pair[1], axis, block)


def _take(x: jax.Array, index: jax.Array, size: int) -> jax.Array:
  """One block of positions, which are the last axis but one or, of queries, but two."""
  axis = 3 if x.ndim in (5, 6) else 2
  return jax.lax.dynamic_slice_in_dim(x, index * size, size, axis)


def _add(x: jax.Array, part: jax.Array, index: jax.Array, size: int) -> jax.Array:
  axis = 3 if x.ndim in (5, 6) else 2
  new = part + _take(x, index, size)
  return jax.lax.dynamic_update_slice_in_dim(x, new, index * size, axis)


def _letters(keys: jax.Array) -> str:
  """Einsum letters of keys and values: the prefix has no axis of completions."""
  return "pgkmh" if keys.ndim == 5 else "pkmh"


def _scores(
  q: jax.Array, keys: jax.Array, start: Any, first: Any, lengths: jax.Array | None
) -> jax.Array:
  """Scores [P, G, K, b, R, c] of a block of queries and one of keys, masked.

  Args:
    q: [P, G, K, b, R, h], scaled.
    keys: [P, G, K, c, h] of the row itself, or [P, K, c, h] of the prefix.
    start: position of the first query.
    first: position of the first key, both in the row or in the prefix.
    lengths: i32[P] of the prefix.
  """
  scores = einsum32(f"pgkqrh,{_letters(keys)}->pgkqrm", q, keys)
  key = first + jnp.arange(keys.shape[-2])
  if keys.ndim == 5:
    query = start + jnp.arange(q.shape[3])
    seen = (key[None, :] <= query[:, None])[None, None, None, :, None, :]
  else:
    assert lengths is not None
    seen = (key[None, :] < lengths[:, None])[:, None, None, None, None, :]
  return jnp.where(seen, scores, _LOWEST)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _blocked(
  q: jax.Array, own: Pair, prefix: Pair | None, lengths: jax.Array | None, blocks: tuple[int, int]
) -> jax.Array:
  return _forward(q, own, prefix, lengths, blocks)[0]


def _parts(own: Pair, prefix: Pair | None, blocks: tuple[int, int]) -> list[tuple[Pair, int, int]]:
  """(keys and values, block, how many blocks) of the row itself and of the prefix."""
  parts = [(own, blocks[0], own[0].shape[3] // blocks[0])]
  if prefix is not None:
    parts.append((prefix, blocks[1], prefix[0].shape[2] // blocks[1]))
  return parts


def _bound(part: Pair, index: jax.Array, count: int) -> Any:
  """How many blocks of keys the queries of block `index` see: of their own row, up to theirs."""
  return index + 1 if part[0].ndim == 5 else count


def _forward(
  q: jax.Array, own: Pair, prefix: Pair | None, lengths: jax.Array | None, blocks: tuple[int, int]
) -> tuple[jax.Array, jax.Array]:
  """(out [P, G, K, n, R, h], log of the softmax's sum f32[P, G, K, n, R])."""
  size = blocks[0]

  def queries(index: jax.Array) -> tuple[jax.Array, jax.Array]:
    block = _take(q, index, size)
    carry = (
      jnp.full(block.shape[:-1], _LOWEST),
      jnp.zeros(block.shape[:-1]),
      jnp.zeros(block.shape, jnp.float32),
    )
    for part, width, count in _parts(own, prefix, blocks):

      def step(j: Any, carry: Any, part: Pair = part, width: int = width) -> Any:
        top, total, out = carry
        keys, values = (_take(x, j, width) for x in part)
        scores = _scores(block, keys, index * size, j * width, lengths)
        new_top = jnp.maximum(top, scores.max(axis=-1))
        exp, shrink = jnp.exp(scores - new_top[..., None]), jnp.exp(top - new_top)
        mixed = einsum32(f"pgkqrm,{_letters(values)}->pgkqrh", exp.astype(q.dtype), values)
        return new_top, total * shrink + exp.sum(axis=-1), out * shrink[..., None] + mixed

      carry = jax.lax.fori_loop(0, _bound(part, index, count), step, carry)
    top, total, out = carry
    return (out / total[..., None]).astype(q.dtype), top + jnp.log(total)

  out, log_sum = jax.lax.map(queries, jnp.arange(q.shape[3] // size))
  return _joined(out), _joined(log_sum)


def _joined(blocks: jax.Array) -> jax.Array:
  """[blocks, P, G, K, b, …] → [P, G, K, n, …]."""
  x = jnp.moveaxis(blocks, 0, 3)
  return x.reshape(*x.shape[:3], -1, *x.shape[5:])


def _saved(
  q: jax.Array, own: Pair, prefix: Pair | None, lengths: jax.Array | None, blocks: tuple[int, int]
) -> tuple[jax.Array, Any]:
  out, log_sum = _forward(q, own, prefix, lengths, blocks)
  return out, (q, own, prefix, lengths, out, log_sum)


def _backward(blocks: tuple[int, int], saved: Any, d_out: jax.Array) -> Any:
  """Scores again, a block at a time: dS = P · (dP - rowsum(dO · O)), P = exp(S - log sum)."""
  q, own, prefix, lengths, out, log_sum = saved
  size = blocks[0]
  inner = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
  parts = _parts(own, prefix, blocks)
  zeros = [tuple(jnp.zeros(x.shape, jnp.float32) for x in part) for part, _, _ in parts]

  def queries(totals: Any, index: jax.Array) -> tuple[Any, jax.Array]:
    block, d_block = _take(q, index, size), _take(d_out, index, size)
    log_block, inner_block = _take(log_sum, index, size), _take(inner, index, size)
    d_q, new = jnp.zeros(block.shape, jnp.float32), []
    for (part, width, count), total in zip(parts, totals, strict=True):

      def step(j: Any, carry: Any, part: Pair = part, width: int = width) -> Any:
        d_q, (d_keys, d_values) = carry
        keys, values = (_take(x, j, width) for x in part)
        of = _letters(keys)
        scores = _scores(block, keys, index * size, j * width, lengths)
        share = jnp.exp(scores - log_block[..., None])
        d_share = einsum32(f"pgkqrh,{of}->pgkqrm", d_block, values)
        d_scores = (share * (d_share - inner_block[..., None])).astype(q.dtype)
        d_q = d_q + einsum32(f"pgkqrm,{of}->pgkqrh", d_scores, keys)
        d_k = einsum32(f"pgkqrm,pgkqrh->{of}", d_scores, block)
        d_v = einsum32(f"pgkqrm,pgkqrh->{of}", share.astype(q.dtype), d_block)
        return d_q, (_add(d_keys, d_k, j, width), _add(d_values, d_v, j, width))

      d_q, total = jax.lax.fori_loop(0, _bound(part, index, count), step, (d_q, total))
      new.append(total)
    return new, d_q.astype(q.dtype)

  totals, d_q = jax.lax.scan(queries, zeros, jnp.arange(q.shape[3] // size))
  cast = [
    tuple(d.astype(x.dtype) for d, x in zip(total, part, strict=True))
    for (part, _, _), total in zip(parts, totals, strict=True)
  ]
  return _joined(d_q), cast[0], cast[1] if prefix is not None else None, None


_blocked.defvjp(_saved, _backward)
