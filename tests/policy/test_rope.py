"""RoPE scalings against the frequencies that transformers computes, and their plain properties."""

from __future__ import annotations

import json
import math
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from fadejax.policy import hf_config
from fadejax.policy.rope import RopeScaling, rope_angles, rotate

ROPE = json.loads((Path(__file__).parent / "fixtures" / "common.json").read_text())["rope"]


def published(name):
  """(head size, θ, scaling) of a published config, the rest of it made up."""
  config = ROPE[name]["config"]
  rest = dict(
    model_type="llama", vocab_size=8, num_hidden_layers=1, intermediate_size=8, rms_norm_eps=1e-5
  )
  arch = hf_config.architecture_of({**rest, **config})
  return arch.head_size, arch.rope_theta, arch.rope_scaling


@pytest.mark.parametrize("name", ROPE)
def test_frequencies_are_transformers(name):
  size, theta, scaling = published(name)
  expected, stretch = np.array(ROPE[name]["frequencies"]), ROPE[name]["stretch"]
  frequency = theta ** (-np.arange(0, size, 2) / size)
  if scaling is not None:
    # Scaled they are told apart from unscaled ones: by the factor, at the low end.
    assert frequency[-1] / expected[-1] == pytest.approx(scaling.factor, rel=1e-5)
    frequency = frequency * scaling.ratios(size, theta)
  np.testing.assert_allclose(frequency, expected, rtol=2e-6)
  positions = np.arange(200)
  cos, sin = rope_angles(jnp.asarray(positions), size, theta, scaling)
  angle = positions[:, None, None] * expected
  np.testing.assert_allclose(cos, stretch * np.cos(angle), atol=5e-5)
  np.testing.assert_allclose(sin, stretch * np.sin(angle), atol=5e-5)


def test_llama3_keeps_short_wavelengths_and_divides_long_ones():
  scaling, size, theta = RopeScaling("llama3", 8.0, 8192), 128, 5e5
  ratios = scaling.ratios(size, theta)
  wavelength = 2 * math.pi * theta ** (np.arange(0, size, 2) / size)
  np.testing.assert_array_equal(ratios[wavelength < 8192 / 4], 1.0)
  np.testing.assert_allclose(ratios[wavelength > 8192], 1 / 8, rtol=1e-12)
  between = ratios[(wavelength > 8192 / 4) & (wavelength < 8192)]
  assert len(between) > 3 and np.all(np.diff(between) < 0)
  assert np.all((between > 1 / 8) & (between < 1))


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_a_factor_of_one_changes_nothing(kind):
  np.testing.assert_allclose(RopeScaling(kind, 1.0, 4096).ratios(64, 1e4), 1.0, rtol=1e-12)


def test_stretch_grows_scores_by_its_square():
  rng = np.random.default_rng(0)
  q, k = (jnp.asarray(rng.normal(size=(5, 1, 8)), jnp.float32) for _ in range(2))
  positions = jnp.arange(5)
  scores = []
  for stretch in (1.0, 1.5):
    rope = rope_angles(positions, 8, 100.0, RopeScaling("yarn", 2.0, 16, stretch=stretch))
    scores.append(rotate(q, rope)[:, 0] @ rotate(k, rope)[:, 0].T)
  np.testing.assert_allclose(scores[1], 2.25 * scores[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    (dict(kind="dynamic", factor=2.0), "'dynamic' is not one of linear, llama3, yarn"),
    (dict(kind="linear", factor=-1.0), "factor must be over 0"),
    (dict(kind="yarn", factor=2.0), "original_positions must be at least 1"),
    (dict(kind="llama3", factor=2.0, original_positions=8, low_factor=4.0), "over low_factor"),
    (dict(kind="yarn", factor=2.0, original_positions=8, beta_slow=40.0), "over beta_slow"),
  ],
)
def test_what_makes_no_sense_is_refused(fields, message):
  with pytest.raises(ValueError, match=message):
    RopeScaling(**fields)
