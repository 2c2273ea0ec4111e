"""Builds what a run, an evaluation or a supervised warm-up needs, from a config."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fadejax.arrays import PromptBatch, RewardBatch
from fadejax.cache import cache_dir
from fadejax.config import EvaluationConfig, ModelConfig, RolloutConfig, RunConfig, task_configs
from fadejax.data import tokenizer as tokenizers
from fadejax.data.pipeline import HostBatch, Pipeline
from fadejax.data.records import Task, TaskConfig
from fadejax.data.tasks import TASKS
from fadejax.policy import hf, lora, model, presets, sharding
from fadejax.policy.attention import block_of
from fadejax.policy.lora import LoraConfig
from fadejax.policy.sampler import SamplerConfig
from fadejax.policy.sharding import Layout
from fadejax.train.optim import make_optimizer, make_schedule, parallel_average
from fadejax.verify import VerifierPool, check_name, walls

Tokenizer = tokenizers.Tokenizer


@dataclasses.dataclass(frozen=True)
class Policy:
  """An architecture, its tokenizer, and where its arrays live."""

  arch: model.Architecture
  tokenizer: Tokenizer
  mesh: Mesh
  train_layout: Layout  # of one forward pass of the update
  sample_layout: Layout  # of the rollout
  source: dict[str, Any] | None = None  # the config.json it came with, kept in what is exported
  lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)

  def param_shardings(self, layout: Layout) -> model.Params:
    """Shardings of the parameters in a layout."""
    return layout.tree(model.logical_axes(self.arch), model.abstract_params(self.arch))

  def abstract_params(self, layout: Layout) -> model.Params:
    """The parameters as shapes with shardings."""
    like = lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding)  # noqa: E731
    return jax.tree.map(like, model.abstract_params(self.arch), self.param_shardings(layout))

  def trained_shardings(self, layout: Layout) -> model.Params:
    """Shardings of what is trained: the parameters, or the adapters alone."""
    if not self.lora.rank:
      return self.param_shardings(layout)
    axes = lora.adapter_axes(self.arch, self.lora)
    return layout.tree(axes, lora.abstract_adapters(self.arch, self.lora))

  def abstract_trained(self, layout: Layout) -> model.Params:
    """What is trained, as shapes with shardings."""
    if not self.lora.rank:
      return self.abstract_params(layout)
    like = lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding)  # noqa: E731
    shapes = lora.abstract_adapters(self.arch, self.lora)
    return jax.tree.map(like, shapes, self.trained_shardings(layout))


def enable_compilation_cache(setting: str) -> str:
  """Turns the persistent cache of compiled programs on; returns where it is, or "off".

  JAX_COMPILATION_CACHE_DIR wins over the default, so that a site can share one.
  """
  if setting == "off":
    jax.config.update("jax_enable_compilation_cache", False)
    return "off"
  where = setting or os.environ.get("JAX_COMPILATION_CACHE_DIR", "") or str(cache_dir() / "xla")
  jax.config.update("jax_compilation_cache_dir", where)
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
  jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
  return where


def build_tasks(config: RunConfig) -> list[tuple[TaskConfig, Task]]:
  """The run's tasks, each with the settings that made it.

  Raises:
    ValueError: a task's or a verifier's settings do not work here.
  """
  walls.choose(config.verifier.sandbox)
  if config.verifier.sandbox == "none":
    logging.warning("config.verifier.%s", walls.UNPROTECTED)
  for extra in config.reward.extra:
    check_name(extra["verifier"])
  tasks = []
  for i, task in enumerate(task_configs(config)):
    try:
      tasks.append((task, TASKS[task.name](task, config.seed)))
    except ValueError as error:
      where = f"config.mixture[{i}], " if config.mixture else ""
      raise ValueError(f"{where}{error}") from error
  return tasks


def workdir_of(path: str) -> Path | None:
  """The path, where it is the workdir of a run (it has checkpoints)."""
  return Path(path) if path and (Path(path) / "checkpoints").is_dir() else None


def build_tokenizer(
  config: RunConfig, tasks: list[tuple[TaskConfig, Task]], workdir: Path | None = None
) -> Tokenizer:
  """The model's tokenizer; for a preset, `init_from`'s, or one id a character of the tasks.

  Raises:
    ValueError: a preset without a tokenizer, on tasks that need one.
    FileNotFoundError: model.path is no directory.
  """
  if workdir is not None and (workdir / "tokenizer").is_dir():
    return tokenizers.load(workdir / "tokenizer")  # a resumed run's own
  if config.model.path:
    if not Path(config.model.path).is_dir():
      raise FileNotFoundError(
        f"config.model.path: {config.model.path} is no directory here; a Hugging Face directory is "
        "wanted: config.json, tokenizer.json and its companions, and *.safetensors"
      )
    return tokenizers.load(config.model.path)
  if workdir_of(config.init_from):
    return tokenizers.load(Path(config.init_from) / "tokenizer")
  alphabets = [task.alphabet for _, task in tasks]
  if not all(alphabets):
    raise ValueError(
      "config.model: tasks on free text need a tokenizer: set model.path to a Hugging Face "
      "directory (python -m fadejax.convert makes one), or init_from to a run that has one"
    )
  return tokenizers.characters("".join(sorted(set("".join(a for a in alphabets if a)))))


def _architecture(config: RunConfig, tokenizer: Tokenizer) -> model.Architecture:
  """The architecture that section `model` describes."""
  if config.model.path:
    arch = hf.read_architecture(config.model.path)
    try:
      return dataclasses.replace(arch, **config.model.overrides)
    except TypeError as error:
      raise ValueError(f"config.model.overrides: {error}") from error
  if config.model.preset:
    return presets.preset(config.model.preset, tokenizer.vocab_size, config.model.overrides)
  raise ValueError(
    f"config.model: set path (a Hugging Face directory) or preset ({', '.join(presets.PRESETS)})"
  )


def build_policy(
  config: RunConfig, tokenizer: Tokenizer, arch: model.Architecture | None = None
) -> Policy:
  """Architecture and layouts; no parameters yet.

  Args:
    config: the run's.
    tokenizer: the policy's.
    arch: a run's own architecture; None: what section `model` describes.

  Raises:
    ValueError: neither model.path nor model.preset, or a batch the mesh cannot split.
  """
  source = hf.read_config(config.model.path) if arch is None and config.model.path else None
  arch = _architecture(config, tokenizer) if arch is None else arch
  longest = config.rollout.max_prompt_length + config.rollout.max_completion_length
  if arch.max_positions and longest > arch.max_positions:
    raise ValueError(
      f"config.rollout: max_prompt_length + max_completion_length = {longest}, but the model's "
      f"max_position_embeddings is {arch.max_positions}"
    )
  mesh = sharding.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
  prompts, group = config.rollout.prompts, config.rollout.group
  passes, part = (
    config.loss.minibatches * config.loss.microbatches,
    group // config.loss.group_parts,
  )
  for completions in [config.evaluation.samples] * (config.evaluation.samples > 0) + [1]:
    # An error now, not after the last step.
    sharding.make_layout(mesh, sharding.SAMPLE_RULES, config.evaluation.batch, completions)
  return Policy(
    arch,
    tokenizer,
    mesh,
    sharding.make_layout(mesh, sharding.TRAIN_RULES, prompts // passes, part),
    sharding.make_layout(mesh, sharding.SAMPLE_RULES, prompts, group),
    source,
    config.lora,
  )


def abstract_state(policy: Policy, make_state: Callable[[model.Params], Any]) -> Any:
  """`make_state(params)` as shapes with shardings: an optimizer's moments lie where their
  parameters do."""
  own = policy.trained_shardings(policy.train_layout)
  params = policy.abstract_trained(policy.train_layout)
  whole = policy.train_layout.sharding((), ())
  structure: Any = jax.tree.structure(params)

  def like_params(tree: Any) -> bool:
    return bool(structure == jax.tree.structure(tree))

  shapes = jax.eval_shape(make_state, params)
  shardings = jax.tree.map(
    lambda tree: own if like_params(tree) else whole, shapes, is_leaf=like_params
  )
  return jax.tree.map(
    lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes, shardings
  )


def build_optimizer(config: RunConfig) -> tuple[optax.Schedule, optax.GradientTransformation]:
  """The learning rate's schedule and the optimizer, or the pair of parallel averaging."""
  o, s = config.optimizer, config.sft
  updates = config.steps * config.loss.minibatches
  schedule = make_schedule(o.learning_rate, o.warmup_steps, updates, o.schedule, o.final_fraction)
  rl = make_optimizer(
    schedule, b1=o.b1, b2=o.b2, eps=o.eps, weight_decay=o.weight_decay, clip_norm=o.clip_norm
  )
  return schedule, parallel_average(
    rl, sft_optimizer(config, config.steps)[1]
  ) if s.alongside else rl


def sft_optimizer(
  config: RunConfig, steps: int
) -> tuple[optax.Schedule, optax.GradientTransformation]:
  """The same of section `sft`, over `steps` updates."""
  s = config.sft
  schedule = make_schedule(s.learning_rate, s.warmup_steps, steps, s.schedule)
  return schedule, make_optimizer(schedule, weight_decay=s.weight_decay)


def to_sampler(
  policy: Policy, dtype: str, frozen: model.Params | None = None
) -> Callable[[model.Params], model.Params]:
  """Function from what is trained to the sampler's parameters, cast and resharded; once per step.

  With `frozen`, the model below the adapters, that is done for it once and for all.
  """
  layout = policy.sample_layout

  def cast(shardings: Any) -> Callable[[model.Params], model.Params]:
    to = lambda params: jax.tree.map(lambda x: x.astype(jnp.dtype(dtype)), params)  # noqa: E731
    return jax.jit(to, out_shardings=shardings)

  if frozen is not None:
    below = cast(policy.param_shardings(layout))(frozen)
    own = cast(policy.trained_shardings(layout))
    return lambda trained: lora.attach(below, own(trained), policy.lora)
  shardings = policy.param_shardings(layout)
  if dtype == "float32" and shardings == policy.param_shardings(policy.train_layout):
    return lambda params: params
  return cast(shardings)


def place_prompts(batch: HostBatch, layout: Layout) -> PromptBatch:
  """This host's prompts as part of the global batch."""

  def put(x: np.ndarray, *axes: str | None) -> jax.Array:
    return jax.make_array_from_process_local_data(layout.sharding(axes, x.shape), x)

  return PromptBatch(
    put(batch.tokens, "prompts", None), put(batch.lengths, "prompts"), put(batch.draw, "prompts")
  )


def place_rewards(rewards: RewardBatch, layout: Layout) -> RewardBatch:
  """Rewards, on every host the same, on the devices."""
  put = lambda x: jax.device_put(np.asarray(x), NamedSharding(layout.mesh, PartitionSpec()))  # noqa: E731
  return jax.tree.map(put, rewards)


def build_pipeline(
  config: RunConfig,
  tasks: list[tuple[TaskConfig, Task]],
  tokenizer: Tokenizer,
  *,
  prompts: int,
  seed: int,
) -> Pipeline:
  """The order of draws, `prompts` a batch over all hosts."""
  return Pipeline(
    [task for _, task in tasks],
    [c.weight for c, _ in tasks],
    encoder(tokenizer, tasks),
    prompts_per_batch=prompts,
    max_prompt_length=config.rollout.max_prompt_length,
    seed=seed,
    process_index=jax.process_index(),
    process_count=jax.process_count(),
  )


def build_pool(config: RunConfig, tasks: list[tuple[TaskConfig, Task]]) -> VerifierPool:
  """The graders, those that the tasks need imported before the first item."""
  names = {record["verifier"] for _, task in tasks for record in task.eval}
  for _, task in tasks:
    size = min(1, len(task.train)) if task.generated else len(task.train)
    names |= {task.train[i]["verifier"] for i in range(size)}
  names |= {extra["verifier"] for extra in config.reward.extra}
  return VerifierPool(config.verifier.workers, config.verifier.timeout_s, warm=sorted(names))


def attention_block(config: ModelConfig, rollout: RolloutConfig) -> int:
  """The block of attention in sampler and update alike; 0: the plain form."""
  longest = max(rollout.max_prompt_length, rollout.max_completion_length)
  return block_of(config.attention, config.attention_block, longest)


def sampler_config(
  config: RunConfig,
  tokenizer: Tokenizer,
  settings: RolloutConfig | EvaluationConfig,
  group: int,
  greedy: bool = False,
) -> SamplerConfig:
  """The sampler of the rollout or of an evaluation, by whose settings are given."""
  return SamplerConfig(
    group=group,
    max_completion_length=config.rollout.max_completion_length,
    stop_ids=tokenizer.stop_ids,
    pad_id=tokenizer.pad_id,
    temperature=settings.temperature,
    top_k=settings.top_k,
    top_p=settings.top_p,
    greedy=greedy,
    dtype=config.model.dtype,
    block=attention_block(config.model, config.rollout),
  )


def encoder(
  tokenizer: Tokenizer, tasks: list[tuple[TaskConfig, Task]]
) -> Callable[[dict[str, Any]], list[int]]:
  """Function from a problem record to prompt ids, with its task's template settings."""
  settings = {task.name: c for c, task in tasks}

  def encode(record: dict[str, Any]) -> list[int]:
    return tokenizer.encode_prompt(record["prompt"], **template_settings(settings[record["task"]]))

  return encode


def template_settings(config: TaskConfig) -> dict[str, Any]:
  """What `Tokenizer.encode_prompt` and `render` want of a task."""
  return {
    "system_prompt": config.system_prompt,
    "raw": config.raw_prompt,
    "template_args": config.template_args,
  }


@contextlib.contextmanager
def precision(config: RunConfig) -> Iterator[None]:
  """Runs with the configured precision of matrix products."""
  with jax.default_matmul_precision(config.model.matmul_precision):
    yield
