"""From sampled tokens to rewards: text, verdicts, numbers."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from fadejax.algorithm.losses import overlong_penalty
from fadejax.arrays import RewardBatch, RolloutBatch
from fadejax.config import RewardConfig
from fadejax.config_check import extra_name
from fadejax.data.tokenizer import Tokenizer
from fadejax.verify import STATUSES, Verdict, VerifierPool

TRUNCATED = Verdict(0.0, "no_answer", "truncated before a stop token")


@dataclasses.dataclass(frozen=True)
class Graded:
  """A rollout as the host sees it, row-major: completion g of prompt p is at p · G + g."""

  texts: list[str]
  verdicts: list[Verdict]
  rewards: RewardBatch  # NumPy
  extra: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)  # name → f32[P, G]


@dataclasses.dataclass(frozen=True)
class Asked:
  """What the graders are given for a rollout.

  Attributes:
    texts: of every completion, row-major.
    items: (verifier, text, record) for `VerifierPool.grade`.
    where: (verifier's index, completion's index) of every item; index 0 is the problem's own.
  """

  texts: list[str]
  items: list[tuple[str, str, dict[str, Any]]]
  where: list[tuple[int, int]]


def grade(
  rollout: RolloutBatch,
  problems: Sequence[dict[str, Any]],
  tokenizer: Tokenizer,
  pool: VerifierPool,
  config: RewardConfig,
) -> Graded:
  """Decodes a rollout and has it graded: `ask`, the pool, `reward`."""
  asked = ask(rollout, problems, tokenizer, config)
  return reward(asked, pool.grade(asked.items), rollout, config)


def ask(
  rollout: RolloutBatch,
  problems: Sequence[dict[str, Any]],
  tokenizer: Tokenizer,
  config: RewardConfig,
) -> Asked:
  """Decodes a rollout.

  With `require_end` a truncated completion earns 0 and is not sent to a grader.

  Args:
    rollout: on the host (NumPy leaves).
    problems: one record a prompt; fewer than P where the batch is padded: the rest is never sent.
    tokenizer: turns sampled ids into text; ids are never encoded again.
    config: from verdict to reward.
  """
  g = rollout.tokens.shape[1]
  texts, items, where = [], [], []
  kinds: tuple[dict[str, Any], ...] = ({}, *config.extra)  # the problem's own verifier, and more
  for i, problem in enumerate(problems):
    for j in range(g):
      # The stop token is no part of the answer.
      length = int(rollout.lengths[i, j]) - (not rollout.truncated[i, j])
      texts.append(tokenizer.decode(rollout.tokens[i, j, :length].tolist()))
      if not (config.require_end and rollout.truncated[i, j]):
        for kind, fields in enumerate(kinds):
          record = {**problem, **fields} if fields else problem
          items.append((record["verifier"], texts[-1], record))
          where.append((kind, i * g + j))
  return Asked(texts, items, where)


def reward(
  asked: Asked, answers: Sequence[Verdict], rollout: RolloutBatch, config: RewardConfig
) -> Graded:
  """From the graders' verdicts to rewards.

  A group with a `grader_error` is invalid as a whole, one of an extra verifier's too; so is one
  without a problem.

  Args:
    asked: what the graders were given.
    answers: their verdicts, one an item.
    rollout: on the host.
    config: from verdict to reward.
  """
  p, g, c = rollout.tokens.shape
  kinds = 1 + len(config.extra)
  verdicts = [[TRUNCATED] * len(asked.texts) for _ in range(kinds)]
  for (kind, index), verdict in zip(asked.where, answers, strict=True):
    verdicts[kind][index] = verdict
  scores = np.zeros((kinds, p, g), np.float32)
  valid = np.zeros(p, bool)
  for i in range(len(asked.texts) // g):
    groups = [of_kind[i * g : (i + 1) * g] for of_kind in verdicts]
    valid[i] = all(v.reward is not None for group in groups for v in group)
    if valid[i]:
      scores[:, i] = [[v.reward for v in group] for group in groups]
  shaping = np.zeros((p, g), np.float32)
  if config.overlong_buffer:
    shaping = np.asarray(overlong_penalty(rollout.lengths, c, config.overlong_buffer), np.float32)
  for fields, score in zip(config.extra, scores[1:], strict=True):
    shaping = shaping + np.float32(fields["weight"]) * score
  rewards = RewardBatch(scores[0], shaping, valid)  # type: ignore[arg-type]
  extra = {extra_name(f): score for f, score in zip(config.extra, scores[1:], strict=True)}
  return Graded(asked.texts, verdicts[0], rewards, extra)


def to_host(rollout: RolloutBatch) -> RolloutBatch:
  """The rollout with NumPy leaves."""
  return jax.tree.map(np.asarray, jax.device_get(rollout))


def verdict_shares(verdicts: Sequence[Verdict]) -> dict[str, float]:
  """`verdict/<status>` → share of the verdicts, for every status there is."""
  counts = collections.Counter(v.status for v in verdicts)
  return {f"verdict/{status}": counts[status] / max(1, len(verdicts)) for status in STATUSES}


def task_solve_rates(
  batches: Sequence[RewardBatch], problems: Sequence[dict[str, Any]]
) -> dict[str, float]:
  """`solve_rate/<task>` → mean reward over a task's valid groups, where there are several."""
  names = sorted({problem["task"] for problem in problems})
  if len(names) < 2:
    return {}
  rewards = np.concatenate([np.clip(batch.rewards, 0.0, 1.0) for batch in batches])
  valid = np.concatenate([batch.valid for batch in batches])
  rates = {}
  for name in names:
    rows = [i for i, problem in enumerate(problems) if problem["task"] == name and valid[i]]
    if rows:
      rates[f"solve_rate/{name}"] = float(np.mean(rewards[rows]))
  return rates


def extra_means(graded: Sequence[Graded]) -> dict[str, float]:
  """`reward/<name>` → mean of an extra reward over the valid groups."""
  valid = np.concatenate([batch.rewards.valid for batch in graded])
  if not valid.any():
    return {}
  names = graded[0].extra
  return {
    f"reward/{name}": float(np.mean(np.concatenate([b.extra[name] for b in graded])[valid]))
    for name in names
  }


def sample_rows(
  step: int,
  graded: Graded,
  rollout: RolloutBatch,
  problems: Sequence[dict[str, Any]],
  prompts: Sequence[str],
  count: int,
) -> list[dict[str, Any]]:
  """Rows for samples.jsonl: completion 0 of the first `count` prompts."""
  g = rollout.tokens.shape[1]
  rows = []
  for i, problem in enumerate(problems[:count]):
    verdict, length = graded.verdicts[i * g], int(rollout.lengths[i, 0])
    rows.append(
      {
        "step": step,
        "draw": int(rollout.prompts.draw[i]),
        "task": problem["task"],
        "prompt": prompts[i],
        "completion": graded.texts[i * g],
        "reward": verdict.reward,
        "status": verdict.status,
        "detail": verdict.detail,
        "length": length,
        "truncated": bool(rollout.truncated[i, 0]),
        "entropy": float(np.mean(rollout.entropy[i, 0, :length])),
      }
    )
  return rows
