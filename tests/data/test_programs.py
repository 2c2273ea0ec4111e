"""Our own small functions: what a row holds, and that only a right program passes its asserts."""

from __future__ import annotations

import ast
import json
from importlib import resources

import pytest

from fadejax.data.tasks import TASKS, TaskConfig
from fadejax.verify import VerifierPool, check_problem, sandbox

TEXT = resources.files("fadejax.data").joinpath("small_functions.jsonl").read_text("utf-8")
ROWS = [json.loads(line) for line in TEXT.splitlines()]
# What a policy could settle on that has no idea of the problem.
IDLE = ["None", "0", "1", "-1", "True", "False", "''", "[]", "{}", "first", "last", "not last"]
IDLE += ["[first]", "(first, last)", "str(first)"]
# Here an idle program is the answer.
RIGHT = {("is_zero", "not last"), ("is_text_empty", "not last")}


def small_functions(**fields):
  return TASKS["small_functions"](TaskConfig(name="small_functions", **fields), 0)


def function_of(row):
  (function,) = ast.parse(row["solution"]).body
  return function


def test_rows():
  ids = [row["id"] for row in ROWS]
  assert len(set(ids)) == len(ids) == 150
  assert TEXT.isascii() and len(TEXT) < 100_000
  for row in ROWS:
    assert set(row) == {"id", "split", "signature", "description", "asserts", "solution"}
    assert row["split"] in ("train", "test") and 3 <= len(row["asserts"]) <= 6
    assert function_of(row).name == row["id"] and row["solution"].startswith(row["signature"])
    assert all(a.startswith(f"assert {row['id']}(") and " == " in a for a in row["asserts"])
    assert len(set(row["asserts"])) == len(row["asserts"])
    assert row["description"].startswith("Return ") and row["description"].endswith(".")


def shape(row):
  """The solution, with every argument name, constant and comparison made the same."""
  function = function_of(row)
  place = {arg.arg: f"argument {i}" for i, arg in enumerate(function.args.args)}
  for node in ast.walk(function):
    if isinstance(node, ast.Name):
      node.id = place.get(node.id, node.id)
    elif isinstance(node, ast.Constant):
      node.value = None
    elif isinstance(node, ast.Compare):
      node.ops = [ast.Eq() for _ in node.ops]
  return ast.dump(ast.Module(function.body, []))


def test_no_solution_is_on_both_sides():
  sides = {"train": set(), "test": set()}
  for row in ROWS:
    sides[row["split"]].add(shape(row))
  assert sides["train"] & sides["test"] == set()
  by_id = {row["id"]: row for row in ROWS}
  assert shape(by_id["is_positive"]) == shape(by_id["is_adult"]) != shape(by_id["is_even"])


def passes(row, program):
  names = {}
  exec(program, names)
  try:
    exec("\n".join(row["asserts"]), names)
  except Exception:
    return False
  return True


@pytest.mark.parametrize("value", IDLE)
def test_idle_programs_pass_no_problem(value):
  """In this process: the rows are our own, and passing is one assert after the other here too."""
  passed = set()
  for row in ROWS:
    names = [arg.arg for arg in function_of(row).args.args]
    result = value.replace("first", names[0]).replace("last", names[-1])
    if passes(row, f"{row['signature']} return {result}"):
      passed.add((row["id"], value))
  assert passed - RIGHT == set()


def test_bools_are_wanted_both_ways():
  for row in ROWS:
    wanted = [a.rsplit(" == ", 1)[1] for a in row["asserts"]]
    if {"True", "False"} & set(wanted):
      assert {"True", "False"} == set(wanted), row["id"]
    else:
      assert len(set(wanted)) > 1, row["id"]


def test_the_task_is_the_split():
  task = small_functions(eval_problems=0)
  assert (len(task.train), len(task.eval)) == (110, 40)
  for records, split in ((task.train, "train"), (task.eval, "test")):
    rows = [row for row in ROWS if row["split"] == split]
    assert [record["id"] for record in records] == [row["id"] for row in rows]
    for record, row in zip(records, rows, strict=True):
      assert record["verifier"] == "code" and record["task"] == "small_functions"
      assert check_problem(record) == ""
      assert record["tests"] == {"asserts": row["asserts"], "functions": [row["id"]]}
      assert record["prompt"] == (
        f"Write a Python function `{row['signature'][4:-1]}` that "
        + row["description"].replace("Return", "returns", 1)
      )
  few = small_functions(eval_problems=10, options={"label": "mine"})
  assert len(few.eval) == 10 and len(few.train) == 110 and few.name == "mine"
  assert [r["id"] for r in few.eval] == [r["id"] for r in small_functions(eval_problems=10).eval]


@pytest.mark.parametrize(
  "fields",
  [{"path": "x.jsonl"}, {"solve_rates": "x.json"}, {"options": {"n": 1}}],
)
def test_settings_it_does_not_have(fields):
  with pytest.raises(ValueError, match=r"task\.(path|options).*small_functions"):
    small_functions(**fields)


@pytest.mark.skipif(sandbox.why_not() != "", reason=sandbox.why_not() or "there is one")
def test_every_solution_passes():
  """In the sandbox; bare, in a fence, and not when another function's solution or an idle one."""
  task = small_functions(eval_problems=0)
  records = [*task.train, *task.eval]
  right = [(record["solution"], record) for record in records]
  right += [(f"Here it is:\n```python\n{record['solution']}```", record) for record in records[:5]]
  wrong = [(records[i - 1]["solution"], record) for i, record in enumerate(records[:5])]
  wrong += [(f"def {record['id']}(*arguments):\n    return None", record) for record in records[:5]]
  with VerifierPool(workers=2, timeout_s=40) as pool:
    verdicts = pool.grade([("code", answer, record) for answer, record in right + wrong])
  rewards = [verdict.reward for verdict in verdicts]
  failed = [(r["id"], v) for (_, r), v in zip(right, verdicts, strict=False) if v.reward != 1]
  assert failed == [] and rewards[len(right) :] == [0.0] * len(wrong)
