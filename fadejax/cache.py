"""Where downloads, converted models and compiled programs are kept between runs."""

from __future__ import annotations

import os
from pathlib import Path

# The directory, in the cache, that `python -m fadejax.convert` makes when it is given no other.
SMOLLM2 = "SmolLM2-135M-Instruct"


def cache_dir() -> Path:
  """$FADEJAX_CACHE, else ~/.cache/fadejax; it may not exist yet."""
  return Path(os.environ.get("FADEJAX_CACHE") or "~/.cache/fadejax").expanduser()
