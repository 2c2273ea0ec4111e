from __future__ import annotations

import math

import pytest

from fadejax.verify.verdict import Verdict, after_thinking, check_count, to_verdict


def test_status_and_reward_must_go_together():
  assert Verdict(1, "ok").reward == 1.0 and isinstance(Verdict(1, "ok").reward, float)
  assert Verdict(None, "grader_error", "x").reward is None
  for reward, status in [
    (None, "ok"),
    (1.0, "grader_error"),
    (0.5, "timeout"),
    (1.0, "no_answer"),
    (0.0, "fine"),
    (1.5, "ok"),
    (-0.1, "ok"),
    (math.nan, "ok"),
    (math.inf, "ok"),
    ("1", "ok"),
    (True, "ok"),
  ]:
    with pytest.raises(ValueError):
      Verdict(reward, status)


def test_a_verdict_is_frozen_and_its_detail_bounded():
  verdict = Verdict(0.0, "ok", "x" * 10_000)
  assert len(verdict.detail) == 500
  with pytest.raises(AttributeError):
    verdict.reward = 1.0


@pytest.mark.parametrize("value", [1.5, -1, math.nan, math.inf, "1", [1.0], None])
def test_a_bad_reward_is_the_graders_fault_and_names_it(value):
  verdict = to_verdict(value, "my.module:reward")
  assert verdict.status == "grader_error" and "my.module:reward" in verdict.detail


def test_good_rewards_pass():
  assert [to_verdict(v, "g").reward for v in (True, False, 0, 1, 0.25)] == [1, 0, 0, 1, 0.25]


def test_a_short_batch_of_rewards_names_the_function_and_the_counts():
  """Handed case C104: one reward for three completions would broadcast."""
  with pytest.raises(ValueError, match=r"length_reward returned 1 reward\(s\) instead of 3"):
    check_count("length_reward", [1.0], 3)
  check_count("length_reward", [1.0] * 3, 3)


def test_only_what_follows_the_thinking_part_counts():
  assert after_thinking("7") == "7"
  assert after_thinking("<think>5</think> 7") == " 7"
  assert after_thinking("5</think>7") == "7"  # the template opened it
  assert after_thinking("<think>a</think>5<think>7") is None
