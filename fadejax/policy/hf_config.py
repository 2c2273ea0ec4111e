"""config.json of a Hugging Face directory ⇄ Architecture.

A field that would change the computation, and that the model here does not have, is an error;
so is one that is not known here, unless it is off (null, false, 0 or empty).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fadejax.policy.model import Architecture
from fadejax.policy.rope import KINDS, RopeScaling, yarn_stretch

Config = Mapping[str, Any]

# model_type -> (class in transformers, fields that have no default which fits every checkpoint)
FAMILIES = {
  "llama": ("LlamaForCausalLM", ()),
  "qwen2": ("Qwen2ForCausalLM", ("num_key_value_heads",)),
  "qwen3": ("Qwen3ForCausalLM", ("num_key_value_heads", "head_dim")),
}
_SIZES = "vocab_size hidden_size num_hidden_layers num_attention_heads intermediate_size".split()
_READ = {
  *_SIZES, "model_type", "rms_norm_eps", "num_key_value_heads", "head_dim", "tie_word_embeddings",
  "max_position_embeddings", "rope_theta", "rope_scaling", "rope_parameters", "hidden_act",
  "partial_rotary_factor", "layer_types",
}  # fmt: skip
# Change no logits: ids, dtype, training (dropout, initialisation), and how others run or sample.
_HARMLESS = set(
  """
  architectures bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id
  decoder_start_token_id tokenizer_class prefix name_or_path dtype torch_dtype use_bfloat16
  torchscript use_cache cache_implementation attn_implementation is_llama_config pretraining_tp
  initializer_range attention_dropout sliding_window max_window_layers return_dict
  output_hidden_states output_attentions tie_last_hidden_states chunk_size_feed_forward
  gradient_checkpointing is_decoder problem_type task_specific_params finetuning_task id2label
  label2id num_labels tf_legacy_loss max_length min_length max_new_tokens do_sample
  early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p
  repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
  num_return_sequences output_scores return_dict_in_generate remove_invalid_values
  """.split()
)
_HARMLESS_STARTS = ("_", "transformers", "unsloth")  # _name_or_path, transformers_version, …
_ROPE_FIELDS = {
  "default": set(),
  "linear": {"factor"},
  "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
  "yarn": {
    "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow",
    "mscale", "mscale_all_dim", "truncate",
  },
}  # fmt: skip
_ROPE_NEEDS = {"llama3": ("factor", "low_freq_factor", "high_freq_factor")}


def read_config(directory: str | Path) -> dict[str, Any]:
  """The content of a directory's config.json.

  Raises:
    FileNotFoundError: there is none.
    ValueError: it is no JSON object.
  """
  path = Path(directory) / "config.json"
  if not path.exists():
    raise FileNotFoundError(f"{path} does not exist: {directory} is not a Hugging Face directory")
  try:
    config = json.loads(path.read_text())
  except ValueError as error:
    raise ValueError(f"{path} is damaged: {error}") from error
  if not isinstance(config, dict):
    raise ValueError(f"{path} is damaged: not a JSON object")
  return config


def read_architecture(directory: str | Path) -> Architecture:
  """The architecture that a directory's config.json describes.

  Raises:
    ValueError: as `architecture_of`, or no JSON object.
    FileNotFoundError: there is no config.json.
  """
  return architecture_of(read_config(directory), str(Path(directory) / "config.json"))


def architecture_of(config: Config, where: str = "config.json") -> Architecture:
  """The architecture that the content of a config.json describes.

  Args:
    config: the content.
    where: the file, for the message.

  Raises:
    ValueError: another family, fields that are missing, or that change the computation to one
      that the model here does not do; lists them all.
  """
  kind = config.get("model_type")
  if kind not in FAMILIES:
    raise ValueError(f"{where}: model_type {kind!r} is not one of {', '.join(FAMILIES)}")
  faults = _missing(config) + _unsupported(config)
  theta, scaling, rope_faults = _rope(config)
  faults += rope_faults
  if faults:
    raise ValueError(f"{where}: " + faults[0] if len(faults) == 1 else
                     f"{where}:\n  " + "\n  ".join(faults))  # fmt: skip
  heads = config["num_attention_heads"]
  try:
    return Architecture(
      vocab_size=config["vocab_size"],
      width=config["hidden_size"],
      layers=config["num_hidden_layers"],
      heads=heads,
      kv_heads=config.get("num_key_value_heads") or heads,
      head_size=config.get("head_dim") or config["hidden_size"] // heads,
      ffn=config["intermediate_size"],
      rope_theta=theta,
      rope_scaling=scaling,
      norm_eps=config["rms_norm_eps"],
      qkv_bias=kind == "qwen2",
      qk_norm=kind == "qwen3",
      tied_head=bool(config.get("tie_word_embeddings")),
      max_positions=config.get("max_position_embeddings") or 0,
    )
  except ValueError as error:
    raise ValueError(f"{where}: {error}") from error


def _missing(config: Config) -> list[str]:
  needed = [*_SIZES, "rms_norm_eps", *FAMILIES[config["model_type"]][1]]
  lacks = [name for name in needed if config.get(name) is None]
  odd = [
    f"{name}: {config[name]!r} is not a number over 0"
    for name in needed
    if name not in lacks and not (isinstance(config[name], int | float) and config[name] > 0)
  ]
  return [f"lacks {', '.join(lacks)}"] * bool(lacks) + odd


def _unsupported(config: Config) -> list[str]:
  """A line for every field that would make the model another one than ours."""
  faults = []
  if config.get("hidden_act", "silu") not in ("silu", "swish"):
    faults.append(f"hidden_act {config['hidden_act']!r} is not supported, only 'silu'")
  if config.get("partial_rotary_factor") not in (None, 1, 1.0):
    faults.append(f"partial_rotary_factor {config['partial_rotary_factor']} is not supported")
  if set(config.get("layer_types") or ()) - {"full_attention"}:
    faults.append(f"layer_types {sorted(set(config['layer_types']))}: only 'full_attention'")
  # A Qwen2 always has these biases, on q, k and v; elsewhere the field means o as well.
  ignored = {"attention_bias"} if config["model_type"] == "qwen2" else set()
  for name, value in config.items():
    if name in _READ | _HARMLESS | ignored or name.startswith(_HARMLESS_STARTS) or not value:
      continue
    faults.append(
      f"{name}: {value!r:.60} is not supported (if the field changes no logits, remove it)"
    )
  return faults


def _rope(config: Config) -> tuple[float, RopeScaling | None, list[str]]:
  """(theta, scaling, what is wrong). Newer files say rope_parameters, older ones rope_scaling."""
  given = [config[name] for name in ("rope_parameters", "rope_scaling") if config.get(name)]
  if not all(isinstance(fields, Mapping) for fields in given):
    return 0.0, None, ["rope_parameters and rope_scaling must be objects, or null"]
  spellings = [_rope_fields(fields) for fields in given]
  thetas = {x for x in (config.get("rope_theta"), *(s.pop("rope_theta", None) for s in spellings))
            if x is not None}  # fmt: skip
  if len(thetas) > 1:
    return 0.0, None, [f"rope_theta is {' and '.join(map(str, sorted(thetas)))}: say one"]
  if len(spellings) == 2 and spellings[0] != spellings[1]:
    return 0.0, None, ["rope_parameters and rope_scaling differ: say one"]
  theta = float(next(iter(thetas), 10_000.0))
  fields = spellings[0] if spellings else {"rope_type": "default"}
  kind = fields.pop("rope_type")
  if kind not in _ROPE_FIELDS:
    known = ", ".join(KINDS)
    return theta, None, [f"rope scaling {kind!r} is not supported, only {known}"]
  faults = [f"rope scaling {kind!r}: {name}: {fields[name]!r} is not supported"
            for name in fields if name not in _ROPE_FIELDS[kind]]  # fmt: skip
  if kind == "default":
    return theta, None, faults
  needs = _ROPE_NEEDS.get(kind, ("factor",))
  faults += [f"rope scaling {kind!r} lacks {name}" for name in needs if name not in fields]
  if faults:
    return theta, None, faults
  try:
    return theta, _scaling(kind, fields, config.get("max_position_embeddings") or 0), []
  except ValueError as error:
    return theta, None, [str(error)]


def _rope_fields(given: Config) -> dict[str, Any]:
  """The fields that say something, the kind under one name."""
  fields = {name: value for name, value in given.items() if value is not None}
  if fields.get("partial_rotary_factor") in (1, 1.0):
    del fields["partial_rotary_factor"]
  older = fields.pop("type", "default")
  return {"rope_type": older, **fields}


def _scaling(kind: str, fields: Config, max_positions: int) -> RopeScaling:
  """As transformers reads them, defaults included (its modeling_rope_utils)."""
  factor = float(fields["factor"])
  if kind == "linear":
    return RopeScaling(kind, factor)
  original = fields.get("original_max_position_embeddings", max_positions)
  if kind == "llama3":
    low, high = float(fields["low_freq_factor"]), float(fields["high_freq_factor"])
    return RopeScaling(kind, factor, original, low_factor=low, high_factor=high)
  stretch = fields.get("attention_factor")
  if stretch is None:
    both = fields.get("mscale"), fields.get("mscale_all_dim")
    stretch = (
      yarn_stretch(factor, both[0]) / yarn_stretch(factor, both[1])
      if both[0] and both[1]
      else yarn_stretch(factor)
    )
  return RopeScaling(
    kind,
    factor,
    original,
    beta_fast=float(fields.get("beta_fast") or 32),
    beta_slow=float(fields.get("beta_slow") or 1),
    truncate=bool(fields.get("truncate", True)),
    stretch=float(stretch),
  )


def config_json(
  arch: Architecture, special: Config, source: Config | None = None, dtype: str = "float32"
) -> dict[str, Any]:
  """A config.json for this architecture.

  Args:
    arch: the architecture.
    special: bos_token_id and the like, for a config that is made anew.
    source: the config.json that the policy came with. Where it describes `arch`, it is kept as
      it is but for the dtype.
    dtype: of the parameters beside it.

  Raises:
    ValueError: no family has this architecture.
  """
  if source and architecture_of(source) == arch:
    name = "dtype" if "dtype" in source else "torch_dtype"
    kept = {key: value for key, value in source.items() if key not in ("dtype", "torch_dtype")}
    return {**kept, name: dtype}
  if arch.qk_norm and arch.qkv_bias:
    raise ValueError("no Hugging Face family has both qk_norm and qkv_bias: nothing to export as")
  kind = "qwen3" if arch.qk_norm else "qwen2" if arch.qkv_bias else "llama"
  return {
    "architectures": [FAMILIES[kind][0]],
    "model_type": kind,
    "vocab_size": arch.vocab_size,
    "hidden_size": arch.width,
    "num_hidden_layers": arch.layers,
    "num_attention_heads": arch.heads,
    "num_key_value_heads": arch.kv_heads,
    "head_dim": arch.head_size,
    "intermediate_size": arch.ffn,
    "rope_theta": arch.rope_theta,
    "rope_scaling": _scaling_json(arch.rope_scaling),
    "rms_norm_eps": arch.norm_eps,
    "hidden_act": "silu",
    "tie_word_embeddings": arch.tied_head,
    "max_position_embeddings": arch.max_positions or 32768,
    "torch_dtype": dtype,
    **special,
  }


def _scaling_json(scaling: RopeScaling | None) -> dict[str, Any] | None:
  """rope_scaling in transformers' words."""
  if scaling is None:
    return None
  fields: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
  if scaling.kind == "linear":
    return fields
  fields["original_max_position_embeddings"] = scaling.original_positions
  if scaling.kind == "llama3":
    return fields | {
      "low_freq_factor": scaling.low_factor,
      "high_freq_factor": scaling.high_factor,
    }
  return fields | {
    "beta_fast": scaling.beta_fast,
    "beta_slow": scaling.beta_slow,
    "truncate": scaling.truncate,
    "attention_factor": scaling.stretch,
  }
