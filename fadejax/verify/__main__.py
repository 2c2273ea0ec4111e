"""Grades a JSONL file of problems with completions: an audit of a data set and its golds.

  python -m fadejax.verify --input=problems_with_completions.jsonl --output=verdicts.jsonl
  python -m fadejax.verify --check_golds --input=problems.jsonl --output=verdicts.jsonl

Each input row is a problem record with `completion` (text) or `completions` (a list of
texts); rows that name no verifier are math. Each output row is one verdict: row, id,
completion (its index), verifier, reward, status, detail. Prints a summary by status. Exit
status 2 when the input is malformed.

With --check_golds every row's own gold (its solution, or its answer in the form that its
verifier reads) is graded against its own tests; rows whose gold fails are listed, and the exit
status is 1 where there are any.
"""

from __future__ import annotations

import collections
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from absl import app, flags

from fadejax.verify import Verdict, VerifierPool, check_name, check_problem, walls
from fadejax.verify.walls import WALLS

_INPUT = flags.DEFINE_string("input", None, "JSONL file of problems with completions.")
_OUTPUT = flags.DEFINE_string("output", None, "JSONL file to write, one verdict a line.")
_WORKERS = flags.DEFINE_integer("workers", 2, "Worker processes.", lower_bound=1)
_TIMEOUT = flags.DEFINE_float("timeout_s", 10.0, "CPU seconds per item.", lower_bound=0.01)
_CHECK_GOLDS = flags.DEFINE_bool(
  "check_golds", False, "Grade every row's own gold, and list the rows whose gold fails."
)
flags.DEFINE_alias("check-golds", "check_golds")
_SANDBOX = flags.DEFINE_enum(
  "sandbox",
  WALLS[0],
  WALLS,
  "Around programs (verifier code). none: nothing protects you.",
)
_VERIFIER = flags.DEFINE_string("verifier", "math", "Verifier of rows that name none.")

LISTED = 50  # failing golds that are printed
BATCH = 1024  # items in flight: bounds memory on files of any length


class InputError(ValueError):
  """A malformed input; the message names file and line."""


Row = tuple[int, int, str, dict[str, Any]]  # line number, completion's index, completion, record


def read_records(path: Path, verifier: str) -> Iterator[tuple[int, dict[str, Any]]]:
  """(line number, problem record) of every row, its verifier known.

  Raises:
    InputError: a line that is not JSON, or lacks a usable verifier.
  """
  with path.open(encoding="utf-8") as file:
    for number, line in enumerate(file, start=1):
      if not line.strip():
        continue
      where = f"{path}, line {number}"
      try:
        row = json.loads(line)
      except ValueError as error:
        raise InputError(f"{where}: not JSON: {error}") from error
      if not isinstance(row, dict):
        raise InputError(f"{where}: expected an object, got {type(row).__name__}")
      row.setdefault("verifier", verifier)
      if not isinstance(row["verifier"], str):
        raise InputError(f"{where}: field 'verifier' is not text")
      try:
        check_name(row["verifier"])
      except ValueError as error:
        raise InputError(f"{where}: {error}") from error
      yield number, row


def read_rows(path: Path, verifier: str) -> Iterator[Row]:
  """Every completion of every row.

  Raises:
    InputError: as `read_records`, or a row without usable completions.
  """
  for number, row in read_records(path, verifier):
    where = f"{path}, line {number}"
    if ("completion" in row) == ("completions" in row):
      raise InputError(f"{where}: needs one of the fields 'completion' and 'completions'")
    completions = row.pop("completions", None)
    if completions is None:
      completions = [row.pop("completion")]
    if not isinstance(completions, list) or not all(isinstance(c, str) for c in completions):
      raise InputError(f"{where}: completions must be text")
    for index, completion in enumerate(completions):
      yield number, index, completion, row


def gold_completion(row: dict[str, Any]) -> str | None:
  """A completion that the row itself says is right; None where it holds none."""
  for name in ("solution", "canonical_solution"):
    if isinstance(row.get(name), str):
      return row[name]
  if row["verifier"] == "reasoning_gym":
    entry = row.get("entry")
    answer = entry.get("answer") if isinstance(entry, dict) else None
    return None if answer is None else str(answer)
  if row["verifier"] not in ("math", "integer", "exact") or row.get("answer") is None:
    return None
  answer = str(row["answer"])
  if row["verifier"] != "math" or "boxed" in answer or "####" in answer:
    return answer
  return f"\\boxed{{{answer.strip().strip('$')}}}"


def gold_rows(path: Path, verifier: str) -> Iterator[Row]:
  """Every row's gold as its completion; rows without one are left out."""
  for number, row in read_records(path, verifier):
    if (gold := gold_completion(row)) is not None:
      yield number, 0, gold, row


def grade_rows(rows: Iterable[Row], pool: VerifierPool) -> Iterator[tuple[dict[str, Any], Verdict]]:
  """The output row and the verdict of every completion, in order."""
  rows = iter(rows)
  while batch := list(islice(rows, BATCH)):
    verdicts = pool.grade([(row["verifier"], text, row) for _, _, text, row in batch])
    for (number, index, _, row), verdict in zip(batch, verdicts, strict=True):
      yield (
        {
          "row": number,
          "id": row.get("id"),
          "completion": index,
          "verifier": row["verifier"],
          "reward": verdict.reward,
          "status": verdict.status,
          "detail": verdict.detail,
        },
        verdict,
      )


def summary(verdicts: Sequence[Verdict], bad_golds: int) -> str:
  """Counts by status, and the mean reward over the verdicts that have one."""
  counts = collections.Counter(verdict.status for verdict in verdicts)
  rewards = [verdict.reward for verdict in verdicts if verdict.reward is not None]
  lines = [f"{len(verdicts)} completions graded"]
  lines += [f"  {status:14s}{count:8d}" for status, count in sorted(counts.items())]
  mean = f"{sum(rewards) / len(rewards):.4f}" if rewards else "none"
  lines.append(f"mean reward {mean} over {len(rewards)} (grader_error has none)")
  if bad_golds:
    lines.append(f"{bad_golds} problem row(s) cannot be graded: see their grader_error details")
  return "\n".join(lines)


def run(source: Path, target: Path, verifier: str, pool: VerifierPool) -> str:
  """Grades `source` into `target`; returns the summary.

  Every line is checked before the first is graded, so that a malformed file costs nothing.

  Raises:
    InputError
  """
  bad_rows = {number for number, _, _, row in read_rows(source, verifier) if check_problem(row)}
  verdicts = _write(read_rows(source, verifier), target, pool)
  return summary([verdict for _, verdict in verdicts], len(bad_rows))


def check_golds(
  source: Path, target: Path, verifier: str, pool: VerifierPool
) -> tuple[str, list[dict[str, Any]]]:
  """Grades every row's gold into `target`; returns the summary and the rows that fail.

  Raises:
    InputError
  """
  rows = sum(1 for _ in read_records(source, verifier))
  graded = _write(gold_rows(source, verifier), target, pool)
  failing = [row for row, verdict in graded if verdict.reward != 1.0]
  lines = [summary([verdict for _, verdict in graded], 0)]
  if rows > len(graded):
    lines.append(f"{rows - len(graded)} of {rows} rows hold no gold that can be graded")
  lines.append(f"{len(failing)} of {len(graded)} golds fail{':' if failing else ''}")
  lines += [
    f"  line {row['row']}, id {row['id']}: {row['status']}: {row['detail']}"
    for row in failing[:LISTED]
  ]
  if len(failing) > LISTED:
    lines.append(f"  … and {len(failing) - LISTED} more, in {target}")
  return "\n".join(lines), failing


def _write(
  rows: Iterable[Row], target: Path, pool: VerifierPool
) -> list[tuple[dict[str, Any], Verdict]]:
  """Grades rows into a file; returns what it wrote."""
  done = []
  with target.open("w", encoding="utf-8") as file:
    for row, verdict in grade_rows(rows, pool):
      done.append((row, verdict))
      file.write(json.dumps(row) + "\n")
  return done


def _check_files(source: Path, target: Path) -> None:
  """Refuses what would lose data: the input is read twice, and the output is overwritten.

  Raises:
    InputError
  """
  if not source.is_file():
    raise InputError(f"--input={source}: no such file (a pipe cannot be read twice)")
  if target.exists() and source.samefile(target):
    raise InputError(f"--output={target} is the input; name another file")


def _parse_flags(argv: list[str]) -> list[str]:
  """As absl does, but --help ends with status 0; `command` has the same, above this room."""
  try:
    return app.parse_flags_with_usage(argv)
  except SystemExit:
    words = {word.lstrip("-") for word in argv[1:]}
    sys.exit(0 if words & {"help", "helpshort", "helpfull", "?"} else 1)


def main(argv: Sequence[str]) -> None:
  """Grades the input file and prints the summary; exit status 2 on bad input."""
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
  try:
    _check_files(Path(str(_INPUT.value)), Path(str(_OUTPUT.value)))
    walls.choose(str(_SANDBOX.value))
    if _SANDBOX.value == "none":
      print(f"fadejax.verify: {walls.UNPROTECTED}", file=sys.stderr)
    files = Path(str(_INPUT.value)), Path(str(_OUTPUT.value)), str(_VERIFIER.value)
    with VerifierPool(_WORKERS.value, _TIMEOUT.value) as pool:
      if not _CHECK_GOLDS.value:
        print(run(*files, pool))
        return
      text, failing = check_golds(*files, pool)
  except (InputError, OSError, UnicodeDecodeError) as error:
    print(f"fadejax.verify: {error}", file=sys.stderr)
    sys.exit(2)
  print(text)
  sys.exit(1 if failing else 0)


if __name__ == "__main__":
  flags.mark_flags_as_required(["input", "output"])
  app.run(main, flags_parser=_parse_flags)
