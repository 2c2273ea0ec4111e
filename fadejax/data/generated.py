"""Tasks that make their problems: sums, Countdown, reasoning-gym.

A record is a pure function of (seed, index). What is held out for evaluation is decided by a
hash of the problem itself, so no seed ever trains on it, and the evaluation problems are the
same for every seed.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

from fadejax.data.records import (
  Generated,
  Record,
  Task,
  TaskConfig,
  options_of,
  refuse_files,
  stable_hash,
  take_eval,
)
from fadejax.verify.gym import warn_untested

DRAW_TRIES = 10_000  # draws of one record before the options are called impossible


def held_out(key: str, one_in: int) -> bool:
  """Whether the problem with this canonical key is for evaluation (one in `one_in` is)."""
  return stable_hash(key) % one_in == 0


def draw_until(make: Callable[[], Record | None], what: str) -> Record:
  """The first record that `make` accepts.

  Raises:
    ValueError: none in DRAW_TRIES tries: the options leave nothing.
  """
  for _ in range(DRAW_TRIES):
    record = make()
    if record is not None:
      return record
  raise ValueError(f"task.options: no {what} problem fits them in {DRAW_TRIES} tries")


# ---------------------------------------------------------------- arithmetic

QUESTION = "What is {a} + {b}? Answer with just the number."
ONE, TWO = range(0, 10), range(10, 100)
# name -> ranges of the operands, in either order
LEVELS = {"1+1": (ONE, ONE), "1+2": (ONE, TWO), "2+2": (TWO, TWO)}


def _pair_key(a: int, b: int) -> str:
  return f"arithmetic {min(a, b)}+{max(a, b)}"


def _sum_record(name: str, level: str, a: int, b: int) -> Record:
  return {
    "id": f"{a}+{b}",
    "prompt": QUESTION.format(a=a, b=b),
    "verifier": "integer",
    "answer": a + b,
    "level": level,
    "task": name,
  }


def arithmetic(config: TaskConfig, seed: int) -> Task:
  """Sums of two numbers of one or two digits, in levels drawn uniformly.

  About one unordered pair in five is held out, by a hash of the pair. The evaluation takes
  from each level in turn as long as it has pairs left (1+1 has about twenty).

  Options: `levels`, a list of names of LEVELS; `label`, the task's name in metrics.
  """
  refuse_files(config)
  options = options_of(config, {"levels": list(LEVELS), "label": "arithmetic"})
  levels, name = list(options["levels"]), options["label"]
  if not levels or len(set(levels)) < len(levels) or not set(levels) <= LEVELS.keys():
    raise ValueError(f"task.options.levels {levels}: wanted some of {list(LEVELS)}, each once")

  def make(index: int) -> Record:
    rng = random.Random(f"arithmetic {seed} {index}")

    # Drawn once: a pair that is held out must not make its level rarer.
    level = rng.choice(levels)
    first, second = LEVELS[level]

    def attempt() -> Record | None:
      a, b = rng.choice(first), rng.choice(second)
      if rng.randrange(2):
        a, b = b, a
      return None if held_out(_pair_key(a, b), 5) else _sum_record(name, level, a, b)

    return draw_until(attempt, "arithmetic")

  evaluation = take_eval(_held_out_sums(levels, name), config.eval_problems, "arithmetic")
  return Task(
    name=name,
    train=Generated(make),
    eval=evaluation,
    generated=True,
    demonstrations=lambda record: str(record["answer"]),
    alphabet="".join(sorted(set(QUESTION.format(a="", b="") + "0123456789"))),
  )


def _held_out_sums(levels: list[str], name: str) -> Iterator[Record]:
  """Every held-out sum once, both orders, the levels in turn, in a fixed shuffled order."""
  columns = []
  for level in levels:
    first, second = LEVELS[level]
    pairs = {p for ab in itertools.product(first, second) for p in (ab, ab[::-1])}
    kept = [p for p in pairs if held_out(_pair_key(*p), 5)]
    kept.sort(key=lambda p: (stable_hash(f"order {p[0]}+{p[1]}"), p))
    columns.append([_sum_record(name, level, *p) for p in kept])
  for row in itertools.zip_longest(*columns):
    yield from (record for record in row if record is not None)


# ---------------------------------------------------------------- countdown

# An expression under construction: value, text, and precedence of its outermost operator
# (1: sum or difference, 2: product or quotient, 3: a number).
Expression = tuple[int, str, int]


def _combine(left: Expression, right: Expression, operator: str) -> Expression | None:
  """left operator right with the fewest parentheses, None where it leaves the whole numbers."""
  (a, left_text, left_rank), (b, right_text, right_rank) = left, right
  rank = 1 if operator in "+-" else 2
  if operator == "/" and (b == 0 or a % b):
    return None
  value = {"+": a + b, "-": a - b, "*": a * b, "/": a // b if b else 0}[operator]
  if left_rank < rank:
    left_text = f"({left_text})"
  if right_rank < rank or (right_rank == rank and operator in "-/"):
    right_text = f"({right_text})"
  return value, left_text + operator + right_text, rank


def _random_expression(rng: random.Random, numbers: list[int], operators: str) -> Expression | None:
  """A random tree over the numbers in their order; None where a quotient is not whole."""
  if len(numbers) == 1:
    return numbers[0], str(numbers[0]), 3
  cut = rng.randrange(1, len(numbers))
  left = _random_expression(rng, numbers[:cut], operators)
  right = _random_expression(rng, numbers[cut:], operators)
  if left is None or right is None:
    return None
  return _combine(left, right, rng.choice(operators))


def countdown(config: TaskConfig, seed: int) -> Task:
  """Write an expression that uses each number once and equals the target: "3 5 7 = 22:".

  The target is the value of a random expression, which is the demonstration. A problem is
  the multiset of its numbers with its target; about one in ten is held out.

  Options: `sizes`, how many numbers, and `weights` of the sizes; `max_number` (numbers are 1
  to it); `max_target` (targets are 1 to it); `division`; `label`, the name in metrics.
  """
  refuse_files(config)
  options = options_of(
    config,
    {
      "sizes": [3, 4, 5],
      "weights": None,
      "max_number": 9,
      "max_target": 99,
      "division": False,
      "label": "countdown",
    },
  )
  sizes = list(options["sizes"])
  weights = list(options["weights"] or [1.0] * len(sizes))
  if not sizes or min(sizes) < 2 or len(weights) != len(sizes) or min(weights) <= 0:
    raise ValueError(
      f"task.options: sizes {sizes} (each at least 2) with weights {weights} (each above 0)"
    )
  for bound in ("max_number", "max_target"):
    if options[bound] < 1:
      raise ValueError(f"task.options.{bound}: must be at least 1, got {options[bound]}")
  operators = "+-*/" if options["division"] else "+-*"

  def attempt(rng: random.Random, size: int, want_held_out: bool) -> Record | None:
    numbers = [rng.randint(1, options["max_number"]) for _ in range(size)]
    expression = _random_expression(rng, numbers, operators)
    if expression is None or not 1 <= expression[0] <= options["max_target"]:
      return None
    shown = rng.sample(numbers, size)  # the order must not give the answer away
    record = _countdown_record(options["label"], shown, expression[0], expression[1])
    return record if held_out(record["id"], 10) == want_held_out else None

  def make(index: int) -> Record:
    rng = random.Random(f"countdown {seed} {index}")
    size = rng.choices(sizes, weights)[0]
    return draw_until(lambda: attempt(rng, size, False), "countdown")

  def evaluation() -> Iterator[Record]:
    rng, left = random.Random("countdown evaluation"), list(sizes)
    seen: set[str] = set()
    while left:
      for size in tuple(left):
        tries = (attempt(rng, size, True) for _ in range(DRAW_TRIES))
        found = next((r for r in tries if r is not None and r["id"] not in seen), None)
        if found is None:
          left.remove(size)  # it has no more problems: the other sizes go on
          continue
        seen.add(found["id"])
        yield found

  return Task(
    name=options["label"],
    train=Generated(make),
    eval=take_eval(evaluation(), config.eval_problems, "countdown"),
    generated=True,
    demonstrations=lambda record: record["solution"],
    alphabet="0123456789+-*/()= :",
  )


def _countdown_record(name: str, numbers: list[int], target: int, solution: str) -> Record:
  key = " ".join(map(str, sorted(numbers)))
  return {
    "id": f"{key} = {target}",
    "prompt": f"{' '.join(map(str, numbers))} = {target}:",
    "verifier": "countdown",
    "numbers": numbers,
    "target": target,
    "solution": solution,
    "task": name,
  }


# ------------------------------------------------------------ reasoning-gym

# Entries of the data set that belong to one record: tries for one that is not held out.
GYM_STRIDE = 16
# An entry's own seed is the data set's plus its index; some data sets hand it to NumPy, which
# takes 32 bits. 2^31 + 2^24 · 16 is within them.
GYM_SEEDS, GYM_RECORDS = 2**31, 2**24


def reasoning_gym(config: TaskConfig, seed: int) -> Task:
  """A data set of the package reasoning-gym (extra `puzzles`), which is imported only here.

  About one question in five is held out, by a hash of its text.

  Options: `dataset`, its name; `config`, its settings; `label`, the task's name in metrics
  (default: the data set's).
  """
  refuse_files(config)
  options = options_of(config, {"dataset": "", "config": {}, "label": ""})
  name, settings = options["dataset"], dict(options["config"])
  if not name or {"seed", "size"} & settings.keys():
    raise ValueError(
      "task.options: set dataset to a reasoning-gym name; its config takes no seed or size"
    )
  label = options["label"] or name
  try:
    import reasoning_gym as gym
  except ImportError as error:
    raise ValueError(
      "the task 'reasoning_gym' needs the extra `puzzles`: pip install 'fadejax[puzzles]'"
    ) from error

  def dataset(key: str) -> Any:
    start = stable_hash(f"reasoning_gym {key}") % GYM_SEEDS
    try:
      return gym.create_dataset(name, seed=start, size=GYM_RECORDS * GYM_STRIDE, **settings)
    except (ValueError, TypeError, AssertionError) as error:
      raise ValueError(f"task.options: reasoning-gym {name!r} with {settings}: {error}") from error

  def record(entry: Any, want_held_out: bool) -> Record | None:
    question = entry["question"]
    if held_out(question, 5) != want_held_out:
      return None
    return _gym_record(label, name, entry)

  training = dataset(f"train {seed}")
  warn_untested(name)

  def make(index: int) -> Record:
    for offset in range(GYM_STRIDE):
      found = record(training[index * GYM_STRIDE + offset], False)
      if found is not None:
        return found
    raise ValueError(
      f"task.options: {GYM_STRIDE} entries of {name!r} in a row are held out: too few questions"
    )

  def evaluation() -> Iterator[Record]:
    entries = dataset("evaluation")
    found = (record(entries[i], True) for i in range(100 * config.eval_problems))
    return (r for r in found if r is not None)

  problems = take_eval(evaluation(), config.eval_problems, f"reasoning-gym {name!r}")
  return Task(label, Generated(make, GYM_RECORDS), problems, generated=True)


def _gym_record(label: str, dataset: str, entry: Any) -> Record:
  try:
    plain = json.loads(json.dumps(entry))
  except (TypeError, ValueError) as error:
    raise ValueError(
      f"reasoning-gym {dataset!r}: an entry that JSON cannot hold: {error}"
    ) from error
  return {
    "id": f"{stable_hash(entry['question']):016x}",
    "prompt": entry["question"],
    "verifier": "reasoning_gym",
    "dataset": dataset,
    "entry": plain,
    "task": label,
  }
