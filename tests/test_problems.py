"""A config's problems as a file, and a data set's own solutions graded by way of it."""

from __future__ import annotations

import json

import pytest

from fadejax.config import default_config, resolve
from fadejax.problems import write_problems
from fadejax.verify import VerifierPool, sandbox
from fadejax.verify.__main__ import check_golds

needs_sandbox = pytest.mark.skipif(bool(sandbox.why_not()), reason="no sandbox here")


def config_of(path, **task):
  c = default_config()
  c.task.name, c.task.path = "jsonl", str(path)
  for key, value in task.items():
    c.task[key] = value
  return resolve(c)


def taco(number, solution, **given):
  return {
    "question": f"Question {number}",
    "starter_code": "",
    "input_output": json.dumps(given),
    "solutions": json.dumps([solution]),
  }


@needs_sandbox
def test_solutions_of_taco_rows_are_graded_by_their_own_tests(tmp_path):
  add = "print(sum(map(int, input().split())))"
  rows = [
    taco(0, add, inputs=["1 2\n", "3 4\n"], outputs=["3\n", "7\n"]),
    taco(1, "def f(x: List[int]):\n  return max(x)", fn_name="f", inputs=[[[1, 3]]], outputs=[[3]]),
    taco(2, add, inputs=["1 2\n"], outputs=["4\n"]),  # its own solution is wrong
    taco(3, add, inputs=[], outputs=[]),
  ]
  source = tmp_path / "taco.jsonl"
  source.write_text("".join(json.dumps(row) + "\n" for row in rows))
  out = tmp_path / "problems.jsonl"
  (line,) = write_problems(config_of(source, eval_path=str(source)), out)
  assert line.startswith("taco: 3 problems; ") and "1 rows of taco.jsonl without tests" in line
  with VerifierPool(1, 10.0) as pool:
    text, failing = check_golds(out, tmp_path / "verdicts.jsonl", "math", pool)
  (bad,) = failing
  assert bad["row"] == 3 and "expected '4\\n'" in bad["detail"] and "1 of 3 golds fail" in text
  # What was written reads as what it was written from.
  again = tmp_path / "again.jsonl"
  write_problems(config_of(out, eval_path=str(out), options={"label": "taco"}), again)
  assert again.read_text() == out.read_text()


def test_problems_of_generated_tasks_and_files_that_would_be_lost(tmp_path):
  c = default_config()
  c.task.eval_problems = 5
  (line,) = write_problems(resolve(c), tmp_path / "sums.jsonl")
  assert line == "arithmetic: 5 problems; training problems are generated: left out"
  assert len((tmp_path / "sums.jsonl").read_text().splitlines()) == 5
  source = tmp_path / "own.jsonl"
  source.write_text("".join(f'{{"prompt": "{i}?", "answer": "{i}"}}\n' for i in range(3)))
  before = source.read_text()
  with pytest.raises(ValueError, match="name another file"):
    write_problems(config_of(source), source)
  assert source.read_text() == before
