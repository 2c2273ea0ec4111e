"""`python -m fadejax.problems --config=configs/NAME.py --out=FILE`: a config's problems as a file.

Writes the problems of the config's tasks, as a run would draw and grade them, one JSON object a
line in the form that the task `jsonl` and `python -m fadejax.verify` read. Problems that are
generated have no end: of such a task those of the evaluation are written.
"""

from __future__ import annotations

import json
from pathlib import Path

from absl import flags

from fadejax import command
from fadejax.config import RunConfig, resolve
from fadejax.train import setup


def write_problems(config: RunConfig, path: Path) -> list[str]:
  """Writes the problems to a file; returns a line about each task.

  Raises:
    ValueError: what a task says; or the file is one that a task reads.
  """
  tasks = setup.build_tasks(config)
  lines = []
  for settings, _ in tasks:
    for source in filter(None, (settings.path, settings.eval_path)):
      if path.exists() and path.samefile(Path(source).expanduser()):
        raise ValueError(f"--out={path} is what the problems are read from; name another file")
  with path.open("w", encoding="utf-8") as file:
    for _, task in tasks:
      train = [] if task.generated else [task.train[i] for i in range(len(task.train))]
      problems = {problem["id"]: problem for problem in [*train, *task.eval]}
      file.writelines(json.dumps(problem) + "\n" for problem in problems.values())
      notes = ["training problems are generated: left out"] if task.generated else []
      notes += [f"{count} {why}" for why, count in task.counts.items() if count]
      lines.append("; ".join([f"{task.name}: {len(problems)} problems", *notes]))
  return lines


def main() -> None:
  """Writes the file and says what is in it."""
  path = Path(flags.FLAGS.out).expanduser()
  print("\n".join(write_problems(resolve(flags.FLAGS.config), path)))
  print(f"written: {path}")


if __name__ == "__main__":
  command.define_flags(workdir=False)
  flags.DEFINE_string("out", None, "JSONL file to write.")
  flags.mark_flag_as_required("out")
  command.run("problems", main)
