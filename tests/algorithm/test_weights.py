"""The weights against the handed vectors, enumeration, exact fractions and their identities."""

from __future__ import annotations

import itertools
import json
import math
from fractions import Fraction
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fadejax.algorithm.weights import WEIGHTS

VECTORS = json.loads((Path(__file__).parent / "vectors.json").read_text())["weights"]

# Settings with which every weight runs on groups of four or more.
SETTINGS: dict[str, dict] = {
  **{name: {} for name in WEIGHTS},
  **{name: {"k": 3} for name in ("pass_at_k_training", "pkpo", "maxpo", "max_at_k")},
  "power": {"alpha": 2.0},
  "asym": {"delta": 0.5},
  "power_asym": {"alpha": 2.0, "delta": 0.5},
  "fade": {"alpha": 1.5, "delta": 0.8},
  "codapo": {"confidence": 0.5},
}
# What an all-equal group gets of the weights that do not compare, as a function of its reward.
NOT_COMPARING = {
  "reinforce": lambda r: r,
  "psr": lambda r: float(r >= 0.5),
  "nsr": lambda r: -float(r < 0.5),
  "w_reinforce": lambda r: 0.1 if r >= 0.5 else -1.0,
}
SUM_TO_ZERO = (
  "rloo grpo dr_grpo pass_at_k_training maxpo max_at_k log_mean_exp hard_upweighted_grpo max_rl "
  "power codapo".split()
)


def weigh(name: str, rewards, **settings) -> np.ndarray:
  return np.asarray(WEIGHTS[name](jnp.asarray(rewards, jnp.float32), **settings))


def test_the_table_is_whole():
  assert set(WEIGHTS) >= set(
    "reinforce rloo grpo dr_grpo pass_at_k_loo pass_at_k_training pkpo maxpo max_at_k log_mean_exp "
    "hard_upweighted_grpo psr nsr w_reinforce max_rl power asym power_asym fade asym_grpo_gu "
    "codapo".split()
  )
  assert len({name for name, *_ in VECTORS}) == 21


@pytest.mark.parametrize(("name", "settings", "rewards", "expected"), VECTORS)
def test_handed_vectors(name, settings, rewards, expected):
  exact = [float(Fraction(x)) for x in expected]  # rounded to six digits where not a fraction
  np.testing.assert_allclose(weigh(name, [rewards], **settings), [exact], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
  ("rewards", "centred", "population", "sample", "rloo"),
  [
    (
      [1, 0, 0, 0, 0, 0, 0, 0],
      [0.875, *[-0.125] * 7],
      [2.645751, *[-0.377964] * 7],
      [2.474874, *[-0.353553] * 7],
      [1.0, *[-0.142857] * 7],
    ),
    (
      [1, 1, 1, 0],
      [*[0.25] * 3, -0.75],
      [*[0.57735] * 3, -1.732051],
      [*[0.5] * 3, -1.5],
      [*[0.333333] * 3, -1.0],
    ),
  ],
)
def test_handed_groups(rewards, centred, population, sample, rloo):
  close = {"rtol": 1e-6, "atol": 1e-6}
  np.testing.assert_allclose(weigh("dr_grpo", [rewards]), [centred], **close)
  np.testing.assert_allclose(weigh("grpo", [rewards], ddof=0, eps=0), [population], **close)
  np.testing.assert_allclose(weigh("grpo", [rewards], ddof=1, eps=0), [sample], **close)
  np.testing.assert_allclose(weigh("rloo", [rewards]), [rloo], **close)


def test_one_positive_one_negative_reward_weighted_once():
  np.testing.assert_array_equal(weigh("w_reinforce", [[1, -1]], lam=0.1), np.float32([[0.1, -1.0]]))
  np.testing.assert_array_equal(weigh("w_reinforce", [[1, -1]], lam=0.0), [[0.0, -1.0]])


@pytest.mark.parametrize("name", sorted(WEIGHTS))
@pytest.mark.parametrize("reward", [0.0, 0.3, 0.7, 1.0, -1.0])
def test_an_equal_group(name, reward):
  got = weigh(name, [[reward] * 5], **SETTINGS[name])
  expected = NOT_COMPARING.get(name, lambda r: 0.0)(reward)
  np.testing.assert_array_equal(got, np.full((1, 5), expected, np.float32))


@pytest.mark.parametrize("name", sorted(set(WEIGHTS) - set(NOT_COMPARING)))
def test_rounding_noise_is_an_equal_group(name):
  noise = np.float32([[0.3333333, 0.3333333, 0.3333333, 0.33333334], [0.5, 0.5, 0.5, 0.4999996]])
  assert np.ptp(noise, axis=1).max() > 0
  np.testing.assert_array_equal(weigh(name, noise, **SETTINGS[name]), np.zeros((2, 4)))
  apart = noise + np.float32([0, 0, 0, 1e-4])
  if name != "asym_grpo_gu" or apart.max() >= 0.5:
    assert np.any(weigh(name, apart, **SETTINGS[name]) != 0), name


@pytest.mark.parametrize("name", sorted(set(WEIGHTS) - set(NOT_COMPARING) - {"maxpo"}))
@pytest.mark.parametrize("reward", [0.0, 0.7, 1.0])
def test_a_group_of_one_gets_zero(name, reward):
  settings = {**SETTINGS[name], **({"k": 1} if "k" in SETTINGS[name] else {})}
  expected = reward if name == "pkpo" else 0.0  # k = 1: reinforce / G
  np.testing.assert_array_equal(weigh(name, [[reward]], **settings), np.float32([[expected]]))


def test_a_group_without_rewards_spoils_no_other():
  groups = np.float32([[np.nan] * 4, [1, 0, 1, 0], [np.nan, 1, 0, 0]])
  np.testing.assert_array_equal(
    weigh("dr_grpo", groups), [[0] * 4, [0.5, -0.5, 0.5, -0.5], [0] * 4]
  )
  for name in set(WEIGHTS) - set(NOT_COMPARING):
    got = weigh(name, groups, **SETTINGS[name])
    assert np.all(np.isfinite(got)), name
    np.testing.assert_array_equal(got[1:2], weigh(name, groups[1:2], **SETTINGS[name]))


# Against enumeration -----------------------------------------------------------------------------


def enumerated(name: str, rewards: list[float], k: int, **settings) -> np.ndarray:
  """The definitions, over all subsets, in float64."""
  everyone = range(len(rewards))
  group = len(rewards)

  def best(members, k: int, required: int | None = None) -> float:
    if k == 0:
      return 0.0
    kept = [s for s in itertools.combinations(members, k) if required is None or required in s]
    return float(np.mean([max(rewards[i] for i in s) for s in kept]))

  value = best(everyone, k)

  def one(i: int) -> float:
    mine = best(everyone, k, i)
    others = [j for j in everyone if j != i]
    if name == "max_at_k":
      return mine - value
    if name == "maxpo":
      return mine - best(others, k)
    if name == "pass_at_k_training":
      variance = value * (1 - value)
      return (mine - value) / math.sqrt(variance) if variance > 1e-12 else 0.0
    base = {
      "none": lambda: 0.0,
      "loo": lambda: k / (group - 1) * best(others, k),
      "loo_minus_one": lambda: k / group * best(others, k - 1),
    }[settings["baseline"]]
    return k / group * mine - base()

  return np.array([one(i) for i in everyone])


OVER_SUBSETS = [
  ("max_at_k", {}, 0),
  ("maxpo", {}, 1),
  ("pass_at_k_training", {}, 0),
  ("pkpo", {"baseline": "none"}, 0),
  ("pkpo", {"baseline": "loo"}, 1),
  ("pkpo", {"baseline": "loo_minus_one"}, 0),
]


@pytest.mark.parametrize(("name", "settings", "short"), OVER_SUBSETS)
@pytest.mark.parametrize(
  "rewards",
  [
    [0.0, 1.0, 0.0, 1.0, 1.0],
    [0.9, 0.2, 0.5, 0.2, 0.7, 0.55],
    [0.25, 0.25, 1.0, 0.75, 0.0],
    [0.3, 0.9],
  ],
)
def test_subsets_by_enumeration(name, settings, short, rewards):
  for k in range(1, len(rewards) - short + 1):
    expected = enumerated(name, rewards, k, **settings)
    got = weigh(name, [rewards], k=k, **settings)[0]
    np.testing.assert_allclose(got, expected, atol=2e-6, err_msg=f"k = {k}")


@pytest.mark.parametrize(("name", "settings", "short"), OVER_SUBSETS)
def test_subsets_by_enumeration_outside_zero_one(name, settings, short):
  rewards = [-1.5, 2.0, 0.25, -0.5, 2.0]
  if name == "pass_at_k_training":  # for rewards in [0, 1]; zero where the variance is not positive
    assert np.all(weigh(name, [[-2.0, -1.0, -3.0]], k=2) == 0)
    return
  for k in range(1, 5):
    expected = enumerated(name, rewards, k, **settings)
    np.testing.assert_allclose(weigh(name, [rewards], k=k, **settings)[0], expected, atol=3e-6)


# Against exact fractions, binary rewards, large groups -------------------------------------------


def exact_binary(name: str, group: int, c: int, k: int, **settings) -> tuple[float, float]:
  """(weight of a success, of a failure) from q_i = 1 - C(G-1-c, k-1)/C(G-1, k-1) and the like."""

  def value(n: int, right: int, k: int) -> Fraction:
    return 1 - Fraction(math.comb(n - right, k), math.comb(n, k)) if k else Fraction(0)

  both = []
  for success in (True, False):
    mine = Fraction(1)
    if not success:
      mine = 1 - Fraction(math.comb(group - 1 - c, k - 1), math.comb(group - 1, k - 1))
    without = c - success
    if name == "max_at_k":
      both.append(float(mine - value(group, c, k)))
    elif name == "maxpo":
      both.append(float(mine - value(group - 1, without, k)))
    elif name == "pass_at_k_training":
      v = value(group, c, k)
      both.append(float(mine - v) / math.sqrt(v * (1 - v)) if 0 < v < 1 else 0.0)
    else:
      base = {
        "none": lambda: 0,
        "loo": lambda w=without: Fraction(k, group - 1) * value(group - 1, w, k),
        "loo_minus_one": lambda w=without: Fraction(k, group) * value(group - 1, w, k - 1),
      }[settings["baseline"]]
      both.append(float(Fraction(k, group) * mine - base()))
  return both[0], both[1]


@pytest.mark.parametrize(("name", "settings", "short"), OVER_SUBSETS)
@pytest.mark.parametrize("k", [1, 2, 8, 100, 512, 1024])
def test_groups_of_1024_against_fractions(name, settings, short, k):
  group, k = 1024, min(k, 1024 - short)
  counts = [1, 2, 100, 512, 900, 1023]
  rewards = np.stack([np.random.default_rng(c).permutation(np.arange(group) < c) for c in counts])
  got = weigh(name, rewards, k=k, **settings)
  for row, c in enumerate(counts):
    right, wrong = exact_binary(name, group, c, k, **settings)
    expected = np.where(rewards[row], right, wrong)
    np.testing.assert_allclose(got[row], expected, rtol=5e-7, atol=5e-7, err_msg=f"c = {c}")


def test_a_tiny_failing_chance_keeps_its_digits():
  """C(512, 100) / C(1024, 100) is 4e-33, so that a 1 - v_k taken in float32 would be 0."""
  rewards = np.arange(1024)[None, :] < 512
  right, wrong = exact_binary("max_at_k", 1024, 512, 100)
  got = weigh("max_at_k", rewards, k=100)[0]
  assert 0 < right < 1e-30
  np.testing.assert_allclose(got[[0, -1]], [right, wrong], rtol=1e-6, atol=0)
  right, wrong = exact_binary("pass_at_k_training", 1024, 512, 100)
  got = weigh("pass_at_k_training", rewards, k=100)[0]
  np.testing.assert_allclose(got[[0, -1]], [right, wrong], rtol=1e-6, atol=0)


@pytest.mark.parametrize("k", [1, 2, 16, 500, 1000])
def test_continuous_groups_of_1024_in_float64(k):
  """Hypergeometric sums over the sorted rewards, each coefficient from exact integers."""
  group = 1024
  r = np.random.default_rng(k).uniform(size=group).astype(np.float32)
  rising = np.sort(r).astype(np.float64)
  last = np.array([math.comb(j, k - 1) / math.comb(group, k) for j in range(group)])
  value = np.sum(rising * last)
  own = np.array([math.comb(j, k - 1) / math.comb(group - 1, k - 1) for j in range(group)])
  later = np.zeros(group)
  if k > 1:
    later[1:] = [math.comb(j - 1, k - 2) / math.comb(group - 1, k - 1) for j in range(1, group)]
  tail = np.concatenate([np.cumsum((rising * later)[::-1])[::-1][1:], [0.0]])
  expected = np.empty(group)
  expected[np.argsort(r)] = rising * own + tail - value
  np.testing.assert_allclose(weigh("max_at_k", r[None], k=k)[0], expected, rtol=1e-6, atol=1e-6)


# Identities and properties -----------------------------------------------------------------------

GROUPS = st.lists(st.integers(0, 16).map(lambda n: n / 16), min_size=4, max_size=4)


@settings(max_examples=15)
@given(GROUPS, GROUPS)
def test_centred_weights_sum_to_zero(first, second):
  for name in SUM_TO_ZERO:
    got = weigh(name, [first, second], **SETTINGS[name])
    limit = 1e-5 * max(1.0, np.abs(got).max())
    np.testing.assert_allclose(got.sum(axis=1), 0, atol=limit, err_msg=name)


@settings(max_examples=15)
@given(GROUPS, st.permutations(range(4)))
def test_a_weight_follows_its_completion(rewards, order):
  for name in WEIGHTS:
    straight = weigh(name, [rewards], **SETTINGS[name])[0]
    shuffled = weigh(name, [[rewards[i] for i in order]], **SETTINGS[name])[0]
    np.testing.assert_allclose(shuffled, straight[list(order)], rtol=1e-5, atol=1e-6, err_msg=name)


@settings(max_examples=15)
@given(GROUPS)
def test_a_better_reward_never_gets_a_smaller_weight(rewards):
  order = np.argsort(rewards)
  for name in WEIGHTS:
    rising = weigh(name, [rewards], **SETTINGS[name])[0][order]
    assert np.all(np.diff(rising) >= -1e-6), name


@settings(max_examples=15)
@given(GROUPS, st.integers(1, 3))
def test_identities(rewards, k):
  close = {"rtol": 1e-5, "atol": 1e-6}
  group = 4
  np.testing.assert_allclose(
    weigh("max_at_k", [rewards], k=k), weigh("maxpo", [rewards], k=k) * (group - k) / group, **close
  )
  np.testing.assert_allclose(weigh("maxpo", [rewards], k=1), weigh("rloo", [rewards]), **close)
  np.testing.assert_allclose(
    weigh("max_at_k", [rewards], k=1), weigh("dr_grpo", [rewards]), **close
  )
  np.testing.assert_allclose(
    weigh("pkpo", [rewards], k=group), weigh("pass_at_k_loo", [rewards]), **close
  )
  np.testing.assert_allclose(
    weigh("pkpo", [rewards], k=1) * group, weigh("reinforce", [rewards]), **close
  )
  for alpha, delta in ((1.0, 0.5), (2.5, 1.0), (1.7, 0.3)):
    both = weigh("power_asym", [rewards], alpha=alpha, delta=delta)
    np.testing.assert_array_equal(both, weigh("fade", [rewards], alpha=alpha, delta=delta))
    focus = weigh("power", [rewards], alpha=alpha)
    np.testing.assert_allclose(both, np.where(focus < 0, focus / delta, focus), **close)
  np.testing.assert_array_equal(weigh("power", [rewards], alpha=1.0), weigh("dr_grpo", [rewards]))
  np.testing.assert_allclose(
    weigh("log_mean_exp", [rewards], beta=1e-5), weigh("dr_grpo", [rewards]), rtol=1e-4, atol=1e-5
  )


def test_a_large_beta_stays_finite():
  got = weigh("log_mean_exp", [[1.0, 0.0, 0.0, 0.5]], beta=500.0)
  np.testing.assert_allclose(got, [[3 / 500, -1 / 500, -1 / 500, -1 / 500]], rtol=1e-6)


def test_power_outside_zero_one():
  """1 - r̄ is kept in [0, 1]; an α below 1 gives no infinity there."""
  np.testing.assert_array_equal(weigh("power", [[3.0, 0.0]], alpha=2.0), [[0.0, 0.0]])
  np.testing.assert_array_equal(weigh("power", [[3.0, 0.0]], alpha=1.0), [[1.5, -1.5]])
  np.testing.assert_array_equal(weigh("power", [[0.0, -2.0]], alpha=3.0), [[1.0, -1.0]])
  assert np.all(np.isfinite(weigh("power", [[3.0, 0.0]], alpha=0.0)))
  binary = np.arange(1024)[None, :] < 1023
  np.testing.assert_allclose(weigh("power", binary, alpha=0.0)[0, [0, -1]], [1.0, -1023.0])


def test_max_rl_needs_a_positive_mean():
  np.testing.assert_array_equal(weigh("max_rl", [[0.5, -1.0], [1.0, -1.0]]), np.zeros((2, 2)))


def test_codapo_has_one_confidence_a_group():
  rewards = np.float32([[1, 0, 0, 0], [1, 1, 0, 0]])
  together = weigh("codapo", rewards, confidence=jnp.asarray([0.5, 0.2]))
  for row, confidence in enumerate((0.5, 0.2)):
    apart = weigh("codapo", rewards[row : row + 1], confidence=confidence)
    np.testing.assert_allclose(together[row : row + 1], apart, rtol=1e-6)


# jax ---------------------------------------------------------------------------------------------

MIXED = np.float32([[1, 0, 0, 0, 1, 0], [0, 0, 0, 0, 0, 0], [0.9, 0.2, 0.5, 0.2, 0.1, 1]])


@pytest.mark.parametrize("name", sorted(WEIGHTS))
def test_jit_and_vmap_change_nothing(name):
  plain = weigh(name, MIXED, **SETTINGS[name])
  assert plain.dtype == np.float32 and plain.shape == MIXED.shape
  whole = (MIXED >= 0.5).astype(np.int32)

  @jax.jit
  def variants(rewards, integers):
    weight = lambda r: WEIGHTS[name](r, **SETTINGS[name])  # noqa: E731
    stacked = weight(jnp.stack([rewards, rewards[::-1]]))
    as_integers, as_booleans = weight(integers), weight(integers == 1)
    return weight(rewards), jax.vmap(weight)(rewards), stacked[1, ::-1], as_integers, as_booleans

  *same, as_integers, as_booleans = variants(MIXED, whole)
  for got in same:
    np.testing.assert_allclose(got, plain, rtol=1e-5, atol=1e-6)
  binary = weigh(name, whole, **SETTINGS[name])
  for got in (as_integers, as_booleans):  # they are rewards too
    np.testing.assert_allclose(got, binary, rtol=1e-5, atol=1e-6)


def test_traced_alpha_and_delta():
  compiled = jax.jit(WEIGHTS["fade"])
  for alpha, delta in ((3.0, 1.0), (1.0, 0.3), (1.5, 0.8)):
    got = compiled(MIXED, alpha=jnp.float32(alpha), delta=jnp.float32(delta))
    np.testing.assert_allclose(got, weigh("fade", MIXED, alpha=alpha, delta=delta), rtol=1e-5)


# Settings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(WEIGHTS))
def test_an_unknown_setting_is_a_type_error(name):
  with pytest.raises(TypeError, match="gamma"):
    WEIGHTS[name](MIXED, **SETTINGS[name], gamma=1.0)


@pytest.mark.parametrize(
  ("name", "settings", "message"),
  [
    ("grpo", {"ddof": 2}, "ddof must be one of 0, 1, got 2"),
    ("grpo", {"ddof": True}, "ddof"),
    ("grpo", {"eps": -1e-6}, r"eps must be a number in \[0, inf\)"),
    ("hard_upweighted_grpo", {"eps": math.nan}, "eps"),
    ("power", {"alpha": -0.5}, r"alpha must be a number in \[0, inf\), got -0.5"),
    ("power", {"alpha": math.inf}, "alpha"),
    ("power", {"alpha": "2"}, "alpha"),
    ("asym", {"delta": 0.0}, r"delta must be a number in \(0, inf\), got 0.0"),
    ("fade", {"alpha": 1.0, "delta": -1}, "delta"),
    ("fade", {"alpha": True, "delta": 1}, "alpha"),
    ("log_mean_exp", {"beta": 0}, "beta"),
    ("w_reinforce", {"lam": -0.1}, "lam"),
    ("asym_grpo_gu", {"beta_pos": -1}, "beta_pos"),
    ("asym_grpo_gu", {"beta_neg": -1}, "beta_neg"),
    ("codapo", {"confidence": 1.5}, r"confidence must be a number in \[0, 1\], got 1.5"),
    ("codapo", {"confidence": 0.5, "offset": -1}, "offset"),
    ("pass_at_k_training", {"k": 2, "sigma_eps": -1}, "sigma_eps"),
    ("pass_at_k_training", {"k": 7}, r"k of .* in \[1, 6\] with groups of 6, got 7"),
    ("max_at_k", {"k": 0}, "k of max_at_k"),
    ("max_at_k", {"k": 2.0}, "k of max_at_k"),
    ("maxpo", {"k": 6}, r"k of maxpo .* in \[1, 5\]"),
    ("pkpo", {"k": 7}, r"\[1, 6\]"),
    ("pkpo", {"k": 6, "baseline": "loo"}, r"\[1, 5\]"),
    ("pkpo", {"k": 2, "baseline": "mean"}, "baseline must be one of 'none', 'loo'"),
  ],
)
def test_a_setting_out_of_range_is_named(name, settings, message):
  with pytest.raises(ValueError, match=message):
    WEIGHTS[name](MIXED, **settings)


def test_rewards_need_a_group_axis():
  with pytest.raises(ValueError, match="group axis"):
    WEIGHTS["dr_grpo"](jnp.float32(1.0))
