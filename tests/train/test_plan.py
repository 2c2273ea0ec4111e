"""The plan's lines that no other test reads, and a plan for what this machine could not hold."""

import importlib.util
import json
from pathlib import Path

import jax
import pytest

from fadejax.config import default_config, resolve
from fadejax.data import tokenizer
from fadejax.data.records import Generated, Task, TaskConfig
from fadejax.policy import hf
from fadejax.train import ends, setup
from fadejax.train.loop import train
from fadejax.train.plan import _task_line
from fadejax.verify import sandbox

ROOT = Path(__file__).resolve().parents[2]
needs_sandbox = pytest.mark.skipif(bool(sandbox.why_not()), reason="no sandbox here")


def test_the_line_of_a_task_says_how_often_training_goes_through_its_problems():
  c = default_config()
  c.steps, c.rollout.prompts = 30, 8
  rows = [{"id": str(i)} for i in range(20)]
  listed = Task("listed", rows, rows[:5], {"rows over the limit": 2, "others": 0})
  endless = Task("endless", Generated(lambda i: {"id": str(i)}), rows[:7])
  tasks = [(TaskConfig(weight=3.0), listed), (TaskConfig(weight=1.0), endless)]
  # 30 × 8 draws, three quarters of them from 20 problems.
  assert _task_line(resolve(c), tasks, 0) == (
    "listed: 20 training problems, each drawn about 9 times; 5 evaluation problems; "
    "2 rows over the limit"
  )
  assert _task_line(resolve(c), tasks, 1) == "endless: 7 evaluation problems"


# Qwen2.5-7B-Instruct's, but for fields that change no shape.
QWEN = {
  "model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
  "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064, "rope_theta": 1e6,
  "rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def large_code_run(tmp_path):
  """configs/qwen2p5_7b_code.py on 20 TACO rows, its model's directory without parameters."""
  path = ROOT / "configs" / "qwen2p5_7b_code.py"
  spec = importlib.util.spec_from_file_location(path.stem, path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  tests = {"inputs": ["1\n"] * 5, "outputs": ["1\n"] * 5}
  rows = [{"question": f"Q{i}", "input_output": json.dumps(tests)} for i in range(20)]
  (tmp_path / "taco.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  tokenizer.characters("".join(map(chr, [10, *range(32, 127)]))).save(tmp_path / "hf")
  (tmp_path / "hf" / "config.json").write_text(json.dumps(QWEN))
  c = module.get_config("dapo")
  c.model.path, c.task.path = str(tmp_path / "hf"), str(tmp_path / "taco.jsonl")
  c.task.options.max_tests = 2
  return c


@needs_sandbox
def test_a_plan_needs_no_parameters(tmp_path, large_code_run, capsys):
  assert train(resolve(large_code_run), tmp_path / "run", plan_only=True) is None
  text = capsys.readouterr().out
  assert f"7,615,616,512 parameters from Hugging Face directory {tmp_path / 'hf'}" in text
  assert "which holds none yet; bfloat16" in text and "fsdp 8" in text
  # 7,615,616,512 × 4 bytes over 8 devices; the norms' axes are whole, so a little more.
  assert "parameters 3.81 GB, optimizer 7.62 GB" in text
  assert "60 tests over task.options max_tests = 2" in text
  assert "first prompt:\nQ" in text and not (tmp_path / "run").exists()


@needs_sandbox
def test_a_plan_checks_what_is_there(tmp_path, large_code_run):
  (tmp_path / "hf" / "model.safetensors").write_bytes(b"no tensors")
  with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
    train(resolve(large_code_run), tmp_path / "run", plan_only=True)
  large_code_run.model.path = str(tmp_path / "nowhere")
  with pytest.raises(FileNotFoundError, match=r"config\.model\.path: .*nowhere is no directory"):
    train(resolve(large_code_run), tmp_path / "run", plan_only=True)


def test_where_planned_parameters_would_come_from(tmp_path):
  c = default_config()
  c.model.preset = "nano"
  run = resolve(c)
  policy = setup.build_policy(run, tokenizer.characters("0123456789"))
  planned, words, _ = ends.initial_params(run, policy, abstract=True)
  made = ends.initial_params(run, policy)
  assert words == made.source == "random, seed 0"
  like = lambda x: (x.shape, x.dtype, x.sharding)  # noqa: E731
  assert jax.tree.map(like, planned) == jax.tree.map(like, made.params)
  hf.save_params(tmp_path, policy.arch, made.params)
  (tmp_path / "config.json").write_text(json.dumps(hf.config_json(policy.arch, {}, None)))
  c.model.preset, c.model.path = "", str(tmp_path)
  policy = setup.build_policy(resolve(c), policy.tokenizer)
  words = ends.initial_params(resolve(c), policy, abstract=True).source
  assert words == f"Hugging Face directory {tmp_path}"
  c.init_from = str(tmp_path / "nowhere")
  with pytest.raises(FileNotFoundError, match=r"config\.init_from: .*nowhere does not exist"):
    ends.initial_params(resolve(c), policy, abstract=True)
