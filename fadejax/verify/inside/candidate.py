"""Runs one untrusted program inside the sandbox, and answers calls of its functions.

The first message says how: {"limits", "program", "form": "calls"}, and then {"call", "args",
"kwargs"} and {"names": […]}, each answered by one message; or {"form": "stdio", "inputs"}, where
the program runs once an input as `__main__`, in a forked child, and every output is a message.
Values cross as bytes of their own inside a message, so that the host may pass them on unopened.
Nothing that arrives here holds an expected value, and nothing that is sent is believed.
"""

from __future__ import annotations

import _signal  # `signal` takes time to import
import gc
import os
import sys

import lock
import plain

FLUSH_S = 0.005


def describe(error):
  """An exception as a message: the names of its builtin base and of itself, and its text."""
  builtin = next(c for c in type(error).__mro__ if c.__module__ == "builtins")
  try:
    text = str(error)[:200]
  except BaseException:  # a program's own __str__ may do anything
    text = ""
  return {"raise": builtin.__name__, "name": type(error).__name__[:100], "text": text}


def find(names, path):
  """A function by name, `Class.method` on a fresh instance, or a method of `Solution`."""
  owner, dot, method = path.partition(".")
  if dot:
    return getattr(names[owner](), method)
  if path not in names and "Solution" in names:
    return getattr(names["Solution"](), path)
  return names[path]


def answer(names, message):
  """One call or look-up; exceptions are answers too."""
  try:
    if "names" in message:
      return {"found": {name: look(names[name]) for name in message["names"] if name in names}}
    function = find(names, message["call"])
    args, kwargs = plain.decode(message["args"]), plain.decode(message["kwargs"])
    return {"value": plain.encode(function(*args, **kwargs))}
  except plain.NotPlain as error:
    return {"not_plain": str(error)}
  except BaseException as error:  # SystemExit and KeyboardInterrupt are a program's answers too
    return describe(error)


def look(value):
  """A global of the program's: None where it can be called or is not plain, else its bytes."""
  try:
    return None if callable(value) else plain.encode(value)
  except plain.NotPlain:
    return None


def serve_calls(requests, answers, code, module):
  """Runs the program once, then serves its functions until the channel ends."""
  try:
    exec(code, module)
  except BaseException as error:
    plain.write(answers, describe(error))
    os._exit(0)
  plain.write(answers, {"ready": True})
  while (message := plain.read(requests)) is not None:
    plain.write(answers, answer(module, message))
  os._exit(0)


def run_as_main(code, module):
  """Runs the program to its end and ends this process as Python would, in less time."""
  status = 0
  try:
    exec(code, module)
  except SystemExit as error:
    if isinstance(error.code, int):
      status = error.code & 255
    elif error.code is not None:
      status = 1
  except BaseException:
    status = 1
  try:
    if "threading" in sys.modules:
      sys.modules["threading"]._shutdown()
    if "atexit" in sys.modules:
      sys.modules["atexit"]._run_exitfuncs()
    # What it has written and not flushed: a file of its own on descriptor 1 goes with its names.
    flush(sys.stdout)
    module.clear()
    flush(sys.__stdout__)
  except BaseException:
    status = status or 1
  os._exit(status)


def flush(stream):
  """As Python does at its end: a stream that is closed, or none, is no error."""
  if stream is not None and not getattr(stream, "closed", False):
    stream.flush()


def unnamed():
  """A new file without a name, in this folder."""
  try:
    return os.open(".", os.O_RDWR | os.O_TMPFILE, 0o600)
  except OSError:  # a file system that has none, as that of many containers, without a sandbox
    made = os.open(".unnamed", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.unlink(".unnamed")
    return made


def run_stdio(answers, code, module, task):
  """Runs the program once an input, each in a child.

  Input and output are files without a name, so that none waits for a reader; RLIMIT_FSIZE bounds
  them. What a fork does again for every input is done once before. Answers go together, and before
  a program has run for FLUSH_S: should it be stopped, those of the inputs before it are there.
  """
  sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
  sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
  vars(sys).update(__stdin__=sys.stdin, __stdout__=sys.stdout)
  gc.freeze()
  _signal.signal(_signal.SIGALRM, lambda *_: answers.flush())
  for text in task["inputs"]:
    given, out = unnamed(), unnamed()
    with open(given, "wb", closefd=False) as file:
      file.write(text.encode("utf-8", "surrogatepass"))
    os.lseek(given, 0, os.SEEK_SET)
    child = os.fork()
    if child == 0:
      if task["limits"]["die_with_parent"]:
        lock.die_with_parent()
      _signal.signal(_signal.SIGALRM, _signal.SIG_DFL)
      os.close(answers.fileno())  # what it has not sent is its parent's to send
      os.dup2(given, 0)
      os.dup2(out, 1)
      os.close(given)
      os.close(out)
      run_as_main(code, module)
    _signal.setitimer(_signal.ITIMER_REAL, FLUSH_S)
    _, status = os.waitpid(child, 0)
    _signal.setitimer(_signal.ITIMER_REAL, 0)
    output = os.pread(out, task["cap"] + 1, 0)
    os.close(given)
    os.close(out)
    body = plain.encode({"status": os.waitstatus_to_exitcode(status), "output": output})
    answers.write(plain.HEADER.pack(len(body)) + body)
  answers.flush()
  os._exit(0)


def main():
  """Locks, compiles, runs."""
  requests, answers, task = lock.enter()
  # Where functions are called, what stands under the guard of a script must not run.
  main_module = type(sys)("__main__" if task["form"] == "stdio" else "program")
  sys.modules[main_module.__name__] = main_module
  module = vars(main_module)
  module["__file__"] = "/tmp/program.py"
  sys.argv[:] = ["program.py"]
  try:
    code = compile(task["program"], "program.py", "exec", dont_inherit=True)
  except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError) as error:
    plain.write(answers, describe(error))
    os._exit(0)
  if task["form"] == "stdio":
    run_stdio(answers, code, module, task)
  else:
    serve_calls(requests, answers, code, module)
