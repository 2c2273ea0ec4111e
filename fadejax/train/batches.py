"""Where a step's batch comes from: prompts drawn, sampled and graded, at once or a step ahead.

With `rollout.staleness = 1` the graders work while the devices do: batch n + 1 is sampled while
batch n is graded, and so before update n. Its parameters are one update old when it is trained on.
JAX stays in the calling thread; the other one waits for the pool.
"""

from __future__ import annotations

import dataclasses
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fadejax.arrays import PromptBatch, RolloutBatch
from fadejax.config import RunConfig
from fadejax.data.pipeline import Pipeline
from fadejax.policy import model
from fadejax.policy.sampler import SamplerConfig, sample
from fadejax.policy.sharding import Layout
from fadejax.train import rollout as rollouts
from fadejax.train import setup
from fadejax.train.metrics import Clock
from fadejax.verify import Verdict, VerifierPool


@dataclasses.dataclass(frozen=True)
class Sampled:
  """A rollout batch on the devices and on the host, and its problems."""

  rollout: RolloutBatch
  host: RolloutBatch
  problems: tuple[dict[str, Any], ...]


@dataclasses.dataclass(frozen=True)
class Batch(Sampled):
  """With its verdicts."""

  graded: rollouts.Graded


@dataclasses.dataclass(frozen=True)
class Flight:
  """A batch that is with the graders.

  Attributes:
    sampled: the batch.
    asked: what the graders were given.
    answer: their verdicts, and the seconds that they took.
  """

  sampled: Sampled
  asked: rollouts.Asked
  answer: Future[tuple[list[Verdict], float]]


class Batches:
  """Draws batches. Close it after the pool: closing waits for the graders' thread."""

  def __init__(
    self,
    config: RunConfig,
    policy: setup.Policy,
    pipeline: Pipeline,
    sampler: SamplerConfig,
    pool: VerifierPool,
  ):
    self.config, self.policy, self.pipeline = config, policy, pipeline
    self.sampler, self.pool = sampler, pool
    self._thread = ThreadPoolExecutor(1, thread_name_prefix="grading")

  def close(self) -> None:
    """Ends the graders' thread."""
    self._thread.shutdown(cancel_futures=True)

  def draw(self, first: int, params: model.Params, clock: Clock) -> Batch:
    """Samples the prompts that start at draw `first`, and waits for their verdicts."""
    return self.land(self.launch(first, params, clock), clock)

  def launch(self, first: int, params: model.Params, clock: Clock) -> Flight:
    """Samples the prompts that start at draw `first`, and hands them to the graders."""
    with clock("data"):
      batch = self.pipeline.batch(first)
      prompts = setup.place_prompts(batch, self.policy.sample_layout)
    with clock("rollout"):
      rollout = sample(
        params,
        prompts,
        jax.random.key(self.config.seed),
        arch=self.policy.arch,
        config=self.sampler,
        layout=self.policy.sample_layout,
      )
      host = rollouts.to_host(rollout)
    with clock("grade"):
      return self._send(Sampled(rollout, host, batch.problems))

  def relaunch(self, first: int, rollout: RolloutBatch) -> Flight:
    """Hands over a batch that a checkpoint holds: its problems are drawn again, not its tokens.

    Raises:
      ValueError: the data now has other prompts at these draws, so its problems are not known.
    """
    drawn, host = self.pipeline.batch(first), rollouts.to_host(rollout)
    ours = (drawn.tokens, drawn.lengths, drawn.draw)
    theirs = (host.prompts.tokens, host.prompts.lengths, host.prompts.draw)
    if not all(map(np.array_equal, ours, theirs)):
      raise ValueError(
        f"the checkpoint holds a batch in flight (rollout.staleness) whose prompts are not those "
        f"that the data now has from draw {first} on: a file or template has changed since. Put it "
        "back, or take another --workdir with --config.init_from set to this one"
      )
    return self._send(Sampled(rollout, host, drawn.problems))

  def _send(self, sampled: Sampled) -> Flight:
    asked = rollouts.ask(sampled.host, sampled.problems, self.policy.tokenizer, self.config.reward)

    def grade() -> tuple[list[Verdict], float]:
      start = time.perf_counter()
      return self.pool.grade(asked.items), time.perf_counter() - start

    return Flight(sampled, asked, self._thread.submit(grade))

  def land(self, flight: Flight, clock: Clock) -> Batch:
    """Waits for the verdicts; an exception of the pool's is raised here."""
    with clock("grade_wait"):
      verdicts, seconds = flight.answer.result()
    clock.add("grade", seconds)
    sampled = flight.sampled
    with clock("grade"):
      graded = rollouts.reward(flight.asked, verdicts, sampled.host, self.config.reward)
    return Batch(sampled.rollout, sampled.host, sampled.problems, graded)


def abstract_rollout(config: RunConfig, layout: Layout) -> RolloutBatch:
  """A batch of training as jax.ShapeDtypeStruct, placed as the sampler places it."""
  r = config.rollout
  p, g, c, s = r.prompts, r.group, r.max_completion_length, r.max_prompt_length

  def array(dtype: Any, axes: tuple[str | None, ...], *shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=layout.sharding(axes, shape))

  completion, token = ("prompts", "group"), ("prompts", "group", None)
  return RolloutBatch(
    prompts=PromptBatch(
      array(jnp.int32, ("prompts", None), p, s),
      array(jnp.int32, ("prompts",), p),
      array(jnp.int32, ("prompts",), p),
    ),
    tokens=array(jnp.int32, token, p, g, c),
    lengths=array(jnp.int32, completion, p, g),
    truncated=array(jnp.bool_, completion, p, g),
    sampler_logprobs=array(jnp.float32, token, p, g, c),
    entropy=array(jnp.float32, token, p, g, c),
  )
