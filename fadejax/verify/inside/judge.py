"""Runs the tests of problems inside a sandbox of its own; the candidates are elsewhere.

Every name that the tests take from the program is a stand-in: a call goes to the host, which asks
the candidate, and its result comes back as plain data. So no object of the candidate's is ever
compared here. Reports to the host after the last test.

A problem has a forked child to itself. What started it runs no tests, and says on a channel that
the child does not have that the child has ended and left nothing: no process, no file. Else it ends
too, and the host starts another. It reads no task before the host has said there that one comes, so
that the host sees what the child has left unread: an answer, that is, a program's own words.
"""

from __future__ import annotations

import _thread
import builtins
import gc
import os

import lock
import plain

REPORTED = 64  # exit code of a child that has said its report: tests may end the process themselves


class CandidateError(Exception):
  """What the program raised, where it is no builtin exception."""


class TestsAtFault(BaseException):
  """The tests did something that cannot be judged."""


class CandidateFault(BaseException):
  """The program died, or returned something that is no plain data."""


class Channel:
  """Questions to the candidate, by way of the host, one at a time: tests may have threads."""

  def __init__(self, requests, answers):
    self.requests, self.answers = requests, answers
    self.turn = _thread.allocate_lock()
    self.asked = self.answered = 0

  def ask(self, message):
    """The candidate's answer to one question, as a value or an exception."""
    with self.turn:
      self.asked += 1
      plain.write(self.answers, message)
      # An alarm of the tests may have ended their waiting before: that answer comes first.
      while self.answered < self.asked:
        reply = plain.read(self.requests)
        if reply is None:
          os._exit(0)
        self.answered += 1
    if "value" in reply:
      return plain.decode(reply["value"])
    if "raise" in reply:
      kind = vars(builtins).get(reply["raise"])
      if not (isinstance(kind, type) and issubclass(kind, Exception)):
        raise CandidateFault(f"the program raised {reply['name']}")  # SystemExit and its like
      # A stray StopIteration would end the tests' own loops before their end.
      if kind in (Exception, StopIteration, StopAsyncIteration):
        raise CandidateError(f"{reply['name']}: {reply['text']}")
      try:
        error = kind(reply["text"])
      except Exception:  # such as UnicodeDecodeError, which wants five arguments
        error = CandidateError(f"{reply['name']}: {reply['text']}")
      raise error
    raise CandidateFault(reply.get("not_plain", "the program died"))


def stand_in(channel, name):
  """A function that is called in the candidate."""

  def call(*args, **kwargs):
    try:
      message = {"call": name, "args": plain.encode(args), "kwargs": plain.encode(kwargs)}
    except plain.TooLarge as error:  # of what the program returned before
      raise CandidateFault(str(error)) from error
    except plain.NotPlain as error:
      raise TestsAtFault(f"the tests pass {error}") from error
    return channel.ask(message)

  call.__name__ = call.__qualname__ = name
  return call


def bind(channel, names, space):
  """Puts a stand-in, or a constant's value, under every one of the names that the program has.

  What it lacks stays unknown, and the test that uses it fails with a NameError.
  """
  plain.write(channel.answers, {"names": names})
  reply = plain.read(channel.requests)
  if reply is None:
    os._exit(0)
  for name, value in reply.get("found", {}).items():
    if name in names:
      space[name] = stand_in(channel, name) if value is None else plain.decode(value)


def names_in(code):
  """Every name in a piece of the tests, attributes too."""
  inner = [c for c in code.co_consts if isinstance(c, type(code))]
  return set(code.co_names).union(*map(names_in, inner))


def run(channel, task):
  """{"passed", "of", "fault", "detail"} of the tests, the first failure ends them unless "all"."""
  if "checker" in task:
    return check(channel, task)
  tests = [task["setup"], *task["tests"]]
  space = {"__name__": "tests"}
  try:
    codes = [compile(text, "tests", "exec", dont_inherit=True) for text in tests]
  except (SyntaxError, ValueError) as error:
    return {"passed": 0, "fault": "tests", "detail": f"the tests do not compile: {error}"}
  try:
    used = {name for code in codes for name in names_in(code)}
    space.update({name: __import__(name) for name in task["modules"] if name in used})
    exec(codes[0], space)
    bind(channel, task["functions"], space)
  except ValueError as error:
    return {"passed": 0, "fault": "candidate", "detail": str(error)}
  except Exception as error:
    detail = f"the tests' setup: {type(error).__name__}: {error}"
    return {"passed": 0, "fault": "tests", "detail": detail[:300]}
  passed, fault, detail = 0, "", ""
  for i, code in enumerate(codes[1:]):
    try:
      exec(code, space)
      passed += 1
    except TestsAtFault as error:
      return {"passed": passed, "fault": "tests", "detail": str(error)}
    except CandidateFault as error:
      fault, detail = "candidate", str(error)
    except AssertionError as error:
      fault, detail = "wrong", f"test {i}: {error}"
    except BaseException as error:  # whatever ends a test but its end is a failure
      fault, detail = "raised", f"test {i}: {type(error).__name__}: {error}"
    if fault and not task["count"]:
      break
  if passed and not channel.asked:
    if fault:  # it lacks what the later tests call: the program's fault, and nothing of it passed
      return {"passed": 0, "fault": fault, "detail": detail[:300]}
    return {"passed": 0, "fault": "tests", "detail": "the tests never call the program"}
  return {"passed": passed, "fault": fault, "detail": detail[:300]}


def check(channel, task):
  """Runs a checker on the outputs that the host sends, {"test", "output"}, until it sends another.

  Answers each with {"fault"}, "" where it is accepted. Before the first the checker must accept
  every expected output, else the report says that the tests are at fault.
  """
  space = {"__name__": "checker"}
  try:
    exec(compile(task["checker"], "checker", "exec", dont_inherit=True), space)
    checker = space["check"]
  except BaseException as error:
    detail = f"the checker: {type(error).__name__}: {error}"
    return {"passed": 0, "fault": "tests", "detail": detail[:300]}
  for i, (stdin, expected) in enumerate(task["cases"]):
    if fault := refusal(checker, stdin, expected, expected):
      detail = f"test {i}: the checker {fault} on the expected output"
      return {"passed": 0, "fault": "tests", "detail": detail[:300]}
  plain.write(channel.answers, {"ready": True})
  while (message := plain.read(channel.requests)) is not None and "output" in message:
    stdin, expected = task["cases"][message["test"]]
    fault = refusal(checker, stdin, message["output"], expected)
    plain.write(channel.answers, {"fault": fault})
  return {"passed": 0, "fault": "", "detail": ""}


def refusal(checker, stdin, output, expected):
  """What a checker does on an output instead of returning True, or ""."""
  try:
    said = checker(stdin, output, expected)
    if said is True:
      return ""
    return "says False" if said is False else f"returned {type(said).__name__}, not a bool"
  except BaseException as error:  # whatever the output makes it do, it has not accepted it
    return f"raised {type(error).__name__}: {error}"[:200]


def nothing_left():
  """Whether the child, which has ended, left no process and no file."""
  try:
    os.kill(-1, 0)
  except ProcessLookupError:  # there is nobody but this process and the namespace's first
    return not os.listdir(".")
  return False


def main():
  """Locks, then runs the tests of one problem after another, each in a child, which reports."""
  aside = os.dup(2)
  requests, answers, _ = lock.enter()
  hidden = lock.hide()
  gc.freeze()
  while os.read(aside, 1) and (task := plain.read(requests)) is not None:
    child = os.fork()
    if child == 0:
      os.close(aside)
      plain.write(answers, {"report": run(Channel(requests, answers), task)})
      os._exit(REPORTED)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code != REPORTED or not hidden or not nothing_left():
      os._exit(code if code >= 0 else 128 - code)
    os.write(aside, b".")
  os._exit(0)
