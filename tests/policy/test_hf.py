"""Hugging Face directories: out and in again, bit by bit; every misfit listed."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fadejax.policy import hf


def write(directory, arch, params):
  (directory / "config.json").write_text(json.dumps(hf.config_json(arch, {"eos_token_id": 1})))
  hf.save_params(directory, arch, params)


def put(_path, value):
  return jnp.asarray(value)


def test_out_and_in_again_is_bit_equal(policy, tmp_path):
  arch, params = policy
  write(tmp_path, arch, params)
  read = hf.read_architecture(tmp_path)
  assert read.max_positions == 32768
  assert hf.config_json(read, {}) == hf.config_json(arch, {})
  again = hf.load_params(tmp_path, arch, put)
  jax.tree.map(np.testing.assert_array_equal, params, again)


def test_layout_is_the_checkpoints(llama, tmp_path):
  """q_proj maps x to head-major rows: row n·h + i is component i of head n."""
  arch, params = llama
  write(tmp_path, arch, params)
  stored = load_file(tmp_path / "model.safetensors")
  x = np.random.default_rng(0).normal(size=arch.width).astype(np.float32)
  q = np.einsum("d,dnh->nh", x, params["layers"]["q"][1])
  np.testing.assert_allclose(
    stored["model.layers.1.self_attn.q_proj.weight"] @ x, q.ravel(), rtol=1e-4
  )
  flat = np.random.default_rng(1).normal(size=arch.heads * arch.head_size).astype(np.float32)
  o = np.einsum("nh,nhd->d", flat.reshape(arch.heads, -1), params["layers"]["o"][2])
  np.testing.assert_allclose(
    stored["model.layers.2.self_attn.o_proj.weight"] @ flat, o, rtol=1e-3, atol=1e-6
  )


def test_several_files_with_an_index_and_half_precision(llama, tmp_path):
  arch, params = llama
  write(tmp_path, arch, params)
  tensors = {k: v.astype(np.float16) for k, v in load_file(tmp_path / "model.safetensors").items()}
  (tmp_path / "model.safetensors").unlink()
  names = sorted(tensors)
  files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
  for file, keys in files.items():
    save_file({k: tensors[k] for k in keys}, tmp_path / file)
  index = {"weight_map": {k: file for file, keys in files.items() for k in keys}}
  (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
  again = hf.load_params(tmp_path, arch, put)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6), params, again)
  assert {x.dtype for x in jax.tree.leaves(again)} == {jnp.dtype("float32")}


def test_all_misfits_in_one_error(llama, tmp_path):
  arch, params = llama
  write(tmp_path, arch, params)
  tensors = load_file(tmp_path / "model.safetensors")
  del tensors["model.layers.0.mlp.up_proj.weight"]
  tensors["model.norm.weight"] = np.ones(7, np.float32)
  tensors["surprise"] = np.ones(1, np.float32)
  save_file(tensors, tmp_path / "model.safetensors")
  with pytest.raises(ValueError) as error:
    hf.load_params(tmp_path, arch, put)
  for part in (
    "missing: model.layers.0.mlp.up_proj.weight",
    "maps nowhere: surprise",
    "shape of model.norm.weight: (7,), config.json says (32,)",
  ):
    assert part in str(error.value)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"rms_norm_eps": None}, "lacks rms_norm_eps"),
    ({"model_type": "gpt2"}, "model_type 'gpt2' is not one of llama, qwen2, qwen3"),
    ({"rope_scaling": {"rope_type": "llama3"}}, "rope scaling 'llama3' is not supported"),
    ({"use_sliding_window": True, "sliding_window": 8}, "use_sliding_window is not supported"),
  ],
)
def test_what_is_not_supported_says_so(llama, tmp_path, change, message):
  arch, _ = llama
  config = {k: v for k, v in {**hf.config_json(arch, {}), **change}.items() if v is not None}
  (tmp_path / "config.json").write_text(json.dumps(config))
  with pytest.raises(ValueError, match=message):
    hf.read_architecture(tmp_path)


def test_a_damaged_file_is_named(llama, tmp_path):
  arch, params = llama
  write(tmp_path, arch, params)
  data = (tmp_path / "model.safetensors").read_bytes()
  (tmp_path / "model.safetensors").write_bytes(data[: len(data) // 2])
  with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
    hf.load_params(tmp_path, arch, put)


def test_a_missing_directory_is_named(tmp_path):
  with pytest.raises(FileNotFoundError, match="is not a Hugging Face directory"):
    hf.read_architecture(tmp_path / "nowhere")
