"""FADE's schedule against the handed values, by hand, and in its properties."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fadejax.algorithm import fade
from fadejax.algorithm.fade import FadeConfig, FadeState

VECTORS = json.loads((Path(__file__).parent / "vectors.json").read_text())


def state(solve_rate=0.5, entropy=2.0, initial=2.0) -> FadeState:
  return FadeState(jnp.float32(solve_rate), jnp.float32(entropy), jnp.float32(initial))


def knobs(config: FadeConfig, at: FadeState, **clock) -> tuple[float, float]:
  """α and δ of a state: measuring what the averages already say leaves them where they are."""
  after, alpha, delta = fade.update(config, at, at.solve_rate, at.entropy, **clock)
  np.testing.assert_array_equal(jax.tree.leaves(after), jax.tree.leaves(at))
  return float(alpha), float(delta)


def test_handed_alphas():
  for solve_rate, expected in VECTORS["fade_alpha"].items():
    alpha, _ = knobs(FadeConfig(), state(solve_rate=float(solve_rate)))
    assert alpha == pytest.approx(expected, abs=1e-6), solve_rate


def test_handed_deltas():
  for entropy, expected in VECTORS["fade_delta"].items():
    _, delta = knobs(FadeConfig(target_entropy=1.0), state(entropy=float(entropy)))
    assert delta == pytest.approx(expected, abs=1e-6), entropy


@pytest.mark.parametrize("form", ["rate", "literal"])
def test_handed_averages(form):
  config = FadeConfig(ema_form=form)
  at = fade.init(config)
  for measured, expected in zip(
    VECTORS["averages"]["solve_rates"], VECTORS["averages"][form], strict=True
  ):
    at, _, _ = fade.update(config, at, measured, 1.0)
    assert float(at.solve_rate) == pytest.approx(expected, abs=1e-6)


def test_the_first_batch_sets_the_entropy():
  config = FadeConfig(beta=0.25)
  at = fade.init(config)
  assert float(at.solve_rate) == 0.5
  assert math.isnan(at.entropy) and math.isnan(at.initial_entropy)
  assert math.isnan(fade.target_entropy(config, at))
  at, alpha, delta = fade.update(config, at, 0.1, 1.5)
  np.testing.assert_allclose(jax.tree.leaves(at), [0.4, 1.5, 1.5], rtol=1e-6)
  # p̂ is averaged from its start before α is read, 3 * 0.6 / 0.8; δ = 1 + 1.5 - 0.75, cut to 1.
  np.testing.assert_allclose([alpha, delta], [2.25, 1.0], rtol=1e-6)
  at, alpha, delta = fade.update(config, at, 0.8, 0.5)
  np.testing.assert_allclose(jax.tree.leaves(at), [0.5, 1.25, 1.5], rtol=1e-6)
  np.testing.assert_allclose([alpha, delta], [1.5, 1.0], rtol=1e-6)
  for _ in range(40):
    at, alpha, delta = fade.update(config, at, 0.8, 0.5)
  # Ĥ → 0.5 under H* = 0.75: δ → 0.75; p̂ → 0.8: α → 1.
  np.testing.assert_allclose([alpha, delta], [1.0, 0.75], rtol=1e-4)
  assert float(fade.target_entropy(config, at)) == 0.75


def test_half_life_of_the_default_rate():
  config = FadeConfig()
  at = state(solve_rate=1.0)
  for _ in range(34):
    at, _, _ = fade.update(config, at, 0.0, 2.0)
  assert float(at.solve_rate) == pytest.approx(0.98**34, rel=1e-5)
  assert float(at.solve_rate) == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(
  ("solve_rate", "entropy"), [(math.nan, math.nan), (math.nan, 1.0), (0.2, math.nan)]
)
def test_a_batch_without_a_valid_group_changes_nothing(solve_rate, entropy):
  config = FadeConfig(target_entropy=1.0)
  at = state(solve_rate=0.4, entropy=0.8)
  after, alpha, delta = jax.jit(lambda s, p, h: fade.update(config, s, p, h))(
    at, jnp.float32(solve_rate), jnp.float32(entropy)
  )
  np.testing.assert_array_equal(jax.tree.leaves(after), jax.tree.leaves(at))
  np.testing.assert_allclose([alpha, delta], [2.25, 0.8], rtol=1e-6)


@pytest.mark.parametrize("driver", ["paper", "entropy"])
@pytest.mark.parametrize("target", ["half_initial", 1.0])
@pytest.mark.parametrize("unit", [1.0, "initial"])
def test_before_any_measurement_alpha_and_delta_are_numbers(driver, target, unit):
  config = FadeConfig(driver=driver, target_entropy=target, entropy_unit=unit)
  at, alpha, delta = fade.update(config, fade.init(config), math.nan, math.nan)
  assert math.isnan(at.initial_entropy)
  assert float(alpha) == (1.5 if driver == "paper" else 3.0)
  assert float(delta) == 1.0
  at, _, _ = fade.update(config, at, 0.5, 0.9)  # the first batch that can be measured
  np.testing.assert_allclose(jax.tree.leaves(at), [0.5, 0.9, 0.9], rtol=1e-6)


def test_the_solve_rate_is_clipped():
  config = FadeConfig(beta=1.0)
  for measured, expected in ((-0.5, 0.0), (1.5, 1.0)):
    at, _, _ = fade.update(config, state(), measured, 1.0)
    assert float(at.solve_rate) == expected


def test_entropy_unit_initial():
  config = FadeConfig(entropy_unit="initial")
  _, delta = knobs(config, state(entropy=0.1, initial=0.5))  # 1 + (0.1 - 0.25) / 0.5
  assert delta == pytest.approx(0.7, abs=1e-6)
  _, delta = knobs(FadeConfig(entropy_unit=0.5, target_entropy=0.25), state(entropy=0.1))
  assert delta == pytest.approx(0.7, abs=1e-6)
  _, delta = knobs(config, state(entropy=0.0, initial=0.0))
  assert delta == 1.0


def test_ablations():
  low = state(solve_rate=0.3, entropy=0.5, initial=2.0)
  assert knobs(FadeConfig(), low) == pytest.approx((3.0, 0.5), abs=1e-6)
  assert knobs(FadeConfig(use_alpha=False), low) == pytest.approx((1.0, 0.5), abs=1e-6)
  assert knobs(FadeConfig(use_delta=False), low) == pytest.approx((3.0, 1.0), abs=1e-6)
  assert knobs(FadeConfig(alpha_max=2.0, delta_min=0.6), low) == pytest.approx((2.0, 0.6), abs=1e-6)


@pytest.mark.parametrize(
  ("entropy", "alpha"), [(2.0, 3.0), (1.5, 2.0), (1.25, 1.5), (1.0, 1.0), (0.2, 1.0), (2.5, 3.0)]
)
def test_entropy_driver(entropy, alpha):
  """α falls from α_max at the first entropy 2 to 1 at the target 1, whatever the solve rate."""
  config = FadeConfig(driver="entropy")
  got = knobs(config, state(solve_rate=0.9, entropy=entropy))
  assert got == pytest.approx((alpha, min(1.0, max(0.3, entropy))), abs=1e-6)


def test_entropy_driver_with_a_target_over_the_first_entropy():
  config = FadeConfig(driver="entropy", target_entropy=1.0)
  assert knobs(config, state(entropy=0.4, initial=0.5))[0] == 1.0
  assert knobs(config, state(entropy=1.2, initial=0.5))[0] == 3.0


def test_log_decay_driver():
  config = FadeConfig(driver="log_decay")
  at = state(solve_rate=0.9, entropy=0.1)
  assert knobs(config, at, step=0, total_steps=99) == pytest.approx((3.0, 1.0))
  assert knobs(config, at, step=9, total_steps=99) == pytest.approx((2.0, 0.65), abs=1e-6)
  assert knobs(config, at, step=99, total_steps=99) == pytest.approx((1.0, 0.3), abs=1e-6)
  assert knobs(config, at, step=500, total_steps=99) == pytest.approx((1.0, 0.3), abs=1e-6)
  after, _, _ = fade.update(config, at, 0.4, 0.1, step=1, total_steps=99)  # averages are kept
  assert float(after.solve_rate) == pytest.approx(0.89, abs=1e-6)
  for clock in ({}, {"step": 1}, {"total_steps": 9}, {"step": 0, "total_steps": 0}):
    with pytest.raises(ValueError, match="log_decay"):
      fade.update(config, at, 0.5, 1.0, **clock)


@settings(max_examples=15)
@given(st.lists(st.floats(0, 1, width=32), min_size=2, max_size=8))
def test_alpha_never_rises_with_the_solve_rate(rates):
  config = FadeConfig()
  alphas = [
    float(fade.update(config, state(solve_rate=rate), rate, 1.0)[1]) for rate in sorted(rates)
  ]
  assert all(1.0 <= b <= a <= 3.0 for a, b in itertools.pairwise(alphas))


@settings(max_examples=15)
@given(st.lists(st.floats(0, 4, width=32), min_size=2, max_size=8))
def test_delta_never_falls_with_the_entropy(entropies):
  config = FadeConfig()
  low, high = fade.delta_range(config, 1.2)
  deltas = [
    float(fade.update(config, state(entropy=h, initial=1.2), 0.5, h)[2]) for h in sorted(entropies)
  ]
  slack = 1e-6
  assert all(low - slack <= a <= b <= high for a, b in itertools.pairwise(deltas))


@pytest.mark.parametrize(
  ("fields", "initial", "expected"),
  [
    ({}, 0.5, (0.75, 1.0)),
    ({}, 1.4, (0.3, 1.0)),
    ({}, 1.2, (0.4, 1.0)),
    ({"target_entropy": 1.3}, 2.0, (0.3, 1.0)),
    ({"target_entropy": 0.1}, 2.0, (0.9, 1.0)),
    ({"entropy_unit": "initial"}, 0.5, (0.5, 1.0)),
    ({"entropy_unit": 0.5}, 0.5, (0.5, 1.0)),
    ({"use_delta": False}, 2.0, (1.0, 1.0)),
    ({"driver": "log_decay"}, 0.1, (0.3, 1.0)),
    ({"driver": "entropy"}, 0.5, (0.75, 1.0)),
  ],
)
def test_reachable_deltas(fields, initial, expected):
  config = FadeConfig(**fields)
  assert fade.delta_range(config, initial) == pytest.approx(expected)
  if config.driver != "log_decay":  # and both ends are what update() gives there
    _, low = knobs(config, state(entropy=0.0, initial=initial))
    _, high = knobs(config, state(entropy=10.0, initial=initial))
    assert (low, high) == pytest.approx(expected, abs=1e-6)


def test_reachable_deltas_need_an_entropy():
  for bad in (-0.1, math.nan):
    with pytest.raises(ValueError, match="initial_entropy"):
      fade.delta_range(FadeConfig(), bad)


@pytest.mark.parametrize("driver", ["paper", "entropy", "log_decay"])
def test_the_same_inside_jit_and_scan(driver):
  config = FadeConfig(driver=driver, beta=0.2)
  rates = np.float32([0.1, 0.3, np.nan, 0.6, 0.9])
  entropies = np.float32([2.0, 1.4, np.nan, 0.8, 0.5])

  def one(at, x):
    step, rate, entropy = x
    at, alpha, delta = fade.update(config, at, rate, entropy, step=step, total_steps=10)
    return at, (alpha, delta)

  scan = jax.jit(lambda s: jax.lax.scan(one, s, (jnp.arange(5), rates, entropies)))
  compiled, (alphas, deltas) = scan(fade.init(config))
  at = fade.init(config)
  for i in range(5):
    at, (alpha, delta) = one(at, (i, rates[i], entropies[i]))
    np.testing.assert_allclose([alphas[i], deltas[i]], [alpha, delta], rtol=1e-5)
  np.testing.assert_allclose(jax.tree.leaves(compiled), jax.tree.leaves(at), rtol=1e-6)
  for leaf in (*jax.tree.leaves(at), alpha, delta):
    assert leaf.dtype == jnp.float32 and leaf.shape == ()


@pytest.mark.parametrize(
  ("field", "value"),
  [
    ("beta", 0.0),
    ("beta", 1.5),
    ("beta", math.nan),
    ("initial_solve_rate", 1.1),
    ("target_entropy", "half"),
    ("target_entropy", -1.0),
    ("initial_fraction", -0.5),
    ("entropy_unit", 0.0),
    ("entropy_unit", "first"),
    ("alpha_max", 0.5),
    ("delta_min", 0.0),
    ("delta_min", 1.5),
    ("ema_form", "exact"),
    ("driver", "solve_rate"),
  ],
)
def test_a_field_out_of_range_is_named(field, value):
  with pytest.raises(ValueError, match=rf"FadeConfig\.{field}.* must be .*, got "):
    FadeConfig(**{field: value})


def test_the_defaults_are_the_papers():
  assert dataclasses.asdict(FadeConfig()) == {
    "beta": 0.02,
    "initial_solve_rate": 0.5,
    "target_entropy": "half_initial",
    "initial_fraction": 0.5,
    "entropy_unit": 1.0,
    "alpha_max": 3.0,
    "delta_min": 0.3,
    "ema_form": "rate",
    "use_alpha": True,
    "use_delta": True,
    "driver": "paper",
  }
