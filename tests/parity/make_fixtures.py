"""Makes tests/policy/fixtures: `make parity` sets up the environment that this needs, then

    .venv-parity/bin/python tests/parity/make_fixtures.py

Every folder is a tiny random checkpoint that transformers wrote, with its logits and greedy
tokens in expected.npz. rope.json has the frequencies of published models' configs.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import families
import numpy as np
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

OUT = Path(__file__).resolve().parent.parent / "policy" / "fixtures"

# As published, in the spelling of their day.
ROPE = {
  "llama-3.1-8b": dict(
    hidden_size=4096, num_attention_heads=32, max_position_embeddings=131072, rope_theta=500000.0,
    rope_scaling=dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                      original_max_position_embeddings=8192),
  ),
  "llama-3.2-1b": dict(
    hidden_size=2048, num_attention_heads=32, max_position_embeddings=131072, rope_theta=500000.0,
    rope_scaling=dict(rope_type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0,
                      original_max_position_embeddings=8192),
  ),
  "qwen2.5-7b-yarn": dict(
    hidden_size=3584, num_attention_heads=28, max_position_embeddings=32768, rope_theta=1000000.0,
    rope_scaling=dict(type="yarn", factor=4.0, original_max_position_embeddings=32768),
  ),
  "yarn-all-fields": dict(
    hidden_size=512, num_attention_heads=4, max_position_embeddings=8192, rope_theta=10000.0,
    rope_scaling=dict(rope_type="yarn", factor=16.0, original_max_position_embeddings=4096,
                      beta_fast=24.0, beta_slow=2.0, mscale=0.7, mscale_all_dim=0.4,
                      truncate=False),
  ),
  "vicuna-16k": dict(
    hidden_size=4096, num_attention_heads=32, max_position_embeddings=4096, rope_theta=10000.0,
    rope_scaling=dict(type="linear", factor=4.0),
  ),
  "smollm2-135m": dict(
    hidden_size=576, num_attention_heads=9, max_position_embeddings=8192, rope_theta=100000.0,
    rope_scaling=None,
  ),
}  # fmt: skip


def checkpoint(name: str) -> None:
  """One folder."""
  model, rows = families.build_decided(name, 0)
  families.save(model, name, OUT / name)
  model = families.load(OUT / name)
  ids = families.tokens(model.config.vocab_size)
  np.savez(
    OUT / name / "expected.npz",
    ids=ids,
    logits=families.logits(model, ids),
    greedy=np.array(rows, np.int32),
  )


def rope() -> dict:
  """Name -> the fields of its config.json, frequencies f32[h/2] and the stretch of cos and sin."""
  found = {}
  for name, fields in ROPE.items():
    config = transformers.LlamaConfig(**json.loads(json.dumps(fields)))
    embedding = LlamaRotaryEmbedding(config)
    found[name] = {
      "config": fields,
      "frequencies": [float(x) for x in embedding.inv_freq],
      "stretch": embedding.attention_scaling,
    }
  return found


def main() -> None:
  torch.set_num_threads(1)
  shutil.rmtree(OUT, ignore_errors=True)
  for name in families.FAMILIES:
    checkpoint(name)
  prompts = {"prompts": families.PROMPTS, "rope": rope()}
  (OUT / "common.json").write_text(json.dumps(prompts, indent=1) + "\n")
  size = sum(path.stat().st_size for path in OUT.rglob("*") if path.is_file())
  print(f"{size:,} bytes by transformers {transformers.__version__}, torch {torch.__version__}")


if __name__ == "__main__":
  main()
