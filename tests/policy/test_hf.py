"""Hugging Face directories: out and in again, bit by bit; every misfit listed; parts read once."""

from __future__ import annotations

import dataclasses
import json
import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fadejax.policy import hf, model, sharding, tensor_files


def write(directory, arch, params, **settings):
  (directory / "config.json").write_text(json.dumps(hf.config_json(arch, {"eos_token_id": 1})))
  return hf.save_params(directory, arch, params, **settings)


def spread(data, fsdp, tensor):
  """A layout over the eight devices."""
  return sharding.make_layout(
    sharding.make_mesh(data, fsdp, tensor), sharding.TRAIN_RULES, data * fsdp, 1
  )


def test_out_and_in_again_is_bit_equal(policy, layout, tmp_path):
  arch, params = policy
  assert write(tmp_path, arch, params) == ["model.safetensors"]
  read = hf.read_architecture(tmp_path)
  assert read.max_positions == 32768
  assert hf.config_json(read, {}) == hf.config_json(arch, {})
  again = hf.load_params(tmp_path, arch, layout)
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


@pytest.mark.parametrize(
  ("name", "numpy_dtype"), [("bfloat16", ml_dtypes.bfloat16), ("float16", np.float16)]
)
def test_several_files_in_half_precision(policy, layout, tmp_path, name, numpy_dtype):
  arch, params = policy
  files = write(tmp_path, arch, params, dtype=name, file_bytes=5000)
  assert len(files) > 3 and not (tmp_path / "model.safetensors").exists()
  again = hf.load_params(tmp_path, arch, layout)
  rounded = jax.tree.map(lambda x: np.asarray(x).astype(numpy_dtype).astype(np.float32), params)
  jax.tree.map(np.testing.assert_array_equal, rounded, again)
  assert {x.dtype for x in jax.tree.leaves(again)} == {jnp.dtype("float32")}


def count_reads(monkeypatch):
  """A list that gets the bytes of every part read out of a safetensors file."""
  read: list[int] = []
  open_file = tensor_files.safe_open

  class View:
    def __init__(self, view):
      self.view, self.get_shape, self.get_dtype = view, view.get_shape, view.get_dtype

    def __getitem__(self, index):
      part = self.view[index]
      read.append(part.nbytes)
      return part

  class Handle:
    def __init__(self, *args, **kwargs):
      self.handle = open_file(*args, **kwargs)
      self.keys = self.handle.keys

    def get_slice(self, name):
      return View(self.handle.get_slice(name))

  monkeypatch.setattr(tensor_files, "safe_open", Handle)
  return read


@pytest.mark.parametrize("mesh", [(1, 2, 4), (4, 1, 2), (2, 4, 1), (8, 1, 1)])
def test_sharded_loading_reads_every_byte_once(llama, tmp_path, monkeypatch, mesh):
  """Whatever is split, and whatever several devices hold: what is read is the file, once."""
  arch, params = llama
  write(tmp_path, arch, params, file_bytes=20000)
  read = count_reads(monkeypatch)
  layout = spread(*mesh)
  again = hf.load_params(tmp_path, arch, layout)
  jax.tree.map(np.testing.assert_array_equal, params, again)
  expected = layout.tree(model.logical_axes(arch), model.abstract_params(arch))
  assert jax.tree.map(lambda x: x.sharding.spec, again) == jax.tree.map(
    lambda place: place.spec, expected
  )
  assert sum(read) == 4 * model.count_params(arch)
  # 31 ids are kept whole; the matrices of the feed-forward part are cut both ways.
  _, fsdp, tensor = mesh
  assert max(read) == 4 * max(31 * 32 // fsdp, 32 * 48 // (fsdp * tensor))


def test_a_host_reads_what_its_devices_hold(llama, tmp_path, monkeypatch):
  """Half of the eight devices hold half of what is split eight ways, and read no more."""
  arch, params = llama
  write(tmp_path, arch, params)
  read = count_reads(monkeypatch)
  layout = spread(1, 8, 1)
  tensors, _ = tensor_files.open_tensors(tmp_path)
  split = 0
  for name, path, layer, shape in hf._wanted(arch):
    axes = hf._leaf(model.logical_axes(arch), path)[0 if layer is None else 1 :]
    where = layout.sharding(axes, shape).devices_indices_map(shape)
    part = hf._once(
      lambda index, t=tensors[name], p=path, s=shape: hf._read(t, hf._groups(p), s, index, "f4"),
      shape,
    )
    before = sum(read)
    for device in jax.devices()[:4]:
      part(where[device])
    size = 4 * int(np.prod(shape))
    assert sum(read) - before == (size // 2 if "embed" in axes else size), name
    split += "embed" in axes
  assert split == 2 + 7 * arch.layers


@pytest.mark.parametrize("mesh", [(1, 8, 1), (8, 1, 1)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_holds_a_tensor_not_the_model(tmp_path, mesh, dtype):
  """Under 3.2 of the largest tensor, of which 32 layers of one matrix would be 4.

  On the CPU the embedding and the head may stay where they were read: two of the three.
  """
  arch = model.Architecture(
    vocab_size=4096, width=128, layers=32, heads=4, kv_heads=2, head_size=16, ffn=512
  )
  largest = 4 * arch.vocab_size * arch.width
  shapes = model.abstract_params(arch)
  write(tmp_path, arch, jax.tree.map(lambda s: np.ones(s.shape, np.float32), shapes), dtype=dtype)
  layout = spread(*mesh)
  hf.load_params(tmp_path, arch, layout)  # compiles
  tracemalloc.start()
  hf.load_params(tmp_path, arch, layout)
  peak = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  assert 4 * model.count_params(arch) > 15 * largest and peak < 3.2 * largest


def test_all_misfits_in_one_error(llama, layout, tmp_path):
  arch, params = llama
  write(tmp_path, arch, params)
  tensors = load_file(tmp_path / "model.safetensors")
  del tensors["model.layers.0.mlp.up_proj.weight"]
  tensors["model.norm.weight"] = np.ones(7, np.float32)
  tensors["surprise"] = np.ones(1, np.float32)
  tensors["model.layers.1.self_attn.q_proj.weight"] = np.ones((32, 32), np.int8)
  tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)  # as of old
  save_file(tensors, tmp_path / "model.safetensors")
  with pytest.raises(ValueError) as error:
    hf.load_params(tmp_path, arch, layout)
  assert str(error.value).splitlines() == [
    f"{tmp_path} does not fit its config.json:",
    "  missing: model.layers.0.mlp.up_proj.weight",
    "  dtype of model.layers.1.self_attn.q_proj.weight (in model.safetensors): I8, only F64, F32, "
    "F16, BF16 are read",
    "  shape of model.norm.weight (in model.safetensors): (7,), config.json says (32,)",
    "  maps nowhere: surprise (in model.safetensors)",
  ]


def test_a_tied_head_may_be_stored_if_it_is_the_embedding(llama, layout, tmp_path):
  arch, params = llama
  tied = dataclasses.replace(arch, tied_head=True)
  params = {key: value for key, value in params.items() if key != "head"}
  write(tmp_path, tied, params)
  tensors = load_file(tmp_path / "model.safetensors")
  assert "lm_head.weight" not in tensors
  tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
  save_file(tensors, tmp_path / "model.safetensors")
  again = hf.load_params(tmp_path, tied, layout)
  jax.tree.map(np.testing.assert_array_equal, params, again)
  tensors["lm_head.weight"][30, 31] += 1e-6
  save_file(tensors, tmp_path / "model.safetensors")
  with pytest.raises(ValueError, match=r"lm_head\.weight .* but it is not the embedding"):
    hf.load_params(tmp_path, tied, layout)


def test_index_and_files_must_agree(llama, layout, tmp_path):
  arch, params = llama
  files = write(tmp_path, arch, params, file_bytes=20000)
  path = tmp_path / "model.safetensors.index.json"
  index = json.loads(path.read_text())
  placed = index["weight_map"]
  placed["model.norm.weight"], placed["ghost"] = files[0], files[1]
  path.write_text(json.dumps(index))
  with pytest.raises(ValueError) as error:
    hf.load_params(tmp_path, arch, layout)
  for part in (
    f"model.norm.weight is in {files[-1]}, where model.safetensors.index.json does not place it",
    f"model.norm.weight is not in {files[0]}, where model.safetensors.index.json places it",
    f"ghost is not in {files[1]}, where model.safetensors.index.json places it",
    "missing: model.norm.weight",
  ):
    assert part in str(error.value)


def test_damaged_and_missing_files_are_all_named(llama, layout, tmp_path):
  arch, params = llama
  files = write(tmp_path, arch, params, file_bytes=20000)
  data = (tmp_path / files[0]).read_bytes()
  (tmp_path / files[0]).write_bytes(data[: len(data) // 2])
  (tmp_path / files[1]).unlink()
  with pytest.raises(ValueError) as error:
    hf.load_params(tmp_path, arch, layout)
  assert f"{files[0]} is damaged" in str(error.value)
  assert f"{files[1]} is missing: model.safetensors.index.json names it" in str(error.value)
  (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": 3}')
  with pytest.raises(ValueError, match=r"index\.json is damaged: no weight_map"):
    hf.load_params(tmp_path, arch, layout)
  (tmp_path / "model.safetensors.index.json").unlink()
  with pytest.raises(FileNotFoundError, match=r"no model\.safetensors and no model"):
    hf.load_params(tmp_path, arch, layout)


def test_an_export_replaces_an_older_one(llama, layout, tmp_path):
  """Files of the earlier one would be read in place of the new ones."""
  arch, params = llama
  many = write(tmp_path, arch, params, file_bytes=20000)
  doubled = jax.tree.map(lambda x: 2 * x, params)
  assert write(tmp_path, arch, doubled) == ["model.safetensors"]
  assert not any((tmp_path / file).exists() for file in many)
  jax.tree.map(np.testing.assert_array_equal, doubled, hf.load_params(tmp_path, arch, layout))
  write(tmp_path, arch, params, file_bytes=20000)
  jax.tree.map(np.testing.assert_array_equal, params, hf.load_params(tmp_path, arch, layout))


def test_files_end_at_the_limit(llama, tmp_path):
  arch, params = llama
  files = write(tmp_path, arch, params, file_bytes=20000)
  index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
  held = {file: load_file(tmp_path / file) for file in files}
  sizes = [sum(x.nbytes for x in tensors.values()) for tensors in held.values()]
  assert max(sizes) <= 20000 and sum(sizes) == index["metadata"]["total_size"]
  assert index["weight_map"] == {name: file for file, tensors in held.items() for name in tensors}
  # Full up to the first tensor of the next file.
  for i, file in enumerate(files[1:]):
    first = next(name for name, where in index["weight_map"].items() if where == file)
    assert sizes[i] + held[file][first].nbytes > 20000
  # A tensor over the limit has a file of its own.
  assert len(write(tmp_path, arch, params, file_bytes=1)) == len(index["weight_map"])
