"""A reference policy: plain NumPy in float64, one row at a time, no cache, no padding."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from fadejax.policy import model, sharding

ARCHITECTURES = {
  "llama": {},
  "llama-tied": dict(tied_head=True, kv_heads=4),
  "qwen2": dict(qkv_bias=True, rope_theta=1e6, norm_eps=1e-6),
  "qwen3": dict(qk_norm=True, head_size=12, tied_head=True),
}


def _norm(x, scale, eps):
  return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * scale


def _turn(x, theta):
  """RoPE on [n, heads, h] at positions 0..n-1, as complex rotation of (x[i], x[i + h/2])."""
  n, _, h = x.shape
  angle = np.arange(n)[:, None] * theta ** (-np.arange(0, h, 2) / h)[None]
  z = (x[..., : h // 2] + 1j * x[..., h // 2 :]) * np.exp(1j * angle)[:, None]
  return np.concatenate([z.real, z.imag], -1)


def reference_logits(arch, params, ids):
  """Logits [n, V] of one row of ids."""
  p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
  x = p["embedding"][np.asarray(ids)]
  n, w = len(ids), p["layers"]
  for i in range(arch.layers):
    y = _norm(x, w["attention_norm"][i], arch.norm_eps)
    q, k, v = (np.tensordot(y, w[name][i], 1) for name in "qkv")
    if arch.qkv_bias:
      q, k, v = (z + w[f"{name}_bias"][i] for z, name in ((q, "q"), (k, "k"), (v, "v")))
    if arch.qk_norm:
      q = _norm(q, w["q_norm"][i], arch.norm_eps)
      k = _norm(k, w["k_norm"][i], arch.norm_eps)
    q, k = _turn(q, arch.rope_theta), _turn(k, arch.rope_theta)
    out = np.zeros_like(q)
    for head in range(arch.heads):
      kv = head // (arch.heads // arch.kv_heads)
      scores = q[:, head] @ k[:, kv].T / np.sqrt(arch.head_size)
      scores[np.triu_indices(n, 1)] = -np.inf
      weights = np.exp(scores - scores.max(-1, keepdims=True))
      out[:, head] = weights / weights.sum(-1, keepdims=True) @ v[:, kv]
    x = x + np.tensordot(out, w["o"][i], 2)
    y = _norm(x, w["ffn_norm"][i], arch.norm_eps)
    gate = y @ w["gate"][i]
    x = x + (gate / (1 + np.exp(-gate)) * (y @ w["up"][i])) @ w["down"][i]
  head = p.get("head", p["embedding"])
  return _norm(x, p["norm"], arch.norm_eps) @ head.T


@pytest.fixture
def reference():
  return reference_logits


@pytest.fixture(scope="session")
def llama():
  return make_policy("llama")


@pytest.fixture(scope="session", params=ARCHITECTURES)
def policy(request):
  """(architecture, parameters) of every family."""
  return make_policy(request.param)


def make_policy(name):
  """(architecture, parameters with every norm and bias away from its initial value)."""
  fields = dict(
    vocab_size=31, width=32, layers=3, heads=4, kv_heads=2, head_size=8, ffn=48, rope_theta=100.0
  )
  arch = model.Architecture(**{**fields, **ARCHITECTURES[name]})
  params = jax.jit(model.init_params, static_argnums=0)(arch, jax.random.key(1))
  noise = iter(jax.random.split(jax.random.key(2), 100))
  shake = lambda x: x + 0.1 * jax.random.normal(next(noise), x.shape)  # noqa: E731
  return arch, jax.tree.map(shake, params)


@pytest.fixture
def layout(one_device):
  return one_device


@pytest.fixture(scope="session")
def one_device():
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), sharding.MESH_AXES)
  return sharding.make_layout(mesh, sharding.TRAIN_RULES, 1, 1)
