"""What an evaluation's numbers are of."""

from __future__ import annotations

import pytest

from fadejax.config import EvaluationConfig
from fadejax.train import evaluation


def test_a_dropped_prompt_stays_in_the_denominator_as_wrong():
  """Ten prompts, two over the limit, five of the rest right: 0.5, not 0.625 (rllm#382)."""
  tallies = [evaluation._Tally(str(i), "t", n=1, c=int(i < 5), greedy=i < 5) for i in range(8)]
  tallies += [evaluation._Tally(str(i), "t", n=1, greedy=False, dropped="long") for i in (8, 9)]
  metrics = evaluation._metrics(tallies, EvaluationConfig(samples=1, ks=(1,)))
  assert metrics["pass@1"] == pytest.approx(0.5) and metrics["greedy"] == pytest.approx(0.5)
  assert metrics["dropped"] == 2 and metrics["n_problems"] == 10
