"""What an attack on the grader of programs found: each was a way in, or an honest program refused.

Needs bubblewrap, as test_code.py does.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fadejax.verify import VerifierPool, cgroup, code_tests, sandbox, walls
from fadejax.verify.inside import plain

pytestmark = pytest.mark.skipif(sandbox.why_not() != "", reason=sandbox.why_not() or "there is one")

ROOT = Path(__file__).resolve().parents[2]
RIGHT = ("def f(x): return 5", {"asserts": ["assert f(1) == 5"]})
WRONG = ("def f(x): return 4", {"asserts": ["assert f(1) == 5"]})


def grade(*items):
  """Verdicts of (program, tests), in one worker, one after another."""
  with VerifierPool(workers=1, timeout_s=20) as pool:
    return pool.grade([("code", program, {"tests": tests}) for program, tests in items])


# ------------------------------------------------------- from one problem to the next

# Of the program's process: writes what it likes in place of an answer.
CHANNEL = """
import sys, time
frame = sys._getframe()
while "answers" not in frame.f_locals:
  frame = frame.f_back
answers, requests = frame.f_locals["answers"], frame.f_locals["requests"]
plain = sys.modules["plain"]
plain.write(answers, {"ready": True})
plain.read(requests)
"""


def test_an_answer_that_was_not_taken_is_no_task():
  """The tests evaluate what the program returns, and so leave a task in the judge's channel.

  Its own setup would wait for the next problem and report in that one's place.
  """
  setup = (
    "import gc, os, time, plain\ntime.sleep(0.5)\n"
    "c = [o for o in gc.get_objects() if type(o).__name__ == 'Channel'][0]\n"
    "plain.write(c.answers, {'report': {'passed': 1, 'fault': '', 'detail': ''}})\nos._exit(64)"
  )
  task = {"tests": ["0"], "setup": setup, "count": False, "functions": [], "modules": []}
  body = plain.encode(task)
  planted = plain.HEADER.pack(len(body)) + body
  message = plain.encode({"text": "", "name": "", "value": plain.encode(planted)})
  before = plain.HEADER.size + message.index(planted)
  evaluated = (
    "(lambda c, p, os: (p.write(c.answers, {'call': 'g', 'args': p.encode(()), 'kwargs': "
    f"p.encode({{}})}}), __import__('time').sleep(0.1), os.read(c.requests.fileno(), {before}), "
    "p.write(c.answers, {'report': {'passed': 1, 'fault': '', 'detail': ''}}), os._exit(64)))("
    "[c for c in __import__('gc').get_objects() if type(c).__name__ == 'Channel'][0], "
    "__import__('plain'), __import__('os'))"
  )
  program = f"def f(): return {evaluated!r}\ndef g(): return {planted!r}"
  tests = {"asserts": ["assert eval(f()) == 5"], "functions": ["f"]}
  own, wrong, right = grade((program, tests), WRONG, RIGHT)
  assert own.reward == 1.0  # tests that evaluate give their verdict away; it ends there
  assert (wrong.reward, right.reward) == (0.0, 1.0)


WAITERS = {
  "thread": """
import threading
def late(x):
  out = []
  thread = threading.Thread(target=lambda: out.append(f(x)), daemon=True)
  thread.start(); thread.join(0.2)
  return out
""",
  "alarm": """
import signal
class Late(Exception): pass
def stop(*_): raise Late
signal.signal(signal.SIGALRM, stop)
def late(x):
  signal.setitimer(signal.ITIMER_REAL, 0.2)
  try: return [f(x)]
  except Late: return []
  finally: signal.setitimer(signal.ITIMER_REAL, 0)
""",
}


@pytest.mark.parametrize("waiter", WAITERS)
def test_a_late_answer_does_not_reach_the_next_problem(waiter):
  """Nor does it keep the judge: it is longer than the channel holds."""
  program = (
    f"{CHANNEL}plain.write(answers, {{'found': {{'f': None}}}})\nplain.read(requests)\n"
    "time.sleep(0.3)\nplain.write(answers, {'found': {'f': [None] * 200000}})\ntime.sleep(9)"
  )
  tests = {"asserts": ["assert late(1) == []"], "setup": WAITERS[waiter], "functions": ["f"]}
  assert [v.reward for v in grade((program, tests), RIGHT, WRONG)][1:] == [1.0, 0.0]


def test_a_late_answer_is_not_the_next_question_s():
  program = "import time\ndef f(x):\n  if x == 1: time.sleep(0.4)\n  return x"
  asserts = ["assert late(1) == [1]", *(f"assert f({x}) == {x}" for x in (2, 3, 4))]
  tests = {"asserts": asserts, "setup": WAITERS["alarm"], "functions": ["f"], "score": "share"}
  (verdict,) = grade((program, tests))
  assert verdict.reward == 0.75, verdict


def test_threads_of_tests_ask_in_turn():
  test = (
    "import threading\nout = {}\n"
    "threads = [threading.Thread(target=lambda i=i: out.setdefault(i, f(i))) for i in range(9)]\n"
    "for t in threads: t.start()\nfor t in threads: t.join()\n"
    "assert out == {i: i for i in range(9)}"
  )
  (verdict,) = grade(("def f(x): return x", {"asserts": [test], "functions": ["f"]}))
  assert verdict.reward == 1.0, verdict


# ------------------------------------------------------- around a verdict: no grader_error

PLANTED = [  # what is found under a name of the program's is None or bytes
  "plain.write(answers, {'found': {'f': {1: 2}}})",
  # More values than `plain` sends, so packed by hand.
  """
n, count = plain.HEADER.pack, 4100000
body = b"d" + n(1) + b"s" + n(5) + b"found" + b"d" + n(1) + b"s" + n(1) + b"f"
body += b"l" + n(count) + b"N" * count
answers.write(n(len(body)) + body); answers.flush()
""",
]


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_look_up_is_the_program_s_fault(planted):
  (verdict,) = grade((f"{CHANNEL}{planted}\ntime.sleep(9)", WRONG[1]))
  assert (verdict.reward, verdict.status) == (0.0, "runtime_error"), verdict


@pytest.mark.parametrize("value", ["10**15000", "{10**15000: 1}", "[[10**15000]]"])
def test_an_integer_that_python_does_not_print_is_a_wrong_answer(value):
  tests = {"function": "f", "calls": [{"args": [1], "expected": {"2": 1}}]}
  (verdict,) = grade((f"def f(x): return {value}", tests))
  assert (verdict.reward, verdict.status) == (0.0, "ok"), verdict


@pytest.mark.parametrize("program", ["def g(): pass", "f = 5"])
@pytest.mark.parametrize("score", ["all", "share"])
def test_a_program_without_the_function_is_at_fault(program, score):
  """Though a test that needs nothing of it has passed before; HumanEval has such ones."""
  tests = {"asserts": ["assert True", "assert f(1) == 2"], "functions": ["f"], "score": score}
  (verdict,) = grade((program, tests))
  assert (verdict.reward, verdict.status) == (0.0, "runtime_error"), verdict


def test_tests_that_do_not_wait_have_asked():
  program = "import time\ndef f(x):\n  time.sleep(0.4)\n  return x"
  tests = {"asserts": ["assert late(1) == []"], "setup": WAITERS["thread"], "functions": ["f"]}
  (verdict,) = grade((program, tests))
  assert verdict.status == "ok", verdict


# ------------------------------------------------------- what is read of a program


def test_what_is_cut_off_of_an_output_does_not_make_it_right():
  tests = {"stdin_stdout": [{"stdin": "", "stdout": "5\n"}]}
  hidden, blanks = grade(
    ("print('5' + ' ' * 70000 + 'and more')", tests), ("print('5' + ' ' * 60000)", tests)
  )
  assert (hidden.reward, blanks.reward) == (0.0, 1.0)


@pytest.mark.parametrize("line", ["```" + " " * 10**6 + "`", "```" + "a" * 10**6 + "`"])
def test_a_long_fence_takes_no_time(line):
  began = time.process_time()
  assert code_tests.program_of(line) == line
  assert time.process_time() - began < 1.0


# ------------------------------------------------------- without a sandbox


def sleepers(seconds):
  """Processes `sleep` of so many seconds."""
  found = []
  for pid in filter(str.isdigit, os.listdir("/proc")):
    with contextlib.suppress(OSError):
      if Path(f"/proc/{pid}/cmdline").read_bytes() == f"sleep\0{seconds}\0".encode():
        found.append(int(pid))
  return found


@pytest.mark.parametrize("end", ["", "\nsys.stdout.flush(); os._exit(0)"])
@pytest.mark.parametrize("form", ["calls", "stdin"])
def test_what_outlives_the_first_process_is_ended(monkeypatch, form, end):
  """With its control group, which would else be left too."""
  monkeypatch.setattr(walls, "_chosen", "none")
  seconds = f"{100 + os.getpid()}.{len(end)}{len(form)}"
  program = f"import os, subprocess, sys\nsubprocess.Popen(['sleep', '{seconds}'])\nprint(5){end}"
  tests = {
    "calls": {"function": "f", "calls": [{"args": [], "expected": 5}]},
    "stdin": {"stdin_stdout": [{"stdin": "", "stdout": "5"}]},
  }[form]
  with VerifierPool(workers=1) as pool:
    (verdict,) = pool.grade([("code", program, {"tests": tests})])
    assert verdict.reward == (form == "stdin"), verdict
    assert sleepers(seconds) == []
    assert cgroup.groups(str(pool._slots[0].worker.pid)) == []


TRAINER = """
from fadejax.verify import VerifierPool, walls
walls.choose("none")
tests = {"stdin_stdout": [{"stdin": "", "stdout": "5"}]}
VerifierPool(workers=1).grade([("code", "import time; time.sleep(99)", {"tests": tests})])
"""


def owned(owner):
  """Commands of the living processes that carry this owner in their environment, by number."""
  found = {}
  for pid in filter(str.isdigit, os.listdir("/proc")):
    with contextlib.suppress(OSError):
      at = Path(f"/proc/{pid}")
      if f"{sandbox.OWNER}={owner}\0".encode() in at.joinpath("environ").read_bytes():
        found[int(pid)] = at.joinpath("cmdline").read_bytes()
  return found


def wait_for(condition):
  for _ in range(250):
    if condition():
      return
    time.sleep(0.02)
  raise AssertionError("waited for 5 s")


def test_a_killed_trainer_takes_what_sleeps_without_a_sandbox_along():
  owner = f"test_attacks {os.getpid()}"
  environment = {**os.environ, sandbox.OWNER: owner}
  trainer = subprocess.Popen([sys.executable, "-c", TRAINER], env=environment, cwd=ROOT)

  def programs():
    return [pid for pid, command in owned(owner).items() if b"import candidate" in command]

  try:
    wait_for(lambda: len(programs()) == 2)  # the first process, and that of the test
    trainer.kill()
    trainer.wait()
    wait_for(lambda: not programs())
  finally:
    trainer.kill()
    for pid in owned(owner):
      with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def test_files_without_a_name_where_there_are_none(monkeypatch, tmp_path):
  """As on the file system of many containers, where a program without a sandbox has its files."""
  monkeypatch.syspath_prepend(walls.INSIDE)
  candidate = importlib.import_module("candidate")
  real = os.open

  def refuse(path, flags, mode=0o777):
    if flags & os.O_TMPFILE == os.O_TMPFILE:
      raise OSError(errno.EOPNOTSUPP, "Operation not supported")
    return real(path, flags, mode)

  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(os, "open", refuse)
  files = [candidate.unnamed() for _ in range(2)]
  os.write(files[0], b"one")
  assert [os.pread(file, 9, 0) for file in files] == [b"one", b""]
  assert os.listdir(tmp_path) == []
  for file in files:
    os.close(file)


# ------------------------------------------------------- honest programs


def test_many_large_arguments_and_results():
  """The tests' own questions are not what a program may print, and right results have room."""
  asserts = {"asserts": ["assert f(list(range(100000))) == 100000"] * 8, "functions": ["f"]}
  result = list(range(100000))
  calls = {"function": "f", "calls": [{"args": [100000], "expected": result}] * 8}
  long, made = grade(
    ("def f(x): return len(x)", asserts), ("def f(n): return list(range(n))", calls)
  )
  assert long.reward == made.reward == 1.0, (long, made)
