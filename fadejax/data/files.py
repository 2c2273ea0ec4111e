"""The task `jsonl`: problems from a .jsonl or .parquet file.

Rows of our own form, of TRL's, of verl's and of published code data sets are read as they are. A
malformed row is an error that names its file and line; a gold that does not parse, and a code
problem without usable tests, are logged, dropped and counted.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fadejax.data import code_rows
from fadejax.data.records import Record, Task, TaskConfig, options_of, stable_hash
from fadejax.data.tokenizer import message_fault
from fadejax.verify import check_name, check_problem

LISTED = 20  # rows that one message lists
HELD_OUT = 10  # one row in so many is for evaluation where there is no eval_path

Counts = dict[str, int]


def jsonl(config: TaskConfig, seed: int) -> Task:
  """Problems from `config.path`, evaluated on `config.eval_path` or on rows held out.

  The rows do not depend on the seed; the order in which they are drawn does.

  Options: `label`, the task's name in metrics (default: the file's name without its suffix), and
  of code problems those of `code_rows.Options`.

  Raises:
    ValueError: no such file, malformed rows, or nothing left to train or evaluate on.
  """
  del seed
  options = options_of(config, {"label": "", **dataclasses.asdict(code_rows.Options())})
  label = options.pop("label") or Path(config.path).stem
  code = code_rows.Options(**options)
  try:
    check_name(config.verifier)
  except ValueError as error:
    raise ValueError(f"task.verifier: {error}") from error
  counts: Counts = {}
  train = load(_existing(config.path, "task.path"), config.verifier, label, counts, code)
  if config.eval_path:
    path = _existing(config.eval_path, "task.eval_path")
    train, evaluation = _with_eval_file(train, path, config, label, counts, code)
  else:
    train, evaluation = _split(train)
  train = _by_solve_rate(train, config, counts)
  chosen = _choose(evaluation, config.eval_problems)
  _add(counts, "evaluation problems beyond task.eval_problems", len(evaluation) - len(chosen))
  for problems, use in ((train, "train"), (chosen, "evaluate")):
    if not problems:
      left_out = ", ".join(f"{count} {why}" for why, count in counts.items()) or "none"
      alone = "" if config.eval_path or len(chosen) != 1 else (
        "; its only problem is held out for evaluation: add rows, or name others in task.eval_path"
      )  # fmt: skip
      raise ValueError(
        f"task.path {config.path}: no problem to {use} on (left out: {left_out}){alone}"
      )
  return Task(label, train, chosen, counts)


def _add(counts: Counts, reason: str, number: int) -> None:
  if number:
    counts[reason] = counts.get(reason, 0) + number


def _existing(path: str, field: str) -> Path:
  if not path:
    raise ValueError(f"{field}: the task 'jsonl' needs a .jsonl or .parquet file")
  file = Path(path).expanduser()
  if not file.is_file():
    raise ValueError(f"{field}: no such file: {path}")
  if file.suffix not in READERS:
    raise ValueError(f"{field}: {path} is neither .jsonl nor .parquet")
  return file


# ---------------------------------------------------------------- which rows


def prompt_key(record: Record) -> str:
  """What makes two prompts the same: their text without system messages and spacing."""
  prompt = record["prompt"]
  if not isinstance(prompt, str):
    prompt = " ".join(m["content"] for m in prompt if m["role"] != "system")
  return " ".join(prompt.split())


def _split(records: list[Record]) -> tuple[list[Record], list[Record]]:
  """(training, held out): about one in HELD_OUT by a hash of the prompt, and at least one.

  A row's side depends on its prompt only, so that adding rows, or another eval_problems,
  never moves a row from training to evaluation (but for the one of a tiny file).
  """
  hashes = [stable_hash(f"held out {prompt_key(record)}") for record in records]
  lowest = min(hashes, default=0)
  out = [h % HELD_OUT == 0 for h in hashes]
  if not any(out):
    out = [h == lowest for h in hashes]
  train = [record for record, held in zip(records, out, strict=True) if not held]
  return train, [record for record, held in zip(records, out, strict=True) if held]


def _with_eval_file(
  train: list[Record],
  path: Path,
  config: TaskConfig,
  label: str,
  counts: Counts,
  code: code_rows.Options,
) -> tuple[list[Record], list[Record]]:
  """(training without what eval_path holds, the problems of eval_path).

  The same file twice is a wish (to measure the training problems): then nothing is dropped,
  and the overlap is counted.
  """
  if path.samefile(Path(config.path).expanduser()):
    _add(counts, "evaluation problems that training draws too: eval_path is path", len(train))
    return train, train
  evaluation = load(path, config.verifier, label, counts, code)
  known = {prompt_key(record) for record in evaluation}
  kept = [record for record in train if prompt_key(record) not in known]
  _add(counts, "training problems that task.eval_path holds too", len(train) - len(kept))
  return kept, evaluation


def _choose(records: list[Record], count: int) -> list[Record]:
  """`count` of the records by a hash of the prompt, in their order; all where count is 0."""
  if not count or len(records) <= count:
    return records
  by_hash = lambda i: (stable_hash(f"evaluation {prompt_key(records[i])}"), i)  # noqa: E731
  return [records[i] for i in sorted(sorted(range(len(records)), key=by_hash)[:count])]


def _by_solve_rate(records: list[Record], config: TaskConfig, counts: Counts) -> list[Record]:
  """The records whose earlier solve rate c / n lies in [min_solve_rate, max_solve_rate]."""
  if not config.solve_rates:
    return records
  rates = read_solve_rates(config.solve_rates)
  known = [record for record in records if record["id"] in rates]
  if records and not known:
    raise ValueError(
      f"task.solve_rates: {config.solve_rates} has none of the {len(records)} training problems "
      f"of {config.path}: evaluate that file with task.eval_problems = 0 first"
    )
  low, high = config.min_solve_rate, config.max_solve_rate
  kept = [record for record in known if low <= rates[record["id"]] <= high]
  _add(counts, "training problems without a rate in task.solve_rates", len(records) - len(known))
  _add(counts, f"training problems with a solve rate outside [{low:g}, {high:g}]",
       len(known) - len(kept))  # fmt: skip
  return kept


def read_solve_rates(path: str) -> dict[str, float]:
  """Problem id -> c / n of an `evaluate` JSON; problems with n = 0 have none.

  Raises:
    ValueError: not such a file, or one id with two rates.
  """
  rates: dict[str, float] = {}
  try:
    problems = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))["problems"]
    for problem in problems:
      key, n, c = str(problem["id"]), int(problem["n"]), int(problem["c"])
      if not 0 <= c <= n:
        raise ValueError(f"problem {key!r} has c = {c} of n = {n}")
      if n and rates.setdefault(key, c / n) != c / n:
        raise ValueError(f"problem {key!r} is there twice, with different rates")
  except (OSError, ValueError, TypeError, KeyError) as error:
    raise ValueError(
      f"task.solve_rates: {path} is no result of fadejax.evaluate, "
      f'{{"problems": [{{"id", "n", "c"}}]}}: {type(error).__name__}: {error}'
    ) from error
  return rates


# ---------------------------------------------------------------- reading rows


def load(
  path: Path,
  verifier: str,
  label: str,
  counts: Counts,
  code: code_rows.Options,
) -> list[Record]:
  """The file's rows as records, those with an invalid gold dropped, logged and counted.

  So are code problems whose tests are missing or of no use.

  Args:
    path: .jsonl or .parquet.
    verifier: of rows that name none.
    label: the task's name.
    counts: is added to.
    code: settings of code problems.

  Raises:
    ValueError: malformed rows, or no rows; lists up to LISTED of them with their lines.
  """
  faults: list[str] = []
  invalid: list[str] = []
  records: list[Record] = []
  seen: dict[str, int] = {}
  unit, rows = READERS[path.suffix]
  for line, row in rows(path):
    where = f"{path} {unit} {line}"
    try:
      record = to_record(row, verifier, label, seen, code)
    except code_rows.LeftOut as error:
      invalid.append(f"{where}: {error}")
      _add(counts, f"rows of {path.name} {error.reason}", 1)
      continue
    except ValueError as error:
      faults.append(f"{where}: {error}")
      continue
    if seen.setdefault(record["id"], line) != line:
      faults.append(f"{where}: id {record['id']!r} is that of {unit} {seen[record['id']]} too")
      continue
    reason = check_problem(record)
    if not reason:
      if record["verifier"] == "code":
        cut = code_rows.adjust(record, code)
        _add(counts, f"tests over task.options max_tests = {code.max_tests}", cut)
      records.append(record)
    elif reason.startswith("invalid gold"):
      invalid.append(f"{where}: {reason}")
      _add(counts, f"rows of {path.name} with a gold that does not parse", 1)
    else:
      faults.append(f"{where}: {reason}")
  if faults:
    raise ValueError(_listing(f"{len(faults)} malformed row(s)", faults))
  if not records and not invalid:
    raise ValueError(f"{path}: no rows")
  if invalid:
    title = f"{len(invalid)} row(s) dropped, their golds do not parse or their tests are of no use"
    logging.getLogger(__name__).warning(_listing(title, invalid))
  return records


def _listing(title: str, lines: Sequence[str]) -> str:
  more = [f"… and {len(lines) - LISTED} more"] if len(lines) > LISTED else []
  return "\n  ".join([f"{title}:", *lines[:LISTED], *more])


def _json_rows(path: Path) -> Iterator[tuple[int, Any]]:
  """(line, value) of the lines that are not blank; a ValueError for one that is no JSON."""
  with path.open("rb") as file:
    for line, raw in enumerate(file, 1):
      try:
        text = raw.decode("utf-8-sig" if line == 1 else "utf-8").strip()
        value = json.loads(text) if text else None
      except (ValueError, RecursionError) as error:
        yield line, ValueError(f"not JSON: {error}")
        continue
      if text:
        yield line, value


def _parquet_rows(path: Path) -> Iterator[tuple[int, Any]]:
  """(row, value), rows counted from 1; nulls are left out, dates and decimals become text."""
  import pyarrow
  import pyarrow.parquet

  try:
    file = pyarrow.parquet.ParquetFile(path)
  except (pyarrow.ArrowException, OSError) as error:
    raise ValueError(f"{path}: not a Parquet file: {error}") from error
  line = 0
  with file:
    for batch in file.iter_batches():
      for row in batch.to_pylist():
        line += 1
        try:
          yield line, json.loads(json.dumps(row, default=_as_text))
        except TypeError as error:
          yield line, ValueError(str(error))


def _as_text(value: Any) -> str:
  if isinstance(value, datetime.date | datetime.time | datetime.timedelta | decimal.Decimal):
    return str(value)
  raise TypeError(f"a value of type {type(value).__name__}, which a record cannot hold")


# suffix -> (what a row's number is called, reader)
READERS = {".jsonl": ("line", _json_rows), ".parquet": ("row", _parquet_rows)}


def to_record(
  row: Any, verifier: str, label: str, taken: dict[str, int], code: code_rows.Options
) -> Record:
  """A row of our own form, of TRL's, of verl's or of a code data set as a problem record.

  The gold is `answer`, else verl's `reward_model.ground_truth`, else TRL's `solution`. All
  other fields stay, but nulls. A row without an id gets a hash of its prompt, with a number
  after it where the prompt comes again.

  Args:
    row: what the reader gave: an object, or a ValueError about it.
    verifier: for a row that names none.
    label: the task's name.
    taken: ids of earlier rows.
    code: settings of code problems.

  Raises:
    code_rows.LeftOut: a code problem that cannot be graded.
    ValueError: says what is wrong with the row.
  """
  if isinstance(row, ValueError):
    raise row
  if not isinstance(row, dict):
    raise ValueError(f"expected an object, got {row!r:.80}")
  if code_rows.is_known(row):
    row = code_rows.convert(row, code)
  record = {key: value for key, value in row.items() if value is not None}
  record["prompt"] = _prompt(record.get("prompt"))
  record.setdefault("verifier", verifier)
  if "answer" not in record:
    model = record.get("reward_model")
    gold = model.get("ground_truth") if isinstance(model, dict) else None
    gold = record.get("solution") if gold is None else gold
    if gold is not None:
      record["answer"] = gold
  if "id" in record:
    if isinstance(record["id"], bool) or not isinstance(record["id"], str | int):
      raise ValueError(f"id {record['id']!r:.80} is neither text nor a whole number")
    record["id"] = str(record["id"])
  else:
    record["id"] = _free_id(prompt_key(record), taken)
  record["task"] = label
  return record


def _free_id(key: str, taken: dict[str, int]) -> str:
  base, copies = f"{stable_hash(key):016x}", 1
  while (name := base if copies == 1 else f"{base}-{copies}") in taken:
    copies += 1
  return name


def _prompt(value: Any) -> Any:
  """A prompt: text, or chat messages, which may be JSON text (a list of objects with a role).

  Raises:
    ValueError: missing, empty, or malformed messages.
  """
  if isinstance(value, str):
    messages = _messages_in(value)
    if messages is None:
      if not value.strip():
        raise ValueError("the field 'prompt' is empty")
      value.encode()  # a lone surrogate is a UnicodeEncodeError, a ValueError
      return value
    value = messages
  if value is None:
    raise ValueError("the field 'prompt' is missing")
  if isinstance(value, list):  # columns of a Parquet file give every message all fields
    value = [
      {k: v for k, v in m.items() if v is not None} if isinstance(m, dict) else m for m in value
    ]
  fault = message_fault(value)
  if fault:
    raise ValueError(f"prompt: {fault}")
  for message in value:
    message["content"].encode()
  return value


def _messages_in(text: str) -> list[Any] | None:
  """Chat messages written as JSON text; None for any other text, such as "[1, 2]"."""
  if not text.lstrip().startswith("["):
    return None
  try:
    value = json.loads(text)
  except (ValueError, RecursionError):
    return None
  is_chat = isinstance(value, list) and value and all(
    isinstance(message, dict) and "role" in message for message in value
  )  # fmt: skip
  return value if is_chat else None
