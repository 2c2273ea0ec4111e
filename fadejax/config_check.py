"""What a resolved config must satisfy: ranges, choices, and fields that contradict each other."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import math
from typing import Any

import jax
import numpy as np

from fadejax.algorithm.weights import WEIGHTS
from fadejax.data.tasks import TASKS
from fadejax.verify import check_known
from fadejax.verify.walls import WALLS

RunConfig = Any  # that of config.py, which imports this module

_CHOICES: dict[str, tuple[str, ...]] = {
  "model.dtype": ("float32", "bfloat16"),
  "model.remat": ("none", "dots", "full"),
  "model.attention": ("auto", "plain", "blocks"),
  "model.matmul_precision": ("default", "high", "highest"),
  "rollout.when_none": ("skip", "stop"),
  "loss.ratio_level": ("token", "sequence"),
  "loss.form": ("clip", "cispo"),
  "loss.normaliser": ("token_mean", "sequence_mean", "constant"),
  "loss.old_logprobs": ("auto", "sampler", "recompute"),
  "loss.kl_estimator": ("k2", "k3", "k3_value_k2_gradient"),
  "optimizer.schedule": ("constant", "linear", "cosine"),
  "sft.schedule": ("constant", "linear", "cosine"),
  "log.wandb": ("disabled", "offline", "online"),
  "policy_weight.name": tuple(WEIGHTS),
  "verifier.sandbox": WALLS,
  "task.name": tuple(TASKS),
}
# Lowest allowed value, and whether it is itself allowed.
_AT_LEAST: dict[str, tuple[float, bool]] = {
  "steps": (0, True),
  "max_skipped_updates": (1, True),
  "rollout.prompts": (1, True),
  "rollout.group": (1, True),
  "rollout.max_prompt_length": (1, True),
  "rollout.max_completion_length": (1, True),
  "rollout.temperature": (0, False),
  "rollout.top_k": (0, True),
  "rollout.top_p": (0, False),
  "reward.overlong_buffer": (0, True),
  "loss.clip_low": (0, True),
  "loss.clip_high": (0, True),
  "loss.ratio_cap": (0, True),
  "loss.importance_cap": (0, True),
  "loss.kl_coefficient": (0, True),
  "loss.minibatches": (1, True),
  "loss.microbatches": (1, True),
  "loss.group_parts": (1, True),
  "loss.logprob_chunk": (0, True),
  "optimizer.learning_rate": (0, True),
  "optimizer.warmup_steps": (0, True),
  "optimizer.clip_norm": (0, True),
  "evaluation.every": (0, True),
  "evaluation.samples": (0, True),
  "evaluation.batch": (1, True),
  "evaluation.temperature": (0, False),
  "evaluation.top_p": (0, False),
  "checkpoint.every": (0, True),
  "checkpoint.keep": (1, True),
  "checkpoint.keep_best": (0, True),
  "verifier.workers": (1, True),
  "verifier.timeout_s": (0, False),
  "sft.batch": (1, True),
  "sft.steps": (1, True),
  "sft.learning_rate": (0, True),
  "sft.warmup_steps": (0, True),
  "sft.log_every": (1, True),
  "optimizer.weight_decay": (0, True),
  "log.samples_every": (0, True),
  "log.samples": (0, True),
  "log.head_every": (0, True),
  "rollout.max_batches": (1, True),
  "rollout.staleness": (0, True),
  "model.attention_block": (8, True),
}
_AT_MOST: dict[str, float] = {
  "rollout.top_p": 1,
  "evaluation.top_p": 1,
  "loss.clip_low": 1,
  "rollout.staleness": 1,
}


def _flat(run: RunConfig) -> dict[str, Any]:
  """`section.field` → value."""
  flat: dict[str, Any] = {}
  for name, value in dataclasses.asdict(run).items():
    flat |= (
      {f"{name}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {name: value}
    )
  return flat


def check(run: RunConfig) -> None:
  """Raises ValueError for values out of range and fields that contradict each other."""
  flat = _flat(run)
  for path, choices in _CHOICES.items():
    if flat[path] not in choices:
      near = difflib.get_close_matches(str(flat[path]), choices, n=1)
      hint = f"; did you mean {near[0]!r}?" if near else ""
      raise ValueError(f"config.{path}: {flat[path]!r} is not one of {', '.join(choices)}{hint}")
  for path, field in flat.items():
    if isinstance(field, float) and not math.isfinite(field):
      raise ValueError(f"config.{path}: a finite number is wanted, got {field}")
  for path, (lowest, inclusive) in _AT_LEAST.items():
    if flat[path] < lowest or (flat[path] == lowest and not inclusive):
      sign = "at least" if inclusive else "above"
      raise ValueError(f"config.{path}: must be {sign} {lowest:g}, got {flat[path]}")
  for path, highest in _AT_MOST.items():
    if flat[path] > highest:
      raise ValueError(f"config.{path}: must be at most {highest:g}, got {flat[path]}")
  _check_together(run)


def _check_together(run: RunConfig) -> None:
  passes = run.loss.minibatches * run.loss.microbatches
  if run.rollout.prompts % passes:
    allowed = [n for n in range(1, run.rollout.prompts + 1) if run.rollout.prompts % n == 0]
    raise ValueError(
      f"config.rollout.prompts ({run.rollout.prompts} prompts, each with rollout.group = "
      f"{run.rollout.group} completions) must be a multiple of loss.minibatches × "
      f"loss.microbatches ({run.loss.minibatches} × {run.loss.microbatches}); their product may be "
      f"{', '.join(map(str, allowed))}"
    )
  if run.rollout.group % run.loss.group_parts:
    raise ValueError(
      f"config.rollout.group ({run.rollout.group} completions a prompt) must be a multiple of "
      f"loss.group_parts ({run.loss.group_parts})"
    )
  _check_dynamic_sampling(run)
  if run.lora.rank and run.log.head_every:
    raise ValueError("config.log.head_every: with lora.rank the head does not change")
  for i, extra in enumerate(run.reward.extra):
    _check_extra(extra, f"config.reward.extra[{i}]")
  names = [extra_name(extra) for extra in run.reward.extra]
  if len(set(names)) < len(names):
    raise ValueError(f"config.reward.extra: names {names} must differ; set 'name'")
  if run.model.path and run.model.preset:
    raise ValueError("config.model: set path or preset, not both")
  if run.reward.overlong_buffer > run.rollout.max_completion_length:
    raise ValueError(
      f"config.reward.overlong_buffer ({run.reward.overlong_buffer}) is longer than "
      f"rollout.max_completion_length ({run.rollout.max_completion_length})"
    )
  samples = run.evaluation.samples
  impossible = [k for k in run.evaluation.ks if k < 1 or (samples and k > samples)]
  if impossible:
    raise ValueError(
      f"config.evaluation.ks: pass@{impossible[0]} cannot be estimated from evaluation.samples = "
      f"{samples}; raise samples or leave it out"
    )
  if run.sft.alongside and run.loss.minibatches > 1:
    raise ValueError(
      "config.sft.alongside: parallel averaging takes one update a batch, so loss.minibatches "
      "must be 1"
    )
  if run.evaluation.samples == 0 and not run.evaluation.greedy:
    raise ValueError("config.evaluation: samples = 0 and greedy = False leaves nothing to measure")
  metrics = [f"pass@{k}" for k in run.evaluation.ks if run.evaluation.samples]
  metrics += ["greedy"] * run.evaluation.greedy
  if run.checkpoint.keep_best and run.checkpoint.best_metric not in metrics:
    raise ValueError(
      f"config.checkpoint.best_metric: {run.checkpoint.best_metric!r} is not among what the "
      f"evaluation measures ({', '.join(metrics)})"
    )
  if run.policy_weight.name == "fade" and run.policy_weight.settings():
    raise ValueError(
      "config.policy_weight: fade takes α and δ from the schedule; its settings are in "
      "config.fade (for fixed ones use policy_weight.name = 'power_asym')"
    )
  _check_weight(run)


def _check_dynamic_sampling(run: RunConfig) -> None:
  r, unset = run.rollout, type(run.rollout)()
  if r.staleness and r.dynamic_sampling:
    raise ValueError(
      "config.rollout.staleness: dynamic sampling draws until a step has enough groups, which "
      "needs their verdicts; set one of staleness and dynamic_sampling"
    )
  idle = [
    name
    for name, value, default in (
      ("max_batches", r.max_batches, unset.max_batches),
      ("when_none", r.when_none, unset.when_none),
    )
    if value != default and not r.dynamic_sampling
  ]
  if idle:
    raise ValueError(
      f"config.rollout.{idle[0]}: it does nothing without dynamic sampling; leave it out, or set "
      "rollout.dynamic_sampling = True"
    )


def extra_name(extra: dict[str, Any]) -> str:
  """What the metrics call an extra reward: its name, else its verifier's."""
  return str(extra.get("name", extra["verifier"]))


def _check_extra(extra: dict[str, Any], where: str) -> None:
  for key in ("verifier", "weight"):
    if key not in extra:
      raise ValueError(f"{where}: needs {key!r}")
  weight = extra["weight"]
  if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
    raise ValueError(f"{where}: weight must be a finite number, got {weight!r}")
  try:
    check_known(extra["verifier"])
  except ValueError as error:
    raise ValueError(f"{where}: {error}") from error


# Weights that a completion has without others of its group.
_WITHOUT_COMPARISON = ("reinforce", "psr", "nsr", "w_reinforce", "pkpo")


def _check_weight(run: RunConfig) -> None:
  """Traces the weight, so that a missing or impossible setting is an error at the start."""
  settings = run.policy_weight.settings()
  parameters = inspect.signature(WEIGHTS[run.policy_weight.name]).parameters.values()
  own = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
  given = dataclasses.asdict(run.policy_weight)
  for p in parameters:
    needed = p.kind is p.KEYWORD_ONLY and p.default is p.empty and p.name in given
    if needed and p.name not in settings and run.policy_weight.name != "fade":
      raise ValueError(
        f"config.policy_weight.{p.name}: the weight {run.policy_weight.name!r} needs it"
      )
  for key in settings:
    if key not in own:
      takes = [f"config.policy_weight.{name}" for name in own if name in given]
      raise ValueError(
        f"config.policy_weight.{key}: the weight {run.policy_weight.name!r} does not have it; "
        + (f"it takes {', '.join(takes)}" if takes else "it has no settings")
      )
  if run.policy_weight.name == "codapo":
    settings["confidence"] = 1.0  # the update gives it
  elif run.policy_weight.name == "fade":
    settings = {"alpha": 1.0, "delta": 1.0}  # the schedule gives them
  rewards = jax.ShapeDtypeStruct((1, run.rollout.group), np.float32)
  try:  # traced, not run: nothing may reach a device while the config is read
    jax.eval_shape(functools.partial(WEIGHTS[run.policy_weight.name], **settings), rewards)
  except (TypeError, ValueError) as error:
    raise ValueError(f"config.policy_weight ({run.policy_weight.name}): {error}") from error
  if run.rollout.group == 1 and run.policy_weight.name not in _WITHOUT_COMPARISON:
    raise ValueError(
      f"config.rollout.group: 1 trains nothing, since {run.policy_weight.name} compares the "
      "completions of a group; take at least 2"
    )
