"""Rows of published code data sets as problem records: LiveCodeBench, and TACO with APPS.

What their fields mean is taken from the evaluation code that comes with them; docs/data.md says
which rule is ours. A row that such a set is known to hold and that nobody can grade (no tests, say)
is a `LeftOut`, which the caller counts; anything else that is wrong is a ValueError.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import pickletools
import re
import zlib
from collections.abc import Sequence
from typing import Any

from fadejax.data.records import Record

PROMPT = """{question}

{wanted}
Answer with the whole program in one fenced block of Python."""
STARTER = "Use this starter code, its names as they are:\n```python\n{starter}\n```"
FUNCTION = "Write a function `{function}`. It is called; it reads no input and prints nothing."
STDIN = "Write a program that reads standard input and prints its answer to standard output."
# In front of programs whose functions are called: such starter code takes `List` for granted, and
# the published evaluations import about these. The builtins come back last (math has a `pow`).
PRELUDE = """from typing import *
from collections import *
from functools import *
from itertools import *
from heapq import *
from bisect import *
from math import *
from builtins import *
import bisect, collections, copy, functools, heapq, itertools, math, operator, random, re
import string, sys
sys.setrecursionlimit(50_000)
"""
UNPACKED = 512 * 2**20  # bytes of one row's packed tests
DIGITS = 4300  # of an integer in a row: Python reads no longer one from text
FLOAT_TOLERANCE = 1e-6  # of expected floats that a function returns; integers are exact
OUTPUTS = ("auto", "wrapped", "plain")
FORMS = ("asserts", "calls", "stdin_stdout")  # of verify/code_tests.py, whose lists can be cut
_READ = (
  "question", "question_content", "question_id", "problem_id", "starter_code", "metadata",
  "public_test_cases", "private_test_cases", "input_output", "solutions",
)  # fmt: skip
# Opcodes of a pickle that holds one text, in every protocol.
_TEXT = ("UNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINUNICODE")
_AROUND = ("PROTO", "FRAME", "PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE", "STOP")


class LeftOut(ValueError):
  """A row that cannot be graded, as published sets hold some; `reason` is the same for its kind."""

  def __init__(self, reason: str, detail: str = ""):
    super().__init__(f"{reason}{': ' if detail else ''}{detail}")
    self.reason = reason


@dataclasses.dataclass(frozen=True)
class Options:
  """Settings of code problems in a file.

  Attributes:
    max_tests: tests kept of a problem; 0: all.
    time_limit_s: CPU seconds for all tests of a problem that says none itself; 0: the verifier's.
    outputs: whether outputs of TACO and APPS calls are wrapped: "auto", "wrapped" or "plain".

  Raises:
    ValueError: names the option.
  """

  max_tests: int = 0
  time_limit_s: float = 0.0
  outputs: str = "auto"

  def __post_init__(self) -> None:
    if type(self.max_tests) is not int or self.max_tests < 0:
      raise ValueError(f"task.options: max_tests must be 0 (all) or more, got {self.max_tests!r}")
    if type(self.time_limit_s) not in (int, float) or not 0 <= self.time_limit_s < 1e6:
      raise ValueError(
        "task.options: time_limit_s must be 0 (the verifier's own) or more seconds, got "
        f"{self.time_limit_s!r}"
      )
    if self.outputs not in OUTPUTS:
      raise ValueError(
        f"task.options: outputs must be one of {', '.join(OUTPUTS)}, got {self.outputs!r}"
      )


def is_known(row: Record) -> bool:
  """Whether a row is of LiveCodeBench, or of TACO or APPS."""
  live = "question_content" in row and "public_test_cases" in row
  return "prompt" not in row and (live or ("question" in row and "input_output" in row))


def convert(row: Record, options: Options) -> Record:
  """Such a row as fields of a problem record: prompt, verifier, tests, and what it has of id,
  prefix and solution. Fields that are not read stay.

  Raises:
    LeftOut: no tests, or tests that no program can be graded by.
    ValueError: malformed; says which field.
  """
  starter = row.get("starter_code") or ""
  if not isinstance(starter, str):
    raise ValueError(f"starter_code is not text: {starter!r:.80}")
  live = "question_content" in row
  tests = _live_code_bench(row) if live else _taco(row, starter, options.outputs)
  name = "question_content" if live else "question"
  question = row.get(name)
  if not isinstance(question, str) or not question.strip():
    raise ValueError(f"{name} is missing, empty or not text")
  if "stdin_stdout" in tests and re.search(r"^[ \t]*def[ \t]", starter, re.MULTILINE):
    raise LeftOut("with starter code of a function, but tests on stdin and no function's name")
  wanted = STDIN if "stdin_stdout" in tests else FUNCTION.format(function=tests["function"])
  if starter.strip():
    wanted = STARTER.format(starter=starter.rstrip())
  record = {key: value for key, value in row.items() if key not in _READ and value is not None}
  key = row.get("question_id" if live else "problem_id")
  if key is not None:
    record.setdefault("id", key)
  record.setdefault("verifier", "code")
  if (solution := _first_solution(row)) is not None:
    record["solution"] = solution
  if "function" in tests:
    record["prefix"] = PRELUDE
  prompt = PROMPT.format(question=question.strip(), wanted=wanted)
  return {**record, "prompt": prompt, "tests": tests}


def adjust(record: Record, options: Options) -> int:
  """Applies max_tests and time_limit_s to the tests of any code problem; returns how many it cut.

  The tests that stay are spread evenly over the list, its first and its last among them: sets
  begin with the examples of the prompt and end with the large inputs.

  Args:
    record: whose tests the verifier has accepted. Changed in place.
    options: the task's.
  """
  tests = record["tests"]
  tests = dict(json.loads(tests) if isinstance(tests, str) else tests)
  if options.time_limit_s:
    tests.setdefault("time_limit_s", options.time_limit_s)
  form = next(form for form in FORMS if form in tests)
  kept = spread(tests[form], options.max_tests)
  cut = len(tests[form]) - len(kept)
  record["tests"] = {**tests, form: kept}
  return cut


def spread(items: list[Any], count: int) -> list[Any]:
  """`count` of the items, evenly spaced with both ends (one: the last); all where count is 0."""
  if not 0 < count < len(items):
    return items
  if count == 1:
    return items[-1:]
  return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


# ---------------------------------------------------------------- LiveCodeBench


def _live_code_bench(row: Record) -> Record:
  """Its public tests, then its private ones, in a form of verify/code_tests.py."""
  cases = [*_cases(row, "public_test_cases"), *_cases(row, "private_test_cases")]
  if not cases:
    raise LeftOut("without tests")
  kinds = {case["testtype"] for case in cases}
  if kinds == {"stdin"}:
    return _stdin_stdout([case["input"] for case in cases], [case["output"] for case in cases])
  if kinds != {"functional"}:
    raise ValueError(f"testtype: all 'stdin' or all 'functional' is wanted, got {sorted(kinds)}")
  metadata = _json(row.get("metadata") or "{}", "metadata")
  function = metadata.get("func_name") if isinstance(metadata, dict) else None
  if not isinstance(function, str) or not function:
    raise ValueError("metadata: functional tests need 'func_name'")
  calls = [_call_of_text(case["input"], case["output"]) for case in cases]
  return _calls(function, calls)


def _cases(row: Record, name: str) -> list[Record]:
  """One of the two lists of test cases; text that does not begin a list is packed."""
  value = row.get(name)
  if value is None or value == "":
    return []
  if isinstance(value, str) and not value.lstrip().startswith("["):
    value = unpacked(value, name)
  cases = _json(value, name)
  for case in cases if isinstance(cases, list) else [None]:
    if not isinstance(case, dict) or not all(
      isinstance(case.get(key), str) for key in ("input", "output", "testtype")
    ):
      raise ValueError(f"{name}: a list of {{input, output, testtype}} is wanted, got {case!r:.80}")
  return list(cases)


def unpacked(text: str, name: str, limit: int = UNPACKED) -> str:
  """The JSON text in base64(zlib(pickle(JSON text))), as LiveCodeBench packs its private tests.

  A pickle is a program for whoever loads it. This one is not loaded: its opcodes are listed, and
  one that holds anything but one text is refused.

  Raises:
    LeftOut: more than `limit` bytes come out of the compression.
    ValueError: not of this form; names the field.
  """
  try:
    stream = zlib.decompressobj()
    data = stream.decompress(base64.b64decode(text.strip(), validate=True), limit + 1)
    if len(data) > limit:
      raise LeftOut(f"with {name} of more than {limit / 2**20:g} MiB")
    if not stream.eof:
      raise ValueError("compressed data is cut off")
    return _pickled_text(data)
  except LeftOut:
    raise
  except (ValueError, zlib.error) as error:
    raise ValueError(f"{name} is neither JSON nor base64 of zlib of a pickled text: {error}") from (
      error
    )


def _pickled_text(data: bytes) -> str:
  texts = []
  for opcode, argument, _ in pickletools.genops(data):
    if opcode.name in _TEXT:
      texts.append(argument)
    elif opcode.name not in _AROUND:
      raise ValueError(f"the pickle does more than hold a text ({opcode.name})")
  if len(texts) != 1 or not isinstance(texts[0], str):
    raise ValueError(f"the pickle holds {len(texts)} texts instead of one")
  return texts[0]


# ---------------------------------------------------------------- TACO and APPS


def _taco(row: Record, starter: str, wrapping: str) -> Record:
  """The tests in `input_output`, in a form of verify/code_tests.py."""
  given = _json(row.get("input_output") or "{}", "input_output")
  if not isinstance(given, dict):
    raise ValueError(f"input_output: an object is wanted, got {type(given).__name__}")
  inputs, outputs = given.get("inputs") or [], given.get("outputs") or []
  if not isinstance(inputs, list) or not isinstance(outputs, list):
    raise ValueError("input_output: inputs and outputs must be lists")
  if not inputs and not outputs:
    raise LeftOut("without tests")
  if len(inputs) != len(outputs):
    raise LeftOut("with unequal numbers of inputs and outputs", f"{len(inputs)}, {len(outputs)}")
  function = given.get("fn_name")
  if function is None:
    return _stdin_stdout(inputs, outputs)
  if not isinstance(function, str) or not function:
    raise ValueError(f"input_output: fn_name is no name: {function!r:.80}")
  if all(isinstance(value, str) for value in [*inputs, *outputs]):
    return _calls(function, [_call_of_text(i, o) for i, o in zip(inputs, outputs, strict=True)])
  if not all(isinstance(arguments, list) for arguments in inputs):
    raise LeftOut("with arguments that are no list")
  outputs = unwrapped(outputs, returns_list(starter, function), wrapping)
  return _calls(
    function, [{"args": i, "expected": o} for i, o in zip(inputs, outputs, strict=True)]
  )


def returns_list(starter: str, function: str) -> bool:
  """Whether starter code annotates the function as returning a list or a tuple."""
  signature = rf"def[ \t]+{re.escape(function)}\b[^\n]*->[ \t]*(typing\.)?(list|tuple)\b"
  return re.search(signature, starter, re.IGNORECASE) is not None


def unwrapped(outputs: Sequence[Any], list_wanted: bool, wrapping: str) -> list[Any]:
  """What a function is to return, in each test of one problem.

  Some problems of TACO and APPS put every result into a list of its own, others do not, and no
  field says which. "auto": a problem's results are wrapped where all of them are lists of one
  element, and the starter code does not say that the function returns a list.

  Raises:
    ValueError: `wrapping` is "wrapped" and a result is not.
  """
  single = all(isinstance(output, list) and len(output) == 1 for output in outputs)
  if wrapping == "wrapped" and not single:
    raise ValueError("task.options outputs = 'wrapped', but an output is no list of one element")
  if wrapping == "wrapped" or (wrapping == "auto" and single and not list_wanted):
    return [output[0] for output in outputs]
  return list(outputs)


def _first_solution(row: Record) -> str | None:
  solutions = _json(row.get("solutions") or "[]", "solutions")
  if not isinstance(solutions, list):
    raise ValueError(f"solutions: a list is wanted, got {type(solutions).__name__}")
  if not solutions:
    solution = row.get("solution")
    return solution if isinstance(solution, str) else None
  if not isinstance(solutions[0], str):
    raise ValueError(f"solutions: text is wanted, got {solutions[0]!r:.80}")
  return solutions[0]


# ---------------------------------------------------------------- both


def _stdin_stdout(inputs: Sequence[Any], outputs: Sequence[Any]) -> Record:
  cases = [
    {"stdin": _lines(stdin), "stdout": _lines(stdout)}
    for stdin, stdout in zip(inputs, outputs, strict=True)
  ]
  return {"stdin_stdout": cases}


def _lines(value: Any) -> str:
  """Text, or a list of lines."""
  lines = value if isinstance(value, list) else [value]
  if not all(isinstance(line, str) for line in lines):
    raise LeftOut("with input or output that is no text")
  return "\n".join(lines)


def _calls(function: str, calls: list[Record]) -> Record:
  return {"function": function, "calls": calls, "float_tol": FLOAT_TOLERANCE}


def _call_of_text(given: str, wanted: str) -> Record:
  """One JSON value a line for each argument, and one for the result."""
  try:
    arguments = [_json(line, "an argument") for line in given.split("\n") if line.strip()]
    return {"args": arguments, "expected": _json(wanted, "the result")}
  except LeftOut:
    raise
  except ValueError as error:
    raise LeftOut("with arguments or results that are not JSON", str(error)) from error


def _json(value: Any, name: str) -> Any:
  """The value of JSON text; what is no text is a value already.

  Raises:
    LeftOut: an integer too long for Python.
    ValueError: no JSON.
  """
  if not isinstance(value, str):
    return value
  try:
    return json.loads(value, parse_int=_integer)
  except LeftOut:
    raise
  except (ValueError, RecursionError) as error:
    raise ValueError(f"{name} is not JSON: {error}") from error


def _integer(text: str) -> int:
  if len(text) > DIGITS:
    raise LeftOut(f"with an integer of more than {DIGITS} digits")
  return int(text)
