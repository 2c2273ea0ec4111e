"""Plain data as JSON, and back: all that crosses between candidate, judge and host.

None, bool, int, float, str, bytes, list, tuple, dict, set and frozenset, range, and iterators that
are read out. Subclasses cross as their base, so what arrives has no methods of the sender's. Used
on both sides of the wall; imports nothing of fadejax.
"""

from __future__ import annotations

import json
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing is slow to import, and this starts for every program
  from typing import Any

HEADER = struct.Struct(">I")
DEPTH = 200  # of nesting
SIZE = 1_000_000  # values in one message
READ_OUT = 10_000  # values of an iterator


class NotPlain(TypeError):
  """A value that may not cross."""


def encode(value: Any, depth: int = 0, count: list[int] | None = None) -> Any:
  """A value as what JSON can hold.

  Raises:
    NotPlain: another type, nested too deeply, or too many values.
  """
  count = [0] if count is None else count
  count[0] += 1
  if depth > DEPTH or count[0] > SIZE:
    raise NotPlain("nested too deeply or too large")

  def inner(x: Any) -> Any:
    return encode(x, depth + 1, count)

  if value is None or value is True or value is False:
    return value
  if isinstance(value, str):
    return str.__str__(value)
  if isinstance(value, int):
    value = int.__index__(value)
    return value if -(2**53) < value < 2**53 else {"i": hex(value)}
  if isinstance(value, float):
    return {"f": float.hex(value)}
  if isinstance(value, (bytes, bytearray)):
    return {"b": bytes(value).hex()}
  if isinstance(value, list):
    return [inner(x) for x in list.__iter__(value)]
  if isinstance(value, tuple):
    return {"t": [inner(x) for x in tuple.__iter__(value)]}
  if isinstance(value, dict):
    return {"d": [[inner(k), inner(v)] for k, v in dict.items(value)]}
  if isinstance(value, set):
    return {"s": [inner(x) for x in set.__iter__(value)]}
  if isinstance(value, frozenset):
    return {"z": [inner(x) for x in frozenset.__iter__(value)]}
  if isinstance(value, range):
    return {"r": [inner(value.start), inner(value.stop), inner(value.step)]}
  if isinstance(value, (type({}.keys()), type({}.values()), type({}.items()))):
    return list(map(inner, value))
  if hasattr(type(value), "__next__"):
    read = []
    for item in value:
      read.append(inner(item))
      if len(read) == READ_OUT:
        break
    return {"n": read}
  raise NotPlain(f"a value of type {type(value).__name__} cannot leave the program")


def decode(value: Any, depth: int = 0) -> Any:
  """The inverse; what it makes is exactly of the builtin types.

  Raises:
    ValueError: not what `encode` makes.
  """
  if depth > DEPTH:
    raise ValueError("nested too deeply")

  def inner(x: Any) -> Any:
    return decode(x, depth + 1)

  if value is None or isinstance(value, (bool, int, str)):
    return value
  if isinstance(value, list):
    return [inner(x) for x in value]
  if not isinstance(value, dict) or len(value) != 1:
    raise ValueError(f"not plain data: {value!r:.80}")
  ((kind, inside),) = value.items()
  try:
    return DECODERS[kind](inside, inner)
  except (KeyError, TypeError, AttributeError) as error:
    raise ValueError(f"not plain data: {value!r:.80}") from error


DECODERS = {
  "i": lambda x, inner: int(x, 16),
  "f": lambda x, inner: float.fromhex(x),
  "b": lambda x, inner: bytes.fromhex(x),
  "t": lambda x, inner: tuple(map(inner, x)),
  "d": lambda x, inner: {inner(k): inner(v) for k, v in x},
  "s": lambda x, inner: set(map(inner, x)),
  "z": lambda x, inner: frozenset(map(inner, x)),
  "r": lambda x, inner: range(*map(inner, x)),
  "n": lambda x, inner: iter([inner(v) for v in x]),
}


def write(stream: Any, message: Any) -> None:
  """Sends one message (what JSON can hold): its length, then its bytes."""
  body = json.dumps(message).encode()
  stream.write(HEADER.pack(len(body)) + body)
  stream.flush()


def read(stream: Any) -> Any:
  """The next message, None at the end."""
  header = stream.read(HEADER.size)
  if len(header) < HEADER.size:
    return None
  (size,) = HEADER.unpack(header)
  body = stream.read(size)
  return json.loads(body) if len(body) == size else None


if hasattr(sys, "set_int_max_str_digits"):
  sys.set_int_max_str_digits(0)
