"""Architectures by name; `vocab_size` comes from the tokenizer."""

from __future__ import annotations

import difflib
from typing import Any

from fadejax.policy.model import Architecture

_TINY = dict(width=64, layers=3, heads=4, kv_heads=2, head_size=16, ffn=192)

PRESETS: dict[str, dict[str, Any]] = {
  # 0.2M parameters with a character vocabulary: Countdown on a laptop.
  "tiny": {**_TINY},
  # A tenth of it, for tests.
  "nano": dict(width=32, layers=2, heads=2, kv_heads=1, head_size=16, ffn=64),
  "smollm2-135m": dict(
    width=576, layers=30, heads=9, kv_heads=3, head_size=64, ffn=1536, rope_theta=1e5,
    tied_head=True,
  ),
  "qwen2.5-0.5b": dict(
    width=896, layers=24, heads=14, kv_heads=2, head_size=64, ffn=4864, rope_theta=1e6,
    norm_eps=1e-6, qkv_bias=True, tied_head=True,
  ),
  "qwen2.5-7b": dict(
    width=3584, layers=28, heads=28, kv_heads=4, head_size=128, ffn=18944, rope_theta=1e6,
    norm_eps=1e-6, qkv_bias=True,
  ),
  "qwen3-0.6b": dict(
    width=1024, layers=28, heads=16, kv_heads=8, head_size=128, ffn=3072, rope_theta=1e6,
    norm_eps=1e-6, qk_norm=True, tied_head=True,
  ),
}  # fmt: skip


def preset(name: str, vocab_size: int, overrides: dict[str, Any] | None = None) -> Architecture:
  """The architecture of that name.

  Raises:
    ValueError: no such preset (with the nearest one), or an override that is no field of
      Architecture.
  """
  if name not in PRESETS:
    near = difflib.get_close_matches(name, PRESETS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"config.model.preset: {name!r} is not one of {', '.join(PRESETS)}{hint}")
  fields = {**PRESETS[name], **(overrides or {})}
  try:
    return Architecture(vocab_size=vocab_size, **fields)
  except TypeError as error:
    raise ValueError(f"config.model.overrides: {error}") from error
