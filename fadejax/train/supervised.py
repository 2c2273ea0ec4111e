"""Demonstrations as arrays: for the supervised warm-up, and beside RL in parallel averaging."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from fadejax.arrays import PromptBatch, RolloutBatch
from fadejax.config import RunConfig
from fadejax.data.pipeline import HostBatch
from fadejax.data.records import Task, TaskConfig
from fadejax.policy import sharding
from fadejax.policy.sharding import Layout
from fadejax.train import setup

SEED = 1_000_003  # added to the run's: RL must not meet the same problems in the same order


def source(
  config: RunConfig, tasks: list[tuple[TaskConfig, Task]], policy: setup.Policy
) -> Callable[[int], RolloutBatch]:
  """Function from a step (from 1) to its `sft.batch` demonstrations, on the devices.

  Raises:
    ValueError: a task without demonstrations, or a batch that the mesh cannot split.
  """
  missing = [task.name for _, task in tasks if task.demonstrations is None]
  if missing:
    raise ValueError(f"config.task: {', '.join(missing)} has no demonstrations to learn from")
  size = config.sft.batch
  pipeline = setup.build_pipeline(
    config, tasks, policy.tokenizer, prompts=size, seed=config.seed + SEED
  )
  layout = sharding.make_layout(policy.mesh, sharding.TRAIN_RULES, size, 1)

  def of_step(step: int) -> RolloutBatch:
    host = pipeline.batch((step - 1) * size)
    longest = config.rollout.max_completion_length
    return place(host, demonstrations(host.problems, policy.tokenizer, tasks, longest), layout)

  return of_step


def demonstrations(
  problems: Sequence[dict[str, Any]],
  tokenizer: setup.Tokenizer,
  tasks: list[tuple[TaskConfig, Task]],
  size: int,
) -> tuple[np.ndarray, np.ndarray]:
  """Tokens i32[P, 1, C] and lengths i32[P, 1] of the problems' demonstrations, each ended.

  Raises:
    ValueError: a demonstration that is longer than `size`.
  """
  write = {task.name: task.demonstrations for _, task in tasks if task.demonstrations}
  tokens = np.full((len(problems), 1, size), tokenizer.pad_id, np.int32)
  lengths = np.zeros((len(problems), 1), np.int32)
  for i, problem in enumerate(problems):
    text = write[problem["task"]](problem)
    ids = [*tokenizer.encode(text), tokenizer.stop_ids[0]]
    if len(ids) > size:
      raise ValueError(
        f"demonstration {text!r} has {len(ids)} tokens, more than "
        f"rollout.max_completion_length = {size}"
      )
    tokens[i, 0, : len(ids)], lengths[i, 0] = ids, len(ids)
  return tokens, lengths


def place(
  host: HostBatch, completions: tuple[np.ndarray, np.ndarray], layout: Layout
) -> RolloutBatch:
  """A batch of demonstrations on the devices, as completions of groups of one."""
  prompts: PromptBatch = setup.place_prompts(host, layout)
  tokens, lengths = completions
  put = lambda x: jax.device_put(x, layout.sharding(("prompts",) + (None,) * (x.ndim - 1), x.shape))  # noqa: E731
  empty = np.zeros(tokens.shape, np.float32)
  return RolloutBatch(prompts, put(tokens), put(lengths), put(lengths < 0), put(empty), put(empty))
