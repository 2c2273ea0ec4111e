"""What the rank-one share of the head's change costs, beside the step that it rides on.

Command:  python benchmarks/bench_head.py          (or make bench)

SmolLM2-135M's shapes with random parameters, the demo's batch (8 × 8 × 16 tokens): seconds of
`diagnostics.head_update`, of one update, and their ratio, once a step and every 10 steps.
"""

from __future__ import annotations

import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fadejax.algorithm.fade import FadeConfig
from fadejax.algorithm.masses import rank_one_share
from fadejax.arrays import PromptBatch, RewardBatch, RolloutBatch
from fadejax.config import LossConfig, ModelConfig, PolicyWeightConfig, RolloutConfig
from fadejax.policy import model, presets, sharding
from fadejax.train import diagnostics
from fadejax.train import step as steps

P, G, S, C = 8, 8, 48, 16


def seconds(work, rounds: int) -> float:
  """Median seconds of a call that returns arrays; the first, which compiles, does not count."""
  jax.block_until_ready(work())
  times = []
  for _ in range(rounds):
    start = time.perf_counter()
    jax.block_until_ready(work())
    times.append(time.perf_counter() - start)
  return statistics.median(times)


def main() -> None:
  arch = presets.preset("smollm2-135m", 49152, {})
  rng = np.random.default_rng(0)
  layout = sharding.make_layout(sharding.make_mesh(1, 1, 1), sharding.TRAIN_RULES, P, G)
  first = jax.jit(model.init_params, static_argnums=0)(arch, jax.random.key(0))
  moved = jax.tree.map(
    lambda x: x + 1e-4 * jnp.asarray(rng.normal(size=x.shape), jnp.float32), first
  )
  head = seconds(lambda: diagnostics.head_update(moved, first), 5)
  change = moved["embedding"] - first["embedding"]
  share = jax.jit(rank_one_share)
  svd = seconds(lambda: share(change), 5)

  prompts = PromptBatch(jnp.asarray(rng.integers(0, 49152, (P, S))), jnp.full(P, S), jnp.arange(P))
  rollout = RolloutBatch(
    prompts,
    jnp.asarray(rng.integers(0, 49152, (P, G, C))),
    jnp.full((P, G), C),
    jnp.zeros((P, G), bool),
    jnp.full((P, G, C), -10.0),
    jnp.ones((P, G, C)),
  )
  rewards = RewardBatch(
    jnp.asarray(rng.random((P, G)) < 0.4, jnp.float32), jnp.zeros((P, G)), jnp.ones(P, bool)
  )
  settings = steps.UpdateSettings(
    arch, ModelConfig(), RolloutConfig(prompts=P, group=G, max_completion_length=C),
    PolicyWeightConfig("dr_grpo"), FadeConfig(), LossConfig(), 10,
  )  # fmt: skip
  optimizer = optax.adamw(1e-5)
  update = steps.make_update(settings, optimizer, lambda count: 1e-5, layout)
  state = steps.init_state(jax.tree.map(jnp.array, first), optimizer, FadeConfig())

  def one():
    nonlocal state
    state, metrics = update(state, rollout, rewards)
    return metrics

  step = seconds(one, 3)
  print(f"rank_one_share alone {svd:.3f} s, {svd / step:.4f} of an update")
  print(f"head_update {head:.3f} s   update {step:.3f} s   ratio {head / step:.4f}, every 10 steps "
        f"{head / step / 10:.4f}")  # fmt: skip


if __name__ == "__main__":
  main()
