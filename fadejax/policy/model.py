"""One decoder for the Llama, Qwen2 and Qwen3 families, as pure functions of a pytree.

The families differ by switches of `Architecture`, not by copies of the code. The
module below declares every parameter once, with its shape, its logical axes and its
initialiser; the rest of the system sees a nested dict of arrays and two functions:

    prefill(arch, params, tokens[P, S], lengths[P])   -> (Prefix, last_hidden[P, D])
    extend(arch, params, prefix, tokens[P, G, n], own) -> (hidden[P, G, n, D], own)

`prefill` reads every prompt once. `extend` lets each completion attend to the prefix
of its group, which is never repeated, and causally to itself. Decoding is `extend` with
n = 1; training is `extend` with n = C, gradients flowing through the shared prefix. So
sampler and trainer compute the same numbers.

The hidden state of a token predicts the next one; `last_hidden`, taken at
`lengths - 1`, predicts completion token 0, and completion token t sits at position
`lengths + t`, whatever S is.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fadejax.policy.attention import attend, attend_in_blocks
from fadejax.policy.rope import RopeScaling, rope_angles, rotate
from fadejax.policy.sharding import Layout

Params = dict[str, Any]

REMAT = ("none", "full", "dots")
# Every matrix of a layer: einsum letters of the axes that come in and of those that go out.
PROJECTIONS = {
  "q": ("d", "nh"),
  "k": ("d", "kh"),
  "v": ("d", "kh"),
  "o": ("nh", "d"),
  "gate": ("d", "f"),
  "up": ("d", "f"),
  "down": ("f", "d"),
}


@dataclasses.dataclass(frozen=True)
class Architecture:
  """Shapes and switches of a decoder; `presets.py` and `hf.py` fill it in."""

  vocab_size: int
  width: int
  layers: int
  heads: int
  kv_heads: int
  head_size: int
  ffn: int
  rope_theta: float = 10_000.0
  rope_scaling: RopeScaling | None = None  # or a dict of its fields, as a config or JSON has it
  norm_eps: float = 1e-5
  qkv_bias: bool = False  # Qwen2
  qk_norm: bool = False  # Qwen3
  tied_head: bool = False
  max_positions: int = 0  # 0: no bound known

  def __post_init__(self) -> None:
    if isinstance(self.rope_scaling, Mapping):
      object.__setattr__(self, "rope_scaling", RopeScaling(**self.rope_scaling))
    if self.heads % self.kv_heads:
      raise ValueError(
        f"model: heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})"
      )
    if self.head_size % 2:
      raise ValueError(f"model: head_size ({self.head_size}) must be even (RoPE turns pairs)")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prefix:
  """Keys and values of every prompt, once a prompt."""

  keys: jax.Array  # [L, P, K, S, h], rotated
  values: jax.Array  # [L, P, K, S, h]
  lengths: jax.Array  # i32[P]; positions at and past the length are never attended to


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OwnCache:
  """Keys and values of the completions so far. `used` positions are filled."""

  keys: jax.Array  # [L, P, G, K, C, h], rotated
  values: jax.Array  # [L, P, G, K, C, h]
  used: jax.Array  # i32[]


# ----------------------------------------------------------------- parameters


def _param(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str, ...], fan_in: int) -> nnx.Param:
  value = jax.random.truncated_normal(rngs.params(), -3.0, 3.0, shape) * fan_in**-0.5
  return nnx.Param(value, axes=axes)


def _ones(shape: tuple[int, ...], axes: tuple[str, ...]) -> nnx.Param:
  return nnx.Param(jnp.ones(shape), axes=axes)


def _zeros(shape: tuple[int, ...], axes: tuple[str, ...]) -> nnx.Param:
  return nnx.Param(jnp.zeros(shape), axes=axes)


class Block(nnx.Module):
  """All L layers, stacked on axis 0; a slice of it is one layer."""

  def __init__(self, arch: Architecture, rngs: nnx.Rngs):
    layers, width, ffn = arch.layers, arch.width, arch.ffn
    heads, kv_heads, size = arch.heads, arch.kv_heads, arch.head_size
    deep = 2 * layers  # residual branches: their outputs start small by 1/sqrt(2L)
    self.attention_norm = _ones((layers, width), ("layers", "embed_vector"))
    self.q = _param(rngs, (layers, width, heads, size), ("layers", "embed", "heads", "head"), width)
    kv_shape, kv_axes = (layers, width, kv_heads, size), ("layers", "embed", "kv_heads", "head")
    self.k = _param(rngs, kv_shape, kv_axes, width)
    self.v = _param(rngs, kv_shape, kv_axes, width)
    self.o = _param(
      rngs,
      (layers, heads, size, width),
      ("layers", "heads", "head", "embed"),
      heads * size * deep,
    )
    if arch.qkv_bias:
      self.q_bias = _zeros((layers, heads, size), ("layers", "heads", "head"))
      self.k_bias = _zeros((layers, kv_heads, size), ("layers", "kv_heads", "head"))
      self.v_bias = _zeros((layers, kv_heads, size), ("layers", "kv_heads", "head"))
    if arch.qk_norm:
      self.q_norm = _ones((layers, size), ("layers", "head"))
      self.k_norm = _ones((layers, size), ("layers", "head"))
    self.ffn_norm = _ones((layers, width), ("layers", "embed_vector"))
    self.gate = _param(rngs, (layers, width, ffn), ("layers", "embed", "ffn"), width)
    self.up = _param(rngs, (layers, width, ffn), ("layers", "embed", "ffn"), width)
    self.down = _param(rngs, (layers, ffn, width), ("layers", "ffn", "embed"), ffn * deep)

  def project(self, name: str, x: jax.Array, lora: Params | None) -> jax.Array:
    """x through one of `PROJECTIONS`, and through its adapters where it has some (lora.py)."""
    into, out = PROJECTIONS[name]
    matrix = {"q": self.q, "k": self.k, "v": self.v, "o": self.o,
              "gate": self.gate, "up": self.up, "down": self.down}[name]  # fmt: skip
    y = jnp.einsum(f"...{into},{into}{out}->...{out}", x, matrix[...].astype(x.dtype))
    if lora is None or name not in lora:
      return y
    a, b = (lora[name][key].astype(x.dtype) for key in ("a", "b"))
    return y + jnp.einsum(f"...r,r{out}->...{out}", jnp.einsum(f"...{into},{into}r->...r", x, a), b)

  def queries_keys_values(
    self, x: jax.Array, rope: tuple[jax.Array, jax.Array], arch: Architecture, lora: Params | None
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x[..., n, D] → q[..., n, N, h], k and v[..., n, K, h]; q and k rotated."""
    dtype = x.dtype
    x = rms_norm(x, self.attention_norm[...], arch.norm_eps)
    q, k, v = (self.project(name, x, lora) for name in ("q", "k", "v"))
    if arch.qkv_bias:
      q = q + _rank_like(self.q_bias[...].astype(dtype), q)
      k = k + _rank_like(self.k_bias[...].astype(dtype), k)
      v = v + _rank_like(self.v_bias[...].astype(dtype), v)
    if arch.qk_norm:
      q = rms_norm(q, self.q_norm[...], arch.norm_eps)
      k = rms_norm(k, self.k_norm[...], arch.norm_eps)
    return rotate(q, rope), rotate(k, rope), v

  def feed_forward(self, x: jax.Array, arch: Architecture, lora: Params | None) -> jax.Array:
    """SwiGLU: x[..., D] → [..., D]."""
    x = rms_norm(x, self.ffn_norm[...], arch.norm_eps)
    gate, up = self.project("gate", x, lora), self.project("up", x, lora)
    return self.project("down", jax.nn.silu(gate) * up, lora)


class Decoder(nnx.Module):
  """The parameters of a policy. The forward pass lives in `prefill` and `extend`."""

  def __init__(self, arch: Architecture, rngs: nnx.Rngs):
    shape, axes = (arch.vocab_size, arch.width), ("vocab", "embed")
    # A tied embedding is also the head, whose logits want unit scale.
    self.embedding = _param(rngs, shape, axes, arch.width)
    self.layers = Block(arch, rngs)
    self.norm = _ones((arch.width,), ("embed_vector",))
    if not arch.tied_head:
      self.head = _param(rngs, shape, axes, arch.width)


@functools.lru_cache(maxsize=64)
def _abstract(arch: Architecture) -> tuple[nnx.GraphDef, nnx.State]:
  return nnx.split(nnx.eval_shape(lambda: Decoder(arch, nnx.Rngs(0))))


@functools.lru_cache(maxsize=64)
def _block_graph(arch: Architecture) -> nnx.GraphDef:
  graph, state = _abstract(arch)
  return nnx.split(nnx.merge(graph, state).layers)[0]


def abstract_params(arch: Architecture) -> Params:
  """The parameters as jax.ShapeDtypeStruct: no memory is used."""
  return nnx.to_pure_dict(_abstract(arch)[1])


def logical_axes(arch: Architecture) -> Params:
  """A dict like the parameters', each leaf the tuple of its axes' logical names."""
  is_variable = lambda x: isinstance(x, nnx.Variable)  # noqa: E731
  axes = jax.tree.map(lambda v: v.axes, _abstract(arch)[1], is_leaf=is_variable)
  return nnx.to_pure_dict(axes)


def init_params(arch: Architecture, key: jax.Array) -> Params:
  """Random float32 parameters. Call it under jit with output shardings."""
  return nnx.to_pure_dict(nnx.split(Decoder(arch, nnx.Rngs(params=key)))[1])


def adapters(params: Params) -> Params | None:
  """The adapters that stand beside a model's parameters (`lora.attach`), if any do."""
  return params.get("lora")


def head(params: Params) -> jax.Array:
  """The output head, f32[V, D]: the embedding where it is tied."""
  return params["head"] if "head" in params else params["embedding"]


def count_params(arch: Architecture) -> int:
  """Number of parameters, a tied head counted once."""
  return sum(x.size for x in jax.tree.leaves(abstract_params(arch)))


# --------------------------------------------------------------------- pieces


def _rank_like(x: jax.Array, like: jax.Array) -> jax.Array:
  return x.reshape((1,) * (like.ndim - x.ndim) + x.shape)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
  """x / sqrt(mean(x², last axis) + eps) · scale, in float32, returned in x's dtype."""
  y = x.astype(jnp.float32)
  y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
  return (y * _rank_like(scale.astype(jnp.float32), y)).astype(x.dtype)


# --------------------------------------------------------------- forward pass


def _checkpointed(body: Any, remat: str) -> Any:
  if remat == "none":
    return body
  if remat == "full":
    return jax.checkpoint(body)
  if remat == "dots":
    return jax.checkpoint(body, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
  raise ValueError(f"model.remat: {remat!r} is not one of {REMAT}")


def _rope(arch: Architecture, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
  return rope_angles(positions, arch.head_size, arch.rope_theta, arch.rope_scaling)


def _embed(params: Params, tokens: jax.Array, dtype: Any) -> jax.Array:
  return params["embedding"].astype(dtype)[tokens]


def prefill(
  arch: Architecture,
  params: Params,
  tokens: jax.Array,
  lengths: jax.Array,
  *,
  layout: Layout,
  dtype: Any = jnp.float32,
  remat: str = "none",
  block: int = 0,
) -> tuple[Prefix, jax.Array]:
  """Reads every prompt once.

  Args:
    arch: the architecture (static).
    params: its parameters.
    tokens: i32[P, S], right-padded.
    lengths: i32[P], at least 1.
    layout: where arrays live.
    dtype: of the matrix products and the cache.
    remat: what the backward pass keeps of a layer, one of `REMAT`.
    block: positions in a block of attention; 0: the plain form, which holds all scores at once.

  Returns:
    (prefix, last_hidden[P, D]); last_hidden is normed and predicts completion token 0.
  """
  s = tokens.shape[1]
  rope = _rope(arch, jnp.arange(s)[None, None, :])
  causal = jnp.tril(jnp.ones((s, s), bool))
  hidden = _embed(params, tokens, dtype)[:, None]  # [P, 1, S, D]: a group of one

  def layer(hidden: jax.Array, inputs: Any) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    weights, lora = inputs
    module = nnx.merge(_block_graph(arch), weights)
    hidden = layout.constrain(hidden, "prompts", None, None, "act_embed")
    q, k, v = module.queries_keys_values(hidden, rope, arch, lora)
    own = k.swapaxes(2, 3), v.swapaxes(2, 3)  # [P, 1, K, S, h]
    if block:
      attended = attend_in_blocks(q, own, None, None, block)
    else:
      attended = attend(q, own, causal, None, None)
    hidden = hidden + module.project("o", attended, lora)
    hidden = hidden + module.feed_forward(hidden, arch, lora)
    return hidden, (own[0][:, 0], own[1][:, 0])

  inputs = params["layers"], adapters(params)
  hidden, (keys, values) = jax.lax.scan(_checkpointed(layer, remat), hidden, inputs)
  last = jnp.take_along_axis(hidden[:, 0], lengths[:, None, None] - 1, axis=1)[:, 0]
  return Prefix(keys, values, lengths), rms_norm(last, params["norm"], arch.norm_eps)


def init_own_cache(arch: Architecture, prompts: int, group: int, size: int, dtype: Any) -> OwnCache:
  """An empty cache for `size` tokens of every completion."""
  shape = (arch.layers, prompts, group, arch.kv_heads, size, arch.head_size)
  return OwnCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros((), jnp.int32))


def extend(
  arch: Architecture,
  params: Params,
  prefix: Prefix,
  tokens: jax.Array,
  own: OwnCache | None = None,
  *,
  layout: Layout,
  dtype: Any = jnp.float32,
  remat: str = "none",
  block: int = 0,
) -> tuple[jax.Array, OwnCache | None]:
  """Runs n more tokens of every completion.

  Args:
    arch: the architecture (static).
    params: its parameters.
    prefix: from `prefill`; shared by the group, not repeated.
    tokens: i32[P, G, n].
    own: the completions' cache when decoding. None when training: the n tokens are the
      whole completion and nothing is kept.
    layout: where arrays live.
    dtype: of the matrix products.
    remat: what the backward pass keeps of a layer, one of `REMAT`.
    block: positions in a block of attention; 0: the plain form, which holds all scores at once.

  Returns:
    (hidden[P, G, n, D], own): hidden is normed, and the state of token t predicts token
    t + 1; `own` has the n tokens added.
  """
  n = tokens.shape[2]
  start = jnp.zeros((), jnp.int32) if own is None else own.used
  positions = prefix.lengths[:, None, None] + start + jnp.arange(n)[None, None, :]
  rope = _rope(arch, positions)
  slots = n if own is None else own.keys.shape[4]
  own_mask = jnp.arange(slots)[None, :] <= start + jnp.arange(n)[:, None]
  prefix_mask = jnp.arange(prefix.keys.shape[3])[None, :] < prefix.lengths[:, None]
  hidden = _embed(params, tokens, dtype)

  def layer(carry: Any, inputs: Any) -> tuple[Any, None]:
    hidden, keys, values = carry
    weights, lora, prefix_keys, prefix_values, index = inputs
    module = nnx.merge(_block_graph(arch), weights)
    hidden = layout.constrain(hidden, "prompts", "group", None, "act_embed")
    q, k, v = module.queries_keys_values(hidden, rope, arch, lora)
    row = k.swapaxes(2, 3), v.swapaxes(2, 3)  # [P, G, K, n, h]
    if own is not None:
      at = (index, 0, 0, 0, start, 0)
      keys = jax.lax.dynamic_update_slice(keys, row[0][None], at)
      values = jax.lax.dynamic_update_slice(values, row[1][None], at)
      row = keys[index], values[index]
    shared = prefix_keys, prefix_values
    if block and own is None:
      attended = attend_in_blocks(q, row, shared, prefix.lengths, block)
    else:
      attended = attend(q, row, own_mask, shared, prefix_mask)
    hidden = hidden + module.project("o", attended, lora)
    hidden = hidden + module.feed_forward(hidden, arch, lora)
    return (hidden, keys, values), None

  cache = (None, None) if own is None else (own.keys, own.values)
  layers = params["layers"], adapters(params)
  inputs = (*layers, prefix.keys, prefix.values, jnp.arange(arch.layers))
  (hidden, keys, values), _ = jax.lax.scan(_checkpointed(layer, remat), (hidden, *cache), inputs)
  hidden = rms_norm(hidden, params["norm"], arch.norm_eps)
  return hidden, None if own is None else OwnCache(keys, values, own.used + n)
