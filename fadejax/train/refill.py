"""Dynamic sampling: groups that teach nothing give way to fresh prompts (DAPO, arXiv:2503.14476).

A group whose rewards agree has no gradient under a centred weight. With
`rollout.dynamic_sampling` a step draws further batches until it has P groups with differing
rewards, or `rollout.max_batches` batches. Shapes never change: what is missing is marked invalid,
so it leaves the loss and its divisor. Groups beyond P are dropped and counted. FADE's averages and
the metrics are of all that was drawn.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fadejax.algorithm.weights import EQUAL_SPREAD, SUCCESS
from fadejax.arrays import RewardBatch
from fadejax.train.batches import Batch
from fadejax.train.rollout import Graded
from fadejax.train.step import Tally


@dataclasses.dataclass(frozen=True)
class Refilled:
  """What a step trains on, and what it took.

  Attributes:
    batch: P groups; those in excess of `found` are invalid.
    tally: of all that was drawn.
    batches: how many were drawn.
    found: groups with differing rewards among the P, 0 to P.
    surplus: such groups that were drawn and did not fit.
    all_wrong: groups drawn whose rewards agree and are under 0.5.
    all_right: those whose rewards agree and are not.
    outcome: "full", "short" (the bound was hit), or "none" (it was hit with nothing found).
  """

  batch: Batch
  tally: Tally
  batches: int
  found: int
  surplus: int
  all_wrong: int
  all_right: int
  outcome: str


def informative(rewards: RewardBatch) -> np.ndarray:
  """bool[P], valid groups whose raw rewards differ."""
  spread = np.ptp(np.asarray(rewards.rewards), axis=1)
  return np.asarray(rewards.valid) & (spread >= EQUAL_SPREAD)


def refill(
  draw_batch: Callable[[int], Batch],
  measure: Callable[[Batch], Tally],
  first_draw: int,
  max_batches: int,
) -> Refilled:
  """Draws batches until there are P informative groups, at most `max_batches`.

  Args:
    draw_batch: samples and grades the P prompts that start at a draw index.
    measure: a batch's part of the means.
    first_draw: where the step starts.
    max_batches: at least 1.
  """
  batch = draw_batch(first_draw)
  total, batches = measure(batch), 1
  good = informative(batch.graded.rewards)
  size, surplus = len(good), 0
  wrong, right = _agreeing(batch)
  while good.sum() < size and batches < max_batches:
    new = draw_batch(first_draw + batches * size)
    total, batches = total + measure(new), batches + 1
    more = _agreeing(new)
    wrong, right = wrong + more[0], right + more[1]
    found = np.concatenate([np.flatnonzero(good), size + np.flatnonzero(_informative(new))])
    surplus += max(0, len(found) - size)
    found = found[:size]
    rows = np.concatenate([found, np.flatnonzero(~good)[: size - len(found)]])
    batch, good = merge(batch, new, rows), np.arange(size) < len(found)
  rewards = dataclasses.replace(batch.graded.rewards, valid=good)  # type: ignore[arg-type]
  graded = dataclasses.replace(batch.graded, rewards=rewards)
  found_count = int(good.sum())
  outcome = "full" if found_count == size else "short" if found_count else "none"
  batch = dataclasses.replace(batch, graded=graded)
  return Refilled(batch, total, batches, found_count, surplus, wrong, right, outcome)


def _informative(batch: Batch) -> np.ndarray:
  return informative(batch.graded.rewards)


def _agreeing(batch: Batch) -> tuple[int, int]:
  """How many valid groups are all wrong, and all right."""
  rewards = batch.graded.rewards
  agree = np.asarray(rewards.valid) & ~informative(rewards)
  high = np.asarray(rewards.rewards)[:, 0] >= SUCCESS
  return int(np.sum(agree & ~high)), int(np.sum(agree & high))


def _take(kept: Any, new: Any, rows: jax.Array) -> Any:
  return jax.tree.map(lambda a, b: jnp.concatenate([a, b])[rows], kept, new)


def merge(kept: Batch, new: Batch, rows: np.ndarray) -> Batch:
  """Rows i32[P] of the 2 P groups of both, those of `kept` first; placed as `kept` is."""
  # As it was, so that the update meets one placement and is compiled once.
  places = jax.tree.map(lambda x: x.sharding, kept.rollout)
  take = jax.jit(_take, out_shardings=places)
  on_host = lambda a, b: np.concatenate([a, b])[rows]  # noqa: E731
  group = kept.host.tokens.shape[1]
  texts = kept.graded.texts + new.graded.texts
  verdicts = kept.graded.verdicts + new.graded.verdicts
  problems = kept.problems + new.problems
  flat = [int(row) * group + g for row in rows for g in range(group)]
  return Batch(
    rollout=take(kept.rollout, new.rollout, jnp.asarray(rows)),
    host=jax.tree.map(on_host, kept.host, new.host),
    problems=tuple(problems[row] for row in rows),
    graded=Graded(
      [texts[i] for i in flat],
      [verdicts[i] for i in flat],
      jax.tree.map(on_host, kept.graded.rewards, new.graded.rewards),
      jax.tree.map(on_host, kept.graded.extra, new.graded.extra),
    ),
  )
