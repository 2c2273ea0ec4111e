"""A JAX profiler trace over some steps of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax

_TRACING: list[int] = []  # the step that the profiler started at; JAX has one a process


@contextlib.contextmanager
def traced(profile: tuple[int, int] | None, step: int, where: Path) -> Iterator[None]:
  """Traces the steps of `profile`, both included, as far as this run has them."""
  tracing = profile is not None and profile[0] <= step <= profile[1]
  if tracing and not _TRACING:
    jax.profiler.start_trace(str(where))
    _TRACING.append(step)
  yield
  if tracing and profile is not None and step == profile[1]:
    stop(where)


def stop(where: Path) -> None:
  """Ends a trace where one is going on, and says where it is."""
  if _TRACING:
    jax.profiler.stop_trace()
    print(f"profile from step {_TRACING.pop()}: {where}", flush=True)
