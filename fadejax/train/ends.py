"""What a run begins with, and what it leaves: parameters in and out."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fadejax.config import RunConfig
from fadejax.policy import hf, lora, model
from fadejax.train import setup, workdir
from fadejax.train.checkpoint import restore_first, restore_params, saved_steps


class Initial(NamedTuple):
  """Parameters in the training layout, where they came from in words, and which step of a run."""

  params: model.Params
  source: str
  step: int | None = None


def initial_params(
  config: RunConfig, policy: setup.Policy, step: int | None = None, abstract: bool = False
) -> Initial:
  """The parameters that a run begins with: of `init_from`, of `model.path`, or random.

  Args:
    config: the run's.
    policy: with the architecture that they must have.
    step: which checkpoint, where `init_from` is a run; None: its newest.
    abstract: shapes with shardings in place of parameters, after every check but reading them. A
      Hugging Face directory may then be without them.

  Raises:
    ValueError, FileNotFoundError: nothing there, another architecture, or no such step.
  """
  source = config.init_from or config.model.path
  like = policy.abstract_params(policy.train_layout)
  if setup.workdir_of(source):
    step = step if step is not None else newest_step(Path(source))
    workdir.check_architecture(Path(source), policy.arch)
    params = like if abstract else run_params(Path(source), policy, step)
    return Initial(params, f"step {step} of run {source}", step)
  if source:
    if config.init_from and not Path(source).is_dir():
      raise FileNotFoundError(
        f"config.init_from: {source} does not exist; give the workdir of a run (which has "
        "checkpoints/) or a Hugging Face directory"
      )
    if config.init_from and not (Path(source) / "config.json").exists():
      raise FileNotFoundError(
        f"config.init_from: {source} holds neither checkpoints/ of a run nor config.json of a "
        "Hugging Face model; has the run that it names saved anything yet?"
      )
    if config.init_from and hf.read_architecture(source) != policy.arch:
      raise ValueError(f"config.init_from: {source} has another architecture than config.model")
    words = f"Hugging Face directory {source}"
    if abstract and not hf.has_params(source):
      return Initial(like, f"{words}, which holds none yet")
    if abstract:
      hf.check_tensors(Path(source), policy.arch)
      return Initial(like, words)
    return Initial(hf.load_params(source, policy.arch, policy.train_layout), words)
  if abstract:
    return Initial(like, f"random, seed {config.seed}")
  shardings = policy.param_shardings(policy.train_layout)
  init = jax.jit(functools.partial(model.init_params, policy.arch), out_shardings=shardings)
  return Initial(init(jax.random.key(config.seed)), f"random, seed {config.seed}")


def newest_step(run: Path) -> int | None:
  """The newest checkpoint of a run, if it has any."""
  return next(iter(reversed(saved_steps(run / "checkpoints"))), None)


def run_params(run: Path, policy: setup.Policy, step: int | None) -> model.Params:
  """The parameters of a run's checkpoint, in the training layout; adapters are merged.

  Args:
    run: its workdir.
    policy: with the architecture that they must have.
    step: which checkpoint; None: the newest.

  Raises:
    ValueError, FileNotFoundError: another architecture, no such step, or the model below the
      adapters is not where it was.
  """
  workdir.check_architecture(run, policy.arch)
  layout, where = policy.train_layout, run / "checkpoints"
  began = workdir.read_config(run) if (run / workdir.CONFIG_FILE).exists() else None
  if began is None or not began.lora.rank:
    return restore_params(where, policy.abstract_params(layout), step)
  adapted = dataclasses.replace(policy, lora=began.lora)
  adapters = restore_params(where, adapted.abstract_trained(layout), step)
  below = initial_params(began, policy, workdir.init_step(run)).params
  merge = functools.partial(lora.merge, config=began.lora)
  shardings = policy.param_shardings(layout)
  return jax.jit(merge, out_shardings=shardings, donate_argnums=0)(below, adapters)


@dataclasses.dataclass(frozen=True)
class Begun:
  """A run's parameters at its start, or where it goes on.

  Attributes:
    state: the TrainState; shapes alone where a checkpoint will fill it.
    frozen: the model below the adapters, in the products' dtype; None without LoRA.
    first_params: what KL and head diagnostics compare with; None where nothing does.
    source: where the parameters came from, in words.
    init_step: the checkpoint of `init_from` that they are of.
  """

  state: Any
  frozen: model.Params | None
  first_params: model.Params | None
  source: str
  init_step: int | None


def begin(
  config: RunConfig,
  policy: setup.Policy,
  run: Path,
  make_state: Callable[[model.Params], Any],
  abstract: bool = False,
) -> Begun:
  """The state of step 0, or its shapes where the workdir `run` has checkpoints.

  With `abstract` everything is shapes: for a plan.
  """
  step = newest_step(run)
  init_step = workdir.init_step(run) if step is not None else None
  source = f"step {step} of {run}"
  state = setup.abstract_state(policy, make_state)
  if abstract:
    if step is None:
      _, source, init_step = initial_params(config, policy, abstract=True)
    return Begun(state, None, None, source, init_step)
  make = jax.jit(make_state, out_shardings=_shardings(state), donate_argnums=0)
  if policy.lora.rank:
    params, from_where, init_step = initial_params(config, policy, init_step)
    frozen = _frozen(params, config, policy)
    if step is None:
      init = functools.partial(lora.init_adapters, policy.arch, policy.lora)
      trained = jax.jit(init, out_shardings=policy.trained_shardings(policy.train_layout))
      state, source = make(trained(jax.random.key(config.seed))), from_where
    return Begun(state, frozen, frozen if config.loss.kl_coefficient else None, source, init_step)
  compared = config.loss.kl_coefficient or config.log.head_every
  first_params = None
  if step is not None and compared:
    # Its own copy: the run that init_from names may have moved on since.
    first_params = restore_first(run, policy.abstract_params(policy.train_layout))
  elif step is None:
    params, source, init_step = initial_params(config, policy)
    if compared:
      first_params = jax.tree.map(lambda x: x.copy(), params)
    state = make(params)
  return Begun(state, None, first_params, source, init_step)


def _shardings(tree: Any) -> Any:
  return jax.tree.map(lambda x: x.sharding, tree)


def _frozen(params: model.Params, config: RunConfig, policy: setup.Policy) -> model.Params:
  """Parameters that nothing will change, in the dtype of the matrix products."""
  dtype = jnp.dtype(config.model.dtype)
  if dtype == jnp.float32:
    return params
  cast = lambda params: jax.tree.map(lambda x: x.astype(dtype), params)  # noqa: E731
  return jax.jit(cast, out_shardings=policy.param_shardings(policy.train_layout))(params)


def export_run(
  policy: setup.Policy, trained: model.Params, frozen: model.Params | None, run: Path
) -> Path:
  """WORKDIR/export, and with LoRA WORKDIR/adapters beside it."""
  if frozen is None:
    return export(policy, trained, run / "export")
  hf.save_adapters(run / "adapters", policy.arch, trained, policy.lora, policy.source)
  return export(policy, lora.merged_on_host(frozen, trained, policy.lora), run / "export")


def export(policy: setup.Policy, params: model.Params, directory: Path) -> Path:
  """Writes a Hugging Face directory: config, generation config, parameters and tokenizer.

  What came from a Hugging Face directory keeps its config.json (but for the dtype), its
  generation settings and its tokenizer's files.
  """
  policy.tokenizer.save(directory)  # generation_config.json as well
  stops = list(policy.tokenizer.stop_ids)
  special = {
    "bos_token_id": policy.tokenizer.bos_id,
    "eos_token_id": stops[0] if len(stops) == 1 else stops,
    "pad_token_id": policy.tokenizer.pad_id,
  }
  text = json.dumps(hf.config_json(policy.arch, special, policy.source), indent=2)
  (directory / "config.json").write_text(text + "\n")
  hf.save_params(directory, policy.arch, params)
  return directory
