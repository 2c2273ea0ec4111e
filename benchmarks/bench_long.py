"""Memory of one update as completions grow, plain attention beside blocks: nothing is run.

Command:  python benchmarks/bench_long.py        (or make bench)

Compiles the real update for C = 1k, 2k, 4k and 8k and prints what the compiler's memory analysis
says of its temporaries (what comes and goes within one update, beside parameters, moments and the
batch). A ratio of 2 a doubling is linear growth, 4 is quadratic.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax

from fadejax.algorithm.fade import FadeConfig
from fadejax.arrays import PromptBatch, RewardBatch, RolloutBatch
from fadejax.config import LossConfig, ModelConfig, PolicyWeightConfig, RolloutConfig
from fadejax.policy import model, sharding
from fadejax.train import step

ARCH = model.Architecture(
  vocab_size=512, width=64, layers=2, heads=4, kv_heads=2, head_size=16, ffn=128, tied_head=True
)
P, G, S = 1, 2, 256
LENGTHS = (1024, 2048, 4096, 8192)


def batch(c: int) -> tuple[RolloutBatch, RewardBatch]:
  """Shapes of a batch whose completions have C = c tokens."""
  of = jax.ShapeDtypeStruct
  prompts = PromptBatch(of((P, S), jnp.int32), of((P,), jnp.int32), of((P,), jnp.int32))
  rollout = RolloutBatch(
    prompts, of((P, G, c), jnp.int32), of((P, G), jnp.int32), of((P, G), jnp.bool_),
    of((P, G, c), jnp.float32), of((P, G, c), jnp.float32),
  )  # fmt: skip
  return rollout, RewardBatch(of((P, G), jnp.float32), of((P, G), jnp.float32), of((P,), jnp.bool_))


def temporaries(c: int, form: str) -> int:
  """Bytes of one update's temporaries."""
  layout = sharding.make_layout(sharding.make_mesh(1, 1, 1), sharding.TRAIN_RULES, P, G)
  settings = step.UpdateSettings(
    ARCH, ModelConfig(attention=form, remat="full"),
    RolloutConfig(prompts=P, group=G, max_prompt_length=S, max_completion_length=c),
    PolicyWeightConfig(), FadeConfig(), LossConfig(logprob_chunk=256), 1,
  )  # fmt: skip
  optimizer = optax.adam(1e-3)
  init = lambda params: step.init_state(params, optimizer, FadeConfig())  # noqa: E731
  state = jax.eval_shape(init, model.abstract_params(ARCH))
  update = step.make_update(settings, optimizer, lambda count: 1e-3, layout)
  analysis = update.lower(state, *batch(c)).compile().memory_analysis()
  assert analysis is not None
  return analysis.temp_size_in_bytes


def main() -> None:
  """Prints a row a length."""
  print(
    f"{dataclasses.asdict(ARCH)['layers']} layers, P = {P}, G = {G}, S = {S}; MB of temporaries"
  )
  before: dict[str, int] = {}
  for c in LENGTHS:
    row = f"C = {c:5}"
    for form in ("plain", "blocks"):
      size = temporaries(c, form)
      ratio = f"× {size / before[form]:.2f}" if form in before else ""
      row += f"   {form} {size / 1e6:9.1f} {ratio:7}"
      before[form] = size
    print(row, flush=True)


if __name__ == "__main__":
  main()
