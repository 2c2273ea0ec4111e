"""Which mesh axis every array axis lives on: one table for training, one for sampling.

The mesh has three axes. `data` splits prompts; `fsdp` splits prompts too (or, where
there are too few prompts, the group) and the parameters; `tensor` splits heads, the
feed-forward width and the vocabulary. A logical axis whose size a mesh axis does not
divide is kept whole, and `Layout.replicated` says so for the plan that a run prints.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

MESH_AXES = ("data", "fsdp", "tensor")

# Logical axis → mesh axes. An axis that is not here, or None, is kept whole.
TRAIN_RULES: dict[str, tuple[str, ...]] = {
  "prompts": ("data", "fsdp"),
  "embed": ("fsdp",),
  "heads": ("tensor",),
  "kv_heads": ("tensor",),
  "ffn": ("tensor",),
  "vocab": ("tensor",),
}
# The sampler reads every parameter at every token: no gather over fsdp.
SAMPLE_RULES: dict[str, tuple[str, ...]] = {**TRAIN_RULES, "embed": ()}
LOGICAL_AXES = (*TRAIN_RULES, "group", "layers", "head", "embed_vector", "act_embed", "rank")


@dataclasses.dataclass(frozen=True)
class Layout:
  """A mesh and the rules that map logical axes to it. Hashable, so it may be static."""

  mesh: Mesh
  rules: tuple[tuple[str, tuple[str, ...]], ...]

  def spec(self, axes: Sequence[str | None], shape: Sequence[int]) -> PartitionSpec:
    """The partition of an array with these logical axes.

    Raises:
      ValueError: an unknown logical axis, or two axes of the array on one mesh axis.
    """
    rules = dict(self.rules)
    parts: list[tuple[str, ...] | None] = []
    taken: set[str] = set()
    for axis, size in zip(axes, shape, strict=True):
      if axis is not None and axis not in LOGICAL_AXES:
        raise ValueError(f"unknown logical axis {axis!r}; known: {', '.join(LOGICAL_AXES)}")
      names = rules.get(axis, ()) if axis else ()
      ways = int(np.prod([self.mesh.shape[name] for name in names], dtype=np.int64))
      if ways == 1 or size % ways:
        parts.append(None)
        continue
      if taken & set(names):
        raise ValueError(f"axes {tuple(axes)} put two dimensions on mesh axes {names}")
      taken |= set(names)
      parts.append(names)
    return PartitionSpec(*parts)

  def sharding(self, axes: Sequence[str | None], shape: Sequence[int]) -> NamedSharding:
    """NamedSharding of an array with these logical axes."""
    return NamedSharding(self.mesh, self.spec(axes, shape))

  def constrain(self, x: jax.Array, *axes: str | None) -> jax.Array:
    """Pins an intermediate array inside jit."""
    if self.mesh.size == 1:
      return x
    return jax.lax.with_sharding_constraint(x, self.sharding(axes, x.shape))

  def tree(self, axes: Any, shapes: Any) -> Any:
    """Shardings for a tree of arrays, from like trees of axis tuples and of shapes."""
    is_axes = lambda x: isinstance(x, tuple)  # noqa: E731
    return jax.tree.map(lambda a, s: self.sharding(a, s.shape), axes, shapes, is_leaf=is_axes)

  def replicated(self, axes: Any, shapes: Any) -> list[str]:
    """Logical axes that should be split but are not, with the reason."""
    is_axes = lambda x: isinstance(x, tuple)  # noqa: E731
    kept = {}
    pairs = zip(
      jax.tree.leaves(axes, is_leaf=is_axes),
      [s.shape for s in jax.tree.leaves(shapes)],
      strict=True,
    )
    for names, shape in pairs:
      for axis, size, part in zip(names, shape, self.spec(names, shape), strict=True):
        wanted = dict(self.rules).get(axis, ())
        ways = int(np.prod([self.mesh.shape[name] for name in wanted], dtype=np.int64))
        if ways > 1 and part is None:
          kept[axis] = (
            f"{axis} ({size}) is kept whole: {'×'.join(wanted)} = {ways} does not divide it"
          )
    return sorted(kept.values())


def make_mesh(data: int, fsdp: int, tensor: int) -> Mesh:
  """A mesh over all devices; one of the sizes may be -1: whatever is left.

  Raises:
    ValueError: two sizes are -1, or the product is not the number of devices.
  """
  sizes = {"data": data, "fsdp": fsdp, "tensor": tensor}
  count = jax.device_count()
  auto = [name for name, size in sizes.items() if size == -1]
  if len(auto) > 1:
    raise ValueError(
      f"mesh.{auto[0]} and mesh.{auto[1]} are both -1, but only one may be worked out: with "
      f"{count} devices set e.g. mesh.data=-1 mesh.fsdp=1 mesh.tensor=1"
    )
  if any(size < 1 and size != -1 for size in sizes.values()):
    raise ValueError(f"mesh sizes must be -1 or at least 1, got {sizes}")
  known = int(np.prod([size for size in sizes.values() if size != -1]))
  if auto and count % known == 0:
    sizes[auto[0]] = count // known
  if int(np.prod(list(sizes.values()))) != count:
    shown = "×".join(f"{name}={size}" for name, size in sizes.items())
    raise ValueError(f"mesh {shown} does not use the {count} devices that are there exactly")
  shape = tuple(sizes[name] for name in MESH_AXES)
  return jax.make_mesh(shape, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def make_layout(mesh: Mesh, rules: dict[str, tuple[str, ...]], prompts: int, group: int) -> Layout:
  """A layout whose batch rule fits: P over data and fsdp, or P over data and G over fsdp.

  Raises:
    ValueError: neither fits; names the fields and the numbers that would.
  """
  data, fsdp = mesh.shape["data"], mesh.shape["fsdp"]
  rules = dict(rules)
  if prompts % (data * fsdp) == 0:
    rules["prompts"], rules["group"] = ("data", "fsdp"), ()
  elif prompts % data == 0 and group % fsdp == 0:
    rules["prompts"], rules["group"] = ("data",), ("fsdp",)
  else:
    raise ValueError(
      f"{prompts} prompts × {group} completions cannot be split over mesh.data={data} × "
      f"mesh.fsdp={fsdp}: the prompts of one forward pass (rollout.prompts / loss.minibatches / "
      f"loss.microbatches, or evaluation.batch) must be a multiple of {data * fsdp}; or a multiple "
      f"of {data} with rollout.group / loss.group_parts a multiple of {fsdp}"
    )
  return Layout(mesh, tuple(sorted(rules.items())))
