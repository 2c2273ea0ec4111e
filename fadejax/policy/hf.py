"""Hugging Face checkpoints in and out: tensors ⇄ sharded parameters.

One table maps our parameters to the checkpoint's tensors. Checkpoints store a matrix as
[out, in], heads side by side, a tensor a layer; ours are [in, out], heads apart, stacked over
layers. So a part of ours is a part of theirs, and a device's part is all that is read for it.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from fadejax.policy.hf_config import config_json, read_architecture, read_config
from fadejax.policy.lora import LoraConfig
from fadejax.policy.model import Architecture, Params, abstract_params, logical_axes
from fadejax.policy.sharding import Layout
from fadejax.policy.tensor_files import (
  FILE_BYTES,
  FLOATS,
  Shape,
  Tensor,
  open_tensors,
  write_tensors,
)

__all__ = [
  "check_tensors", "config_json", "has_params", "load_params", "read_architecture", "read_config",
  "save_params",
]  # fmt: skip

# Ours -> (name in the checkpoint, which of our axes, the layer's left out, make each of its axes).
_LAYER = {
  "attention_norm": ("input_layernorm.weight", ((0,),)),
  "q": ("self_attn.q_proj.weight", ((1, 2), (0,))),
  "k": ("self_attn.k_proj.weight", ((1, 2), (0,))),
  "v": ("self_attn.v_proj.weight", ((1, 2), (0,))),
  "o": ("self_attn.o_proj.weight", ((2,), (0, 1))),
  "q_bias": ("self_attn.q_proj.bias", ((0, 1),)),
  "k_bias": ("self_attn.k_proj.bias", ((0, 1),)),
  "v_bias": ("self_attn.v_proj.bias", ((0, 1),)),
  "q_norm": ("self_attn.q_norm.weight", ((0,),)),
  "k_norm": ("self_attn.k_norm.weight", ((0,),)),
  "ffn_norm": ("post_attention_layernorm.weight", ((0,),)),
  "gate": ("mlp.gate_proj.weight", ((1,), (0,))),
  "up": ("mlp.up_proj.weight", ((1,), (0,))),
  "down": ("mlp.down_proj.weight", ((1,), (0,))),
}
_TOP = {
  "embedding": ("model.embed_tokens.weight", ((0,), (1,))),
  "norm": ("model.norm.weight", ((0,),)),
  "head": ("lm_head.weight", ((0,), (1,))),
}
_HEAD, _EMBEDDING = _TOP["head"][0], _TOP["embedding"][0]
# Tables that some old checkpoints hold; they follow from config.json.
_IGNORED = re.compile(r"rotary_emb\.inv_freq$")
_ROWS = 4096  # of a tied head compared with the embedding at a time

Key = tuple[str, ...]  # a parameter's place in the tree, such as ("layers", "q")
Groups = tuple[tuple[int, ...], ...]
Index = tuple[slice, ...]
Part = Callable[[Any], np.ndarray]  # of an Index


def _groups(path: Key) -> Groups:
  return (_LAYER if path[0] == "layers" else _TOP)[path[-1]][1]


def _name(path: Key, layer: int | None) -> str:
  """The checkpoint's name of a parameter, or of one layer of it."""
  if layer is None:
    return _TOP[path[-1]][0]
  return f"model.layers.{layer}.{_LAYER[path[-1]][0]}"


def _leaf(tree: Any, path: Key) -> Any:
  for key in path:
    tree = tree[key]
  return tree


def _wanted(arch: Architecture) -> Iterator[tuple[str, Key, int | None, Shape]]:
  """(name, path, layer or None, our shape without the layer axis) of every tensor, file order."""
  shapes = abstract_params(arch)
  top = [key for key in ("embedding", "norm", "head") if key in shapes]
  yield _name((top[0],), None), (top[0],), None, shapes[top[0]].shape
  for layer in range(arch.layers):
    for key in (key for key in _LAYER if key in shapes["layers"]):
      path = ("layers", key)
      yield _name(path, layer), path, layer, shapes["layers"][key].shape[1:]
  for key in top[1:]:
    yield _name((key,), None), (key,), None, shapes[key].shape


def _stored_shape(groups: Groups, shape: Shape) -> Shape:
  return tuple(int(np.prod([shape[axis] for axis in group])) for group in groups)


def _to_stored(value: np.ndarray, groups: Groups) -> np.ndarray:
  """A parameter (one layer of it) as the checkpoint has it."""
  order = [axis for group in groups for axis in group]
  return value.transpose(order).reshape(_stored_shape(groups, value.shape))


def _read(tensor: Tensor, groups: Groups, shape: Shape, index: Index, dtype: Any) -> np.ndarray:
  """The part `index` of a parameter of shape `shape` (no layer axis), read from its tensor.

  Reads that part alone; where heads are cut inside, whole heads.
  """
  bounds = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
  where, sizes = [], []
  for first, *others in groups:
    inner = int(np.prod([shape[axis] for axis in others], dtype=np.int64))
    where.append(slice(bounds[first][0] * inner, bounds[first][1] * inner))
    sizes += [bounds[first][1] - bounds[first][0], *(shape[axis] for axis in others)]
  order = [axis for group in groups for axis in group]
  value = tensor.view[tuple(where)].reshape(sizes).transpose(np.argsort(order))
  inside = [
    slice(None) if value.shape[axis] == stop - start else slice(start, stop)
    for axis, (start, stop) in enumerate(bounds)
  ]
  return np.ascontiguousarray(value[tuple(inside)], dtype)


def has_params(directory: str | Path) -> bool:
  """Whether a directory holds any parameters; its index alone is not one."""
  return any(Path(directory).glob("*.safetensors"))


def check_tensors(directory: Path, arch: Architecture) -> dict[str, Tensor]:
  """The tensors, none of them read, once all of them fit; ValueError lists those that do not."""
  tensors, problems = open_tensors(directory)
  wanted = {name: _stored_shape(_groups(path), shape) for name, path, _, shape in _wanted(arch)}
  problems += [f"missing: {name}" for name in wanted if name not in tensors]
  for name, tensor in tensors.items():
    where = f"{name} (in {tensor.file})"
    if name not in wanted:
      if arch.tied_head and name == _HEAD:
        problems += _tied_problems(tensors, where)
      elif not _IGNORED.search(name):
        problems.append(f"maps nowhere: {where}")
      continue
    if tensor.shape != wanted[name]:
      problems.append(f"shape of {where}: {tensor.shape}, config.json says {wanted[name]}")
    if tensor.dtype not in FLOATS:
      problems.append(f"dtype of {where}: {tensor.dtype}, only {', '.join(FLOATS)} are read")
  if problems:
    raise ValueError(f"{directory} does not fit its config.json:\n  " + "\n  ".join(problems))
  return tensors


def _tied_problems(tensors: dict[str, Tensor], where: str) -> list[str]:
  """A tied head may be stored, as long as it is the embedding."""
  head, embedding = tensors[_HEAD], tensors.get(_EMBEDDING)
  if embedding is None:
    return []  # listed as missing
  rows = head.shape[0] if head.shape == embedding.shape else 0
  blocks = [slice(i, min(i + _ROWS, rows)) for i in range(0, rows, _ROWS)]
  same = rows > 0 and all(np.array_equal(head.view[b], embedding.view[b]) for b in blocks)
  tied = "config.json says tie_word_embeddings, but it is not the embedding"
  return [] if same else [f"tied head: {where}: {tied}"]


def load_params(directory: str | Path, arch: Architecture, layout: Layout) -> Params:
  """Reads a checkpoint straight into sharded float32 parameters.

  Of every tensor a process reads the parts that its own devices hold, once each, and no other
  part; one tensor at a time, so its memory holds one, whatever the size of the model. (A part
  that is a range of columns touches the disk pages of all rows.)

  Args:
    directory: a Hugging Face directory, one safetensors file or several with an index.
    arch: from `read_architecture`.
    layout: where the parameters live.

  Raises:
    FileNotFoundError: no safetensors there.
    ValueError: damaged files; or tensors that are missing, map nowhere, or have another shape
      or no float dtype; lists them all.
  """
  directory = Path(directory)
  tensors = check_tensors(directory, arch)
  shapes, axes = abstract_params(arch), logical_axes(arch)
  params: Params = {"layers": {}}
  for name, path, layer, shape in _wanted(arch):
    leaf, names = _leaf(shapes, path), _leaf(axes, path)
    sharding = layout.sharding(names if layer is None else names[1:], shape)
    part = functools.partial(_read, tensors[name], _groups(path), shape, dtype=leaf.dtype)
    value = jax.make_array_from_callback(shape, sharding, _once(part, shape))
    tree = _leaf(params, path[:-1])
    if layer is None:
      tree[path[-1]] = value
    else:
      if layer == 0:
        whole = layout.sharding(names, leaf.shape)
        tree[path[-1]] = jnp.zeros(leaf.shape, leaf.dtype, device=whole)
      tree[path[-1]] = _set_layer(tree[path[-1]], value, layer, layout, names)
    jax.block_until_ready(tree[path[-1]])  # before the next is read: the host holds one at a time
  return params


def _once(part: Part, shape: Shape) -> Part:
  """`part`, asked only once for an index, though several devices hold it."""
  read: dict[tuple, np.ndarray] = {}

  def get(index: Index) -> np.ndarray:
    key = tuple(s.indices(size)[:2] for s, size in zip(index, shape, strict=True))
    if key not in read:
      read[key] = part(index)
    return read[key]

  return get


@functools.partial(jax.jit, static_argnames=("layout", "axes"), donate_argnums=0)
def _set_layer(
  stack: jax.Array, value: jax.Array, layer: Any, layout: Layout, axes: tuple[str, ...]
) -> jax.Array:
  """The stack with one layer replaced, in its own memory."""
  return layout.constrain(jax.lax.dynamic_update_index_in_dim(stack, value, layer, 0), *axes)


def save_params(
  directory: str | Path,
  arch: Architecture,
  params: Params,
  dtype: str = "float32",
  file_bytes: int = FILE_BYTES,
) -> list[str]:
  """Writes model.safetensors, or several files with an index; the caller writes config.json.

  A tied head is not written: config.json says that it is the embedding. Takes one tensor at a
  time from the devices.

  Args:
    directory: must exist; its older safetensors are replaced.
    arch: the architecture.
    params: its parameters, every part of them on this process's devices.
    dtype: float32 (every bit kept), bfloat16 or float16.
    file_bytes: of tensors in one file, unless a single one is larger.

  Returns:
    Names of the files, without the index.
  """
  wanted = list(_wanted(arch))
  shapes = {name: _stored_shape(_groups(path), shape) for name, path, _, shape in wanted}

  def arrays() -> Iterator[np.ndarray]:
    for _, path, layer, _ in wanted:
      value = _leaf(params, path)
      yield _to_stored(np.asarray(value if layer is None else value[layer]), _groups(path))

  return write_tensors(Path(directory), shapes, arrays(), dtype, file_bytes)


def save_adapters(
  directory: str | Path,
  arch: Architecture,
  adapters: Params,
  config: LoraConfig,
  source: Mapping[str, Any] | None = None,
) -> None:
  """Writes adapters as the library PEFT has them: adapter_config.json, adapter_model.safetensors.

  Args:
    directory: is made.
    arch: the architecture.
    adapters: of `lora.py`, on this process's devices.
    config: their rank and scale.
    source: the config.json of the model below them, for its name.
  """
  directory = Path(directory)
  directory.mkdir(parents=True, exist_ok=True)
  tensors = {}
  for name, own in adapters.items():
    module = _LAYER[name][0].removesuffix(".weight")
    for layer in range(arch.layers):
      a, b = (np.asarray(own[key][layer], np.float32) for key in ("a", "b"))
      where = f"base_model.model.model.layers.{layer}.{module}"
      tensors[f"{where}.lora_A.weight"] = np.ascontiguousarray(a.reshape(-1, config.rank).T)
      tensors[f"{where}.lora_B.weight"] = np.ascontiguousarray(b.reshape(config.rank, -1).T)
  save_file(tensors, directory / "adapter_model.safetensors", {"format": "pt"})
  facts = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": (source or {}).get("_name_or_path"),
    "r": config.rank,
    "lora_alpha": config.alpha,
    "target_modules": sorted(
      _LAYER[name][0].removesuffix(".weight").rpartition(".")[2] for name in config.targets
    ),
    "lora_dropout": 0.0,
    "bias": "none",
  }
  (directory / "adapter_config.json").write_text(json.dumps(facts, indent=2) + "\n")
