"""The items of soak.py, each with the verdict that it must get, and graders that misbehave.

A case is made from its number, which its text holds, so that no two are alike and a verdict that
went to another item shows.
"""

from __future__ import annotations

import dataclasses
import os
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

from fadejax.verify import gym

LIMIT_S = 0.5  # CPU seconds of a hostile program: its wall deadline is four times that and 2 s
HOSTILE = 0.15  # share of the items


@dataclasses.dataclass(frozen=True)
class Case:
  """One item and what must come of it.

  Attributes:
    verifier, completion, problem: the item.
    reward: in [0, 1]; None for a `grader_error`.
    statuses: those that are right; several where a race inside the sandbox decides.
    says: what the verdict's detail must hold.
  """

  verifier: str
  completion: str
  problem: dict[str, Any]
  reward: float | None
  statuses: tuple[str, ...] = ("ok",)
  says: str = ""


# ------------------------------------------------------------------ graders, called in a worker

_LEAK: list[bytearray] = []


def fine(completion: str, problem: dict[str, Any]) -> float:
  return float(completion == problem["answer"])


def leaks(completion: str, problem: dict[str, Any]) -> float:
  _LEAK.append(bytearray(os.urandom(2**20)))
  return 1.0


def swells(completion: str, problem: dict[str, Any]) -> float:
  while True:
    _LEAK.append(bytearray(b"x") * 2**24)
    time.sleep(0.001)


def leaves(completion: str, problem: dict[str, Any]) -> float:
  os._exit(7)


def raises(completion: str, problem: dict[str, Any]) -> float:
  raise RuntimeError(f"no verdict on {completion}")


def spins(completion: str, problem: dict[str, Any]) -> float:
  while True:
    pass


def sleeps(completion: str, problem: dict[str, Any]) -> float:
  time.sleep(1000)
  return 1.0


def babbles(completion: str, problem: dict[str, Any]) -> float:
  """Writes what is no message into every descriptor that it finds, the channel too."""
  for number in range(3, 64):
    try:
      os.write(number, b"\xff\xff\xff\xff")
    except OSError:
      continue
  time.sleep(1000)
  return 1.0


def too_good(completion: str, problem: dict[str, Any]) -> float:
  return 1.5


def own(name: str, completion: str, reward: float | None, *statuses: str, says: str = "") -> Case:
  problem = {"function": f"soak_items:{name}", "answer": completion}
  return Case("python", completion, problem, reward, statuses or ("ok",), says)


# ------------------------------------------------------------------ programs


def asserts(program: str, n: int, reward: float, *statuses: str, **more: Any) -> Case:
  tests = {"asserts": [f"assert f(2) == {n + 2}", f"assert f(-1) == {n - 1}"], "functions": ["f"]}
  return Case("code", program, {"tests": {**tests, **more}}, reward, statuses or ("ok",))


def calls(program: str, n: int, reward: float, *statuses: str, says: str = "", **more: Any) -> Case:
  cases = [{"args": [2], "expected": n + 2}, {"args": [-1], "expected": n - 1}]
  tests = {"function": "f", "calls": cases, **more}
  return Case("code", program, {"tests": tests}, reward, statuses or ("ok",), says)


def stdio(program: str, n: int, reward: float, *statuses: str, says: str = "", **more: Any) -> Case:
  cases = [{"stdin": "2\n", "stdout": f"{n + 2}\n"}, {"stdin": "-1", "stdout": f"{n - 1}"}]
  tests = {"stdin_stdout": cases, **more}
  return Case("code", program, {"tests": tests}, reward, statuses or ("ok",), says)


def adds(n: int) -> str:
  return f"Here it is.\n```python\ndef f(x):\n  return x + {n}\n```\nThat adds {n}."


FORMS: list[Callable[..., Case]] = [asserts, calls, stdio]


def hostile(program: str, *statuses: str, **more: Any) -> list[Callable[[int], Case]]:
  """A program in every form of tests; what it does happens when it is loaded and when called."""
  body = program + "\ndef f(x): return None"
  return [
    lambda n, form=form: form(body, n, 0.0, *statuses, **{"time_limit_s": LIMIT_S, **more})
    for form in FORMS
  ]


FORGED = """
import json, os, struct
class Yes:
  __eq__ = lambda self, other: True
  __ne__ = lambda self, other: False
  __bool__ = lambda self: True
  __hash__ = lambda self: 5
def forge():
  words = [{"report": {"passed": 2, "fault": "", "detail": ""}}, {"value": 5}, {"ready": True},
           {"status": 0, "output": "5"}]
  for number in range(3, 64):
    for word in words:
      for order in "><":
        body = json.dumps(word).encode()
        try: os.write(number, struct.pack(order + "I", len(body)) + body)
        except OSError: pass
"""
FORK = "import os, time\nwhile True:\n  try:\n    if os.fork() == 0: {}\n  except OSError: pass"
FILL = """
import os
for i in range(100):
  try:
    with open("/tmp/%d" % i, "wb") as file:
      while file.write(b"x" * 65536): pass
  except OSError: pass
"""
SIGNAL = """
import os, signal
for pid in (os.getppid(), 1, -1, os.getpid()):
  try: os.kill(pid, signal.{})
  except OSError: pass
"""
DEEP = "import sys\nsys.setrecursionlimit(10**6)\ndef g(n): return g(n + 1) + 1\n{}"
LOSES = ("ok", "runtime_error")
STOPPED = ("timeout", "runtime_error")
TOO_MUCH = ("memory", "runtime_error")

# ------------------------------------------------------------------ kinds

Maker = Callable[[int], Case]


def one_of(*makers: Maker) -> Maker:
  return lambda n: makers[n % len(makers)](n)


def right_math(n: int) -> Case:
  gold, answer = [
    (f"{n}", rf"so it is $\boxed{{{n}}}$."),
    (rf"\frac{{{n}}}{{4}}", rf"\boxed{{{n / 4}}}"),
    (f"{n}", rf"the answer is $\sqrt{{{n * n}}}$"),
    (rf"({n}, 3]", rf"\boxed{{{n} < x \le 3}}"),
    (rf"{n}x+1", rf"$\boxed{{1 + {n}x}}$"),
    (rf"\{{1, {n}\}}", rf"\boxed{{{n}, 1}}"),
    (rf"{n}\%", rf"\boxed{{\frac{{{n}}}{{100}}}}"),
    (
      rf"\begin{{pmatrix}}{n}\\2\end{{pmatrix}}",
      rf"\boxed{{\begin{{bmatrix}}{n}\\2\end{{bmatrix}}}}",
    ),
    (rf"{n}+\sqrt{{2}}", rf"\boxed{{\sqrt2+{n}}}"),
  ][n % 9]  # fmt: skip
  return Case("math", answer, {"answer": gold}, 1.0, says=str(n) if n % 9 == 0 else "")


def wrong_math(n: int) -> Case:
  gold, answer = [
    (f"{n}", rf"\boxed{{{n + 1}}}"),
    (rf"\frac{{{3 * n + 1}}}{{3}}", rf"\boxed{{{n + 1 / 3:.3f}}}"),
    (rf"\sqrt{{{n * n + 1}}}", rf"\boxed{{{n}}}"),
    (rf"({n}, {n + 1})", rf"\boxed{{[{n}, {n + 1}]}}"),
    (rf"{n}x", rf"\boxed{{{n}y}}"),
  ][n % 5]
  return Case("math", answer, {"answer": gold}, 0.0)


def hard_math(n: int) -> Case:
  """Answers that would take for ever, or that no stack holds, if they were worked out."""
  answer = [
    "9^{9^{9^{9}}}",
    "99999999!",
    rf"\frac{{6^{{(6^{{(6^{{6}})}})}}-{n}}}{{25}}",
    "7" * 200_000,
    "{" * 5000 + str(n) + "}" * 5000,
    r"\frac{1}{" * 300 + str(n + 1) + "}" * 300,
    "+".join([str(n)] * 3000),
    r"\sqrt{2}^{\sqrt{2}^{\sqrt{2}^{99999}}}",
    "(" * 900 + "x" + ")^{99}" * 900,
    r"\sin(10^{10^{8}})",
    r"\binom{99999999}{44444444}",
    f"(x+{n})^{{{n}}}" * 40,
    "2^{-2^{40}}",
    rf"10^{{-99999}}+{n}",
  ][n % 14]
  return Case("math", rf"it is \boxed{{{answer}}}", {"answer": f"{n}"}, 0.0)


def beyond_math(n: int) -> Case:
  """Golds beyond our parser: the same text, or another, which math-verify is asked about."""
  top = n % 900  # more digits are refused before it is asked
  gold, answer = rf"\int_0^{{{top}}} {n}x dx", rf"\int_0^{{{top + n % 2}}} {n}x\,dx"
  return Case("math", rf"\boxed{{{answer}}}", {"answer": gold}, float(n % 2 == 0))


def countdown(n: int, expression: str, reward: float, *statuses: str) -> Case:
  problem = {"numbers": [3, 5, n + 7], "target": 15 + n + 7}
  return Case("countdown", expression, problem, reward, statuses or ("ok",))


def puzzle(n: int) -> Case:
  problem = {"dataset": "gcd", "entry": {"answer": str(n), "metadata": {}}}
  return Case("reasoning_gym", f"<answer>{n + n % 2}</answer>", problem, float(n % 2 == 0))


def nothing(n: int) -> Case:
  name = ("math", "integer", "code", "countdown", "exact")[n % 5]
  problem = {"answer": n, "tests": {"asserts": [f"assert f({n})"]}, "numbers": [n], "target": n}
  return Case(name, f"<think>It may be {n}, or", problem, 0.0, ("no_answer",))


HONEST: dict[str, tuple[float, Maker]] = {  # kind: (share of the honest, maker)
  "code, right, asserts": (0.12, lambda n: asserts(adds(n), n, 1.0)),
  "code, right, calls": (0.08, lambda n: calls(adds(n), n, 1.0)),
  "code, right, stdin": (0.08, lambda n: stdio(f"print(int(input()) + {n})", n, 1.0)),
  "code, wrong": (0.06, one_of(
    lambda n: asserts(adds(n + 1), n, 0.0),
    lambda n: calls(adds(n + 1), n, 0.0, says=f"expected {n + 2}"),
    lambda n: stdio(f"print(int(input()) + {n + 1})", n, 0.0, says=f"expected '{n + 2}"),
  )),
  "code, half right": (0.03, lambda n: calls(f"def f(x): return {n + 2}", n, 0.5, score="share")),
  "code, fails": (0.05, one_of(
    lambda n: asserts(f"def f(x): return x + {n} +", n, 0.0, "runtime_error"),
    lambda n: calls(f"def f(x): raise ValueError({n})", n, 0.0, "runtime_error", says=str(n)),
    lambda n: stdio("print(int(input()) / 0)", n, 0.0, "runtime_error"),
  )),
  "math, right": (0.16, right_math),
  "math, wrong": (0.06, wrong_math),
  "math, integrals": (0.02, beyond_math),
  "integer": (0.12, lambda n: Case("integer", f"so it is {n}", {"answer": n}, 1.0, says=str(n))),
  "integer, wrong": (0.04, lambda n: Case("integer", f"{n}", {"answer": n + 1}, 0.0, says=str(n))),
  "countdown": (0.05, one_of(
    lambda n: countdown(n, f"3*5+{n + 7}", 1.0),
    lambda n: countdown(n, f"<answer>{n + 7}+5*3 = {n + 22}</answer>", 1.0),
    lambda n: countdown(n, f"3+5+{n + 7}", 0.0),
  )),
  "exact, regex": (0.05, one_of(
    lambda n: Case("exact", f" {n} ", {"answer": str(n)}, 1.0),
    lambda n: Case("regex", f"{n}", {"pattern": r"\d+"}, 1.0),
    lambda n: Case("regex", f"{n}?", {"pattern": rf"{n + 1}", "match": "search"}, 0.0),
  )),
  "own function": (0.04, lambda n: own("fine", str(n), 1.0)),
  "no answer": (0.04, nothing),
}  # fmt: skip
if gym.available() == "":
  HONEST["reasoning-gym"] = (0.04, puzzle)

ATTACKS: dict[str, tuple[float, Maker]] = {  # kind: (share of the hostile, maker)
  "code, loops": (0.08, one_of(*hostile("while True: pass", "timeout"))),
  "code, sleeps": (0.02, one_of(*hostile("import time; time.sleep(1000)", "timeout"))),
  "code, memory": (0.07, one_of(
    *hostile("x = []\nwhile True: x.append(bytearray(10**6))", *TOO_MUCH, memory_mb=64),
    *hostile("x = bytearray(10**10)", *TOO_MUCH),
  )),
  "code, forks": (0.06, one_of(
    *hostile(FORK.format("pass"), *STOPPED),
    *hostile(FORK.format("time.sleep(60)"), *STOPPED),
    *hostile(FORK.format("os.setsid(); time.sleep(60)"), *STOPPED),
  )),
  "code, floods": (0.06, one_of(*hostile("while True: print('x' * 1000)", *STOPPED))),
  "code, exits": (0.08, one_of(
    *hostile("import os; os._exit(0)", "runtime_error", "ok"),
    *hostile("raise SystemExit(0)", "runtime_error", "ok"),
    lambda n: calls("import os\ndef f(x): os._exit(0)", n, 0.0, "runtime_error"),
    lambda n: asserts("def f(x): raise SystemExit(0)", n, 0.0, *LOSES),
  )),
  "code, signals": (0.06, one_of(
    *hostile(SIGNAL.format("SIGKILL"), *LOSES),
    *hostile(SIGNAL.format("SIGSEGV"), *LOSES),
    *hostile("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", "timeout"),
  )),
  "code, forges": (0.10, one_of(
    *hostile(f"{FORGED}\nforge()", *LOSES, "timeout"),
    lambda n: asserts(f"{FORGED}\ndef f(x): forge(); return 0", n, 0.0, *LOSES),
    lambda n: calls(f"{FORGED}\ndef f(x): forge(); return 0", n, 0.0, *LOSES),
    lambda n: asserts(f"{FORGED}\ndef f(x): return Yes()", n, 0.0, *LOSES),
    lambda n: calls(f"{FORGED}\ndef f(x): return Yes()", n, 0.0, *LOSES),
  )),
  "code, fills /tmp": (0.06, one_of(*hostile(FILL, *LOSES, "memory", "timeout"))),
  "code, recursion": (0.05, one_of(
    *hostile(DEEP.format("g(0)"), *TOO_MUCH, "timeout"),
    *hostile("(" * 5000 + ")" * 5000, "runtime_error"),
  )),
  "code, huge values": (0.05, one_of(
    lambda n: calls("def f(x): return 10 ** 200000", n, 0.0, *LOSES, "timeout"),
    lambda n: asserts("def f(x): return [[1] * 1000] * 1000", n, 0.0, *LOSES, "timeout"),
    lambda n: calls("def f(x): return iter(int, 1)", n, 0.0, *LOSES, "timeout"),
  )),
  "math, hard": (0.16, hard_math),
  "integer, countdown, hard": (0.04, one_of(
    lambda n: Case("integer", "7" * 200_000, {"answer": n}, 0.0),
    lambda n: countdown(n, "(" * 9000 + "3" + ")" * 9000, 0.0),
    lambda n: countdown(n, "*".join(["9" * 90] * 4), 0.0),
  )),
  "regex, catastrophe": (0.02, lambda n: Case(
    "regex", "a" * 40 + f"!{n}", {"pattern": "(a+)+"}, 0.0, ("timeout",)
  )),
  "own function, leaks": (0.02, lambda n: own("leaks", str(n), 1.0)),
  "own function, memory": (0.01, lambda n: own("swells", str(n), 0.0, "memory")),
  "own function, exits": (0.02, lambda n: own("leaves", str(n), None, "grader_error", says="died")),
  "own function, raises": (0.02, lambda n: own(
    "raises", str(n), None, "grader_error", says=f"no verdict on {n}"
  )),
  "own function, loops": (0.01, lambda n: own("spins", str(n), 0.0, "timeout")),
  "own function, sleeps": (0.005, lambda n: own("sleeps", str(n), 0.0, "timeout", says="wall")),
  "own function, babbles": (0.01, lambda n: own("babbles", str(n), None, "grader_error")),
  "own function, 1.5": (0.01, lambda n: own("too_good", str(n), None, "grader_error", says="1.5")),
}  # fmt: skip

CHEAP: dict[str, tuple[float, Maker]] = {
  kind: (1.0 if kind.startswith("code") else 8.0, maker) for kind, (_, maker) in HONEST.items()
}


def drawn(
  kinds: dict[str, tuple[float, Maker]], count: int, first: int
) -> Iterator[tuple[str, Case]]:
  """`count` cases, each kind by its share and at least once, numbered from `first`."""
  total = sum(share for share, _ in kinds.values())
  number, given, target = first, 0, 0.0
  for index, (kind, (share, maker)) in enumerate(kinds.items()):
    target += count * share / total
    left = len(kinds) - index - 1
    take = min(max(1, round(target) - given), max(1, count - given - left))
    for _ in range(take):
      yield kind, maker(number)
      number += 1
    given += take


def mixed(count: int, seed: int, *, flat: bool = False) -> list[tuple[str, Case]]:
  """(kind, case) of every item, shuffled: honest and hostile ones, or only cheap honest ones."""
  if flat:
    cases = list(drawn(CHEAP, count, 0))
  else:
    attacks = round(HOSTILE * count)
    cases = [*drawn(HONEST, count - attacks, 0), *drawn(ATTACKS, attacks, count - attacks)]
  random.Random(seed).shuffle(cases)
  return cases
