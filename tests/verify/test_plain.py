"""Plain data across the wall: what goes in comes out, and nothing else gets through."""

from __future__ import annotations

import collections
import enum
import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fadejax.verify.inside import plain

KEYS = st.one_of(
  st.none(), st.booleans(), st.integers(), st.text(max_size=4), st.binary(max_size=4)
)
VALUES = st.recursive(
  st.one_of(KEYS, st.floats(allow_nan=False), st.text(), st.integers(-(2**200), 2**200)),
  lambda inner: st.one_of(
    st.lists(inner, max_size=4),
    st.lists(inner, max_size=4).map(tuple),
    st.dictionaries(KEYS, inner, max_size=4),
    st.sets(KEYS, max_size=4),
    st.frozensets(KEYS, max_size=4),
  ),
  max_leaves=20,
)


def types_in(value):
  """The value's type and those of its parts."""
  if isinstance(value, dict):
    return [type(value), *(types_in(k) + types_in(v) for k, v in value.items())]
  if isinstance(value, list | tuple):
    return [type(value), *map(types_in, value)]
  return [type(value)]


@given(VALUES)
def test_what_goes_in_comes_out(value):
  back = plain.decode(plain.encode(value))
  assert back == value
  assert repr(types_in(back)) == repr(types_in(value))  # True stays True, 1 stays 1


@given(st.binary(max_size=60))
def test_any_bytes_are_a_value_or_a_value_error(data):
  try:
    plain.decode(data)
  except ValueError:
    return
  assert data[:1] in (bytes([tag]) for tag in b"NTFifsbltdSZnr")


def test_odd_floats_surrogates_ranges_and_iterators():
  assert math.isnan(plain.decode(plain.encode(math.nan)))
  assert plain.decode(plain.encode([math.inf, -0.0, "\ud800", range(5, 0, -2)])) == [
    math.inf, -0.0, "\ud800", range(5, 0, -2),
  ]  # fmt: skip
  read = plain.decode(plain.encode(x * x for x in range(4)))
  assert next(read) == 0 and list(read) == [1, 4, 9]
  endless = plain.decode(plain.encode(iter(int, 1)))
  assert sum(1 for _ in endless) == plain.READ_OUT
  assert plain.decode(plain.encode({1: 2}.items())) == [(1, 2)]


def test_subclasses_cross_as_their_base():
  class Yes(int):
    def __eq__(self, other):
      return True

    def __index__(self):
      return 99

    __hash__ = int.__hash__

  class Text(str):
    def encode(self, *_):
      return b"other"

  class Level(enum.IntEnum):
    LOW = 3

  back = plain.decode(plain.encode([Yes(7), Text("x"), Level.LOW, collections.Counter("aab")]))
  assert [type(x) for x in back] == [int, str, int, dict] and back == [7, "x", 3, {"a": 2, "b": 1}]


@pytest.mark.parametrize("value", [object(), lambda: 1, 1j, int, [{1: object()}]])
def test_other_values_may_not_cross(value):
  with pytest.raises(plain.NotPlain, match="cannot leave the program"):
    plain.encode(value)


def test_depth_and_size_are_bounded():
  deep: list = []
  for _ in range(300):
    deep = [deep]
  with pytest.raises(plain.NotPlain, match="nested too deeply"):
    plain.encode(deep)
  with pytest.raises(ValueError, match="nested too deeply"):
    plain.decode(b"l\x01\0\0\0" * 300 + b"N")
  with pytest.raises(ValueError, match="cut short"):
    plain.decode(b"l\xff\xff\xff\x7f")  # a count without its values
  with pytest.raises(ValueError, match="bytes left over"):
    plain.decode(b"NN")
  with pytest.raises(ValueError, match="not plain data"):
    plain.decode(plain.encode({1: 2}).replace(b"i\x01\0\0\0\x01", b"l\0\0\0\0", 1))  # a list as key


def test_what_is_slow_to_hold_or_print_is_refused_where_asked():
  with pytest.raises(ValueError, match="too many digits"):
    plain.decode(plain.encode(10**5000), digits=1000)
  same_hash = {k * (2**61 - 1): 0 for k in range(1, 3000)}
  assert len({hash(k) for k in same_hash}) == 1
  began = time.process_time()
  with pytest.raises(ValueError, match="too many entries"):
    plain.decode(plain.encode({1: [same_hash]}), keys=2000)
  assert time.process_time() - began < 2
