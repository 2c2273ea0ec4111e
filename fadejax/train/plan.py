"""The plan a run prints before its first step: what will run where, and what it takes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fadejax.config import RunConfig, to_json
from fadejax.data.pipeline import Pipeline
from fadejax.data.records import Task, TaskConfig
from fadejax.policy import lora, model
from fadejax.train.setup import Policy, attention_block
from fadejax.train.step import TrainState


def bytes_per_device(tree: Any) -> int:
  """Bytes that a tree of placed arrays takes on the fullest device."""
  total = 0
  for x in jax.tree.leaves(tree):
    total += int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize
  return total


def cache_bytes(config: RunConfig, policy: Policy) -> int:
  """Keys and values of one rollout on one device: prefixes and completions."""
  arch, r = policy.arch, config.rollout
  position = (
    2 * arch.layers * arch.kv_heads * arch.head_size * jnp.dtype(config.model.dtype).itemsize
  )
  ways = policy.mesh.shape["data"] * policy.mesh.shape["fsdp"]
  own = r.prompts * r.group * (r.max_completion_length - 1) // ways
  prefix = r.prompts * r.max_prompt_length
  prefix //= ways if r.prompts % ways == 0 else policy.mesh.shape["data"]
  return position * (own + prefix)


def activation_bytes(config: RunConfig, policy: Policy) -> int:
  """What the backward pass of one micro-batch keeps on one device, about.

  Counts the layers' inputs, and without rematerialisation their inner arrays and attention
  scores, and the logits of one chunk with their gradient. An estimate: the compiler may
  fuse some away or keep more.
  """
  arch, r, loss = policy.arch, config.rollout, config.loss
  prompts, group = r.prompts / (loss.minibatches * loss.microbatches), r.group / loss.group_parts
  tokens = prompts * (r.max_prompt_length + group * r.max_completion_length)
  size = jnp.dtype(config.model.dtype).itemsize
  per_token = arch.width
  if config.model.remat != "full":
    per_token += 4 * arch.width + 2 * (arch.heads + arch.kv_heads) * arch.head_size + 4 * arch.ffn
  kept = tokens * per_token * arch.layers * size
  if config.model.remat == "none" and not attention_block(config.model, r):
    s, c = r.max_prompt_length, r.max_completion_length
    kept += prompts * arch.heads * arch.layers * 8 * (s * s + group * c * (s + c))
  chunk = min(loss.logprob_chunk or r.max_completion_length, r.max_completion_length)
  logits = 2 * prompts * group * chunk * arch.vocab_size * 4
  ways = policy.mesh.shape["data"] * policy.mesh.shape["fsdp"]
  return int((kept + logits / policy.mesh.shape["tensor"]) / ways)


def _size(count: float) -> str:
  for unit in ("B", "kB", "MB", "GB"):
    if count < 1000 or unit == "GB":
      return f"{count:.0f} {unit}" if unit in ("B", "kB") else f"{count:.2f} {unit}"
    count /= 1000
  raise AssertionError


def show(
  config: RunConfig,
  policy: Policy,
  state: TrainState,
  pipeline: Pipeline,
  tasks: list[tuple[TaskConfig, Task]],
  source: str,
  cache: str,
) -> None:
  """Prints the resolved config and the plan."""
  r, arch, devices = config.rollout, policy.arch, jax.devices()
  mesh = " × ".join(f"{name} {size}" for name, size in policy.mesh.shape.items())
  axes, shapes = model.logical_axes(arch), model.abstract_params(arch)
  lines = [
    f"devices      {len(devices)} × {devices[0].device_kind} ({devices[0].platform}), mesh {mesh}, "
    f"{jax.process_count()} process(es)",
    f"policy       {model.count_params(arch):,} parameters from {source}; {config.model.dtype}",
    f"step         {r.prompts} prompts × {r.group} completions, S = {r.max_prompt_length}, "
    f"C = {r.max_completion_length}; {config.loss.minibatches} minibatch(es) × "
    f"{config.loss.microbatches} micro-batch(es)"
    + (f" × {config.loss.group_parts} parts of a group" if config.loss.group_parts > 1 else "")
    + f"; {config.steps} steps"
    + (", sampled one update ahead" if r.staleness else ""),
    f"weight       {config.policy_weight.name} {config.policy_weight.settings() or ''}".rstrip(),
    f"attention    {_attention(config)}",
    *_fade_line(config),
    *_lora_line(config, policy),
    *(f"task         {_task_line(config, tasks, i)}" for i in range(len(tasks))),
    *(f"note         {line}" for line in _task_notes(policy, tasks)),
    *(f"left out     {count} {why}" for why, count in pipeline.counts.items() if count),
    f"memory       a device: parameters {_size(bytes_per_device(state.params))}, optimizer "
    f"{_size(bytes_per_device(state.opt_state))},{_kept(config, state)} "
    f"cache {_size(cache_bytes(config, policy))}, "
    f"activations about {_size(activation_bytes(config, policy))}",
    *(f"note         {line}" for line in policy.train_layout.replicated(axes, shapes)),
    f"cache        compiled programs in {cache}",
  ]
  if r.staleness and not config.loss.importance_cap and config.loss.old_logprobs != "sampler":
    lines.append("warning      rollout.staleness = 1 without loss.importance_cap: batches are "
                 "sampled by parameters one update old, and nothing corrects for it")  # fmt: skip
  if r.top_k or r.top_p < 1:
    lines.append("warning      top-k or top-p while training: log-probs are of the unfiltered "
                 "distribution, so the ratio is biased")  # fmt: skip
  print("config\n" + _config_text(config) + "\nplan\n  " + "\n  ".join(lines), flush=True)


def _kept(config: RunConfig, state: TrainState) -> str:
  """The parameters of the start, where something compares with them."""
  if not (config.loss.kl_coefficient or config.log.head_every):
    return ""
  return f" parameters of the start {_size(bytes_per_device(state.params))},"


def _fade_line(config: RunConfig) -> list[str]:
  f = config.fade
  if config.policy_weight.name != "fade":
    return []
  return [
    f"fade         β {f.beta:g}, H* {f.target_entropy}, α up to {f.alpha_max:g}, "
    f"δ down to {f.delta_min:g}, driver {f.driver}"
  ]


def _attention(config: RunConfig) -> str:
  """Which form runs, and why."""
  block = attention_block(config.model, config.rollout)
  form = f"in blocks of {block} positions" if block else "all scores of a layer at once"
  kernel = "; XLA's own code, no kernel of ours" if block and jax.default_backend() != "cpu" else ""
  return f"{form} (model.attention = {config.model.attention!r}){kernel}"


def _lora_line(config: RunConfig, policy: Policy) -> list[str]:
  if not config.lora.rank:
    return []
  trained, targets = lora.count(policy.arch, config.lora), ", ".join(config.lora.targets)
  return [
    f"lora         rank {config.lora.rank}, α {config.lora.alpha:g} on {targets}: {trained:,} "
    f"parameters are trained, the others frozen in {config.model.dtype}"
  ]


FEW = 30  # evaluation problems: fewer move in steps too coarse to tell two runs apart


def _task_notes(policy: Policy, tasks: list[tuple[TaskConfig, Task]]) -> list[str]:
  """What a user should know about the tasks before the first step."""
  lines = []
  for config, task in tasks:
    if policy.tokenizer.chat_template is None and not config.raw_prompt:
      lines.append(
        f"{task.name}: the tokenizer has no chat template, so prompts go in as bare text "
        "(task.raw_prompt = True says that this is meant)"
      )
    if len(task.eval) < FEW:
      lines.append(
        f"{task.name}: {len(task.eval)} evaluation problem(s): one problem is "
        f"{1 / len(task.eval):.2f} of greedy accuracy"
      )
  return lines


def _config_text(config: RunConfig) -> str:
  """The resolved config, a line a section."""
  sections = json.loads(to_json(config))
  top = {key: value for key, value in sections.items() if not isinstance(value, dict)}
  nested = {key: value for key, value in sections.items() if isinstance(value, dict)}
  lines = []
  for name, fields in [("", top), *nested.items()]:
    text = "  ".join(f"{key}={json.dumps(value)}" for key, value in fields.items())
    lines.append(f"  {name:12} {text}")
  return "\n".join(lines)


def _task_line(config: RunConfig, tasks: list[tuple[TaskConfig, Task]], index: int) -> str:
  """A task's numbers of problems; of a list, how often training goes through it."""
  settings, task = tasks[index]
  parts = []
  if isinstance(task.train, Sequence):  # a generated source has no end
    share = settings.weight / sum(c.weight for c, _ in tasks)
    passes = share * config.steps * config.rollout.prompts / len(task.train)
    parts.append(f"{len(task.train)} training problems, each drawn about {passes:.2g} times")
  parts.append(f"{len(task.eval)} evaluation problems")
  parts += [f"{count} {why}" for why, count in task.counts.items() if count]
  return f"{task.name}: {'; '.join(parts)}"
