"""Whether what a program printed is what its tests expect, line by line and token by token."""

from __future__ import annotations

import math
import re
from decimal import Decimal

FLOAT_TOLERANCE = 1e-6  # absolute or relative, of numeric tokens


def same_output(output: str, expected: str, tolerance: float = FLOAT_TOLERANCE) -> bool:
  """Whether two outputs agree by line and by token.

  Blank space at the end of a line, and blank lines at the end, do not count; the number of lines
  and of tokens does. Two numeric tokens of which one has a decimal point or an exponent may differ
  by `tolerance`, absolute or relative; any other tokens must be equal.
  """
  left, right = (
    [line.split() for line in text.rstrip().split("\n")] for text in (output, expected)
  )
  return len(left) == len(right) and all(
    len(a) == len(b) and all(_same_token(x, y, tolerance) for x, y in zip(a, b, strict=True))
    for a, b in zip(left, right, strict=True)
  )


_NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,4})?")


def _same_token(x: str, y: str, tolerance: float) -> bool:
  """Whether a token of the output is as good as the expected one, y."""
  if x == y:
    return True
  if len(x) > 400 or len(y) > 400 or not set(x + y) & set(".eE"):
    return False
  if not (_NUMBER.fullmatch(x) and _NUMBER.fullmatch(y)):
    return False
  if Decimal(x) == Decimal(y):
    return True
  if not set(y) & set(".eE"):
    return False  # an integer is exact
  left, right = float(x), float(y)
  near = math.isclose(left, right, rel_tol=tolerance, abs_tol=tolerance)
  return near and math.isfinite(left) and math.isfinite(right)
