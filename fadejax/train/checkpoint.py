"""Checkpoints: TrainState, the number of prompts drawn and the seed, through Orbax.

Saved asynchronously and made whole by a rename, so that a run killed at any point finds
its newest complete one. The label is the number of updates done.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from fadejax.config import CheckpointConfig


def _wanted(record: logging.LogRecord) -> bool:
  # Orbax warns of each save without an evaluation, which most are, and of each reading of the
  # parameters alone.
  text = record.getMessage()
  return "Requested `tracked_metric`" not in text and "_CHECKPOINT_METADATA" not in text


FIRST = "first_params"  # in a workdir: what the run began with


class Damaged(ValueError):
  """A checkpoint that cannot be read because parts of it are missing, short or garbled."""


# A store that refuses, rather than one that has lost something.
_NOT_DAMAGE = ("PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "UNAVAILABLE", "DEADLINE_EXCEEDED")


def _is_damage(error: Exception) -> bool:
  # Orbax raises a plain Exception for a data file that is short or gone, with the cause behind it.
  kinds = (ValueError, KeyError, FileNotFoundError)
  known = isinstance(error, kinds) or type(error) is Exception
  return known and not any(word in str(error) for word in _NOT_DAMAGE)


def _quiet() -> None:
  logging.getLogger("absl").addFilter(_wanted)  # the same filter twice counts once


class Checkpoints:
  """The checkpoints of a run, under `directory`. Close it: it waits for the last save."""

  def __init__(self, directory: Path, config: CheckpointConfig):
    _quiet()
    self._metric = config.best_metric
    keep = [checkpoint_managers.LatestN(config.keep)]
    if config.keep_best:
      best = checkpoint_managers.BestN(
        get_metric_fn=self._score,
        n=config.keep_best,
        keep_checkpoints_without_metrics=False,
      )
      keep.append(best)
    self._manager = ocp.CheckpointManager(
      Path(directory).resolve(),
      options=ocp.CheckpointManagerOptions(
        preservation_policy=checkpoint_managers.AnyPreservationPolicy(keep),
        best_fn=self._score,
        enable_async_checkpointing=True,
        step_prefix="step",
      ),
      item_names=("state", "meta", "flight"),
    )

  def _score(self, metrics: Mapping[str, float]) -> float:
    # A run may be resumed with another best_metric: what did not measure it is never the best.
    return metrics.get(self._metric, -math.inf)

  def save(
    self,
    step: int,
    state: Any,
    meta: dict[str, Any],
    metrics: dict[str, float] | None,
    flight: Any = None,
  ) -> None:
    """Starts a save; returns once the arrays are copied.

    Args:
      step: updates done.
      state: the TrainState.
      meta: what JSON can hold.
      metrics: of this step's evaluation, where there was one.
      flight: a RolloutBatch that is sampled and not trained on.
    """
    known = None if metrics is None or self._metric not in metrics else dict(metrics)
    items: dict[str, Any] = {"state": ocp.args.StandardSave(state)}
    if flight is not None:
      items["flight"] = ocp.args.StandardSave(flight)
    items["meta"] = ocp.args.JsonSave({**meta, "flight": flight is not None})
    self._manager.save(step, args=ocp.args.Composite(**items), metrics=known)

  def latest(self) -> int | None:
    """Step of the newest complete checkpoint."""
    return self._manager.latest_step()

  def set_aside(self, step: int) -> Path:
    """Renames a checkpoint that cannot be read, so that its step can be saved again."""
    folder = Path(self._manager.directory) / f"step_{step}"
    aside = folder.with_name(f"damaged-{folder.name}-{time.time_ns()}")
    folder.rename(aside)
    self._manager.reload()
    return aside

  def best(self) -> int | None:
    """Step of the checkpoint with the best evaluation; the newest where none was evaluated."""
    best = self._manager.best_step()
    return self.latest() if best is None else best

  def restore(
    self, step: int, like: Any, like_flight: Any = None
  ) -> tuple[Any, dict[str, Any], Any]:
    """(state, meta, flight or None) of a step, placed as what they are to be like.

    Args:
      step: which checkpoint.
      like: arrays or ShapeDtypeStructs with shardings.
      like_flight: the same, for a batch in flight.

    Raises:
      Damaged: it cannot be read. Any other error (no permission, no memory) says nothing against
        the checkpoint.
    """
    args = ocp.args.Composite(
      state=ocp.args.StandardRestore(_abstract(like)), meta=ocp.args.JsonRestore()
    )
    try:
      restored = self._manager.restore(step, args=args)
      flight = None
      if restored["meta"].get("flight"):
        item = ocp.args.StandardRestore(_abstract(like_flight))
        flight = self._manager.restore(step, args=ocp.args.Composite(flight=item))["flight"]
    except Exception as error:
      if not _is_damage(error):
        raise
      reason = str(error).splitlines()[0] if str(error) else type(error).__name__
      raise Damaged(f"checkpoint {step} in {self._manager.directory}: {reason[:300]}") from error
    return restored["state"], restored["meta"], flight

  def wait(self) -> None:
    """Waits for the save in flight."""
    self._manager.wait_until_finished()

  def close(self) -> None:
    """Waits for the save in flight and frees the manager."""
    self._manager.wait_until_finished()
    self._manager.close()


def _abstract(tree: Any) -> Any:
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def save_first(workdir: Path, params: Any) -> None:
  """Keeps the parameters that a run began with, for what compares with them."""
  path = Path(workdir).resolve() / FIRST
  if not path.exists():
    with ocp.StandardCheckpointer() as writer:
      writer.save(path, params)


def restore_first(workdir: Path, like: Any) -> Any:
  """The parameters that a run began with; FileNotFoundError where it kept none."""
  path = Path(workdir).resolve() / FIRST
  if not path.exists():
    raise FileNotFoundError(
      f"{path} is not there: it holds the parameters that the run began with, which "
      "loss.kl_coefficient and log.head_every compare with"
    )
  with ocp.StandardCheckpointer() as reader:
    return reader.restore(path, like)


def saved_steps(directory: Path) -> list[int]:
  """Steps of the complete checkpoints under a run's `checkpoints` folder, rising."""
  found = (re.fullmatch(r"step_(\d+)", path.name) for path in Path(directory).glob("step_*"))
  return sorted(int(match[1]) for match in found if match)  # a save in flight has another name


def restore_params(directory: Path, like: Any, step: int | None = None) -> Any:
  """Only the parameters of a run's checkpoint.

  Args:
    directory: a run's `checkpoints` folder.
    like: parameters as jax.ShapeDtypeStruct with shardings.
    step: which checkpoint; None: the newest.

  Raises:
    FileNotFoundError: there is no checkpoint, or none of that step.
    ValueError: the checkpoint's parameters have other shapes.
  """
  _quiet()
  steps = saved_steps(directory)
  if not steps or (step is not None and step not in steps):
    wanted = "" if step is None else f" of step {step}"
    raise FileNotFoundError(f"{directory} has no checkpoint{wanted}; steps there: {steps}")
  path = Path(directory).resolve() / f"step_{steps[-1] if step is None else step}" / "state"
  args = ocp.args.PyTreeRestore(
    item={"params": like},
    restore_args=ocp.checkpoint_utils.construct_restore_args({"params": like}),
    partial_restore=True,
  )
  with ocp.PyTreeCheckpointer() as reader:
    metadata = reader.metadata(path).item_metadata
    if metadata is None:
      raise Damaged(f"{path.parent} cannot be read: it does not say what it holds; steps: {steps}")
    raise_on_other_shapes(metadata.tree["params"], like, str(path.parent))
    try:
      return reader.restore(path, args=args)["params"]
    except Exception as error:
      if not _is_damage(error):
        raise
      raise Damaged(f"{path.parent} cannot be read: {str(error)[:200]}; steps: {steps}") from error


def raise_on_other_shapes(stored: Any, like: Any, where: str) -> None:
  """ValueError that lists every parameter whose shape differs."""

  def shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): tuple(leaf.shape) for path, leaf in leaves}

  there, here = shapes(stored), shapes(like)
  names = sorted(name for name in there | here if there.get(name) != here.get(name))
  if names:
    lines = [f"  {name}: {there.get(name)} there, {here.get(name)} here" for name in names]
    raise ValueError(f"{where} holds another architecture:\n" + "\n".join(lines))
