"""Graders whose answers are exact: integers, text, patterns, Countdown.

Every grader is a function (completion: str, problem: dict) -> Verdict. Model text is parsed,
never evaluated. Only what follows a closing `</think>` counts; see docs/verifiers.md.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from fadejax.verify.verdict import (
  ProblemError,
  Verdict,
  after_thinking,
  field,
  no_answer,
  right,
  wrong,
)

# A number with thousands separators, else a run of digits with an optional fraction part.
NUMBER = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|\.[0-9]+")
NOT_INTEGER_AFTER = re.compile(r"\s*(?:/\s*[0-9]|%|\\%)|[eE][+-]?[0-9]")
NOT_INTEGER_BEFORE = re.compile(r"(?:[0-9]\s*/\s*|[0-9]\.|[0-9][eE][+-]?|\^\{?[+-]?)$")

EXPRESSION_LIMIT = 400  # characters
DEPTH_LIMIT = 40  # nested parentheses
OPERATORS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "\u2013": "-"})


def last_integer(text: str) -> str | None:
  """The last number of a text as canonical digits ("-12"), None when it is no integer.

  "1,234" is 1234; "12.5", "1/2", "30%" and "2e3" are numbers but no integers. A sign counts
  when it touches the digits and does not follow a digit, a letter or a closing bracket, so
  "10-3" ends in 3 and "= -3" in -3. Linear in the length of the text.
  """
  match = None
  for found in NUMBER.finditer(text):
    match = found
  if match is None:
    return None
  digits = match.group().replace(",", "")
  before = text[: match.start()]
  # A fraction's lower half, or the tail of "1.2.3", is not a whole number of its own.
  if "." in digits or NOT_INTEGER_AFTER.match(text, match.end()):
    return None
  if NOT_INTEGER_BEFORE.search(before[-8:]):
    return None
  negative = re.search(r"(?:^|[^0-9A-Za-z)\]}])[-−]$", before[-2:]) is not None
  digits = digits.lstrip("0") or "0"
  return "-" + digits if negative and digits != "0" else digits


def parse_integer(answer: Any) -> str:
  """A gold integer (int, or text such as "7", "-1,234") as canonical digits.

  Raises:
    ProblemError: it is not one.
  """
  if isinstance(answer, bool) or not isinstance(answer, int | str):
    raise ProblemError(f"invalid gold: answer {answer!r} is not an integer")
  text = str(answer).strip().replace("−", "-").lstrip("+")
  if not re.fullmatch(r"-?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)", text):
    raise ProblemError(f"invalid gold: answer {answer!r} is not an integer")
  negative, digits = text.startswith("-"), text.lstrip("-").replace(",", "").lstrip("0") or "0"
  return "-" + digits if negative and digits != "0" else digits


def integer(completion: str, problem: dict[str, Any]) -> Verdict:
  """Right when the last number of the completion is the integer `answer`, exactly.

  `no_answer` when the completion holds no number at all; a last number that is not an
  integer ("12.5") is a wrong answer.
  """
  gold = parse_integer(field(problem, "answer", "integer"))
  text = after_thinking(completion)
  if text is None:
    return no_answer("the thinking part never ended")
  if NUMBER.search(text) is None:
    return no_answer("no number in the completion")
  found = last_integer(text)
  if found is None:
    return wrong("the last number is not an integer")
  shown = found if len(found) <= 40 else f"{len(found)} digits"
  return right(shown) if found == gold else wrong(f"{shown} is not {gold}")


def exact(completion: str, problem: dict[str, Any]) -> Verdict:
  """Right when the completion, stripped of outer white space, is the text `answer`."""
  gold = str(field(problem, "answer", "exact")).strip()
  text = after_thinking(completion)
  if text is None or not text.strip():
    return no_answer("empty, or the thinking part never ended")
  return right() if text.strip() == gold else wrong()


def regex(completion: str, problem: dict[str, Any]) -> Verdict:
  """Right when `pattern` matches the whole stripped completion.

  With `"match": "search"` in the problem it may match anywhere. Python's `re` syntax; a
  pattern that backtracks for ever is stopped by the pool's deadline.
  """
  pattern = field(problem, "pattern", "regex")
  mode = problem.get("match", "full")
  if mode not in ("full", "search"):
    raise ProblemError(f"field 'match' is {mode!r}: expected 'full' or 'search'")
  try:
    compiled = re.compile(pattern)
  except (re.error, TypeError) as error:
    raise ProblemError(f"field 'pattern' {pattern!r} does not compile: {error}") from error
  text = after_thinking(completion)
  if text is None or not text.strip():
    return no_answer("empty, or the thinking part never ended")
  found = compiled.search(text) if mode == "search" else compiled.fullmatch(text.strip())
  return right() if found else wrong()


class ExpressionError(ValueError):
  """An arithmetic expression that breaks the Countdown grammar."""


def evaluate(text: str) -> tuple[Fraction, list[int]]:
  """Value of an arithmetic expression, and the whole numbers that it uses, in order.

  Grammar: sum = product {("+" | "-") product}; product = atom {("*" | "/") atom};
  atom = digits | "(" sum ")". No signs, decimals or powers. Exact fractions.

  Raises:
    ExpressionError: not of this grammar, too long, too deep, or a division by zero.
  """
  text = text.translate(OPERATORS)
  if len(text) > EXPRESSION_LIMIT:
    raise ExpressionError(f"longer than {EXPRESSION_LIMIT} characters")
  tokens = re.findall(r"[0-9]+|[-+*/()]|\S", text)
  numbers: list[int] = []
  value, end = _sum(tokens, 0, numbers, 0)
  if end != len(tokens):
    raise ExpressionError(f"unexpected {tokens[end]!r}")
  return value, numbers


def _sum(tokens: list[str], at: int, numbers: list[int], depth: int) -> tuple[Fraction, int]:
  value, at = _product(tokens, at, numbers, depth)
  while at < len(tokens) and tokens[at] in "+-":
    other, end = _product(tokens, at + 1, numbers, depth)
    value = value + other if tokens[at] == "+" else value - other
    at = end
  return value, at


def _product(tokens: list[str], at: int, numbers: list[int], depth: int) -> tuple[Fraction, int]:
  value, at = _atom(tokens, at, numbers, depth)
  while at < len(tokens) and tokens[at] in "*/":
    other, end = _atom(tokens, at + 1, numbers, depth)
    if tokens[at] == "*":
      value = value * other
    elif other == 0:
      raise ExpressionError("division by zero")
    else:
      value = value / other
    at = end
  return value, at


def _atom(tokens: list[str], at: int, numbers: list[int], depth: int) -> tuple[Fraction, int]:
  if at >= len(tokens):
    raise ExpressionError("ends too early")
  token = tokens[at]
  if token.isascii() and token.isdigit():
    numbers.append(int(token))
    return Fraction(int(token)), at + 1
  if token != "(":
    raise ExpressionError(f"unexpected {token!r}")
  if depth >= DEPTH_LIMIT:
    raise ExpressionError(f"nested more than {DEPTH_LIMIT} deep")
  value, at = _sum(tokens, at + 1, numbers, depth + 1)
  if at >= len(tokens) or tokens[at] != ")":
    raise ExpressionError("a parenthesis is not closed")
  return value, at + 1


def tagged_answer(text: str) -> str | None:
  """The inside of the last `<answer>…</answer>`; an unclosed last tag runs to the end."""
  start = text.rfind("<answer>")
  if start < 0:
    return None
  return text[start + len("<answer>") :].partition("</answer>")[0].strip()


def countdown(completion: str, problem: dict[str, Any]) -> Verdict:
  """Right when the expression uses each of `numbers` exactly once and equals `target`.

  The answer is the inside of the last `<answer>…</answer>`, else the last line that is not
  blank. It is an expression of `+ - * /` (also × ÷) and parentheses over whole numbers, and
  may be followed by `= target`. Values are exact fractions, so 8/(3-8/3) is 24. A sign, a
  power, a decimal, a number left out or used twice, or another right-hand side is wrong.
  """
  numbers = field(problem, "numbers", "countdown")
  target = parse_integer(field(problem, "target", "countdown"))
  if not isinstance(numbers, list | tuple) or not all(type(n) is int and n >= 0 for n in numbers):
    raise ProblemError(f"field 'numbers' is {numbers!r}: expected a list of whole numbers")
  text = after_thinking(completion)
  if text is None:
    return no_answer("the thinking part never ended")
  answer = tagged_answer(text)
  if answer is None:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    answer = lines[-1] if lines else ""
  if not re.search("[0-9]", answer):
    return no_answer("no expression")
  return _countdown_verdict(answer, sorted(numbers), Fraction(int(target)))


def _countdown_verdict(answer: str, numbers: list[int], target: Fraction) -> Verdict:
  left, equals, after = answer.partition("=")
  try:
    value, used = evaluate(left)
  except ExpressionError as error:
    return wrong(f"not an expression: {error}")
  stated = after.strip().translate(OPERATORS)
  if equals and not (re.fullmatch(r"-?[0-9]{1,30}", stated) and int(stated) == target):
    return wrong("the right-hand side is not the target")
  if sorted(used) != numbers:
    return wrong(f"uses {sorted(used)} instead of {numbers}")
  return right() if value == target else wrong(f"equals {value}, not {target}")
