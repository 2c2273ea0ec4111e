"""Plain data as bytes, and back: all that crosses between candidate, judge and host.

None, bool, int, float, str, bytes, list, tuple, dict, set and frozenset, range, and iterators that
are read out. Subclasses cross as their base, so what arrives has no methods of the sender's. A
form of our own, since `import json` doubles the time that Python takes to start. Used on both
sides of the wall; imports nothing of fadejax.

A value is a tag and what follows: b"N", b"T", b"F"; b"f" 8 bytes; b"i", b"s" and b"b" length bytes;
b"l", b"t", b"S", b"Z" and b"n" count values; b"d" count keys and values; b"r" 3 values. Lengths and
counts are 4 bytes, little-endian.
"""

from __future__ import annotations

import struct

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing is slow to import, and this starts for every program
  from typing import Any

HEADER = struct.Struct("<I")
DOUBLE = struct.Struct("<d")
DEPTH = 200  # of nesting
SIZE = 1_000_000  # values in one message
READ_OUT = 1000  # values of an iterator
VIEWS: tuple = (type({}.keys()), type({}.values()), type({}.items()))


MAKE: dict = {b"l": list, b"t": tuple, b"n": iter, b"S": set, b"Z": frozenset}


class NotPlain(TypeError):
  """A value that may not cross."""


class TooLarge(NotPlain):
  """A value nested too deeply, or of too many parts."""


def encode(value: Any) -> bytes:
  """A value as bytes.

  Raises:
    NotPlain: another type, nested too deeply, or too many values.
  """
  parts: list[bytes] = []
  _encode(value, parts, 0)
  return b"".join(parts)


def _sized(tag: bytes, body: bytes, parts: list[bytes]) -> None:
  parts += (tag, HEADER.pack(len(body)), body)


def _items(tag: bytes, items: Any, parts: list[bytes], depth: int) -> None:
  items = list(items)
  parts += (tag, HEADER.pack(len(items)))
  for item in items:
    _encode(item, parts, depth + 1)


def _encode(value: Any, parts: list[bytes], depth: int) -> None:
  if depth > DEPTH or len(parts) > 3 * SIZE:
    raise TooLarge("nested too deeply or too large")
  if value is None or value is True or value is False:
    parts.append(b"N" if value is None else b"T" if value else b"F")
  elif isinstance(value, str):
    _sized(b"s", str.encode(value, "utf-8", "surrogatepass"), parts)
  elif isinstance(value, int):
    value = int.__index__(value)
    _sized(b"i", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True), parts)
  elif isinstance(value, float):
    parts += (b"f", DOUBLE.pack(float.__float__(value)))
  elif isinstance(value, (bytes, bytearray)):
    _sized(b"b", bytes(memoryview(value)), parts)
  elif isinstance(value, list):
    _items(b"l", list.__iter__(value), parts, depth)
  elif isinstance(value, tuple):
    _items(b"t", tuple.__iter__(value), parts, depth)
  elif isinstance(value, dict):
    pairs = list(dict.items(value))
    parts += (b"d", HEADER.pack(len(pairs)))
    for key, item in pairs:
      _encode(key, parts, depth + 1)
      _encode(item, parts, depth + 1)
  elif isinstance(value, set):
    _items(b"S", set.__iter__(value), parts, depth)
  elif isinstance(value, frozenset):
    _items(b"Z", frozenset.__iter__(value), parts, depth)
  elif isinstance(value, range):
    parts.append(b"r")
    for number in (value.start, value.stop, value.step):
      _encode(number, parts, depth + 1)
  elif isinstance(value, VIEWS):
    _items(b"l", value, parts, depth)
  elif hasattr(type(value), "__next__"):
    read = []
    for item in value:
      read.append(item)
      if len(read) == READ_OUT:
        break
    _items(b"n", read, parts, depth)
  else:
    raise NotPlain(f"a value of type {type(value).__name__} cannot leave the program")


class Reader:
  """Decodes one message.

  Args:
    data: what `encode` made, or anything else.
    digits: bytes that an int may have; longer ones are slow to print.
    keys: entries of dicts and sets in all; many could be chosen to collide.
  """

  def __init__(self, data: bytes, digits: int = 1 << 30, keys: int = 1 << 30):
    self.data, self.at, self.digits, self.keys = data, 0, digits, keys

  def value(self) -> Any:
    """The message's value; its parts are exactly of the builtin types.

    Raises:
      ValueError: not what `encode` makes, or over a limit.
    """
    try:
      value = self._value(0)
    except (TypeError, OverflowError, struct.error) as error:  # an unhashable key, a range of text
      raise ValueError(f"not plain data: {error}") from error
    if self.at != len(self.data):
      raise ValueError("not plain data: bytes left over")
    return value

  def _take(self, count: int) -> bytes:
    end = self.at + count
    if end > len(self.data):
      raise ValueError("not plain data: cut short")
    part = self.data[self.at : end]
    self.at = end
    return part

  def _count(self) -> int:
    (count,) = HEADER.unpack(self._take(4))
    if count > len(self.data) - self.at:  # every value takes a byte
      raise ValueError("not plain data: cut short")
    return count

  def _many(self, depth: int) -> list[Any]:
    return [self._value(depth + 1) for _ in range(self._count())]

  def _keyed(self, count: int) -> None:
    self.keys -= count
    if self.keys < 0:
      raise ValueError("too many entries in dicts and sets")

  def _value(self, depth: int) -> Any:
    if depth > DEPTH:
      raise ValueError("nested too deeply")
    tag = self._take(1)
    if tag in b"NTF":
      return None if tag == b"N" else tag == b"T"
    if tag == b"i":
      body = self._take(self._count())
      if len(body) > self.digits:
        raise ValueError("an integer of too many digits")
      return int.from_bytes(body, "little", signed=True)
    if tag == b"f":
      return DOUBLE.unpack(self._take(8))[0]
    if tag == b"s":
      return self._take(self._count()).decode("utf-8", "surrogatepass")
    if tag == b"b":
      return self._take(self._count())
    if tag in b"ltnSZ":
      items = self._many(depth)
      if tag in b"SZ":
        self._keyed(len(items))
      return MAKE[tag](items)
    if tag == b"d":
      count = self._count()
      self._keyed(count)
      pairs = []
      for _ in range(count):
        key = self._value(depth + 1)
        pairs.append((key, self._value(depth + 1)))
      return dict(pairs)
    if tag == b"r":
      return range(*[self._value(depth + 1) for _ in range(3)])
    raise ValueError(f"not plain data: tag {tag!r}")


def decode(data: bytes, digits: int = 1 << 30, keys: int = 1 << 30) -> Any:
  """The inverse of `encode`; see `Reader`."""
  return Reader(data, digits, keys).value()


def write(stream: Any, message: Any) -> None:
  """Sends one message (plain data): its length, then its bytes."""
  body = encode(message)
  stream.write(HEADER.pack(len(body)) + body)
  stream.flush()


def read(stream: Any) -> Any:
  """The next message, None at the end."""
  header = stream.read(HEADER.size)
  if len(header) < HEADER.size:
    return None
  (size,) = HEADER.unpack(header)
  body = stream.read(size)
  return decode(body) if len(body) == size else None
