"""Checkpoints that transformers wrote: its logits, its greedy tokens, and out and in again.

tests/parity/make_fixtures.py made them; `make parity` does the same against transformers itself.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from fadejax.arrays import PromptBatch
from fadejax.data import tokenizer as tokenizers
from fadejax.policy import hf, model, sampler
from fadejax.train import ends, setup

FIXTURES = Path(__file__).parent / "fixtures"
FAMILIES = sorted(path.name for path in FIXTURES.iterdir() if path.is_dir())
PROMPTS = json.loads((FIXTURES / "common.json").read_text())["prompts"]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, one_device):
  """(directory, architecture, parameters, what transformers said)."""
  directory = FIXTURES / request.param
  arch = hf.read_architecture(directory)
  params = hf.load_params(directory, arch, one_device)
  return directory, arch, params, np.load(directory / "expected.npz")


@functools.partial(jax.jit, static_argnames=("arch", "layout", "split"))
def row_logits(arch, params, ids, layout, split):
  """Logits [n - split + 1, V] of one row, its first `split` tokens read as the prompt."""
  lengths = jnp.array([split])
  prefix, last = model.prefill(arch, params, ids[None, :split], lengths, layout=layout)
  hidden, _ = model.extend(arch, params, prefix, ids[None, None, split:], layout=layout)
  return jnp.concatenate([last, hidden[0, 0]]) @ model.head(params).T


@pytest.mark.parametrize("split", [1, 60])
def test_logits_are_transformers(family, one_device, split):
  _, arch, params, expected = family
  logits = row_logits(arch, params, jnp.asarray(expected["ids"]), one_device, split)
  np.testing.assert_allclose(logits, expected["logits"][split - 1 :], atol=1e-4, rtol=0)


SCALED = [name for name in FAMILIES if hf.read_architecture(FIXTURES / name).rope_scaling]


@pytest.mark.parametrize("family", SCALED, indirect=True)
def test_a_scaling_left_out_would_be_seen(family, one_device):
  _, arch, params, expected = family
  plain = dataclasses.replace(arch, rope_scaling=None)
  logits = row_logits(plain, params, jnp.asarray(expected["ids"]), one_device, 1)
  assert np.abs(logits - expected["logits"]).max() > 0.1


def test_greedy_tokens_are_transformers(family, one_device):
  """Two prompts of different lengths in one batch."""
  _, arch, params, expected = family
  lengths = np.array([len(prompt) for prompt in PROMPTS])
  tokens = np.zeros((len(PROMPTS), max(lengths)), np.int32)
  for row, prompt in zip(tokens, PROMPTS, strict=True):
    row[: len(prompt)] = prompt
  config = sampler.SamplerConfig(
    group=1, max_completion_length=expected["greedy"].shape[1], stop_ids=(), greedy=True
  )
  prompts = PromptBatch(jnp.asarray(tokens), jnp.asarray(lengths), jnp.arange(len(PROMPTS)))
  drawn = sampler.sample(
    params, prompts, jax.random.key(0), arch=arch, config=config, layout=one_device
  )
  np.testing.assert_array_equal(drawn.tokens[:, 0], expected["greedy"])


def test_export_and_reload_is_bit_equal(family, one_device, tmp_path):
  directory, arch, params, _ = family
  hf.save_params(tmp_path, arch, params, file_bytes=30_000)
  source = hf.read_config(directory)
  (tmp_path / "config.json").write_text(json.dumps(hf.config_json(arch, {}, source)))
  assert hf.read_config(tmp_path) == {**source, "dtype": "float32"}
  assert hf.read_architecture(tmp_path) == arch
  again = hf.load_params(tmp_path, arch, one_device)
  jax.tree.map(np.testing.assert_array_equal, params, again)


def test_export_in_the_sources_dtype_is_the_source(family, tmp_path):
  """Tensor by tensor, bit by bit: names, shapes, dtype and values."""
  directory, arch, params, _ = family
  hf.save_params(tmp_path, arch, params, dtype=hf.read_config(directory)["dtype"])
  there = {}
  for path in directory.glob("*.safetensors"):
    there |= load_file(path)
  written = load_file(tmp_path / "model.safetensors")
  assert written.keys() == there.keys() and ("lm_head.weight" in there) != arch.tied_head
  for name, value in there.items():
    assert written[name].dtype == value.dtype
    np.testing.assert_array_equal(written[name], value, err_msg=name)


def test_a_run_exports_what_it_came_with(family, one_device, tmp_path):
  """config.json but for the dtype, generation settings, and the tokenizer's files as they were."""
  directory, arch, params, _ = family
  source = tmp_path / "source"
  tokenizers.characters("".join(chr(48 + i) for i in range(61))).save(source)
  for name in ("config.json", "generation_config.json"):
    (source / name).write_bytes((directory / name).read_bytes())
  (source / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
  tokenizer = tokenizers.load(source)
  policy = setup.Policy(
    arch, tokenizer, one_device.mesh, one_device, one_device, hf.read_config(source)
  )
  out = ends.export(policy, params, tmp_path / "export")
  assert hf.read_config(out) == {**hf.read_config(source), "dtype": "float32"}
  before, after = (json.loads((d / "generation_config.json").read_text()) for d in (source, out))
  ids = {"eos_token_id", "pad_token_id"}  # with those of the tokenizer
  assert {k: v for k, v in after.items() if k not in ids} == {
    k: v for k, v in before.items() if k not in ids
  }
  stops = before["eos_token_id"] if isinstance(before["eos_token_id"], list) else [2]
  assert set(after["eos_token_id"]) == {1, *stops}
  for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
    assert (out / name).read_bytes() == (source / name).read_bytes()
  assert tokenizers.load(out).stop_ids == tokenizer.stop_ids
  again = hf.load_params(out, hf.read_architecture(out), one_device)
  jax.tree.map(np.testing.assert_array_equal, params, again)


def test_fixtures_cover_every_family_and_stay_small():
  archs = [hf.read_architecture(FIXTURES / name) for name in FAMILIES]
  assert {a.rope_scaling and a.rope_scaling.kind for a in archs} == {
    None, "linear", "llama3", "yarn",
  }  # fmt: skip
  for tied in (True, False):
    kinds = {(a.qkv_bias, a.qk_norm) for a in archs if a.tied_head is tied}
    assert kinds == {(False, False), (True, False), (False, True)}
  assert sum(p.stat().st_size for p in FIXTURES.rglob("*") if p.is_file()) < 1_000_000
