"""A small byte-level BPE in the form of SmolLM2's, and model directories made from it."""

from __future__ import annotations

import json

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

VOCAB = 280  # 3 special tokens, 255 bytes, 22 merges
CORPUS = ["the cat and the hat hello hello there ab ab ab abacus", "what is 12 + 34 = 46?"] * 20

SMOLLM_TEMPLATE = (
  "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
  "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
  "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
  "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
  "{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def train_bpe() -> tokenizers.Tokenizer:
  """Digits one by one, then byte-level BPE; ids 0, 1, 2 are the three special tokens."""
  tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<|endoftext|>"))
  tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Digits(individual_digits=True),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ]
  )
  tokenizer.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=VOCAB,
    special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    initial_alphabet=[c for c in pre_tokenizers.ByteLevel.alphabet() if c != "þ"],  # no byte 0xFE
    show_progress=False,
  )
  tokenizer.train_from_iterator(CORPUS, trainer)
  return tokenizer


@pytest.fixture(scope="session")
def bpe() -> tokenizers.Tokenizer:
  return train_bpe()


@pytest.fixture
def model_dir(bpe, tmp_path):
  """Makes a Hugging Face directory; keyword arguments are its JSON files without .json."""

  def make(**files):
    directory = tmp_path / "model"
    directory.mkdir(exist_ok=True)
    bpe.save(str(directory / "tokenizer.json"))
    config = {
      "bos_token": "<|im_start|>",
      "eos_token": "<|im_end|>",
      "pad_token": "<|im_end|>",
      "unk_token": "<|endoftext|>",
      "chat_template": SMOLLM_TEMPLATE,
    }
    for key, value in files.pop("tokenizer_config", {}).items():
      config[key] = value
    for name, content in {"tokenizer_config": config, **files}.items():
      (directory / f"{name}.json").write_text(json.dumps(content))
    return directory

  return make
