"""Settings of the whole suite, all made before jax is imported, and inherited by subprocesses."""

from __future__ import annotations

import hashlib
import os
import platform
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

DEVICES = "--xla_force_host_platform_device_count=8"
# Small programs that run once: compiling them well takes longer than running them.
# A busy machine may starve one of eight devices of its two cores; by default XLA aborts after 40 s.
PATIENT = "--xla_cpu_collective_call_terminate_timeout_seconds=600"
FAST = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"

# The same examples every time; no deadline, since a first call compiles.
settings.register_profile(
  "fadejax", derandomize=True, deadline=None, database=None, max_examples=50
)
settings.load_profile("fadejax")


def _cpu() -> str:
  """Names the processor: XLA's programs for one may crash on another."""
  info = Path("/proc/cpuinfo")
  text = info.read_text() if info.exists() else platform.processor()
  features = [line for line in text.splitlines() if line.startswith(("flags", "Features"))][:1]
  return hashlib.sha256("".join(features or [text]).encode()).hexdigest()[:8]


def pytest_configure(config: pytest.Config) -> None:
  """Eight CPU devices, ranks that never promote, no network, no cache of the user's."""
  scratch = tempfile.TemporaryDirectory(prefix="fadejax-tests-")
  config.add_cleanup(scratch.cleanup)
  home = Path(scratch.name)
  # Compiled programs are kept between runs of the suite: the end-to-end tests start many processes.
  cache = getattr(config, "cache", None)
  kept = Path(cache.mkdir(f"compiled-{_cpu()}")) if cache is not None else home / "compiled"
  flags = os.environ.get("XLA_FLAGS", "")
  os.environ.update(
    HOME=str(home),
    XDG_CACHE_HOME=str(home / "cache"),
    XDG_CONFIG_HOME=str(home / "config"),
    MPLCONFIGDIR=str(kept / "matplotlib"),
    JAX_PLATFORMS=os.environ.get("JAX_PLATFORMS", "cpu"),
    JAX_NUMPY_RANK_PROMOTION="raise",
    JAX_COMPILATION_CACHE_DIR=str(kept / "xla"),
    XLA_FLAGS=flags
    if "host_platform_device_count" in flags
    else f"{flags} {FAST} {PATIENT} {DEVICES}".strip(),
    HF_HUB_OFFLINE="1",
    WANDB_MODE="offline",
    WANDB_SILENT="true",
    TERM="dumb",
  )
