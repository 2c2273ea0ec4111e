"""Generated tasks: pure functions of (seed, index), and what is held out is never drawn."""

from __future__ import annotations

import collections
import itertools
import json
import re

import pytest

from fadejax.data.generated import _combine
from fadejax.data.tasks import TASKS, TaskConfig
from fadejax.verify import check_problem, gym, puzzles

NUMBERS = {n: (n, str(n), 3) for n in range(10)}


def build(name, seed=0, **fields):
  return TASKS[name](TaskConfig(name=name, **fields), seed)


def pairs_of(records):
  """Unordered operand pairs, read from the prompts."""
  numbers = (map(int, re.findall(r"\d+", record["prompt"])) for record in records)
  return [tuple(sorted(pair)) for pair in numbers]


def drawn(task, count):
  return [task.train[i] for i in range(count)]


def test_arithmetic_records_are_right_and_pinned():
  task = build("arithmetic")
  for record in drawn(task, 300):
    a, b = map(int, re.findall(r"\d+", record["prompt"]))
    assert record["prompt"] == f"What is {a} + {b}? Answer with just the number."
    assert record["answer"] == a + b and record["task"] == "arithmetic"
    assert check_problem(record) == ""
    assert puzzles.integer(task.demonstrations(record), record).reward == 1.0
    assert set(record["prompt"] + task.demonstrations(record)) <= set(task.alphabet)
  # A new split would put old evaluation problems into training.
  assert [r["id"] for r in task.eval[:6]] == ["3+7", "18+2", "68+85", "4+5", "73+8", "92+65"]
  # A resumed run on another machine or Python must draw the same problems.
  assert [task.train[i]["id"] for i in (0, 1, 12345)] == ["16+73", "93+67", "6+6"]


def test_arithmetic_levels_are_uniform():
  counts = collections.Counter(r["level"] for r in drawn(build("arithmetic"), 6000))
  # Standard deviation of a share is 0.006.
  assert {k: pytest.approx(v / 6000, abs=0.025) for k, v in counts.items()} == {
    "1+1": 1 / 3,
    "1+2": 1 / 3,
    "2+2": 1 / 3,
  }
  digits = {tuple(len(str(n)) for n in map(int, r["id"].split("+"))) for r in drawn(
    build("arithmetic", options={"levels": ["1+2"]}), 50
  )}  # fmt: skip
  assert digits == {(1, 2), (2, 1)}


@pytest.mark.parametrize(
  ("level", "universe", "draws"),
  [
    ("1+1", itertools.combinations_with_replacement(range(10), 2), 2_000),
    ("1+2", itertools.product(range(10), range(10, 100)), 15_000),
    ("2+2", itertools.combinations_with_replacement(range(10, 100), 2), 60_000),
  ],
)
def test_arithmetic_split_is_a_partition(level, universe, draws):
  options = {"levels": [level]}
  with pytest.raises(ValueError, match="gives only") as caught:
    build("arithmetic", options=options, eval_problems=10_000)
  count = int(re.search(r"only (\d+)", str(caught.value))[1])
  task = build("arithmetic", options=options, eval_problems=count)
  held, trained = set(pairs_of(task.eval)), set(pairs_of(drawn(task, draws)))
  universe = set(universe)
  assert not held & trained
  assert held | trained == universe
  assert 0.1 < len(held) / len(universe) < 0.3


def test_arithmetic_evaluation_is_fixed_and_balanced():
  first, second = build("arithmetic", seed=0), build("arithmetic", seed=1)
  assert first.eval == second.eval
  assert first.train[0] != second.train[0]
  counts = collections.Counter(record["level"] for record in build("arithmetic").eval[:30])
  assert set(counts.values()) == {10}
  assert len({record["id"] for record in first.eval}) == 64


@pytest.mark.parametrize("division", [False, True])
def test_countdown_demonstrations_are_accepted(division):
  task = build("countdown", options={"division": division})
  records = drawn(task, 800)
  for record in [*records, *task.eval]:
    solution = task.demonstrations(record)
    assert puzzles.countdown(solution, record).reward == 1.0, record
    assert set(record["prompt"] + solution) <= set(task.alphabet)
    numbers = " ".join(map(str, record["numbers"]))
    assert record["prompt"] == f"{numbers} = {record['target']}:"
    assert 1 <= record["target"] <= 99 and all(1 <= n <= 9 for n in record["numbers"])
  operators = set("".join(record["solution"] for record in records)) - set("0123456789()")
  assert operators == set("+-*/" if division else "+-*")


def test_countdown_order_does_not_give_the_solution_away():
  records = drawn(build("countdown"), 300)
  same = [r for r in records if re.findall(r"\d+", r["solution"]) == list(map(str, r["numbers"]))]
  assert len(same) < 100  # 1/6 of size 3, fewer of the others; all of them without the shuffle


def test_countdown_sizes_weights_and_bounds():
  options = {"sizes": [3, 4], "weights": [3, 1], "max_number": 20, "max_target": 50}
  task = build("countdown", options=options)
  records = drawn(task, 2000)
  share = sum(len(r["numbers"]) == 3 for r in records) / len(records)
  assert share == pytest.approx(0.75, abs=0.04)
  assert max(max(r["numbers"]) for r in records) == 20
  assert max(r["target"] for r in records) <= 50
  assert collections.Counter(len(r["numbers"]) for r in task.eval) == {3: 32, 4: 32}


def test_countdown_split_follows_the_multiset_and_target():
  options = {"sizes": [3], "max_number": 4, "max_target": 12}
  with pytest.raises(ValueError, match="gives only") as caught:
    build("countdown", options=options, eval_problems=10_000)
  count = int(re.search(r"only (\d+)", str(caught.value))[1])
  task = build("countdown", options=options, eval_problems=count)
  key = lambda r: (tuple(sorted(r["numbers"])), r["target"])  # noqa: E731
  trained, held = {key(r) for r in drawn(task, 6000)}, {key(r) for r in task.eval}
  assert len(held) == count and not held & trained
  # Every reachable problem is on one of the two sides: brute force over trees.
  assert trained | held == reachable(range(1, 5), 12)


def reachable(numbers, largest):
  """(multiset of three, target) that some expression over + - * reaches."""
  apply = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}.values()
  found = set()
  for a, b, c in itertools.product(numbers, repeat=3):
    for f, g in itertools.product(apply, repeat=2):
      for value in (g(f(a, b), c), g(a, f(b, c))):
        if 1 <= value <= largest:
          found.add((tuple(sorted((a, b, c))), value))
  return found


def test_countdown_is_pinned_and_independent_of_seed_in_evaluation():
  task = build("countdown")
  assert [task.train[i]["prompt"] for i in (0, 1)] == ["4 4 2 3 8 = 49:", "1 8 3 = 24:"]
  assert task.eval == build("countdown", seed=9).eval
  assert [r["id"] for r in task.eval[:3]] == ["6 7 9 = 22", "2 3 5 8 = 14", "4 4 4 7 7 = 35"]
  assert drawn(task, 20) == drawn(build("countdown"), 20) != drawn(build("countdown", seed=1), 20)


def test_countdown_evaluation_goes_on_where_a_size_has_no_more():
  task = build("countdown", eval_problems=200, options={"sizes": [2, 5], "max_number": 4})
  count = collections.Counter(len(r["numbers"]) for r in task.eval)
  assert count[2] + count[5] == 200 and 0 < count[2] < 20


def test_parentheses_are_only_those_that_the_value_needs():
  plus, minus = _combine(NUMBERS[8], NUMBERS[2], "+"), _combine(NUMBERS[8], NUMBERS[2], "-")
  cases = {
    "8+2+3": _combine(plus, NUMBERS[3], "+"),
    "3+8+2": _combine(NUMBERS[3], plus, "+"),
    "3-(8+2)": _combine(NUMBERS[3], plus, "-"),
    "3-(8-2)": _combine(NUMBERS[3], minus, "-"),
    "(8-2)*3": _combine(minus, NUMBERS[3], "*"),
    "3*8/2": _combine(NUMBERS[3], _combine(NUMBERS[8], NUMBERS[2], "/"), "*"),
    "8/(2*2)": _combine(NUMBERS[8], _combine(NUMBERS[2], NUMBERS[2], "*"), "/"),
  }
  for text, (value, made, _) in cases.items():
    assert made == text and puzzles.evaluate(text)[0] == value
  assert _combine(NUMBERS[8], NUMBERS[3], "/") is None
  assert _combine(NUMBERS[8], (0, "2-2", 1), "/") is None


def test_reasoning_gym_entries_and_split():
  pytest.importorskip("reasoning_gym")
  task = build("reasoning_gym", options={"dataset": "gcd", "config": {"max_value": 100}})
  records = drawn(task, 200)
  for record in [*records[:20], *task.eval[:20]]:
    assert record["dataset"] == task.name == record["task"] == "gcd"
    assert check_problem(record) == ""
    assert gym.reasoning_gym(record["entry"]["answer"], record).reward == 1.0
    assert record["prompt"] == record["entry"]["question"]
    assert record == json.loads(json.dumps(record))
  questions = {record["prompt"] for record in task.eval}
  assert len(questions) == 64 and not questions & {r["prompt"] for r in records}
  assert task.train[7] == build("reasoning_gym", options={
    "dataset": "gcd", "config": {"max_value": 100}}).train[7]  # fmt: skip
  # Some data sets seed NumPy, which takes 32 bits: the last record must still come.
  assert build("reasoning_gym", options={"dataset": "gcd"}).train[len(task.train) - 1]
