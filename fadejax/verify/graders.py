"""VERIFIERS: the table from a verifier's name to its grader.

A grader is a function (completion: str, problem: dict) -> Verdict. The modules behind the
table are imported when a grader first runs, so that a process that needs Countdown only does
not pay for the others.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any

from fadejax.verify import puzzles
from fadejax.verify.verdict import ProblemError, Verdict, field, to_verdict

Grader = Callable[[str, dict[str, Any]], Verdict]


def math(completion: str, problem: dict[str, Any]) -> Verdict:
  """See `fadejax.verify.math_answer.math`."""
  from fadejax.verify import math_answer

  return math_answer.math(completion, problem)


def reasoning_gym(completion: str, problem: dict[str, Any]) -> Verdict:
  """See `fadejax.verify.gym.reasoning_gym`."""
  from fadejax.verify import gym

  return gym.reasoning_gym(completion, problem)


def code(completion: str, problem: dict[str, Any]) -> Verdict:
  """See `fadejax.verify.code_tests.code`."""
  from fadejax.verify import code_tests

  return code_tests.code(completion, problem)


def python(completion: str, problem: dict[str, Any]) -> Verdict:
  """The user's own function, named by the problem's `function`: "package.module:name".

  It is called as function(completion, problem) and returns a Verdict, a bool or a number in
  [0, 1]. It is trusted code and runs in a pool worker under the same deadlines.
  """
  path = field(problem, "function", "python")
  module, _, name = path.partition(":") if isinstance(path, str) else ("", "", "")
  if not module or not name:
    raise ProblemError(f"field 'function' is {path!r}: expected 'package.module:name'")
  try:
    function = vars(importlib.import_module(module))[name]
  except (ImportError, KeyError) as error:
    raise ProblemError(f"field 'function': cannot load {path!r}: {error!r}") from error
  return to_verdict(function(completion, problem), path)


VERIFIERS: dict[str, Grader] = {
  "code": code,
  "countdown": puzzles.countdown,
  "exact": puzzles.exact,
  "integer": puzzles.integer,
  "math": math,
  "python": python,
  "reasoning_gym": reasoning_gym,
  "regex": puzzles.regex,
}


def check_known(name: str) -> None:
  """Refuses a verifier that does not exist.

  Raises:
    ValueError: names the verifiers that do.
  """
  if name not in VERIFIERS:
    raise ValueError(f"unknown verifier {name!r}: expected one of {', '.join(sorted(VERIFIERS))}")


def check_name(name: str) -> None:
  """Refuses a verifier that cannot be used here.

  Raises:
    ValueError: as `check_known`; for `code`, says how to get a sandbox where there is none.
  """
  check_known(name)
  if name == "code":
    from fadejax.verify import sandbox

    if reason := sandbox.why_not():
      raise ValueError(f"verifier 'code': {reason}")


def check_problem(problem: dict[str, Any]) -> str:
  """Why this record cannot be graded, or "" when it can; cheap enough for every row at load.

  A gold that does not parse gives a reason that starts with "invalid gold".
  """
  name = problem.get("verifier")
  if not isinstance(name, str):
    return "the field 'verifier' is missing or is not text"
  try:
    check_name(name)
    if name == "math":
      from fadejax.verify import math_answer

      valid, reason = math_answer.parse_gold(field(problem, "answer", name))
      return "" if valid else reason
    if name == "reasoning_gym":
      from fadejax.verify import gym

      field(problem, "entry", name)
      gym.warn_untested(field(problem, "dataset", name))
      return "" if problem["dataset"] in gym.OWN else gym.available()
    if name == "code":
      from fadejax.verify import code_tests

      code_tests.form_of(problem)
      return ""
    if name == "python":
      field(problem, "function", name)
      return ""
    if name == "regex":
      re.compile(field(problem, "pattern", name))
      return ""
    VERIFIERS[name]("", problem)
  except (ValueError, TypeError, re.error) as error:
    return str(error)
  return ""


def run(name: str, completion: str, problem: dict[str, Any]) -> Verdict:
  """One grading in this process, unbounded: what a worker calls.

  A record that the grader cannot use is a `grader_error`; any other exception of the grader
  is raised.
  """
  check_name(name)
  try:
    return to_verdict(VERIFIERS[name](completion, problem), name)
  except ProblemError as error:
    return Verdict(None, "grader_error", str(error))
