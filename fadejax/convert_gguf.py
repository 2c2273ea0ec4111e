"""GGUF -> Hugging Face: tensors, config, tokenizer. The command is `fadejax.convert`.

Sources: the GGUF specification, and the names that llama.cpp and transformers give to the
parameters of a Llama.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from fadejax.policy.tensor_files import write_tensors

# GGUF tensor name -> Hugging Face tensor name; {i} is the layer.
TENSORS = {
  "token_embd.weight": "model.embed_tokens.weight",
  "output_norm.weight": "model.norm.weight",
  "output.weight": "lm_head.weight",
  "blk.{i}.attn_norm.weight": "model.layers.{i}.input_layernorm.weight",
  "blk.{i}.attn_q.weight": "model.layers.{i}.self_attn.q_proj.weight",
  "blk.{i}.attn_k.weight": "model.layers.{i}.self_attn.k_proj.weight",
  "blk.{i}.attn_v.weight": "model.layers.{i}.self_attn.v_proj.weight",
  "blk.{i}.attn_output.weight": "model.layers.{i}.self_attn.o_proj.weight",
  "blk.{i}.ffn_norm.weight": "model.layers.{i}.post_attention_layernorm.weight",
  "blk.{i}.ffn_gate.weight": "model.layers.{i}.mlp.gate_proj.weight",
  "blk.{i}.ffn_up.weight": "model.layers.{i}.mlp.up_proj.weight",
  "blk.{i}.ffn_down.weight": "model.layers.{i}.mlp.down_proj.weight",
}
OPTIONAL = {"output.weight"}  # absent where the head is tied to the embedding

CONTROL, USER_DEFINED = 3, 4  # tokenizer.ggml.token_type


class ConvertError(ValueError):
  """The source cannot be converted, or the destination holds something else."""


@dataclasses.dataclass(frozen=True)
class Metadata:
  """The key-value part of a GGUF file, with the file's name for error messages."""

  path: Path
  values: Mapping[str, Any]

  def get(self, key: str) -> Any:
    """Returns the value of a required key; ConvertError names the file and key if absent."""
    if key not in self.values:
      raise ConvertError(f"{self.path}: the GGUF metadata has no {key!r}")
    return self.values[key]


def read_gguf(path: Path) -> tuple[Metadata, list[gguf.ReaderTensor]]:
  """Opens a GGUF file (memory-mapped): its metadata and its tensors, still quantised."""
  if not path.is_file():
    raise ConvertError(f"{path}: no such file")
  try:
    reader = gguf.GGUFReader(path)
    values = {key: field.contents() for key, field in reader.fields.items()}
  except (ValueError, IndexError, KeyError, OverflowError) as error:
    raise ConvertError(f"{path}: not a GGUF file, or a truncated one ({error})") from error
  return Metadata(path, values), list(reader.tensors)


def model_config(meta: Metadata, *, tied: bool, dtype: str) -> dict[str, Any]:
  """config.json of a LlamaForCausalLM, from GGUF metadata.

  Raises:
    ConvertError: an architecture or RoPE form that this converter does not know.
  """
  architecture = meta.get("general.architecture")
  if architecture != "llama":
    raise ConvertError(f"{meta.path}: architecture {architecture!r}; only 'llama' is supported")
  scaling = meta.values.get("llama.rope.scaling.type", "none")
  if scaling != "none":
    raise ConvertError(f"{meta.path}: llama.rope.scaling.type {scaling!r} is not supported")
  heads = meta.get("llama.attention.head_count")
  width = meta.get("llama.embedding_length")
  head_dim = meta.values.get("llama.attention.key_length", width // heads)
  rotated = meta.values.get("llama.rope.dimension_count", head_dim)
  if rotated != head_dim:
    raise ConvertError(
      f"{meta.path}: llama.rope.dimension_count {rotated} is not the head size {head_dim}"
    )
  return {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": len(meta.get("tokenizer.ggml.tokens")),
    "hidden_size": width,
    "intermediate_size": meta.get("llama.feed_forward_length"),
    "num_hidden_layers": meta.get("llama.block_count"),
    "num_attention_heads": heads,
    "num_key_value_heads": meta.values.get("llama.attention.head_count_kv", heads),
    "head_dim": head_dim,
    "max_position_embeddings": meta.get("llama.context_length"),
    "rms_norm_eps": _shortest(meta.get("llama.attention.layer_norm_rms_epsilon")),
    "rope_theta": _shortest(meta.values.get("llama.rope.freq_base", 10000.0)),
    "rope_scaling": None,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": tied,
    **special_ids(meta),
    "torch_dtype": dtype,
  }


def _shortest(value: float) -> float:
  """A float32 of the metadata as the decimal it was written as (1e-5, not 9.9999997e-06)."""
  return float(str(np.float32(value)))


def special_ids(meta: Metadata) -> dict[str, int | None]:
  """{"bos_token_id": …, "eos_token_id": …, "pad_token_id": …} for config.json.

  Without a padding token it is the eos (masks come from lengths); without a bos it is None.

  Raises:
    ConvertError: no eos, or an id outside the vocabulary.
  """
  eos = meta.get("tokenizer.ggml.eos_token_id")
  ids = {
    "bos_token_id": meta.values.get("tokenizer.ggml.bos_token_id"),
    "eos_token_id": eos,
    "pad_token_id": meta.values.get("tokenizer.ggml.padding_token_id", eos),
  }
  size = len(meta.get("tokenizer.ggml.tokens"))
  outside = {name: i for name, i in ids.items() if i is not None and i >= size}
  if outside:
    raise ConvertError(f"{meta.path}: {outside} outside the vocabulary of {size} tokens")
  return ids


def expected_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
  """GGUF tensor name -> shape (out, in) that `config` asks for, tied head included."""
  width, hidden = config["hidden_size"], config["intermediate_size"]
  queries = config["num_attention_heads"] * config["head_dim"]
  keys = config["num_key_value_heads"] * config["head_dim"]
  shapes: dict[str, tuple[int, ...]] = {
    "token_embd.weight": (config["vocab_size"], width),
    "output_norm.weight": (width,),
    "output.weight": (config["vocab_size"], width),
    "attn_norm.weight": (width,),
    "attn_q.weight": (queries, width),
    "attn_k.weight": (keys, width),
    "attn_v.weight": (keys, width),
    "attn_output.weight": (width, queries),
    "ffn_norm.weight": (width,),
    "ffn_gate.weight": (hidden, width),
    "ffn_up.weight": (hidden, width),
    "ffn_down.weight": (width, hidden),
  }
  out: dict[str, tuple[int, ...]] = {}
  for name in TENSORS:
    layers = range(config["num_hidden_layers"]) if "{i}" in name else [0]
    for i in layers:
      out[name.format(i=i)] = shapes[name.removeprefix("blk.{i}.")]
  return out


def check_tensors(
  meta: Metadata, found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]
) -> None:
  """Every tensor maps somewhere and has its shape, or one ConvertError lists all that do not.

  Args:
    meta: for the file's name.
    found: GGUF tensor name -> shape (out, in), as in the file.
    expected: the same, as `expected_shapes` wants it.
  """
  faults = [f"{name}: maps to no Llama parameter" for name in found if name not in expected]
  faults += [f"{name}: missing" for name in expected if name not in found and name not in OPTIONAL]
  faults += [
    f"{name}: shape {found[name]}, expected {shape}"
    for name, shape in expected.items()
    if name in found and found[name] != shape
  ]
  if faults:
    raise ConvertError(f"{meta.path}: tensors do not fit:\n  " + "\n  ".join(faults))


def hf_name(name: str) -> str:
  """The Hugging Face name of a GGUF tensor, e.g. blk.3.attn_q.weight -> …layers.3….q_proj…"""
  layer = re.match(r"blk\.(\d+)\.", name)
  if layer is None:
    return TENSORS[name]
  return TENSORS[name.replace(layer[0], "blk.{i}.", 1)].format(i=layer[1])


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
  """Undoes GGUF's row order of q and k: interleaved rotary pairs back to two halves a head.

  GGUF stores row 2·i + s of a head where Hugging Face has row s·(h/2) + i, s in {0, 1}.

  Args:
    weight: [heads · h, D].
    heads: number of query heads for q, of key-value heads for k.

  Returns:
    [heads · h, D].
  """
  rows, width = weight.shape
  split = weight.reshape(heads, rows // heads // 2, 2, width)
  return split.swapaxes(1, 2).reshape(rows, width)


def _tensor_shape(tensor: gguf.ReaderTensor) -> tuple[int, ...]:
  return tuple(int(n) for n in reversed(tensor.shape))  # GGUF lists the fastest axis first


def _pre_tokenizer(meta: Metadata) -> pre_tokenizers.PreTokenizer:
  """The pre-tokenizer that the metadata names; an unknown one is an error, never a guess."""
  byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
  digits = pre_tokenizers.Digits(individual_digits=True)
  table = {"smollm": pre_tokenizers.Sequence([digits, byte_level]), "gpt-2": byte_level}
  model, name = meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.pre")
  if model != "gpt2" or name not in table:
    raise ConvertError(
      f"{meta.path}: tokenizer {model!r} with pre-tokenizer {name!r}; supported: 'gpt2' with "
      f"{sorted(table)}"
    )
  return table[name]


def build_tokenizer(meta: Metadata) -> tokenizers.Tokenizer:
  """The byte-level BPE of the metadata, as `tokenizers` runs it and tokenizer.json stores it.

  A byte that the vocabulary lacks becomes the unknown token instead of vanishing.
  """
  tokens = meta.get("tokenizer.ggml.tokens")
  kinds = meta.get("tokenizer.ggml.token_type")
  if meta.values.get("tokenizer.ggml.add_space_prefix", False):
    raise ConvertError(f"{meta.path}: tokenizer.ggml.add_space_prefix is not supported")
  merges = [tuple(merge.split(" ")) for merge in meta.get("tokenizer.ggml.merges")]
  unknown = meta.values.get("tokenizer.ggml.unknown_token_id")
  tokenizer = tokenizers.Tokenizer(
    models.BPE(
      vocab={token: i for i, token in enumerate(tokens)},
      merges=merges,
      unk_token=None if unknown is None else tokens[unknown],
    )
  )
  tokenizer.pre_tokenizer = _pre_tokenizer(meta)
  tokenizer.decoder = decoders.ByteLevel()
  for kind, special in ((CONTROL, True), (USER_DEFINED, False)):
    added = [
      tokenizers.AddedToken(token, special=special, normalized=False)
      for token, k in zip(tokens, kinds, strict=True)
      if k == kind
    ]
    tokenizer.add_special_tokens(added) if special else tokenizer.add_tokens(added)
  if tokenizer.get_vocab_size() != len(tokens):
    raise ConvertError(f"{meta.path}: tokenizer.ggml.tokens names a token twice")
  return tokenizer


def tokenizer_config(meta: Metadata) -> dict[str, Any]:
  """tokenizer_config.json: special tokens by text, and the chat template if there is one."""
  tokens = meta.get("tokenizer.ggml.tokens")
  ids = special_ids(meta)
  config: dict[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "add_bos_token": bool(meta.values.get("tokenizer.ggml.add_bos_token", False)),
    "add_prefix_space": False,
    "clean_up_tokenization_spaces": False,
    "model_max_length": meta.get("llama.context_length"),
  }
  ids["unk_token_id"] = meta.values.get("tokenizer.ggml.unknown_token_id")
  config |= {name.removesuffix("_id"): tokens[i] for name, i in ids.items() if i is not None}
  if "tokenizer.chat_template" in meta.values:
    config["chat_template"] = meta.values["tokenizer.chat_template"]
  return config


def write_hf_directory(source: Path, directory: Path, dtype: str) -> tuple[int, int]:
  """Converts one GGUF file into an existing empty directory.

  Args:
    source: the GGUF file.
    directory: gets the six files of a Hugging Face model.
    dtype: of the stored parameters, a key of DTYPES.

  Returns:
    Number of tensors, number of parameters.

  Raises:
    ConvertError: naming the file and everything in it that does not fit.
  """
  meta, tensors = read_gguf(source)
  by_name = {tensor.name: tensor for tensor in tensors}
  config = model_config(meta, tied="output.weight" not in by_name, dtype=dtype)
  expected = expected_shapes(config)
  check_tensors(meta, {n: _tensor_shape(t) for n, t in by_name.items()}, expected)
  # Before the tensors, so that what cannot be converted fails at once.
  tokenizer, settings = build_tokenizer(meta), tokenizer_config(meta)
  heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}

  def arrays() -> Iterator[np.ndarray]:
    for name, tensor in by_name.items():
      try:
        array = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
      except NotImplementedError as error:
        raise ConvertError(f"{source}: {name}: {error}") from error
      part = name.split(".")[-2]
      yield unpermute(array, heads[part]) if part in heads else array

  shapes = {hf_name(name): expected[name] for name in by_name}
  write_tensors(directory, shapes, arrays(), dtype)
  tokenizer.save(str(directory / "tokenizer.json"))
  names = ("bos_token", "eos_token", "pad_token", "unk_token")
  special_map = {name: settings[name] for name in names if name in settings}
  for file, content in {
    "config.json": config,
    "generation_config.json": special_ids(meta),
    "tokenizer_config.json": settings,
    "special_tokens_map.json": special_map,
  }.items():
    (directory / file).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
  return len(shapes), sum(int(np.prod(shape)) for shape in shapes.values())
