"""The table of policy weights: from the rewards of a group to a weight for each completion.

Every function here has the same form,

    weight(rewards f32[..., G], **settings) -> f32[..., G]

with any leading axes (usually [P, G]), pure and jittable. Settings are keyword-only, so an
unknown one is a TypeError. Those that are Python numbers are checked (ValueError with the
setting and its range); arrays pass unchecked, so that α and δ may be traced. `k`, `ddof` and
`baseline` are static. A setting that the source gives no value for has no default.

Notation: r the rewards, r̄ and σ their mean and standard deviation over the group, p the true
solve rate, q = 1 - p; q_i, v_k and v_k^(-i) the mean of the maximum over the k-subsets that
contain i, over all of them, and over those without i (v_0 = 0). "Masses" are the population's
m_S ; m_F: see `masses`. A success is a reward >= 0.5.

A group whose rewards agree (spread under 1e-6, so always at G = 1) gets exact zeros from every
weight that compares completions with each other; the others say what it gets. A group with
a NaN reward has no spread, and gets zeros there too; callers mask groups without rewards.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

EQUAL_SPREAD = 1e-6  # below it, a difference of rewards is rounding noise
SUCCESS = 0.5
_TINY = 1e-30  # keeps a division finite where its result is not used


def check_number(
  setting: str, value: Any, low: float, high: float = math.inf, *, above: bool = False
) -> None:
  """Raises ValueError unless `value` is an array, or a number in [low, high].

  Args:
    setting: its name, for the message.
    value: a Python or NumPy number; arrays, traced ones included, are not looked at.
    low: smallest value allowed; with `above`, itself not allowed.
    high: largest value allowed.
    above: whether the range is open at `low`.
  """
  if isinstance(value, jax.Array | np.ndarray):
    return
  allowed = f"{'(' if above else '['}{low:g}, {high:g}{']' if math.isfinite(high) else ')'}"
  number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
  if not number or not math.isfinite(value) or not low <= value <= high or (above and value == low):
    raise ValueError(f"{setting} must be a number in {allowed}, got {value!r}")


def check_choice(setting: str, value: Any, choices: tuple[Any, ...]) -> None:
  """Raises ValueError unless `value` is one of `choices`."""
  if isinstance(value, bool) or value not in choices:
    raise ValueError(f"{setting} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def check_k(weight: str, k: Any, high: int, group: int) -> None:
  """Raises ValueError unless k is a Python integer in [1, high]."""
  if isinstance(k, bool) or not isinstance(k, int | np.integer) or not 1 <= k <= high:
    raise ValueError(
      f"k of {weight} must be a Python integer in [1, {high}] with groups of {group}, got {k!r}"
    )


# Pieces ------------------------------------------------------------------------------------------


def _rewards(rewards: Any) -> jax.Array:
  r = jnp.asarray(rewards, jnp.float32)
  if r.ndim == 0 or r.shape[-1] == 0:
    raise ValueError(f"rewards must have a group axis, [..., G] with G >= 1, got shape {r.shape}")
  return r


def _mean(r: jax.Array) -> jax.Array:
  """Group mean, f32[..., 1]."""
  return jnp.mean(r, axis=-1, keepdims=True)


def _normalised(r: jax.Array, ddof: int, eps: float | jax.Array) -> jax.Array:
  """(r - r̄) / (σ + eps), f32[..., G]; any finite number in a group whose rewards agree."""
  check_choice("ddof", ddof, (0, 1))
  check_number("eps", eps, 0.0)
  centred = r - _mean(r)
  variance = jnp.sum(centred**2, axis=-1, keepdims=True) / max(r.shape[-1] - ddof, 1)
  return centred / jnp.maximum(jnp.sqrt(variance) + eps, _TINY)


def _failing(r: jax.Array) -> jax.Array:
  """1 - r̄, f32[..., 1], kept in [0, 1] for rewards outside it."""
  return jnp.clip(1.0 - _mean(r), 0.0, 1.0)


def _zero_if_equal(r: jax.Array, weights: jax.Array) -> jax.Array:
  """Weights, with exact zeros in groups whose rewards agree."""
  spread = jnp.max(r, axis=-1, keepdims=True) - jnp.min(r, axis=-1, keepdims=True)
  return jnp.where(spread >= EQUAL_SPREAD, weights, 0.0)


def _share(count: int, k: int) -> np.ndarray:
  """f64[count + 1], entry n: C(n, k) / C(count, k), the share of k-subsets within the first n.

  By the ratio of neighbours, on the host: float32 `gammaln` is off by 1e-3 at 1024.
  """
  n = np.arange(count, 0, -1)
  return np.concatenate([[1.0], np.cumprod(np.maximum(n - k, 0) / n)])[::-1]


def _ascending(r: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
  """(order i32[..., G], sorted f32[..., G], its gaps f32[..., G - 1]); the one sort."""
  order = jnp.argsort(r, axis=-1)
  rising = jnp.take_along_axis(r, order, axis=-1)
  return order, rising, rising[..., 1:] - rising[..., :-1]


def _by_rank(r: jax.Array, lowest: float, above: np.ndarray, below: np.ndarray) -> jax.Array:
  """lowest * min r + Σ over gaps of gap * (above where r_i is over the gap, else below).

  All means of maxima have this form: entry n - 1 of `above` and `below` is for the gap between
  the n-th and the (n + 1)-th reward. Binary rewards have one gap, so nothing is summed or
  cancels in float32, and what the k-subsets leave out is a coefficient of its own.
  """
  order, rising, gaps = _ascending(r)
  none = jnp.zeros_like(rising[..., :1])

  def times(coefficients: np.ndarray) -> jax.Array:
    return gaps * jnp.broadcast_to(jnp.asarray(coefficients, jnp.float32), gaps.shape)

  axis = r.ndim - 1
  under = jnp.concatenate([none, jax.lax.cumsum(times(above), axis)], axis)
  over = jnp.concatenate([jax.lax.cumsum(times(below), axis, reverse=True), none], axis)
  values = lowest * rising[..., :1] + under + over
  return jnp.put_along_axis(jnp.zeros_like(r), order, values, axis=-1, inplace=False)


# Without subsets ---------------------------------------------------------------------------------


def reinforce(rewards: jax.Array) -> jax.Array:
  """r. Masses p ; 0. An all-equal group gets its reward. Source: textbook."""
  return _rewards(rewards)


def rloo(rewards: jax.Array) -> jax.Array:
  """(r - r̄) G / (G - 1): each reward less the mean of the others.

  Masses pq both. An all-equal group gets zero. Source: arXiv:2402.14740.
  """
  r = _rewards(rewards)
  group = r.shape[-1]
  return _zero_if_equal(r, (r - _mean(r)) * (group / max(group - 1, 1)))


def grpo(rewards: jax.Array, *, ddof: int = 1, eps: float | jax.Array = 1e-6) -> jax.Array:
  """(r - r̄) / (σ + eps).

  Masses √(pq) both (eps = 0). An all-equal group gets zero.

  Args:
    rewards: f32[..., G].
    ddof: 0 or 1, σ divides by G - ddof.
    eps: in [0, inf), in the unit of the rewards.

  Source: arXiv:2402.03300.
  """
  r = _rewards(rewards)
  return _zero_if_equal(r, _normalised(r, ddof, eps))


def dr_grpo(rewards: jax.Array) -> jax.Array:
  """r - r̄. Masses pq both. An all-equal group gets zero. Source: arXiv:2503.20783."""
  r = _rewards(rewards)
  return _zero_if_equal(r, r - _mean(r))


def log_mean_exp(rewards: jax.Array, *, beta: float | jax.Array = 2.0) -> jax.Array:
  """(e^{βr} / mean(e^{βr}) - 1) / β.

  Masses pqE / (β(1 + pE)) both, E = e^β - 1. An all-equal group gets zero.

  Args:
    rewards: f32[..., G].
    beta: in (0, inf), per unit of reward; towards 0 this is `dr_grpo`.

  Source: arXiv:2509.24261.
  """
  r = _rewards(rewards)
  check_number("beta", beta, 0.0, above=True)
  # Against the best reward nothing overflows, and expm1 keeps a small β exact.
  grown = jnp.expm1(beta * (r - jnp.max(r, axis=-1, keepdims=True)))
  mean = _mean(grown)
  return _zero_if_equal(r, (grown - mean) / (beta * jnp.maximum(1.0 + mean, _TINY)))


def hard_upweighted_grpo(
  rewards: jax.Array, *, ddof: int = 1, eps: float | jax.Array = 1e-6
) -> jax.Array:
  """(1 - r̄)(r - r̄) / (σ + eps), with 1 - r̄ kept in [0, 1].

  Masses p^½ q^{3/2} both (eps = 0). An all-equal group gets zero. Settings as in `grpo`.
  Source: our reading of Skew-R, arXiv:2510.23049.
  """
  r = _rewards(rewards)
  return _zero_if_equal(r, _failing(r) * _normalised(r, ddof, eps))


def psr(rewards: jax.Array) -> jax.Array:
  """1 on success, else 0. Masses p ; 0. An all-right group gets 1. Source: arXiv:2506.01347."""
  return jnp.where(_rewards(rewards) >= SUCCESS, 1.0, 0.0)


def nsr(rewards: jax.Array) -> jax.Array:
  """-1 on failure, else 0. Masses 0 ; q. An all-wrong group gets -1. Source: arXiv:2506.01347."""
  return jnp.where(_rewards(rewards) >= SUCCESS, 0.0, -1.0)


def w_reinforce(rewards: jax.Array, *, lam: float | jax.Array = 0.1) -> jax.Array:
  """λ on success, -1 on failure.

  Masses λp ; q. An all-right group gets λ, an all-wrong one -1.

  Args:
    rewards: f32[..., G].
    lam: λ, in [0, inf).

  Source: arXiv:2506.01347.
  """
  check_number("lam", lam, 0.0)
  return jnp.where(_rewards(rewards) >= SUCCESS, jnp.asarray(lam, jnp.float32), -1.0)


def max_rl(rewards: jax.Array) -> jax.Array:
  """(r - r̄) / r̄, zero where r̄ <= 0 (the form is for rewards that are not negative).

  Masses q both. An all-equal group gets zero. Source: arXiv:2602.02710.
  """
  r = _rewards(rewards)
  mean = _mean(r)
  weights = jnp.where(mean > 0.0, (r - mean) / jnp.maximum(mean, _TINY), 0.0)
  return _zero_if_equal(r, weights)


def power(rewards: jax.Array, *, alpha: float | jax.Array) -> jax.Array:
  """(1 - r̄)^{α-1} (r - r̄): hard focus. `power_asym` with δ = 1.

  Masses p q^α both, most at p = 1/(1+α). An all-equal group gets zero. Source: arXiv:2607.01490.
  """
  return power_asym(rewards, alpha=alpha, delta=1.0)


def asym(rewards: jax.Array, *, delta: float | jax.Array) -> jax.Array:
  """r - r̄, negative ones divided by δ. `power_asym` with α = 1.

  Masses pq ; pq/δ. An all-equal group gets zero. Source: arXiv:2607.01490.
  """
  return power_asym(rewards, alpha=1.0, delta=delta)


def power_asym(
  rewards: jax.Array, *, alpha: float | jax.Array, delta: float | jax.Array
) -> jax.Array:
  """(1 - r̄)^{α-1} (r - r̄), negative ones divided by δ; 1 - r̄ kept in [0, 1].

  Masses p q^α ; p q^α / δ. An all-equal group gets zero.

  Args:
    rewards: f32[..., G].
    alpha: in [0, inf), a scalar. 1: medium focus; above: hard focus. Below 1 the factor is
      unbounded as r̄ nears 1, and 1 - r̄ is kept over 1e-6.
    delta: in (0, inf), a scalar. Below 1: failure-heavy.

  Source: arXiv:2607.01490.
  """
  r = _rewards(rewards)
  check_number("alpha", alpha, 0.0)
  check_number("delta", delta, 0.0, above=True)
  centred = r - _mean(r)
  exponent = jnp.asarray(alpha, jnp.float32) - 1.0
  focus = jnp.maximum(_failing(r), jnp.where(exponent < 0.0, 1e-6, 0.0)) ** exponent
  return _zero_if_equal(r, focus * jnp.where(centred < 0.0, centred / delta, centred))


def fade(rewards: jax.Array, *, alpha: float | jax.Array, delta: float | jax.Array) -> jax.Array:
  """`power_asym` with the α and δ that `fade.update` returned. Source: arXiv:2607.01490."""
  return power_asym(rewards, alpha=alpha, delta=delta)


def asym_grpo_gu(
  rewards: jax.Array, *, beta_pos: float | jax.Array = 0.9, beta_neg: float | jax.Array = 0.4
) -> jax.Array:
  """((1-r̄)/r̄)^{β₊} on success, -(r̄/(1-r̄))^{β₋} on failure; r̄ kept in [1e-6, 1 - 1e-6].

  Masses p^{1-β₊} q^{β₊} ; p^{β₋} q^{1-β₋}. An all-equal group gets zero.

  Args:
    rewards: f32[..., G].
    beta_pos: β₊, in [0, inf).
    beta_neg: β₋, in [0, inf).

  Source: arXiv:2604.04894 (another method than `asym`).
  """
  r = _rewards(rewards)
  check_number("beta_pos", beta_pos, 0.0)
  check_number("beta_neg", beta_neg, 0.0)
  mean = jnp.clip(_mean(r), 1e-6, 1.0 - 1e-6)
  odds = mean / (1.0 - mean)
  return _zero_if_equal(r, jnp.where(r >= SUCCESS, (1.0 / odds) ** beta_pos, -(odds**beta_neg)))


def codapo(
  rewards: jax.Array,
  *,
  confidence: float | jax.Array,
  offset: float | jax.Array = 0.1,
  ddof: int = 1,
  eps: float | jax.Array = 1e-6,
) -> jax.Array:
  """v (r - r̄) / (σ + eps), v = c (1 - 4(d - ½)²) + offset, d = 1 - r̄ kept in [0, 1].

  Masses (4c pq + offset) √(pq) both (eps = 0). An all-equal group gets zero.

  Args:
    rewards: f32[..., G].
    confidence: c, in [0, 1], a scalar or f32[...], one for each group: the exponential of the
      mean over its completions of their mean token log-prob.
    offset: in [0, inf).
    ddof: as in `grpo`.
    eps: as in `grpo`.

  Source: arXiv:2606.07950.
  """
  r = _rewards(rewards)
  check_number("confidence", confidence, 0.0, 1.0)
  check_number("offset", offset, 0.0)
  c = jnp.asarray(confidence, jnp.float32)
  c = c[..., None] if c.ndim else c
  value = c * (1.0 - 4.0 * (_failing(r) - 0.5) ** 2) + offset
  return _zero_if_equal(r, value * _normalised(r, ddof, eps))


# Over k-subsets: O(G log G), for any rewards -----------------------------------------------------


def pass_at_k_loo(rewards: jax.Array) -> jax.Array:
  """max r - max of the others, k = G: the best gets its lead over the second, the rest 0.

  Masses p q^{G-1} ; 0. An all-equal group gets zero, also at G = 1. Source: arXiv:2503.19595.
  """
  r = _rewards(rewards)
  last = np.zeros(r.shape[-1] - 1)
  last[-1:] = 1.0
  return _zero_if_equal(r, _by_rank(r, 0.0, last, np.zeros_like(last)))


def _max_at_k(r: jax.Array, k: int, scale: float) -> jax.Array:
  """scale (q_i - v_k), f32[..., G]."""
  group = r.shape[-1]
  below_gap = np.arange(1, group)
  # Over the gap only v_k misses it, by its share of subsets that lie below; under it q_i misses it
  # too, G/n times as often, n being the number below the gap.
  above = _share(group, k)[1:group]
  below = -_share(group - 1, k - 1)[: group - 1] * (group - below_gap) / group
  return _zero_if_equal(r, _by_rank(r, 0.0, scale * above, scale * below))


def max_at_k(rewards: jax.Array, *, k: int) -> jax.Array:
  """q_i - v_k, which is `maxpo` times (G - k)/G.

  Masses p q^k both as G grows, (G - k)/G of that in groups of G. An all-equal group gets zero,
  and so does every group at k = G.

  Args:
    rewards: f32[..., G].
    k: in [1, G], static.

  Source: arXiv:2606.06080.
  """
  r = _rewards(rewards)
  check_k("max_at_k", k, r.shape[-1], r.shape[-1])
  return _max_at_k(r, k, 1.0)


def maxpo(rewards: jax.Array, *, k: int) -> jax.Array:
  """q_i - v_k^(-i), leave-two-out: centred, and unbiased at every G > k.

  Masses p q^k both, those of `power` with α = k, exact at every G. An all-equal group gets zero.

  Args:
    rewards: f32[..., G].
    k: in [1, G - 1], static.

  Source: arXiv:2606.06080.
  """
  r = _rewards(rewards)
  group = r.shape[-1]
  check_k("maxpo", k, group - 1, group)
  return _max_at_k(r, k, group / (group - k))


def pass_at_k_training(
  rewards: jax.Array, *, k: int, sigma_eps: float | jax.Array = 0.0
) -> jax.Array:
  """(q_i - v_k) / (√(v_k (1 - v_k)) + sigma_eps), zero where v_k (1 - v_k) <= 0.

  For rewards in [0, 1]. Masses p q^{k/2} / √(1 - q^k) both. An all-equal group gets zero.

  Args:
    rewards: f32[..., G].
    k: in [1, G], static.
    sigma_eps: in [0, inf), in the unit of the rewards.

  Source: arXiv:2508.10751.
  """
  r = _rewards(rewards)
  group = r.shape[-1]
  check_k("pass_at_k_training", k, group, group)
  check_number("sigma_eps", sigma_eps, 0.0)
  _, rising, gaps = _ascending(r)
  missed = _share(group, k)[1:group]

  def total(coefficients: np.ndarray) -> jax.Array:
    wide = jnp.broadcast_to(jnp.asarray(coefficients, jnp.float32), gaps.shape)
    return jnp.sum(gaps * wide, axis=-1, keepdims=True)

  # v_k and its complement each from its own coefficients: 1 - v_k would lose the small one.
  value = rising[..., :1] + total(1.0 - missed)
  complement = 1.0 - rising[..., -1:] + total(missed)
  variance = value * complement
  varies = variance > 0.0
  sigma = jnp.sqrt(jnp.where(varies, variance, 1.0)) + sigma_eps
  return jnp.where(varies, _max_at_k(r, k, 1.0) / sigma, 0.0)


def pkpo(rewards: jax.Array, *, k: int, baseline: str = "loo_minus_one") -> jax.Array:
  """(k/G) q_i, less a baseline; to be summed over the group, not averaged.

  - `none`: (k/G) q_i. An all-equal group gets k/G times its reward.
  - `loo`: (k/G) q_i - (k/(G-1)) v_k^(-i). Not centred: an all-equal group gets -k/(G(G-1))
    times its reward.
  - `loo_minus_one`: (k/G) (q_i - v_{k-1}^(-i)). An all-equal group gets zero for k > 1, and r/G
    for k = 1, where this is `reinforce` / G. Masses times G/k: p q^{k-1} ; 0.

  Args:
    rewards: f32[..., G].
    k: in [1, G], for `loo` in [1, G - 1]; static.
    baseline: one of the three.

  Source: arXiv:2505.15201.
  """
  r = _rewards(rewards)
  group = r.shape[-1]
  check_choice("baseline", baseline, ("none", "loo", "loo_minus_one"))
  check_k(f"pkpo with baseline {baseline!r}", k, group - (baseline == "loo"), group)
  mine = _share(group - 1, k - 1)  # of the subsets of i: share whose others lie within the first n
  if baseline == "loo_minus_one":
    # The others of i's subsets are the baseline's own subsets, so that all below a gap cancels.
    weights = _by_rank(r, float(k == 1), mine[1:], np.zeros(group - 1)) * (k / group)
    return weights if k == 1 else _zero_if_equal(r, weights)
  lowest, above, below = 1.0, np.ones(group - 1), 1.0 - mine[:-1]
  if baseline == "loo":
    without = _share(group - 1, k)
    scale = group / (group - 1)
    lowest, above, below = (
      lowest - scale,
      above - scale * (1.0 - without[1:]),
      below - scale * (1.0 - without[:-1]),
    )
  return _by_rank(r, lowest * k / group, above * k / group, below * k / group)


WEIGHTS: dict[str, Callable[..., jax.Array]] = {
  "reinforce": reinforce,
  "rloo": rloo,
  "grpo": grpo,
  "dr_grpo": dr_grpo,
  "pass_at_k_loo": pass_at_k_loo,
  "pass_at_k_training": pass_at_k_training,
  "pkpo": pkpo,
  "maxpo": maxpo,
  "max_at_k": max_at_k,
  "log_mean_exp": log_mean_exp,
  "hard_upweighted_grpo": hard_upweighted_grpo,
  "psr": psr,
  "nsr": nsr,
  "w_reinforce": w_reinforce,
  "max_rl": max_rl,
  "power": power,
  "asym": asym,
  "power_asym": power_asym,
  "fade": fade,
  "asym_grpo_gu": asym_grpo_gu,
  "codapo": codapo,
}
