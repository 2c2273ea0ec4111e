"""Which checkpoints are kept, what comes back, and on other devices."""

from __future__ import annotations

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from fadejax.config import CheckpointConfig
from fadejax.train.checkpoint import Checkpoints, Damaged, restore_params


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
  restored, meta, flight = checkpoints.restore(2, state(0))
  np.testing.assert_array_equal(restored["params"]["w"], np.arange(8.0) + 2)
  assert int(restored["step"]) == 2 and meta == {"draws": 20, "flight": False} and flight is None
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


def _files(path):
  return sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.is_file())


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("how", ["short", "empty", "gone"])
def test_whatever_is_missing_is_noticed_or_not_needed(tmp_path, how, ahead):
  """Every file of a checkpoint in turn: it is `Damaged`, or what comes back is right."""
  flight = {"tokens": jnp.arange(12).reshape(3, 4)} if ahead else None
  whole = tmp_path / "whole"
  checkpoints = Checkpoints(whole, CheckpointConfig())
  checkpoints.save(1, state(1), {"draws": 7}, None, flight)
  checkpoints.close()
  damaged = []
  for name in _files(whole):
    copy = tmp_path / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(whole, copy)
    content = (copy / name).read_bytes()
    if how == "gone":
      (copy / name).unlink()
    else:
      (copy / name).write_bytes(content[: len(content) // 2 if how == "short" else 0])
    again = Checkpoints(copy, CheckpointConfig())
    try:
      restored, meta, back = again.restore(1, state(0), flight)
    except Damaged as error:
      damaged.append(name)
      assert "checkpoint 1 in" in str(error)
    else:
      np.testing.assert_array_equal(restored["params"]["w"], np.arange(8.0) + 1)
      assert meta == {"draws": 7, "flight": ahead} and (back is None) != ahead
      jax.tree.map(np.testing.assert_array_equal, back, flight)
    again.close()
  # The index of the data, what it says of the tree, and the draw count at least.
  assert len(damaged) >= 3 and any("meta/" in name for name in damaged)
  assert any("flight/" in name for name in damaged) == ahead


def test_a_store_that_refuses_says_nothing_against_the_checkpoint(tmp_path, monkeypatch):
  checkpoints = Checkpoints(tmp_path, CheckpointConfig())
  checkpoints.save(1, state(1), {}, None)
  checkpoints.wait()
  for error in (PermissionError("no"), RuntimeError("no memory"), ValueError("PERMISSION_DENIED")):

    def refuse(*_, error=error, **__):
      raise error

    monkeypatch.setattr(checkpoints._manager, "restore", refuse)
    with pytest.raises(type(error)) as caught:
      checkpoints.restore(1, state(0))
    assert not isinstance(caught.value, Damaged)
  monkeypatch.undo()
  checkpoints.close()
