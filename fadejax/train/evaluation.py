"""Measures a policy: pass@k from samples and greedy accuracy, on held-out problems."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from fadejax.algorithm import passk
from fadejax.config import EvaluationConfig, RunConfig
from fadejax.data.pipeline import encode_batch
from fadejax.data.records import Task, TaskConfig
from fadejax.policy import model
from fadejax.policy.sampler import sample
from fadejax.policy.sharding import SAMPLE_RULES, make_layout
from fadejax.train import rollout as rollouts
from fadejax.train.setup import Policy, encoder, place_prompts, sampler_config
from fadejax.verify import VerifierPool


@dataclasses.dataclass
class _Tally:
  """What is known of one problem."""

  id: str
  task: str
  n: int = 0  # samples that could be graded
  c: int = 0  # of which right
  greedy: bool | None = None
  dropped: str = ""  # why it was not sampled: counts as wrong


def evaluate(
  policy: Policy,
  params: model.Params,
  tasks: Sequence[tuple[TaskConfig, Task]],
  pool: VerifierPool,
  config: RunConfig,
) -> dict[str, Any]:
  """Samples and grades every evaluation problem of every task.

  A prompt over the limit is not sampled, counts as wrong and is counted. A completion
  that could not be graded (`grader_error`) leaves n. The noise of a problem depends on the
  evaluation's seed and the problem's place, so that it is the same before and after.

  Args:
    policy: architecture, tokenizer, layouts.
    params: in the sampler's layout.
    tasks: their `eval` problems.
    pool: the graders.
    config: sections `evaluation`, `rollout` (lengths) and `reward`.

  Returns:
    {"settings", "metrics": {name: float}, "problems": [{"id", "task", "n", "c", "greedy"}]}.
  """
  settings = config.evaluation
  encode = encoder(policy.tokenizer, list(tasks))
  records = [{**r, "task": task.name} for _, task in tasks for r in task.eval]
  tallies = [_Tally(str(r["id"]), r["task"]) for r in records]
  limit = config.rollout.max_prompt_length
  fits = []
  for i, record in enumerate(records):
    length = len(encode(record))
    if length <= limit:
      fits.append(i)
    else:
      tallies[i].dropped = f"prompt of {length} tokens, limit {limit}"
      tallies[i].n, tallies[i].greedy = settings.samples, False
  entropies: list[np.ndarray] = []
  truncated: list[np.ndarray] = []
  for start in range(0, len(fits), settings.batch):
    chosen = fits[start : start + settings.batch]
    batch, real = encode_batch(
      [records[i] for i in chosen], encode, size=settings.batch, max_prompt_length=limit
    )
    batch = batch._replace(draw=np.resize(np.asarray(chosen, np.int32), settings.batch))
    for greedy in _passes(settings):
      host = _one_pass(policy, params, batch, greedy, config)
      graded = rollouts.grade(host, batch.problems[:real], policy.tokenizer, pool, config.reward)
      if not greedy:
        entropies.append(_flat_entropy(host, real))
        truncated.append(host.truncated[:real].ravel())
      g = host.tokens.shape[1]
      for row, i in enumerate(chosen):
        rewards = [v.reward for v in graded.verdicts[row * g : (row + 1) * g]]
        known = [r for r in rewards if r is not None]
        if greedy:
          tallies[i].greedy = known[0] >= 0.5 if known else None
        else:
          tallies[i].n, tallies[i].c = len(known), sum(r >= 0.5 for r in known)
  metrics = _metrics(tallies, settings)
  if entropies:
    metrics["entropy"] = float(np.concatenate(entropies).mean())
    metrics["truncated_share"] = float(np.concatenate(truncated).mean())
  names = sorted({t.task for t in tallies})
  if len(names) > 1:
    for name in names:
      own = _metrics([t for t in tallies if t.task == name], settings)
      metrics |= {f"{name}/{key}": value for key, value in own.items()}
  return {
    "settings": {
      **dataclasses.asdict(settings),
      "max_prompt_length": limit,
      "max_completion_length": config.rollout.max_completion_length,
    },
    "metrics": metrics,
    "problems": [
      {k: v for k, v in dataclasses.asdict(t).items() if k != "dropped" or v} for t in tallies
    ],
  }


def _passes(settings: EvaluationConfig) -> list[bool]:
  """The passes over each batch: False for samples, True for greedy."""
  return [False] * (settings.samples > 0) + [True] * settings.greedy


def _one_pass(
  policy: Policy,
  params: model.Params,
  batch: Any,
  greedy: bool,
  config: RunConfig,
) -> Any:
  """Completions of one batch of problems, on the host."""
  settings = config.evaluation
  group = 1 if greedy else settings.samples
  layout = make_layout(policy.mesh, SAMPLE_RULES, settings.batch, group)
  sampler = sampler_config(config, policy.tokenizer, settings, group, greedy)
  root = jax.random.key(settings.seed)
  prompts = place_prompts(batch, layout)
  return rollouts.to_host(
    sample(params, prompts, root, arch=policy.arch, config=sampler, layout=layout)
  )


def _flat_entropy(host: Any, real: int) -> np.ndarray:
  """Entropies of the generated tokens of the first `real` prompts."""
  inside = np.arange(host.tokens.shape[2])[None, None, :] < host.lengths[..., None]
  return host.entropy[:real][inside[:real]]


def _metrics(tallies: Sequence[_Tally], settings: EvaluationConfig) -> dict[str, float]:
  metrics: dict[str, float] = {"n_problems": len(tallies)}
  if settings.samples:
    n = np.array([t.n for t in tallies])
    c = np.array([t.c for t in tallies])
    for k in settings.ks:
      metrics[f"pass@{k}"] = float(np.nanmean(passk.pass_at_k(n, c, k)))
  if settings.greedy:
    known = [t.greedy for t in tallies if t.greedy is not None]
    metrics["greedy"] = float(np.mean(known)) if known else float("nan")
  dropped = sum(bool(t.dropped) for t in tallies)
  if dropped:
    metrics["dropped"] = dropped
  return metrics
