"""Layouts: what goes where, and what is refused."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from fadejax.policy import sharding


def mesh(data, fsdp, tensor):
  devices = np.array(jax.devices()[: data * fsdp * tensor]).reshape(data, fsdp, tensor)
  return jax.sharding.Mesh(devices, sharding.MESH_AXES)


def test_parameters_are_split_for_training_and_whole_over_fsdp_for_sampling():
  axes, shape = ("layers", "embed", "heads", "head"), (2, 16, 4, 8)
  train = sharding.make_layout(mesh(2, 2, 2), sharding.TRAIN_RULES, 8, 4)
  sample = sharding.make_layout(mesh(2, 2, 2), sharding.SAMPLE_RULES, 8, 4)
  assert train.spec(axes, shape) == PartitionSpec(None, ("fsdp",), ("tensor",), None)
  assert sample.spec(axes, shape) == PartitionSpec(None, None, ("tensor",), None)


def test_prompts_take_both_axes_or_leave_the_group_to_fsdp():
  axes = ("prompts", "group", None)
  both = sharding.make_layout(mesh(2, 4, 1), sharding.TRAIN_RULES, 8, 3)
  assert both.spec(axes, (8, 3, 5)) == PartitionSpec(("data", "fsdp"), None, None)
  group = sharding.make_layout(mesh(2, 4, 1), sharding.TRAIN_RULES, 2, 8)
  assert group.spec(axes, (2, 8, 5)) == PartitionSpec(("data",), ("fsdp",), None)
  with pytest.raises(ValueError, match=r"2 prompts × 3 completions cannot be split.*multiple of 8"):
    sharding.make_layout(mesh(2, 4, 1), sharding.TRAIN_RULES, 2, 3)


def test_an_axis_that_does_not_divide_is_whole_and_reported():
  layout = sharding.make_layout(mesh(1, 1, 2), sharding.TRAIN_RULES, 8, 4)
  shape = jax.ShapeDtypeStruct((16, 3, 8), np.float32)
  axes = {"k": ("embed", "kv_heads", "head")}
  assert layout.spec(axes["k"], shape.shape) == PartitionSpec(None, None, None)
  assert layout.replicated(axes, {"k": shape}) == [
    "kv_heads (3) is kept whole: tensor = 2 does not divide it"
  ]


def test_mistakes_are_named():
  layout = sharding.make_layout(mesh(2, 2, 2), sharding.TRAIN_RULES, 8, 4)
  with pytest.raises(ValueError, match="unknown logical axis 'promts'"):
    layout.spec(("promts",), (8,))
  with pytest.raises(ValueError, match="two dimensions on mesh axes"):
    layout.spec(("heads", "ffn"), (4, 8))
  with pytest.raises(ValueError, match=r"mesh\.data and mesh\.fsdp are both -1"):
    sharding.make_mesh(-1, -1, 1)
  with pytest.raises(ValueError, match="does not use the 8 devices"):
    sharding.make_mesh(3, 1, 1)
  assert dict(sharding.make_mesh(-1, 2, 1).shape) == {"data": 4, "fsdp": 2, "tensor": 1}
