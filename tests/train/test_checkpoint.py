"""Which checkpoints are kept, what comes back, and on other devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from fadejax.config import CheckpointConfig
from fadejax.train.checkpoint import Checkpoints, restore_params


def state(value):
  return {"params": {"w": jnp.arange(8.0) + value}, "step": jnp.asarray(value, jnp.int32)}


def steps_in(path):
  return sorted(int(p.name.removeprefix("step_")) for p in path.glob("step_*"))


def test_newest_and_best_are_kept(tmp_path):
  checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep=2, keep_best=1))
  assert checkpoints.latest() is None and checkpoints.best() is None
  for step, score in ((1, 0.2), (2, 0.9), (3, None), (4, 0.5), (5, None)):
    metrics = None if score is None else {"pass@1": score, "greedy": 0.0}
    checkpoints.save(step, state(step), {"draws": 10 * step}, metrics)
  checkpoints.wait()
  assert steps_in(tmp_path) == [2, 4, 5]
  assert (checkpoints.latest(), checkpoints.best()) == (5, 2)
  restored, meta = checkpoints.restore(2, state(0))
  np.testing.assert_array_equal(restored["params"]["w"], np.arange(8.0) + 2)
  assert int(restored["step"]) == 2 and meta == {"draws": 20}
  checkpoints.close()


def test_parameters_alone_and_on_other_devices(tmp_path):
  checkpoints = Checkpoints(tmp_path, CheckpointConfig())
  checkpoints.save(7, state(7), {}, None)
  checkpoints.close()
  mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
  split = NamedSharding(mesh, PartitionSpec("data"))
  like = {"w": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=split)}
  params = restore_params(tmp_path, like)
  assert params["w"].sharding == split
  np.testing.assert_array_equal(params["w"], np.arange(8.0) + 7)
  with pytest.raises(ValueError, match=r"another architecture:\n  \['w'\]: \(8,\) there, \(9,\)"):
    restore_params(tmp_path, {"w": jax.ShapeDtypeStruct((9,), jnp.float32, sharding=split)})
  with pytest.raises(FileNotFoundError, match="has no checkpoint of step 3; steps there: \\[7\\]"):
    restore_params(tmp_path, like, 3)


def test_a_save_that_was_cut_off_is_not_a_checkpoint(tmp_path):
  checkpoints = Checkpoints(tmp_path, CheckpointConfig())
  for step in (9, 10):
    checkpoints.save(step, state(step), {}, None)
  checkpoints.close()
  (tmp_path / "step_20.orbax-checkpoint-tmp").mkdir()
  again = Checkpoints(tmp_path, CheckpointConfig())
  assert again.latest() == 10  # the newest by number, and complete
  again.close()
  like = {"w": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=state(0)["params"]["w"].sharding)}
  np.testing.assert_array_equal(restore_params(tmp_path, like)["w"], np.arange(8.0) + 10)
