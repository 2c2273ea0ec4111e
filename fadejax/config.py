"""Configs: a ConfigDict at the door, frozen dataclasses inside.

A file in `configs/` starts from `default_config()`, sets fields and returns the
ConfigDict, so that `--config.section.field=value` reaches every one of them. `resolve`
turns it into a `RunConfig`: every field typed, checked, and there. An unknown field is
an error that names the nearest right one; there is no `config.get` with a default.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import types
import typing
from collections.abc import Mapping
from typing import Any

import ml_collections

from fadejax.algorithm.fade import FadeConfig
from fadejax.config_check import check
from fadejax.data.records import TaskConfig
from fadejax.data.tasks import TASKS
from fadejax.policy.lora import LoraConfig


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """Which policy. `path` (a Hugging Face directory) or `preset`, never both."""

  path: str = ""
  preset: str = ""  # a name of policy/presets.py, with random parameters
  overrides: dict[str, Any] = dataclasses.field(default_factory=dict)  # Architecture fields
  dtype: str = "float32"  # of the matrix products and the cache; parameters stay float32
  remat: str = "none"  # none | dots | full: what the backward pass computes again
  attention: str = "auto"  # auto | plain | blocks: whether all scores of a layer are held at once
  attention_block: int = 256  # positions in a block of queries and of keys
  matmul_precision: str = "default"  # default | high | highest, jax.default_matmul_precision


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """Sizes of the mesh axes; one may be -1, which is whatever is left."""

  data: int = -1
  fsdp: int = 1
  tensor: int = 1


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
  """What is sampled for one step: prompts × group completions."""

  prompts: int = 8
  group: int = 8
  max_prompt_length: int = 64  # tokens
  max_completion_length: int = 64  # tokens, the stop token included
  temperature: float = 1.0
  top_k: int = 0  # 0: off
  top_p: float = 1.0  # 1: off
  dynamic_sampling: bool = False  # groups whose rewards agree give way to fresh prompts (DAPO)
  max_batches: int = 4  # with it: batches that one step may draw
  when_none: str = "skip"  # skip | stop: what a step does that finds no such group
  # 1: a batch is sampled while the one before is graded, with parameters one update old
  staleness: int = 0


@dataclasses.dataclass(frozen=True)
class RewardConfig:
  """From verdict to reward."""

  require_end: bool = False  # a truncated completion earns 0, whatever it says
  overlong_buffer: int = 0  # tokens: DAPO's soft length penalty over the last so many; 0: off
  # Further verifiers of every completion: {"verifier", "weight", "name", and fields it needs}.
  # weight × reward is added to what is trained on; solve rates stay those of the problem's own.
  extra: tuple[dict[str, Any], ...] = ()


@dataclasses.dataclass(frozen=True)
class PolicyWeightConfig:
  """The policy weight: a name of `algorithm.weights.WEIGHTS`, and its settings.

  A setting that is None is the weight's own default; one that the weight does not have is an
  error. `fade` has none: it takes α and δ from the schedule (section `fade`).
  """

  name: str = "fade"
  alpha: float | None = None
  delta: float | None = None
  k: int | None = None
  beta: float | None = None
  lam: float | None = None
  baseline: str | None = None
  ddof: int | None = None
  eps: float | None = None
  sigma_eps: float | None = None
  beta_pos: float | None = None
  beta_neg: float | None = None
  offset: float | None = None

  def settings(self) -> dict[str, Any]:
    """Those that are set, as keyword arguments of the weight."""
    fields = dataclasses.asdict(self)
    return {k: v for k, v in fields.items() if k != "name" and v is not None}


@dataclasses.dataclass(frozen=True)
class LossConfig:
  """The surrogate around the weights."""

  clip_low: float = 0.2
  clip_high: float = 0.2
  ratio_cap: float = 0.0  # bound on the ratio of negative weights; 0: none
  ratio_level: str = "token"  # token | sequence
  form: str = "clip"  # clip | cispo
  normaliser: str = "token_mean"  # token_mean | sequence_mean | constant
  # Of the clipped ratio π / old. recompute: the trainer's before the batch's first update; auto:
  # the same, at no cost where a batch has one update; sampler: those recorded while sampling
  old_logprobs: str = "auto"
  importance_cap: float = 0.0  # bound on old / sampler, which multiplies the surrogate; 0: not used
  kl_coefficient: float = 0.0
  kl_estimator: str = "k2"  # k2 | k3 | k3_value_k2_gradient
  mask_truncated: bool = False  # overlong filtering: truncated completions leave the loss
  minibatches: int = 1  # optimizer updates a rollout batch
  microbatches: int = 1  # passes a minibatch, for memory; does not change the update
  group_parts: int = 1  # passes a group, likewise; its prompt is still read once
  logprob_chunk: int = 0  # completion positions whose logits are alive at once; 0: all


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  """AdamW with warm-up and clipping."""

  learning_rate: float = 1e-5
  warmup_steps: int = 0
  schedule: str = "constant"  # after warm-up: constant | linear | cosine, to final_fraction
  final_fraction: float = 0.0
  b1: float = 0.9
  b2: float = 0.95
  eps: float = 1e-8
  weight_decay: float = 0.0
  clip_norm: float = 1.0  # of the global gradient norm; 0: off


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
  """How the policy is measured, on the task's held-out problems."""

  every: int = 0  # steps; 0: only at start and end
  at_start: bool = True
  at_end: bool = True
  samples: int = 8  # completions a problem; 0: greedy only
  ks: tuple[int, ...] = (1, 8)  # pass@k
  greedy: bool = True
  batch: int = 16  # problems a pass
  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  seed: int = 1234  # the evaluation's own random root: the same noise at every evaluation


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
  """What is kept, and when."""

  every: int = 50  # steps; the last step is always saved. 0: only the last
  keep: int = 2  # newest ones
  keep_best: int = 1  # best ones by `best_metric`, among steps that were evaluated
  best_metric: str = "pass@1"
  export: bool = True  # at the end, the best as a Hugging Face directory in WORKDIR/export


@dataclasses.dataclass(frozen=True)
class VerifierConfig:
  """The pool of grader processes."""

  workers: int = 2
  timeout_s: float = 10.0  # CPU seconds an answer
  # "none": programs run as this user with nothing around them but bounds on time and memory
  sandbox: str = "bubblewrap"


@dataclasses.dataclass(frozen=True)
class LogConfig:
  """What is written besides metrics.jsonl."""

  tensorboard: bool = True
  wandb: str = "disabled"  # disabled | offline | online
  wandb_project: str = "fadejax"
  samples_every: int = 1  # steps between rows of samples.jsonl; 0: never
  samples: int = 4  # rows each time
  progress: bool = True
  head_every: int = 0  # steps between rank-one shares of the head's change; keeps a copy of the
  # first parameters on the devices. 0: never


@dataclasses.dataclass(frozen=True)
class SftConfig:
  """Supervised warm-up on a task's demonstrations (`python -m fadejax.sft`)."""

  steps: int = 1500
  batch: int = 128  # demonstrations an update
  learning_rate: float = 1e-3
  warmup_steps: int = 50
  schedule: str = "cosine"
  weight_decay: float = 0.0
  log_every: int = 50
  alongside: bool = False  # in `train`: demonstrations beside RL, by parallel averaging


@dataclasses.dataclass(frozen=True)
class RunConfig:
  """One run, whole."""

  steps: int = 100
  seed: int = 0
  init_from: str = ""  # parameters only: another run's workdir or a Hugging Face directory
  max_skipped_updates: int = 5  # in a row, for gradients that are not finite; then the run stops
  compilation_cache: str = ""  # "": the user's cache directory; "off": none
  task: TaskConfig = dataclasses.field(default_factory=TaskConfig)
  mixture: tuple[dict[str, Any], ...] = ()  # tasks, each the fields that differ from `task`
  model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
  lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)
  mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
  rollout: RolloutConfig = dataclasses.field(default_factory=RolloutConfig)
  reward: RewardConfig = dataclasses.field(default_factory=RewardConfig)
  policy_weight: PolicyWeightConfig = dataclasses.field(default_factory=PolicyWeightConfig)
  fade: FadeConfig = dataclasses.field(default_factory=FadeConfig)
  loss: LossConfig = dataclasses.field(default_factory=LossConfig)
  optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
  evaluation: EvaluationConfig = dataclasses.field(default_factory=EvaluationConfig)
  checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
  verifier: VerifierConfig = dataclasses.field(default_factory=VerifierConfig)
  log: LogConfig = dataclasses.field(default_factory=LogConfig)
  sft: SftConfig = dataclasses.field(default_factory=SftConfig)


# ------------------------------------------------------------ the door


def default_config() -> ml_collections.ConfigDict:
  """Every field with its default, locked against fields that do not exist.

  Free-form dicts (`task.options`, `model.overrides`, …) take any key.
  """
  return _to_config_dict(RunConfig())


def _to_config_dict(value: Any) -> ml_collections.ConfigDict:
  config = ml_collections.ConfigDict()
  free = []
  hints = typing.get_type_hints(type(value))
  for field in dataclasses.fields(value):
    item = getattr(value, field.name)
    if dataclasses.is_dataclass(item):
      item = _to_config_dict(item)
    elif isinstance(item, dict):
      free.append(field.name)
      item = ml_collections.ConfigDict(item)
    elif item is None:
      kind = next(t for t in typing.get_args(hints[field.name]) if t is not type(None))
      item = ml_collections.config_dict.placeholder(kind)
    elif isinstance(hints[field.name], types.UnionType):
      # A field of several types, such as "half_initial" or nats: files and flags may give either.
      item = ml_collections.FieldReference(item, field_type=object)
    config[field.name] = item
  config.lock()
  for name in free:
    config[name].unlock()
  return config


def resolve(config: Mapping[str, Any] | ml_collections.ConfigDict) -> RunConfig:
  """Typed, checked, whole.

  Raises:
    ValueError: an unknown field (with the nearest right one), a value of the wrong type or
      out of its range, or fields that contradict each other; names the fields.
  """
  if isinstance(config, ml_collections.ConfigDict):
    config = config.to_dict()
  run = _build(RunConfig, config, "config")
  check(run)
  for task in task_configs(run):
    if task.name not in TASKS:
      raise ValueError(f"config.mixture: task {task.name!r} is not one of {', '.join(TASKS)}")
  return run


def _build(cls: Any, values: Mapping[str, Any], path: str) -> Any:
  hints = typing.get_type_hints(cls)
  for key in values:
    if key not in hints:
      near = difflib.get_close_matches(key, hints, n=1)
      hint = f"; did you mean {path}.{near[0]}?" if near else f"; it has: {', '.join(hints)}"
      raise ValueError(f"{path}.{key}: no such field{hint}")
  built = {k: _convert(v, hints[k], f"{path}.{k}") for k, v in values.items()}
  try:
    return cls(**built)
  except (TypeError, ValueError) as error:
    raise ValueError(f"{path}: {error}") from error


def _convert(value: Any, hint: Any, path: str) -> Any:
  if dataclasses.is_dataclass(hint):
    if not isinstance(value, Mapping):
      raise ValueError(f"{path}: a section of fields is wanted, got {value!r}")
    return _build(hint, value, path)
  origin = typing.get_origin(hint)
  if origin is tuple:
    if not isinstance(value, (tuple, list)):
      raise ValueError(f"{path}: a tuple is wanted, got {value!r}")
    return tuple(_convert(v, typing.get_args(hint)[0], f"{path}[{i}]") for i, v in enumerate(value))
  if origin in (types.UnionType, typing.Union):
    options = typing.get_args(hint)
    if isinstance(value, str) and float in options:
      try:
        return float(value)  # a flag gives "1.3" as text
      except ValueError:
        return value
    if isinstance(value, int) and float in options:
      return float(value)
    if value is None or isinstance(value, tuple(o for o in options if isinstance(o, type))):
      return value
  elif origin is dict or hint is dict:
    if isinstance(value, Mapping):
      return dict(value)
  elif hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
    return float(value)
  elif hint in (bool, int, str) and type(value) is hint:
    return value
  wanted = hint.__name__ if isinstance(hint, type) else str(hint)
  raise ValueError(f"{path}: {wanted} is wanted, got {value!r}")


def task_configs(run: RunConfig) -> list[TaskConfig]:
  """The tasks of a run: `task`, or each entry of `mixture` laid over it."""
  if not run.mixture:
    return [run.task]
  base = dataclasses.asdict(run.task)
  tasks = []
  for i, entry in enumerate(run.mixture):
    # Another task has no use for where this one's problems are, nor for its options.
    same = entry.get("name", run.task.name) == run.task.name
    shared = {k: v for k, v in base.items() if same or k not in _OF_ONE_TASK}
    tasks.append(_build(TaskConfig, {**shared, **entry}, f"config.mixture[{i}]"))
  return tasks


_OF_ONE_TASK = (
  "path", "eval_path", "options", "solve_rates", "min_solve_rate", "max_solve_rate",
)  # fmt: skip


def to_json(run: RunConfig) -> str:
  """The resolved config as JSON text; `resolve(json.loads(text))` gives it back."""
  return json.dumps(dataclasses.asdict(run), indent=2)
