"""Rows of LiveCodeBench, TACO and APPS as problem records."""

from __future__ import annotations

import base64
import itertools
import json
import os
import pickle
import zlib

import pytest

from fadejax.data import code_rows
from fadejax.data.code_rows import LeftOut, Options, convert, spread, unwrapped
from fadejax.data.tasks import TASKS, TaskConfig
from fadejax.verify import sandbox
from fadejax.verify.code_tests import code, form_of

needs_sandbox = pytest.mark.skipif(bool(sandbox.why_not()), reason="no sandbox here")


def packed(text, protocol=4):
  return base64.b64encode(zlib.compress(pickle.dumps(text, protocol))).decode()


def cases(kind, *pairs):
  return json.dumps([{"input": i, "output": o, "testtype": kind} for i, o in pairs])


def live(public, private="", **fields):
  return {
    "question_title": "t",
    "question_content": "Add {the} numbers.",
    "question_id": "abc_1",
    "platform": "atcoder",
    "difficulty": "easy",
    "starter_code": "",
    "metadata": "{}",
    "public_test_cases": public,
    "private_test_cases": private,
    **fields,
  }


def taco(given, **fields):
  return {
    "question": "Add.",
    "starter_code": "",
    "solutions": json.dumps(["print(sum(map(int, input().split())))", "other"]),
    "difficulty": "EASY",
    "input_output": json.dumps(given),
    **fields,
  }


STARTER = "class Solution:\n    def add(self, a: List[int], b: int) -> int:\n        "


# ---------------------------------------------------------------- LiveCodeBench


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_live_code_bench_on_stdin(protocol):
  private = packed(cases("stdin", ("3 4\n", "7\n"), ("é", "ü" * 70000)), protocol)
  record = convert(live(cases("stdin", ("1 2\n", "3\n")), private), Options())
  tests = [("1 2\n", "3\n"), ("3 4\n", "7\n"), ("é", "ü" * 70000)]
  assert record["tests"] == {"stdin_stdout": [{"stdin": i, "stdout": o} for i, o in tests]}
  assert record["id"] == "abc_1" and record["verifier"] == "code"
  assert record["platform"] == "atcoder" and "private_test_cases" not in record
  assert record["prompt"] == (
    "Add {the} numbers.\n\nWrite a program that reads standard input and prints its answer to "
    "standard output.\nAnswer with the whole program in one fenced block of Python."
  )
  assert "prefix" not in record and form_of(record)[0] == "stdin_stdout"


def test_live_code_bench_with_a_function():
  row = live(
    cases("functional", ("[1, 2]\n3", "6"), ('["a"]\n0\n', '"x\\ny"')),
    cases("functional", ("[]\n1", "true")),
    metadata='{"func_name": "add"}',
    starter_code=STARTER,
  )
  record = convert(row, Options())
  assert record["tests"] == {
    "function": "add",
    "calls": [
      {"args": [[1, 2], 3], "expected": 6},
      {"args": [["a"], 0], "expected": "x\ny"},
      {"args": [[], 1], "expected": True},
    ],
    "float_tol": 1e-6,
  }
  fence = f"```python\n{STARTER.rstrip()}\n```"
  assert f"as they are:\n{fence}\nAnswer with" in record["prompt"]
  assert record["prefix"] == code_rows.PRELUDE and form_of(record)[0] == "calls"


def test_a_hostile_pickle_is_not_loaded(tmp_path):
  class Marks:
    def __reduce__(self):
      return os.mkdir, (str(tmp_path / "made"),)

  for value in (Marks(), [Marks(), "[]"], ["[]"], b"[]", ("[]", "[]"), 3):
    text = base64.b64encode(zlib.compress(pickle.dumps(value))).decode()
    with pytest.raises(ValueError, match="private_test_cases is neither JSON nor base64"):
      convert(live("[]", text), Options())
  assert not (tmp_path / "made").exists()
  # A memo index of 2**31 would make a loader allocate for so many entries.
  bomb = b"\x80\x02X\x02\x00\x00\x00[]r\xff\xff\xff\x7f."
  text = base64.b64encode(zlib.compress(bomb)).decode()
  assert code_rows.unpacked(text, "x") == "[]"


def test_a_huge_decompression_is_refused():
  text = base64.b64encode(zlib.compress(pickle.dumps("1" * 2**20))).decode()
  assert len(text) < 4000
  with pytest.raises(LeftOut, match=r"with private_test_cases of more than 0.5 MiB"):
    code_rows.unpacked(text, "private_test_cases", limit=2**19)
  assert len(code_rows.unpacked(text, "private_test_cases")) == 2**20


@pytest.mark.parametrize(
  "text",
  [
    "%%%",
    base64.b64encode(b"no zlib").decode(),
    base64.b64encode(zlib.compress(b"no pickle")).decode(),
    base64.b64encode(zlib.compress(pickle.dumps("[]"))[:-2]).decode(),
    base64.b64encode(zlib.compress(pickle.dumps("[]")[:-2])).decode(),
  ],
)
def test_damaged_private_tests_are_named(text):
  with pytest.raises(ValueError, match="private_test_cases is neither JSON nor base64") as caught:
    convert(live("[]", text), Options())
  assert not isinstance(caught.value, LeftOut)


@pytest.mark.parametrize(
  ("row", "message"),
  [
    (live("[3]"), "public_test_cases: a list of"),
    (live('{"input": 1}'), "public_test_cases is neither JSON nor base64"),
    (live(cases("stdin", ("1", "2")), packed("{}")), "private_test_cases: a list of"),
    (live(cases("shell", ("1", "2"))), "testtype: all 'stdin' or all 'functional'"),
    (live(cases("stdin", ("", "")), cases("functional", ("1", "2"))), "testtype: all"),
    (live(cases("functional", ("1", "2"))), "metadata: functional tests need 'func_name'"),
    (live(cases("stdin", ("1", "2")), question_content=" "), "question_content is missing"),
    (live(cases("stdin", ("1", "2")), starter_code=3), "starter_code is not text"),
    (taco([]), "input_output: an object is wanted, got list"),
    (taco({}, input_output="{"), "input_output is not JSON"),
    (taco({}, input_output="[" * 99999), "input_output is not JSON"),
    (taco({"inputs": "1", "outputs": ["2"]}), "inputs and outputs must be lists"),
    (taco({"inputs": ["1"], "outputs": ["2"], "fn_name": 3}), "fn_name is no name"),
    (taco({"inputs": ["1"], "outputs": ["2"]}, question=None), "question is missing"),
    (taco({"inputs": ["1"], "outputs": ["2"]}, solutions="{}"), "solutions: a list is wanted"),
    (taco({"inputs": ["1"], "outputs": ["2"]}, solutions="[1]"), "solutions: text is wanted"),
  ],
)
def test_malformed_rows_are_named(row, message):
  with pytest.raises(ValueError, match=message) as caught:
    convert(row, Options())
  assert not isinstance(caught.value, LeftOut)


@pytest.mark.parametrize(
  ("row", "reason"),
  [
    (live("[]", packed("[]")), "without tests"),
    (taco({}, input_output=""), "without tests"),
    (taco({}, input_output=None), "without tests"),
    (taco({"inputs": [], "outputs": []}), "without tests"),
    (taco({"inputs": ["1", "2"], "outputs": ["2"]}), "with unequal numbers of inputs and outputs"),
    (taco({"inputs": [1], "outputs": ["2"]}), "with input or output that is no text"),
    (taco({"inputs": ["1"], "outputs": ["2"]}, starter_code=STARTER),
     "with starter code of a function, but tests on stdin and no function's name"),
    (taco({"inputs": [[["a"]]], "outputs": ["2"]}), "with input or output that is no text"),
    (taco({"inputs": [3], "outputs": [4], "fn_name": "f"}), "with arguments that are no list"),
    (taco({"inputs": ["N = 5"], "outputs": ["4"], "fn_name": "f"}),
     "with arguments or results that are not JSON"),
    (taco({}, input_output='{"inputs": [[1' + "0" * 5000 + ']], "outputs": [1]}'),
     "with an integer of more than 4300 digits"),
  ],
)  # fmt: skip
def test_rows_that_nobody_can_grade_have_a_reason(row, reason):
  with pytest.raises(LeftOut) as caught:
    convert(row, Options())
  assert caught.value.reason == reason


# ---------------------------------------------------------------- TACO and APPS


def test_taco_on_stdin():
  given = {"inputs": ["1 2\n", ["3", "4"]], "outputs": ["3", ["7", "8"]]}
  record = convert(taco(given, problem_id=12), Options())
  assert record["tests"]["stdin_stdout"] == [
    {"stdin": "1 2\n", "stdout": "3"},
    {"stdin": "3\n4", "stdout": "7\n8"},
  ]
  assert record["id"] == 12 and record["solution"].startswith("print(sum")
  assert record["difficulty"] == "EASY" and "solutions" not in record
  assert "solution" not in convert(taco(given, solutions=""), Options())
  assert "solution" not in convert(taco(given, solutions="[]"), Options())


def test_taco_with_a_function():
  given = {"fn_name": "add", "inputs": [[1, [2]], [3, []]], "outputs": [[3], [3]]}
  record = convert(taco(given), Options())
  assert record["tests"]["function"] == "add"
  assert [call["expected"] for call in record["tests"]["calls"]] == [3, 3]
  assert [call["args"] for call in record["tests"]["calls"]] == [[1, [2]], [3, []]]
  assert "Write a function `add`." in record["prompt"]
  # Arguments as text are one JSON value a line, and results JSON too.
  given = {"fn_name": "add", "inputs": ["[1]\n2"], "outputs": ["[3]"]}
  assert convert(taco(given), Options())["tests"]["calls"] == [{"args": [[1], 2], "expected": [3]}]


LIST = "class Solution:\n    def f(self, a: int) -> List[int]:\n"
OTHER = "def g() -> List[int]:\n  pass\ndef f(a):\n  pass"


@pytest.mark.parametrize(
  ("outputs", "starter", "expected"),
  [
    ([[1], [2]], "", [1, 2]),
    ([[[1, 2]], [[]]], "def f(a):\n\t", [[1, 2], []]),
    ([1, 2], "", [1, 2]),
    ([[1, 2], [3]], "", [[1, 2], [3]]),  # one of them is no list of one: none is wrapped
    ([[], [3]], "", [[], [3]]),
    (["a", "b"], "", ["a", "b"]),
    ([[1], [2]], LIST, [[1], [2]]),  # the starter code says that a list is what it returns
    ([[1], [2]], OTHER, [1, 2]),
  ],
)
def test_when_results_are_wrapped(outputs, starter, expected):
  given = {"fn_name": "f", "inputs": [[0]] * len(outputs), "outputs": outputs}
  tests = convert(taco(given, starter_code=starter), Options())["tests"]
  assert [call["expected"] for call in tests["calls"]] == expected


def test_the_option_decides_over_the_rule():
  assert unwrapped([[1], [2]], False, "plain") == [[1], [2]]
  assert unwrapped([[1], [2]], True, "wrapped") == [1, 2]
  with pytest.raises(ValueError, match="outputs = 'wrapped'"):
    unwrapped([[1], [2, 3]], False, "wrapped")


# ---------------------------------------------------------------- options and files


def test_tests_that_are_kept_are_spread_evenly():
  items = list(range(10))
  assert all(spread(items, count) == items for count in (0, 10, 11))
  assert spread(items, 1) == [9] and spread(items, 2) == [0, 9] and spread(items, 4) == [0, 3, 6, 9]
  for n in range(2, 40):
    for k in range(2, n + 1):
      kept = spread(list(range(n)), k)
      gaps = [b - a for a, b in itertools.pairwise(kept)]
      assert len(kept) == k and kept[0] == 0 and kept[-1] == n - 1
      assert min(gaps) > 0 and max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize(
  "options",
  [{"max_tests": -1}, {"max_tests": 2.0}, {"time_limit_s": -1.0}, {"outputs": "both"}],
)
def test_wrong_options_are_named(options):
  with pytest.raises(ValueError, match=next(iter(options))):
    Options(**options)
  with pytest.raises(ValueError, match=next(iter(options))):
    TASKS["jsonl"](TaskConfig(name="jsonl", path="x.jsonl", options=options), 0)


def write(path, rows):
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return str(path)


def question(i, given, **fields):
  return taco(given, **{"question": f"Question {i}", **fields})


GOOD = {"inputs": ["1 2", "3 4", "5 6"], "outputs": ["3", "7", "11"]}


@needs_sandbox
def test_a_file_of_code_rows(tmp_path):
  own = {"prompt": "own", "verifier": "code", "tests": json.dumps(
    {"asserts": ["assert f(1)", "assert f(2)", "assert f(3)"], "time_limit_s": 1}
  )}  # fmt: skip
  rows = [question(0, GOOD), question(1, {}), live(cases("stdin", ("1", "1"))), own]
  rows += [question(2, {"inputs": ["1"], "outputs": []}), question(3, {})]
  path = write(tmp_path / "code.jsonl", rows)
  options = {"max_tests": 2, "time_limit_s": 7.0}
  task = TASKS["jsonl"](TaskConfig(name="jsonl", path=path, eval_path=path, options=options), 0)
  first, second, third = task.train
  assert [case["stdin"] for case in first["tests"]["stdin_stdout"]] == ["1 2", "5 6"]
  assert len(second["tests"]["stdin_stdout"]) == 1 and second["id"] == "abc_1"
  assert third["tests"]["asserts"] == ["assert f(1)", "assert f(3)"]
  assert [r["tests"]["time_limit_s"] for r in task.train] == [7.0, 7.0, 1]
  assert task.counts == {
    "rows of code.jsonl without tests": 2,
    "rows of code.jsonl with unequal numbers of inputs and outputs": 1,
    "tests over task.options max_tests = 2": 2,
    "evaluation problems that training draws too: eval_path is path": 3,
  }


@needs_sandbox
def test_a_malformed_code_row_stops_with_its_line(tmp_path):
  path = write(tmp_path / "code.jsonl", [question(0, GOOD), live("[3]")])
  with pytest.raises(ValueError, match=r"code\.jsonl line 2: public_test_cases: a list of"):
    TASKS["jsonl"](TaskConfig(name="jsonl", path=path), 0)


@needs_sandbox
def test_parquet_rows_are_the_same(tmp_path):
  import pyarrow
  import pyarrow.parquet

  rows = [question(i, GOOD) for i in range(3)]
  pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "code.parquet")
  tasks = [
    TASKS["jsonl"](TaskConfig(name="jsonl", path=path, eval_path=path), 0)
    for path in (write(tmp_path / "code.jsonl", rows), str(tmp_path / "code.parquet"))
  ]
  assert list(tasks[0].train) == list(tasks[1].train) and len(tasks[0].train) == 3


@needs_sandbox
def test_programs_are_graded_by_these_tests():
  record = convert(
    live(
      cases("functional", ("[1, 2]\n3", "6")),
      metadata='{"func_name": "add"}',
      starter_code=STARTER,
    ),
    Options(),
  )
  body = STARTER + "return sum(a) + b + len(Counter()) + pow(2, 3, 8)"
  assert code(f"```python\n{body}\n```", record).reward == 1.0
  assert code(body.replace("+ b", "- b"), record).reward == 0.0
  record = convert(taco(GOOD), Options())
  assert code(record["solution"], record).reward == 1.0
  assert code("print(3)", record).reward == 0.0
