"""The order in which training draws problems: a pure function of (seed, draw index).

Draw d is the d-th prompt of the run, over all hosts. The number of prompts drawn so far is
all that a checkpoint holds of this: `Pipeline.batch(drawn)` is the next batch, in this
process or another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from fadejax.data.records import Record, Source, Task, stable_hash

Encode = Callable[[Record], list[int]]


class HostBatch(NamedTuple):
  """Prompts of one batch that this host reads, NumPy arrays; P here is the host's share.

  Attributes:
    tokens: i32[P, S], right-padded with 0; masks come from `lengths`.
    lengths: i32[P], tokens of each prompt, at least 1.
    draw: i32[P], global draw index of each prompt.
    problems: P records.
  """

  tokens: np.ndarray
  lengths: np.ndarray
  draw: np.ndarray
  problems: tuple[Record, ...]


@dataclasses.dataclass(frozen=True)
class _Named:
  """A source whose records name their task."""

  source: Source
  name: str

  def __len__(self) -> int:
    return len(self.source)

  def __getitem__(self, index: int, /) -> Record:
    return {**self.source[index], "task": self.name}


TRIED = 64  # generated prompts that are encoded at the start
REDRAWS = 32  # other problems tried in place of one that is too long
_STRIDE = 104_729  # a prime: from a problem to the one tried in its place


@dataclasses.dataclass
class _Redrawing:
  """A generated source whose prompts fit: one that is too long gives way to another.

  Which one is a function of the index, so that order and resume stay as they are.

  Attributes:
    redrawn: problems passed over so far.
  """

  source: Source
  fits: Callable[[Record], bool]
  redrawn: int = 0

  def __len__(self) -> int:
    return len(self.source)

  def __getitem__(self, index: int, /) -> Record:
    for attempt in range(REDRAWS + 1):
      record = self.source[(index + attempt * _STRIDE) % len(self.source)]
      if self.fits(record):
        return record
      self.redrawn += 1
    raise ValueError(
      f"{_named(record)}: its prompt and those of {REDRAWS} problems tried in its place are over "
      "rollout.max_prompt_length; raise it"
    )


class Pipeline:
  """Batches of training prompts, by random access.

  Each task is shuffled and repeated for ever, every pass in another order, and the tasks are
  interleaved by weight: after n draws, task i has given n · weight_i / Σ weights of them, give
  or take a few.

  Attributes:
    counts: what was left out at the start: reason -> number of problems.
  """

  def __init__(
    self,
    tasks: Sequence[Task],
    weights: Sequence[float],
    encode: Encode,
    *,
    prompts_per_batch: int,
    max_prompt_length: int,
    seed: int,
    process_index: int = 0,
    process_count: int = 1,
  ):
    """Encodes every problem of a file once, and drops those over the limit.

    Of a generated task, which is too long to try, a problem that does not fit is drawn again.

    Args:
      tasks: with different names.
      weights: one a task, above 0; only their ratios matter.
      encode: record (with `task`) -> prompt ids.
      prompts_per_batch: P of the global batch; a multiple of `process_count`.
      max_prompt_length: S, in tokens.
      seed: of the order.
      process_index: which slice of the global batch is this host's.
      process_count: hosts.

    Raises:
      ValueError: an argument out of its range, or a task without a prompt that fits.
    """
    # grain imports jax, which the host side must not do on import.
    import grain

    names = [task.name for task in tasks]
    twice = sorted({name for name in names if names.count(name) > 1})
    if not tasks or twice:
      raise ValueError(f"task names {names}: at least one, all different (task.options.label)")
    if len(weights) != len(tasks) or min(weights) <= 0:
      raise ValueError(f"weights {list(weights)} of the tasks {names}: one each, above 0")
    if prompts_per_batch < 1 or prompts_per_batch % process_count:
      raise ValueError(
        f"rollout.prompts = {prompts_per_batch} must be a multiple of the {process_count} host(s)"
      )
    self._encode, self._size = encode, max_prompt_length
    self._prompts, self._share = prompts_per_batch, prompts_per_batch // process_count
    self._offset = process_index * self._share
    self.counts: dict[str, int] = {}
    self._redrawings: list[_Redrawing] = []
    parts = []
    for place, task in enumerate(tasks):
      # grain reseeds by adding the pass number: seeds must be far apart, or one run's second
      # pass would be its neighbour's first.
      order = stable_hash(f"order {seed} {place}") % 2**32
      source: Any = self._fitting(task)
      parts.append(grain.MapDataset.source(source).shuffle(order).repeat())
    self._draws = grain.MapDataset.mix(parts, list(weights)) if len(parts) > 1 else parts[0]

  def _fitting(self, task: Task) -> Source:
    """The task's training problems that are within the limit."""
    named = _Named(task.train, task.name)
    if task.generated:
      return self._redrawing(named)
    records = [named[i] for i in range(len(named))]
    if not records:
      raise ValueError(f"task {task.name!r} is for evaluation only: it has no training problems")
    kept = [record for record in records if len(_ids(self._encode, record)) <= self._size]
    if not kept:
      raise ValueError(
        f"task {task.name!r}: none of its {len(records)} training prompts fits in "
        f"rollout.max_prompt_length = {self._size} tokens"
      )
    if len(kept) < len(records):
      reason = f"training prompts of {task.name} over rollout.max_prompt_length = {self._size}"
      self.counts[reason] = len(records) - len(kept)
    return kept

  def _redrawing(self, source: _Named) -> Source:
    """A generated task: too many problems to try them all, so a few show how long they are."""
    lengths = [len(_ids(self._encode, source[i])) for i in range(TRIED)]
    over = sum(length > self._size for length in lengths)
    if over == TRIED:
      raise ValueError(
        f"task {source.name!r}: none of {TRIED} generated prompts fits in rollout."
        f"max_prompt_length = {self._size} tokens (the shortest has {min(lengths)}); raise it"
      )
    if over:
      reason = f"of {TRIED} generated prompts of {source.name} are over rollout.max_prompt_length"
      self.counts[f"{reason} = {self._size}: such a problem is drawn again"] = over
    fitting = _Redrawing(source, lambda record: len(_ids(self._encode, record)) <= self._size)
    self._redrawings.append(fitting)
    return fitting

  @property
  def redrawn(self) -> int:
    """Generated problems passed over so far, since their prompts were too long."""
    return sum(source.redrawn for source in self._redrawings)

  def batch(self, first_draw: int) -> HostBatch:
    """This host's slice of the global batch that starts at `first_draw`.

    Args:
      first_draw: prompts drawn before it, over all hosts: a multiple of `prompts_per_batch`.

    Raises:
      ValueError: another `first_draw`, or a generated task whose prompts are nearly all over the
        limit.
    """
    if first_draw < 0 or first_draw % self._prompts:
      raise ValueError(
        f"first_draw = {first_draw} is not a multiple of {self._prompts} prompts a batch: it "
        "counts prompts drawn, not completions, and rollout.prompts must not change in a run"
      )
    draws = range(first_draw + self._offset, first_draw + self._offset + self._share)
    records = [self._draws[draw] for draw in draws]
    return _pack(records, self._encode, self._size, np.asarray(draws, np.int32))


def encode_batch(
  records: Sequence[Record], encode: Encode, *, size: int, max_prompt_length: int
) -> tuple[HostBatch, int]:
  """Records as a batch of exactly `size` prompts, the last record repeated to fill it.

  Args:
    records: 1 to `size` of them.
    encode: record -> prompt ids.
    size: P.
    max_prompt_length: S, in tokens.

  Returns:
    The batch, with draw = 0 … size - 1, and how many of its rows are real (the first ones).

  Raises:
    ValueError: no records, too many, or a prompt over the limit.
  """
  if not 1 <= len(records) <= size:
    raise ValueError(f"{len(records)} records for a batch of {size}: wanted 1 to {size}")
  filled = [*records, *[records[-1]] * (size - len(records))]
  return _pack(filled, encode, max_prompt_length, np.arange(size, dtype=np.int32)), len(records)


def _named(record: Record) -> str:
  return f"problem {record.get('id', '?')!r} of task {record.get('task', '?')!r}"


def _ids(encode: Encode, record: Record) -> list[int]:
  """The prompt's ids; an error of the tokenizer or chat template names the problem."""
  try:
    return encode(record)
  except ValueError as error:
    raise ValueError(f"{_named(record)}: {error}") from error


def _pack(records: Sequence[Record], encode: Encode, size: int, draw: np.ndarray) -> HostBatch:
  """Right-pads encoded prompts to `size` tokens."""
  tokens = np.zeros((len(records), size), np.int32)
  lengths = np.zeros(len(records), np.int32)
  for row, record in enumerate(records):
    ids = _ids(encode, record)
    if not 1 <= len(ids) <= size:
      raise ValueError(
        f"{_named(record)}: its prompt has {len(ids)} tokens, wanted 1 to {size}; see "
        "rollout.max_prompt_length"
      )
    tokens[row, : len(ids)], lengths[row] = ids, len(ids)
  return HostBatch(tokens, lengths, draw, tuple(records))
