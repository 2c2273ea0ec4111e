"""Sampling a step ahead (`rollout.staleness`): what is sampled when, and after a stop."""

from __future__ import annotations

import json
import threading
import zlib

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from fadejax.config import default_config, resolve
from fadejax.train import batches, loop, setup
from fadejax.train.metrics import TIME_FIELDS, read_jsonl
from fadejax.verify import Verdict, VerifierPool


def config(**changes):
  c = default_config()
  c.steps = 5
  c.model.preset = "nano"
  c.task.name = "countdown"
  c.task.raw_prompt = True
  c.task.eval_problems = 8
  c.rollout.prompts = 8
  c.rollout.group = 4
  c.rollout.max_prompt_length = 16
  c.rollout.max_completion_length = 8
  c.rollout.staleness = 1
  c.loss.importance_cap = 2.0
  c.policy_weight.name = "dr_grpo"
  c.optimizer.learning_rate = 1e-2
  c.optimizer.warmup_steps = 0
  c.checkpoint.every = 2
  c.checkpoint.keep_best = 0
  c.checkpoint.export = False
  c.evaluation.at_start = c.evaluation.at_end = False
  c.log.tensorboard = c.log.progress = False
  for path, value in changes.items():
    section, _, field = path.partition("__")
    setattr(c[section], field, value) if field else setattr(c, section, value)
  return resolve(c)


def verdicts(items):
  """Right or wrong by the text alone, half of each."""
  return [Verdict(float(zlib.crc32(text.encode()) % 2), "ok", "") for _, text, _ in items]


class StubPool:
  """Grades by `answer(call, items)`, where calls count from 1."""

  def __init__(self, answer):
    self.answer, self.calls, self.threads = answer, 0, set()

  def __enter__(self):
    return self

  def __exit__(self, *exception):
    pass

  def grade(self, items):
    self.calls += 1
    self.threads.add(threading.current_thread().name)
    return self.answer(self.calls, items)


def digest(params):
  return float(np.sum(np.abs(np.asarray(params["head"], np.float64))))


@pytest.fixture
def watched(monkeypatch):
  """(run, seen): trains with a stub pool; `seen` has every sampling's and update's parameters."""
  seen = {"sampled": [], "updated": [], "event": [threading.Event() for _ in range(12)]}
  sample, make_update = batches.sample, loop.make_update

  def watched_sample(params, *args, **kwargs):
    seen["sampled"].append(digest(params))
    seen["event"][len(seen["sampled"])].set()
    return sample(params, *args, **kwargs)

  def watched_update(*args):
    update = make_update(*args)

    def one(state, *rest):
      if not seen["updated"]:
        seen["updated"].append(digest(state.params))
      new, metrics = update(state, *rest)
      seen["updated"].append(digest(new.params))
      return new, metrics

    return one

  monkeypatch.setattr(batches, "sample", watched_sample)
  monkeypatch.setattr(loop, "make_update", watched_update)

  def run(settings, workdir, answer):
    pool = StubPool(answer)
    monkeypatch.setattr(setup, "build_pool", lambda *_: pool)
    loop.train(settings, workdir)
    return pool

  return run, seen


def test_a_batch_is_sampled_while_the_one_before_is_graded(tmp_path, watched):
  """The graders do not answer for batch n before batch n + 1 is being sampled."""
  run, seen = watched

  def answer(call, items):
    if call < 5:
      assert seen["event"][call + 1].wait(60), f"batch {call + 1} waits for batch {call}'s verdicts"
    return verdicts(items)

  pool = run(config(), tmp_path, answer)
  # No batch that nobody trains on; update n is of a batch sampled before update n - 1.
  assert pool.calls == len(seen["sampled"]) == 5
  start = seen["updated"]
  assert len(set(start)) == 6
  assert seen["sampled"] == [start[0], start[0], start[1], start[2], start[3]]
  assert all(name.startswith("grading") for name in pool.threads)
  rows, _ = read_jsonl(tmp_path / "metrics.jsonl")
  assert [row["prompts_drawn"] for row in rows] == [16, 24, 32, 40, 40]
  assert rows[0]["logprob_gap_max"] < 1e-4 < rows[2]["logprob_gap_max"]
  assert all(row["time/grade"] > 0 and row["time/grade_wait"] >= 0 for row in rows)


def test_without_staleness_every_batch_is_of_the_newest_parameters(tmp_path, watched):
  run, seen = watched
  run(config(rollout__staleness=0, steps=3), tmp_path, lambda call, items: verdicts(items))
  assert seen["sampled"] == seen["updated"][:3]
  rows, _ = read_jsonl(tmp_path / "metrics.jsonl")
  assert [row["prompts_drawn"] for row in rows] == [8, 16, 24]
  assert max(row["logprob_gap_max"] for row in rows) < 1e-4


def rows_and_state(workdir, step):
  rows, _ = read_jsonl(workdir / "metrics.jsonl")
  with ocp.PyTreeCheckpointer() as reader:
    state = reader.restore(workdir / "checkpoints" / f"step_{step}" / "state")
  return [{k: v for k, v in row.items() if k not in TIME_FIELDS} for row in rows], state


def test_a_stopped_run_goes_on_with_the_batch_that_was_in_flight(tmp_path, watched):
  """Stopped while batch 4 is graded, it goes on from step 2 with the batch 3 of that checkpoint."""
  run, seen = watched
  good = lambda call, items: verdicts(items)  # noqa: E731
  run(config(), tmp_path / "whole", good)
  ahead = seen["sampled"][:]

  def breaks(call, items):
    if call == 4:
      raise OSError("the graders' machine is gone")
    return verdicts(items)

  with pytest.raises(OSError, match="the graders' machine is gone"):
    run(config(), tmp_path / "stopped", breaks)
  assert not [t for t in threading.enumerate() if t.name.startswith("grading")]
  seen["sampled"].clear()
  run(config(), tmp_path / "stopped", good)
  assert seen["sampled"] == ahead[3:]  # batch 3 was in the checkpoint
  (a, x), (b, y) = (rows_and_state(tmp_path / name, 5) for name in ("whole", "stopped"))
  assert a == b and len(a) == 5
  jax.tree.map(np.testing.assert_array_equal, x, y)


def test_a_step_that_cannot_be_graded_keeps_its_batch(tmp_path, watched):
  run, seen = watched

  def ungraded(call, items):
    return [Verdict(None, "grader_error", "no disk")] * len(items) if call == 3 else verdicts(items)

  with pytest.raises(loop.RunStopped, match=r"step 3: 8 of 8 groups could not be graded.*no disk"):
    run(config(), tmp_path, ungraded)
  meta = json.loads((tmp_path / "checkpoints" / "step_2" / "meta" / "metadata").read_text())
  assert meta["draws"] == 24 and meta["flight"] is True
  seen["sampled"].clear()
  run(config(), tmp_path, lambda call, items: verdicts(items))
  assert len(seen["sampled"]) == 2
  rows, _ = read_jsonl(tmp_path / "metrics.jsonl")
  assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]


def test_a_batch_in_flight_is_not_graded_against_other_problems(tmp_path, watched, monkeypatch):
  """The data has changed between the parts of a run: the config alone does not tell."""
  run, _ = watched

  def stops(call, items):
    if call == 3:
      raise OSError("stopped")
    return verdicts(items)

  with pytest.raises(OSError, match="stopped"):
    run(config(), tmp_path, stops)
  at = setup.build_pipeline

  def other(settings, tasks, tokenizer, *, prompts, seed):
    return at(settings, tasks, tokenizer, prompts=prompts, seed=seed + 1)

  monkeypatch.setattr(setup, "build_pipeline", other)
  with pytest.raises(ValueError, match=r"not those that the data now has from draw 16 on"):
    run(config(), tmp_path, lambda call, items: verdicts(items))


def test_an_interrupted_loop_ends_the_graders_thread(tmp_path, monkeypatch):
  """Ctrl-C while batch 2 is sampled and batch 1 is with graders that never answer."""
  closed, grading, in_time = threading.Event(), threading.Event(), []

  class Stuck(StubPool):
    def __exit__(self, *exception):
      closed.set()

  def never(call, items):
    grading.set()
    in_time.append(closed.wait(20))  # as `VerifierPool.close` does, which ends what it grades
    raise ValueError("the VerifierPool was closed")

  sample, calls = batches.sample, []

  def interrupted(*args, **kwargs):
    calls.append(1)
    if len(calls) == 2:
      assert grading.wait(60)
      raise KeyboardInterrupt
    return sample(*args, **kwargs)

  monkeypatch.setattr(setup, "build_pool", lambda *_: Stuck(never))
  monkeypatch.setattr(batches, "sample", interrupted)
  with pytest.raises(KeyboardInterrupt):
    loop.train(config(), tmp_path)
  assert in_time == [True] and len(calls) == 2
  assert not [t for t in threading.enumerate() if t.name.startswith("grading")]


def test_more_steps_than_were_planned(tmp_path, watched):
  """The last step leaves nothing in flight: a longer run samples its next batch anew."""
  run, seen = watched
  run(config(steps=2), tmp_path, lambda call, items: verdicts(items))
  seen["sampled"].clear()
  run(config(steps=4), tmp_path, lambda call, items: verdicts(items))
  assert len(seen["sampled"]) == 2
  rows, _ = read_jsonl(tmp_path / "metrics.jsonl")
  assert [row["prompts_drawn"] for row in rows] == [16, 16, 32, 32]


def test_what_staleness_cannot_be(tmp_path, watched, capsys):
  with pytest.raises(ValueError, match="staleness: dynamic sampling"):
    config(rollout__dynamic_sampling=True)
  for value, message in ((2, "at most 1"), (-1, "at least 0")):
    with pytest.raises(ValueError, match=f"rollout.staleness: must be {message}"):
      config(rollout__staleness=value)
  run, _ = watched
  run(config(loss__importance_cap=0.0, steps=1), tmp_path, lambda call, items: verdicts(items))
  assert "nothing corrects for it" in capsys.readouterr().out
  with pytest.raises(ValueError, match=r"rollout\.staleness: 1 there, 0 now"):
    loop.train(config(rollout__staleness=0, loss__importance_cap=0.0, steps=1), tmp_path)


def test_closing_a_pool_ends_a_grading_in_another_thread():
  with VerifierPool(workers=1) as pool:
    problem = {"function": "tests.verify.graders_for_tests:nap"}
    failed: list[BaseException] = []

    def grade():
      try:
        pool.grade([("python", "30", problem)])
      except ValueError as error:
        failed.append(error)

    thread = threading.Thread(target=grade)
    thread.start()
    while not pool._slots:
      pass
    pool.close()
    thread.join(20)
    assert not thread.is_alive() and "closed" in str(failed[0])
