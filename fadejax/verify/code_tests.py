"""The verifier `code`: Python programs, graded by asserts, by calls, or by stdin and stdout.

`tests` of the problem record is one of

    {"asserts": ["assert add(2, 3) == 5", …], "setup": "…", "functions": ["add"]}
    {"function": "add", "calls": [{"args": [2, 3], "expected": 5}, …]}
    {"stdin_stdout": [{"stdin": "2 3\\n", "stdout": "5\\n"}, …], "float_tol": 1e-6}
    {"stdin_stdout": […], "checker": "def check(stdin, output, expected): …"}

and may hold `"score": "share"` (the share of tests passed, instead of all or nothing) and
`"time_limit_s"` (CPU seconds for all tests, 5). The program is the completion's last fenced block,
else the whole completion; `prefix` of the record is put in front of it. Asserts run in a judge
process apart from the program; expected values never enter the program's process.
"""

from __future__ import annotations

import builtins
import dataclasses
import json
import math
import re
import reprlib
import symtable
import textwrap
import time
from collections.abc import Callable
from typing import Any

from fadejax.verify import kept, sandbox
from fadejax.verify.code_output import FLOAT_TOLERANCE, same_output
from fadejax.verify.inside import plain
from fadejax.verify.sandbox import Limits, Sandbox, Stopped
from fadejax.verify.verdict import ProblemError, Verdict, after_thinking, field, no_answer

# What the judge may be told, and of which type.
ANSWER: dict[str, type] = {
  "value": bytes, "raise": str, "name": str, "text": str, "not_plain": str, "found": dict,
}  # fmt: skip
DIGITS = 8192  # bytes of an integer that is compared in this process
CALLS = 100_000  # questions that one set of tests may ask
QUESTIONS_MB = 64.0  # of all of them; a program's answers are bounded apart
FORMS = ("asserts", "calls", "stdin_stdout")
PYTHON = ("python", "py", "python3")
# Modules that tests may use without importing them.
MODULES = (
  "bisect", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq",
  "itertools", "json", "math", "operator", "random", "re", "string",
)  # fmt: skip
_FENCE = re.compile(
  # `*+`: a long first line is read in one way only.
  r"^[ \t]*+(`{3,}+|~{3,}+)[ \t]*+(\w*+)[^\n`]*+\n(.*?)(?:^[ \t]*+\1[ \t]*+$|\Z)",
  re.M | re.S,
)
_FAULT = "the tests are at fault: "


def program_of(completion: str) -> str | None:
  """The program in a completion; None if there is none.

  The last fenced block that says it is Python, else the last that says nothing, else, where there
  is no block at all, the whole completion.
  """
  text = after_thinking(completion)
  if text is None:
    return None
  blocks = [(m[2].lower(), m[3]) for m in _FENCE.finditer(text.replace("\r\n", "\n"))]
  tagged = [body for tag, body in blocks if tag in PYTHON]
  bare = [body for tag, body in blocks if not tag]
  program = textwrap.dedent((tagged or bare or [""])[-1]) if blocks else text
  return program if program.strip() else None


def called(tests: dict[str, Any]) -> list[str]:
  """The names that the asserts take from the program: `functions`, else the one free name.

  Raises:
    ValueError: they do not compile, or it is not clear which names are the program's to give. A
      program that may define whatever its tests use (a helper, `isclose`) could pass them by that.
  """
  if "functions" in tests:
    return list(tests["functions"])
  used: set[str] = set()
  bound = set(vars(builtins)) | set(MODULES)

  def walk(table: symtable.SymbolTable) -> None:
    for symbol in table.get_symbols():
      if table.get_type() == "module" or symbol.is_global():
        own = symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()
        (bound if own else used).add(symbol.get_name())
    for child in table.get_children():
      walk(child)

  try:
    walk(symtable.symtable("\n".join([tests.get("setup", ""), *tests["asserts"]]), "tests", "exec"))
  except (SyntaxError, ValueError) as error:
    raise ValueError(f"the tests do not compile: {error}") from error
  names = sorted(used - bound)
  if len(names) != 1:
    raise ValueError(
      f"the asserts use {names or 'no name'} that neither they nor `setup` define: say in "
      "'functions' which the program is to define, and define the others in 'setup'"
    )
  return names


def form_of(problem: dict[str, Any]) -> tuple[str, dict[str, Any]]:
  """(form, tests) of a record.

  Raises:
    ProblemError: no tests, an empty list of them, or not one of the three forms.
  """
  tests = field(problem, "tests", "code")
  if isinstance(tests, str):
    try:
      tests = json.loads(tests)
    except ValueError as error:
      raise ProblemError(f"{_where(problem)} are not JSON: {error}") from error
  where = _where(problem)
  if not isinstance(tests, dict):
    raise ProblemError(f"{where}: an object is wanted, got {type(tests).__name__}")
  forms = [form for form in FORMS if form in tests]
  if len(forms) != 1:
    raise ProblemError(f"{where}: one of {', '.join(FORMS)} is wanted, got {sorted(tests)}")
  cases = tests[forms[0]]
  # all() over no tests is True: an empty list must never be full marks.
  if not isinstance(cases, list) or not cases:
    raise ProblemError(f"{where}: {forms[0]} must be a list with at least one test")
  for i, case in enumerate(cases):
    if fault := _fault_of_case(forms[0], case):
      raise ProblemError(f"{where}.{forms[0]}[{i}]: {fault}, got {case!r:.80}")
  if forms[0] == "asserts":
    functions = tests.get("functions", ["f"])
    if not (isinstance(functions, list) and functions and all(map(_is_text, functions))):
      raise ProblemError(f"{where}: functions must be a list of names, got {functions!r:.80}")
    if not isinstance(tests.get("setup", ""), str):
      raise ProblemError(f"{where}: setup must be text")
    try:
      called(tests)
    except ValueError as error:
      raise ProblemError(f"{where}: {error}") from error
  tolerance = tests.get("float_tol", 0.0)
  if not _is_number(tolerance) or not 0 <= tolerance < math.inf:
    raise ProblemError(f"{where}: float_tol must be a number of at least 0, got {tolerance!r:.80}")
  _limits(problem, tests)
  if forms[0] == "calls" and not isinstance(tests.get("function"), str):
    raise ProblemError(f"{where}: calls need 'function', the name of what is called")
  if fault := _fault_of_checker(forms[0], tests.get("checker")):
    raise ProblemError(f"{where}: {fault}")
  if tests.get("score", "all") not in ("all", "share"):
    raise ProblemError(f"{where}: score must be 'all' or 'share', got {tests['score']!r}")
  return forms[0], tests


def _where(problem: dict[str, Any]) -> str:
  return f"problem {problem.get('id', '?')!r}: tests"


def _fault_of_case(form: str, case: Any) -> str:
  """What is wrong with one test, or ""."""
  if form == "asserts":
    return "" if isinstance(case, str) else "text is wanted"
  wanted = ("args", "expected") if form == "calls" else ("stdin", "stdout")
  missing = [key for key in wanted if not isinstance(case, dict) or key not in case]
  if missing:
    return f"{missing} wanted"
  if form == "calls" and not (
    isinstance(case["args"], list) and isinstance(case.get("kwargs", {}), dict)
  ):
    return "args must be a list and kwargs an object"
  if form == "stdin_stdout" and not all(isinstance(case[key], str) for key in wanted):
    return "stdin and stdout must be text"
  return ""


def _fault_of_checker(form: str, checker: Any) -> str:
  """What is wrong with a checker, or ""; None is none."""
  if checker is None:
    return ""
  if form != "stdin_stdout" or not isinstance(checker, str):
    return "checker must be Python source, beside stdin_stdout"
  try:
    known = "check" in symtable.symtable(checker, "checker", "exec").get_identifiers()
  except (SyntaxError, ValueError) as error:
    return f"the checker does not compile: {error}"
  return "" if known else "the checker defines no function check(stdin, output, expected)"


def _limits(problem: dict[str, Any], tests: dict[str, Any]) -> Limits:
  limits = Limits()
  try:
    return dataclasses.replace(
      limits,
      cpu_s=float(tests.get("time_limit_s", limits.cpu_s)),
      memory_mb=int(tests.get("memory_mb", limits.memory_mb)),
    )
  except (TypeError, ValueError, OverflowError) as error:
    raise ProblemError(f"{_where(problem)}: time_limit_s, memory_mb: {error}") from error


def code(completion: str, problem: dict[str, Any]) -> Verdict:
  """Grades a program; see the module's docstring.

  `runtime_error` where the program fails, dies or returns what is not plain data, `timeout` and
  `memory` where it goes over its limits; a `grader_error` where the tests themselves are at fault
  or no sandbox can be had.
  """
  form, tests = form_of(problem)
  if reason := sandbox.why_not():
    raise ProblemError(reason)
  sandbox.adopt_orphans()
  program = program_of(completion)
  if program is None:
    return no_answer("no program")
  program = problem.get("prefix", "") + program
  grade = {"asserts": _by_asserts, "calls": _by_calls, "stdin_stdout": _by_stdout}[form]
  try:
    passed, total, status, detail = grade(program, tests, _limits(problem, tests))
  except Stopped as stopped:
    return Verdict(0.0, stopped.status, stopped.detail)
  share = passed / total
  if tests.get("score", "all") == "share" and share > 0:
    return Verdict(share, "ok", detail or f"{passed} of {total} tests")
  if share == 1.0:
    return Verdict(1.0, "ok", f"{total} tests")
  return Verdict(0.0, status, detail)


def _describe(reply: dict[str, Any]) -> str:
  return f"{reply.get('name', 'error')}: {reply.get('text', '')}"[:300]


def _start(box: Sandbox, program: str) -> str:
  """Runs the program's body; returns what it raised, or ""."""
  box.start({"program": program, "form": "calls"})
  reply = box.receive()
  return "" if reply.get("ready") is True else _describe(reply)


Result = tuple[int, int, str, str]  # tests passed, of, status of a failure, its detail


def _each(
  box: Sandbox,
  cases: list[dict[str, Any]],
  ask: Callable[[dict[str, Any]], None],
  fault: Callable[[int, dict[str, Any], dict[str, Any]], tuple[str, str] | None],
  share: bool,
) -> Result:
  """One answer of the program a test; the first failure ends it, unless the share counts.

  Where the share counts, a program that is stopped while it answers keeps what it has passed.

  Args:
    box: the program's.
    cases: the tests.
    ask: sends the question of a test, where there is one.
    fault: (index, test, answer) -> (status, detail), None where the test is passed.
    share: whether the share counts.
  """
  passed, status, detail = 0, "ok", ""
  for i, case in enumerate(cases):
    ask(case)
    try:
      reply = box.receive()
    except Stopped as stopped:
      if not share:
        raise
      return passed, len(cases), stopped.status, stopped.detail
    found = fault(i, case, reply)
    if found is None:
      passed += 1
      continue
    status, detail = found
    if not share:
      break
  return passed, len(cases), status, detail


def _by_calls(program: str, tests: dict[str, Any], limits: Limits) -> Result:
  """Calls with arguments; results are compared here, with no object of the program's in sight."""
  calls = tests["calls"]
  expected = sum(len(plain.encode(call["expected"])) for call in calls) / 2**20
  limits = dataclasses.replace(limits, output_mb=limits.output_mb + 2 * expected)

  def ask(call: dict[str, Any]) -> None:
    args, kwargs = plain.encode(tuple(call["args"])), plain.encode(call.get("kwargs", {}))
    box.send({"call": tests["function"], "args": args, "kwargs": kwargs})

  def fault(i: int, call: dict[str, Any], reply: dict[str, Any]) -> tuple[str, str] | None:
    if "value" not in reply:
      return "runtime_error", f"call {i}: {reply.get('not_plain') or _describe(reply)}"
    value = _opened(reply["value"])
    if _same(value, call["expected"], tests.get("float_tol")):
      return None
    return "ok", f"call {i}: {_shown(value)}, expected {_shown(call['expected'])}"

  with Sandbox("candidate", limits) as box:
    if error := _start(box, program):
      return 0, len(calls), "runtime_error", error
    return _each(box, calls, ask, fault, tests.get("score") == "share")


def _opened(value: Any) -> Any:
  """A result as plain data, within what this process can compare and print in no time."""
  try:
    if not isinstance(value, bytes):
      raise ValueError("the program broke the channel")
    return plain.decode(value, digits=DIGITS, keys=sandbox.KEYS)
  except ValueError as error:
    raise Stopped("runtime_error", str(error)) from error


def _shown(value: Any) -> str:
  try:
    return reprlib.repr(value)
  except ValueError:  # Python prints no integer of more than 4300 digits
    return f"{type(value).__name__} with an integer of too many digits"


def _same(value: Any, expected: Any, tolerance: float | None) -> bool:
  """`same`, where nothing that a program returns can break the comparison."""
  try:
    return same(value, expected, tolerance)
  except (ArithmeticError, RecursionError, TypeError, ValueError):
    return False


def same(value: Any, expected: Any, tolerance: float | None = None) -> bool:
  """Python's equality, with tuples and lists alike (JSON has lists only).

  Args:
    value: what the program returned, plain data.
    expected: from the record.
    tolerance: absolute or relative, of floats; None: exact.
  """
  if isinstance(value, list | tuple) and isinstance(expected, list | tuple):
    return len(value) == len(expected) and all(
      same(v, e, tolerance) for v, e in zip(value, expected, strict=True)
    )
  if isinstance(value, dict) and isinstance(expected, dict):
    # JSON's keys are text.
    names = {str(key): v for key, v in value.items()}
    wanted = {str(key): e for key, e in expected.items()}
    return (
      len(names) == len(value)
      and names.keys() == wanted.keys()
      and all(same(names[k], wanted[k], tolerance) for k in wanted)
    )
  # Integers are exact: only an expected float may be missed by a little.
  if tolerance is not None and isinstance(expected, float) and _is_number(value):
    return math.isclose(value, expected, rel_tol=tolerance, abs_tol=tolerance)
  return bool(value == expected)


def _is_text(value: Any) -> bool:
  return isinstance(value, str)


def _is_number(value: Any) -> bool:
  return isinstance(value, int | float) and not isinstance(value, bool)


Refuse = Callable[[Sandbox, int, bytes], str]  # (program's, test, output) -> its fault, or ""


def _by_stdout(program: str, tests: dict[str, Any], limits: Limits) -> Result:
  """The whole program once a test, on its stdin; a checker or a comparison reads its stdout."""
  cases = tests["stdin_stdout"]
  if tests.get("checker") is not None:
    return _by_checker(program, tests, limits)
  tolerance, cap = tests.get("float_tol", FLOAT_TOLERANCE), _cap(cases)

  def refuse(box: Sandbox, i: int, output: bytes) -> str:
    if len(output) > cap:  # what is cut off must not make it right
      return f"over {cap} bytes of output"
    expected = cases[i]["stdout"]
    if same_output(output.decode("utf-8", "replace"), expected, tolerance):
      return ""
    return f"{output[-100:]!r}, expected {expected[-100:]!r}"

  return _outputs(program, tests, limits, refuse)


def _by_checker(program: str, tests: dict[str, Any], limits: Limits) -> Result:
  """The same by a checker of the tests' own, in a judge's process: see `inside/judge.py::check`."""
  cases = tests["stdin_stdout"]
  cap = _cap(cases)
  task = {"checker": tests["checker"], "cases": [(c["stdin"], c["stdout"]) for c in cases]}

  def refuse(box: Sandbox, i: int, output: bytes) -> str:
    if len(output) > cap:  # what is cut off must not make it right
      return f"over {cap} bytes of output"
    asked, began, box.began = time.monotonic(), box.began, math.inf  # the program's clock stops
    try:
      judge.send({"test": i, "output": output.decode("utf-8", "replace")})
      fault = judge.receive(watch=(box,)).get("fault")
    except Stopped as stopped:
      raise Stopped(stopped.status, f"in the checker: {stopped.detail}") from stopped
    box.began = began + time.monotonic() - asked
    return "" if fault == "" else f"the checker {fault} on {output[-100:]!r}"

  with kept.judge(_patient(limits), task) as judge:
    try:
      said = judge.receive()
    except Stopped as stopped:
      detail = f"the checker on expected outputs: {stopped.detail}"
      raise ProblemError(_FAULT + detail) from stopped
    if "report" in said:
      raise ProblemError(_FAULT + said["report"]["detail"])
    result = _outputs(program, tests, limits, refuse)
    judge.send({"done": True})
    judge.receive()
  return result


def _cap(cases: list[dict[str, Any]]) -> int:
  """Bytes of one output that are read."""
  return max(len(case["stdout"].encode()) for case in cases) * 2 + 2**16


def _outputs(program: str, tests: dict[str, Any], limits: Limits, refuse: Refuse) -> Result:
  """Runs the program on every input, until an output is refused."""
  cases, cap = tests["stdin_stdout"], _cap(tests["stdin_stdout"])
  inputs = [case["stdin"] for case in cases]
  largest = max(len(text.encode()) for text in inputs) + cap
  limits = dataclasses.replace(
    limits,
    output_mb=limits.output_mb + len(cases) * cap / 2**20,
    file_mb=max(limits.file_mb, -(-largest // 2**20)),
  )

  def fault(i: int, case: dict[str, Any], reply: dict[str, Any]) -> tuple[str, str] | None:
    if "raise" in reply:  # it does not compile, so that no test runs
      raise Stopped("runtime_error", _describe(reply))
    try:
      exit_code, output = reply["status"], reply["output"]
      if type(exit_code) is not int or type(output) is not bytes:
        raise TypeError("a status and bytes are wanted")
    except (KeyError, TypeError) as error:
      raise Stopped("runtime_error", "the program broke the channel") from error
    if exit_code != 0:
      return "runtime_error", f"test {i}: exit code {exit_code}"
    why = refuse(box, i, output)
    return ("ok", f"test {i}: {why}") if why else None

  with Sandbox("candidate", limits) as box:
    box.start({"program": program, "form": "stdio", "inputs": inputs, "cap": cap})
    return _each(box, cases, lambda case: None, fault, tests.get("score") == "share")


def _patient(limits: Limits) -> Limits:
  """A judge's: it waits while the program works, so that its clock must not run out first."""
  return dataclasses.replace(limits, cpu_s=3 * limits.cpu_s + 5, output_mb=QUESTIONS_MB)


def _by_asserts(program: str, tests: dict[str, Any], limits: Limits) -> Result:
  """The tests in a judge's process, the program in another; questions pass through here."""
  asserts = tests["asserts"]
  task = {
    "tests": asserts,
    "setup": tests.get("setup", ""),
    "count": tests.get("score") == "share",
    "functions": called(tests),
    "modules": list(MODULES),
  }
  with Sandbox("candidate", limits) as box:
    if error := _start(box, program):
      return 0, len(asserts), "runtime_error", error
    with kept.judge(_patient(limits), task) as judge:
      report = _relay(box, judge)
  fault = report["fault"]
  if fault == "tests":
    raise ProblemError(_FAULT + report["detail"])
  status = "ok" if fault in ("", "wrong") else "runtime_error"
  return report["passed"], len(asserts), status, report["detail"]


def _relay(box: Sandbox, judge: Sandbox) -> dict[str, Any]:
  """Carries questions to the program and answers to the judge, until its report.

  Raises:
    Stopped: the program went over a limit or died, or what it returned makes the tests do so.
  """
  for _ in range(CALLS):
    try:
      question = judge.receive(watch=(box,))
    except Stopped as stopped:
      raise Stopped(stopped.status, f"in the tests: {stopped.detail}") from stopped
    if "report" in question:
      return question["report"]
    box.send(question)
    answer = box.receive()
    kept = {key: answer[key] for key, kind in ANSWER.items() if isinstance(answer.get(key), kind)}
    found = kept.get("found", {}).values()
    if not kept or not all(value is None or type(value) is bytes for value in found):
      raise Stopped("runtime_error", "the program broke the channel")
    # Values stay closed here: the judge opens them, behind its own wall.
    judge.send({"text": "", "name": "", **kept})
  raise Stopped("timeout", f"in the tests: more than {CALLS} calls")
