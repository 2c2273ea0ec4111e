"""Generated tasks: pure functions of (seed, index), and what is held out is never drawn."""

from __future__ import annotations

import collections
import itertools

import pytest

from fadejax.data.generated import LEVELS, _combine, held_out
from fadejax.data.tasks import TASKS, TaskConfig
from fadejax.verify.graders import check_problem, run


def build(name, seed=0, **settings):
  return TASKS[name](TaskConfig(name=name, **settings), seed)


GYM = {"options": {"dataset": "gcd"}}
ALL = pytest.mark.parametrize(
  ("name", "settings"), [("arithmetic", {}), ("countdown", {}), ("reasoning_gym", GYM)]
)


@ALL
def test_a_record_is_a_function_of_seed_and_index(name, settings):
  first, second, other = (build(name, seed, **settings) for seed in (7, 7, 8))
  indices = [0, 1, 2, 50, 10**6, 2**30 - 1]
  records = [first.train[i] for i in indices]
  assert records == [second.train[i] for i in reversed(indices)][::-1]
  assert records != [other.train[i] for i in indices]
  assert len({r["id"] for r in records}) > 1


@ALL
def test_evaluation_is_fixed_and_never_drawn(name, settings):
  tasks = [build(name, seed, eval_problems=24, **settings) for seed in (0, 1)]
  assert list(tasks[0].eval) == list(tasks[1].eval)
  assert len({r["id"] for r in tasks[0].eval}) == 24
  evaluated = {r["id"] for r in tasks[0].eval}
  drawn = {task.train[i]["id"] for task in tasks for i in range(2000)}
  assert not evaluated & drawn


@ALL
def test_records_can_be_graded(name, settings):
  task = build(name, **settings)
  for record in [*(task.train[i] for i in range(20)), *task.eval]:
    assert check_problem(record) == ""
    assert record["task"] == task.name


@pytest.mark.parametrize("name", ["arithmetic", "countdown"])
def test_demonstrations_are_right_and_within_the_alphabet(name):
  task = build(name)
  for i in range(1000):
    record = task.train[i]
    answer = task.demonstrations(record)
    assert run(record["verifier"], answer, record).reward == 1.0
    assert set(record["prompt"] + answer) <= set(task.alphabet)
  assert len(set(task.alphabet)) == len(task.alphabet)


def test_arithmetic_text_and_levels():
  task = build("arithmetic")
  levels = collections.Counter()
  swapped = set()
  for i in range(3000):
    record = task.train[i]
    words = record["prompt"].split()
    a, b = int(words[2]), int(words[4].rstrip("?"))
    assert record["prompt"] == f"What is {a} + {b}? Answer with just the number."
    assert record["answer"] == a + b and record["verifier"] == "integer"
    assert "+".join(sorted(str(len(str(x))) for x in (a, b))) == record["level"]
    levels[record["level"]] += 1
    swapped.add(a > b)
  assert swapped == {False, True}
  for level in LEVELS:  # uniform: 1000 each, standard deviation 26
    assert abs(levels[level] - 1000) < 130


def test_no_held_out_pair_is_drawn_in_either_order():
  task = build("arithmetic", options={"levels": ["1+1"]})
  pairs = collections.Counter()
  for i in range(4000):
    a, b = map(int, task.train[i]["id"].split("+"))
    pairs[frozenset((a, b))] += 1
  held = (
    {frozenset(map(int, r["id"].split("+"))) for r in task.eval_all}
    if False
    else {
      frozenset((a, b))
      for a, b in itertools.combinations_with_replacement(range(10), 2)
      if held_out(f"arithmetic {a}+{b}", 5)
    }
  )
  everything = {frozenset(p) for p in itertools.combinations_with_replacement(range(10), 2)}
  assert set(pairs) == everything - held  # all of the others come, none of these
  assert 5 <= len(held) <= 17  # one in five of 55


def test_about_one_pair_in_five_is_held_out():
  pairs = list(itertools.combinations_with_replacement(range(10, 100), 2))
  share = sum(held_out(f"arithmetic {a}+{b}", 5) for a, b in pairs) / len(pairs)
  assert share == pytest.approx(0.2, abs=0.03)  # four standard deviations


def test_arithmetic_evaluation_is_balanced():
  count = collections.Counter(r["level"] for r in build("arithmetic", eval_problems=48).eval)
  assert count == {"1+1": 16, "1+2": 16, "2+2": 16}
  with pytest.raises(ValueError, match=r"task\.eval_problems = 500, but arithmetic gives only"):
    build("arithmetic", eval_problems=500, options={"levels": ["1+1"]})


def test_hashes_do_not_change_between_versions():
  """Pinned: a new split would put old evaluation problems into training."""
  assert [r["id"] for r in build("arithmetic", eval_problems=6).eval] == ARITHMETIC_EVAL
  assert [r["id"] for r in build("countdown", eval_problems=3).eval] == COUNTDOWN_EVAL
  assert build("arithmetic").train[0]["id"] == "16+73"


ARITHMETIC_EVAL: list[str] = []
COUNTDOWN_EVAL: list[str] = []


def test_countdown_form():
  task = build("countdown", options={"sizes": [3, 5], "weights": [3, 1]})
  sizes = collections.Counter()
  for i in range(2000):
    record = task.train[i]
    numbers, target = record["numbers"], record["target"]
    assert record["prompt"] == f"{' '.join(map(str, numbers))} = {target}:"
    assert all(1 <= n <= 9 for n in numbers) and 1 <= target <= 99
    assert "/" not in record["solution"]
    assert not held_out(f"{' '.join(map(str, sorted(numbers)))} = {target}", 10)
    sizes[len(numbers)] += 1
  assert abs(sizes[3] - 1500) < 100 and sizes[3] + sizes[5] == 2000
  count = collections.Counter(len(r["numbers"]) for r in build("countdown", eval_problems=30).eval)
  assert count == {3: 10, 4: 10, 5: 10}


def test_countdown_evaluation_goes_on_where_a_size_has_no_more():
  task = build("countdown", eval_problems=200, options={"sizes": [2, 5], "max_number": 4})
  count = collections.Counter(len(r["numbers"]) for r in task.eval)
  assert count[2] + count[5] == 200 and 0 < count[2] < 20


def test_countdown_with_division():
  task = build("countdown", options={"division": True, "sizes": [4]})
  records = [task.train[i] for i in range(300)]
  assert any("/" in r["solution"] for r in records)
  assert all(run("countdown", r["solution"], r).reward == 1.0 for r in records)


def test_parentheses_are_the_fewest_that_keep_the_value():
  one, two = (3, "3", 3), (5, "5", 3)
  for outer, inner in itertools.product("+-*/", repeat=2):
    for left_nested in (True, False):
      nested = _combine((8, "8", 3), (2, "2", 3), inner)
      made = _combine(nested, one, outer) if left_nested else _combine(one, nested, outer)
      if made is None:
        continue
      value, text, _ = made
      assert eval(text) == value, text
      if "(" in text:
        bare = eval(text.replace("(", "").replace(")", ""))
        assert bare != value or outer in "-/*", text
  assert _combine(one, two, "/") is None
  assert _combine((0, "1-1", 1), two, "*") == (0, "(1-1)*5", 2)
  assert _combine(two, (4, "3+1", 1), "-") == (1, "5-(3+1)", 1)
  assert _combine(two, (4, "3+1", 1), "+") == (9, "5+3+1", 1)


@pytest.mark.parametrize(
  ("name", "settings", "message"),
  [
    ("arithmetic", {"options": {"levels": ["3+3"]}}, "levels"),
    ("arithmetic", {"options": {"level": ["1+1"]}}, "did you mean 'levels'"),
    ("arithmetic", {"path": "x.jsonl"}, r"task\.path: the task 'arithmetic' generates"),
    ("countdown", {"options": {"sizes": [1]}}, "sizes"),
    ("countdown", {"options": {"sizes": [3], "weights": [1, 2]}}, "weights"),
    ("countdown", {"solve_rates": "x.json"}, r"task\.solve_rates"),
    ("reasoning_gym", {}, "set dataset"),
    ("reasoning_gym", {"options": {"dataset": "gcdd"}}, "gcdd"),
    ("reasoning_gym", {"options": {"dataset": "gcd", "config": {"seed": 1}}}, "no seed"),
    ("reasoning_gym", {"options": {"dataset": "gcd", "config": {"min_numbers": 0}}}, "gcd"),
  ],
)
def test_errors_name_the_field(name, settings, message):
  with pytest.raises(ValueError, match=message):
    build(name, **settings)


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    ({"weight": 0.0}, "weight"),
    ({"eval_problems": -1}, "eval_problems"),
    ({"min_solve_rate": 0.5, "max_solve_rate": 0.4, "solve_rates": "x"}, "min <= max"),
    ({"min_solve_rate": 0.5}, r"need task\.solve_rates"),
  ],
)
def test_config_is_checked(settings, message):
  with pytest.raises(ValueError, match=message):
    TaskConfig(**settings)
