"""From tokens to rewards: what is sent to a grader, what an invalid group costs."""

from __future__ import annotations

import numpy as np
import pytest

from fadejax.arrays import PromptBatch, RolloutBatch
from fadejax.config import RewardConfig
from fadejax.data.tokenizer import characters
from fadejax.train import rollout as rollouts
from fadejax.verify import Verdict, VerifierPool

TOKENS = characters("0123456789+= ")
EOS = TOKENS.stop_ids[0]


class Pool:
  """Grades on the spot: right where the text equals the answer; "?" cannot be graded."""

  def __init__(self):
    self.seen = []

  def grade(self, items):
    self.seen += [text for _, text, _ in items]
    return [
      Verdict(None, "grader_error", "down")
      if problem["answer"] == "?"
      else Verdict(float(text == problem["answer"]), "ok")
      for _, text, problem in items
    ]


def rollout_of(texts, c=4):
  """texts [P][G]; one that is c long without an end is truncated."""
  p, g = len(texts), len(texts[0])
  tokens = np.full((p, g, c), 5, np.int32)  # past the length: must not be read
  lengths = np.zeros((p, g), np.int32)
  truncated = np.zeros((p, g), bool)
  for i, row in enumerate(texts):
    for j, text in enumerate(row):
      ids = TOKENS.encode(text)
      truncated[i, j] = len(ids) == c
      ids = ids if truncated[i, j] else [*ids, EOS]
      tokens[i, j, : len(ids)], lengths[i, j] = ids, len(ids)
  prompts = PromptBatch(np.zeros((p, 2), np.int32), np.full(p, 2), np.arange(7, 7 + p))
  zeros = np.zeros((p, g, c), np.float32)
  return RolloutBatch(prompts, tokens, lengths, truncated, zeros, zeros + 0.5)


def problems(*answers):
  return [{"id": str(i), "task": f"t{i % 2}", "verifier": "exact", "answer": a}
          for i, a in enumerate(answers)]  # fmt: skip


def test_text_ends_before_the_stop_token_and_rewards_follow_verdicts():
  pool = Pool()
  graded = rollouts.grade(
    rollout_of([["12", "3"], ["1234", "5"]]), problems("12", "1234"), TOKENS, pool, RewardConfig()
  )
  assert pool.seen == ["12", "3", "1234", "5"]
  np.testing.assert_array_equal(graded.rewards.rewards, [[1, 0], [1, 0]])
  assert graded.rewards.valid.all()
  assert rollouts.task_solve_rates([graded.rewards], problems("12", "1234")) == {
    "solve_rate/t0": 0.5,
    "solve_rate/t1": 0.5,
  }


def test_texts_without_an_answer_are_reported_apart_from_wrong_ones():
  """Handed case C136: a base model's ways of giving 18, one without any answer, one wrong."""
  texts = ["The total is 18.", "#### 18", r"\boxed{18}", "I am not sure.", r"\boxed{81}"]
  items = [("math", text, {"answer": "18"}) for text in texts]
  with VerifierPool(workers=1) as pool:
    verdicts = pool.grade(items)
  assert [v.reward for v in verdicts] == [1.0, 1.0, 1.0, 0.0, 0.0]
  shares = rollouts.verdict_shares(verdicts)
  assert shares["verdict/no_answer"] == 0.2 and shares["verdict/ok"] == 0.8


def test_a_truncated_completion_can_be_worth_nothing():
  pool = Pool()
  graded = rollouts.grade(
    rollout_of([["12", "3"], ["1234", "5"]]),
    problems("12", "1234"),
    TOKENS,
    pool,
    RewardConfig(require_end=True),
  )
  assert pool.seen == ["12", "3", "5"]
  np.testing.assert_array_equal(graded.rewards.rewards, [[1, 0], [0, 0]])
  shares = rollouts.verdict_shares(graded.verdicts)
  assert shares["verdict/no_answer"] == 0.25 and shares["verdict/ok"] == 0.75
  assert sum(shares.values()) == 1


def test_one_verdict_that_cannot_be_reached_makes_its_group_invalid():
  graded = rollouts.grade(
    rollout_of([["1", "2"], ["1", "2"]]), problems("?", "2"), TOKENS, Pool(), RewardConfig()
  )
  assert graded.rewards.valid.tolist() == [False, True]
  np.testing.assert_array_equal(graded.rewards.rewards, [[0, 0], [0, 1]])
  assert rollouts.verdict_shares(graded.verdicts)["verdict/grader_error"] == 0.5


def test_padding_of_a_batch_is_never_graded():
  pool = Pool()
  graded = rollouts.grade(
    rollout_of([["1", "2"], ["3", "4"]]), problems("1"), TOKENS, pool, RewardConfig()
  )
  assert pool.seen == ["1", "2"] and graded.rewards.valid.tolist() == [True, False]


def test_overlong_shaping_is_apart_from_the_reward():
  graded = rollouts.grade(
    rollout_of([["1", "123"], ["12", "1234"]]),
    problems("1", "9"),
    TOKENS,
    Pool(),
    RewardConfig(overlong_buffer=2),
  )
  np.testing.assert_allclose(graded.rewards.shaping, [[0, -1], [-0.5, -1]])
  np.testing.assert_array_equal(graded.rewards.rewards, [[1, 0], [0, 0]])


def test_sample_rows_say_what_happened():
  rollout = rollout_of([["12", "3"], ["1234", "5"]])
  graded = rollouts.grade(rollout, problems("12", "7"), TOKENS, Pool(), RewardConfig())
  rows = rollouts.sample_rows(3, graded, rollout, problems("12", "7"), ["a", "b"], 2)
  assert [r["completion"] for r in rows] == ["12", "1234"]
  assert rows[0] == {
    "step": 3, "draw": 7, "task": "t0", "prompt": "a", "completion": "12", "reward": 1.0,
    "status": "ok", "detail": "", "length": 3, "truncated": False, "entropy": pytest.approx(0.5),
  }  # fmt: skip
  assert rows[1]["truncated"] and rows[1]["draw"] == 8


def test_extra_rewards_shape_what_is_trained_on_and_nothing_else():
  pool = Pool()
  extra = (
    {"verifier": "exact", "answer": "5", "weight": 0.25, "name": "five"},
    {"verifier": "exact", "answer": "12", "weight": -1},
  )
  graded = rollouts.grade(
    rollout_of([["12", "3"], ["1234", "5"]]), problems("12", "1234"), TOKENS, pool,
    RewardConfig(extra=extra),
  )  # fmt: skip
  assert pool.seen == ["12"] * 3 + ["3"] * 3 + ["1234"] * 3 + ["5"] * 3
  np.testing.assert_array_equal(graded.rewards.rewards, [[1, 0], [1, 0]])
  np.testing.assert_array_equal(graded.rewards.shaping, [[-1, 0], [0, 0.25]])
  assert rollouts.extra_means([graded]) == {"reward/five": 0.25, "reward/exact": 0.25}
  # One that cannot be graded makes the group invalid, and leaves its rewards at zero.
  failing = rollouts.grade(
    rollout_of([["12", "3"]]), problems("12"), TOKENS, pool,
    RewardConfig(extra=({"verifier": "exact", "answer": "?", "weight": 1.0},)),
  )  # fmt: skip
  assert not failing.rewards.valid[0] and not failing.rewards.rewards.any()
  assert rollouts.extra_means([failing]) == {}
