"""Sums over parts of a batch, and what all parts share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from fadejax.policy import sharding
from fadejax.train.parts import add_up, read_once, split

MESH = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), sharding.MESH_AXES)
LAYOUT = sharding.make_layout(MESH, sharding.TRAIN_RULES, 1, 1)


def test_prompt_or_member_i_goes_to_part_i_mod_parts():
  x = jnp.arange(4 * 6 * 2).reshape(4, 6, 2)
  prompts, members = split(x, 2, LAYOUT), split(x, 3, LAYOUT, axis=1)
  assert prompts.shape == (2, 2, 6, 2) and members.shape == (3, 4, 2, 2)
  for part in range(2):
    np.testing.assert_array_equal(prompts[part], x[part::2])
  for part in range(3):
    np.testing.assert_array_equal(members[part], x[:, part::3])


def test_sums_are_added_and_maxima_kept():
  parts = jnp.array([[1.0, 2.0], [-5.0, 4.0], [3.0, -1.0]])
  gradient = lambda x: ({"w": 2 * x}, {"loss": x.sum(), "gap_max": x.max()})  # noqa: E731
  total, sums = add_up(gradient, parts, {"w": jax.ShapeDtypeStruct((2,), jnp.bfloat16)})
  np.testing.assert_array_equal(total["w"], [-2.0, 10.0])
  assert total["w"].dtype == jnp.float32 and sums == {"loss": 4.0, "gap_max": 4.0}


def test_what_parts_share_is_read_once_forward_and_back():
  read = lambda w: jnp.tanh(w)  # noqa: E731
  f = lambda w, shared, x: jnp.sum(jnp.sin(w * x) * shared)  # noqa: E731

  def gradient(w, shared, x):
    return jax.grad(f, argnums=(0, 1))(w, shared, x), {"loss": f(w, shared, x)}

  w, parts = jnp.array([0.3, -1.2]), jnp.array([[1.0, 2.0], [0.5, -1.0], [2.0, 0.1]])
  (found, sums) = read_once(read, gradient, w, parts)
  whole = lambda w: sum(f(w, read(w), x) for x in parts)  # noqa: E731
  np.testing.assert_allclose(found, jax.grad(whole)(w), rtol=1e-6)
  np.testing.assert_allclose(sums["loss"], whole(w), rtol=1e-6)
  program = jax.make_jaxpr(lambda w: read_once(read, gradient, w, parts))(w)
  outside = [eqn for eqn in program.eqns if eqn.primitive.name != "scan"]
  assert len(program.eqns) == len(outside) + 1
  assert str(program).count("tanh") == sum(eqn.primitive.name == "tanh" for eqn in outside) == 1
