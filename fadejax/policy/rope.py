"""Rotary position embedding: plain, and scaled for contexts longer than a model was trained on.

Component pair i of a head of size h turns by position × θ^(-2i/h). A scaling multiplies each
pair's frequency by a constant, and may stretch cosine and sine; it costs nothing per token.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

KINDS = ("linear", "llama3", "yarn")


@dataclasses.dataclass(frozen=True)
class RopeScaling:
  """How frequencies are changed; `config.json`'s rope_scaling by other names.

  A frequency's wavelength is 2π / frequency, in positions. What is short against the context of
  pretraining stays, what is long is divided by `factor`, and kinds differ in between.
  """

  kind: str  # one of KINDS
  factor: float
  original_positions: int = 0  # context of pretraining; llama3 and yarn
  low_factor: float = 1.0  # llama3: wavelengths over original_positions / low_factor are divided
  high_factor: float = 4.0  # llama3: those under original_positions / high_factor stay
  beta_fast: float = 32.0  # yarn: pairs that turn more often within original_positions stay
  beta_slow: float = 1.0  # yarn: pairs that turn less often are divided
  truncate: bool = True  # yarn: whether these two bounds are rounded outwards to whole pairs
  stretch: float = 1.0  # of cosine and sine, so that scores grow by its square

  def __post_init__(self) -> None:
    if self.kind not in KINDS:
      raise ValueError(f"RoPE scaling {self.kind!r} is not one of {', '.join(KINDS)}")
    if not self.factor > 0:
      raise ValueError(f"RoPE scaling {self.kind}: factor must be over 0, got {self.factor}")
    if self.kind != "linear" and self.original_positions < 1:
      raise ValueError(f"RoPE scaling {self.kind}: original_positions must be at least 1")
    if self.kind == "llama3" and not self.high_factor > self.low_factor > 0:
      raise ValueError(
        f"RoPE scaling llama3: high_factor ({self.high_factor}) must be over low_factor "
        f"({self.low_factor}), and that over 0"
      )
    if self.kind == "yarn" and not self.beta_fast > self.beta_slow > 0:
      raise ValueError(
        f"RoPE scaling yarn: beta_fast ({self.beta_fast}) must be over beta_slow "
        f"({self.beta_slow}), and that over 0"
      )

  def ratios(self, head_size: int, theta: float) -> np.ndarray:
    """What each pair's frequency is multiplied by, f64[h/2]: 1 stays, 1 / factor is divided.

    Sources: linear: arXiv:2306.15595. llama3: the reference code of Llama 3.1. yarn:
    arXiv:2309.00071, §3.2.
    """
    pair = np.arange(head_size // 2)
    if self.kind == "linear":
      kept = np.zeros(head_size // 2)
    elif self.kind == "llama3":
      turns = self.original_positions * theta ** (-2 * pair / head_size) / (2 * math.pi)
      kept = np.clip((turns - self.low_factor) / (self.high_factor - self.low_factor), 0, 1)
    else:
      low, high = self._yarn_bounds(head_size, theta)
      kept = 1 - np.clip((pair - low) / (high - low), 0, 1)
    return kept + (1 - kept) / self.factor

  def _yarn_bounds(self, head_size: int, theta: float) -> tuple[float, float]:
    """The pairs between which yarn's ramp runs."""

    def pair_that_turns(often: float) -> float:
      length = self.original_positions / (often * 2 * math.pi)
      return head_size * math.log(length) / (2 * math.log(theta))

    low, high = pair_that_turns(self.beta_fast), pair_that_turns(self.beta_slow)
    if self.truncate:
      low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_size - 1)
    return low, high + 0.001 * (low == high)  # a step, as a very steep ramp


def yarn_stretch(factor: float, scale: float = 1.0) -> float:
  """The stretch that yarn's authors recommend, 0.1 · scale · ln(factor) + 1, 1 up to factor 1.

  Source: arXiv:2309.00071, equation 22; `scale` is DeepSeek's mscale.
  """
  return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0


def rope_angles(
  positions: jax.Array, head_size: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[jax.Array, jax.Array]:
  """cos and sin, f32[..., n, 1, h/2], of positions i32[..., n]; stretched where scaling says so."""
  frequency = theta ** (-jnp.arange(0, head_size, 2, dtype=jnp.float32) / head_size)
  if scaling is not None:
    frequency = frequency * jnp.asarray(scaling.ratios(head_size, theta), jnp.float32)
  frequency = frequency.reshape((1,) * positions.ndim + frequency.shape)
  angle = positions[..., None].astype(jnp.float32) * frequency
  cos, sin = jnp.cos(angle)[..., None, :], jnp.sin(angle)[..., None, :]
  if scaling is not None and scaling.stretch != 1.0:
    cos, sin = cos * scaling.stretch, sin * scaling.stretch
  return cos, sin


def rotate(x: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
  """RoPE on x[..., n, heads, h], halves paired as Hugging Face checkpoints have them."""
  cos, sin = rope
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
