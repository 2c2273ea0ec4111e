"""A batch in parts, for memory: gradients and sums of one part after another, added up.

Nothing here changes an update: what is added are sums, and the caller divides once by the count of
the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fadejax.policy.sharding import Layout

Sums = dict[str, jax.Array]  # f32[] each; of a name that ends in _max the maximum, not the sum


def split(tree: Any, parts: int, layout: Layout, axis: int = 0) -> Any:
  """[P, G, ...] → [parts, P / parts, G, ...], or along axis 1 [parts, P, G / parts, ...].

  Each part is spread over all devices: prompt (or member of a group) i goes to part i mod parts, so
  that no device holds a part alone.
  """
  names = ("prompts", "group")[: axis + 1]

  def one(x: jax.Array) -> jax.Array:
    x = x.reshape(*x.shape[:axis], x.shape[axis] // parts, parts, *x.shape[axis + 1 :])
    x = jnp.moveaxis(x, axis + 1, 0)
    return layout.constrain(x, None, *names, *([None] * (x.ndim - 1 - len(names))))

  return jax.tree.map(one, tree)


def add_up(gradient: Callable[[Any], tuple[Any, Sums]], parts: Any, like: Any) -> tuple[Any, Sums]:
  """The sum of `gradient(part)` over parts.

  Args:
    gradient: from a part to its gradient and its sums.
    parts: a tree of arrays [parts, ...].
    like: a tree of the gradient's shapes.

  Returns:
    (gradient in float32, sums).
  """

  def add(total: Any, part: Any) -> tuple[Any, Sums]:
    new, sums = gradient(part)
    return jax.tree.map(jnp.add, total, new), sums

  zero = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), like)
  total, sums = jax.lax.scan(add, zero, parts)
  return total, {k: (jnp.max if k.endswith("_max") else jnp.sum)(x) for k, x in sums.items()}


def read_once(
  read: Callable[[Any], Any],
  gradient: Callable[[Any, Any, Any], tuple[Any, Sums]],
  params: Any,
  parts: Any,
) -> tuple[Any, Sums]:
  """Gradient of Σ over parts of f(params, read(params), part): `read` runs once, forward and back.

  Args:
    read: what all parts share, as floating point arrays.
    gradient: (params, what was read, part) → (the two gradients of f by the first two, sums).
    params: what the gradient is taken by.
    parts: as in `add_up`.

  Returns:
    (gradient, sums).
  """
  shared, pull = jax.vjp(read, params)
  of_part = lambda part: gradient(params, shared, part)  # noqa: E731
  (direct, d_shared), sums = add_up(of_part, parts, (params, shared))
  d_shared = jax.tree.map(lambda d, x: d.astype(x.dtype), d_shared, shared)
  return jax.tree.map(jnp.add, direct, pull(d_shared)[0]), sums
