r"""The `math` grader: is the final answer of a completion the gold?

Our parser reads the answer and the gold whole, and our rules decide (math_parse, math_value,
math_compare; docs/verifiers.md has them in words). For a gold beyond the parser, such as an
integral, `math-verify` proposes and a strict acceptor disposes: see `math_fallback`.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from fadejax.verify import math_compare
from fadejax.verify.math_parse import parse
from fadejax.verify.math_scan import MathSyntaxError, Node
from fadejax.verify.math_text import TooLongError, candidates, canonical
from fadejax.verify.math_words import COMMANDS, FUNCTIONS, GREEK, WORDS, text_form
from fadejax.verify.verdict import ProblemError, Verdict, field, no_answer, right, wrong

GOLD_LIMIT = 1000  # characters
MARKS = re.compile(r"\\boxed|\\fbox|####|<answer>")


def gold_text(answer: Any) -> str:
  """The gold as text: a number, or a string that may be boxed, in dollars or after `####`.

  Raises:
    ProblemError: neither a number nor text, or empty.
  """
  if isinstance(answer, bool) or not isinstance(answer, str | int | float):
    raise ProblemError(f"invalid gold: {answer!r} is neither text nor a number")
  text = (repr(answer) if isinstance(answer, float) else str(answer)).strip()
  if len(text) > GOLD_LIMIT:
    raise ProblemError(f"invalid gold: over {GOLD_LIMIT} characters")
  if MARKS.search(text):
    found = candidates(text)
    text = found[0] if found else ""
  if not canonical(text):
    raise ProblemError(f"invalid gold: {answer!r} is empty")
  return text


@functools.lru_cache(maxsize=4096)
def _parsed_gold(text: str) -> Node | None:
  """The tree of a gold, None for one that only its text or math-verify can compare.

  Raises:
    ProblemError: prose, or nothing that could ever be compared.
  """
  try:
    return parse(text)
  except MathSyntaxError as error:
    bare = COMMANDS.sub(" ", WORDS.sub(" ", text))
    words = [w for w in re.findall(r"[A-Za-z]{3,}", bare) if w not in FUNCTIONS | GREEK]
    if words or not re.search(r"[\\0-9=<>+*/^|]", text):
      raise ProblemError(
        f"invalid gold: {text[:80]!r} is not mathematics; write a word answer as \\text{{...}} "
        "or use the verifier 'exact'"
      ) from error
    return None


def parse_gold(answer: Any) -> tuple[bool, str]:
  """Whether `answer` can be compared with anything, and why not: (valid, reason).

  For loading data: a row with an invalid gold is dropped and counted, never rewarded.
  """
  try:
    _parsed_gold(gold_text(answer))
  except ProblemError as error:
    return False, str(error)
  return True, ""


def math(completion: str, problem: dict[str, Any]) -> Verdict:
  """Right when the final answer of the completion equals `answer` by the rules of the docs.

  Raises:
    ProblemError: an invalid gold; the item is then a `grader_error`, never right or wrong.
  """
  text = gold_text(field(problem, "answer", "math"))
  gold = _parsed_gold(text)
  try:
    found = candidates(completion)
  except TooLongError as error:
    return wrong(str(error))
  if not found:
    return no_answer("no final answer")
  for candidate in found:
    if canonical(candidate) == canonical(text):
      return right(_short(candidate))
    try:
      answer = parse(candidate)
    except (MathSyntaxError, RecursionError):
      continue
    return _verdict(gold, answer, text, candidate)
  prose = not MARKS.search(completion) and not re.search(r"[0-9\\$]", found[0])
  if prose and gold is not None and gold[0] != "text":
    return no_answer("no final answer")
  return _unparsed(gold, text, found)


def _verdict(gold: Node | None, answer: Node, text: str, candidate: str) -> Verdict:
  if gold is None:
    return _proposed(text, candidate)
  if gold[0] == "text" or answer[0] == "text":
    equal = text_form(text) == text_form(candidate)
  else:
    try:
      equal = math_compare.same(gold, answer)
    except (ArithmeticError, RecursionError) as error:
      return wrong(f"{_short(candidate)}: too large to compare ({error})")
  return (right if equal else wrong)(_short(candidate))


def _unparsed(gold: Node | None, text: str, found: list[str]) -> Verdict:
  """No candidate is of the grammar: only the same words, or math-verify, can make it right."""
  if gold is None:
    return _proposed(text, found[0])
  if gold[0] == "text" and text_form(text) in (text_form(part) for part in found):
    return right(_short(found[0]))
  return wrong(f"not read as mathematics: {_short(found[0])}")


def _proposed(text: str, candidate: str) -> Verdict:
  from fadejax.verify import math_fallback

  equal = math_fallback.accepts(text, candidate)
  return (right if equal else wrong)(f"math-verify: {_short(candidate)}")


def _short(text: str) -> str:
  return text if len(text) <= 120 else text[:119] + "…"
