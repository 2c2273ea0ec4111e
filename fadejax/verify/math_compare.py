r"""Whether an answer is the gold: the acceptor's rules on parsed answers (docs/verifiers.md).

`same(gold, answer)` is the one place where the order of the two matters; everything below it
is symmetric unless it says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import TypeVar

from fadejax.verify import math_value
from fadejax.verify.math_scan import Node, walk

T = TypeVar("T")

FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!="}
# An interval: (lower end, is it in, upper end, is it in); an end of None is infinite.
Interval = tuple[Node | None, bool, Node | None, bool]


def same(gold: Node, answer: Node) -> bool:
  """Whether the answer says the same as the gold.

  Raises:
    math_value.TooLargeError: deciding it would take too long.
  """
  if gold == answer:
    return True
  gold, answer = _bare(gold), _bare(answer)
  gold, answer = _expanded(gold), _expanded(answer)
  if gold[0] == "unit" or answer[0] == "unit":
    return _same_measure(gold, answer)
  if gold[0] == "pct" or answer[0] == "pct":
    return _same_percent(gold, answer)
  if gold[0] == "rel" or answer[0] == "rel" or _is_range(gold) or _is_range(answer):
    return _same_relation_or_range(gold, answer)
  if gold[0] in ("list", "set") and answer[0] in ("list", "set"):
    return _matching(_distinct(_items(gold)), _distinct(_items(answer)), same)
  if gold[0] != answer[0] and {gold[0], answer[0]} & STRUCTURES:
    return False
  if gold[0] in ("tuple", "colon", "matrix", "minus"):
    return _same_parts(gold, answer)
  if gold[0] in ("based", "text", "reals", "set", "list", "union"):
    return gold == answer
  if _infinite(gold) or _infinite(answer):
    return _infinite(gold) == _infinite(answer)
  return math_value.equal(gold, answer)


STRUCTURES = frozenset(
  {"list", "set", "tuple", "colon", "matrix", "minus", "based", "text", "reals", "union"}
)


def _bare(node: Node) -> Node:
  """Without `x \\in` before a set: the set is the answer. `x = ...` stays, see `_assigned`."""
  if node[0] == "rel" and node[2] == ("in",) and node[1][0][0] == "sym":
    return node[1][1]
  return node


def _expanded(node: Node) -> Node:
  """A formula with plus-or-minus as the list of its two values."""
  if node[0] in STRUCTURES or node[0] == "rel":
    return node
  if not any(part[0] == "pm" for part in walk(node)):
    return node

  def pick(part: Node, upper: bool) -> Node:
    if not isinstance(part, tuple):
      return part
    if part and part[0] == "pm":
      inner = pick(part[2], upper)
      return inner if (part[1] > 0) == upper else ("neg", inner)
    return tuple(pick(child, upper) for child in part)

  return ("list", (pick(node, True), pick(node, False)), False)


def _items(node: Node) -> list[Node]:
  """Of a list or set, with the items of plus-or-minus spread out."""
  spread: list[Node] = []
  for item in node[1]:
    item = _expanded(item)
    spread.extend(item[1] if item[0] == "list" else [item])
  return spread


def _distinct(items: Sequence[Node]) -> list[Node]:
  found: list[Node] = []
  for item in items:
    if not any(same(other, item) for other in found):
      found.append(item)
  return found


def _matching(left: list[T], right: list[T], agree: Callable[[T, T], bool]) -> bool:
  """Whether the items pair off in some order."""
  if len(left) != len(right):
    return False
  rest = list(right)
  for item in left:
    index = next((i for i, other in enumerate(rest) if agree(item, other)), None)
    if index is None:
      return False
    del rest[index]
  return True


def _same_parts(gold: Node, answer: Node) -> bool:
  """Tuples, ratios, matrices, set differences: same shape, same parts in order."""
  if len(gold) != len(answer) or gold[0] != answer[0]:
    return False
  for left, right in zip(gold[1:], answer[1:], strict=True):
    if isinstance(left, str):
      if left != right:
        return False
    elif left and isinstance(left[0], str):
      if not same(left, right):
        return False
    elif not _same_rows(left, right):
      return False
  return True


def _same_rows(left: tuple[Node, ...], right: tuple[Node, ...]) -> bool:
  if len(left) != len(right):
    return False
  for one, other in zip(left, right, strict=True):
    nested = bool(one) and isinstance(one[0], tuple)
    if not (_same_rows(one, other) if nested else same(one, other)):
      return False
  return True


def _same_measure(gold: Node, answer: Node) -> bool:
  """A unit that only one side has is dropped; two different units are never equal."""
  units = [node[2] for node in (gold, answer) if node[0] == "unit"]
  if len(set(units)) > 1:
    return False
  return same(*(node[1] if node[0] == "unit" else node for node in (gold, answer)))


def _same_percent(gold: Node, answer: Node) -> bool:
  """30% is 0.3; and the bare 30, since a question that asks for a percentage implies the sign."""
  if gold[0] == answer[0]:
    return same(gold[1], answer[1])
  percent, other = (gold, answer) if gold[0] == "pct" else (answer, gold)
  if other[0] in STRUCTURES or other[0] in ("rel", "unit"):
    return other[0] == "rel" and _same_relation_or_range(gold, answer)
  return math_value.equal(percent, other) or math_value.equal(percent[1], other)


# Relations and the sets of reals that they describe.


def _assigned(node: Node) -> Node | None:
  """The value of `x = 4 + 7 = 11` or `f(x) = 2x`: the last part, when the parts agree.

  None when it is no assignment, or when two constant parts of it differ.
  """
  if node[0] != "rel" or set(node[2]) != {"="}:
    return None
  parts = node[1]
  constant = not math_value.symbols(parts[0]) and parts[0][0] != "text"
  if not (_is_name(parts[0]) or constant):
    return None
  values = parts if constant else parts[1:]
  for left, right in pairwise(values):
    if not math_value.symbols(left, right) and not same(left, right):
      return None
  return values[-1]


def _is_name(node: Node) -> bool:
  """A symbol, or one applied to symbols: x, AB, f(x)."""
  if node[0] == "sym":
    return True
  if node[0] == "tuple":
    return all(_is_name(item) for item in node[3])
  return node[0] == "mul" and all(_is_name(part) for part in node[1:])


def _is_range(node: Node) -> bool:
  """Whether the node can only be a set of reals."""
  return node[0] in ("union", "reals")


def _same_relation_or_range(gold: Node, answer: Node) -> bool:
  left, right = _intervals(gold), _intervals(answer)
  if left is not None and right is not None:
    return _matching(left, right, _same_interval)
  if gold[0] == "rel" and answer[0] == "rel":
    return _same_relation(gold, answer)
  if gold[0] != "rel" and answer[0] != "rel":
    return gold == answer
  if gold[0] == "rel":
    value = _assigned(gold)
    return value is not None and same(value, answer)
  value = _assigned(answer)
  return value is not None and same(gold, value)


def _same_interval(left: Interval, right: Interval) -> bool:
  for i in (0, 2):
    one, other = left[i], right[i]
    if left[i + 1] != right[i + 1] or (one is None) != (other is None):
      return False
    if one is not None and other is not None and not same(one, other):  # type: ignore[arg-type]
      return False
  return True


def _infinite(node: Node) -> int:
  """1 or -1 for plus or minus infinity, else 0."""
  if node == ("const", "inf"):
    return 1
  return -_infinite(node[1]) if node[0] == "neg" else 0


def _intervals(node: Node) -> list[Interval] | None:
  """The set of reals that an interval, an inequality in one symbol or a union describes."""
  node = _bare(node)
  if node[0] == "reals":
    return [(None, False, None, False)]
  if node[0] == "union":
    left, right = _intervals(node[1]), _intervals(node[2])
    return None if left is None or right is None else left + right
  if node[0] == "list" and not node[2]:  # "x < 1 or x > 2"; joined by "and" it is no union
    parts = [_intervals(item) for item in node[1] if item[0] in ("rel", "tuple")]
    if len(parts) != len(node[1]) or any(part is None for part in parts):
      return None
    return [interval for part in parts if part is not None for interval in part]
  if node[0] == "tuple" and len(node[3]) == 2:
    low, high = node[3]
    return [_ends(low, node[1] == "[", high, node[2] == "]")]
  if node[0] == "rel":
    return _inequality(node[1], node[2])
  return None


def _ends(low: Node, low_in: bool, high: Node, high_in: bool) -> Interval:
  """An interval; an end at infinity is never in it."""
  lower = None if _infinite(low) < 0 else low
  upper = None if _infinite(high) > 0 else high
  return (lower, low_in and lower is not None, upper, high_in and upper is not None)


def _inequality(operands: tuple[Node, ...], operators: tuple[str, ...]) -> list[Interval] | None:
  """a < x <= b, x < a, a < x and their mirror images, for a symbol x and constant ends."""
  if not set(operators) <= {"<", "<=", ">", ">="}:
    return None
  if operators[0] in (">", ">="):
    operands, operators = operands[::-1], tuple(FLIPPED[sign] for sign in operators[::-1])
  if not set(operators) <= {"<", "<="}:
    return None
  if len(operands) == 2:
    left, right = operands
    closed = operators[0] == "<="
    if left[0] == "sym" and not math_value.symbols(right):
      return [(None, False, right, closed)]
    if right[0] == "sym" and not math_value.symbols(left):
      return [(left, closed, None, False)]
    return None
  if len(operands) != 3 or operands[1][0] != "sym" or math_value.symbols(operands[0], operands[2]):
    return None
  return [_ends(operands[0], operators[0] == "<=", operands[2], operators[1] == "<=")]


def _same_relation(gold: Node, answer: Node) -> bool:
  """Equations and inequalities of two sides: one difference is a multiple of the other.

  The factor must be the same at every point, and positive where the direction counts. A
  relation whose sides agree everywhere says nothing and equals none.
  """
  if len(gold[1]) > 2 or len(answer[1]) > 2:
    last = [_assigned(node) for node in (gold, answer)]
    if None in last or gold[1][0] != answer[1][0]:
      return False
    return same(last[0], last[1])  # type: ignore[arg-type]
  if any(node[0] in STRUCTURES for node in (*gold[1], *answer[1])):
    same_left = gold[2] == answer[2] and gold[1][0] == answer[1][0]
    return same_left and same(gold[1][1], answer[1][1])
  if gold[2][0] not in FLIPPED or answer[2][0] not in FLIPPED:
    return gold[2] == answer[2] and _same_rows(gold[1], answer[1])
  f, g = (("add", node[1][0], ("neg", node[1][1])) for node in (gold, answer))
  return _proportional(f, g, gold[2][0], answer[2][0])


def _proportional(f: Node, g: Node, gold_sign: str, answer_sign: str) -> bool:
  names = math_value.symbols(f, g)
  if math_value.symbols(f) != math_value.symbols(g) or not names:
    return False
  zero: Node = ("num", Fraction(0))
  if math_value.equal(f, zero) or math_value.equal(g, zero):
    return False
  for point in math_value.points(names, repr((f, g))):
    at: list[Node] = [math_value.substitute(node, point) for node in (f, g)]
    if math_value.equal_at(at[1], zero, {}, complex_ok=False) is not False:
      continue  # zero or undefined here
    ratio: Node = ("mul", at[0], ("inv", at[1]))
    positive = math_value.is_positive(ratio)
    if positive is None or math_value.equal_at(ratio, zero, {}, complex_ok=False) is not False:
      continue
    if gold_sign != (answer_sign if positive else FLIPPED[answer_sign]):
      return False
    return math_value.equal(f, ("mul", ratio, g))
  return False
