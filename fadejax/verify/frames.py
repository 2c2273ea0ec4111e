"""The wire form between the pool and a worker: a 4-byte big-endian length, then JSON."""

from __future__ import annotations

import json
import struct
from typing import Any, BinaryIO

HEADER = struct.Struct(">I")


def read_frame(stream: BinaryIO) -> dict[str, Any] | None:
  """The next message, or None at the end of the stream."""
  header = stream.read(HEADER.size)
  if len(header) < HEADER.size:
    return None
  (size,) = HEADER.unpack(header)
  body = stream.read(size)
  return json.loads(body) if len(body) == size else None


def frame(message: dict[str, Any]) -> bytes:
  """A message as it goes over the pipe.

  Raises:
    TypeError: it holds something that JSON cannot.
  """
  body = json.dumps(message).encode()
  return HEADER.pack(len(body)) + body


def warm_key(name: str, problem: dict[str, Any]) -> str:
  """What a worker imports once for this item: a verifier, or one user function."""
  return f"{name}:{problem.get('function')}" if name == "python" else name
