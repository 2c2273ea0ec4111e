"""What a grader says about one completion, and the checks on what it says."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

STATUSES = ("ok", "no_answer", "timeout", "memory", "runtime_error", "grader_error")
DETAIL_LIMIT = 500


class ProblemError(ValueError):
  """A problem record that its grader cannot use; names the field and what to do.

  Such an item becomes a `grader_error` at once: a fresh worker would not help.
  """


@dataclasses.dataclass(frozen=True)
class Verdict:
  """One grading result.

  Attributes:
    reward: in [0, 1], unitless. None if and only if the status is `grader_error`; 0 for
      `no_answer`, `timeout`, `memory` and `runtime_error`.
    status: `ok` covers right and wrong answers; the rest say why nothing could be judged.
      `grader_error` is the grader's or the record's fault: never a wrong answer.
    detail: one line for people, at most `DETAIL_LIMIT` characters.

  Raises:
    ValueError: an unknown status, or a reward that does not go with the status.
  """

  reward: float | None
  status: str
  detail: str = ""

  def __post_init__(self) -> None:
    if self.status not in STATUSES:
      raise ValueError(f"verdict status {self.status!r}: expected one of {', '.join(STATUSES)}")
    if not isinstance(self.detail, str):
      raise ValueError(f"verdict detail must be text, got {type(self.detail).__name__}")
    if not self.detail.isprintable():  # a program's words may hold anything
      plain = "".join(c if c.isprintable() else " " for c in self.detail)
      object.__setattr__(self, "detail", plain)
    if len(self.detail) > DETAIL_LIMIT:
      object.__setattr__(self, "detail", self.detail[: DETAIL_LIMIT - 1] + "…")
    if self.status == "grader_error":
      if self.reward is not None:
        raise ValueError(f"a grader_error has no reward, got {self.reward!r}")
      return
    if isinstance(self.reward, bool) or not isinstance(self.reward, Real):
      raise ValueError(f"verdict reward must be a number, got {self.reward!r}")
    reward = float(self.reward)
    if not math.isfinite(reward) or not 0.0 <= reward <= 1.0:
      raise ValueError(f"verdict reward must lie in [0, 1], got {reward!r}")
    if self.status != "ok" and reward != 0.0:
      raise ValueError(f"a {self.status} verdict has reward 0, got {reward!r}")
    object.__setattr__(self, "reward", reward)


def right(detail: str = "") -> Verdict:
  """Full marks."""
  return Verdict(1.0, "ok", detail)


def wrong(detail: str = "") -> Verdict:
  """An answer was there and it is not right."""
  return Verdict(0.0, "ok", detail)


def no_answer(detail: str = "") -> Verdict:
  """Nothing in the completion can be read as an answer."""
  return Verdict(0.0, "no_answer", detail)


def to_verdict(value: Any, grader: str) -> Verdict:
  """What a grader returned (Verdict, bool or number in [0, 1]) as a Verdict.

  Anything else is the grader's fault: a `grader_error` whose detail names it.
  """
  if isinstance(value, Verdict):
    return value
  if isinstance(value, bool):
    value = float(value)
  if not isinstance(value, Real):
    detail = f"grader {grader} returned {type(value).__name__}, not a Verdict or a number"
    return Verdict(None, "grader_error", detail)
  reward = float(value)
  if not math.isfinite(reward) or not 0.0 <= reward <= 1.0:
    detail = f"grader {grader} returned {reward!r}; a reward is finite and lies in [0, 1]"
    return Verdict(None, "grader_error", detail)
  return Verdict(reward, "ok")


def check_count(grader: str, values: Sequence[Any], expected: int) -> None:
  """Refuses a batch of rewards of the wrong length, which would broadcast silently.

  Raises:
    ValueError: names the function and both counts.
  """
  if len(values) != expected:
    raise ValueError(f"{grader} returned {len(values)} reward(s) instead of {expected}")


def field(problem: dict[str, Any], name: str, verifier: str) -> Any:
  """A field that the verifier needs, or a ProblemError that names it."""
  if name not in problem or problem[name] is None:
    raise ProblemError(
      f"problem {problem.get('id', '?')!r}: verifier {verifier!r} needs the field {name!r}"
    )
  return problem[name]


def after_thinking(text: str) -> str | None:
  """The part of a completion that may be graded: what follows the last `</think>`.

  Returns:
    The text itself when it has no thinking part; None when a `<think>` was never closed.
  """
  head, closed, tail = text.rpartition("</think>")
  if "<think>" in tail:
    return None
  return tail if closed else head + tail
