"""transformers itself beside us: `make parity` runs this; the plain suite does not collect it.

For every family: a random checkpoint that transformers wrote, our logits and greedy tokens
against its own, then our export, which transformers must load whole and compute the same with.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers

sys.path.insert(0, str(Path(__file__).parent))
import families

from fadejax.arrays import PromptBatch
from fadejax.data import tokenizer as tokenizers
from fadejax.policy import hf, model, sampler, sharding
from fadejax.train import ends, setup

SEEDS = (1000, 2000, 3000)  # none of the fixtures'


@pytest.fixture(scope="module")
def layout():
  """Parameters over all eight devices, so that what is compared was read in parts."""
  mesh = sharding.make_mesh(1, 2, 4)
  return sharding.make_layout(mesh, sharding.TRAIN_RULES, 2, 1)


@functools.partial(jax.jit, static_argnames=("arch", "layout"))
def our_logits(arch, params, ids, layout):
  """Logits [n, V] of a row; both rows of the batch are that row."""
  rows = jnp.stack([ids, ids])
  prefix, last = model.prefill(arch, params, rows[:, :1], jnp.array([1, 1]), layout=layout)
  hidden, _ = model.extend(arch, params, prefix, rows[:, None, 1:], layout=layout)
  return jnp.concatenate([last[:1], hidden[0, 0]]) @ model.head(params).T


def our_greedy(arch, params, layout):
  lengths = np.array([len(prompt) for prompt in families.PROMPTS])
  tokens = np.zeros((len(lengths), max(lengths)), np.int32)
  for row, prompt in zip(tokens, families.PROMPTS, strict=True):
    row[: len(prompt)] = prompt
  config = sampler.SamplerConfig(
    group=1, max_completion_length=families.GREEDY, stop_ids=(), greedy=True
  )
  prompts = PromptBatch(jnp.asarray(tokens), jnp.asarray(lengths), jnp.arange(len(lengths)))
  drawn = sampler.sample(
    params, prompts, jax.random.key(0), arch=arch, config=config, layout=layout
  )
  return np.asarray(drawn.tokens[:, 0]).tolist()


def with_tokenizer(directory: Path) -> tokenizers.Tokenizer:
  """Puts a tokenizer of 64 ids into a checkpoint's directory, and loads it."""
  made = tokenizers.characters("".join(chr(48 + i) for i in range(61)))
  kept = (directory / "generation_config.json").read_bytes()
  made.save(directory)
  (directory / "generation_config.json").write_bytes(kept)
  return tokenizers.load(directory)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", families.FAMILIES)
def test_both_ways(name, seed, layout, tmp_path):
  theirs, ours = tmp_path / "theirs", tmp_path / "ours"
  built, greedy = families.build_decided(name, seed)
  families.save(built, name, theirs)
  reference = families.load(theirs)
  ids = families.tokens(reference.config.vocab_size)
  expected = families.logits(reference, ids)

  # In.
  arch = hf.read_architecture(theirs)
  params = hf.load_params(theirs, arch, layout)
  found = our_logits(arch, params, jnp.asarray(ids), layout)
  gap = float(np.abs(found - expected).max())
  print(f"\n{name}, seed {seed}: largest difference of a logit {gap:.1e}, of |logits| up to "
        f"{np.abs(expected).max():.1f}")  # fmt: skip
  assert gap < 1e-4
  assert our_greedy(arch, params, layout) == greedy

  # Out, as a run exports, and in several files.
  policy = setup.Policy(
    arch, with_tokenizer(theirs), layout.mesh, layout, layout, hf.read_config(theirs)
  )
  ends.export(policy, params, ours)
  compare(ours, reference, ids, expected)
  hf.save_params(ours, arch, params, file_bytes=30_000)
  assert (ours / "model.safetensors.index.json").exists()
  compare(ours, reference, ids, expected)
  check_generation(theirs, ours)

  # A config.json made anew, in the older spelling, as for a preset or after overrides.
  anew = hf.config_json(arch, {"bos_token_id": 1, "eos_token_id": 2})
  (ours / "config.json").write_text(json.dumps(anew))
  compare(ours, reference, ids, expected)


def compare(directory, reference, ids, expected):
  """transformers loads it with nothing missing or left over, and computes the same bits."""
  model = families.load(directory)
  there, here = dict(reference.named_parameters()), dict(model.named_parameters())
  assert there.keys() == here.keys()
  assert all(bool((there[key] == here[key]).all()) for key in there)
  tied = reference.config.tie_word_embeddings
  assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
  np.testing.assert_array_equal(families.logits(model, ids), expected)


def check_generation(theirs, ours):
  """The generation settings came along, and every id that ends a text."""
  before, after = (transformers.GenerationConfig.from_pretrained(d) for d in (theirs, ours))
  assert (after.temperature, after.top_p, after.do_sample) == (0.6, 0.9, True)
  as_set = lambda ids: set(ids if isinstance(ids, list) else [ids])  # noqa: E731
  assert as_set(before.eos_token_id) <= as_set(after.eos_token_id)
  configs = [transformers.AutoConfig.from_pretrained(d) for d in (theirs, ours)]
  assert configs[0].eos_token_id == configs[1].eos_token_id
  assert configs[0].architectures == configs[1].architectures
  assert configs[0].rope_parameters == configs[1].rope_parameters
  auto = transformers.AutoTokenizer.from_pretrained(ours)
  assert auto("0A").input_ids == tokenizers.load(theirs).encode("0A")


@pytest.mark.parametrize("name", ["llama2", "qwen2", "qwen3"])
def test_presets_export_as_models_of_their_family(name, layout, tmp_path):
  """Random parameters of ours, never seen by transformers: a run from a preset."""
  arch = dataclasses.replace(
    hf.read_architecture(Path(__file__).parent.parent / "policy" / "fixtures" / name),
    tied_head=False,
    max_positions=0,
  )
  params = jax.jit(model.init_params, static_argnums=0)(arch, jax.random.key(3))
  params = jax.tree.map(lambda x: x + 0.1 * jnp.cos(jnp.arange(x.size)).reshape(x.shape), params)
  made = tokenizers.characters("".join(chr(48 + i) for i in range(61)))
  policy = setup.Policy(arch, made, layout.mesh, layout, layout)
  model_there = families.load(ends.export(policy, params, tmp_path))
  ids = families.tokens(arch.vocab_size)
  found = our_logits(arch, params, jnp.asarray(ids), layout)
  np.testing.assert_allclose(found, families.logits(model_there, ids), atol=1e-4, rtol=0)
