"""Values of parsed formulas: exact fractions where they go, high precision where they do not.

Equality is never a matter of a fixed number of digits. Rational values are compared as
fractions. For the others a first pass measures how many decades the parts of both formulas
span; the second works with more than twice that many digits, so that a term like 10^-1000
next to a square root still shows. Formulas with symbols are compared at random rational and
whole points. What would be too large to work out raises TooLargeError.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import mpmath

from fadejax.verify.math_scan import Node, walk

Number = Any  # Fraction, mpf or mpc

BIT_LIMIT = 400_000  # of a numerator or denominator
DIGIT_LIMIT = 12_000  # working precision
DEGREE_LIMIT = 100_000  # of exponents, in bits of the result
FACTORIAL_LIMIT = 10_000
POINTS = 10  # per kind of point
ENOUGH = 5  # points where both formulas have a real value
DECADES_PER_BIT = math.log10(2)


class TooLargeError(ArithmeticError):
  """Working this out would take too long or too much memory."""


class UndefinedError(ArithmeticError):
  """There is no (finite) value: a division by zero, an infinity, or not a number at all."""


class Evaluator:
  """One evaluation of formulas at one point.

  Attributes:
    point: the value of each symbol.
    span: decades covered by the parts so far; grows with every inexact step.
  """

  def __init__(self, point: dict[str, Fraction], context: Any):
    self.point, self.mp, self.span = point, context, 0.0

  def value(self, node: Node) -> Number:
    """Of a node without relations, lists or sets.

    Raises:
      TooLargeError, UndefinedError
    """
    kind = node[0]
    if kind == "num":
      return node[1]
    if kind == "sym":
      return self.point[node[1]]
    if kind == "const":
      return self.constant(node[1])
    if kind == "add":
      return self.add([self.value(part) for part in node[1:]])
    if kind == "mul":
      return self.multiply([self.value(part) for part in node[1:]])
    if kind == "neg":
      return -self.value(node[1])
    if kind == "inv":
      return self.invert(self.value(node[1]))
    if kind == "pow":
      return self.power(self.value(node[1]), self.value(node[2]))
    if kind == "fact":
      return self.factorial(self.value(node[1]))
    if kind == "pct":
      return self.multiply([self.value(node[1]), Fraction(1, 100)])
    if kind == "unit" and node[2] == "degree":
      return self.value(node[1])
    if kind == "func":
      return self.function(node)
    raise UndefinedError(f"a {kind} has no value")

  def real(self, value: Number) -> Number:
    """A fraction as a float of the working precision."""
    if not isinstance(value, Fraction):
      return value
    bits = value.numerator.bit_length() + value.denominator.bit_length()
    self.span += bits * DECADES_PER_BIT
    return self.mp.mpf(value.numerator) / value.denominator

  def measured(self, value: Number) -> Number:
    """Notes the size of an inexact result."""
    magnitude = self.mp.mag(value)
    if isinstance(magnitude, int):
      self.span += abs(magnitude) * DECADES_PER_BIT
    elif value != 0:
      raise UndefinedError("not finite")
    return value

  def constant(self, name: str) -> Number:
    if name == "inf":
      raise UndefinedError("infinity")
    return {"pi": +self.mp.pi, "e": +self.mp.e, "i": self.mp.mpc(0, 1)}[name]

  def add(self, parts: list[Number]) -> Number:
    if all(isinstance(part, Fraction) for part in parts):
      return checked(sum(parts, Fraction(0)))
    return self.mp.fsum(self.real(part) for part in parts)

  def multiply(self, parts: list[Number]) -> Number:
    exact, rest = Fraction(1), []
    for part in parts:
      if isinstance(part, Fraction):
        exact = checked(exact * part)
      else:
        rest.append(part)
    return exact if not rest else self.mp.fprod([self.real(exact), *rest])

  def invert(self, value: Number) -> Number:
    if value == 0 or (not isinstance(value, Fraction) and self.negligible(value)):
      raise UndefinedError("division by zero")
    return 1 / value

  def negligible(self, value: Number) -> bool:
    """Zero up to rounding: no part is as small as the working precision allows."""
    return bool(self.mp.mag(value) < -self.mp.prec * 0.8)

  def power(self, base: Number, exponent: Number) -> Number:
    if isinstance(base, Fraction) and isinstance(exponent, Fraction):
      found = rational_power(base, exponent)
      if found is not None:
        return found
    if base == 0:
      raise UndefinedError("a power of zero")
    base, exponent = self.real(base), self.real(exponent)
    size = self.mp.mag(exponent)
    if isinstance(size, int) and size > 40:
      raise TooLargeError("exponent")
    if abs(exponent) * (abs(self.mp.log(abs(base))) + 4) > DEGREE_LIMIT:
      raise TooLargeError("power")
    return self.measured(self.mp.power(base, exponent))

  def factorial(self, value: Number) -> Number:
    if not isinstance(value, Fraction) or value.denominator != 1 or value < 0:
      raise UndefinedError("factorial")
    if value > FACTORIAL_LIMIT:
      raise TooLargeError("factorial")
    return Fraction(math.factorial(int(value)))

  def function(self, node: Node) -> Number:
    name = node[1]
    if name in ("sin", "cos", "tan", "cot", "sec", "csc") and node[2][0] == "unit":
      turned = self.mp.pi / 180 * self.real(self.value(node[2]))
      return self.transcendental(name, turned)
    arguments = [self.value(part) for part in node[2:]]
    first = arguments[0]
    if name == "binom":
      return binomial(*arguments)
    if name in ("floor", "ceil", "abs") and isinstance(first, Fraction):
      exact: Any = {"floor": math.floor, "ceil": math.ceil, "abs": abs}[name]
      return Fraction(exact(first))
    if name in ("ln", "log") and len(arguments) == 2:
      bottom = self.transcendental("ln", self.real(arguments[1]))
      return self.transcendental("ln", self.real(first)) * self.invert(bottom)
    if name == "sqrt":
      return self.power(first, Fraction(1, 2))
    return self.transcendental(name, self.real(first))

  def transcendental(self, name: str, x: Number) -> Number:
    mp = self.mp
    table = {
      "sin": mp.sin,
      "cos": mp.cos,
      "tan": mp.tan,
      "cot": mp.cot,
      "sec": mp.sec,
      "csc": mp.csc,
      "arcsin": mp.asin,
      "arccos": mp.acos,
      "arctan": mp.atan,
      "sinh": mp.sinh,
      "cosh": mp.cosh,
      "tanh": mp.tanh,
      "ln": mp.ln,
      "log": mp.ln,
      "exp": mp.exp,
      "abs": abs,
      "floor": mp.floor,
      "ceil": mp.ceil,
    }
    size = mp.mag(x)
    if isinstance(size, int) and size > 16:
      raise TooLargeError(f"the argument of {name}")
    if name in ("ln", "log") and (x == 0 or self.negligible(x)):
      raise UndefinedError("the logarithm of zero")
    try:
      result = table[name](x)
    except (ZeroDivisionError, ValueError, OverflowError) as error:
      raise UndefinedError(name) from error
    return self.measured(result) if name in ("exp", "sinh", "cosh") else result


def checked(value: Fraction) -> Fraction:
  """The value, if it is not too large to go on with."""
  if value.numerator.bit_length() > BIT_LIMIT or value.denominator.bit_length() > BIT_LIMIT:
    raise TooLargeError("a fraction of too many digits")
  return value


def rational_power(base: Fraction, exponent: Fraction) -> Fraction | None:
  """Exact where the result is rational and easy to see; None otherwise."""
  if exponent.denominator == 1:
    if base == 0 and exponent <= 0:
      raise UndefinedError("a power of zero")
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if base not in (0, 1, -1) and abs(exponent) * bits > BIT_LIMIT:
      raise TooLargeError("power")
    if base in (0, 1, -1):
      return base if base >= 0 or exponent % 2 else Fraction(1)
    return base ** int(exponent)
  if base == 0 and exponent > 0:
    return Fraction(0)
  if exponent.denominator == 2 and base > 0 and abs(exponent) < 1000:
    top, bottom = math.isqrt(base.numerator), math.isqrt(base.denominator)
    if top * top == base.numerator and bottom * bottom == base.denominator:
      return rational_power(Fraction(top, bottom), Fraction(exponent.numerator))
  return None


def binomial(n: Number, k: Number) -> Fraction:
  """n over k for whole numbers."""
  if not all(isinstance(x, Fraction) and x.denominator == 1 and x >= 0 for x in (n, k)):
    raise UndefinedError("binomial")
  if n > FACTORIAL_LIMIT:
    raise TooLargeError("binomial")
  return Fraction(math.comb(int(n), int(k)))


def symbols(*nodes: Node) -> list[str]:
  """Names of the symbols in the formulas, sorted."""
  return sorted({part[1] for node in nodes for part in walk(node) if part[0] == "sym"})


def points(names: list[str], seed: str) -> Iterator[dict[str, Fraction]]:
  """Where formulas with these symbols are compared: positive, any sign, whole numbers.

  Drawn from a generator seeded with the formulas: the same verdict every time.
  """
  if not names:
    yield {}
    return
  rng = random.Random(hashlib.sha256(seed.encode()).digest())
  for kind in range(3 * POINTS):
    drawn = {}
    for name in names:
      value = Fraction(rng.randint(1, 3000), rng.choice((1009, 1013, 1019)))
      if kind >= POINTS and rng.random() < 0.6:
        value = -value
      drawn[name] = Fraction(rng.randint(1, 40)) if kind >= 2 * POINTS else value
    yield drawn


def equal_at(
  a: Node, b: Node, point: dict[str, Fraction], *, complex_ok: bool, context: Any = None
) -> bool | None:
  """Whether two formulas agree at a point; None where one of them has no usable value.

  `context` is an mpmath context of the caller's own, whose precision this changes.
  """
  context = context or mpmath.mp.clone()  # never the global one: graders may run in threads
  digits = 40
  for _ in range(3):
    context.dps = digits
    evaluator = Evaluator(point, context)
    try:
      left, right = evaluator.value(a), evaluator.value(b)
    except UndefinedError:
      return None
    if isinstance(left, Fraction) and isinstance(right, Fraction):
      return left == right
    left, right = evaluator.real(left), evaluator.real(right)
    if not complex_ok and not (_is_real(left, context) and _is_real(right, context)):
      return None
    difference = abs(left - right)
    if difference > 1e-10 and evaluator.span < digits / 2:
      return False  # plainly apart: the errors are below 10^(span - digits)
    needed = 60 + int(2 * evaluator.span)
    if needed > DIGIT_LIMIT:
      raise TooLargeError("more digits needed than are worked with")
    if digits >= needed:
      return bool(difference <= context.mpf(10) ** (-45 - int(evaluator.span)))
    digits = needed + 20
  return None


def _is_real(value: Number, context: Any) -> bool:
  imaginary = context.im(value)
  return bool(imaginary == 0 or abs(imaginary) <= abs(value) * context.mpf(10) ** -30)


def equal(a: Node, b: Node) -> bool:
  """Whether two formulas have the same value wherever both have one.

  Raises:
    TooLargeError: deciding it would take too long.
  """
  names = symbols(a, b)
  complex_ok = any(part == ("const", "i") for part in (*walk(a), *walk(b))) or not names
  agreed, context = 0, mpmath.mp.clone()
  for point in points(names, repr((a, b))):
    same = equal_at(a, b, point, complex_ok=complex_ok, context=context)
    if same is False:
      return False
    agreed += bool(same)
  return agreed >= (ENOUGH if names else 1)


def substitute(node: Any, point: dict[str, Fraction]) -> Any:
  """The tree with numbers in place of its symbols."""
  if not isinstance(node, tuple):
    return node
  if len(node) == 2 and node[0] == "sym":
    return ("num", point[node[1]])
  return tuple(substitute(part, point) for part in node)


def is_positive(node: Node) -> bool | None:
  """The sign of a constant formula that is not zero; None when it is undefined or complex."""
  context = mpmath.mp.clone()
  context.dps = 40
  try:
    evaluator = Evaluator({}, context)
    value = evaluator.real(evaluator.value(node))
  except UndefinedError:
    return None
  return bool(context.re(value) > 0) if _is_real(value, context) else None
