"""Unbiased pass@k and max@k of sampled completions, and how sure they are. Host NumPy, float64."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def pass_at_k(n: npt.ArrayLike, c: npt.ArrayLike, k: npt.ArrayLike) -> np.ndarray:
  """Chance that k of n completions, drawn without replacement, hold one of the c right ones.

  1 - C(n-c, k) / C(n, k), the unbiased estimate of 1 - (1 - p)^k. Computed as a sum of positive
  terms, so it keeps its digits for any n, and pass@1 is c / n exactly.

  Args:
    n: completions of a problem, integers of any shape.
    c: right ones among them, 0 <= c <= n.
    k: at least 1. The three broadcast together.

  Returns:
    float64 of the broadcast shape (a NumPy scalar for scalars); NaN where k > n, 1 where n - c < k.

  Raises:
    ValueError: a number is not whole or out of range.

  Source: Codex, arXiv:2107.03374.
  """
  n, c, k = np.broadcast_arrays(*(_whole(x, name) for x, name in ((n, "n"), (c, "c"), (k, "k"))))
  if np.any(c < 0) or np.any(c > n):
    raise ValueError("pass_at_k: c must be in 0..n")
  if np.any(k < 1):
    raise ValueError("pass_at_k: k must be at least 1")
  # C(n-c, k)/C(n, k) = Π_{j < few} (1 - many/(n-j)): c and k may be swapped, so take the short way.
  few, many = np.minimum(c, k), np.maximum(c, k)
  hit = np.zeros(n.shape)
  for j in range(int(few.max(initial=0))):
    share = np.minimum(many / np.maximum(n - j, 1), 1.0)
    hit = np.where(j < few, hit + (1.0 - hit) * share, hit)
  hit = np.where(n - c < k, 1.0, hit)
  return np.where(k > n, np.nan, hit)[()]


def max_at_k(rewards: npt.ArrayLike, k: int) -> np.ndarray:
  """Mean over the k-subsets of a problem's completions of their best reward.

  Unbiased for the expected maximum of k draws; for rewards of 0 and 1 it is pass@k.

  Args:
    rewards: float[..., n], one reward per completion.
    k: at least 1.

  Returns:
    float64[...], in the unit of the rewards; NaN where k > n.

  Raises:
    ValueError: k < 1, or rewards without an axis of completions.
  """
  values = np.asarray(rewards, np.float64)
  if values.ndim == 0:
    raise ValueError("max_at_k: rewards need an axis of completions")
  if k < 1:
    raise ValueError(f"max_at_k: k must be at least 1, got {k}")
  values = np.sort(values, axis=-1)
  n = values.shape[-1]
  if k > n:
    return np.full(values.shape[:-1], np.nan)[()]
  # The i-th smallest is the best of C(i-1, k-1) subsets out of C(n, k): k/n for i = n, and
  # from i to i - 1 times (i - k)/(i - 1).
  i = np.arange(n, 1, -1)
  shares = np.cumprod(np.concatenate([[k / n], np.maximum(i - k, 0) / (i - 1)]))
  return (values * shares[::-1]).sum(axis=-1)


def bootstrap_interval(
  values: npt.ArrayLike, *, level: float = 0.95, resamples: int = 1000, seed: int = 0
) -> tuple[float, float]:
  """Percentile bootstrap interval of the mean over problems.

  It covers the choice of problems, and of completions as far as they differ between problems;
  with few problems it is too narrow, and with one it has no width.

  Args:
    values: float[n], one score per problem.
    level: share of resampled means inside, in (0, 1).
    resamples: how many times n problems are drawn with replacement.
    seed: of the draws: the same seed gives the same interval.

  Returns:
    (low, high); both NaN where a value is NaN (pass@k with k > n).

  Raises:
    ValueError: no values or not one axis of them, level outside (0, 1), or resamples < 1.
  """
  scores = np.asarray(values, np.float64)
  if scores.ndim != 1 or scores.size == 0:
    raise ValueError(f"bootstrap_interval: needs one value per problem, got shape {scores.shape}")
  if not 0 < level < 1:
    raise ValueError(f"bootstrap_interval: level must be in (0, 1), got {level}")
  if resamples < 1:
    raise ValueError(f"bootstrap_interval: resamples must be at least 1, got {resamples}")
  if np.isnan(scores).any():
    return float("nan"), float("nan")
  rng = np.random.default_rng(seed)
  # One draw at a time: [resamples, n] at once would be 200 MB for 25 000 problems.
  means = [scores[rng.integers(scores.size, size=scores.size)].mean() for _ in range(resamples)]
  low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
  return float(low), float(high)


def _whole(x: npt.ArrayLike, name: str) -> np.ndarray:
  numbers = np.asarray(x)
  if not np.all(numbers == np.rint(numbers)):
    raise ValueError(f"pass_at_k: {name} must be whole numbers, got {numbers}")
  return numbers.astype(np.int64)
