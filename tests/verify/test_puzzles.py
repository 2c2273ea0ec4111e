from __future__ import annotations

import itertools
import random
from fractions import Fraction

import pytest

from fadejax.verify import puzzles
from fadejax.verify.verdict import ProblemError


@pytest.mark.parametrize(
  ("text", "answer", "reward"),
  [
    ("7", 7, 1),
    ("It is 7.", "7", 1),
    ("3 + 4 = 7", 7, 1),
    ("first 7, then 8", 7, 0),
    ("1,234", 1234, 1),
    ("$1,234,567.", 1234567, 1),
    ("1,234", 234, 0),
    ("1234", "1,234", 1),
    ("12.5", 12, 0),
    ("12.0", 12, 0),
    ("12.5", 5, 0),
    ("1/2", 2, 0),
    ("30%", 30, 0),
    ("2e3", 3, 0),
    ("2^3", 3, 0),
    ("-3", -3, 1),
    ("= -3", -3, 1),
    ("x=-3", -3, 1),
    ("−3", -3, 1),
    ("10-3", 3, 1),
    ("10-3", -3, 0),
    ("5 - 3", 3, 1),
    ("-0", 0, 1),
    ("007", 7, 1),
    ("+7", 7, 1),
    ("7 apples", 7, 1),
    ("(7)", 7, 1),
    ("**7**", 7, 1),
    ("7!", 7, 1),
    ("9" * 5000, 9, 0),
    ("9" * 5000, "9" * 5000, 1),
    ("<think>8</think>7", 7, 1),
    ("<think>7</think>8", 7, 0),
    ("7\n\n", 7, 1),
    ("70", 7, 0),
    ("17", 7, 0),
    ("\u0667", 7, 0),
    ("1.2.3", 3, 0),
  ],
)
def test_integer(text, answer, reward):
  assert puzzles.integer(text, {"answer": answer}).reward == reward


def test_integer_says_when_there_is_no_answer():
  for text in ("", "seven", "<think>7", "<think>7</think> done"):
    assert puzzles.integer(text, {"answer": 7}).status == "no_answer"
  assert puzzles.integer("12.5", {"answer": 12}).status == "ok"


@pytest.mark.parametrize("gold", ["see the figure", 1.5, None, True, "1.5", ""])
def test_integer_refuses_a_gold_that_is_none(gold):
  with pytest.raises(ProblemError):
    puzzles.integer("7", {"id": "p1", "answer": gold})


def test_exact_and_regex():
  assert puzzles.exact(" Paris\n", {"answer": "Paris"}).reward == 1
  assert puzzles.exact("paris", {"answer": "Paris"}).reward == 0
  assert puzzles.exact(" ", {"answer": "Paris"}).status == "no_answer"
  assert puzzles.regex("ab12", {"pattern": "[a-z]+[0-9]+"}).reward == 1
  assert puzzles.regex("ab12!", {"pattern": "[a-z]+[0-9]+"}).reward == 0
  assert puzzles.regex("say ab12!", {"pattern": "b1", "match": "search"}).reward == 1
  with pytest.raises(ProblemError, match="compile"):
    puzzles.regex("x", {"pattern": "("})
  with pytest.raises(ProblemError, match="match"):
    puzzles.regex("x", {"pattern": "x", "match": "some"})


PROBLEM = {"numbers": [3, 5, 7], "target": 22}


@pytest.mark.parametrize(
  "text",
  [
    "3*5+7",
    "7+5*3",
    "(3*5)+7",
    "((3)*(5))+7",
    "3*5+7=22",
    "3*5+7 = 22",
    "3 × 5 + 7",
    "I think:\n<answer> 3*5+7 </answer> done",
    "<answer>1</answer><answer>3*5+7</answer>",
    "first\n3*5+7",
    "<think>3+5</think>3*5+7",
    "<answer>3*5+7",
  ],
)
def test_countdown_accepts(text):
  assert puzzles.countdown(text, PROBLEM).reward == 1


@pytest.mark.parametrize(
  "text",
  [
    "3*5",
    "3*5+7+0",
    "3*5+7*1",
    "22",
    "3*5+7=21",
    "3*5+7=22=22",
    "35+7",
    "3*5+7)",
    "(3*5+7",
    "3*5++7",
    "3*5+-7",
    "-3*5+7",
    "3**5+7",
    "3*5+7.0",
    "3//5+7",
    "3 5+7",
    "3*5+7 #",
    "3(5)+7",
    "__import__('os').system('true')+3*5+7",
    "3*5+7 if 1 else 2",
    "3*5+7\n3*5",
    "3*5+7 = 22.0",
    "<answer>3*5</answer> 3*5+7",
    "3*5+7/(1-1)",
    "(" * 200 + "3*5+7" + ")" * 200,
    "3*5+7" + "+0" * 1000,
    "3*5+٧",
    "3*5+7 because",
    "=22",
    "3*5=15+7",
  ],
)
def test_countdown_refuses(text):
  verdict = puzzles.countdown(text, PROBLEM)
  assert (verdict.reward, verdict.status) == (0, "ok")


def test_countdown_is_exact_where_floats_are_not():
  problem = {"numbers": [3, 3, 8, 8], "target": 24}
  assert puzzles.countdown("8/(3-8/3)", problem).reward == 1
  tricky = {"numbers": [10**20, 1, 10**20], "target": 1}
  assert puzzles.countdown(f"{10**20}-{10**20}+1", tricky).reward == 1
  assert puzzles.countdown("3/(5-5)", {"numbers": [3, 5, 5], "target": 0}).detail.endswith("zero")


def test_countdown_no_answer_and_bad_problems():
  for text in ("", "no idea", "<answer></answer>", "<think>3*5+7"):
    assert puzzles.countdown(text, PROBLEM).status == "no_answer"
  for bad in (
    {"numbers": [3, "5"], "target": 1},
    {"numbers": 3, "target": 1},
    {"numbers": [3], "target": 1.5},
    {"numbers": [-3], "target": 1},
    {"target": 1},
  ):
    with pytest.raises(ProblemError):
      puzzles.countdown("3", {"id": "p", **bad})


def _expressions(numbers):
  """Every fully parenthesised expression over these numbers in this order, with its value."""
  if len(numbers) == 1:
    yield str(numbers[0]), Fraction(numbers[0])
    return
  for cut in range(1, len(numbers)):
    for (left, a), (right, b) in itertools.product(
      list(_expressions(numbers[:cut])), list(_expressions(numbers[cut:]))
    ):
      yield f"({left}+{right})", a + b
      yield f"({left}-{right})", a - b
      yield f"({left}*{right})", a * b
      if b:
        yield f"({left}/{right})", a / b


def test_countdown_agrees_with_a_brute_force_solver():
  rng = random.Random(0)
  accepted = refused = 0
  for _ in range(12):
    numbers = [rng.randint(1, 9) for _ in range(4)]
    order = rng.sample(numbers, 4)
    values = list(_expressions(order))
    target = int(rng.choice([v for _, v in values if v.denominator == 1]))
    problem = {"numbers": numbers, "target": target}
    for text, value in rng.sample(values, 150) + [v for v in values if v[1] == target]:
      right = value == target
      assert puzzles.countdown(text, problem).reward == right, (text, problem)
      accepted, refused = accepted + right, refused + (not right)
      if right:  # one digit changed: another number is used
        digits = [i for i, c in enumerate(text) if c.isdigit()]
        at = rng.choice(digits)
        mutated = text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1 :]
        assert puzzles.countdown(mutated, problem).reward == 0
  assert accepted > 60 and refused > 500
