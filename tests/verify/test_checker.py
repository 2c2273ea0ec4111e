"""Checkers of a problem's own, beside stdin and stdout: they run in the judge's process."""

from __future__ import annotations

import dataclasses
import os

import pytest

from fadejax.verify import check_problem, code_tests, kept, sandbox
from fadejax.verify.verdict import ProblemError

pytestmark = pytest.mark.skipif(sandbox.why_not() != "", reason=sandbox.why_not() or "there is one")

ANY_ORDER = """
def check(stdin, output, expected):
  return sorted(output.split()) == sorted(expected.split())
"""
# Any two different positive numbers with the sum that is asked for; `expected` is one such pair.
PAIR = """
def check(stdin, output, expected):
  a, b = map(int, output.split())
  return 0 < a != b > 0 and a + b == int(stdin)
"""
CASES = [("7", "3 4"), ("9", "1 8")]
RIGHT = "n = int(input())\nprint(n - 1, 1)\n"


def grade(program, checker, cases=CASES, **more):
  tests = {"stdin_stdout": [{"stdin": i, "stdout": o} for i, o in cases], "checker": checker}
  return code_tests.code(program, {"id": "p", "verifier": "code", "tests": {**tests, **more}})


@pytest.fixture
def short(monkeypatch):
  """A judge with 0.5 s of CPU time."""
  short = dataclasses.replace(sandbox.Limits(), cpu_s=0.5)
  monkeypatch.setattr(code_tests, "_patient", lambda limits: short)


@pytest.fixture(autouse=True)
def no_judge_is_kept():
  yield
  kept.drop()


def test_another_order_is_right_and_another_answer_is_not():
  verdict = grade("print(*input().split()[::-1])", ANY_ORDER, [("1 2 3", "1 2 3"), ("4", "4")])
  assert (verdict.reward, verdict.status, verdict.detail) == (1.0, "ok", "2 tests")
  # Without the checker that is wrong.
  assert grade("print(*input().split()[::-1])", None, [("1 2 3", "1 2 3")]).reward == 0.0
  verdict = grade("print(1, 2, 2)", ANY_ORDER, [("1 2 3", "1 2 3")])
  assert (verdict.reward, verdict.status) == (0.0, "ok")
  assert verdict.detail == "test 0: the checker says False on b'1 2 2\\n'"


def test_a_checker_reads_stdin_output_and_expected():
  assert grade(RIGHT, PAIR).reward == 1.0
  verdict = grade("input()\nprint(6, 1)", PAIR)
  assert verdict.reward == 0.0 and verdict.detail.startswith("test 1: the checker says False")
  same = "def check(stdin, output, expected):\n  return output.strip() == expected.strip()"
  assert grade("print({'7': '3 4', '9': '1 8'}[input()])", same).reward == 1.0


def test_share_of_the_tests():
  verdict = grade("input()\nprint(6, 1)", PAIR, score="share")
  assert (verdict.reward, verdict.status) == (0.5, "ok")
  # The second program ends with exit code 1, which no checker makes right.
  verdict = grade("n = int(input())\nprint(n - 1, 1)\nexit(n == 9)", PAIR, score="share")
  assert verdict.reward == 0.5


@pytest.mark.parametrize(
  ("printed", "detail"),
  [
    ("'six 1'", "the checker raised ValueError: invalid literal for int()"),
    ("'6'", "the checker raised ValueError: not enough values"),
    ("''", "the checker raised ValueError"),
    ("chr(0) + chr(0xd7ff)", "the checker raised ValueError"),
  ],
)
def test_output_that_makes_a_checker_raise_is_wrong(printed, detail):
  verdict = grade(f"print({printed})", PAIR)
  assert (verdict.reward, verdict.status) == (0.0, "ok")
  assert verdict.detail.startswith(f"test 0: {detail}")


@pytest.mark.parametrize(
  ("crash", "status"),
  [
    ("raise SystemExit(0)", "ok"),
    ("raise KeyboardInterrupt", "ok"),
    ("return check(stdin, output, expected)", "ok"),  # recursion
    ("return 1", "ok"),
    ("return None", "ok"),
    ("import os; os._exit(0)", "runtime_error"),
    ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "runtime_error"),
    ("x = [0] * 10**9; return True", "ok"),  # over the addresses that a judge may have
    ("\n    while True: pass", "timeout"),
  ],
)
def test_output_that_crashes_a_checker_earns_nothing(crash, status, short):
  checker = f"def check(stdin, output, expected):\n  if 'crash' in output: {crash}\n  return True"
  verdict = grade("print('crash')", checker)
  assert (verdict.reward, verdict.status) == (0.0, status)
  if status != "ok":
    assert verdict.detail.startswith("in the checker: ")
  assert status != "timeout" or "over 0.5 s of CPU time" in verdict.detail
  # And the next problem is none the worse.
  assert grade(RIGHT, PAIR).reward == 1.0


@pytest.mark.parametrize(
  ("checker", "detail"),
  [
    ("def check(stdin, output, expected):\n  return False", "test 0: the checker says False on"),
    ("def check(s, o, e):\n  return s != '9'", "test 1: the checker says False on the expected"),
    ("def check(s, o, e):\n  return 1", "test 0: the checker returned int, not a bool on"),
    ("def check(s, o, e):\n  pass", "test 0: the checker returned NoneType, not a bool on"),
    ("def check(s, o):\n  return True", "test 0: the checker raised TypeError"),
    ("def check(s, o, e):\n  raise SystemExit", "test 0: the checker raised SystemExit"),
    ("def check(s, o, e):\n  import os; os._exit(0)", "the checker on expected outputs: "),
    ("1 / 0\ndef check(s, o, e): pass", "the checker: ZeroDivisionError"),
    ("import numpy\ndef check(s, o, e): pass", "the checker: ModuleNotFoundError"),
    ("check\n", "the checker: NameError"),
    ("def f():\n  global check", "the checker: KeyError: 'check'"),
  ],
)
@pytest.mark.parametrize("program", [RIGHT, "print('wrong')"])
def test_a_checker_that_refuses_the_expected_output_is_the_tests_fault(checker, detail, program):
  with pytest.raises(ProblemError, match="the tests are at fault: ") as caught:
    grade(program, checker)
  assert str(caught.value).startswith(f"the tests are at fault: {detail}")


def test_a_checker_that_loops_on_the_expected_output_is_the_tests_fault(short):
  fault = "at fault: the checker on expected outputs: over 0.5 s of CPU time"
  with pytest.raises(ProblemError, match=fault):
    grade(RIGHT, "def check(s, o, e):\n  while True: pass")


@pytest.mark.parametrize(
  ("tests", "message"),
  [
    ({"checker": 3}, "checker must be Python source, beside stdin_stdout"),
    ({"checker": "def check("}, "the checker does not compile"),
    ({"checker": "def judge(s, o, e): pass"}, "defines no function check"),
    ({"checker": "def check\0"}, "the checker does not compile"),
  ],
)
def test_malformed_checkers_are_named(tests, message):
  problem = {"id": 1, "verifier": "code", "tests": {"stdin_stdout": [], **tests}}
  problem["tests"]["stdin_stdout"] = [{"stdin": "", "stdout": ""}]
  assert message in check_problem(problem)
  asserts = {"asserts": ["assert f(1)"], "checker": ANY_ORDER}
  assert "beside stdin_stdout" in check_problem({**problem, "tests": asserts})
  assert not check_problem({**problem, "tests": {**problem["tests"], "checker": None}})


def test_a_checker_sees_neither_the_program_nor_files_of_the_host(tmp_path):
  secret = tmp_path / "secret"
  secret.write_text("x")
  checker = f"""
import os
def check(stdin, output, expected):
  if output == expected:
    return True
  others = [p for p in os.listdir("/proc") if p.isdigit() and p != "1" and int(p) != os.getpid()]
  commands = [open(f"/proc/{{p}}/cmdline").read() for p in others]
  assert not any("candidate" in command for command in commands), commands
  assert not os.path.exists({str(secret)!r}), "the host's file"
  assert not os.path.exists("/tmp/program.txt"), "the program's file"
  assert os.listdir("/tmp") == [], os.listdir("/tmp")
  try:
    open({str(tmp_path / "made")!r}, "w")
  except OSError:
    return True
  return False
"""
  program = "open('/tmp/program.txt', 'w').write('x')\nprint('other')"
  verdict = grade(program, checker)
  assert verdict.reward == 1.0, verdict.detail
  assert not os.path.exists(tmp_path / "made")


def test_neither_checker_nor_expected_output_is_sent_to_the_program(monkeypatch):
  sent = {}
  send = sandbox.Sandbox.send

  def listen(box, message):
    sent.setdefault(id(box), []).append(message)
    send(box, message)

  monkeypatch.setattr(sandbox.Sandbox, "send", listen)
  checker = "# marker\ndef check(stdin, output, expected):\n  return output.strip() in expected"
  assert grade("print('x')", checker, [("7", "marker x"), ("8", "x marker")]).reward == 1.0
  judges, programs = sorted(sent.values(), key=lambda messages: "program" in messages[0])
  assert [message["inputs"] for message in programs] == [["7", "8"]]
  assert "marker" not in repr(programs) and "marker" in repr(judges)
  assert [m["output"] for m in judges if "output" in m] == ["x\n", "x\n"]


def test_the_program_s_clock_stands_still_while_a_checker_works(monkeypatch):
  monkeypatch.setattr(sandbox, "GRACE_S", 0.3)  # 0.7 s of wall time for 0.1 s of CPU time
  slow = "import time\ndef check(s, o, e):\n  o == e or time.sleep(1)\n  return True"
  cases = [("7", "a"), ("9", "b")]
  assert grade(RIGHT, slow, cases, time_limit_s=0.1).reward == 1.0
  # And goes on afterwards.
  sleeper = RIGHT + "import time\nn == 7 or time.sleep(60)"
  verdict = grade(sleeper, slow, cases, time_limit_s=0.1)
  assert verdict.status == "timeout" and verdict.detail.startswith("over 0.7 s of wall time")


def test_what_is_cut_off_does_not_make_an_output_right():
  first = "def check(stdin, output, expected):\n  return output.split()[0] == expected.split()[0]"
  assert grade("print('3', 'x' * 1000)", first, [("", "3 4")]).reward == 1.0
  verdict = grade("print('3', 'x' * 10**6)", first, [("", "3 4")])
  assert (verdict.reward, verdict.status) == (0.0, "ok")
  assert verdict.detail == "test 0: over 65542 bytes of output"


def test_the_judge_of_checkers_is_kept_and_serves_asserts_too():
  assert grade(RIGHT, PAIR).reward == 1.0
  ((served, judge),) = kept._kept
  asserts = {"asserts": ["assert f(1) == 2"]}
  problem = {"id": "p", "verifier": "code", "tests": asserts}
  assert code_tests.code("def f(x):\n  return x + 1", problem).reward == 1.0
  assert grade("input()\nprint(6, 1)", PAIR).reward == 0.0  # a wrong answer ends it in order
  assert [(n, box is judge) for n, box in kept._kept] == [(served + 2, True)]


def test_a_checker_s_globals_last_for_one_problem_only():
  checker = "seen = []\ndef check(s, o, e):\n  seen.append(o)\n  return len(seen) <= 4"
  assert grade(RIGHT, checker).reward == 1.0  # two expected outputs and two of the program's
  assert grade(RIGHT, checker).reward == 1.0
