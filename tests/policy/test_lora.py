"""Adapters: the model with them beside it is the model with them merged in, value and gradient."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from fadejax.policy import hf, lora, model, presets, sharding

CONFIG = lora.LoraConfig(rank=3, alpha=6.0)
PROMPTS = jnp.asarray(np.random.default_rng(1).integers(0, 31, (2, 5)))
LENGTHS = jnp.array([5, 3])
TOKENS = jnp.asarray(np.random.default_rng(2).integers(0, 31, (2, 3, 4)))


def adapters(arch, config=CONFIG, seed=0):
  """Adapters that change something: B is not zero."""
  own = lora.init_adapters(arch, config, jax.random.key(seed))
  rng = np.random.default_rng(seed)
  return {
    name: {"a": t["a"], "b": jnp.asarray(0.1 * rng.standard_normal(t["b"].shape), jnp.float32)}
    for name, t in own.items()
  }


def hidden(arch, params, layout):
  prefix, last = model.prefill(arch, params, PROMPTS, LENGTHS, layout=layout)
  return last, model.extend(arch, params, prefix, TOKENS, layout=layout)[0]


def loss(arch, params, layout):
  return sum(jnp.sum(jnp.sin(x)) for x in hidden(arch, params, layout))


@pytest.mark.parametrize("targets", [tuple(model.PROJECTIONS), ("q", "o"), ("down",)])
def test_beside_and_merged_are_the_same_model(policy, layout, targets):
  """By the low-rank product, and by hand: W + (α / r) A B."""
  arch, params = policy
  config = lora.LoraConfig(rank=3, alpha=6.0, targets=targets)
  own = adapters(arch, config)
  assert list(own) == list(targets)
  merged = lora.merge(params, own, config)
  for name, t in own.items():
    whole = np.asarray(params["layers"][name])
    change = (
      2.0
      * np.asarray(t["a"]).reshape(arch.layers, -1, 3)
      @ np.asarray(t["b"]).reshape(arch.layers, 3, -1)
    )
    np.testing.assert_allclose(
      merged["layers"][name], whole + change.reshape(whole.shape), rtol=1e-5, atol=1e-6
    )
  beside = hidden(arch, lora.attach(params, own, config), layout)
  for x, y, z in zip(
    beside, hidden(arch, merged, layout), hidden(arch, params, layout), strict=True
  ):
    np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5)
    assert np.abs(np.asarray(y - z)).max() > 1e-2


def test_training_begins_at_the_model_itself(policy, layout):
  arch, params = policy
  own = lora.init_adapters(arch, CONFIG, jax.random.key(0))
  beside = hidden(arch, lora.attach(params, own, CONFIG), layout)
  for x, y in zip(beside, hidden(arch, params, layout), strict=True):
    np.testing.assert_array_equal(x, y)
  a = np.asarray(own["down"]["a"])
  assert abs(a.std() * arch.ffn**0.5 - 1) < 0.2 and not any(t["b"].any() for t in own.values())


def test_the_gradient_is_the_merged_model_s(llama, layout):
  arch, params = llama
  own = adapters(arch)
  beside = jax.grad(lambda t: loss(arch, lora.attach(params, t, CONFIG), layout))(own)
  merged = jax.grad(lambda t: loss(arch, lora.merge(params, t, CONFIG), layout))(own)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4), beside, merged)
  assert all(jnp.abs(t[key]).max() > 1e-4 for t in beside.values() for key in ("a", "b"))


def test_adapters_are_split_as_the_matrices_that_they_change():
  arch = presets.preset("nano", 31, {})
  mesh = sharding.make_mesh(2, 2, 2)
  layout = sharding.make_layout(mesh, sharding.TRAIN_RULES, 4, 2)
  placed = layout.tree(lora.adapter_axes(arch, CONFIG), lora.abstract_adapters(arch, CONFIG))
  whole = layout.tree(model.logical_axes(arch), model.abstract_params(arch))["layers"]
  for name, (into, _) in model.PROJECTIONS.items():
    matrix = (*whole[name].spec,)
    cut = 1 + len(into)
    assert (*placed[name]["a"].spec,) == (*matrix[:cut], None)
    assert (*placed[name]["b"].spec,) == (matrix[0], None, *matrix[cut:])


def test_what_is_written_is_the_merged_model_and_its_adapters(llama, layout, tmp_path):
  """The adapters' file, read by its names and put together by hand, gives the merged one."""
  arch, params = llama
  own = adapters(arch)
  for part, tree in (
    ("base", params), ("merged", lora.merged_on_host(params, own, CONFIG)),
    ("plain", lora.merge(params, own, CONFIG)),
  ):  # fmt: skip
    (tmp_path / part).mkdir()
    hf.save_params(tmp_path / part, arch, tree)
  hf.save_adapters(tmp_path / "adapters", arch, own, CONFIG, {"_name_or_path": "some/model"})
  base, merged, plain = (
    load_file(tmp_path / part / "model.safetensors") for part in ("base", "merged", "plain")
  )
  tensors = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
  facts = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
  assert len(tensors) == 2 * 7 * arch.layers and facts["r"] == 3
  assert facts["target_modules"] == [
    "down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj",
  ]  # fmt: skip
  changed = 0
  for name, value in base.items():
    stem = f"base_model.model.{name.removesuffix('.weight')}"
    if f"{stem}.lora_A.weight" in tensors:
      a, b = tensors[f"{stem}.lora_A.weight"], tensors[f"{stem}.lora_B.weight"]
      assert a.shape == (3, value.shape[1]) and b.shape == (value.shape[0], 3)
      value = value + facts["lora_alpha"] / facts["r"] * b @ a
      changed += 1
    np.testing.assert_allclose(merged[name], value, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(merged[name], plain[name], rtol=1e-5, atol=1e-6)
  assert changed == 7 * arch.layers


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"rank": -1}, r"lora\.rank"),
    ({"rank": 2, "alpha": 0.0}, r"lora\.alpha"),
    ({"rank": 2, "targets": ("q", "head")}, r"different ones of q, k"),
    ({"rank": 2, "targets": ()}, r"lora\.targets"),
    ({"rank": 2, "targets": ("q", "q")}, r"lora\.targets"),
  ],
)
def test_settings_that_make_no_adapters(fields, message):
  with pytest.raises(ValueError, match=message):
    lora.LoraConfig(**fields)
