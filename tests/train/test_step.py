"""The update: against hand-made gradients, over micro-batches, and on one and eight devices."""

from __future__ import annotations

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fadejax.algorithm import fade
from fadejax.algorithm.weights import WEIGHTS
from fadejax.arrays import PromptBatch, RewardBatch, RolloutBatch
from fadejax.config import LossConfig, ModelConfig, PolicyWeightConfig, RolloutConfig
from fadejax.policy import model, sharding
from fadejax.train import step as steps
from fadejax.train.optim import parallel_average

P, G, S, C, V = 8, 4, 6, 5, 16
ARCH = model.Architecture(V, 16, 2, 4, 2, 4, 24)
SETTINGS = steps.UpdateSettings(
  ARCH,
  ModelConfig(),
  RolloutConfig(prompts=P, group=G, max_completion_length=C),
  PolicyWeightConfig("dr_grpo"),
  fade.FadeConfig(),
  LossConfig(),
  10,
)


def mesh_of(data, fsdp, tensor):
  devices = np.array(jax.devices()[: data * fsdp * tensor]).reshape(data, fsdp, tensor)
  return jax.sharding.Mesh(devices, sharding.MESH_AXES)


ONE = sharding.make_layout(mesh_of(1, 1, 1), sharding.TRAIN_RULES, P, G)


@functools.cache
def params():
  return jax.jit(model.init_params, static_argnums=0)(ARCH, jax.random.key(0))


def batch(seed=0):
  rng = np.random.default_rng(seed)
  lengths = rng.integers(1, C + 1, (P, G))
  prompts = PromptBatch(
    jnp.asarray(rng.integers(0, V, (P, S))), jnp.asarray(rng.integers(1, S + 1, P)), jnp.arange(P)
  )
  mask = np.arange(C) < lengths[..., None]
  rollout = RolloutBatch(
    prompts,
    jnp.asarray(rng.integers(0, V, (P, G, C))),
    jnp.asarray(lengths),
    jnp.asarray(rng.random((P, G)) < 0.2),
    jnp.asarray(np.where(mask, -2.5, 0.0), jnp.float32),
    jnp.asarray(np.where(mask, rng.random((P, G, C)) + 1, 0.0), jnp.float32),
  )
  rewards = RewardBatch(
    jnp.asarray(rng.random((P, G)) < 0.4, jnp.float32), jnp.zeros((P, G)), jnp.ones(P, bool)
  )
  return rollout, rewards


def run(
  settings=SETTINGS, layout=ONE, data=None, optimizer=None, start=None, ref=None, extras=None
):
  """New parameters, state and metrics of one update."""
  optimizer = optimizer or optax.sgd(1.0)
  rollout, rewards = data or batch()
  fresh = jax.tree.map(jnp.array, start or params())
  if layout.mesh.size > 1:
    axes = model.logical_axes(ARCH)
    fresh = jax.device_put(fresh, layout.tree(axes, model.abstract_params(ARCH)))
  state = steps.init_state(fresh, optimizer, settings.fade)
  update = steps.make_update(settings, optimizer, lambda count: 0.1, layout)
  extras = extras or steps.Extras(ref_params=ref)
  state, metrics = update(state, rollout, rewards, extras)
  return jax.device_get(state.params), state, jax.device_get(metrics)


def change(**fields):
  return dataclasses.replace(SETTINGS, loss=dataclasses.replace(LossConfig(), **fields))


def close(a, b, rtol=1e-4, atol=1e-6):
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b)


def by_hand(data, weights, divisor):
  """Parameters after one SGD step on -Σ W log π / divisor, one completion at a time."""
  rollout, _ = data

  def loss(p):
    prompts = rollout.prompts
    prefix, last = model.prefill(ARCH, p, prompts.tokens, prompts.lengths, layout=ONE)
    hidden, _ = model.extend(ARCH, p, prefix, rollout.tokens, layout=ONE)
    hidden = jnp.concatenate([jnp.broadcast_to(last[:, None, None], (P, G, 1, 16)), hidden], 2)
    log = jax.nn.log_softmax(hidden[:, :, :-1] @ model.head(p).T)
    chosen = jnp.take_along_axis(log, rollout.tokens[..., None], -1)[..., 0]
    mask = jnp.arange(C)[None, None, :] < rollout.lengths[..., None]
    by_token = weights if weights.ndim == 3 else weights[..., None]
    return -jnp.sum(jnp.where(mask, chosen, 0.0) * by_token) / divisor

  return jax.tree.map(lambda x, g: x - g, params(), jax.jit(jax.grad(loss))(params()))


def test_one_update_is_the_policy_gradient():
  data = batch()
  rollout, rewards = data
  weights = rewards.rewards - rewards.rewards.mean(1, keepdims=True)
  new, state, metrics = run(data=data)
  close(new, by_hand(data, weights, rollout.lengths.sum()))
  assert int(state.step) == 1
  assert metrics["clip_share"] == 0 and metrics["update_skipped"] == 0
  logprobs, _ = jax.jit(lambda p: steps.completion_logprobs(SETTINGS, p, rollout, ONE))(params())
  gaps = np.abs(np.asarray(logprobs) + 2.5)[np.arange(C) < np.asarray(rollout.lengths)[..., None]]
  np.testing.assert_allclose(metrics["logprob_gap_mean"], gaps.mean(), rtol=1e-4)
  np.testing.assert_allclose(metrics["logprob_gap_max"], gaps.max(), rtol=1e-4)
  assert metrics["alpha"] == 1 and metrics["delta"] == 1


def test_fade_weighs_with_the_schedule_and_keeps_its_averages():
  data = batch()
  rollout, rewards = data
  config = fade.FadeConfig(beta=0.2, target_entropy=1.2)
  settings = dataclasses.replace(SETTINGS, policy_weight=PolicyWeightConfig("fade"), fade=config)
  new, state, metrics = run(settings, data=data)
  r = np.asarray(rewards.rewards)
  p_hat = 0.8 * 0.5 + 0.2 * r.mean()
  mask = np.arange(C) < np.asarray(rollout.lengths)[..., None]
  entropy = np.asarray(rollout.entropy)[mask].mean()
  alpha = np.clip(3 * (1 - p_hat) / (2 * p_hat), 1, 3)
  delta = np.clip(1 + entropy - 1.2, 0.3, 1)
  np.testing.assert_allclose(
    [metrics[k] for k in ("fade_solve_rate", "fade_entropy", "alpha", "delta")],
    [p_hat, entropy, alpha, delta],
    rtol=1e-5,
  )
  mean = r.mean(1, keepdims=True)
  weights = (1 - mean) ** (alpha - 1) * (r - mean)
  weights = np.where(weights < 0, weights / delta, weights)
  close(new, by_hand(data, weights, rollout.lengths.sum()))
  np.testing.assert_allclose(metrics["m_s"], np.where(r > 0, weights, 0).mean(), rtol=1e-5)
  np.testing.assert_allclose(metrics["m_f"], -np.where(r < 1, weights, 0).mean(), rtol=1e-5)
  np.testing.assert_allclose(state.fade.solve_rate, p_hat, rtol=1e-6)


@pytest.mark.parametrize("normaliser", ["token_mean", "sequence_mean", "constant"])
def test_micro_batches_change_nothing(normaliser):
  whole = run(change(normaliser=normaliser))
  parts = run(change(normaliser=normaliser, microbatches=4, logprob_chunk=2))
  close(whole[0], parts[0])
  for key in ("loss", "grad_norm", "logprob_gap_mean", "logprob_gap_max"):
    np.testing.assert_allclose(whole[2][key], parts[2][key], rtol=1e-4)


@pytest.mark.parametrize("normaliser", ["token_mean", "sequence_mean", "constant"])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_parts_of_a_group_change_nothing(normaliser, microbatches):
  fields = dict(normaliser=normaliser, kl_coefficient=0.1, old_logprobs="sampler")
  ref = jax.tree.map(lambda x: x * 1.1, params())
  whole = run(change(**fields), ref=ref)
  parts = run(change(**fields, microbatches=microbatches, group_parts=2), ref=ref)
  moved = jax.tree.map(lambda new, old: np.abs(new - old).max(), whole[0], params())
  jax.tree.map(
    lambda x, y, size: np.testing.assert_allclose(x, y, rtol=1e-6, atol=2e-6 * max(size, 0.1)),
    whole[0], parts[0], moved,
  )  # fmt: skip
  for key in ("loss", "kl", "grad_norm", "logprob_gap_mean", "logprob_gap_max", "clip_share"):
    np.testing.assert_allclose(whole[2][key], parts[2][key], rtol=2e-6, err_msg=key)


def test_parts_of_a_group_on_eight_devices():
  """Two prompts a pass on data = 2, two members a part on fsdp = 2, heads on tensor = 2."""
  one = run(SETTINGS)
  layout = sharding.make_layout(mesh_of(2, 2, 2), sharding.TRAIN_RULES, P // 4, G // 2)
  many = run(change(microbatches=4, group_parts=2), layout)
  close(one[0], many[0], rtol=1e-4, atol=2e-6)


def test_two_minibatches_are_two_updates_with_the_first_policy_as_old():
  data = batch()
  settings = change(minibatches=2, clip_low=0.0, clip_high=0.0)
  new, _, metrics = run(settings, data=data)
  after = params()
  for part in range(2):
    rows = np.arange(part, P, 2)
    one = jax.tree.map(lambda x, rows=rows: x[rows], data)
    optimizer = optax.sgd(1.0)
    state = steps.init_state(jax.tree.map(jnp.array, after), optimizer, SETTINGS.fade)
    old, _ = steps.completion_logprobs(SETTINGS, params(), one[0], ONE)
    mask = np.arange(C) < np.asarray(one[0].lengths)[..., None]
    one = (dataclasses.replace(one[0], sampler_logprobs=jnp.where(mask, old, 0.0)), one[1])
    update = steps.make_update(
      change(old_logprobs="sampler", clip_low=0.0, clip_high=0.0), optimizer, lambda c: 0.1, ONE
    )
    state, _ = update(state, *one)
    after = jax.device_get(state.params)
  close(new, after, rtol=1e-3, atol=1e-5)
  assert metrics["clip_share"] > 0  # at clip 0 the second minibatch is clipped


def test_invalid_groups_leave_everything():
  """Four of eight groups invalid: the same as a batch of the other four."""
  rollout, rewards = batch()
  valid = np.arange(P) % 2 == 0
  rewards = dataclasses.replace(
    rewards, valid=jnp.asarray(valid), rewards=jnp.where(valid[:, None], rewards.rewards, 0.0)
  )
  fade_weight = dataclasses.replace(SETTINGS, policy_weight=PolicyWeightConfig("fade"))
  new, _, metrics = run(fade_weight, data=(rollout, rewards))
  kept = jax.tree.map(lambda x: x[valid], (rollout, rewards))
  layout = sharding.make_layout(mesh_of(1, 1, 1), sharding.TRAIN_RULES, 4, G)
  expected, _, other = run(fade_weight, layout, data=kept)
  close(new, expected)
  assert metrics["invalid_groups"] == 4 and other["invalid_groups"] == 0
  for key in set(metrics) - {"invalid_groups", "tokens"}:
    np.testing.assert_allclose(metrics[key], other[key], rtol=1e-4, err_msg=key)


def test_a_batch_without_a_valid_group_changes_nothing():
  rollout, rewards = batch()
  rewards = dataclasses.replace(rewards, valid=jnp.zeros(P, bool))
  new, state, _ = run(data=(rollout, rewards))
  close(new, params(), rtol=0, atol=0)
  assert float(state.fade.solve_rate) == 0.5 and np.isnan(state.fade.entropy)


def test_not_finite_gradients_are_skipped_and_counted():
  broken = {**params(), "norm": params()["norm"].at[0].set(jnp.nan)}
  new, state, metrics = run(start=broken, optimizer=optax.adam(0.1))
  assert metrics["update_skipped"] == 1
  np.testing.assert_array_equal(new["embedding"], params()["embedding"])
  assert int(state.opt_state[0].count) == 0


def test_kl_pulls_back_to_the_reference():
  ref = jax.tree.map(lambda x: x * 0.9, params())
  settings = change(kl_coefficient=0.5)
  no_reward = RewardBatch(jnp.zeros((P, G)), jnp.zeros((P, G)), jnp.ones(P, bool))
  rollout, _ = batch()
  new, _, metrics = run(settings, data=(rollout, no_reward), ref=ref, optimizer=optax.sgd(0.1))
  _, _, after = run(settings, data=(rollout, no_reward), ref=ref, start=new)
  assert 0 < after["kl"] < metrics["kl"]
  np.testing.assert_allclose(metrics["loss"], 0.5 * metrics["kl"], rtol=1e-5)


def test_truncated_completions_can_leave_the_loss():
  data = batch()
  rollout, rewards = data
  weights = rewards.rewards - rewards.rewards.mean(1, keepdims=True)
  kept = ~rollout.truncated
  new, _, _ = run(change(mask_truncated=True), data=data)
  close(new, by_hand(data, weights * kept, (rollout.lengths * kept).sum()))


@pytest.mark.parametrize("shape", [(8, 1, 1), (2, 2, 2), (1, 4, 2)])
def test_eight_devices_make_the_update_of_one(shape):
  settings = dataclasses.replace(
    change(microbatches=1),
    policy_weight=PolicyWeightConfig("fade"),
    model=ModelConfig(remat="full"),
  )
  one = run(settings, optimizer=optax.adamw(0.01))
  layout = sharding.make_layout(mesh_of(*shape), sharding.TRAIN_RULES, P, G)
  many = run(settings, layout, optimizer=optax.adamw(0.01))
  close(one[0], many[0], rtol=1e-4, atol=2e-5)
  for key in one[2]:
    np.testing.assert_allclose(one[2][key], many[2][key], rtol=1e-4, atol=1e-6, err_msg=key)
  sizes = {x.sharding.shard_shape(x.shape) for x in [many[1].params["layers"]["gate"]]}
  assert sizes == {(2, 16 // shape[1], 24 // shape[2])}


@pytest.mark.parametrize("name", sorted(set(WEIGHTS) - {"fade"}))
def test_every_weight_of_the_table_trains(name):
  """Its weights are finite and not all zero in the step's own terms: shaping, validity, masses."""
  needed = {"alpha": 2.0, "delta": 0.5, "k": 2}
  own = inspect.signature(WEIGHTS[name]).parameters
  wanted = {key: value for key, value in needed.items() if key in own}
  settings = dataclasses.replace(SETTINGS, policy_weight=PolicyWeightConfig(name, **wanted))
  rollout, rewards = batch()
  rewards = dataclasses.replace(rewards, valid=jnp.arange(P) > 0)
  weigh = jax.jit(lambda *data: steps.weigh(settings, *data, (2.0, 0.5)))
  weights, metrics = weigh(rollout, rewards)
  assert weights.shape == (P, G) and not weights[0].any() and weights[1:].any()
  assert np.isfinite([metrics[k] for k in ("m_s", "m_f", "n_eff", "drift_covariance")]).all()
  assert 0 < metrics["n_eff"] <= P - 1
  assert ("alpha" in metrics) == (name in ("dr_grpo", "power", "asym", "power_asym"))


def test_a_tally_of_more_than_is_trained_on_drives_fade_and_the_metrics():
  """As with dynamic sampling: half of the groups are invalid, all of them are measured."""
  rollout, rewards = batch()
  half = dataclasses.replace(rewards, valid=jnp.arange(P) % 2 == 0)
  settings = dataclasses.replace(SETTINGS, policy_weight=PolicyWeightConfig("fade"))
  other_rollout, other_rewards = batch(1)
  both = steps.tally(rollout, rewards) + steps.tally(other_rollout, other_rewards)
  _, state, metrics = run(settings, data=(rollout, half), extras=steps.Extras(tally=both))
  r = np.concatenate([np.asarray(rewards.rewards), np.asarray(other_rewards.rewards)])
  mask = [np.arange(C) < np.asarray(x.lengths)[..., None] for x in (rollout, other_rollout)]
  entropy = np.concatenate([np.asarray(x.entropy) for x in (rollout, other_rollout)])
  np.testing.assert_allclose(metrics["solve_rate"], r.mean(), rtol=1e-6)
  np.testing.assert_allclose(metrics["entropy"], entropy[np.concatenate(mask)].mean(), rtol=1e-5)
  np.testing.assert_allclose(state.fade.solve_rate, 0.5 + 0.02 * (r.mean() - 0.5), rtol=1e-6)
  c = r.sum(1)
  np.testing.assert_allclose(metrics["mixed_share"], ((c > 0) & (c < G)).mean(), rtol=1e-6)
  assert metrics["tokens"] == sum(m.sum() for m in mask)
  # The masses are of what is trained on.
  weights = np.asarray(half.rewards) - np.asarray(half.rewards).mean(1, keepdims=True)
  mass = (weights * np.asarray(half.rewards)).sum(1)[::2] / G
  np.testing.assert_allclose(
    metrics["m_s"], (mass * (1 - np.asarray(half.rewards).mean(1)[::2]) ** (metrics["alpha"] - 1))
    .mean(), rtol=1e-4,
  )  # fmt: skip


def test_a_batch_without_a_valid_group_leaves_parameters_and_momentum_alone():
  rollout, rewards = batch()
  optimizer = optax.adam(0.1)
  none = dataclasses.replace(rewards, valid=jnp.zeros(P, bool))
  update = steps.make_update(SETTINGS, optimizer, lambda count: 0.1, ONE)
  fresh = jax.tree.map(jnp.array, params())
  state, _ = update(steps.init_state(fresh, optimizer, SETTINGS.fade), rollout, rewards)
  before = jax.device_get((state.params, state.opt_state))
  state, metrics = update(state, rollout, none)
  jax.tree.map(np.testing.assert_array_equal, before, (state.params, state.opt_state))
  assert int(state.step) == 2 and metrics["update_skipped"] == 0


def test_parallel_averaging_applies_the_mean_of_the_two_updates():
  data = batch()
  rollout, _ = batch(3)
  one = jax.tree.map(lambda x: x[:, :1], dataclasses.replace(rollout, prompts=None))
  shown = dataclasses.replace(one, prompts=rollout.prompts)
  new, _, metrics = run(
    data=data,
    optimizer=parallel_average(optax.sgd(1.0), optax.sgd(3.0)),
    extras=steps.Extras(demonstrations=shown),
  )
  rl, _, _ = run(data=data)
  loss, gradient = jax.jit(
    jax.value_and_grad(lambda p: steps.negative_log_likelihood(p, shown, SETTINGS, ONE))
  )(params())
  np.testing.assert_allclose(metrics["sft_loss"], loss, rtol=1e-6)
  np.testing.assert_allclose(metrics["sft_grad_norm"], optax.tree.norm(gradient), rtol=1e-4)
  expected = jax.tree.map(
    lambda p, a, g: p + 0.5 * ((a - p) - 3.0 * g), params(), rl, gradient
  )  # fmt: skip
  close(new, expected)


def test_truncated_importance_multiplies_the_surrogate():
  """The sampler's log-probs are -2.5 everywhere; the trainer's differ."""
  data = batch()
  rollout, rewards = data
  new, _, _ = run(change(importance_cap=1.5), data=data)
  logprobs, _ = jax.jit(lambda p: steps.completion_logprobs(SETTINGS, p, rollout, ONE))(params())
  ratio = jnp.minimum(jnp.exp(logprobs + 2.5), 1.5)
  assert float(jnp.min(ratio)) < 1.0 and float(jnp.max(ratio)) == 1.5
  weights = rewards.rewards - rewards.rewards.mean(1, keepdims=True)
  close(new, by_hand(data, weights[..., None] * ratio, rollout.lengths.sum()))


@pytest.mark.parametrize("minibatches", [1, 2])
def test_auto_is_recompute_however_old_the_batch_is(minibatches):
  """Before the first minibatch the current log-probs are the old ones: nothing to compute twice."""
  stale = dataclasses.replace(SETTINGS.rollout, staleness=1)
  new = {}
  for choice in ("auto", "recompute"):
    settings = change(old_logprobs=choice, importance_cap=1.5, minibatches=minibatches)
    new[choice], _, _ = run(dataclasses.replace(settings, rollout=stale))
  close(new["auto"], new["recompute"])
  without, _, _ = run(change(minibatches=minibatches))
  with pytest.raises(AssertionError):  # the correction of the batch's age is in it
    close(new["auto"], without)


def test_the_sampler_s_logprobs_put_the_batch_s_age_into_the_clip():
  """The ratio is π / π_sampler: a token beyond the clip, on its weight's side, has no gradient."""
  data = batch()
  rollout, rewards = data
  new, _, metrics = run(change(old_logprobs="sampler"), data=data)
  logprobs, _ = jax.jit(lambda p: steps.completion_logprobs(SETTINGS, p, rollout, ONE))(params())
  ratio = jnp.exp(logprobs + 2.5)
  weights = (rewards.rewards - rewards.rewards.mean(1, keepdims=True))[..., None]
  clipped = ((weights > 0) & (ratio > 1.2)) | ((weights < 0) & (ratio < 0.8))
  close(new, by_hand(data, jnp.where(clipped, 0.0, weights * ratio), rollout.lengths.sum()))
  mask = np.arange(C) < np.asarray(rollout.lengths)[..., None]
  assert clipped[mask].any() and not clipped[mask].all()
  np.testing.assert_allclose(metrics["clip_share"], clipped[mask].mean(), rtol=1e-6)
