"""Which weights estimate a gradient without bias, by enumeration of a softmax policy.

With y_1 … y_G drawn from π = softmax(θ), E[Σ W_i ∇ log π(y_i)] is a sum over all |Y|^G groups:
exact, in float64 but for the weights themselves.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from fadejax.algorithm import masses
from fadejax.algorithm.weights import WEIGHTS

G = 4
LOGITS = np.array([0.3, -0.8, 0.1])
REWARDS = {"binary": np.array([0.0, 1.0, 0.0]), "continuous": np.array([0.15, 1.0, 0.4])}


def softmax(logits):
  p = np.exp(logits - logits.max())
  return p / p.sum()


def objective(logits, rewards, k):
  """E of the largest of k rewards."""
  p = softmax(logits)
  groups = itertools.product(range(len(p)), repeat=k)
  return sum(np.prod(p[list(g)]) * rewards[list(g)].max() for g in groups)


def gradient_of_objective(rewards, k, step=1e-5):
  def slope(i):
    move = np.eye(len(LOGITS))[i] * step
    high, low = objective(LOGITS + move, rewards, k), objective(LOGITS - move, rewards, k)
    return (high - low) / (2 * step)

  return np.array([slope(i) for i in range(len(LOGITS))])


def estimate(name, rewards, **settings):
  """E[Σ_i W_i ∇ log π(y_i)] over all groups of G."""
  p = softmax(LOGITS)
  groups = np.array(list(itertools.product(range(len(p)), repeat=G)))
  weights = np.asarray(WEIGHTS[name](rewards[groups].astype(np.float32), **settings), np.float64)
  chance = p[groups].prod(axis=1)
  score = np.eye(len(p))[groups] - p  # [groups, G, |Y|]
  return np.einsum("n,ng,ngy->y", chance, weights, score)


@pytest.mark.parametrize("kind", REWARDS)
@pytest.mark.parametrize(
  ("name", "settings", "k", "factor"),
  [
    # factor × ∇ E[max of k] is what the *mean* over the group estimates.
    ("reinforce", {}, 1, 1.0),
    ("rloo", {}, 1, 1.0),
    ("dr_grpo", {}, 1, (G - 1) / G),
    ("pass_at_k_loo", {}, G, 1 / G),
    *[
      ("pkpo", {"k": k, "baseline": b}, k, 1 / G)
      for k in (1, 2, 3)
      for b in ("none", "loo", "loo_minus_one")
    ],
    *[("maxpo", {"k": k}, k, 1 / k) for k in (1, 2, 3)],
    *[("max_at_k", {"k": k}, k, (G - k) / (G * k)) for k in (1, 2, 3)],
  ],
)
def test_unbiased(kind, name, settings, k, factor):
  rewards = REWARDS[kind]
  got = estimate(name, rewards, **settings) / G
  np.testing.assert_allclose(got, factor * gradient_of_objective(rewards, k), atol=2e-7)


@pytest.mark.parametrize(
  ("name", "settings"),
  [("grpo", {}), ("max_rl", {}), ("log_mean_exp", {}), ("hard_upweighted_grpo", {}),
   ("power", {"alpha": 2.0}), ("pass_at_k_training", {"k": 2})],
)  # fmt: skip
def test_the_others_are_biased(name, settings):
  """With continuous rewards no multiple of ∇ E[r] or ∇ E[max of 2] is what they estimate."""
  got = estimate(name, REWARDS["continuous"], **settings)
  for k in (1, 2):
    target = gradient_of_objective(REWARDS["continuous"], k)
    cosine = got @ target / np.linalg.norm(got) / np.linalg.norm(target)
    assert cosine < 1 - 1e-5, (name, k, cosine)


@pytest.mark.parametrize(
  ("name", "settings"),
  [("grpo", {}), ("dr_grpo", {}), ("max_rl", {}), ("log_mean_exp", {}), ("power", {"alpha": 2.0}),
   ("asym_grpo_gu", {}), ("hard_upweighted_grpo", {}), ("pass_at_k_training", {"k": 2})],
)  # fmt: skip
def test_masses_in_small_groups_miss_those_of_the_population(name, settings):
  p = np.array([0.1, 0.5, 0.9])
  whole = masses.closed_form(name, p, **settings)
  small = masses.finite_g(name, p, 8, **settings)
  assert np.abs(np.subtract(whole, small)).max() > 2e-3
