"""pass@k, max@k and the bootstrap against enumeration, handed values and exact integers."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from fadejax.algorithm.passk import bootstrap_interval, max_at_k, pass_at_k


def exact(n: int, c: int, k: int) -> float:
  return float(1 - Fraction(math.comb(n - c, k), math.comb(n, k)))


def test_handed_values():
  triples = np.array(
    [
      [4, 1, 1],
      [4, 1, 2],
      [4, 2, 2],
      [4, 1, 4],
      [4, 0, 4],
      [16, 3, 8],
      [10, 3, 5],
      [200, 10, 100],
      [5, 3, 3],
    ]
  )
  expected = [0.25, 0.5, 0.833333, 1.0, 0.0, 0.9, 0.916667, 0.999229, 1.0]
  np.testing.assert_allclose(pass_at_k(*triples.T), expected, atol=5e-7)
  # One right of four: with replacement it would be 0.683594.
  assert pass_at_k(4, 1, 4) == 1.0


def test_every_small_case_is_the_exact_fraction_and_the_enumeration():
  for n in range(1, 9):
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
      subsets = list(itertools.combinations([1] * c + [0] * (n - c), k))
      brute = sum(max(subset) for subset in subsets) / len(subsets)
      assert pass_at_k(n, c, k) == pytest.approx(exact(n, c, k), rel=1e-14)
      assert pass_at_k(n, c, k) == pytest.approx(brute, rel=1e-14)


@pytest.mark.parametrize(
  ("n", "c", "k"),
  [
    (100_000, 1, 1),
    (100_000, 7, 50_000),
    (100_000, 500, 3),
    (4096, 2048, 2048),
    (4096, 1, 4096),
    (1000, 999, 2),
    (10_000, 3, 2),
  ],
)
def test_large_n_keeps_its_digits(n, c, k):
  assert pass_at_k(n, c, k) == pytest.approx(exact(n, c, k), rel=1e-12)


def test_pass_at_1_is_the_mean():
  n = np.arange(1, 60)[:, None]
  c = np.minimum(np.arange(60)[None, :], n)
  np.testing.assert_array_equal(pass_at_k(n, c, 1), c / n)


def test_broadcasting_nan_and_dtype():
  table = pass_at_k(np.array([[4], [8]]), np.array([[1], [2]]), np.array([1, 4, 5, 16]))
  assert table.shape == (2, 4) and table.dtype == np.float64
  assert np.isnan(table[0, 2:]).all() and np.isnan(table[1, 3])
  np.testing.assert_allclose(table[1, :3], [exact(8, 2, k) for k in (1, 4, 5)], rtol=1e-14)
  assert np.isnan(pass_at_k(0, 0, 1))
  assert np.isnan(pass_at_k(3, 3, 4))  # all right, and still not known
  assert pass_at_k(8, 3, 2).shape == ()


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ((4, 5, 1), "c must be in"),
    ((4, -1, 1), "c must be in"),
    ((4, 1, 0), "k must be at least 1"),
    ((4, 1.5, 2), "c must be whole"),
    ((np.nan, 1, 2), "n must be whole"),
  ],
)
def test_bad_counts_are_refused(arguments, message):
  with pytest.raises(ValueError, match=message):
    pass_at_k(*arguments)


def test_max_at_k_is_the_mean_over_subsets():
  rewards = np.random.default_rng(3).normal(size=(2, 3, 7))
  rewards[0, 0, :3] = 0.5  # ties
  for k in range(1, 8):
    subsets = np.array(list(itertools.combinations(range(7), k)))
    brute = rewards[..., subsets].max(axis=-1).mean(axis=-1)
    np.testing.assert_allclose(max_at_k(rewards, k), brute, rtol=1e-13)
  assert np.isnan(max_at_k(rewards, 8)).all() and max_at_k(rewards, 8).shape == (2, 3)


def test_max_at_k_of_binary_rewards_is_pass_at_k():
  for n, c in [(16, 3), (5, 5), (6, 0), (1000, 12)]:
    rewards = np.arange(n) < c
    for k in (1, 2, n // 2, n):
      assert max_at_k(rewards, k) == pytest.approx(pass_at_k(n, c, k), rel=1e-11, abs=1e-15)


def test_max_at_k_refuses_what_has_no_meaning():
  with pytest.raises(ValueError, match="k must be at least 1"):
    max_at_k([1.0, 0.0], 0)
  with pytest.raises(ValueError, match="axis of completions"):
    max_at_k(1.0, 1)
  assert np.isnan(max_at_k([1.0, np.nan], 1))  # a hole in the rewards shows


def test_bootstrap_interval_is_that_of_the_mean():
  # A mean of n Bernoulli values is Binomial / n whatever the resampler: the normal interval is
  # within a few thousandths at n = 400, and the percentile ends move by about 0.002.
  values = np.arange(400) % 4 == 0
  low, high = bootstrap_interval(values, resamples=2000)
  half = 1.959964 * math.sqrt(0.25 * 0.75 / 400)
  assert low == pytest.approx(0.25 - half, abs=0.006)
  assert high == pytest.approx(0.25 + half, abs=0.006)
  inner = bootstrap_interval(values, level=0.5, resamples=2000)
  assert inner[0] == pytest.approx(0.25 - 0.674490 / 1.959964 * half, abs=0.004)
  assert low < inner[0] < inner[1] < high


def test_bootstrap_is_exact_where_it_can_be_enumerated():
  # Two problems, 0 and 1: means 0, 1/2, 1 with shares 1/4, 1/2, 1/4.
  assert bootstrap_interval([0.0, 1.0], level=0.8, resamples=500) == (0.0, 1.0)
  assert bootstrap_interval([0.0, 1.0], level=0.2, resamples=500) == (0.5, 0.5)
  assert bootstrap_interval([0.3], resamples=10) == (0.3, 0.3)
  assert bootstrap_interval([0.7] * 5, resamples=10) == pytest.approx((0.7, 0.7), rel=1e-15)


def test_bootstrap_repeats_and_shows_what_is_missing():
  values = np.random.default_rng(0).random(30)
  assert bootstrap_interval(values, seed=1) == bootstrap_interval(values, seed=1)
  assert bootstrap_interval(values, seed=1) != bootstrap_interval(values, seed=2)
  assert all(math.isnan(end) for end in bootstrap_interval([0.5, np.nan]))
  for values, settings in [
    ([], {}),
    ([[0.1, 0.2]], {}),
    ([0.1], {"level": 95}),
    ([0.1], {"resamples": 0}),
  ]:
    with pytest.raises(ValueError, match="bootstrap_interval"):
      bootstrap_interval(values, **settings)
