r"""Golds beyond our parser (integrals, sums, limits): math-verify proposes, we dispose.

The library skips what it cannot read and then compares what is left. So a proposal counts
only if both parses are total: taking any one token out of the source must change the parse or
break it. Argument order: the gold first, everywhere.
"""

from __future__ import annotations

import logging
import re
from typing import Any

import mpmath

from fadejax.verify.math_text import normalise

SOURCE_LIMIT = 120  # characters
TOKENS = re.compile(r"\\[A-Za-z]+|\bd[a-z]\b|[0-9]|[A-Za-z]|[-+*/^=<>!|,_]")
DIFFERENTIAL = re.compile("d[a-z]")
SPACING = frozenset(
  {r"\left", r"\right", r"\displaystyle", r"\limits", r"\cdot", r"\times", r"\quad", r"\qquad"}
)
# Forms whose evaluation may never end.
EXPLOSIVE = re.compile(r"!|[0-9]{7}|\^[^{]*\{[^}]*\^|\^\s*[0-9A-Za-z]\s*\^|\^\{?[0-9]{4}")


def accepts(gold: str, answer: str) -> bool:
  """Whether math-verify finds the two equal and has read all of both.

  Runs inside a worker, whose deadline bounds it: the library's own alarms are off.
  """
  gold, answer = normalise(gold), normalise(answer)
  for source in (gold, answer):
    if len(source) > SOURCE_LIMIT or EXPLOSIVE.search(source):
      return False
  import math_verify

  logging.getLogger("math_verify").setLevel(logging.CRITICAL)
  left, right = _parse(gold), _parse(answer)
  if not left or not right:
    return False
  try:
    if not math_verify.verify(
      left, right, strict=True, float_rounding=30, numeric_precision=50, timeout_seconds=None
    ):
      return False
  finally:
    _forget_intervals()
  return _total(gold, left) and _total(answer, right)


def _forget_intervals() -> None:
  """mpmath keeps the nodes of every interval that it has integrated over: 0.6 MB each, for ever."""
  for rule in (mpmath.mp._tanh_sinh, mpmath.mp._gauss_legendre):
    rule.transformed_cache.clear()
    rule.interval_count.clear()


def _parse(source: str) -> list[Any]:
  import math_verify

  config = [math_verify.LatexExtractionConfig(boxed_match_priority=0)]
  return math_verify.parse(
    f"\\boxed{{{source}}}",
    config,
    fallback_mode="no_fallback",
    extraction_mode="first_match",
    parsing_timeout=None,
  )


def _total(source: str, parsed: list[Any]) -> bool:
  for match in TOKENS.finditer(source):
    if match.group() in SPACING:
      continue
    # math-verify assumes dx where there is none: of a differential, another must change the parse.
    other = (
      "" if not DIFFERENTIAL.fullmatch(match.group()) else "dw" if match.group() != "dw" else "dv"
    )
    rest = f"{source[: match.start()]} {other} {source[match.end() :]}"
    if _parse(rest) == parsed:
      return False
  return True
