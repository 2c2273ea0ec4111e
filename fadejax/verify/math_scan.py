"""Reading the text of a mathematical answer: tokens, and numbers in all their spellings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, Never

from fadejax.verify.math_words import (
  FUNCTIONS,
  NOT_UNITS,
  PERCENT,
  SCALES,
  UNITS,
  WORDS,
)

Node = tuple[Any, ...]

DEPTH_LIMIT = 60
NUMBER = re.compile(r"[0-9]+(?:\.[0-9]*)?|\.[0-9]+")
GROUPED = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?")
REPEATING = re.compile(r"([0-9]*)\.([0-9]*)\\(?:overline|bar|dot)\s*\{?([0-9]+)\}?")
EXPONENT = re.compile(r"[eE]([-+]?[0-9]{1,3})(?![0-9A-Za-z.])")
MIXED = re.compile(r"\s+([0-9]{1,20})\s*/\s*([0-9]{1,20})(?![0-9.])")


class MathSyntaxError(ValueError):
  """The text is not wholly of the grammar."""


def walk(node: Any) -> Iterator[Node]:
  """Every node of a tree, the outer ones first."""
  if isinstance(node, tuple):
    if node and isinstance(node[0], str):
      yield node
    for part in node:
      yield from walk(part)


class Scanner:
  """A place in a text, and what can be read there."""

  def __init__(self, text: str):
    self.text, self.at, self.depth = text, 0, 0

  def fail(self, reason: str) -> Never:
    raise MathSyntaxError(f"{reason} at {self.text[self.at : self.at + 12]!r}")

  def spaces(self) -> None:
    while self.at < len(self.text) and self.text[self.at].isspace():
      self.at += 1

  def peek(self) -> str:
    r"""The next character, command ("\frac") or escaped character; "" at the end."""
    self.spaces()
    if self.at >= len(self.text):
      return ""
    if self.text[self.at] == "\\":
      match = re.compile(r"\\(?:[A-Za-z]+|.)", re.DOTALL).match(self.text, self.at)
      return match.group() if match else "\\"
    return self.text[self.at]

  def take(self, *expected: str) -> str:
    """The next token if it is one of these, else ""."""
    token = self.peek()
    if token and token in expected:
      self.at += len(token)
      return token
    return ""

  def need(self, token: str) -> None:
    if not self.take(token):
      self.fail(f"expected {token!r}")

  def word(self) -> str:
    """The run of letters at this place, not consumed."""
    self.spaces()
    match = re.compile(r"[A-Za-z]+").match(self.text, self.at)
    return match.group() if match else ""

  def wrapped(self) -> re.Match[str] | None:
    r"""A \text{...}-like group at this place, not consumed."""
    self.spaces()
    return WORDS.match(self.text, self.at)

  def enter(self) -> None:
    self.depth += 1
    if self.depth > DEPTH_LIMIT:
      self.fail(f"nested more than {DEPTH_LIMIT} deep")

  def unit(self, numeric: bool = True) -> tuple[str, int] | None:
    """Words after a quantity that name what is counted: (words, where they end)."""
    match = self.wrapped()
    if match is not None:
      words, end = match.group(1), match.end()
      listed = re.findall(r"[A-Za-z]+", words)
      if not listed or len(listed) > 3 or NOT_UNITS & {word.lower() for word in listed}:
        return None
      if re.search(r"[^A-Za-z\s./^0-9]", words):
        return None
    else:
      word = self.word()
      spaced = self.at > 0 and self.text[self.at - 1].isspace()
      known = word in UNITS or word in SCALES or word in PERCENT
      counted = (
        numeric and spaced and len(word) > 3 and word not in NOT_UNITS and word not in FUNCTIONS
      )
      if not (known or counted) or word in ("pi", "infinity"):
        return None
      words, end = word, self.at + len(word)
      if word in ("square", "cubic"):
        after = re.compile(r"\s+([A-Za-z]+)").match(self.text, end)
        words, end = (words + after.group(), after.end()) if after else (words, end)
    power = re.compile(r"\s*\^\s*(?:\{([23])\}|([23]))").match(self.text, end)
    if power:
      return f"{words}^{power.group(1) or power.group(2)}", power.end()
    return words, end

  def number(self, *, grouped: bool) -> Node:
    """A number in digits; `grouped` lets commas separate thousands."""
    repeating = REPEATING.match(self.text, self.at)
    if repeating:
      self.at = repeating.end()
      whole, fixed, period = repeating.groups()
      value = Fraction(int((whole + fixed + period) or "0") - int((whole + fixed) or "0"))
      return ("num", value / (10 ** len(fixed) * (10 ** len(period) - 1)))
    match = (GROUPED.match(self.text, self.at) if grouped else None) or NUMBER.match(
      self.text, self.at
    )
    if match is None:
      self.fail("expected a number")
    self.at = match.end()
    digits = match.group().replace(",", "")
    exponent = EXPONENT.match(self.text, self.at)
    # "2e3", "1e-05" and "2.5e-7" are one number; "2e-1" is Euler's number doubled, less one.
    if exponent and ("." in digits or not re.fullmatch(r"[-+].", exponent.group(1))):
      self.at = exponent.end()
      return ("num", Fraction(digits.rstrip(".")) * Fraction(10) ** int(exponent.group(1)))
    if self.text.startswith("_", self.at):
      return self.based(digits)
    value = Fraction(digits.rstrip("."))
    return self.mixed(value) if digits.isdigit() else ("num", value)

  def based(self, digits: str) -> Node:
    base = re.compile(r"_(?:\{([0-9]{1,2})\}|([0-9]))").match(self.text, self.at)
    if base is None or not digits.isdigit():
      self.fail("expected a base")
    self.at = base.end()
    return ("based", digits.lstrip("0") or "0", int(base.group(1) or base.group(2)))

  def mixed(self, whole: Fraction) -> Node:
    r"""An integer, or a mixed number: "7 3/4", "7\frac{3}{4}". An improper one is malformed."""
    plain = MIXED.match(self.text, self.at)
    latex = re.compile(
      r"\s*\\frac\s*(?:\{\s*([0-9]+)\s*\}|([0-9]))\s*(?:\{\s*([0-9]+)\s*\}|([0-9]))"
    )
    found = plain or latex.match(self.text, self.at)
    if found is None:
      return ("num", whole)
    top, bottom = (int(part) for part in found.groups() if part is not None)
    if not 0 < top < bottom:
      self.fail("an integer next to an improper fraction")
    self.at = found.end()
    return ("num", whole + Fraction(top, bottom))
