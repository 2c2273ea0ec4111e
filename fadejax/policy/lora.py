"""LoRA: low-rank changes of a frozen model's projections (arXiv:2106.09685).

A projection y = x W becomes y = x W + (α / r) (x A) B, with A [in, r] random and B [r, out] zero,
so that training begins at the model itself. Adapters are a tree of their own, stacked over layers:

    {"q": {"a": [L, D, r], "b": [L, r, N, h]}, …}

`attach` puts them beside the model's parameters, where `model.py` applies them; `merge` adds them
into a copy.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fadejax.policy.model import PROJECTIONS, Architecture, Params, abstract_params, logical_axes

_TARGETS = tuple(PROJECTIONS)


@dataclasses.dataclass(frozen=True)
class LoraConfig:
  """Which projections get adapters, and of which size.

  Raises:
    ValueError: a rank or α out of its range, or a projection that no model has.
  """

  rank: int = 0  # 0: off, all parameters are trained
  alpha: float = 32.0  # the adapters' product is scaled by alpha / rank
  targets: tuple[str, ...] = _TARGETS

  def __post_init__(self) -> None:
    if self.rank < 0:
      raise ValueError(f"lora.rank must be at least 0, got {self.rank}")
    if not self.alpha > 0:
      raise ValueError(f"lora.alpha must be above 0, got {self.alpha}")
    unknown = [name for name in self.targets if name not in PROJECTIONS]
    if unknown or not self.targets or len(set(self.targets)) < len(self.targets):
      raise ValueError(
        f"lora.targets: {self.targets!r}; wanted are different ones of {', '.join(PROJECTIONS)}"
      )

  @property
  def scale(self) -> float:
    """What the product of two adapters is multiplied by."""
    return self.alpha / self.rank


def _split(name: str, whole: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
  """(axes that come in, axes that go out) of a projection's [L, …in, …out]."""
  into = 1 + len(PROJECTIONS[name][0])
  return whole[1:into], whole[into:]


def abstract_adapters(arch: Architecture, config: LoraConfig) -> Params:
  """The adapters as jax.ShapeDtypeStruct."""
  layers = abstract_params(arch)["layers"]
  tree: Params = {}
  for name in config.targets:
    into, out = _split(name, layers[name].shape)
    shapes = {"a": (arch.layers, *into, config.rank), "b": (arch.layers, config.rank, *out)}
    tree[name] = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()}
  return tree


def adapter_axes(arch: Architecture, config: LoraConfig) -> Params:
  """A tree like the adapters', each leaf the tuple of its axes' logical names."""
  layers = logical_axes(arch)["layers"]
  tree: Params = {}
  for name in config.targets:
    into, out = _split(name, layers[name])
    tree[name] = {"a": ("layers", *into, "rank"), "b": ("layers", "rank", *out)}
  return tree


def init_adapters(arch: Architecture, config: LoraConfig, key: jax.Array) -> Params:
  """Adapters that change nothing yet: A normal with variance 1 / in, B zero; float32."""
  tree: Params = {}
  keys = jax.random.split(key, len(config.targets))
  for (name, shapes), own in zip(abstract_adapters(arch, config).items(), keys, strict=True):
    fan_in = 1
    for size in shapes["a"].shape[1:-1]:
      fan_in *= size
    a = jax.random.normal(own, shapes["a"].shape) * fan_in**-0.5
    tree[name] = {"a": a, "b": jnp.zeros(shapes["b"].shape)}
  return tree


def attach(params: Params, adapters: Params, config: LoraConfig) -> Params:
  """The model with its adapters, as `prefill` and `extend` take it."""
  scaled = {name: {"a": t["a"], "b": config.scale * t["b"]} for name, t in adapters.items()}
  return {**params, "lora": scaled}


def merge(params: Params, adapters: Params, config: LoraConfig) -> Params:
  """One model without adapters: W + (α / r) A B, in float32."""
  layers = dict(params["layers"])
  for name, t in adapters.items():
    into, out = PROJECTIONS[name]
    change = jnp.einsum(f"l{into}r,lr{out}->l{into}{out}", t["a"], t["b"])
    layers[name] = layers[name].astype(jnp.float32) + config.scale * change
  return {**params, "layers": layers}


class _Merged:
  """A stacked projection with its adapters, a layer at a time, in host memory."""

  def __init__(self, name: str, matrix: jax.Array, adapters: Params, scale: float):
    self.letters, self.matrix = PROJECTIONS[name], matrix
    self.adapters, self.scale = adapters, scale

  def __getitem__(self, layer: int) -> np.ndarray:
    into, out = self.letters
    a, b = (np.asarray(self.adapters[key][layer], np.float32) for key in ("a", "b"))
    change = np.einsum(f"{into}r,r{out}->{into}{out}", a, b)
    return np.asarray(self.matrix[layer], np.float32) + np.float32(self.scale) * change


def merged_on_host(params: Params, adapters: Params, config: LoraConfig) -> Params:
  """As `merge`, for `hf.save_params`: a layer is merged when it is asked for, so it takes no memory
  of the devices'."""
  layers = dict(params["layers"])
  for name, own in adapters.items():
    layers[name] = _Merged(name, layers[name], own, config.scale)
  return {**params, "layers": layers}


def count(arch: Architecture, config: LoraConfig) -> int:
  """Number of adapters' parameters."""
  return sum(x.size for x in jax.tree.leaves(abstract_adapters(arch, config)))
