"""The verifier `code`: right programs pass, unusual ones too, and every attack earns nothing.

Needs bubblewrap; `make sandbox` installs it, and CI does.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from fadejax.verify import (
  VerifierPool,
  cgroup,
  check_problem,
  code_output,
  code_tests,
  kept,
  sandbox,
  walls,
)

pytestmark = pytest.mark.skipif(sandbox.why_not() != "", reason=sandbox.why_not() or "there is one")

ROOT = Path(__file__).resolve().parents[2]
ADD = {"asserts": ["assert add(2, 3) == 5", "assert add(-1, 1) == 0"]}
GOOD = "def add(a, b):\n  return a + b\n"


def grade(program, tests=ADD, **limits):
  problem = {"id": "p", "verifier": "code", "tests": {**tests, **limits}}
  return code_tests.code(program, problem)


def calls(function, *cases):
  return {"function": function, "calls": [{"args": a, "expected": e} for a, e in cases]}


def stdio(*cases, **more):
  return {"stdin_stdout": [{"stdin": i, "stdout": o} for i, o in cases], **more}


OURS = f"test_code {os.getpid()}"


def leftovers():
  """Processes of bubblewrap that these tests started and that are there still.

  As long as a program lives, bubblewrap's first process does. Zombies that a killed worker left to
  this process, since graders adopt orphans, are reaped.
  """
  found = []
  for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
      status = Path(f"/proc/{pid}/status").read_text()
      name = status.split("\n", 1)[0].split()[1]
      parent = int(status.split("PPid:")[1].split()[0])
      environ = Path(f"/proc/{pid}/environ").read_text()
    except (OSError, IndexError):
      continue
    if name == "bwrap" and "State:\tZ" in status and parent == os.getpid():
      os.waitpid(int(pid), 0)
    elif name == "bwrap" and f"{sandbox.OWNER}={OURS}" in environ:
      found.append((pid, name, parent))
  return found


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch):
  monkeypatch.setenv(sandbox.OWNER, OURS)
  yield
  kept.drop()
  for _ in range(50):
    if not leftovers():
      return
    time.sleep(0.02)
  assert leftovers() == []


# --------------------------------------------------------------- right programs


@pytest.mark.parametrize(
  "completion",
  [
    GOOD,
    f"Here it is:\n```python\n{GOOD}```\nThat adds.",
    f"```python\nraise SystemExit\n```\nno, better:\n```py\n{GOOD}```",
    f"```\nraise SystemExit\n```\nno, better:\n```\n{GOOD}```",
    f"<think>```python\nraise 1\n```</think>\n```py\n{GOOD}```",
    f"~~~python\n{GOOD}~~~",
    f"```python\n{GOOD}",  # cut off, but whole
    "add = lambda a, b: a + b",
    "from operator import add",
    "class A:\n  def __call__(self, a, b): return a + b\nadd = A()",
    "import functools\nadd = functools.partial(lambda c, a, b: a + b + c, 0)",
    f"print('x' * 100000)\n{GOOD}",
    f"{GOOD}if __name__ == '__main__':\n  print(add(1, 2))",
    "def add(a, b):\n  import collections\n  return collections.Counter({'x': a + b})['x']",
    "class Solution:\n  def add(self, a, b): return a + b\nadd = Solution().add",
    "import threading\ndef add(a, b):\n  out = []\n  t = threading.Thread(target=lambda: "
    "out.append(a + b))\n  t.start(); t.join()\n  return out[0]",
  ],
)
def test_right_programs_pass(completion):
  assert grade(completion).reward == 1.0


@pytest.mark.parametrize(
  ("program", "tests"),
  [
    ("def f(n):\n  return list(range(n))", ["assert f(3) == [0, 1, 2]"]),
    ("def f():\n  yield 1\n  yield 2", ["assert list(f()) == [1, 2]"]),
    ("def f(x):\n  raise ValueError(x)", ["try:\n  f(1)\n  assert 0\nexcept ValueError: pass"]),
    ("class E(KeyError): pass\ndef f():\n  raise E('a')", ["try:\n  f()\n  assert 0\nexcept KeyError: pass"]),
    ("def f(x):\n  return {1: (x, {2, 3}), None: b'y'}", ["assert f(1) == {1: (1, {2, 3}), None: b'y'}"]),
    ("def f():\n  return float('nan'), float('inf')", ["a, b = f()\nassert a != a and b > 1e308"]),
    ("def f():\n  return 10 ** 5000", ["assert f() == 10 ** 5000"]),
    ("def f(a, *, k=2):\n  return a * k", ["assert f(3, k=4) == 12"]),
    ("import collections\nP = collections.namedtuple('P', 'x y')\ndef f():\n  return P(1, 2)", ["assert f() == (1, 2)"]),
    ("def f(x):\n  return x", ["assert math.floor(f(2.5)) == 2 and f(1) == 1"]),
    ("def f(s):\n  return s[::-1]", ["assert f('naïve 🙂') == '🙂 evïan'"]),
    ("def f(x):\n  return x / 3", ["import math\nassert math.isclose(f(1), 0.3333, rel_tol=1e-3)"]),
    ("def f(n):\n  return n if n < 2 else f(n - 1) + f(n - 2)", ["for i in range(15):\n  assert f(i) >= 0"]),
    ("import sys\nsys.setrecursionlimit(10 ** 6)\ndef f(n):\n  return 0 if n == 0 else 1 + f(n - 1)", ["assert f(60000) == 60000"]),
  ],
)  # fmt: skip
def test_unusual_right_programs_pass(program, tests):
  verdict = grade(program, {"asserts": tests})
  assert verdict.reward == 1.0, verdict


def test_check_of_human_eval_style():
  setup = "def check(candidate):\n  assert candidate(2, 3) == 5\n  assert candidate(0, 0) == 0\n"
  tests = {"setup": setup, "asserts": ["check(add)"]}
  assert grade(GOOD, tests).reward == 1.0
  assert grade("def add(a, b):\n  return 5", tests).reward == 0.0


def test_calls():
  tests = calls("merge", ([[1, 3], [2]], [1, 2, 3]), ([[], []], []))
  assert grade("def merge(a, b):\n  return sorted(a + b)", tests).reward == 1.0
  assert grade("def merge(a, b):\n  return tuple(sorted(a + b))", tests).reward == 1.0
  solution = "class Solution:\n  def merge(self, a, b):\n    return sorted(a + b)"
  assert grade(solution, tests).reward == 1.0
  wrong = grade("def merge(a, b):\n  return a + b", tests)
  assert (wrong.reward, wrong.status) == (0.0, "ok") and "call 0" in wrong.detail
  third = calls("f", ([1], 1 / 3))
  assert grade("def f(x):\n  return 0.3333333", third).reward == 0.0
  assert grade("def f(x):\n  return 0.3333333", {**third, "float_tol": 1e-6}).reward == 1.0
  keyed = {"function": "f", "calls": [{"args": [], "kwargs": {"x": 2}, "expected": {"2": [1]}}]}
  assert grade("def f(x):\n  return {x: (1,)}", keyed).reward == 1.0


def test_share_of_the_tests():
  tests = calls("f", ([1], 1), ([2], 4), ([3], 9), ([4], 0))
  assert grade("def f(x):\n  return x * x", tests).reward == 0.0
  verdict = grade("def f(x):\n  return x * x", {**tests, "score": "share"})
  assert (verdict.reward, verdict.status) == (0.75, "ok")
  asserts = {"asserts": ["assert f(1) == 1", "assert f(2) == 0", "assert f(3) == 9"], "score": "share"}  # fmt: skip
  assert grade("def f(x):\n  return x * x", asserts).reward == pytest.approx(2 / 3)


def test_stdin_and_stdout():
  double = "print(int(input()) * 2)"
  assert grade(double, stdio(("21", "42\n"), ("-1\n", "-2"))).reward == 1.0
  assert grade(double, stdio(("21", "42"), ("2", "5"))).status == "ok"
  main = "def main(): print(int(input())*2)\nif __name__=='__main__': main()"
  for program in (
    main,
    f"{main}\nimport sys\nsys.exit(0)",
    f"{main}\nexit()",
    "import sys\nfor line in sys.stdin:\n  print(int(line) * 2)",
    "print(int(open(0).read()) * 2)",
    "import sys; sys.stdout.write('42'); sys.stdout.flush()",
    "import atexit; atexit.register(lambda: print(42))",
    "import os; os.write(1, b'42\\n')",
  ):
    assert grade(program, stdio(("21", "42"))).reward == 1.0, program
  verdict = grade("print(42)\nimport sys\nsys.exit(1)", stdio(("21", "42")))
  assert (verdict.reward, verdict.status) == (0.0, "runtime_error")
  # Each test is a process of its own.
  state = "import builtins\nn = getattr(builtins, 'n', 0) + 1\nbuiltins.n = n\nprint(n)"
  assert grade(state, stdio(("", "1"), ("", "1"))).reward == 1.0


def test_a_full_pipe_is_no_timeout():
  lines = "12345\n" * 40000
  assert grade("for _ in range(40000): print(12345)", stdio(("", lines))).reward == 1.0
  assert grade("import sys; sys.stdout.buffer.write(b'5\\n')", stdio(("", "5"))).reward == 1.0


@pytest.mark.parametrize(
  ("output", "expected", "accept"),
  [
    ("4 9\n7\n", "4 9\n7", True),
    ("4 9  \n7\n\n\n", "4 9\n7\n", True),
    ("4  9\n7", "4 9\n7", True),  # blanks inside a line separate tokens
    ("49\n7\n", "4 9\n7\n", False),
    ("4\n9\n7\n", "4 9\n7\n", False),
    ("4 9 7\n", "4 9\n7\n", False),
    ("\n4 9\n7\n", "4 9\n7\n", False),
    ("0.333333", "0.333333333333", True),
    ("0.3334", "0.333333333333", False),
    ("1e3", "1000", True),
    ("1000.0", "1000", True),
    ("1000000001", "1000000000", False),  # integers are exact
    ("1000000.9", "1000001", False),
    ("123456789012000000.0", "123456789012345678", False),
    ("5.0", "5", True),
    ("1e999", "9" * 401, False),
    ("9" * 400 + ".0", "1" * 350, False),
    ("\u0661.0", "1.0", False),
    ("1\u20282", "1\n2", False),
    ("nan", "0.5", False),
    ("inf", "1e999", False),
    ("Yes", "yes", False),
    ("", "", True),
    ("", "x", False),
  ],
)
def test_outputs_by_line_and_token(output, expected, accept):
  assert code_output.same_output(output, expected) is accept


# --------------------------------------------------------------- wrong programs


@pytest.mark.parametrize(
  ("program", "status"),
  [
    ("def add(a, b):\n  return 0", "ok"),
    ("def add(a, b):\n  return '5'", "ok"),
    ("def add(a, b): return a +", "runtime_error"),
    ("def sub(a, b): return a - b", "runtime_error"),
    ("def add(a, b): raise ValueError", "runtime_error"),
    ("def add(a): return a", "runtime_error"),
    ("import nothing_of_that_name", "runtime_error"),
    ("1 / 0", "runtime_error"),
    ("", "no_answer"),
    ("<think>def add", "no_answer"),
    ("Sorry, I cannot do that.", "runtime_error"),
    ("\0", "runtime_error"),
    ("(" * 5000 + ")" * 5000, "runtime_error"),
    ("class E(Exception):\n  def __str__(self): 1 / 0\nraise E", "runtime_error"),
    ("def add(a, b): return lambda: 5", "runtime_error"),
  ],
)
def test_wrong_programs(program, status):
  verdict = grade(program)
  assert (verdict.reward, verdict.status) == (0.0, status), verdict


# --------------------------------------------------------------- attacks on the verdict

EQUAL = """
class Yes:
  def __eq__(self, other): return True
  def __hash__(self): return 5
  __ne__ = lambda self, other: False
  __bool__ = lambda self: True
"""
FORGE = """
import os, struct, json
def frames(*messages):
  for n in range(3, 20):
    for m in messages:
      body = json.dumps(m).encode()
      try: os.write(n, struct.pack(">I", len(body)) + body)
      except OSError: pass
"""


@pytest.mark.parametrize(
  "program",
  [
    "import os; add = lambda a, b: os._exit(0)",
    "import os; os._exit(0)",
    "import sys; sys.exit(0)",
    "def add(a, b): raise SystemExit(0)",
    "def add(a, b): raise KeyboardInterrupt",
    "def add(a, b): raise GeneratorExit",
    "import atexit, os; atexit.register(lambda: os._exit(0))\ndef add(a, b): return 0",
    "import sys, os; sys.excepthook = lambda *a: os._exit(0)\ndef add(a, b): return 0",
    f"{EQUAL}\ndef add(a, b): return Yes()",
    "class I(int):\n  def __eq__(self, o): return True\ndef add(a, b): return I(7)",
    "class F(float):\n  def __eq__(self, o): return True\ndef add(a, b): return F(7)",
    "class S(str):\n  def __eq__(self, o): return True\ndef add(a, b): return S('x')",
    "class L(list):\n  def __eq__(self, o): return True\ndef add(a, b): return L()",
    "class C(type):\n  __eq__ = lambda a, b: True\nclass D(metaclass=C): pass\ndef add(a, b): return D",
    "print('ALL TESTS PASSED'); import os; os._exit(0)",
    "import builtins; builtins.AssertionError = ValueError\ndef add(a, b): return 0",
    "import builtins; builtins.eval = builtins.exec = lambda *a: None\ndef add(a, b): return 0",
    "import sys\nfor m in list(sys.modules.values()):\n  for k in ('encode', 'decode', 'write'):\n"
    "    if hasattr(m, k) and hasattr(m, 'NotPlain'): setattr(m, k, lambda *a, **k: 5)\n"
    "def add(a, b): return 0",
    f"{FORGE}\nframes({{'report': {{'passed': 2, 'fault': '', 'detail': ''}}}})\ndef add(a, b): return 0",
    f"{FORGE}\ndef add(a, b):\n  frames({{'report': {{'passed': 2, 'fault': '', 'detail': ''}}}})\n  return 0",
    f"{FORGE}\nframes({{'ready': True}}, {{'callable': True}}, {{'value': [5, 0]}})\ndef add(a, b): return 0",
    f"{FORGE}\ndef add(a, b):\n  frames({{'value': {{'x': 1}}}})\n  return 0",
    "import gc\nfor o in gc.get_objects():\n  if isinstance(o, dict) and 'tests' in o: o['tests'] = []\n"
    "def add(a, b): return 0",
    "def add(a, b):\n  import inspect\n  for f in inspect.stack():\n    f.frame.f_locals.clear()\n  return 0",
    "__name__ = 'tests'\nadd = None",
    "open('/tmp/reward', 'w').write('1.0')\ndef add(a, b): return 0",
    "import os\nos.write(2, b'1.0')\nfor i in range(3, 64):\n  try: os.close(i)\n  except OSError: pass\ndef add(a, b): return 5",
  ],
)  # fmt: skip
def test_a_program_cannot_talk_itself_right(program):
  verdict = grade(program, time_limit_s=0.5)
  assert verdict.reward == 0.0 and verdict.status in ("ok", "runtime_error", "timeout"), verdict


@pytest.mark.parametrize("form", ["calls", "stdio"])
def test_nor_in_the_other_forms(form):
  tests = calls("add", ([2, 3], 5), ([-1, 1], 0)) if form == "calls" else stdio(("2 3", "5"))
  attacks = [
    "import os; os._exit(0)", "print(0)\ndef add(a, b): return 0",
    f"{EQUAL}\ndef add(a, b): return Yes()",
    f"{FORGE}\nframes({{'value': 5}}, {{'value': 5}}, {{'value': 0}}, {{'status': 0, 'output': '30'}})\ndef add(a, b): return 0",
    "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\ndef add(a, b): return 0",
    "def add(a, b): raise ValueError",
  ]  # fmt: skip
  for program in attacks:
    verdict = grade(program, tests)
    assert verdict.reward == 0.0 and verdict.status != "grader_error", (program, verdict)


def test_an_error_is_not_an_empty_output():
  """Reports of graders that compare the text of a caught exception with an empty expected output."""
  verdict = grade("def solve(x): raise ValueError", calls("solve", ([1], "")))
  assert (verdict.reward, verdict.status) == (0.0, "runtime_error")
  assert grade("raise ValueError", stdio(("1", ""))).reward == 0.0


def test_the_expected_values_are_not_in_the_program_s_process():
  """It searches its own memory, its files and its parents' for a number that only the tests hold."""
  secret = 918273645546372819
  search = f"""
import os, gc
def add(a, b):
  needle = str({secret} - 1)[:-1]
  for pid in filter(str.isdigit, os.listdir('/proc')):
    for name in ('cmdline', 'environ', 'maps'):
      try:
        if needle in open(f'/proc/{{pid}}/{{name}}', errors='replace').read() and name != 'maps':
          return {secret}
      except OSError: pass
    try:
      for line in open(f'/proc/{{pid}}/maps'):
        low, high = (int(x, 16) for x in line.split()[0].split('-'))
        if 'r' in line.split()[1] and high - low < 2**24 and int(pid) != os.getpid():
          with open(f'/proc/{{pid}}/mem', 'rb') as m:
            m.seek(low)
            if needle.encode() in m.read(high - low): return {secret}
    except OSError: pass
  return 0
"""
  assert grade(search, {"asserts": [f"assert add(2, 3) == {secret}"]}).reward == 0.0


# --------------------------------------------------------------- attacks on the machine


def test_a_clock_that_is_stopped_from_inside():
  program = (
    "import signal\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)\n"
    "signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "signal.setitimer(signal.ITIMER_REAL, 0)\ndef add(a, b):\n  while True: pass"
  )
  began = time.monotonic()
  verdict = grade(program, time_limit_s=1.0)
  assert (verdict.reward, verdict.status) == (0.0, "timeout")
  assert time.monotonic() - began < 20


def test_sleepers_leave_no_process_behind():
  items = [
    ("code", "import time; time.sleep(60)", {"tests": {**ADD, "time_limit_s": 0.25}})
  ] * 6  # fmt: skip
  with VerifierPool(workers=3, timeout_s=20) as pool:
    assert [(v.reward, v.status) for v in pool.grade(items)] == [(0.0, "timeout")] * 6


def test_a_killed_trainer_takes_its_sandboxes_along():
  trainer = (
    "from fadejax.verify import VerifierPool\n"
    "tests = {'asserts': ['assert add(1, 2)'], 'time_limit_s': 60.0}\n"
    "with VerifierPool(workers=1, timeout_s=90) as pool:\n"
    "  pool.grade([('code', 'import time\\ndef add(a, b): time.sleep(60)', {'tests': tests})])\n"
  )
  process = subprocess.Popen([sys.executable, "-c", trainer], cwd=ROOT)
  deadline = time.monotonic() + 60
  try:
    while len(leftovers()) < 3:  # bubblewrap: two of the program's, one of the judge's
      assert time.monotonic() < deadline and process.poll() is None
      time.sleep(0.02)
  finally:
    process.kill()
    process.wait()
  while leftovers():
    assert time.monotonic() < deadline, leftovers()
    time.sleep(0.02)


FORKS = """
import os, time
{setup}
while True:
  try:
    if os.fork() == 0: {child}
  except OSError: pass
"""


@pytest.mark.parametrize(
  ("setup", "child"),
  [("", "pass"), ("", "time.sleep(60)"), ("", "os.setsid(); time.sleep(60)"),
   ("import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)", "os._exit(0)")],
)  # fmt: skip
def test_fork_bombs(setup, child):
  before = len([p for p in os.listdir("/proc") if p.isdigit()])
  peak = [0]
  stop = threading.Event()

  def watch():
    while not stop.wait(0.02):
      peak[0] = max(peak[0], len([p for p in os.listdir("/proc") if p.isdigit()]))

  thread = threading.Thread(target=watch)
  thread.start()
  verdict = grade(FORKS.format(setup=setup, child=child), time_limit_s=1.0)
  stop.set()
  thread.join()
  assert verdict.reward == 0.0 and verdict.status in ("timeout", "runtime_error"), verdict
  assert peak[0] <= before + sandbox.Limits().processes + 60  # other tests run beside this one
  assert subprocess.run(["true"], check=True).returncode == 0  # the trainer can still fork


def test_memory_of_one_process():
  verdict = grade("x = bytearray(10 ** 10)\nadd = 1")
  assert verdict.reward == 0.0 and verdict.status in ("memory", "runtime_error")
  slow = "x = []\nwhile True: x.append(bytearray(10 ** 6))"
  verdict = grade(slow)
  assert verdict.reward == 0.0 and verdict.status in ("memory", "runtime_error"), verdict


def test_memory_of_many_processes():
  program = """
import os, time
for _ in range(50):
  try:
    if os.fork() == 0:
      x = bytearray(200 * 2**20)
      for i in range(0, len(x), 4096): x[i] = 1
      time.sleep(60)
  except OSError: pass
time.sleep(60)
"""
  verdict = grade(program, time_limit_s=5.0)
  assert (verdict.reward, verdict.status) == (0.0, "memory"), verdict


@pytest.mark.parametrize("where", ["/tmp", "/dev", "/dev/shm", "/", "/fadejax", "/proc"])
def test_files_are_few_and_only_in_scratch(where):
  program = f"""
import os
wrote = 0
for i in range(2000):
  try:
    with open('{where}/f%d' % i, 'wb') as f:
      while f.write(b'x' * 2**16): wrote += 2**16
  except OSError: pass
def add(a, b): return wrote
"""
  tests = {"asserts": [f"assert 0 <= add(2, 3) <= {16 * 2**20}"]}
  if where != "/tmp":
    tests = {"asserts": ["assert add(2, 3) == 0"]}
  assert grade(program, tests).reward == 1.0


def test_memory_that_no_limit_counts_cannot_be_had():
  program = """
import ctypes, os
def add(a, b):
  try:
    fd = os.memfd_create('x')
    return 1
  except OSError: pass
  libc = ctypes.CDLL(None, use_errno=True)
  return int(libc.shmget(0, 2**20, 0o1666) >= 0 or libc.syscall(319, b'y', 0) >= 0)
"""
  assert grade(program, {"asserts": ["assert add(2, 3) == 0"]}).reward == 1.0


def test_output_without_end():
  for tests in (ADD, stdio(("", "5"))):
    began = time.monotonic()
    verdict = grade("while True: print('x')", tests, time_limit_s=1.0)
    assert verdict.reward == 0.0 and time.monotonic() - began < 20
  flood = f"{FORGE}\nwhile True: frames({{'text': 'x' * 10**6}})"
  verdict = grade(flood, time_limit_s=2.0)
  assert verdict.reward == 0.0 and verdict.status in ("runtime_error", "timeout")


def test_a_program_that_crashes_is_wrong_and_the_grader_lives():
  crash = "import ctypes\ndef add(a, b): ctypes.string_at(0)"
  verdict = grade(crash)
  assert (verdict.reward, verdict.status) == (0.0, "runtime_error")
  deep = "import sys\nsys.setrecursionlimit(6 * 10**5)\ndef add(a, b, n=5 * 10**5): return add(a, b, n - 1) if n else [0].sort(key=lambda x: add(a, b))"  # fmt: skip
  verdict = grade(deep)
  assert verdict.reward == 0.0 and verdict.status in ("runtime_error", "timeout", "memory")


def test_no_signal_leaves_the_sandbox():
  program = """
import os, signal
for pid in (os.getppid(), 1, -1):
  try: os.kill(pid, signal.SIGKILL)
  except OSError: pass
def add(a, b): return 0
"""
  items = [("code", program, {"tests": ADD}), ("code", GOOD, {"tests": ADD})] * 3
  with VerifierPool(workers=2, timeout_s=20) as pool:
    verdicts = pool.grade(items)
  assert [v.reward for v in verdicts] == [0.0, 1.0] * 3
  assert {v.status for v in verdicts} <= {"ok", "runtime_error"}


def test_no_connection_leaves_the_sandbox(tmp_path):
  seen = []
  with socket.create_server(("127.0.0.1", 0)) as server:
    port = server.getsockname()[1]
    server.settimeout(0.2)
    path = tmp_path / "s"
    unix = socket.socket(socket.AF_UNIX)
    unix.bind(str(path))
    unix.listen()
    unix.settimeout(0.2)
    program = f"""
import socket, subprocess, ctypes
def add(a, b):
  for host in ('127.0.0.1', 'localhost', '10.0.2.2', '8.8.8.8', '169.254.169.254'):
    try:
      socket.create_connection((host, {port}), timeout=0.3)
      return 5
    except OSError: pass
  try:
    s = socket.socket(socket.AF_UNIX); s.connect({str(path)!r}); return 5
  except OSError: pass
  libc = ctypes.CDLL(None)
  fd = libc.socket(2, 1, 0)
  if libc.connect(fd, bytes([2, 0]) + {port}.to_bytes(2, 'big') + bytes([127, 0, 0, 1]) + bytes(8), 16) == 0:
    return 5
  try:
    if subprocess.run(['sh', '-c', 'exec 3<>/dev/tcp/127.0.0.1/{port}'], timeout=2).returncode == 0: return 5
  except Exception: pass
  return 0
"""
    verdict = grade(program, {"asserts": ["assert add(2, 3) == 5"]}, time_limit_s=3.0)
    for listener in (server, unix):
      with contextlib.suppress(TimeoutError):
        seen.append(listener.accept())
    unix.close()
  assert verdict.reward == 0.0 and seen == []


def test_no_file_of_the_host_is_seen_or_changed(tmp_path):
  secret = tmp_path / "answers.jsonl"
  secret.write_text("top secret")
  home = Path(os.path.expanduser("~"))
  home.mkdir(parents=True, exist_ok=True)
  marker = home / "marker"
  marker.write_text("mine")
  root = ROOT
  program = f"""
import os, pathlib, shutil
def add(a, b):
  seen = [p for p in ({str(secret)!r}, {str(marker)!r}, {str(root / "README.md")!r},
                      '/etc/passwd', '/etc/shadow', '/root/.ssh', '/sys/class', '/home', '/var')
          if os.path.exists(p)]
  for place in ('../escape', '/escape', os.path.expanduser('~') + '/../escape', {str(tmp_path)!r} + '/x',
                '/usr/escape', '/fadejax/escape', {str(root)!r} + '/escape'):
    try: pathlib.Path(place).write_text('x')
    except OSError: continue
    if not place.startswith('../'): seen.append(place)
  for victim in ('/fadejax/judge.py', '/usr/bin/env', {str(secret)!r}):
    try: os.remove(victim); seen.append(victim)
    except OSError: pass
  return seen + sorted(k for k in os.environ if k not in
    ('PATH', 'HOME', 'LANG', 'PYTHONHASHSEED', 'OMP_NUM_THREADS', 'LD_LIBRARY_PATH', 'PWD', 'LC_CTYPE'))
"""
  verdict = grade(program, {"asserts": ["assert add(2, 3) == [], add(2, 3)"]})
  assert verdict.reward == 1.0, verdict
  assert secret.read_text() == "top secret" and marker.read_text() == "mine"
  assert not (root / "escape").exists() and not Path("/usr/escape").exists()


def test_a_program_is_nobody():
  program = """
import os
def add(a, b):
  status = open('/proc/self/status').read()
  caps = [int(l.split()[1], 16) for l in status.splitlines() if l.startswith(('CapEff', 'CapPrm', 'CapAmb'))]
  tries = 0
  for f in (lambda: os.setuid(0), lambda: os.chroot('/tmp'), lambda: os.sethostname(b'x') if hasattr(os, 'sethostname') else 1 / 0,
            lambda: os.mknod('/tmp/d', 0o60666, os.makedev(8, 0)), lambda: os.nice(-5), lambda: open('/proc/sys/kernel/core_pattern', 'w'),
            MEM):
    try: f(); tries += 1
    except Exception: pass
  return os.getuid() != 0 and not any(caps) and 'NoNewPrivs:\\t1' in status, tries
"""  # fmt: skip
  # Without root the first process inside, bubblewrap's, is of the same user, and has no more rights.
  memory = "lambda: open('/proc/1/mem', 'rb+')" if os.geteuid() == 0 else ""
  program = program.replace("MEM", memory)
  verdict = grade(program, {"asserts": ["assert add(1, 2) == (True, 0), add(1, 2)"]})
  assert verdict.reward == 1.0, verdict


def test_programs_do_not_see_each_other():
  leave = "import os\nopen('/tmp/left', 'w').write('x')\nos.symlink('/', '/tmp/root')\ndef add(a, b): return a + b"
  look = "import os\ndef add(a, b): return a + b if os.listdir('/tmp') == [] else 0"
  assert grade(leave).reward == 1.0 and grade(look).reward == 1.0


# --------------------------------------------------------------- the tests' own faults


@pytest.mark.parametrize(
  ("tests", "message"),
  [
    (None, "needs the field 'tests'"),
    ("{", "are not JSON"),
    ([], "an object is wanted"),
    ({}, "one of asserts, calls, stdin_stdout"),
    ({"asserts": []}, "at least one test"),
    ({"asserts": [1]}, "text is wanted"),
    ({"asserts": ["assert add(2,"]}, "do not compile"),
    ({"asserts": ["assert True"]}, "use no name"),
    ({"asserts": ["assert isclose(area(2), 12.5)"]}, "['area', 'isclose'] that neither"),
    ({"asserts": ["assert f(1)"], "functions": "f"}, "must be a list of names"),
    ({"asserts": ["assert f(1)"], "time_limit_s": -1}, "must be above 0"),
    ({"asserts": ["assert f(1)"], "time_limit_s": 1e300}, "at most 1e9"),
    ({"asserts": ["assert f(1)"], "memory_mb": "x"}, "memory_mb: invalid literal"),
    ({"calls": [{"args": 5, "expected": 1}], "function": "f"}, "args must be a list"),
    ({"calls": [{"args": [5], "expected": 1}], "function": "f", "float_tol": "x"}, "float_tol"),
    ({"asserts": ["assert 1"], "calls": []}, "one of asserts"),
    ({"calls": [{"args": [1]}], "function": "f"}, "'expected'"),
    ({"calls": [{"args": [1], "expected": 1}]}, "need 'function'"),
    ({"stdin_stdout": [{"stdin": "1"}]}, "'stdout'"),
    ({"stdin_stdout": [{"stdin": 1, "stdout": "1"}]}, "must be text"),
    ({"asserts": ["assert f(1)"], "score": "half"}, "'all' or 'share'"),
  ],
)
def test_records_that_cannot_be_graded_are_named(tests, message):
  problem = {"id": "p7", "verifier": "code", "tests": tests}
  reason = check_problem(problem)
  assert message in reason and "'p7'" in reason
  with VerifierPool(workers=1) as pool:
    (verdict,) = pool.grade([("code", GOOD, problem)])
  assert (verdict.reward, verdict.status) == (None, "grader_error") and message in verdict.detail


@pytest.mark.parametrize(
  ("asserts", "message"),
  [
    (["add(lambda: 1, 2)"], "the tests pass a value of type function"),
    (["def test_a():\n  assert add(2, 3) == 5"], "never call the program"),
  ],
)  # fmt: skip
def test_tests_that_cannot_be_judged_are_no_wrong_answer(asserts, message):
  with VerifierPool(workers=1) as pool:
    (verdict,) = pool.grade([("code", GOOD, {"tests": {"asserts": asserts}})])
  assert (verdict.reward, verdict.status) == (None, "grader_error") and message in verdict.detail


def test_tests_as_json_text_and_a_prefix():
  problem = {"tests": '{"asserts": ["assert twice(2) == 8"]}', "prefix": "K = 2\n"}
  assert code_tests.code("def twice(x): return x * K * 2", problem).reward == 1.0


def test_without_bubblewrap_code_tasks_refuse_to_start(monkeypatch):
  monkeypatch.setenv("PATH", "/nowhere")
  sandbox._why_not.cache_clear()
  try:
    reason = check_problem({"verifier": "code", "tests": ADD})
    assert "bubblewrap" in reason and "make sandbox" in reason
  finally:
    monkeypatch.undo()
    sandbox._why_not.cache_clear()


@pytest.mark.parametrize(
  "value",
  [
    "10 ** 200000",  # slow to print
    "{k * (2**61 - 1): 0 for k in range(1, 60000)}",  # slow to hold: every key collides
    "[[1] * 1000] * 1000",
    "'x' * 3 * 10**6",
    "iter(int, 1)",
    "(lambda f: f(f, 190))(lambda f, n: [f(f, n - 1)] if n else 0)",
  ],
)
@pytest.mark.parametrize("form", ["asserts", "calls"])
def test_a_value_that_is_slow_to_handle_is_a_wrong_answer(value, form):
  """Never a grader_error: a policy must not find a way around its verdict."""
  program = f"def add(a, b):\n  return {value}"
  tests = ADD if form == "asserts" else calls("add", ([2, 3], 5))
  began = time.process_time()
  with VerifierPool(workers=1, timeout_s=20) as pool:
    (verdict,) = pool.grade([("code", program, {"tests": {**tests, "time_limit_s": 2.0}})])
  assert verdict.reward == 0.0 and verdict.status != "grader_error", verdict
  assert time.process_time() - began < 5


@pytest.mark.parametrize(
  ("program", "tests"),
  [
    ("def add(*a): raise StopIteration", ["for got, want in zip(map(add, [1, 2], [3, 4]), [4, 6]):\n  assert got == want"]),
    ("def add(*a): raise StopIteration", ["assert all(map(add, [1, 2], [3, 4]))"]),
    ("def add(*a): raise StopAsyncIteration", ["assert list(map(add, [1], [3])) == [4]"]),
    ("def isclose(*a, **k): return True\ndef add(a, b): return 0", ["from math import isclose\nassert isclose(add(1, 2), 3)"]),
    ("def math(): pass\ndef add(a, b): return 0", ["assert math.isclose(add(1, 2), 3)"]),
    ("check = add = lambda *a: True", ["def check(f):\n  assert f(1, 2) == 3", "check(add)"]),
  ],
)  # fmt: skip
def test_a_program_cannot_end_or_rewrite_the_tests(program, tests):
  assert grade(program, {"asserts": tests, "functions": ["add"]}).reward == 0.0


def test_only_the_named_functions_are_the_program_s_to_define():
  tests = {"asserts": ["assert poly(find(1)) == 0"], "functions": ["find"],
           "setup": "def poly(x):\n  return x - 1"}  # fmt: skip
  assert grade("def poly(x): return 0\ndef find(x): return 5", tests).reward == 0.0
  assert grade("def find(x): return 1", tests).reward == 1.0
  assert grade("def sum(a, b): return a + b", {"asserts": ["assert sum(2, 3) == 5"], "functions": ["sum"]}).reward == 1.0  # fmt: skip


def test_cpu_time_of_children_that_nobody_waits_for():
  program = """
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
def add(a, b):
  for _ in range(40):
    if os.fork() == 0:
      end = time.process_time() + 0.1
      while time.process_time() < end: pass
      os._exit(0)
    time.sleep(0.12)
  return a + b
"""
  verdict = grade(program, time_limit_s=0.5)
  assert (verdict.reward, verdict.status) == (0.0, "timeout"), verdict


def test_a_slow_drip_is_watched_too():
  program = f"""{FORGE}
import time
for n in range(3, 20):
  try: os.write(n, struct.pack("<I", 2**21))
  except OSError: pass
while True:
  for n in range(3, 20):
    try: os.write(n, b"N")
    except OSError: pass
  time.sleep(0.003)
"""
  began = time.monotonic()
  verdict = grade(program, time_limit_s=0.5)
  assert verdict.reward == 0.0 and time.monotonic() - began < 15


@pytest.mark.parametrize(
  "attempt",
  [
    # A user namespace; the child ends at once.
    "(lambda r: os._exit(0) if r == 0 else r > 0)(libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0))",
    "socket.socket(socket.AF_INET)",
    "libc.msgget(0, 0o1666) < 0 and 1 / 0",
    "libc.io_setup(64, ctypes.byref(ctypes.c_ulong())) != 0 and 1 / 0",
    "libc.syscall(206, 64, ctypes.byref(ctypes.c_ulong())) != 0 and 1 / 0",
    "socket.socketpair()[0].setsockopt(1, 7, 2**24)",
    "resource.prlimit(os.getpid(), resource.RLIMIT_CORE)",  # by a process's number
  ],
)
def test_what_the_filter_refuses(attempt):
  program = f"""
import ctypes, os, resource, socket
libc = ctypes.CDLL(None, use_errno=True)
def add(a, b):
  try: result = {attempt}
  except (OSError, ZeroDivisionError, AttributeError): return 0
  return 0 if result is False else 1
"""
  assert grade(program, {"asserts": ["assert add(1, 2) == 0"]}).reward == 1.0


@pytest.mark.parametrize(
  "completion",
  [
    f"```python\n{GOOD}```\nOutput:\n```\n5\n```",
    f"```python\n{GOOD}```\n```bash\npython add.py\n```",
    "1. Do this:\n   ```python\n   def add(a, b):\n     return a + b\n   ```",
    f"```python\r\n{GOOD}```".replace("\n", "\r\n"),
    f"{GOOD}if __name__ == '__main__':\n  import unittest; unittest.main()",
    f"{GOOD}if __name__ == '__main__':\n  print(add(*map(int, input().split())))",
    f"import resource\nresource.setrlimit(resource.RLIMIT_STACK, (2**26, resource.getrlimit(resource.RLIMIT_STACK)[1]))\n{GOOD}",
  ],
)
def test_answers_as_models_write_them(completion):
  assert grade(completion).reward == 1.0, grade(completion)


def test_large_outputs_and_inputs():
  text = "7" * 60 + "\n"
  assert grade("print(open(0).read(), end='')", stdio((text * 50_000, text * 50_000))).reward == 1.0


def test_what_passed_before_a_stop_counts_with_share():
  program = "def f(x):\n  while x == 3: pass\n  return x"
  tests = {**calls("f", ([1], 1), ([2], 2), ([3], 3), ([4], 4)), "score": "share"}
  assert grade(program, tests, time_limit_s=0.5).reward == 0.5


# ---------------------------------------------------------------- the judge is kept


def in_the_tests(setup):
  """The verdict on a right program where the tests' own setup does something first."""
  return grade(GOOD, {**ADD, "setup": setup, "functions": ["add"]})


def judge_pid():
  return kept._kept[0][1].process.pid if kept._kept else None


def test_one_judge_serves_many_problems():
  assert grade(GOOD).reward == 1.0
  first = judge_pid()
  assert first is not None
  assert grade("def add(a, b): return 5").status == "ok"
  assert grade("def add(a, b): return 1 / 0").status == "runtime_error"
  assert grade("raise ValueError").status == "runtime_error"
  assert in_the_tests("import math; math.pi = 3").reward == 1.0
  assert in_the_tests("import math; assert math.pi > 3.1").reward == 1.0
  assert judge_pid() == first
  assert grade("import os\ndef add(a, b): os._exit(0)").status == "runtime_error"
  assert judge_pid() is None  # its task had not ended
  assert grade(GOOD).reward == 1.0
  assert judge_pid() not in (None, first)


def test_a_judge_is_replaced_after_so_many_problems(monkeypatch):
  monkeypatch.setattr(kept, "TASKS", 3)
  seen = []
  for _ in range(4):
    assert grade(GOOD).reward == 1.0
    seen.append(judge_pid())
  assert seen[0] == seen[1] is not None and seen[2] is None and seen[3] != seen[0]


def test_other_limits_get_another_judge():
  assert grade(GOOD).reward == 1.0
  first = judge_pid()
  assert grade(GOOD, time_limit_s=3.0).reward == 1.0
  assert judge_pid() not in (None, first)


def test_a_judge_s_limits_are_of_one_problem(monkeypatch):
  monkeypatch.setattr(kept, "CPU_S", 100.0)
  burn = "import time\nwhile time.process_time() < 0.4: pass"
  task = {"tests": [], "setup": burn, "count": False, "functions": [], "modules": []}
  for _ in range(4):
    with kept.judge(sandbox.Limits(cpu_s=0.9), task) as judge:
      assert judge.receive() == {"names": []}
      judge.check()
      judge.send({"found": {}})
      assert "report" in judge.receive()
  assert judge_pid() == judge.process.pid
  with pytest.raises(sandbox.Stopped) as stopped:  # noqa: SIM117
    with kept.judge(
      sandbox.Limits(cpu_s=0.9), {**task, "setup": burn.replace("0.4", "9")}
    ) as judge:
      judge.receive()
  assert stopped.value.status == "timeout"


def test_much_cpu_time_ends_a_judge_within_its_own_problem():
  """The worker gets it on its account when the judge ends: not at another item's cost."""
  setup = f"import time\nwhile time.process_time() < {1.2 * kept.CPU_S}: pass"
  assert in_the_tests(setup).reward == 1.0
  assert judge_pid() is None


LOOK = "import os\nassert os.listdir('/tmp') == [] and len([p for p in os.listdir('/proc') if p.isdigit()]) == 2"


@pytest.mark.parametrize(
  "mess",
  [
    "open('/tmp/left', 'w').close()",
    "import os, time\nif os.fork() == 0: time.sleep(60)",
    "import os, time\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0: time.sleep(60)\n  os._exit(0)",
    "import atexit, signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)",
  ],
)
def test_nothing_of_one_problem_reaches_the_next(mess):
  """What tests leave, a program may have had them leave: the next problem finds none of it."""
  assert in_the_tests(mess).reward == 1.0
  assert in_the_tests(LOOK).reward == 1.0, in_the_tests(LOOK)


@pytest.mark.parametrize(
  "attack",
  [
    "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
    "import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)",
    "import os\nos._exit(0)",
    "import os\nfor fd in range(3, 30):\n  try: os.write(fd, b'.....')\n  except OSError: pass",
    "import os\nfor fd in range(3, 30):\n  try: os.close(fd)\n  except OSError: pass",
  ],
)
def test_a_judge_that_was_tampered_with_is_not_kept(attack):
  in_the_tests(attack)
  assert in_the_tests(LOOK).reward == 1.0
  assert grade("def add(a, b): return 5").reward == 0.0


def test_a_problem_s_process_cannot_look_into_what_started_it():
  look = (
    "import os\nfor name in ('fd', 'mem', 'environ'):\n  try:\n    path = f'/proc/{os.getppid()}/{name}'\n"
    "    os.listdir(path) if name == 'fd' else open(path).read(1)\n  except PermissionError: continue\n"
    "  raise AssertionError(name)"
  )
  assert in_the_tests(look).reward == 1.0


def test_a_pool_takes_its_judges_and_control_groups_along():
  with VerifierPool(workers=1) as pool:
    assert pool.grade([("code", GOOD, {"tests": ADD})])[0].reward == 1.0
    worker = pool._slots[0].worker.pid
    assert leftovers()
  assert cgroup.groups(str(worker)) == []


# -------------------------------------------------------- no sandbox, where the user says so


NO_WALL = [
  (GOOD, ADD, (1.0, "ok")),
  ("def add(a, b): return 5", ADD, (0.0, "ok")),
  ("def add(a, b):\n  while True: pass", {**ADD, "time_limit_s": 0.5}, (0.0, "timeout")),
  ("def add(a, b): return [bytearray(10**7) for _ in range(10**4)]", {**ADD, "memory_mb": 150},
   (0.0, "memory")),
  ("def add(a, b): return Yes()\nclass Yes:\n  def __eq__(self, o): return True", ADD,
   (0.0, "runtime_error")),
  ("import os\ndef add(a, b):\n  if os.fork() == 0:\n    import time; time.sleep(60)\n  return a + b",
   ADD, (1.0, "ok")),
  ("print(sum(map(int, input().split())))", stdio(("2 3", "5"), ("4 5", "9")), (1.0, "ok")),
]  # fmt: skip


def test_without_a_sandbox_programs_are_judged_all_the_same(monkeypatch):
  """And bounded; what they start is ended with them. The worker does as this process has chosen."""
  monkeypatch.setattr(walls, "_chosen", "none")
  before = set(Path(tempfile.gettempdir()).glob("fadejax-[0-9]*"))
  items = [("code", program, {"tests": tests}) for program, tests, _ in NO_WALL]
  with VerifierPool(workers=1) as pool:
    verdicts = pool.grade(items)
    parent = {"function": "f", "calls": [{"args": [], "expected": pool._slots[0].worker.pid}]}
    assert pool.grade([("code", "import os\nf = os.getppid", {"tests": parent})])[0].reward == 1.0
  assert [(v.reward, v.status) for v in verdicts] == [wanted for _, _, wanted in NO_WALL]
  assert set(Path(tempfile.gettempdir()).glob("fadejax-[0-9]*")) == before


def test_no_sandbox_is_chosen_by_its_name(monkeypatch):
  monkeypatch.setattr(walls, "_chosen", "bubblewrap")
  with pytest.raises(ValueError, match="'nothing': expected one of bubblewrap, none"):
    walls.choose("nothing")
  monkeypatch.setenv("PATH", "/nowhere")
  sandbox._why_not.cache_clear()
  assert "bubblewrap" in sandbox.why_not()
  walls.choose("none")
  assert sandbox.why_not() == ""
  sandbox._why_not.cache_clear()


ECHO = "import os, sys\nline = sys.stdin.readline()\n"


@pytest.mark.parametrize(
  "program",
  [
    ECHO + "print(line)\nsys.stdout.close()",
    ECHO + "out = open(1, 'w')\nout.write(line)",  # flushed when its name goes, as in Python
    ECHO + "print(line)\nimport io\nsys.stdout = io.StringIO()\nprint('no')",
    ECHO + "print(line)\nsys.stdout = None",
    ECHO + "sys.stdout = open(1, 'w')\nprint(line)",
    "import os\nos.write(1, os.read(0, 99))",
    "print(open('/dev/stdin').read())",
    "import sys\nsys.stdin.read()\nsys.stdin.seek(0)\nprint(input())",
    "import subprocess, sys\nsys.exit(subprocess.call([sys.executable, '-c', 'print(input())']))",
  ],
)
def test_programs_that_treat_stdin_and_stdout_in_their_own_way(program):
  assert grade(program, stdio(("2 3\n", "2 3\n"), ("7\n", "7"))).reward == 1.0


def test_a_watcher_that_comes_late_still_sees_a_timeout(monkeypatch):
  """The kernel has stopped the program by then: for its CPU time, and the verdict says so."""
  monkeypatch.setattr(sandbox.Sandbox, "check", lambda self: None)
  verdict = grade("def add(a, b):\n  while True: pass", time_limit_s=0.5)
  assert (verdict.reward, verdict.status) == (0.0, "timeout"), verdict
