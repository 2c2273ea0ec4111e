"""config.json: what published models say, in every spelling; what is refused, by name."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from fadejax.policy import hf, hf_config, model
from fadejax.policy.rope import RopeScaling

LLAMA3 = {
  "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
  "original_max_position_embeddings": 8192, "rope_type": "llama3",
}  # fmt: skip

# As published, but for what all of them have.
PUBLISHED = {
  "llama-2-7b": dict(
    _name_or_path="x", architectures=["LlamaForCausalLM"], bos_token_id=1, eos_token_id=2,
    hidden_act="silu", hidden_size=4096, initializer_range=0.02, intermediate_size=11008,
    max_position_embeddings=4096, model_type="llama", num_attention_heads=32,
    num_hidden_layers=32, num_key_value_heads=32, pretraining_tp=1, rms_norm_eps=1e-05,
    rope_scaling=None, tie_word_embeddings=False, torch_dtype="float16",
    transformers_version="4.31.0.dev0", use_cache=True, vocab_size=32000,
  ),
  "llama-3.1-8b": dict(
    architectures=["LlamaForCausalLM"], attention_bias=False, attention_dropout=0.0,
    bos_token_id=128000, eos_token_id=[128001, 128008, 128009], hidden_act="silu",
    hidden_size=4096, initializer_range=0.02, intermediate_size=14336,
    max_position_embeddings=131072, mlp_bias=False, model_type="llama", num_attention_heads=32,
    num_hidden_layers=32, num_key_value_heads=8, pretraining_tp=1, rms_norm_eps=1e-05,
    rope_scaling=LLAMA3, rope_theta=500000.0, tie_word_embeddings=False, torch_dtype="bfloat16",
    transformers_version="4.42.3", use_cache=True, vocab_size=128256,
  ),
  "smollm2-135m": dict(
    architectures=["LlamaForCausalLM"], attention_bias=False, attention_dropout=0.0,
    bos_token_id=1, eos_token_id=2, hidden_act="silu", hidden_size=576,
    initializer_range=0.041666666666666664, intermediate_size=1536, is_llama_config=True,
    max_position_embeddings=8192, mlp_bias=False, model_type="llama", num_attention_heads=9,
    num_hidden_layers=30, num_key_value_heads=3, pad_token_id=2, pretraining_tp=1,
    rms_norm_eps=1e-05, rope_interleaved=False, rope_scaling=None, rope_theta=100000,
    tie_word_embeddings=True, torch_dtype="bfloat16", transformers_version="4.42.3",
    use_cache=True, vocab_size=49152,
    **{"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}},
  ),
  "qwen2.5-0.5b": dict(
    architectures=["Qwen2ForCausalLM"], attention_dropout=0.0, bos_token_id=151643,
    eos_token_id=151645, hidden_act="silu", hidden_size=896, initializer_range=0.02,
    intermediate_size=4864, max_position_embeddings=32768, max_window_layers=21,
    model_type="qwen2", num_attention_heads=14, num_hidden_layers=24, num_key_value_heads=2,
    rms_norm_eps=1e-06, rope_theta=1000000.0, sliding_window=32768, tie_word_embeddings=True,
    torch_dtype="bfloat16", transformers_version="4.43.1", use_cache=True, use_mrope=False,
    use_sliding_window=False, vocab_size=151936,
  ),
  "qwen3-0.6b": dict(
    architectures=["Qwen3ForCausalLM"], attention_bias=False, attention_dropout=0.0,
    bos_token_id=151643, eos_token_id=151645, head_dim=128, hidden_act="silu", hidden_size=1024,
    initializer_range=0.02, intermediate_size=3072, max_position_embeddings=40960,
    max_window_layers=28, model_type="qwen3", num_attention_heads=16, num_hidden_layers=28,
    num_key_value_heads=8, rms_norm_eps=1e-06, rope_scaling=None, rope_theta=1000000,
    sliding_window=None, tie_word_embeddings=True, torch_dtype="bfloat16",
    transformers_version="4.51.0", use_cache=True, use_sliding_window=False, vocab_size=151936,
  ),
}  # fmt: skip
# By the model cards or the shapes of the published tensors.
PARAMETERS = {
  "llama-2-7b": 6_738_415_616,
  "llama-3.1-8b": 8_030_261_248,
  "smollm2-135m": 134_515_008,
  "qwen2.5-0.5b": 494_032_768,
  "qwen3-0.6b": 596_049_920,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_as_many_parameters_as_their_authors_say(name):
  arch = hf_config.architecture_of(PUBLISHED[name])
  assert model.count_params(arch) == PARAMETERS[name]
  assert arch.norm_eps == PUBLISHED[name]["rms_norm_eps"]
  assert (arch.rope_scaling is not None) == (name == "llama-3.1-8b")


def test_fields_are_read(tmp_path):
  (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["llama-3.1-8b"]))
  assert hf.read_architecture(tmp_path) == model.Architecture(
    vocab_size=128256, width=4096, layers=32, heads=32, kv_heads=8, head_size=128, ffn=14336,
    rope_theta=500000.0, norm_eps=1e-5, max_positions=131072,
    rope_scaling=RopeScaling("llama3", 8.0, 8192, low_factor=1.0, high_factor=4.0),
  )  # fmt: skip
  qwen = hf_config.architecture_of(PUBLISHED["qwen2.5-0.5b"])
  assert (qwen.qkv_bias, qwen.qk_norm, qwen.tied_head, qwen.head_size) == (True, False, True, 64)
  qwen = hf_config.architecture_of(PUBLISHED["qwen3-0.6b"])
  assert (qwen.qkv_bias, qwen.qk_norm, qwen.head_size) == (False, True, 128)


YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
  "rope",
  [
    {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", **YARN}},
    {"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", "type": "yarn", **YARN}},
    {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **YARN}},
    {"rope_theta": 1e6, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **YARN},
     "rope_scaling": {"type": "yarn", **YARN, "attention_factor": None}},
    # The context of pretraining is then that of the model.
    {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0}},
  ],
)  # fmt: skip
def test_every_spelling_of_a_scaling_is_the_same(rope):
  config = {k: v for k, v in PUBLISHED["qwen2.5-0.5b"].items() if k != "rope_theta"}
  arch = hf_config.architecture_of({**config, **rope})
  stretch = 0.1 * np.log(4.0) + 1
  assert arch.rope_theta == 1e6
  assert arch.rope_scaling == RopeScaling("yarn", 4.0, 32768, stretch=pytest.approx(stretch))


@pytest.mark.parametrize(
  ("name", "change", "message"),
  [
    ("llama-2-7b", {"rms_norm_eps": None}, "lacks rms_norm_eps"),
    ("llama-2-7b", {"hidden_size": "wide"}, "hidden_size: 'wide' is not a number over 0"),
    ("qwen2.5-0.5b", {"num_key_value_heads": None}, "lacks num_key_value_heads"),
    ("qwen3-0.6b", {"head_dim": None}, "lacks head_dim"),
    ("llama-2-7b", {"model_type": "gpt2"}, "model_type 'gpt2' is not one of llama, qwen2, qwen3"),
    ("llama-2-7b", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    ("llama-2-7b", {"attention_bias": True}, "attention_bias: True is not supported"),
    ("qwen3-0.6b", {"attention_bias": True}, "attention_bias: True is not supported"),
    ("llama-2-7b", {"mlp_bias": True}, "mlp_bias: True is not supported"),
    ("qwen2.5-0.5b", {"use_sliding_window": True}, "use_sliding_window: True is not supported"),
    ("qwen3-0.6b", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ("smollm2-135m", {"rope_interleaved": True}, "rope_interleaved: True is not supported"),
    ("llama-2-7b", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
    ("llama-2-7b", {"quantization_config": {"bits": 4}}, "quantization_config: .* not supported"),
    ("llama-2-7b", {"logit_softcap": 30.0}, "logit_softcap: 30.0 .* changes no logits, remove it"),
    ("llama-2-7b", {"num_attention_heads": 24, "num_key_value_heads": 32}, "multiple of kv_heads"),
    ("llama-2-7b", {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
     "rope scaling 'dynamic' is not supported, only linear, llama3, yarn"),
    ("llama-2-7b", {"rope_scaling": {"rope_type": "longrope"}}, "rope scaling 'longrope'"),
    ("llama-2-7b", {"rope_scaling": {"type": "linear"}}, "'linear' lacks factor"),
    ("llama-2-7b", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
     "'llama3' lacks low_freq_factor\n.*'llama3' lacks high_freq_factor"),
    ("llama-2-7b", {"rope_scaling": {"type": "linear", "factor": 2.0, "mscale": 1.0}},
     "'linear': mscale: 1.0 is not supported"),
    ("llama-2-7b", {"rope_scaling": {"type": "linear", "factor": 0.0}}, "factor must be over 0"),
    ("llama-2-7b", {"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "must be over low_factor"),
    ("llama-2-7b", {"rope_scaling": "linear"}, "must be objects, or null"),
    ("qwen3-0.6b", {"rope_parameters": {"rope_theta": 5e6}}, "rope_theta is 1000000 and 5000000.0"),
    ("llama-3.1-8b", {"rope_parameters": {**LLAMA3, "factor": 32.0}},
     "rope_parameters and rope_scaling differ"),
  ],
)  # fmt: skip
def test_what_is_not_supported_says_so(tmp_path, name, change, message):
  (tmp_path / "config.json").write_text(json.dumps({**PUBLISHED[name], **change}))
  with pytest.raises(ValueError, match=message) as error:
    hf.read_architecture(tmp_path)
  assert str(error.value).startswith(str(tmp_path / "config.json"))


def test_all_that_is_wrong_is_in_one_error():
  config = {**PUBLISHED["llama-2-7b"], "mlp_bias": True, "vocab_size": None, "hidden_act": "relu",
            "rope_scaling": {"type": "su"}}  # fmt: skip
  with pytest.raises(ValueError) as error:
    hf_config.architecture_of(config)
  for part in ("lacks vocab_size", "mlp_bias", "hidden_act 'relu'", "rope scaling 'su'"):
    assert part in str(error.value)


def test_a_missing_directory_and_damage_are_named(tmp_path):
  with pytest.raises(FileNotFoundError, match="is not a Hugging Face directory"):
    hf.read_architecture(tmp_path / "nowhere")
  for text in ("{", "[]"):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json is damaged"):
      hf.read_architecture(tmp_path)


SCALINGS = [
  None,
  RopeScaling("linear", 3.0),
  RopeScaling("llama3", 8.0, 64, low_factor=1.5, high_factor=5.0),
  RopeScaling("yarn", 4.0, 32, beta_fast=20.0, beta_slow=2.0, truncate=False, stretch=1.25),
]


@pytest.mark.parametrize("scaling", SCALINGS)
def test_what_is_written_anew_reads_as_it_was(scaling):
  arch = model.Architecture(8, 8, 1, 2, 1, 4, 8, rope_scaling=scaling, max_positions=128)
  config = json.loads(json.dumps(hf.config_json(arch, {"eos_token_id": 1})))
  assert hf_config.architecture_of(config) == arch
  assert config["eos_token_id"] == 1


@pytest.mark.parametrize("scaling", SCALINGS)
def test_an_architecture_survives_json(scaling):
  """As run.json keeps it, and as model.overrides gives it."""
  arch = model.Architecture(8, 8, 1, 2, 1, 4, 8, rope_scaling=scaling)
  fields = json.loads(json.dumps(dataclasses.asdict(arch)))
  assert model.Architecture(**fields) == arch
  assert hash(model.Architecture(**fields)) == hash(arch)
  assert fields == dataclasses.asdict(arch)  # what check_architecture compares


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_source_is_kept_but_for_the_dtype(name):
  source = PUBLISHED[name]
  arch = hf_config.architecture_of(source)
  config = hf.config_json(arch, {"eos_token_id": 7}, source)
  assert config == {**source, "torch_dtype": "float32"}
  newer = {**source, "dtype": "bfloat16"}
  assert hf.config_json(arch, {}, newer, "float16")["dtype"] == "float16"
  assert "torch_dtype" not in hf.config_json(arch, {}, newer)
  # model.overrides made it another one: the source no longer describes it.
  other = dataclasses.replace(arch, rope_theta=5.0)
  assert hf.config_json(other, {"eos_token_id": 7}, source)["eos_token_id"] == 7
  assert hf_config.architecture_of(hf.config_json(other, {}, source)) == other


def test_no_family_has_both_norms_and_biases():
  arch = model.Architecture(8, 8, 1, 2, 1, 4, 8, qkv_bias=True, qk_norm=True)
  with pytest.raises(ValueError, match="no Hugging Face family has both"):
    hf.config_json(arch, {})
