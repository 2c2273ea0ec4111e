"""The `reasoning_gym` grader: the package's own scorers, with their known faults guarded."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
import warnings
from decimal import Decimal, InvalidOperation
from typing import Any

from fadejax.verify import puzzles
from fadejax.verify.verdict import (
  ProblemError,
  Verdict,
  after_thinking,
  field,
  no_answer,
  right,
  to_verdict,
  wrong,
)

# Checked here against right and wrong answers (tests/verify/test_gym.py).
TESTED = ("basic_arithmetic", "chain_sum", "countdown", "gcd", "letter_counting", "number_sorting")

# These scorers hand the model's text to `eval` when it is not the stored answer: it must be
# a plain literal by then.
LITERAL_ONLY = ("binary_matrix", "n_queens", "spiral_matrix", "string_insertion")
# These hand it to sympy's parser, which evaluates: only arithmetic over known names may pass.
SYMBOLIC = ("intermediate_integration", "polynomial_multiplication", "simple_integration")
SYMBOLIC_NAMES = frozenset(
  "sin cos tan sec csc cot asin acos atan sinh cosh tanh exp log ln sqrt pi E Abs".split()
)
ANSWER_LIMIT = 20_000  # characters


def available() -> str:
  """Empty when the package is there, else what to install."""
  if importlib.util.find_spec("reasoning_gym") is None:
    return "the verifier 'reasoning_gym' needs the extra `puzzles`: pip install 'fadejax[puzzles]'"
  return ""


def warn_untested(name: str) -> None:
  """For loading data: says once that the scorer of this data set was not checked here."""
  if name not in TESTED:
    message = f"the reasoning_gym scorer {name!r} is not among those tested: {', '.join(TESTED)}"
    warnings.warn(message, stacklevel=3)


@functools.cache
def _dataset(name: str) -> Any:
  """The named data set with its default settings (a scorer reads only those)."""
  import reasoning_gym
  from reasoning_gym.factory import DATASETS

  if name not in DATASETS:
    raise ProblemError(f"reasoning_gym has no data set {name!r}; it has {', '.join(DATASETS)}")
  return reasoning_gym.create_dataset(name)


def reasoning_gym(completion: str, problem: dict[str, Any]) -> Verdict:
  """The score of reasoning-gym's data set `dataset` for its `entry`, in [0, 1].

  The answer is the inside of the last `<answer>…</answer>`, else the stripped completion. An
  exception of the scorer is reward 0 with status `ok` and the exception in the detail. Guards:
  number_sorting, countdown and puzzle24 have our own exact rules; text that a scorer would
  evaluate must be a literal or plain algebra; credit given only because the answer contains
  the stored one as a substring is withheld.
  """
  name = field(problem, "dataset", "reasoning_gym")
  entry = field(problem, "entry", "reasoning_gym")
  if not isinstance(entry, dict) or "answer" not in entry:
    raise ProblemError("field 'entry' must be a reasoning_gym entry: an object with 'answer'")
  text = after_thinking(completion)
  answer = (puzzles.tagged_answer(text) or "") if text and "<answer>" in text else (text or "")
  answer = answer.strip()
  if not answer:
    return no_answer("empty, or the thinking part never ended")
  if len(answer) > ANSWER_LIMIT:
    return wrong(f"longer than {ANSWER_LIMIT} characters")
  if name in OWN:
    return OWN[name](answer, entry)
  missing = available()
  if missing:
    raise ProblemError(missing)
  return _score(name, answer, entry)


def _score(name: str, answer: str, entry: dict[str, Any]) -> Verdict:
  oracle = entry["answer"]
  if answer == oracle:
    return right()
  if name in LITERAL_ONLY and not _is_literal(answer):
    return wrong("not the stored answer, and not a literal")
  if name in SYMBOLIC and not _is_algebra(answer):
    return wrong("not plain algebra")
  dataset = _dataset(name)
  try:
    score = float(dataset.score_answer(answer, entry))
  except Exception as error:
    return wrong(f"the scorer raised {type(error).__name__}: {error}")
  contained = isinstance(oracle, str) and 0 < score < 1 and oracle in answer
  if contained and abs(score - len(oracle) / len(answer)) < 1e-9:
    return wrong("contains the stored answer and more; substring credit withheld")
  return to_verdict(score, f"reasoning_gym/{name}")


def _is_literal(answer: str) -> bool:
  try:
    ast.literal_eval(answer)
  except (ValueError, SyntaxError, MemoryError, RecursionError):
    return False
  return True


def _is_algebra(answer: str) -> bool:
  """Digits, operators, one-letter names and known functions; no attribute, index or text."""
  if len(answer) > 2000 or not re.fullmatch(r"[0-9A-Za-z+\-*/^().\s]*", answer):
    return False
  if re.search(r"\.(?![0-9])", answer) or re.search(r"\*\*\s*\(?\s*[0-9]{4}", answer):
    return False
  words = re.findall(r"[A-Za-z]+", answer)
  return all(len(word) == 1 or word in SYMBOLIC_NAMES for word in words)


def _decimals(text: str) -> list[Decimal] | None:
  """A bracketed or bare comma-separated list of numbers, quoted or not; None if it is not."""
  inner = re.fullmatch(r"\s*\[?(.*?)\]?\s*", text, flags=re.DOTALL)
  if inner is None or text.count("[") != text.count("]"):
    return None
  parts = [part.strip().strip("'\"").strip() for part in inner.group(1).split(",")]
  if not all(
    re.fullmatch(r"[-+]?[0-9]{1,40}(?:\.[0-9]{1,40})?(?:e[-+]?[0-9]{1,2})?", p) for p in parts
  ):
    return None
  try:
    return [Decimal(part) for part in parts]
  except InvalidOperation:
    return None


def number_sorting(answer: str, entry: dict[str, Any]) -> Verdict:
  """The numbers of the question, sorted: by exact value, whatever the stored key rounds to.

  The package's scorer allows a difference of 1 in each value, and a key rounded to fewer
  digits refuses the true values (reasoning-gym issue 377); the question's own numbers decide.
  """
  metadata = entry.get("metadata", {})
  numbers = metadata.get("original_numbers")
  if not numbers:
    raise ProblemError("number_sorting: the entry's metadata has no 'original_numbers'")
  found = _decimals(answer)
  if found is None:
    return wrong("not a list of numbers")
  descending = metadata.get("direction", "ascending") == "descending"
  expected = sorted((Decimal(str(number)) for number in numbers), reverse=descending)
  return right() if found == expected else wrong("not the given numbers in the asked order")


def _countdown(answer: str, entry: dict[str, Any]) -> Verdict:
  metadata = entry.get("metadata", {})
  return puzzles.countdown(
    answer, {"numbers": metadata.get("numbers"), "target": metadata.get("target")}
  )


def _puzzle24(answer: str, entry: dict[str, Any]) -> Verdict:
  numbers = entry.get("metadata", {}).get("numbers")
  return puzzles.countdown(answer, {"numbers": numbers, "target": 24})


OWN = {"number_sorting": number_sorting, "countdown": _countdown, "puzzle24": _puzzle24}
