from __future__ import annotations

import gc
import os
import queue
import signal
import subprocess
import sys
import threading
import time

import pytest

from fadejax.verify import Verdict, VerifierPool, check_problem, grade, graders, sandbox
from fadejax.verify.pool import program_s
from fadejax.verify.process import WorkerProcess


def _own(name, completion="x", **fields):
  return ("python", completion, {"function": f"graders_for_tests:{name}", **fields})


def _integer(text, answer=7):
  return ("integer", text, {"answer": answer})


def _alive(pid):
  try:
    with open(f"/proc/{pid}/stat") as file:
      return file.read().rpartition(")")[2].split()[0] != "Z"
  except FileNotFoundError:
    return False


def _children():
  """Pids of this process's children, zombies included."""
  found = []
  for entry in os.listdir("/proc"):
    if entry.isdigit():
      try:
        with open(f"/proc/{entry}/stat") as file:
          if int(file.read().rpartition(")")[2].split()[1]) == os.getpid():
            found.append(int(entry))
      except (FileNotFoundError, ProcessLookupError):
        continue
  return found


def _wait(condition, seconds=10.0):
  end = time.monotonic() + seconds
  while not condition() and time.monotonic() < end:
    time.sleep(0.02)
  return condition()


@pytest.fixture(scope="module")
def pool():
  # Touching 200 MB may take a busy machine the 0.5 s, and a timeout would come first.
  with VerifierPool(workers=2, timeout_s=0.5, memory_mb=120) as shared:
    yield shared


def test_order_and_count(pool):
  items = [_integer(str(i), 7 * (i % 3)) for i in range(300)]
  verdicts = pool.grade(items)
  assert [v.reward for v in verdicts] == [float(i == 7 * (i % 3)) for i in range(300)]
  assert pool.grade([]) == []
  naps = [_own("nap", "0.2"), *[_own("nap", "0") for _ in range(10)], _own("good", "a", answer="b")]
  assert [v.reward for v in pool.grade(naps)] == [1.0] * 11 + [0.0]


def test_every_fate_gets_its_own_verdict(pool, tmp_path):
  """Hostile items among honest ones: each has its status, the honest ones are untouched."""
  fates = [
    (_own("busy"), "timeout"),
    (_own("holds_the_gil"), "timeout"),
    (_own("sleep"), "timeout"),
    (_own("die"), "grader_error"),
    (_own("crash"), "grader_error"),
    (_own("leave"), "grader_error"),
    (_own("segfault"), "grader_error"),
    (_own("eat_memory"), "memory"),
    (_own("allocate"), "memory"),
    (_own("too_much"), "grader_error"),
    (_own("not_a_number"), "grader_error"),
    (_own("a_list"), "grader_error"),
    (_own("prints"), "ok"),
    (_own("reads"), "ok"),
    (_own("sees"), "ok"),
    (_own("no_such_function"), "grader_error"),
    (("python", "x", {"function": "os"}), "grader_error"),
    (("regex", "a" * 40 + "!", {"pattern": "(a+)+"}), "timeout"),
    (("math", r"\boxed{7}", {"answer": "see the figure"}), "grader_error"),
    (("integer", "7", {"answer": "seven"}), "grader_error"),
    (("integer", "none", {"answer": 7}), "no_answer"),
  ]
  items, expected = [], []
  for item, status in fates:
    items += [item, _integer("7")]
    expected += [status, "ok"]
  verdicts = pool.grade(items)
  assert [v.status for v in verdicts] == expected, [v for v in verdicts if v.status != "ok"]
  assert all(v.reward == 1.0 for v in verdicts[1::2])
  by_name = dict(zip([str(item[2]) for item, _ in fates], verdicts[::2], strict=True))
  detail = {name: verdict.detail for name, verdict in by_name.items()}
  assert "the grader's own fault" in detail[str(_own("crash")[2])]
  assert "graders_for_tests:too_much returned 1.5" in detail[str(_own("too_much")[2])]
  assert all(by_name[str(_own(n)[2])].reward == 1.0 for n in ("prints", "reads", "sees"))


def test_a_sleeper_runs_once_more_alone_before_it_is_a_timeout(tmp_path):
  with VerifierPool(workers=2, timeout_s=0.25) as pool:
    item = _own("slow_first_time", mark=str(tmp_path / "mark"))
    assert pool.grade([item, _integer("7")])[0].reward == 1.0
    start = time.monotonic()
    verdict = pool.grade([_own("sleep")])[0]
    assert verdict.status == "timeout" and "wall" in verdict.detail
    assert 2.0 <= time.monotonic() - start < 8.0  # twice the wall deadline of 1 s


def test_cpu_time_decides_not_wall_time():
  with VerifierPool(workers=1, timeout_s=0.5) as pool:
    assert pool.grade([_own("nap", "1.0")])[0].reward == 1.0
    start = time.monotonic()
    assert pool.grade([_own("busy")])[0].status == "timeout"
    assert time.monotonic() - start < 6.0


def test_a_crash_is_retried_on_a_fresh_worker(tmp_path):
  with VerifierPool(workers=1, timeout_s=5) as pool:
    item = _own("die_first_time", mark=str(tmp_path / "mark"))
    assert pool.grade([item])[0] == Verdict(1.0, "ok")


def test_a_worker_killed_from_outside_mid_item(tmp_path):
  with VerifierPool(workers=1, timeout_s=5) as pool:
    pool.grade([_own("nap", "0")])
    (victim,) = [slot.worker.pid for slot in pool._slots]
    threading.Timer(0.2, os.kill, (victim, signal.SIGKILL)).start()
    assert pool.grade([_own("nap", "0.6"), _integer("7")]) == [
      Verdict(1.0, "ok"),
      Verdict(1.0, "ok", "7"),
    ]
    (other,) = [slot.worker.pid for slot in pool._slots]
    assert other != victim
    os.kill(other, signal.SIGKILL)  # and one that dies while idle
    time.sleep(0.1)
    assert pool.grade([_integer("7")])[0].reward == 1.0


def test_a_corrupted_channel_costs_only_its_item():
  with VerifierPool(workers=1, timeout_s=0.5) as pool:
    verdicts = pool.grade([_own("corrupts"), _integer("7")])
    assert verdicts[0].reward in (None, 0.0) and verdicts[1].reward == 1.0


def test_the_children_of_a_hung_grader_die_with_it(tmp_path):
  with VerifierPool(workers=1, timeout_s=0.2) as pool:
    mark = tmp_path / "pid"
    assert pool.grade([_own("spawns", mark=str(mark))])[0].status == "timeout"
    assert _wait(lambda: not _alive(int(mark.read_text())))


def test_recycling(tmp_path):
  mark = tmp_path / "pids"
  with VerifierPool(workers=1, recycle_after=5) as pool:
    pool.grade([_own("worker_pid", mark=str(mark))] * 20)
  pids = mark.read_text().split()
  assert len(pids) == 20 and len(set(pids)) == 4


def test_a_leak_costs_no_item_its_verdict():
  """40 MiB an item, of 200: a worker is replaced before it reaches its limit."""
  with VerifierPool(workers=1, memory_mb=200) as pool:
    assert [v.status for v in pool.grade([_own("leaks"), _own("nap", "0.1")] * 8)] == ["ok"] * 16


def test_two_thousand_items_leave_nothing_behind():
  """Flat memory in the worker, no zombie, no descriptor more, nobody left after close."""
  before = set(_children())
  pool = VerifierPool(workers=2, recycle_after=10**6)
  pool.grade([_integer("7")] * 200)
  resident = [slot.worker.resident_mb() for slot in pool._slots]
  gc.collect()
  descriptors = len(os.listdir("/proc/self/fd"))
  assert all(v.reward == 1 for v in pool.grade([_integer("it is 7")] * 2000))
  gc.collect()
  assert len(os.listdir("/proc/self/fd")) == descriptors
  grown = [slot.worker.resident_mb() for slot in pool._slots]
  assert all(new - old < 4 for old, new in zip(resident, grown, strict=True)), (resident, grown)
  pool.grade([_own("die")] * 3)
  assert len(os.listdir("/proc/self/fd")) <= descriptors
  assert len(set(_children()) - before) == len(pool._slots) <= 2
  pool.close()
  pool.close()
  assert set(_children()) <= before
  with pytest.raises(ValueError, match="closed"):
    pool.grade([_integer("7")])


def test_threads_share_a_pool(pool):
  found: dict[int, list[float | None]] = {}

  def work(n):
    found[n] = [v.reward for v in pool.grade([_integer(str(i), n) for i in range(50)])]

  threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert found == {n: [float(i == n) for i in range(50)] for n in range(6)}
  # Workers outlive the thread that started them.
  assert pool.grade([_integer("7")])[0].reward == 1.0


def test_large_items_pass_the_pipe(pool):
  text = "word " * 400_000 + "7"
  assert [v.reward for v in pool.grade([_integer(text)] * 3)] == [1.0] * 3


def test_bad_calls_are_refused_before_anything_runs(pool):
  with pytest.raises(ValueError, match="expected one of code, countdown"):
    pool.grade([("maths", "1", {})])
  with pytest.raises(TypeError, match="item 1"):
    pool.grade([_integer("7"), ("integer", None, {"answer": 7})])
  with pytest.raises(TypeError, match="JSON"):
    pool.grade([("integer", "7", {"answer": {1, 2}})])
  for settings in ({"workers": 0}, {"timeout_s": 0}, {"memory_mb": -1}, {"recycle_after": 0}):
    with pytest.raises(ValueError, match=next(iter(settings))):
      VerifierPool(**settings)


def test_surrogates_and_control_characters(pool):
  text = "\ud800 \x00 \u2028 7"
  assert pool.grade([_integer(text)])[0].reward == 1.0


def test_the_default_pool():
  assert grade("integer", "7", {"answer": 7}).reward == 1.0
  assert grade("countdown", "3*5+7", {"numbers": [3, 5, 7], "target": 22}).reward == 1.0


def test_warm_workers_have_imported_their_graders():
  with VerifierPool(1, timeout_s=5, warm=["math"]) as pool:
    assert pool.grade([("math", r"\boxed{7}", {"answer": "7"})])[0].reward == 1.0
  with pytest.raises(ValueError, match="unknown verifier"):
    VerifierPool(1, warm=["maths"])


def test_imports_do_not_count_as_the_items_time():
  """reasoning_gym takes over a second to import; the item's deadline is far below that."""
  pytest.importorskip("reasoning_gym")
  problem = {"dataset": "gcd", "entry": {"answer": "4", "metadata": {}}}
  with VerifierPool(1, timeout_s=0.3) as pool:
    verdicts = pool.grade([("reasoning_gym", "5", problem), ("reasoning_gym", "4", problem)])
  assert [v.reward for v in verdicts] == [0.0, 1.0], verdicts


SCRIPT = """
import signal, sys, time
from fadejax.verify import VerifierPool
pool = VerifierPool(1, timeout_s=30)
pool.grade([("integer", "7", {"answer": 7})])
print(pool._slots[0].worker.pid, flush=True)
"""


def _script(rest):
  environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
  process = subprocess.Popen(
    [sys.executable, "-c", SCRIPT + rest],
    text=True,
    stdout=subprocess.PIPE,
    env=environment,
    start_new_session=True,
  )
  assert process.stdout is not None
  return process, int(process.stdout.readline())


HUNG = 'pool.grade([("python", "1000", {"function": "graders_for_tests:nap"})])'


@pytest.mark.parametrize("rest", ["time.sleep(1000)", HUNG])
def test_workers_die_with_their_parent(rest):
  """Also those in the middle of an item, when the parent is killed."""
  process, worker = _script(rest)
  time.sleep(0.3)
  assert _alive(worker)
  process.kill()
  process.wait()
  assert _wait(lambda: not _alive(worker))
  process.stdout.close()


def test_exit_without_close_leaves_no_worker():
  process, worker = _script("")
  assert process.wait(timeout=20) == 0
  assert not _alive(worker)
  process.stdout.close()


def test_ctrl_c_reaches_the_trainer_and_not_the_workers():
  """SIGINT to the trainer's whole group: the trainer decides, the pool is usable after it."""
  process, _ = _script(
    f"""
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job starts without
try:
  {HUNG}
except KeyboardInterrupt:
  print(pool.grade([("integer", "7", {{"answer": 7}})])[0].reward, flush=True)
try:
  print("ready", flush=True)
  time.sleep(1000)
except KeyboardInterrupt:
  print(pool._slots[0].worker.gone(), flush=True)
"""
  )
  time.sleep(0.3)
  os.killpg(process.pid, signal.SIGINT)
  assert process.stdout.readline() == "1.0\n" and process.stdout.readline() == "ready\n"
  time.sleep(0.1)
  os.killpg(process.pid, signal.SIGINT)
  assert process.stdout.readline() == "False\n"
  assert process.wait(timeout=20) == 0
  process.stdout.close()


def test_workers_that_cannot_start_say_so(monkeypatch, capfd):
  monkeypatch.setattr(sys, "executable", "/bin/false")
  with VerifierPool(1) as pool, pytest.raises(RuntimeError, match="do not start"):
    pool.grade([_integer("7")])


# ----------------------------------------------------- workers that are elsewhere


class ThreadWorker:
  """A worker of another kind: no process, no descriptor to wait for, nothing to measure."""

  def __init__(self, arguments):
    assert arguments[:2] == ["-m", "fadejax.verify.worker"]
    self.answers = queue.SimpleQueue()
    self.answers.put({"ready": True})
    self.ended = False

  def send(self, message):
    threading.Thread(target=self._grade, args=(message,), daemon=True).start()

  def _grade(self, message):
    name, completion, problem = (message[key] for key in ("name", "completion", "problem"))
    self.answers.put({"id": message["id"], "start": True})
    if completion == "die":
      self.ended = True
      return
    try:
      verdict = graders.run(name, completion, problem)
    except RuntimeError as error:
      self.answers.put({"id": message["id"], "error": str(error)})
    else:
      self.answers.put({"id": message["id"], "verdict": vars(verdict)})

  def receive(self):
    while not self.answers.empty():
      yield self.answers.get()

  def events(self):
    return {}

  def gone(self):
    return self.ended

  def cpu_s(self):
    return None

  def resident_mb(self):
    return 0.0

  def kill(self):
    self.ended = True
    return "let go"


def test_an_executor_of_another_kind(tmp_path):
  """Order, deadlines and retries are the pool's, wherever its workers are."""
  started = []

  def executor(arguments):
    started.append(ThreadWorker(arguments))
    return started[-1]

  items = [_integer(str(i), i if i % 3 else -1) for i in range(7)]
  items += [_own("nap", "2"), _own("crash"), _own("good", "die"), _own("good", "a", answer="a")]
  with VerifierPool(2, timeout_s=0.25, executor=executor) as pool:
    verdicts = pool.grade(items)
    assert len(started) == 6  # two, one after the deadline, one a crash or death but the last
  assert [v.reward for v in verdicts] == [0, 1, 1, 0, 1, 1, 0, 0, None, None, 1]
  assert [v.status for v in verdicts[7:]] == ["timeout", "grader_error", "grader_error", "ok"]
  assert [v.detail for v in verdicts[7:10]] == [
    "over 0.25 s of wall time",
    "grader python failed twice: the grader's own fault",
    "grader python failed twice: the worker died (let go)",
  ]
  assert all(worker.ended for worker in started)


def test_workers_behind_another_command(tmp_path):
  """As behind ssh: the command is not the worker, but its channel is."""

  def behind_a_shell(arguments):
    shell = ["sh", "-c", '"$@"; exit $?', "sh", sys.executable]
    return WorkerProcess([*shell, *arguments], here=False)

  sandbox.adopt_orphans()  # as a process that has graded programs: what is left comes to it
  before = set(_children())
  mark = tmp_path / "pids"
  items = [
    _own("busy"),
    _own("die"),
    _own("die_first_time", mark=str(tmp_path / "mark")),
    _own("allocate"),
    _own("worker_pid", mark=str(mark)),
    _integer("word " * 100_000 + "7"),
  ]
  with VerifierPool(2, timeout_s=0.5, executor=behind_a_shell) as pool:
    verdicts = pool.grade(items)
  found = [v.status for v in verdicts]
  assert found == ["timeout", "grader_error", "ok", "memory", "ok", "ok"], verdicts
  assert verdicts[2].reward == verdicts[5].reward == 1.0
  assert set(_children()) <= before
  assert _wait(lambda: not _alive(int(mark.read_text())))


# ----------------------------------------------------- deadlines of programs


def test_program_s():
  limit = sandbox.Limits.cpu_s
  for tests, expected in [
    ({"time_limit_s": 3}, 3.0),
    ({"time_limit_s": "2.5"}, 2.5),
    ('{"time_limit_s": 7}', 7.0),
    ({}, limit),
    ("{}", limit),
    ('{"time_limit_s"', limit),
    (None, limit),
    ([1], limit),
    ({"time_limit_s": None}, limit),
    ({"time_limit_s": 10**400}, limit),
    ({"time_limit_s": -1}, 0.0),
    ({"time_limit_s": float("inf")}, 0.0),
  ]:
    assert program_s("code", {"tests": tests}) == expected, tests
  assert program_s("math", {"tests": {"time_limit_s": 3}}) == 0.0


@pytest.mark.skipif(sandbox.why_not() != "", reason=sandbox.why_not() or "there is one")
def test_a_pool_does_not_undercut_the_limits_of_a_program(tmp_path):
  """It uses over twice `timeout_s`, and waits for over four times that, within its own limits."""
  program = """
import time
def add(a, b):
  while time.process_time() < 0.6: pass
  time.sleep(1.0)
  return a + b
"""
  tests = {"asserts": ["assert add(2, 3) == 5"], "time_limit_s": 3}
  with VerifierPool(1, timeout_s=0.3) as pool:
    pool.grade([("code", "add = 1", {"tests": tests})])
    began = time.monotonic()
    assert pool.grade([("code", program, {"tests": tests})])[0].reward == 1.0
    assert time.monotonic() - began < 3.0  # run once


def test_check_problem():
  assert check_problem({"verifier": "integer", "answer": 7}) == ""
  assert check_problem({"verifier": "math", "answer": r"\frac12"}) == ""
  assert check_problem({"verifier": "python", "function": "a:b"}) == ""
  assert check_problem({"verifier": "regex", "pattern": "a+"}) == ""
  for problem, reason in [
    ({}, "'verifier' is missing"),
    ({"verifier": "math"}, "'answer'"),
    ({"verifier": "math", "answer": "see the figure"}, "invalid gold"),
    ({"verifier": "x"}, "unknown"),
    ({"verifier": "countdown", "numbers": [1]}, "'target'"),
    ({"verifier": "regex", "pattern": "("}, ""),
    ({"verifier": "reasoning_gym", "dataset": "gcd"}, "'entry'"),
    ({"verifier": "python"}, "'function'"),
  ]:
    found = check_problem(problem)
    assert found and reason in found, (problem, found)
