"""Hugging Face directories in and out: config.json and model.safetensors ⇄ parameters.

One table maps our parameters to the checkpoint's tensors. Checkpoints store a matrix as
[out, in]; ours are [in, out], with heads split, and stacked over layers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy, which safetensors needs)
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from fadejax.policy.model import Architecture, Params, abstract_params

MODEL_TYPES = ("llama", "qwen2", "qwen3")

# Ours → name inside `model.layers.{i}.`; how a tensor is laid out follows from its kind.
_LAYER_NAMES = {
  "attention_norm": "input_layernorm.weight",
  "q": "self_attn.q_proj.weight",
  "k": "self_attn.k_proj.weight",
  "v": "self_attn.v_proj.weight",
  "o": "self_attn.o_proj.weight",
  "q_bias": "self_attn.q_proj.bias",
  "k_bias": "self_attn.k_proj.bias",
  "v_bias": "self_attn.v_proj.bias",
  "q_norm": "self_attn.q_norm.weight",
  "k_norm": "self_attn.k_norm.weight",
  "ffn_norm": "post_attention_layernorm.weight",
  "gate": "mlp.gate_proj.weight",
  "up": "mlp.up_proj.weight",
  "down": "mlp.down_proj.weight",
}
_TOP_NAMES = {
  "embedding": "model.embed_tokens.weight",
  "norm": "model.norm.weight",
  "head": "lm_head.weight",
}
_TRANSPOSED = ("q", "k", "v", "o", "gate", "up", "down")


def read_architecture(directory: str | Path) -> Architecture:
  """The architecture that a directory's config.json describes.

  Raises:
    ValueError: a model type or a RoPE scaling that is not supported; names the field.
    FileNotFoundError: there is no config.json.
  """
  path = Path(directory) / "config.json"
  if not path.exists():
    raise FileNotFoundError(f"{path} does not exist: {directory} is not a Hugging Face directory")
  config = json.loads(path.read_text())
  kind = config.get("model_type")
  if kind not in MODEL_TYPES:
    raise ValueError(f"{path}: model_type {kind!r} is not one of {', '.join(MODEL_TYPES)}")
  rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
  scaling = rope.get("rope_type", rope.get("type", "default"))
  if scaling != "default":
    raise ValueError(f"{path}: rope scaling {scaling!r} is not supported")
  window = config.get("sliding_window") if config.get("use_sliding_window") else None
  if window is not None:
    raise ValueError(f"{path}: use_sliding_window is not supported")
  if config.get("attention_bias") and kind != "qwen2":
    raise ValueError(f"{path}: attention_bias is not supported for {kind}")
  needed = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
    "rms_norm_eps",
  )  # fmt: skip
  missing = [name for name in needed if name not in config]
  if missing:
    raise ValueError(f"{path} lacks {', '.join(missing)}")
  heads = config["num_attention_heads"]
  return Architecture(
    vocab_size=config["vocab_size"],
    width=config["hidden_size"],
    layers=config["num_hidden_layers"],
    heads=heads,
    kv_heads=config.get("num_key_value_heads", heads),
    head_size=config.get("head_dim") or config["hidden_size"] // heads,
    ffn=config["intermediate_size"],
    rope_theta=float(rope.get("rope_theta", config.get("rope_theta", 10_000.0))),
    norm_eps=config["rms_norm_eps"],
    qkv_bias=kind == "qwen2",
    qk_norm=kind == "qwen3",
    tied_head=config.get("tie_word_embeddings", False),
    max_positions=config.get("max_position_embeddings", 0),
  )


def _names(arch: Architecture) -> Iterator[tuple[tuple[str, ...], int | None, str]]:
  """(path of our parameter, layer or None, checkpoint name), for every tensor."""
  shapes = abstract_params(arch)
  for key in shapes:
    if key != "layers":
      yield (key,), None, _TOP_NAMES[key]
  for key in shapes["layers"]:
    for i in range(arch.layers):
      yield ("layers", key), i, f"model.layers.{i}.{_LAYER_NAMES[key]}"


def _checkpoint_shape(path: tuple[str, ...], shape: tuple[int, ...], arch: Architecture) -> tuple:
  """Shape of the checkpoint's tensor for one layer of ours (`shape` without the layer axis)."""
  if path[-1] in _TRANSPOSED:
    rows = shape[-1] if path[-1] in ("o", "down") else int(np.prod(shape[1:]))
    return rows, int(np.prod(shape)) // rows
  if path[-1].endswith("_bias"):
    return (int(np.prod(shape)),)
  return shape


def _open(directory: Path) -> dict[str, Any]:
  """Checkpoint name → open safetensors file that holds it."""
  index = directory / "model.safetensors.index.json"
  if index.exists():
    files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
  elif (directory / "model.safetensors").exists():
    files = ["model.safetensors"]
  else:
    raise FileNotFoundError(
      f"{directory} has no model.safetensors and no model.safetensors.index.json"
    )
  where = {}
  for name in files:
    try:
      handle = safe_open(directory / name, framework="numpy")
    except SafetensorError as error:
      raise ValueError(f"{directory / name} is damaged: {error}") from error
    where.update(dict.fromkeys(handle.keys(), handle))
  return where


def load_params(
  directory: str | Path,
  arch: Architecture,
  put: Callable[[tuple[str, ...], np.ndarray], jax.Array],
) -> Params:
  """Reads a checkpoint as float32 parameters.

  Args:
    directory: a Hugging Face directory, one safetensors file or several with an index.
    arch: from `read_architecture`.
    put: takes a parameter's path, such as ("layers", "q"), and its NumPy value, and places
      it on the devices.

  Raises:
    ValueError: tensors that are missing, map nowhere, or have another shape; lists them all.
  """
  directory = Path(directory)
  files = _open(directory)
  shapes = abstract_params(arch)
  wanted = {name: (path, layer) for path, layer, name in _names(arch)}
  problems = [f"missing: {name}" for name in wanted if name not in files]
  ignored = re.compile(r"rotary_emb\.inv_freq$" + (r"|^lm_head\.weight$" if arch.tied_head else ""))
  problems += [
    f"maps nowhere: {name}" for name in files if name not in wanted and not ignored.search(name)
  ]
  for name, (path, _) in wanted.items():
    if name in files:
      full = _leaf(shapes, path).shape
      expected = _checkpoint_shape(path, full[1:] if path[0] == "layers" else full, arch)
      found = tuple(files[name].get_slice(name).get_shape())
      if found != expected:
        problems.append(f"shape of {name}: {found}, config.json says {expected}")
  if problems:
    raise ValueError(f"{directory} does not fit its config.json:\n  " + "\n  ".join(problems))

  params: Params = {"layers": {}}
  for path in sorted({path for path, _, _ in _names(arch)}):
    shape = _leaf(shapes, path).shape
    value = np.empty(shape, np.float32)
    for name, (other, layer) in wanted.items():
      if other == path:
        tensor = files[name].get_tensor(name).astype(np.float32)
        tensor = tensor.T if path[-1] in _TRANSPOSED else tensor
        value[... if layer is None else layer] = tensor.reshape(
          shape if layer is None else shape[1:]
        )
    _leaf(params, path[:-1])[path[-1]] = put(path, value)
  return params


def _leaf(tree: Any, path: tuple[str, ...]) -> Any:
  for key in path:
    tree = tree[key]
  return tree


def config_json(arch: Architecture, special: dict[str, Any]) -> dict[str, Any]:
  """A config.json for this architecture. `special`: bos_token_id and the like."""
  kind = "qwen3" if arch.qk_norm else "qwen2" if arch.qkv_bias else "llama"
  name = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
  return {
    "architectures": [name[kind]],
    "model_type": kind,
    "vocab_size": arch.vocab_size,
    "hidden_size": arch.width,
    "num_hidden_layers": arch.layers,
    "num_attention_heads": arch.heads,
    "num_key_value_heads": arch.kv_heads,
    "head_dim": arch.head_size,
    "intermediate_size": arch.ffn,
    "rope_theta": arch.rope_theta,
    "rms_norm_eps": arch.norm_eps,
    "hidden_act": "silu",
    "tie_word_embeddings": arch.tied_head,
    "max_position_embeddings": arch.max_positions or 32768,
    "torch_dtype": "float32",
    **special,
  }


def save_params(directory: str | Path, arch: Architecture, params: Params) -> None:
  """Writes model.safetensors (float32); the caller writes config.json and the tokenizer.

  A tied head is not written: config.json says that it is the embedding.
  """
  tensors = {}
  for path, layer, name in _names(arch):
    value = np.asarray(_leaf(params, path), np.float32)
    full = value if layer is None else value[layer]
    shape = _checkpoint_shape(path, full.shape, arch)
    if path[-1] in _TRANSPOSED:
      tensors[name] = np.ascontiguousarray(full.reshape(shape[::-1]).T)
    else:
      tensors[name] = np.ascontiguousarray(full.reshape(shape))
  save_file(tensors, Path(directory) / "model.safetensors", metadata={"format": "pt"})
