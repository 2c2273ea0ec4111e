"""Schedules and the optimizer against their closed forms."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fadejax.train.optim import make_optimizer, make_schedule, parallel_average


def test_warm_up_and_decay():
  values = lambda **k: [float(make_schedule(1.0, 4, 10, **k)(i)) for i in range(11)]  # noqa: E731
  warm = [0.25, 0.5, 0.75, 1.0]
  np.testing.assert_allclose(values(), warm + [1.0] * 7)
  linear = [1 - 0.8 * i / 6 for i in range(7)]
  np.testing.assert_allclose(
    values(schedule="linear", final_fraction=0.2), warm + linear, rtol=1e-5
  )
  cosine = [0.5 * (1 + np.cos(np.pi * i / 6)) for i in range(7)]
  np.testing.assert_allclose(values(schedule="cosine"), warm + cosine, atol=1e-7)
  with pytest.raises(ValueError, match="schedule 'flat' is not one of constant, linear, cosine"):
    make_schedule(1.0, 0, 10, "flat")


def test_first_adam_step_clipping_and_decay_of_matrices_only():
  params = {
    "embedding": jnp.full((2, 2), 3.0),
    "norm": jnp.full(2, 3.0),
    "layers": {"gate": jnp.full((1, 2, 2), 3.0), "q_bias": jnp.full((1, 2, 2), 3.0)},
  }
  grads = {k: jnp.ones_like(v) for k, v in params.items() if k != "layers"}
  grads["layers"] = {k: jnp.ones_like(v) for k, v in params["layers"].items()}
  optimizer = make_optimizer(lambda count: 0.1, weight_decay=0.5, clip_norm=1.0)
  updates, _ = optimizer.update(grads, optimizer.init(params), params)
  # Adam's first step is the sign; decay adds lr · 0.5 · 3 to matrices.
  np.testing.assert_allclose(updates["norm"], -0.1, rtol=1e-5)
  np.testing.assert_allclose(updates["layers"]["q_bias"], -0.1, rtol=1e-5)
  np.testing.assert_allclose(updates["embedding"], -0.25, rtol=1e-5)
  np.testing.assert_allclose(updates["layers"]["gate"], -0.25, rtol=1e-5)


def test_parallel_averaging_keeps_two_states():
  """Worked by hand: Adam at 0.01 and 0.02 on one scalar, three steps of unequal gradients."""
  both = parallel_average(optax.adam(0.01), optax.adam(0.02))
  theta = jnp.zeros(())
  state = both.init(theta)
  expected = [0.005, 0.0102965, 0.01154182]
  for (rl, sft), value in zip([(0.3, -0.2), (0.1, -0.4), (0.3, 0.1)], expected, strict=True):
    update, state = both.update((jnp.asarray(rl), jnp.asarray(sft)), state, theta)
    theta = theta + update
    np.testing.assert_allclose(theta, value, rtol=1e-5)
  # One Adam on averaged gradients goes elsewhere.
  single = optax.adam(0.01)
  update, _ = single.update(jnp.asarray(0.05), single.init(theta), theta)
  np.testing.assert_allclose(update, -0.01, rtol=1e-5)
