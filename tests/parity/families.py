"""Tiny random checkpoints of every family, as `transformers` builds, runs and saves them.

Weights are larger than a fresh model's, and no norm or bias is at its initial value, so that
attention is sharp and a wrong rotation, bias or tie moves the logits by far more than rounding.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

_LLAMA3 = dict(
  rope_type="llama3", rope_theta=5e4, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
  original_max_position_embeddings=64,
)  # fmt: skip
_YARN = dict(
  rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=32, beta_fast=4.0
)
_COMMON = dict(
  vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
  num_key_value_heads=2, max_position_embeddings=128, bos_token_id=1, eos_token_id=2,
)  # fmt: skip

# name -> (config class, its fields, dtype of the file, largest file)
FAMILIES: dict[str, tuple[Any, dict[str, Any], torch.dtype, str]] = {
  "llama2": (
    transformers.LlamaConfig,
    dict(num_key_value_heads=4, rms_norm_eps=1e-5),
    torch.float16,
    "1GB",
  ),
  "llama3.1": (
    transformers.LlamaConfig,
    dict(rope_parameters=_LLAMA3, head_dim=16, rms_norm_eps=1e-5, eos_token_id=[2, 3, 5]),
    torch.bfloat16,
    "1GB",
  ),
  "llama3.2": (
    transformers.LlamaConfig,
    dict(rope_parameters={**_LLAMA3, "factor": 32.0}, head_dim=16, tie_word_embeddings=True),
    torch.bfloat16,
    "20KB",
  ),
  "llama-linear": (
    transformers.LlamaConfig,
    dict(rope_parameters=dict(rope_type="linear", factor=2.5, rope_theta=1e4)),
    torch.float32,
    "30KB",
  ),
  "smollm2": (
    transformers.LlamaConfig,
    dict(
      hidden_size=48, num_attention_heads=3, num_key_value_heads=1, rms_norm_eps=1e-5,
      rope_parameters=dict(rope_type="default", rope_theta=1e5), tie_word_embeddings=True,
    ),
    torch.bfloat16,
    "1GB",
  ),
  "qwen2": (
    transformers.Qwen2Config,
    dict(rope_parameters=dict(rope_type="default", rope_theta=1e6), tie_word_embeddings=True),
    torch.bfloat16,
    "1GB",
  ),
  "qwen2.5-yarn": (
    transformers.Qwen2Config,
    dict(rope_parameters=_YARN, num_attention_heads=2, num_key_value_heads=1),
    torch.bfloat16,
    "20KB",
  ),
  "qwen3": (
    transformers.Qwen3Config,
    dict(
      head_dim=12, rope_parameters=dict(rope_type="default", rope_theta=1e6),
      tie_word_embeddings=True,
    ),
    torch.bfloat16,
    "1GB",
  ),
  "qwen3-yarn": (
    transformers.Qwen3Config,
    dict(head_dim=16, rope_parameters={**_YARN, "attention_factor": 1.3}),
    torch.float32,
    "60KB",
  ),
}  # fmt: skip

GREEDY = 16  # tokens
LEAD = 1e-2  # of each of them over the next best, so that rounding cannot turn one
PROMPTS = ((7, 40, 9, 33, 21, 60, 11, 5, 17, 28), (44, 13, 50))


def build(name: str, seed: int) -> Any:
  """A random model of that family, on the CPU, every value one that the file's dtype has."""
  make, fields, dtype, _ = FAMILIES[name]
  config = make(**{**_COMMON, **fields})
  config._attn_implementation = "eager"
  model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
  draw = torch.Generator().manual_seed(seed)
  with torch.no_grad():
    for key, value in model.named_parameters():
      noise = torch.randn(value.shape, generator=draw)
      if key.endswith("norm.weight"):
        value.copy_(1 + 0.2 * noise)
      elif key.endswith("bias"):
        value.copy_(0.5 * noise)
      else:
        value.copy_(1.5 * noise / value.shape[-1] ** 0.5)
      value.copy_(value.to(dtype).float())
  model.generation_config = transformers.GenerationConfig(
    bos_token_id=1, eos_token_id=config.eos_token_id, do_sample=True, temperature=0.6, top_p=0.9
  )
  return model


def build_decided(name: str, seed: int) -> tuple[Any, list[list[int]]]:
  """The first such model, from a seed on, with no near tie in its greedy tokens, and these."""
  while True:
    model = build(name, seed)
    rows = [greedy(model, prompt) for prompt in PROMPTS]
    if min(lead for _, lead in rows) > LEAD:
      return model, [row for row, _ in rows]
    seed += 1


def save(model: Any, name: str, directory: Path) -> None:
  """Writes config.json, generation_config.json and the tensors, in the family's dtype."""
  _, _, dtype, shard = FAMILIES[name]
  # A copy: a cast takes the table of frequencies along, and it would not come back the same.
  copy.deepcopy(model).to(dtype).save_pretrained(directory, max_shard_size=shard)


def load(directory: Path) -> Any:
  """What transformers makes of a directory, in float32.

  Raises:
    AssertionError: tensors that are missing, left over or of another shape.
  """
  model, told = transformers.AutoModelForCausalLM.from_pretrained(
    directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
  )
  assert not any(told.values()), told
  return model.eval()


def tokens(vocab: int, length: int = 100) -> np.ndarray:
  """A row long enough to reach every band of the rope scalings."""
  return np.random.default_rng(0).integers(0, vocab, length).astype(np.int32)


def logits(model: Any, ids: np.ndarray) -> np.ndarray:
  """f32[n, V] of one row."""
  with torch.no_grad():
    return model(torch.tensor(ids[None].tolist())).logits[0].float().numpy()


def greedy(model: Any, prompt: tuple[int, ...]) -> tuple[list[int], float]:
  """GREEDY tokens after a prompt, ends ignored, and the smallest lead of any over the next best."""
  row, lead = list(prompt), np.inf
  for _ in range(GREEDY):
    last = np.sort(logits(model, np.array(row))[-1])
    lead = min(lead, float(last[-1] - last[-2]))
    row.append(int(np.argmax(logits(model, np.array(row))[-1])))
  kept, model.generation_config = model.generation_config, transformers.GenerationConfig()
  generated = model.generate(
    torch.tensor([prompt]), max_new_tokens=GREEDY, do_sample=False, pad_token_id=0
  )
  model.generation_config = kept
  assert generated[0].tolist() == row
  return row[len(prompt) :], lead
