"""Makes this folder importable, here and in the workers: they inherit the parent's path."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
