"""Verdicts per second, beside the same work done plainly.

Command:  python benchmarks/bench_verify.py        (or make bench)

code       10 small tests a program, in the sandbox, against one fresh Python process a test
           (`subprocess.run`, as many at a time), which protects from nothing
math       short answers, warm, against `math_verify.verify(parse(gold), parse(answer))`
integer    the cheapest grader there is: what a pool costs an item
"""

from __future__ import annotations

import concurrent.futures
import os
import statistics
import subprocess
import sys
import time

from fadejax.verify import VerifierPool, sandbox

WORKERS = os.cpu_count() or 2
PROGRAM = "def add(a, b):\n  return a + b\n"
READS = "print(sum(map(int, input().split())))"
CASES = [(i, 3 * i - 7) for i in range(10)]


def timed(work, items: int, rounds: int = 3) -> tuple[float, float]:
  """(median items a second, CPU seconds an item of this process and its children)."""
  speeds = []
  before = os.times()
  for _ in range(rounds):
    start = time.perf_counter()
    work()
    speeds.append(items / (time.perf_counter() - start))
  after = os.times()
  used = sum(after[:4]) - sum(before[:4])
  return statistics.median(speeds), used / (items * rounds)


def row(name: str, ours: tuple[float, float], plain: tuple[float, float]) -> None:
  print(
    f"{name:28} {ours[0]:9.1f} /s  {1000 * ours[1]:8.2f} ms CPU   plain {plain[0]:9.1f} /s  "
    f"{1000 * plain[1]:8.2f} ms CPU   ratio {ours[0] / plain[0]:6.2f}"
  )


def fresh_processes(count: int) -> None:
  """One Python process a test, WORKERS at a time."""

  def one(case: tuple[int, int]) -> None:
    a, b = case
    text = f"{PROGRAM}assert add({a}, {b}) == {a + b}"
    subprocess.run([sys.executable, "-c", text], check=True)

  with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
    list(pool.map(one, CASES * count))


def fresh_on_stdin(count: int) -> None:
  """The same for a program that reads stdin: its output is compared here."""

  def one(case: tuple[int, int]) -> None:
    a, b = case
    command = [sys.executable, "-c", READS]
    done = subprocess.run(command, input=f"{a} {b}", capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(a + b)]

  with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
    list(pool.map(one, CASES * count))


def bench_code() -> None:
  forms = {
    "code, 10 asserts": {"asserts": [f"assert add({a}, {b}) == {a + b}" for a, b in CASES]},
    "code, 10 calls": {
      "function": "add",
      "calls": [{"args": [a, b], "expected": a + b} for a, b in CASES],
    },
    "code, 10 × stdin, stdout": {
      "stdin_stdout": [{"stdin": f"{a} {b}", "stdout": f"{a + b}"} for a, b in CASES]
    },
  }
  plain = timed(lambda: fresh_processes(10), 10)
  plain_on_stdin = timed(lambda: fresh_on_stdin(10), 10)
  with VerifierPool(WORKERS, 20) as pool:
    for name, tests in forms.items():
      program = READS if "stdin" in name else PROGRAM
      items = [("code", program, {"tests": tests})] * 40
      assert all(v.reward == 1.0 for v in pool.grade(items[:4])), pool.grade(items[:1])
      ours = timed(lambda items=items: pool.grade(items), len(items))
      row(name, ours, plain_on_stdin if "stdin" in name else plain)


def bench_math() -> None:
  import math_verify

  pairs = [
    (r"so the answer is $\boxed{\frac{1}{2}}$", "0.5"),
    ("$x = 42$", "42"),
    (r"\boxed{(2, 3]}", "(2,3]"),
    (r"the value is $\boxed{2\sqrt{3}}$", r"\sqrt{12}"),
  ]

  def plain() -> None:
    for text, gold in pairs * 25:
      math_verify.verify(math_verify.parse(gold), math_verify.parse(text))

  items = [("math", text, {"answer": gold}) for text, gold in pairs * 25]
  with VerifierPool(WORKERS, warm=["math"]) as pool:
    pool.grade(items)
    plain()
    row("math, short answers", timed(lambda: pool.grade(items), 100), timed(plain, 100))


def bench_integer() -> None:
  from fadejax.verify.puzzles import integer

  items = [("integer", "so 23 + 19 = 42", {"answer": 42})] * 2000

  def plain() -> None:
    for _, text, problem in items:
      integer(text, problem)

  with VerifierPool(WORKERS) as pool:
    pool.grade(items[:10])
    ours = timed(lambda: pool.grade(items), len(items))
    row("integer: the pool's overhead", ours, timed(plain, len(items)))


if __name__ == "__main__":
  print(f"{WORKERS} workers; items a second, CPU time an item, ratio of items a second")
  if reason := sandbox.why_not():
    print(f"code: left out ({reason})")
  else:
    bench_code()
  bench_math()
  bench_integer()
