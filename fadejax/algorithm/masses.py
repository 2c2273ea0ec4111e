"""Masses: how much a policy weight pushes successes up and failures down.

A weight that depends on success alone is +w_S on successes and -w_F on failures. Its policy
gradient is m_S g_S - m_F g_F, with g_S and g_F the mean score ∇ log π over each, and

    m_S = p w_S        m_F = q w_F        p the solve rate, q = 1 - p.

m_S / m_F is the sign axis, where m(p) is large the difficulty axis, its size the scale axis
(arXiv:2607.01490). Here: the masses of a batch, of the population, and of groups of G exactly;
and what else a batch of weights says of itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fadejax.algorithm.weights import SUCCESS, WEIGHTS, check_number

Masses = tuple[Any, Any]


def decompose(weights: jax.Array, rewards: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Masses of each group: the weight on its successes, and less that on its failures.

  Args:
    weights: f32[..., G], of the completions.
    rewards: f32[..., G]; a success is a reward >= 0.5.

  Returns:
    (m_S f32[...], m_F f32[...]): Σ over successes of W / G, -Σ over failures of W / G.
  """
  weights = jnp.asarray(weights)
  success = jnp.asarray(rewards) >= SUCCESS
  m_s = jnp.mean(jnp.where(success, weights, 0.0), axis=-1)
  m_f = -jnp.mean(jnp.where(success, 0.0, weights), axis=-1)
  return m_s, m_f


# Of the population -------------------------------------------------------------------------------
# (p, q, settings) -> (m_S, m_F), written with operators that NumPy and jax share.


def _both(mass: Any) -> Masses:
  return mass, mass


def _positive_k(k: Any) -> None:
  if isinstance(k, bool) or not isinstance(k, int | np.integer) or k < 1:
    raise ValueError(f"k must be a Python integer in [1, inf), got {k!r}")


def _normalised(p: Any, q: Any, eps: Any) -> Any:
  """pq / (√(pq) + eps): of (r - r̄) / (σ + eps); ddof is gone in the population."""
  check_number("eps", eps, 0.0)
  std = (p * q) ** 0.5
  return std * (std / (std + eps + (std == 0)))  # 0, not 0/0, where σ = 0


def _grpo(p: Any, q: Any, *, ddof: int = 1, eps: Any = 0.0) -> Masses:
  return _both(_normalised(p, q, eps))


def _hard_upweighted_grpo(p: Any, q: Any, *, ddof: int = 1, eps: Any = 0.0) -> Masses:
  return _both(q * _normalised(p, q, eps))


def _codapo(
  p: Any, q: Any, *, confidence: Any, offset: Any = 0.1, ddof: int = 1, eps: Any = 0.0
) -> Masses:
  check_number("confidence", confidence, 0.0, 1.0)
  check_number("offset", offset, 0.0)
  return _both((4.0 * confidence * p * q + offset) * _normalised(p, q, eps))


def _pass_at_k_loo(p: Any, q: Any, *, k: int | None = None) -> Masses:
  if k is None:
    raise ValueError("pass_at_k_loo has k = G: its masses need k, the size of the group")
  _positive_k(k)
  return p * q ** (k - 1), 0.0 * p


def _pass_at_k_training(p: Any, q: Any, *, k: int, sigma_eps: Any = 0.0) -> Masses:
  _positive_k(k)
  check_number("sigma_eps", sigma_eps, 0.0)
  # 1 - q^k as p (1 + q + … + q^{k-1}): exact where p is tiny.
  sigma = (q**k * p * sum(q**j for j in range(k))) ** 0.5
  return _both(p * q**k / (sigma + sigma_eps + (sigma == 0)))


def _pkpo(p: Any, q: Any, *, k: int, baseline: str = "loo_minus_one") -> Masses:
  _positive_k(k)
  if baseline != "loo_minus_one":
    raise ValueError(f"pkpo has a closed form for baseline 'loo_minus_one' only, not {baseline!r}")
  return p * q ** (k - 1), 0.0 * p


def _max_at_k(p: Any, q: Any, *, k: int) -> Masses:
  _positive_k(k)
  return _both(p * q**k)


def _log_mean_exp(p: Any, q: Any, *, beta: float = 2.0) -> Masses:
  check_number("beta", beta, 0.0, above=True)
  # With e^{-β} in place of e^β, so that a large β does not overflow.
  shrunk = math.exp(-beta)
  return _both(p * q * (1.0 - shrunk) / (beta * (shrunk * q + p)))


def _w_reinforce(p: Any, q: Any, *, lam: Any = 0.1) -> Masses:
  check_number("lam", lam, 0.0)
  return lam * p, q


def _power_asym(p: Any, q: Any, *, alpha: Any, delta: Any) -> Masses:
  check_number("alpha", alpha, 0.0)
  check_number("delta", delta, 0.0, above=True)
  return p * q**alpha, p * q**alpha / delta


def _asym_grpo_gu(p: Any, q: Any, *, beta_pos: Any = 0.9, beta_neg: Any = 0.4) -> Masses:
  check_number("beta_pos", beta_pos, 0.0)
  check_number("beta_neg", beta_neg, 0.0)
  return p ** (1 - beta_pos) * q**beta_pos, p**beta_neg * q ** (1 - beta_neg)


# name -> its masses; a weight may be without.
CLOSED_FORMS: dict[str, Callable[..., Masses]] = {
  "reinforce": lambda p, q: (p, 0.0 * p),
  "rloo": lambda p, q: _both(p * q),
  "grpo": _grpo,
  "dr_grpo": lambda p, q: _both(p * q),
  "pass_at_k_loo": _pass_at_k_loo,
  "pass_at_k_training": _pass_at_k_training,
  "pkpo": _pkpo,
  "maxpo": _max_at_k,
  "max_at_k": _max_at_k,
  "log_mean_exp": _log_mean_exp,
  "hard_upweighted_grpo": _hard_upweighted_grpo,
  "psr": lambda p, q: (p, 0.0 * p),
  "nsr": lambda p, q: (0.0 * p, q),
  "w_reinforce": _w_reinforce,
  "max_rl": lambda p, q: _both(q),
  "power": lambda p, q, *, alpha: _power_asym(p, q, alpha=alpha, delta=1.0),
  "asym": lambda p, q, *, delta: _power_asym(p, q, alpha=1.0, delta=delta),
  "power_asym": _power_asym,
  "fade": _power_asym,
  "asym_grpo_gu": _asym_grpo_gu,
  "codapo": _codapo,
}


def closed_form(name: str, p: Any, **settings: Any) -> Masses:
  """Masses in the population, G → ∞ (for `pass_at_k_loo`, at its own G = k).

  The settings are those of the weight, with two differences: `eps` and `sigma_eps` are 0 unless
  given, and `pass_at_k_loo` needs `k`, its G. `pkpo` carries k/G in front, and goes to zero as G
  grows: its masses here are those times G/k.

  Args:
    name: of `weights.WEIGHTS`.
    p: solve rates in [0, 1], any shape.
    **settings: of that weight.

  Returns:
    (m_S, m_F) of the shape of p: float64 NumPy arrays, or jax arrays where p is one.

  Raises:
    ValueError: no closed form for the name or the settings; a setting or p out of range.
    TypeError: an unknown or a missing setting.
  """
  if name not in CLOSED_FORMS:
    raise ValueError(f"no closed form for {name!r}; there is one for {', '.join(CLOSED_FORMS)}")
  if not isinstance(p, jax.Array):
    p = _solve_rates(p)
  m_s, m_f = CLOSED_FORMS[name](p, 1.0 - p, **settings)
  return m_s, m_f


def _solve_rates(p: Any) -> np.ndarray:
  p = np.asarray(p, np.float64)
  if not np.all((p >= 0.0) & (p <= 1.0)):
    raise ValueError(f"p must lie in [0, 1], got {p!r}")
  return p


def finite_g(name: str, p: Any, group: int, **settings: Any) -> tuple[np.ndarray, np.ndarray]:
  """Expected masses in groups of G, exact: summed over the number of successes.

  On the host, in float64 but for the weights themselves; the work grows as G² + G × p's size.

  Args:
    name: of `weights.WEIGHTS`.
    p: solve rates in [0, 1], any shape.
    group: G, >= 1.
    **settings: of that weight, a scalar `confidence` included.

  Returns:
    (m_S, m_F), f64 of the shape of p: E[Σ over successes of W / G], -E[Σ over failures of W / G].

  Raises:
    ValueError: unknown name, a setting, p or group out of range.
  """
  if name not in WEIGHTS:
    raise ValueError(f"no weight is called {name!r}; there are {', '.join(WEIGHTS)}")
  if isinstance(group, bool) or not isinstance(group, int | np.integer) or group < 1:
    raise ValueError(f"group must be a Python integer in [1, inf), got {group!r}")
  p = _solve_rates(p)
  counts = np.arange(group + 1)
  # Row c: a group with c successes.
  rewards = (np.arange(group)[None, :] < counts[:, None]).astype(np.float32)
  weights = np.asarray(WEIGHTS[name](rewards, **settings), np.float64)
  right = rewards >= SUCCESS
  m_s = np.where(right, weights, 0.0).sum(axis=1) / group
  m_f = -np.where(right, 0.0, weights).sum(axis=1) / group
  chance = _binomial(p, int(group))
  return chance @ m_s, chance @ m_f


def _binomial(p: np.ndarray, group: int) -> np.ndarray:
  """f64[..., G + 1], the chance of c successes."""
  ways = np.array([math.log(math.comb(group, c)) for c in range(group + 1)])
  c = np.arange(group + 1)
  inner = np.clip(p, 1e-300, 1.0 - 1e-16)[..., None]
  chance = np.exp(ways + c * np.log(inner) + (group - c) * np.log1p(-inner))
  chance = np.where(p[..., None] == 0.0, (c == 0) * 1.0, chance)
  return np.where(p[..., None] == 1.0, (c == group) * 1.0, chance)


# Scale -------------------------------------------------------------------------------------------


def equal_mass(alpha: Any) -> Any:
  """(α+1)(α+2)/6: times `power`'s weight, the area under m(p) = p q^α is that of α = 1, 1/6.

  Args:
    alpha: α in [0, inf), a number or an array, traced ones included.
  """
  check_number("alpha", alpha, 0.0)
  return (alpha + 1) * (alpha + 2) / 6


def equal_peak(alpha: Any) -> Any:
  """(1+α)^{1+α} / (4 α^α): times `power`'s weight, the top of m(p) is that of α = 1, 1/4.

  Args:
    alpha: α in [0, inf), a number or an array, traced ones included.
  """
  check_number("alpha", alpha, 0.0)
  return (1 + alpha) ** (1 + alpha) / (4 * alpha**alpha)


# Of a batch --------------------------------------------------------------------------------------


def entropy_drift(
  weights: jax.Array, logprobs: jax.Array, entropy: jax.Array, mask: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """The two terms of the first-order entropy drift, ΔH ≈ η (first + second). A diagnostic only.

  first = (m_S - m_F) H and second = -Cov(A, log π), every mean over the sampled tokens of the
  batch: m_S - m_F is the mean weight of a token, H the mean entropy. The sign of the sum did not
  hold in a bandit: log it, never assert it.

  Args:
    weights: f32[P, G], A.
    logprobs: f32[P, G, C], nats, of the sampled tokens.
    entropy: f32[P, G, C], nats.
    mask: bool[P, G, C], the tokens that count.

  Returns:
    (first f32[], second f32[]), nats per unit of learning rate; NaN where no token counts.
  """
  count = jnp.sum(mask)

  def mean(x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(mask, x, 0.0)) / count

  a = jnp.broadcast_to(weights[..., None], mask.shape)
  net = mean(a)
  covariance = mean((a - net) * (logprobs - mean(logprobs)))
  return net * mean(entropy), -covariance


def _sizes(weights: jax.Array) -> jax.Array:
  """a_p = mean_i |A_pi|, f32[P]."""
  return jnp.mean(jnp.abs(jnp.asarray(weights)), axis=-1)


def n_eff(weights: jax.Array) -> jax.Array:
  """Effective number of prompts, (Σ a_p)² / Σ a_p² with a_p = mean_i |A_pi|.

  Args:
    weights: f32[P, G], zero in groups that do not count.

  Returns:
    f32[], 0 to P; 0 where every weight is zero.
  """
  a = _sizes(weights)
  # In units of the largest, so that small weights do not underflow when squared.
  a = a / jnp.maximum(jnp.max(a), 1e-30)
  return jnp.sum(a) ** 2 / jnp.maximum(jnp.sum(a**2), 1e-30)


def mean_difficulty(weights: jax.Array, rewards: jax.Array) -> jax.Array:
  """Where the weight lies, Σ a_p (1 - r̄_p) / Σ a_p with a_p = mean_i |A_pi|.

  Args:
    weights: f32[P, G], zero in groups that do not count.
    rewards: f32[P, G].

  Returns:
    f32[], 0 (easy) to 1 (hard) for rewards in [0, 1]; NaN where every weight is zero.
  """
  a = _sizes(weights)
  return jnp.sum(a * (1.0 - jnp.mean(jnp.asarray(rewards), axis=-1))) / jnp.sum(a)


# Of a run ----------------------------------------------------------------------------------------


def rank_one_share(update: jax.Array, *, rank: int = 8, rounds: int = 2) -> jax.Array:
  """σ₁² / Σσ² of a matrix: how much of it one direction explains.

  Σσ² is the squared Frobenius norm, exact; σ₁ comes from subspace iteration with a fixed start,
  2 · rounds + 1 products with a thin matrix, so the share is never over the true one and falls
  short of it only where the first singular values nearly agree.

  Args:
    update: f32[V, D], such as the change of an output head since the start of a run.
    rank: columns of the subspace.
    rounds: of the iteration.

  Returns:
    f32[], above 1 / min(V, D) and up to 1; NaN for a matrix of zeros.
  """
  scale = jnp.max(jnp.abs(update))
  matrix = update / jnp.maximum(scale, 1e-30)  # so that the squares of small updates are there
  start = jax.random.normal(jax.random.key(0), (matrix.shape[1], min(rank, *matrix.shape)))
  high = jax.lax.Precision.HIGHEST

  def turn(basis: jax.Array, _: None) -> tuple[jax.Array, None]:
    seen = jnp.dot(matrix, basis, precision=high)
    return jnp.linalg.qr(jnp.dot(matrix.T, seen, precision=high))[0], None

  basis, _ = jax.lax.scan(turn, jnp.linalg.qr(start)[0], None, length=rounds)
  seen = jnp.dot(matrix, basis, precision=high)
  largest = jnp.linalg.eigvalsh(jnp.dot(seen.T, seen, precision=high))[-1]
  return jnp.where(scale > 0, largest / jnp.sum(matrix * matrix), jnp.nan)
