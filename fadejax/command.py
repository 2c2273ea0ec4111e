"""The shell around the commands: flags; with a config, errors as one line, quiet logs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from absl import app, flags, logging
from ml_collections import config_flags

# What ml_collections raises while it parses: a field that is not there, another type, no file.
_FLAG_ERRORS = (
  LookupError, AttributeError, TypeError, ValueError, OSError, SyntaxError, ImportError,
)  # fmt: skip
_HELP = {"--help", "-help", "--helpshort", "-helpshort", "--helpfull", "-helpfull", "-?"}


def define_flags(*, workdir: bool, config_required: bool = True) -> None:
  """Defines --config, --debug and, where asked for, --workdir."""
  config_flags.DEFINE_config_file("config", None, "Config file, configs/NAME.py.")
  if config_required:
    flags.mark_flag_as_required("config")
  flags.DEFINE_bool("debug", False, "Show the whole traceback of an error.")
  if workdir:
    flags.DEFINE_string("workdir", None, "Where the run is written, or resumed from.")
    flags.mark_flag_as_required("workdir")
  for key in ["config", "debug", *["workdir"] * workdir]:  # so that --help lists them
    flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[key])


def workdir() -> Path:
  """The --workdir.

  Raises:
    ValueError: it is a URL; runs are written to local paths.
  """
  text = flags.FLAGS.workdir
  if "://" in text:
    raise ValueError(f"--workdir={text}: only a local path is supported")
  return Path(text)


def parse_flags(argv: list[str]) -> list[str]:
  """Parses the flags as absl does, but --help, which absl ends with status 1, ends with 0."""
  try:
    return app.parse_flags_with_usage(argv)
  except SystemExit:
    sys.exit(0 if _HELP & set(argv) else 1)


def run(name: str, main: Callable[[], None]) -> None:
  """Parses the flags and runs `main`; a mistake of the user's ends in one line and status 1.

  Args:
    name: of the command, for its messages.
    main: does the work; ValueError, OSError and RuntimeError are told without a traceback
      unless --debug is given.
  """

  def parse(argv: list[str]) -> list[str]:
    try:
      return parse_flags(argv)
    except _FLAG_ERRORS as error:
      cause: object = error
      while isinstance(cause, Exception) and cause.args and not isinstance(cause, OSError):
        cause = cause.args[0]
      unknown = "no such field: " if isinstance(error, (KeyError, AttributeError)) else ""
      where = f" ({error})" if isinstance(error, SyntaxError) else ""
      sys.exit(f"fadejax.{name}: --config: {unknown}{cause}{where}")

  def guarded(argv: list[str]) -> None:
    logging.set_verbosity(logging.WARNING)  # Orbax tells of every file it writes
    if len(argv) > 1:
      raise app.UsageError(f"unknown arguments {argv[1:]}: fields are set as --config.field=value")
    try:
      main()
    except KeyboardInterrupt:
      print(f"fadejax.{name}: stopped; the same command goes on from the newest checkpoint")
      sys.exit(130)
    except (ValueError, OSError, RuntimeError) as error:
      if flags.FLAGS.debug:
        raise
      sys.exit(f"fadejax.{name}: {error}")

  app.run(guarded, flags_parser=parse)
