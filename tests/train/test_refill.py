"""Dynamic sampling: full, short or empty batches, every group with its own verdicts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fadejax.arrays import PromptBatch, RewardBatch, RolloutBatch
from fadejax.train import refill
from fadejax.train import step as steps
from fadejax.train.rollout import Graded
from fadejax.verify import Verdict

P, G, C = 4, 2, 3


def source(solved):
  """Batches whose prompt d has `solved[d]` right completions; -1: could not be graded."""
  drawn = []

  def draw_batch(first):
    drawn.append(first)
    draw = np.arange(first, first + P)
    counts = np.array([solved[d] for d in draw])
    tokens = np.broadcast_to(draw[:, None, None], (P, G, C)).astype(np.int32)
    rollout = RolloutBatch(
      PromptBatch(tokens[:, 0], np.full(P, 2, np.int32), draw.astype(np.int32)),
      tokens,
      np.full((P, G), C, np.int32),
      np.zeros((P, G), bool),
      np.zeros((P, G, C), np.float32),
      np.full((P, G, C), 0.5, np.float32),
    )
    rewards = (np.arange(G) < counts[:, None]).astype(np.float32)
    graded = Graded(
      [f"{d}.{g}" for d in draw for g in range(G)],
      [Verdict(float(r), "ok", f"{d}") for d, row in zip(draw, rewards, strict=True) for r in row],
      RewardBatch(rewards, np.zeros((P, G), np.float32), counts >= 0),
    )
    problems = tuple({"id": int(d)} for d in draw)
    return refill.Batch(jax.tree.map(jnp.asarray, rollout), rollout, problems, graded)

  return draw_batch, drawn


def measure(batch):
  return jax.jit(steps.tally)(batch.rollout, jax.tree.map(jnp.asarray, batch.graded.rewards))


def check(batch, kept):
  """Every part of the batch tells of the same prompts, the first len(kept) of them valid."""
  ids = [problem["id"] for problem in batch.problems]
  assert ids[: len(kept)] == kept and len(ids) == P
  np.testing.assert_array_equal(batch.graded.rewards.valid, np.arange(P) < len(kept))
  for rollout in (batch.rollout, batch.host):
    np.testing.assert_array_equal(rollout.prompts.draw, ids)
    np.testing.assert_array_equal(np.asarray(rollout.tokens)[:, 0, 0], ids)
  assert batch.graded.texts == [f"{d}.{g}" for d in ids for g in range(G)]
  assert [v.detail for v in batch.graded.verdicts] == [str(d) for d in ids for _ in range(G)]
  rewards = batch.graded.rewards.rewards
  assert all(rewards[i].sum() == 1 for i in range(len(kept)))


def test_a_batch_of_mixed_groups_is_taken_as_it_is():
  draw_batch, drawn = source([1] * P)
  done = refill.refill(draw_batch, measure, 0, 4)
  assert (done.outcome, done.batches, done.found, done.surplus, drawn) == ("full", 1, P, 0, [0])
  check(done.batch, [0, 1, 2, 3])


def test_groups_that_agree_give_way_to_fresh_prompts():
  #          0..3 solved 2,1,0,-1   4..7: 0,0,1,2   8..11: 1,1,1,1
  draw_batch, drawn = source([2, 1, 0, -1, 0, 0, 1, 2, 1, 1, 1, 1])
  done = refill.refill(draw_batch, measure, 0, 4)
  assert (done.outcome, done.batches, done.found, done.surplus) == ("full", 3, P, 2)
  assert drawn == [0, 4, 8]
  check(done.batch, [1, 6, 8, 9])
  # Of the eleven groups with a verdict, 10 completions of 22 were right.
  metrics = done.tally.metrics()
  assert float(metrics["solve_rate"]) == pytest.approx(10 / 22)
  assert float(metrics["mixed_share"]) == pytest.approx(6 / 11)
  assert float(metrics["entropy"]) == pytest.approx(0.5)
  assert (done.all_wrong, done.all_right) == (3, 2)
  assert int(metrics["invalid_groups"]) == 1 and int(metrics["tokens"]) == 12 * G * C


def test_the_bound_leaves_the_batch_short_and_says_so():
  draw_batch, drawn = source([0, 1, 2, 0, 0, 0, 0, 1])
  done = refill.refill(draw_batch, measure, 0, 2)
  assert (done.outcome, done.batches, done.found) == ("short", 2, 2) and drawn == [0, 4]
  check(done.batch, [1, 7])


def test_nothing_found_is_named():
  draw_batch, _ = source([0, 2] * 4)
  done = refill.refill(draw_batch, measure, 0, 2)
  assert (done.outcome, done.found, done.all_wrong, done.all_right) == ("none", 0, 4, 4)
  check(done.batch, [])


def test_a_later_step_starts_where_it_is_told():
  draw_batch, drawn = source([0] * 8 + [1] * 4)
  assert refill.refill(draw_batch, measure, 8, 1).outcome == "full" and drawn == [8]


def test_continuous_rewards_that_differ_are_kept():
  rewards = RewardBatch(
    np.float32([[0.2, 0.4], [0.3, 0.3 + 1e-8], [1, 0]]), np.zeros((3, 2)), np.array([1, 1, 0], bool)
  )
  assert refill.informative(rewards).tolist() == [True, False, False]


def test_handed_survivors():
  """Eight wanted, 5 and 6 found: 8 trained, 3 left over (areal#450)."""
  draw = [1] * 5 + [0] * 3 + [1] * 6 + [0] * 2
  wide, drawn = source_of_eight(draw)
  done = refill.refill(wide, measure, 0, 4)
  assert (done.outcome, done.found, done.surplus, drawn) == ("full", 8, 3, [0, 8])
  assert done.batch.rollout.tokens.shape == (8, G, C)


def source_of_eight(solved):
  """Two batches of four as one of eight."""
  four, _ = source(solved)
  drawn = []

  def draw_batch(first):
    drawn.append(first)
    return refill.merge(four(first), four(first + 4), np.arange(8))

  return draw_batch, drawn


def test_a_grader_that_never_agrees_ends_with_counts():
  """A reward that is always 0: three batches, then a named outcome (verl#953)."""
  draw_batch, drawn = source([0] * 12)
  done = refill.refill(draw_batch, measure, 0, 3)
  assert (done.outcome, done.all_wrong, done.all_right) == ("none", 12, 0)
  assert drawn == [0, 4, 8]
