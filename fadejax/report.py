"""Draws what happened in one or several runs, as one self-contained HTML page.

  python -m fadejax.report RUN [RUN ...] [--out=report.html] [--png=curves.png]
  python -m fadejax.report --masses=grpo,power:alpha=2 --out=masses.png    (report_masses.py)

Each RUN is the working directory of a run (finished, stopped or still going).
Several runs overlay, a colour each. --out is RUN/report.html by default, and
report.html in the current directory for several runs. --png also writes the four
main curves as one small picture. The page fetches nothing from anywhere.
"""

from __future__ import annotations

import functools
import json
import re
import statistics
import sys
from collections.abc import Sequence
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from absl import app, flags, logging

from fadejax.command import parse_flags
from fadejax.report_figures import (
  PANELS,
  PHASES,
  SMOOTH_ABOVE,
  Run,
  draw_panel,
  draw_phases,
  inline_svg,
  picture,
)
from fadejax.train.metrics import METRICS_FILE, SAMPLES_FILE, read_jsonl, write_atomically
from fadejax.train.progress import duration, evaluation_rows

SAMPLES_SHOWN = 4  # at either end of the run


def read_run(path: Path, name: str) -> Run:
  """Reads a working directory; rows and keys that are missing are tolerated.

  Raises:
    ValueError: there is no metrics.jsonl, it has no rows, or a file is damaged; the
      message names the file.
  """
  metrics = path / METRICS_FILE
  if not metrics.is_file():
    raise ValueError(f"{metrics}: no such file. Is {path} the --workdir of a run?")
  rows, torn = read_jsonl(metrics)
  if not rows:
    raise ValueError(f"{metrics}: no rows yet; the run has not finished a step.")
  samples, torn_samples = read_jsonl(path / SAMPLES_FILE)
  config = None
  if (path / "config.json").is_file():
    try:
      config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
      raise ValueError(f"{path / 'config.json'}: not JSON ({error})") from error
  notes = []
  for file, is_torn in ((METRICS_FILE, torn), (SAMPLES_FILE, torn_samples)):
    if is_torn:
      notes.append(f"The last line of {file} was cut short and is left out.")
  for key, what in (
    ("update_skipped", "Updates skipped because the gradient was not finite"),
    ("invalid_groups", "Groups left out of the loss for want of a verdict (grader errors)"),
    ("non_finite", "Metric values that were NaN or infinite, missing below"),
  ):
    if total := sum(row.get(key) or 0 for row in rows):
      notes.append(f"{what}: {total:g}.")
  return Run(name, sorted(rows, key=lambda row: row["step"]), samples, config, notes)


def read_runs(paths: Sequence[Path | str]) -> list[Run]:
  """Reads several working directories, named so that no two names agree."""
  resolved = [Path(path).resolve() for path in paths]
  if len(set(resolved)) < len(resolved):
    raise ValueError("the same run is named twice")
  depth = 1
  while len({path.parts[-depth:] for path in resolved}) < len(resolved):
    depth += 1
  return [read_run(path, "/".join(path.parts[-depth:])) for path in resolved]


def _evaluations(run: Run) -> dict[str, Any] | None:
  """The before/after table of a run; None where it holds no evaluation."""
  rows = [row for row in run.rows if any(key.startswith("eval/") for key in row)]
  if not rows:
    return None
  first, last = rows[0], rows[-1]
  lines = list(evaluation_rows(first, last))
  for key in sorted(key for key in {*first, *last} if re.fullmatch("eval/[^/]+/[^/]+", key)):
    _, task, metric = key.split("/")
    lines.append((f"{task}: {metric}", first.get(key), last.get(key)))
  return {"steps": (first["step"], last["step"]), "lines": lines, "once": first is last}


def _summary(run: Run) -> dict[str, Any]:
  """The facts of a run's line at the top of the page."""
  updates = [row for row in run.rows if row["step"] > 0]
  speeds = run.series("tokens_per_s")[1]
  solve_rates = run.series("solve_rate")[1]
  tenth = max(1, len(solve_rates) // 10)
  count = max(1, len(updates))  # a run may hold only the evaluation before its first step
  phases = {
    phase: sum(row.get(f"time/{phase}") or 0.0 for row in updates) / count for phase in PHASES
  }
  return {
    "name": run.name,
    "steps": run.rows[-1]["step"],
    "time": duration(sum(row.get("time/step") or 0.0 for row in run.rows)),
    "tokens": sum(row.get("tokens") or 0 for row in run.rows),
    "speed": statistics.median(speeds) if speeds.size else None,
    "solve_rate": float(solve_rates[-tenth:].mean()) if solve_rates.size else None,
    "phases": {phase: seconds for phase, seconds in phases.items() if seconds},
  }


def _samples(run: Run) -> list[dict[str, Any]]:
  """Early and late rollouts, each with the text of its prompt."""
  if not run.samples:
    return []
  ends = (run.samples[0]["step"], run.samples[-1]["step"])
  chosen = []
  for when, step in zip(("early", "late"), ends, strict=True):
    if when == "late" and ends[0] == ends[1]:
      break
    of_step = [sample for sample in run.samples if sample["step"] == step]
    for sample in of_step[:SAMPLES_SHOWN]:
      chosen.append(
        {
          **sample,
          "when": when,
          "prompt": _prompt_text(sample.get("prompt")),
          "right": (sample.get("reward") or 0) >= 0.5,
        }
      )
  return chosen


def _prompt_text(prompt: Any) -> str:
  if isinstance(prompt, list):
    return "\n".join(f"{m.get('role')}: {m.get('content')}" for m in prompt)
  return "" if prompt is None else str(prompt)


def _plots(runs: Sequence[Run]) -> tuple[list[dict[str, Any]], list[str]]:
  """The page's pictures, and the titles of those that no run has data for."""
  plots, absent = [], []
  for i, panel in enumerate(PANELS):
    svg, drawn = inline_svg(functools.partial(draw_panel, panel=panel, runs=runs), f"p{i}")
    if drawn:
      plots.append({"title": panel.title, "svg": svg, "caption": panel.caption})
    else:
      absent.append(panel.title)
  for i, run in enumerate(runs):
    svg, note = inline_svg(functools.partial(draw_phases, run=run), f"t{i}")
    title = "Time by phase" + (f": {run.name}" if len(runs) > 1 else "")
    if note is None:
      absent.append(title)
    else:
      plots.append({"title": title, "svg": svg, "caption": f"A step's seconds, stacked. {note}"})
  return plots, absent


def write_report(runs: Sequence[Path | str], out: Path | str | None = None) -> Path:
  """Writes the page.

  Args:
    runs: working directories, at least one.
    out: the file; None is RUN/report.html for one run, ./report.html for several.

  Returns:
    The file's path.

  Raises:
    ValueError: a run has no metrics or a damaged file; the message names the file.
  """
  if not runs:
    raise ValueError("name at least one run: python -m fadejax.report RUN [RUN ...]")
  loaded = read_runs(runs)
  if out is None:
    out = Path(runs[0]) / "report.html" if len(runs) == 1 else Path("report.html")
  plots, absent = _plots(loaded)
  page = _template().render(
    runs=[
      {
        "name": run.name,
        "summary": _summary(run),
        "notes": run.notes,
        "evaluations": _evaluations(run),
        "samples": _samples(run),
        "config": json.dumps(run.config, indent=2, ensure_ascii=False) if run.config else None,
      }
      for run in loaded
    ],
    plots=plots,
    absent=absent,
    smoothed=any(len(run.rows) > SMOOTH_ABOVE for run in loaded),
    written=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M"),
  )
  write_atomically(Path(out), page)
  return Path(out)


def write_picture(runs: Sequence[Path | str], out: Path | str) -> Path:
  """Writes the four main curves of some runs as one PNG of under 100 kB, for a README."""
  return picture(read_runs(runs), Path(out))


def _number(value: float | None, digits: int = 3) -> str:
  return "–" if value is None else f"{value:.{digits}f}"


def _template() -> jinja2.Template:
  """report_page.html, with everything that is put in escaped."""
  environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
  environment.filters["number"] = _number
  source = resources.files("fadejax").joinpath("report_page.html").read_text(encoding="utf-8")
  return environment.from_string(source)


def main(argv: list[str]) -> None:
  """The command: see the module's docstring."""
  logging.set_verbosity(logging.WARNING)
  if flags.FLAGS.masses:
    from fadejax import report_masses  # imports jax, which a report of runs does without

    if len(argv) > 1:
      sys.exit("fadejax.report: --masses draws weights, not runs; give one or the other")
    try:
      print(
        report_masses.write(
          flags.FLAGS.masses, Path(flags.FLAGS.out or "masses.png"), flags.FLAGS.group
        )
      )
    except (ValueError, OSError) as error:
      sys.exit(f"fadejax.report: {error}")
    return
  if len(argv) < 2:
    sys.exit("usage: python -m fadejax.report RUN [RUN ...] [--out=FILE] [--png=FILE]")
  try:
    print(write_report(argv[1:], flags.FLAGS.out))
    if flags.FLAGS.png:
      print(write_picture(argv[1:], flags.FLAGS.png))
  except (ValueError, OSError) as error:
    sys.exit(f"fadejax.report: {error}")


if __name__ == "__main__":
  # Not at import: train imports this module and has flags of its own.
  flags.DEFINE_string("out", None, "The page; default RUN/report.html, or ./report.html.")
  flags.DEFINE_string("png", None, "Also write the four main curves to this picture.")
  flags.DEFINE_string("masses", None, "Weights to draw, such as grpo,power:alpha=2; or all.")
  flags.DEFINE_integer("group", 8, "With --masses: completions a group.")
  app.run(main, flags_parser=parse_flags)
