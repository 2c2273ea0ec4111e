"""`python -m fadejax.train --config=configs/NAME.py --workdir=DIR`: trains, or resumes.

Any field is set on the command line: `--config.optimizer.learning_rate=1e-5`. A workdir
that holds an earlier part of the same run is resumed from its newest checkpoint.
"""

from __future__ import annotations

from absl import flags

from fadejax import command
from fadejax.config import resolve
from fadejax.report import write_report
from fadejax.train.loop import train
from fadejax.train.metrics import read_jsonl
from fadejax.train.progress import final_table


def _profile(text: str) -> tuple[int, int] | None:
  if not text:
    return None
  first, colon, last = text.partition(":")
  if not (colon and first.isdigit() and last.isdigit() and 1 <= int(first) <= int(last)):
    raise ValueError(f"--profile={text}: FIRST:LAST is wanted, two steps such as 10:12")
  return int(first), int(last)


def main() -> None:
  """Resolves the config, trains, prints the table and writes the report."""
  values = flags.FLAGS
  workdir = command.workdir()
  outcome = train(
    resolve(values.config),
    workdir,
    plan_only=values.plan_only,
    profile=_profile(values.profile),
  )
  if outcome is None:
    return
  rows, _ = read_jsonl(workdir / "metrics.jsonl")
  evaluated = [row for row in rows if any(key.startswith("eval/") for key in row)]
  if len(evaluated) > 1:
    final_table(evaluated[0], evaluated[-1])
  print(f"report: {write_report([workdir]).resolve()}")


if __name__ == "__main__":
  command.define_flags(workdir=True)
  flags.DEFINE_bool("plan_only", False, "Print the plan and stop: no parameters are read.")
  flags.DEFINE_string("profile", "", "FIRST:LAST steps to trace with JAX's profiler.")
  command.run("train", main)
