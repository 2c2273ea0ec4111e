"""Masses against simulation by enumeration, the table's formulas, and each other."""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fadejax.algorithm import masses
from fadejax.algorithm.weights import WEIGHTS

P = np.linspace(0.0, 1.0, 21)
Q = 1.0 - P

# The population formulas of the table, written out once more.
FORMULAS = [
  ("reinforce", {}, P, 0 * P),
  ("rloo", {}, P * Q, P * Q),
  ("grpo", {"eps": 0.0}, np.sqrt(P * Q), np.sqrt(P * Q)),
  ("dr_grpo", {}, P * Q, P * Q),
  ("pass_at_k_loo", {"k": 4}, P * Q**3, 0 * P),
  ("pkpo", {"k": 3}, P * Q**2, 0 * P),
  ("maxpo", {"k": 3}, P * Q**3, P * Q**3),
  ("max_at_k", {"k": 3}, P * Q**3, P * Q**3),
  ("hard_upweighted_grpo", {"eps": 0.0}, P**0.5 * Q**1.5, P**0.5 * Q**1.5),
  ("psr", {}, P, 0 * P),
  ("nsr", {}, 0 * P, Q),
  ("w_reinforce", {"lam": 0.1}, 0.1 * P, Q),
  ("max_rl", {}, Q, Q),
  ("power", {"alpha": 2.5}, P * Q**2.5, P * Q**2.5),
  ("asym", {"delta": 0.5}, P * Q, P * Q / 0.5),
  ("power_asym", {"alpha": 2, "delta": 0.5}, P * Q**2, P * Q**2 / 0.5),
  ("fade", {"alpha": 1.5, "delta": 0.8}, P * Q**1.5, P * Q**1.5 / 0.8),
  ("asym_grpo_gu", {}, P**0.1 * Q**0.9, P**0.4 * Q**0.6),
  (
    "codapo",
    {"confidence": 0.5, "eps": 0.0},
    (2 * P * Q + 0.1) * np.sqrt(P * Q),
    (2 * P * Q + 0.1) * np.sqrt(P * Q),
  ),
  (
    "log_mean_exp",
    {"beta": 2.0},
    P * Q * math.expm1(2) / (2 * (1 + P * math.expm1(2))),
    P * Q * math.expm1(2) / (2 * (1 + P * math.expm1(2))),
  ),
]


def k_training(k: int) -> np.ndarray:
  inside = P[1:]
  return np.concatenate([[0.0], inside * (1 - inside) ** (k / 2) / np.sqrt(1 - (1 - inside) ** k)])


FORMULAS.append(("pass_at_k_training", {"k": 4}, k_training(4), k_training(4)))


def test_every_weight_has_its_masses_checked():
  assert {name for name, *_ in FORMULAS} == set(masses.CLOSED_FORMS) <= set(WEIGHTS)


@pytest.mark.parametrize(("name", "settings", "m_s", "m_f"), FORMULAS)
def test_closed_forms(name, settings, m_s, m_f):
  got = masses.closed_form(name, P, **settings)
  np.testing.assert_allclose(got, (m_s, m_f), rtol=1e-12, atol=1e-15)
  square = masses.closed_form(name, P[:20].reshape(4, 5), **settings)
  np.testing.assert_array_equal(square[0], got[0][:20].reshape(4, 5))
  assert np.shape(masses.closed_form(name, 0.3, **settings)[1]) == ()
  compiled = jax.jit(lambda p: masses.closed_form(name, p, **settings))(jnp.asarray(P, jnp.float32))
  np.testing.assert_allclose(compiled, got, rtol=1e-4, atol=1e-5)


def brute_force(name: str, p: float, group: int, settings: dict) -> tuple[float, float]:
  """Over all 2^G groups, each with its chance."""
  groups = np.array(list(itertools.product([0, 1], repeat=group)), np.float32)
  weights = np.asarray(WEIGHTS[name](groups, **settings), np.float64)
  right = groups.sum(axis=1)
  chance = p**right * (1 - p) ** (group - right)
  m_s = np.sum(chance[:, None] * weights * (groups == 1)) / group
  m_f = -np.sum(chance[:, None] * weights * (groups == 0)) / group
  return m_s, m_f


def of_weight(name: str, settings: dict) -> dict:
  return {} if name == "pass_at_k_loo" else settings


@pytest.mark.parametrize(("name", "settings"), [row[:2] for row in FORMULAS])
def test_finite_groups_by_enumeration(name, settings):
  settings = {**of_weight(name, settings), **({"k": 3} if name == "pass_at_k_training" else {})}
  rates = [0.0, 0.2, 0.9, 1.0]
  expected = np.transpose([brute_force(name, p, 5, settings) for p in rates])
  got = masses.finite_g(name, rates, 5, **settings)
  np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-12)
  assert got[0].dtype == np.float64
  one = masses.finite_g(name, 0.2, 5, **settings)
  np.testing.assert_allclose(one, expected[:, 1], rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize(("name", "settings", "m_s", "m_f"), FORMULAS)
def test_large_groups_have_the_population_masses(name, settings, m_s, m_f):
  """At G = 1024, away from the ends; the distance falls as 1/G."""
  inside = (P > 0.15) & (P < 0.85)
  group, scale = 1024, 1.0
  if name == "pkpo":
    scale = group / settings["k"]
  if name == "pass_at_k_loo":
    group = settings["k"]  # its own G: exact there
  got = masses.finite_g(name, P[inside], group, **of_weight(name, settings))
  np.testing.assert_allclose(np.multiply(got, scale), (m_s[inside], m_f[inside]), atol=6e-3)


@pytest.mark.parametrize("group", [2, 4, 7])
def test_maxpo_has_the_mass_of_power_at_every_group_size(group):
  for k in range(1, group):
    got = masses.finite_g("maxpo", P, group, k=k)
    np.testing.assert_allclose(got, [P * Q**k] * 2, atol=1e-7)
    np.testing.assert_allclose(got, masses.closed_form("power", P, alpha=k), atol=1e-7)
    canonical = masses.finite_g("max_at_k", P, group, k=k)
    np.testing.assert_allclose(canonical, np.multiply(got, (group - k) / group), atol=1e-7)


@pytest.mark.parametrize("group", [2, 4, 7])
def test_weights_that_are_unbiased_at_every_group_size(group):
  for k in range(1, group + 1):
    m_s, m_f = masses.finite_g("pkpo", P, group, k=k)
    np.testing.assert_allclose(m_s * group / k, P * Q ** (k - 1), atol=1e-7)
    np.testing.assert_array_equal(m_f, 0)
  m_s, m_f = masses.finite_g("pass_at_k_loo", P, group)
  np.testing.assert_allclose(m_s, P * Q ** (group - 1), atol=1e-7)
  np.testing.assert_array_equal(m_f, 0)
  np.testing.assert_allclose(masses.finite_g("rloo", P, group), [P * Q] * 2, atol=1e-7)
  got = masses.finite_g("dr_grpo", P, group)
  np.testing.assert_allclose(got, [P * Q * (group - 1) / group] * 2, atol=1e-7)


def test_plug_in_power_is_biased():
  m_s, m_f = masses.finite_g("power", 0.9, 8, alpha=2.0)
  assert m_s == pytest.approx(0.0157, abs=5e-5)
  assert m_f == pytest.approx(m_s, rel=1e-6)
  assert masses.closed_form("power", 0.9, alpha=2.0)[0] == pytest.approx(0.0090, abs=1e-9)


def test_power_is_most_at_one_over_one_plus_alpha():
  fine = np.linspace(0, 1, 10001)
  for alpha in (1.0, 2.0, 3.0):
    m_s, _ = masses.closed_form("power", fine, alpha=alpha)
    assert fine[np.argmax(m_s)] == pytest.approx(1 / (1 + alpha), abs=1e-4)
    area = np.trapezoid(m_s, fine) * masses.equal_mass(alpha)
    assert area == pytest.approx(1 / 6, rel=1e-6)
    assert m_s.max() * masses.equal_peak(alpha) == pytest.approx(1 / 4, rel=1e-6)


def test_scales():
  assert masses.equal_mass(1.0) == 1.0 and masses.equal_mass(2.0) == 2.0
  assert masses.equal_peak(1.0) == 1.0 and masses.equal_peak(2.0) == 27 / 16
  assert masses.equal_peak(0.0) == 1 / 4
  traced = jax.jit(lambda a: (masses.equal_mass(a), masses.equal_peak(a)))(jnp.float32(3.0))
  np.testing.assert_allclose(traced, [20 / 6, 256 / 108], rtol=1e-6)
  for scale in (masses.equal_mass, masses.equal_peak):
    with pytest.raises(ValueError, match="alpha"):
      scale(-1.0)


def test_eps_in_a_closed_form():
  m_s, _ = masses.closed_form("grpo", P, eps=0.1, ddof=0)
  np.testing.assert_allclose(m_s, P * Q / (np.sqrt(P * Q) + 0.1), atol=1e-15)


def test_decompose():
  weights = jnp.asarray([[0.75, -0.25, -0.25, -0.25], [1.0, 2.0, -3.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
  rewards = jnp.asarray([[1.0, 0.0, 0.0, 0.0], [0.5, 1.0, 0.49, 0.0], [0.0, 0.0, 0.0, 0.0]])
  m_s, m_f = jax.jit(masses.decompose)(weights, rewards)
  np.testing.assert_allclose(m_s, [0.1875, 0.75, 0.0])
  np.testing.assert_allclose(m_f, [0.1875, 0.75, 0.0])
  m_s, m_f = masses.decompose(WEIGHTS["w_reinforce"](rewards), rewards)
  np.testing.assert_allclose(m_s, [0.025, 0.05, 0.0], rtol=1e-6)
  np.testing.assert_allclose(m_f, [0.75, 0.5, 1.0])


@pytest.mark.parametrize(
  ("call", "message"),
  [
    (lambda: masses.closed_form("ppo", 0.5), "no closed form for 'ppo'"),
    (lambda: masses.closed_form("pkpo", 0.5, k=2, baseline="none"), "loo_minus_one"),
    (lambda: masses.closed_form("pkpo", 0.5, k=2, baseline="loo"), "loo_minus_one"),
    (lambda: masses.closed_form("pass_at_k_loo", 0.5), "need k, the size of the group"),
    (lambda: masses.closed_form("maxpo", 0.5, k=0), "k must be"),
    (lambda: masses.closed_form("power", 0.5, alpha=-1.0), "alpha"),
    (lambda: masses.closed_form("dr_grpo", 1.5), r"p must lie in \[0, 1\]"),
    (lambda: masses.finite_g("ppo", 0.5, 4), "no weight is called 'ppo'"),
    (lambda: masses.finite_g("dr_grpo", -0.1, 4), "p must lie"),
    (lambda: masses.finite_g("dr_grpo", 0.1, 0), "group must be"),
    (lambda: masses.finite_g("maxpo", 0.1, 4, k=4), "k of maxpo"),
  ],
)
def test_what_is_refused(call, message):
  with pytest.raises(ValueError, match=message):
    call()


def test_an_unknown_setting_is_a_type_error():
  for name in masses.CLOSED_FORMS:
    with pytest.raises(TypeError):
      masses.closed_form(name, 0.5, gamma=1.0)


def test_n_eff_and_mean_difficulty():
  rewards = jnp.asarray([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
  weights = WEIGHTS["dr_grpo"](rewards)  # a = 3/8, 3/8, 0
  assert float(masses.n_eff(weights)) == pytest.approx(2.0)
  assert float(masses.mean_difficulty(weights, rewards)) == pytest.approx(0.5)
  harder = WEIGHTS["power"](rewards, alpha=2.0)  # a = 3/8 times 3/4 and 1/4
  assert float(masses.n_eff(harder)) == pytest.approx(1 / (0.75**2 + 0.25**2))
  assert float(masses.mean_difficulty(harder, rewards)) == pytest.approx(0.75**2 + 0.25**2)
  small = float(jax.jit(masses.n_eff)(weights * 1e-22))  # whose squares are under float32
  assert small == pytest.approx(2.0)
  nothing = jnp.zeros((3, 4))
  assert float(masses.n_eff(nothing)) == 0.0
  assert math.isnan(masses.mean_difficulty(nothing, rewards))


def test_entropy_drift():
  rng = np.random.default_rng(0)
  weights = rng.normal(size=(3, 4)).astype(np.float32)
  logprobs = -rng.exponential(size=(3, 4, 5)).astype(np.float32)
  entropy = rng.uniform(size=(3, 4, 5)).astype(np.float32)
  mask = rng.uniform(size=(3, 4, 5)) < 0.6
  a = np.broadcast_to(weights[..., None], mask.shape)[mask]
  expected = a.mean() * entropy[mask].mean(), -np.cov(a, logprobs[mask], ddof=0)[0, 1]
  logprobs[~mask] = entropy[~mask] = np.nan  # what is not counted is not looked at
  got = jax.jit(masses.entropy_drift)(weights, logprobs, entropy, mask)
  np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
  assert all(math.isnan(x) for x in masses.entropy_drift(weights, logprobs, entropy, mask & False))


def test_entropy_drift_is_exact_to_first_order_in_a_softmax():
  """On policy: d/dη of the entropy of softmax(logits + η g), g the gradient of Σ π A log π.

  With weights A on the whole distribution and the natural gradient, logits move by A, and
  dH = -Cov(A, log π); the net weight's term is nothing there, as A is centred.
  """
  probabilities = np.array([0.5, 0.25, 0.125, 0.125])
  a = np.array([1.0, -0.5, -1.0, -2.0])
  a -= probabilities @ a
  copies = (probabilities * 8).astype(int)  # a batch that has each token in its proportion
  tokens = np.repeat(np.arange(4), copies)
  entropy = -probabilities @ np.log(probabilities)
  first, second = masses.entropy_drift(
    jnp.asarray(a[tokens][None], jnp.float32),
    jnp.asarray(np.log(probabilities)[tokens][None, :, None], jnp.float32),
    jnp.full((1, 8, 1), entropy, jnp.float32),
    jnp.ones((1, 8, 1), bool),
  )

  def moved(eta: float) -> float:
    unscaled = probabilities * np.exp(eta * a)
    new = unscaled / unscaled.sum()
    return float(-new @ np.log(new))

  assert float(first) == pytest.approx(0.0, abs=1e-6)
  assert float(second) == pytest.approx((moved(1e-5) - moved(-1e-5)) / 2e-5, rel=1e-4)


@pytest.mark.parametrize(("rows", "columns"), [(40, 12), (12, 40), (5, 5), (200, 3)])
@pytest.mark.parametrize("scale", [1.0, 1e-9])
def test_rank_one_share_against_an_svd(rows, columns, scale):
  rng = np.random.default_rng(rows)
  for spectrum in (lambda n: 0.5 ** np.arange(n), lambda n: 1.0 / (1 + np.arange(n))):
    left, _ = np.linalg.qr(rng.normal(size=(rows, rows)))
    right, _ = np.linalg.qr(rng.normal(size=(columns, columns)))
    sigma = spectrum(min(rows, columns)) * scale
    matrix = (left[:, : len(sigma)] * sigma) @ right[: len(sigma)]
    share = masses.rank_one_share(jnp.asarray(matrix, jnp.float32))
    np.testing.assert_allclose(share, sigma[0] ** 2 / (sigma**2).sum(), rtol=1e-4)


def test_rank_one_share_of_noise_of_rank_one_and_of_nothing():
  noise = np.random.default_rng(0).normal(size=(300, 64))  # no gap: the hardest for the iteration
  sigma = np.linalg.svd(noise, compute_uv=False)
  share = float(masses.rank_one_share(jnp.asarray(noise, jnp.float32)))
  exact = sigma[0] ** 2 / (sigma**2).sum()
  assert 0.8 * exact < share <= 1.0001 * exact
  one = np.outer(np.arange(1.0, 7.0), np.arange(1.0, 4.0))
  np.testing.assert_allclose(masses.rank_one_share(jnp.asarray(one, jnp.float32)), 1.0, rtol=1e-5)
  assert np.isnan(masses.rank_one_share(jnp.zeros((4, 3))))


def test_pass_at_k_training_keeps_its_digits_where_few_are_solved():
  """√p q^{k/2} / √(1 + q + …), against fractions of p = 1e-14."""
  p = 1e-14
  m_s, m_f = masses.closed_form("pass_at_k_training", p, k=8)
  np.testing.assert_allclose([m_s, m_f], np.sqrt(p / 8), rtol=1e-12)
