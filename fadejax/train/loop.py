"""The training loop, top to bottom.

    batch    = batches.draw(draws, params)      prompts: a function of (seed, draw); a group of
                                                completions each; verdicts from the pool
    state    = update(state, rollout, rewards)  averages, α and δ, weights, one step
    on cadence: evaluation, checkpoint; always: one row of metrics

Side effects of a run live here and in the writers; the rest is pure functions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fadejax.algorithm import fade
from fadejax.arrays import RolloutBatch
from fadejax.config import RunConfig, to_json
from fadejax.data.pipeline import Pipeline
from fadejax.policy import model
from fadejax.policy.sampler import SamplerConfig
from fadejax.train import diagnostics, ends, plan, refill, setup, supervised, tracing
from fadejax.train import rollout as rollouts
from fadejax.train import step as step_of
from fadejax.train import workdir as workdirs
from fadejax.train.batches import Batch, Batches, Flight, abstract_rollout
from fadejax.train.checkpoint import (
  Checkpoints,
  Damaged,
  restore_params,
  save_first,
  saved_steps,
)
from fadejax.train.evaluation import evaluate
from fadejax.train.metrics import Clock, Writers, open_writers, write_atomically
from fadejax.train.progress import Progress
from fadejax.train.step import Extras, Tally, TrainState, UpdateSettings, init_state, make_update
from fadejax.verify import VerifierPool


class RunStopped(RuntimeError):
  """The run cannot go on; the message says why and what to do."""


@dataclasses.dataclass(frozen=True)
class Outcome:
  """What `train` leaves behind, besides the files in the workdir."""

  steps: int
  before: dict[str, float] | None  # evaluation metrics at the start, where there was one
  after: dict[str, float] | None
  exported: Path | None


def train(
  config: RunConfig,
  workdir: Path,
  *,
  plan_only: bool = False,
  profile: tuple[int, int] | None = None,
) -> Outcome | None:
  """Trains, or goes on training where `workdir` holds an earlier part of the same run.

  Args:
    config: the resolved config.
    workdir: where everything is written.
    plan_only: print the plan and stop; no parameters are read or made.
    profile: first and last step of a JAX profiler trace, written to workdir/profile.

  Raises:
    RunStopped: most groups of a step could not be graded, or updates were not finite.
    ValueError: the config does not fit the data, the model, the devices or the workdir.
  """
  cache = setup.enable_compilation_cache(config.compilation_cache)
  with setup.precision(config):
    run = _Run.build(config, workdir, cache, plan_only)
    if plan_only:
      return None
    with contextlib.ExitStack() as stack:
      return run.go(stack, profile)


@dataclasses.dataclass
class _Run:
  """One run in progress: what was built, and what changes: the state and a few counters."""

  config: RunConfig
  workdir: Path
  policy: setup.Policy
  tasks: list
  pipeline: Pipeline
  update: Any
  to_sampler: Any
  sampler: SamplerConfig
  state: TrainState
  frozen: model.Params | None  # the model below the adapters, with LoRA
  first_params: model.Params | None  # those it began with, where something needs them
  shown: Callable[[int], RolloutBatch] | None  # demonstrations of a step, for parallel averaging
  init_step: int | None  # the checkpoint of `init_from` that it began with
  draws: int = 0  # prompts drawn so far
  flight: Flight | None = None  # with staleness: drawn and not trained on yet
  barren: int = 0  # steps in a row in which dynamic sampling found nothing
  skipped: int = 0  # updates left out in a row
  save_seconds: float = 0.0  # what the last step's save held the loop up

  @classmethod
  def build(cls, config: RunConfig, workdir: Path, cache: str, plan_only: bool = False) -> _Run:
    """Tasks, tokenizer, policy, state and compiled update; prints the plan.

    With `plan_only` parameters stay abstract: a laptop can plan what it could not hold.
    """
    tasks = setup.build_tasks(config)
    resumed = saved_steps(workdir / "checkpoints")
    tokenizer = setup.build_tokenizer(config, tasks, workdir if resumed else None)
    policy = setup.build_policy(config, tokenizer)
    workdirs.check(workdir, config, policy.arch, "train")
    pipeline = setup.build_pipeline(
      config, tasks, tokenizer, prompts=config.rollout.prompts, seed=config.seed
    )
    schedule, optimizer = setup.build_optimizer(config)
    settings = UpdateSettings(
      policy.arch, config.model, config.rollout, config.policy_weight, config.fade, config.loss,
      config.steps, config.lora,
    )  # fmt: skip
    make_state = functools.partial(init_state, optimizer=optimizer, config=config.fade)
    begun = ends.begin(config, policy, workdir, make_state, abstract=plan_only)
    run = cls(
      config=config,
      workdir=workdir,
      policy=policy,
      tasks=tasks,
      pipeline=pipeline,
      update=make_update(
        settings,
        optimizer,
        schedule,
        policy.train_layout,
        jax.tree.map(lambda x: x.sharding, begun.state),
      ),
      to_sampler=setup.to_sampler(policy, config.model.dtype, begun.frozen),
      sampler=setup.sampler_config(config, tokenizer, config.rollout, config.rollout.group),
      state=begun.state,
      frozen=begun.frozen,
      first_params=begun.first_params,
      shown=supervised.source(config, tasks, policy) if config.sft.alongside else None,
      init_step=begun.init_step,
    )
    plan.show(config, policy, begun.state, pipeline, tasks, begun.source, cache)
    print(f"first prompt:\n{run.first_prompt()}\n", flush=True)
    return run

  def first_prompt(self) -> str:
    """The first training prompt exactly as the model reads it, control tokens included."""
    batch = self.pipeline.batch(0)
    return self.prompt_text(batch.problems[0])

  def prompt_text(self, problem: dict[str, Any]) -> str:
    """A problem's prompt as the model reads it."""
    settings = {task.name: c for c, task in self.tasks}[problem["task"]]
    return self.policy.tokenizer.render(problem["prompt"], **setup.template_settings(settings))

  # ------------------------------------------------------------- the loop

  def go(self, stack: contextlib.ExitStack, profile: tuple[int, int] | None) -> Outcome:
    """Restores, trains to the last step, evaluates and exports."""
    config = self.config
    stack.enter_context(workdirs.lock(self.workdir))
    stack.callback(tracing.stop, self.workdir / "profile")
    checkpoints = Checkpoints(self.workdir / "checkpoints", config.checkpoint)
    stack.callback(checkpoints.close)
    start, sampled = self.restore(checkpoints)
    workdirs.note(self.workdir, config, self.policy.arch, "train", self.init_step)
    self.policy.tokenizer.save(self.workdir / "tokenizer")
    pool = setup.build_pool(config, self.tasks)
    batches = Batches(config, self.policy, self.pipeline, self.sampler, pool)
    stack.callback(batches.close)
    stack.enter_context(pool)
    if sampled is not None:
      self.flight = batches.relaunch(self.draws - config.rollout.prompts, sampled)
    writers = stack.enter_context(
      open_writers(
        self.workdir,
        json.loads(to_json(config)),
        start,
        tensorboard=config.log.tensorboard,
        wandb_mode=config.log.wandb,
        wandb_project=config.log.wandb_project,
      )
    )
    if any(writers.dropped.values()):
      print(f"lines after step {start or 0} cut away: {writers.dropped}", flush=True)
    if start is None:
      if self.first_params is not None and self.frozen is None:
        save_first(self.workdir, self.first_params)
      self.evaluate_at_start(pool, writers)
    first = int(self.state.step)
    bar = stack.enter_context(Progress(config.steps, first)) if config.log.progress else None
    for step in range(first + 1, config.steps + 1):
      with tracing.traced(profile, step, self.workdir / "profile"):
        row = self.one_step(step, batches, writers, checkpoints)
      if bar is not None:
        bar.update(row)
    return self.finish(checkpoints, pool)

  def one_step(
    self, step: int, batches: Batches, writers: Writers, checkpoints: Checkpoints
  ) -> dict[str, Any]:
    """Draw, sample, grade, update; then evaluation, checkpoint and row, where they are due."""
    clock, started = Clock(), time.perf_counter()
    redrawn = self.pipeline.redrawn
    try:
      batch, tally, row = self.rollout(step, batches, clock)
    except RunStopped:
      self.save_stopped(checkpoints, step - 1)
      raise
    with clock("data"):
      shown = self.shown(step) if self.shown else None
    with clock("update"):
      rewards = setup.place_rewards(batch.graded.rewards, self.policy.train_layout)
      ref_params = self.first_params if self.config.loss.kl_coefficient else None
      extras = Extras(self.frozen, ref_params, tally, shown)
      self.state, metrics = self.update(self.state, batch.rollout, rewards, extras)
      row |= {key: _number(value) for key, value in jax.device_get(metrics).items()}
    row |= {"step": step, "prompts_drawn": self.draws}
    row |= {"prompts_redrawn": self.pipeline.redrawn - redrawn}
    self.stop_if_skipping(row)
    row = _ratios(row) | self.head_diagnostics(step)
    if step == 1 and self.config.policy_weight.name == "fade":
      initial = float(self.state.fade.initial_entropy)
      low, high = fade.delta_range(self.config.fade, initial)
      print(f"first batch: entropy {initial:.3f} nats, so δ can reach [{low:.2f}, {high:.2f}]")
    log = self.config.log
    if log.samples_every and step % log.samples_every == 0:
      texts = [self.prompt_text(p) for p in batch.problems[: log.samples]]
      shown_rows = rollouts.sample_rows(
        step, batch.graded, batch.host, batch.problems, texts, log.samples
      )
      writers.samples(shown_rows)
    with clock("eval"):
      report = self.evaluate_if_due(batches.pool, step)
    if report is not None:
      row |= {f"eval/{k}": v for k, v in report["metrics"].items()}
    clock.row["time/step"] = time.perf_counter() - started
    row |= clock.row | {"time/save": self.save_seconds}
    if "time/rollout" in row:  # the last step samples nothing where batches are a step ahead
      row["tokens_per_s"] = row["tokens"] / row["time/rollout"]
    # The row comes before the save: a run killed in between repeats the step, and loses no row.
    writers.row(row)
    with clock("save"):
      self.save_if_due(checkpoints, step, report)
    self.save_seconds = clock.row["time/save"]
    return row

  def rollout(
    self, step: int, batches: Batches, clock: Clock
  ) -> tuple[Batch, Tally | None, dict[str, Any]]:
    """What the step trains on, the tally of all that was drawn, and the row's part of it."""
    if self.config.rollout.staleness:
      batch = self.stale_batch(step, batches, clock)
      return batch, None, _row_of([batch])
    r, drawn = self.config.rollout, []
    with clock("rollout"):
      params = self.to_sampler(self.state.params)  # cast and resharded once a step

    def draw_batch(first: int) -> Batch:
      batch = batches.draw(first, params, clock)
      _stop_if_ungraded(batch.graded, step)
      drawn.append(batch)
      return batch

    def measure(batch: Batch) -> Tally:
      rewards = setup.place_rewards(batch.graded.rewards, self.policy.train_layout)
      return _tally(batch.rollout, rewards)

    row: dict[str, Any] = {}
    if r.dynamic_sampling:
      refilled = refill.refill(draw_batch, measure, self.draws, r.max_batches)
      batch, tally = refilled.batch, refilled.tally
      row = {
        "refill/outcome": refilled.outcome,
        "refill/batches": refilled.batches,
        "refill/found": refilled.found,
        "refill/surplus": refilled.surplus,
        "refill/all_wrong": refilled.all_wrong,
        "refill/all_right": refilled.all_right,
      }
      self.stop_if_barren(refilled, step)
    else:
      batch, tally = draw_batch(self.draws), None
    self.draws += r.prompts * len(drawn)
    return batch, tally, row | _row_of(drawn)

  def stale_batch(self, step: int, batches: Batches, clock: Clock) -> Batch:
    """The batch in flight; the next one is sampled while it is graded, before its update.

    Nothing of the run changes where it cannot be trained on: a checkpoint then holds it still.
    """
    flight, drawn, each = self.flight, self.draws, self.config.rollout.prompts
    ahead = None
    if flight is None or step < self.config.steps:
      with clock("rollout"):
        params = self.to_sampler(self.state.params)
      if flight is None:
        flight, drawn = batches.launch(drawn, params, clock), drawn + each
      if step < self.config.steps:
        ahead, drawn = batches.launch(drawn, params, clock), drawn + each
    batch = batches.land(flight, clock)
    _stop_if_ungraded(batch.graded, step)
    self.flight, self.draws = ahead, drawn
    return batch

  def head_diagnostics(self, step: int) -> dict[str, float]:
    """Rank-one share of the head's change since the start, every `log.head_every` steps."""
    every = self.config.log.head_every
    if not every or step % every:
      return {}
    values = jax.device_get(diagnostics.head_update(self.state.params, self.first_params))
    return {key: float(value) for key, value in values.items()}

  # ---------------------------------------------------- what is on cadence

  def evaluate_if_due(self, pool: VerifierPool, step: int) -> dict[str, Any] | None:
    """The evaluation report of this step, or None where none is due."""
    e, last = self.config.evaluation, step == self.config.steps
    due = (last and e.at_end) or (e.every and step % e.every == 0)
    return self.evaluate(pool, step) if due else None

  def evaluate(self, pool: VerifierPool, step: int) -> dict[str, Any]:
    """Evaluates the present parameters and writes eval/step_….json."""
    params = self.to_sampler(self.state.params)
    report = {"step": step, **evaluate(self.policy, params, self.tasks, pool, self.config)}
    path = self.workdir / "eval" / f"step_{step:06d}.json"
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, json.dumps(report, indent=1) + "\n")
    return report

  def evaluate_at_start(self, pool: VerifierPool, writers: Writers) -> None:
    """The row of step 0: the evaluation before training."""
    if not self.config.evaluation.at_start:
      return
    clock = Clock()
    with clock("eval"):
      report = self.evaluate(pool, 0)
    metrics = {f"eval/{k}": v for k, v in report["metrics"].items()}
    writers.row({"step": 0, **metrics, **clock.row})

  def save_if_due(self, checkpoints: Checkpoints, step: int, report: dict[str, Any] | None) -> None:
    """Starts an asynchronous save on cadence and after the last step."""
    every = self.config.checkpoint.every
    if step == self.config.steps or (every and step % every == 0):
      self.save(checkpoints, step, report["metrics"] if report else None)

  def save_stopped(self, checkpoints: Checkpoints, step: int) -> None:
    """Saves what the steps before a stop have learned."""
    if step > 0 and checkpoints.latest() != step:
      self.save(checkpoints, step, None)
      print(f"step {step} saved", flush=True)

  def save(self, checkpoints: Checkpoints, step: int, metrics: dict[str, float] | None) -> None:
    """The state, what is counted, and the batch in flight."""
    meta = {"draws": self.draws, "seed": self.config.seed, "skipped": self.skipped}
    sampled = self.flight.sampled.rollout if self.flight else None
    checkpoints.save(step, self.state, meta | {"barren": self.barren}, metrics, sampled)

  def restore(self, checkpoints: Checkpoints) -> tuple[int | None, RolloutBatch | None]:
    """Takes up the newest complete checkpoint: (its step, or None; the batch in flight)."""
    damaged = []
    like = abstract_rollout(self.config, self.policy.sample_layout)
    while (step := checkpoints.latest()) is not None:
      try:
        self.state, meta, sampled = checkpoints.restore(step, self.state, like)
        break
      except Damaged as error:
        aside = checkpoints.set_aside(step)
        damaged.append(aside.name)
        print(
          f"WARNING: {error}: it cannot be read; it was renamed to {aside.name}, and the one "
          "before it is tried",
          flush=True,
        )
    else:
      if damaged:
        raise RunStopped(
          f"no checkpoint of {self.workdir} can be read; nothing was changed but their names "
          f"({', '.join(damaged)} in checkpoints/). Take another --workdir to start again."
        )
      return None, None
    if int(self.state.step) != step:
      raise ValueError(f"checkpoint {step} in {self.workdir} holds step {int(self.state.step)}")
    self.draws, self.skipped, self.barren = meta["draws"], meta["skipped"], meta["barren"]
    print(f"resuming {self.workdir} from step {step}, {self.draws} prompts drawn", flush=True)
    return step, sampled

  def stop_if_skipping(self, row: dict[str, Any]) -> None:
    """Counts updates that were not finite; stops the run after too many in a row."""
    self.skipped = self.skipped + 1 if row["update_skipped"] else 0
    if self.skipped >= self.config.max_skipped_updates:
      raise RunStopped(
        f"the gradient was not finite in {self.skipped} steps in a row (max_skipped_updates): "
        f"lower optimizer.learning_rate; the last good checkpoint is in {self.workdir}/checkpoints"
      )

  def stop_if_barren(self, refilled: refill.Refilled, step: int) -> None:
    """Tells of a step without P informative groups; one with none at all may stop the run."""
    r = self.config.rollout
    self.barren = self.barren + 1 if refilled.outcome == "none" else 0
    if refilled.outcome == "full":
      return
    story = (
      f"step {step}: dynamic sampling {refilled.outcome}: {refilled.found} of {r.prompts} groups "
      f"had differing rewards after {refilled.batches} batches (rollout.max_batches); "
      f"{refilled.all_wrong} groups were all wrong, {refilled.all_right} all right"
    )
    if self.barren and (r.when_none == "stop" or self.barren >= self.config.max_skipped_updates):
      easy = refilled.all_right > refilled.all_wrong
      raise RunStopped(
        f"{story}, {self.barren} step(s) in a row (rollout.when_none, max_skipped_updates). The "
        f"task is too {'easy' if easy else 'hard'} for this policy: go on in another --workdir "
        f"with --config.init_from={self.workdir} and another task, rollout.group or "
        "rollout.max_batches"
      )
    print(story, flush=True)

  def finish(self, checkpoints: Checkpoints, pool: VerifierPool) -> Outcome:
    """Exports the best checkpoint, and gathers the evaluations of both ends."""
    checkpoints.wait()
    exported = None
    step = checkpoints.best()
    if self.config.checkpoint.export and step is not None and self.config.steps:
      params = self.state.params
      if step != int(self.state.step):
        like = self.policy.abstract_trained(self.policy.train_layout)
        params = restore_params(self.workdir / "checkpoints", like, step)
      exported = ends.export_run(self.policy, params, self.frozen, self.workdir)
      print(f"step {step} exported as a Hugging Face directory: {exported}", flush=True)
    read = lambda step: _read_evaluation(self.workdir, step)  # noqa: E731
    return Outcome(int(self.state.step), read(0), read(int(self.state.step)), exported)


# --------------------------------------------------------------- small pieces


def _stop_if_ungraded(graded: rollouts.Graded, step: int) -> None:
  """Stops the run where more than half of a step's groups could not be graded."""
  invalid = int(np.sum(~graded.rewards.valid))
  if 2 * invalid > len(graded.rewards.valid):
    detail = next(v.detail for v in graded.verdicts if v.reward is None)
    raise RunStopped(
      f"step {step}: {invalid} of {len(graded.rewards.valid)} groups could not be graded; "
      f"the first reason: {detail}"
    )


_tally = jax.jit(step_of.tally)


def _row_of(drawn: list[Batch]) -> dict[str, Any]:
  """The row's part that comes from verdicts."""
  row: dict[str, Any] = rollouts.verdict_shares([v for b in drawn for v in b.graded.verdicts])
  row |= rollouts.extra_means([b.graded for b in drawn])
  return row | rollouts.task_solve_rates(
    [b.graded.rewards for b in drawn], [p for b in drawn for p in b.problems]
  )


def _ratios(row: dict[str, Any]) -> dict[str, Any]:
  """The row with m_S / m_F, and without numbers that this step has no answer for."""
  if row["m_f"] > 0:
    row["sign_ratio"] = row["m_s"] / row["m_f"]
  if row["n_eff"] == 0:  # no weight anywhere, so it has no difficulty
    del row["mean_difficulty"]
  return row


def _number(value: Any) -> float | int:
  value = np.asarray(value)
  return value.item() if value.dtype.kind in "iufb" else float(value)


def _read_evaluation(workdir: Path, step: int) -> dict[str, float] | None:
  path = workdir / "eval" / f"step_{step:06d}.json"
  return json.loads(path.read_text())["metrics"] if path.exists() else None
