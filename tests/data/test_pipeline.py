"""The order of draws: a pure function of (seed, draw), the same for any number of hosts."""

from __future__ import annotations

import collections
import dataclasses

import numpy as np
import pytest

from fadejax.data.pipeline import HostBatch, Pipeline, encode_batch
from fadejax.data.tasks import TASKS, Task, TaskConfig


def encode(record):
  """One id a character."""
  return [ord(c) for c in record["prompt"]]


def finite(name, count, length=lambda i: 3):
  rows = [{"id": f"{name}{i}", "prompt": chr(97 + i % 26) * length(i)} for i in range(count)]
  return Task(name, rows, rows[:1])


def make(tasks, weights=None, **fields):
  settings = {"prompts_per_batch": 8, "max_prompt_length": 64, "seed": 0, **fields}
  return Pipeline(tasks, weights or [1.0] * len(tasks), encode, **settings)


def ids(batch):
  return [record["id"] for record in batch.problems]


def assert_same(left: HostBatch, right: HostBatch):
  for a, b in zip(left[:3], right[:3], strict=True):
    np.testing.assert_array_equal(a, b)
  assert left.problems == right.problems


def arithmetic():
  return TASKS["arithmetic"](TaskConfig(), 0)


def test_batches_are_right_padded_and_indexed():
  pipeline = make([finite("t", 50, lambda i: 1 + i % 5)], max_prompt_length=6)
  batch = pipeline.batch(16)
  assert batch.tokens.shape == (8, 6) and batch.tokens.dtype == np.int32
  assert batch.lengths.dtype == batch.draw.dtype == np.int32
  assert batch.draw.tolist() == list(range(16, 24))
  for row, length, record in zip(batch.tokens, batch.lengths, batch.problems, strict=True):
    assert row[:length].tolist() == encode(record) and not row[length:].any()
    assert record["task"] == "t"


def test_every_pass_draws_each_problem_once_in_another_order():
  pipeline = make([finite("t", 40)])
  order = [i for first in range(0, 120, 8) for i in ids(pipeline.batch(first))]
  passes = [order[:40], order[40:80], order[80:]]
  assert all(sorted(p) == sorted(passes[0]) and len(set(p)) == 40 for p in passes)
  assert passes[0] != passes[1] != passes[2]


def test_a_data_set_ends_never():
  # verl#5725: a resume at the end of an epoch ran no step at all.
  pipeline = make([finite("t", 60)], prompts_per_batch=60)
  first, second = pipeline.batch(60), make([finite("t", 60)], prompts_per_batch=60).batch(60)
  assert_same(first, second)
  assert len(set(ids(first))) == 60
  assert len(pipeline.batch(60 * 10_000).problems) == 60


def test_a_batch_may_be_larger_than_the_data_set():
  drawn = ids(make([finite("t", 3)], prompts_per_batch=12).batch(0))
  assert collections.Counter(drawn) == {"t0": 4, "t1": 4, "t2": 4}


@pytest.mark.parametrize(
  "tasks", [[finite("t", 40)], [arithmetic()], [finite("t", 7), arithmetic()]]
)
def test_resume_gives_the_same_batches(tasks):
  straight = make(tasks)
  batches = [straight.batch(first) for first in range(0, 80, 8)]
  for first in (72, 0, 24, 40):  # random access, in a pipeline that saw nothing before
    assert_same(make(tasks).batch(first), batches[first // 8])


def test_seeds_give_different_orders():
  orders = []
  for seed in range(4):
    pipeline = make([finite("t", 40)], seed=seed)
    orders += [tuple(ids(pipeline.batch(f)) + ids(pipeline.batch(f + 8))) for f in (0, 40, 80)]
  # Also between one seed's second pass and the next seed's first.
  assert len(set(orders)) == 12


@pytest.mark.parametrize("hosts", [2, 4, 8])
def test_the_slices_of_the_hosts_are_the_batch(hosts):
  tasks, weights = [finite("t", 23), arithmetic()], [2.0, 1.0]
  whole = make(tasks, weights).batch(16)
  parts = [
    make(tasks, weights, process_index=i, process_count=hosts).batch(16) for i in range(hosts)
  ]
  joined = HostBatch(
    *(np.concatenate([part[i] for part in parts]) for i in range(3)),
    problems=tuple(record for part in parts for record in part.problems),
  )
  assert_same(joined, whole)
  assert all(part.tokens.shape == (8 // hosts, 64) for part in parts)


def test_mixture_shares_are_the_weights():
  tasks = [finite("a", 10), arithmetic(), finite("c", 200)]
  pipeline = make(tasks, [1.0, 2.5, 0.5], prompts_per_batch=40)
  counts = collections.Counter()
  for first in range(0, 800, 40):
    counts.update(record["task"] for record in pipeline.batch(first).problems)
    total = first + 40
    expected = {"a": total / 4, "arithmetic": total * 2.5 / 4, "c": total / 8}
    assert all(abs(counts[name] - n) <= 2 for name, n in expected.items())


def test_one_task_of_a_mixture_is_drawn_evenly():
  pipeline = make([finite("a", 10), finite("b", 30)], [1.0, 1.0], prompts_per_batch=20)
  drawn = collections.Counter(i for f in range(0, 120, 20) for i in ids(pipeline.batch(f)))
  assert {drawn[f"a{i}"] for i in range(10)} == {6} and {drawn[f"b{i}"] for i in range(30)} == {2}


def test_overlong_prompts_of_a_file_are_dropped_and_counted():
  pipeline = make([finite("t", 50, lambda i: 1 + i % 5)], max_prompt_length=4)
  drawn = {i for first in range(0, 40, 8) for i in ids(pipeline.batch(first))}
  assert drawn == {f"t{i}" for i in range(50) if i % 5 != 4}
  assert pipeline.counts == {"training prompts of t over rollout.max_prompt_length = 4": 10}
  assert make([finite("t", 50)]).counts == {}
  with pytest.raises(ValueError, match="none of its 50 training prompts fits"):
    make([finite("t", 50)], max_prompt_length=2)


def test_overlong_generated_prompts_are_drawn_again():
  """Prompts of 1 to 5 tokens, limit 4: order, hosts and resume as ever, none too long, counted."""
  endless = dataclasses.replace(finite("t", 4000, lambda i: 1 + i % 5), generated=True)
  pipeline = make([endless], max_prompt_length=4)
  batches = [pipeline.batch(first) for first in range(0, 400, 8)]
  assert max(int(batch.lengths.max()) for batch in batches) == 4
  assert 40 < pipeline.redrawn < 120  # one in five of 400 draws, and of those drawn again
  reason = "of 64 generated prompts of t are over rollout.max_prompt_length = 4"
  assert pipeline.counts == {f"{reason}: such a problem is drawn again": 12}
  again = make([endless], max_prompt_length=4)
  assert ids(again.batch(392)) == ids(batches[-1])
  halves = [make([endless], max_prompt_length=4, process_index=i, process_count=2) for i in (0, 1)]
  assert [x for half in halves for x in ids(half.batch(8))] == ids(batches[1])
  assert make([endless], max_prompt_length=5).counts == {}


def test_generated_prompts_that_are_all_too_long_are_an_error_at_the_start():
  with pytest.raises(ValueError, match=r"none of 64 .* fits in rollout\.max_prompt_length = 40"):
    make([arithmetic()], max_prompt_length=40)


def test_a_prompt_that_cannot_be_encoded_is_named():
  def refuse(record):
    raise ValueError("raw_prompt wants text")

  with pytest.raises(ValueError, match="problem 't0' of task 't': raw_prompt wants text"):
    Pipeline([finite("t", 4)], [1.0], refuse, prompts_per_batch=2, max_prompt_length=8, seed=0)


@pytest.mark.parametrize("first", [30, -8, 1])
def test_a_count_of_rows_is_refused(first):
  # ms-swift#10113: completions and prompts are different units.
  with pytest.raises(ValueError, match="not a multiple of 8 prompts"):
    make([finite("t", 40)]).batch(first)


@pytest.mark.parametrize(
  ("tasks", "weights", "fields", "message"),
  [
    ([], [], {}, "at least one"),
    ([finite("t", 4), finite("t", 5)], None, {}, "all different"),
    ([finite("t", 4)], [0.0], {}, "above 0"),
    ([finite("t", 4)], [1.0, 1.0], {}, "one each"),
    ([finite("t", 4)], None, {"process_count": 3}, "multiple of the 3 host"),
  ],
)
def test_wrong_arguments_are_named(tasks, weights, fields, message):
  with pytest.raises(ValueError, match=message):
    make(tasks, weights, **fields)


def test_the_order_is_pinned():
  """A run that is resumed with newer code or another grain must go on in the same order."""
  assert ids(make([finite("t", 40)]).batch(0)) == "t33 t5 t38 t34 t32 t36 t9 t31".split()
  assert ids(make([arithmetic()]).batch(8)) == "73+41 6+3 3+2 71+26 74+5 7+64 39+3 5+8".split()


def test_encode_batch_fills_with_the_last_record():
  records = [{"id": i, "prompt": "x" * (i + 1)} for i in range(3)]
  batch, real = encode_batch(records, encode, size=5, max_prompt_length=3)
  assert real == 3 and batch.lengths.tolist() == [1, 2, 3, 3, 3]
  assert [r["id"] for r in batch.problems] == [0, 1, 2, 2, 2]
  assert batch.tokens.tolist() == [[120, 0, 0], [120, 120, 0]] + [[120] * 3] * 3
  assert batch.draw.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
  ("prompts", "message"),
  [([], "0 records"), (["x"] * 6, "6 records"), (["x" * 4], "4 tokens"), ([""], "0 tokens")],
)
def test_encode_batch_refuses(prompts, message):
  with pytest.raises(ValueError, match=message):
    encode_batch([{"prompt": p} for p in prompts], encode, size=5, max_prompt_length=3)
