"""Runs the tests of a problem inside a sandbox of its own; the candidate is elsewhere.

Every name that the tests take from the program is a stand-in: a call goes to the host, which asks
the candidate, and its result comes back as plain data. So no object of the candidate's is ever
compared here. Reports to the host after the last test.
"""

from __future__ import annotations

import builtins
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import lock
import plain

del sys.path[0]


class CandidateError(Exception):
  """What the program raised, where it is no builtin exception."""


class TestsAtFault(BaseException):
  """The tests did something that cannot be judged."""


class CandidateFault(BaseException):
  """The program died, or returned something that is no plain data."""


class Channel:
  """Questions to the candidate, by way of the host."""

  def __init__(self, requests, answers):
    self.requests, self.answers = requests, answers

  def ask(self, message):
    """The candidate's answer to one question, as a value or an exception."""
    plain.write(self.answers, message)
    reply = plain.read(self.requests)
    if reply is None:
      os._exit(0)
    if "value" in reply:
      return plain.decode(reply["value"])
    if "raise" in reply:
      kind = vars(builtins).get(reply["raise"])
      if not (isinstance(kind, type) and issubclass(kind, Exception)):
        raise CandidateFault(f"the program raised {reply['name']}")  # SystemExit and its like
      if kind is Exception:
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
    except plain.NotPlain as error:
      raise TestsAtFault(f"the tests pass {error}") from error
    return channel.ask(message)

  call.__name__ = call.__qualname__ = name
  return call


def wanted(codes):
  """Every name in the tests, attributes too; those that they set themselves do no harm."""
  names, waiting = set(), list(codes)
  while waiting:
    code = waiting.pop()
    names.update(code.co_names)
    waiting += [c for c in code.co_consts if isinstance(c, type(code))]
  return sorted(names - set(vars(builtins)))


def bind(channel, names, space):
  """Puts a stand-in, or a constant's value, under every name that the program has.

  What it lacks stays unknown, and the test that uses it fails with a NameError.
  """
  plain.write(channel.answers, {"names": names})
  reply = plain.read(channel.requests)
  if reply is None:
    os._exit(0)
  for name, value in reply.get("found", {}).items():
    space[name] = stand_in(channel, name) if value is None else plain.decode(value)


def run(channel, task):
  """{"passed", "of", "fault", "detail"} of the tests, the first failure ends them unless "all"."""
  tests = [task["setup"], *task["tests"]]
  space = {"__name__": "tests"}
  try:
    codes = [compile(text, "tests", "exec", dont_inherit=True) for text in tests]
  except (SyntaxError, ValueError) as error:
    return {"passed": 0, "fault": "tests", "detail": f"the tests do not compile: {error}"}
  try:
    bind(channel, wanted(codes), space)
  except ValueError as error:
    return {"passed": 0, "fault": "candidate", "detail": str(error)}
  passed, fault, detail = 0, "", ""
  for i, code in enumerate(codes):
    try:
      exec(code, space)
      passed += i > 0
    except TestsAtFault as error:
      return {"passed": passed, "fault": "tests", "detail": str(error)}
    except CandidateFault as error:
      fault, detail = "candidate", str(error)
    except AssertionError as error:
      fault, detail = "wrong", f"test {i}: {error}"
    except BaseException as error:  # whatever ends a test but its end is a failure
      fault, detail = "raised", f"test {i}: {type(error).__name__}: {error}"
    if fault and (not task["count"] or i == 0):
      break
  return {"passed": passed, "fault": fault, "detail": detail[:300]}


def main():
  """Locks, runs the tests, reports."""
  requests, answers = lock.take_channel()
  task = plain.read(requests)
  lock.close_in(task["limits"])
  plain.write(answers, {"locked": True})
  lock.add_site_builtins()
  os.chdir("/tmp")
  report = run(Channel(requests, answers), task)
  plain.write(answers, {"report": report})
  os._exit(0)
