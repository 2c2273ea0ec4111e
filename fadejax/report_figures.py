"""The pictures of a report: which curves there are, and how they are drawn."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image

# Mid-tones that read on white and on near-black alike.
COLOURS = ("#3f83d1", "#e0782f", "#2f9e76", "#b15fb5", "#c79a1e", "#d2495e", "#5aa7b8", "#8a7f73")
STYLES = ("solid", "dashed", "dotted", "dashdot")
# Text and axes are drawn in this and turned into the page's own text colour.
INK = "#0a0b0c"
SMOOTH_ABOVE = 60  # rows from which a curve is drawn as a moving mean over its raw values
POINTS = 1000  # of a curve at most; beyond, its raw values are drawn as their range
PHASES = ("data", "rollout", "grade", "update", "eval", "save")


@dataclass(frozen=True)
class Run:
  """What a working directory holds.

  Attributes:
    name: short and different for each run of a page.
    rows: the metrics rows by rising step.
    samples: the rows of samples.jsonl.
    config: the resolved config, None where there is no config.json.
    notes: what a reader should know, such as skipped updates.
  """

  name: str
  rows: list[dict[str, Any]]
  samples: list[dict[str, Any]]
  config: dict[str, Any] | None
  notes: list[str]

  def series(self, key: str) -> tuple[np.ndarray, np.ndarray]:
    """(steps, values) of the rows that have a number under `key`."""
    pairs = [(row["step"], row[key]) for row in self.rows if isinstance(row.get(key), int | float)]
    steps, values = zip(*pairs, strict=True) if pairs else ((), ())
    return np.asarray(steps, float), np.asarray(values, float)


@dataclass(frozen=True)
class Panel:
  """One plot: a title, its unit, (key, label) of each curve, and how to read it.

  A key with a `*` stands for every metric it matches, labelled by what `*` stood for.
  """

  title: str
  unit: str
  curves: tuple[tuple[str, str], ...]
  caption: str
  log: bool = False
  share: bool = False  # the axis starts at 0 and ends near 1 at most


PANELS = (
  Panel(
    "Solve rate in training",
    "share",
    (
      ("solve_rate", "solve rate"),
      ("fade_solve_rate", "its moving average p̂"),
      ("mixed_share", "groups with both outcomes"),
    ),
    "Of the rollouts drawn. Only groups with both outcomes teach a centred weight.",
    share=True,
  ),
  Panel(
    "Evaluation",
    "share",
    (("eval/pass@*", "pass@*"), ("eval/greedy", "greedy")),
    "Held-out problems. pass@1 rising while pass@8 falls is accuracy bought with diversity.",
    share=True,
  ),
  Panel(
    "Entropy against its target",
    "nats per token",
    (
      ("entropy", "entropy"),
      ("fade_entropy", "its moving average Ĥ"),
      ("target_entropy", "target H*"),
      ("eval/entropy", "in evaluation"),
    ),
    "δ is 1 while Ĥ is above H*; below it, δ falls by the gap (down to its floor).",
  ),
  Panel(
    "FADE's α and δ",
    "",
    (("alpha", "α"), ("delta", "δ")),
    "α > 1 puts the weight on hard prompts; δ < 1 enlarges the push away from failures.",
  ),
  Panel(
    "Masses",
    "reward",
    (("m_s", "m_S, successes"), ("m_f", "m_F, failures")),
    "m_S far above m_F makes entropy collapse; the reverse makes the head's update rank one.",
  ),
  Panel(
    "Where the weight lies",
    "share",
    (("mean_difficulty", "mean difficulty 1 - r̄"),),
    "0: on easy prompts, 1: on hard ones.",
  ),
  Panel(
    "Effective number of groups",
    "groups",
    (("n_eff", "N_eff"),),
    "(Σ a)² / Σ a² over the groups' mean |weight|: few means a noisy gradient.",
  ),
  Panel(
    "First-order entropy drift",
    "nats per unit of rate",
    (("drift_mass", "(m_S - m_F) H"), ("drift_covariance", "-Cov(A, log π)")),
    "A diagnostic only: the sign of the sum did not always hold.",
  ),
  Panel(
    "Rank-one share of the head's change",
    "share",
    (
      ("head/rank_one_share", "σ₁² / Σσ²"),
      ("head/update_share", "head's share of the whole change"),
      ("tied_head/rank_one_share", "σ₁² / Σσ², tied"),
      ("tied_head/update_share", "share of the whole change, tied"),
    ),
    "Every log.head_every steps. Near 1: the head moves along one direction.",
    share=True,
  ),
  Panel(
    "Completion length",
    "tokens",
    (("length_mean", "mean"), ("length_max", "longest")),
    "End-of-sequence included.",
  ),
  Panel(
    "Truncated share",
    "share",
    (("truncated_share", "training"), ("eval/truncated_share", "evaluation")),
    "Completions that ran into the length limit.",
    share=True,
  ),
  Panel(
    "Verdicts",
    "share",
    (("verdict/*", "*"),),
    "What the verifier said; ok covers right and wrong answers.",
    share=True,
  ),
  Panel("Solve rate by task", "share", (("solve_rate/*", "*"),), "Training rollouts.", share=True),
  Panel(
    "Gradient norm",
    "",
    (("grad_norm", "before clipping"),),
    "Global norm over all parameters, logarithmic.",
    log=True,
  ),
  Panel(
    "Clip share",
    "share",
    (("clip_share", "clipped tokens"),),
    "Tokens whose ratio the surrogate clipped; 0 with one update a batch.",
  ),
  Panel(
    "Sampler–trainer gap",
    "nats per token",
    (("logprob_gap_mean", "mean"), ("logprob_gap_max", "largest")),
    "|log-prob of the sampler - of the trainer| on the same tokens, logarithmic.",
    log=True,
  ),
  Panel("Loss and KL", "", (("loss", "loss"), ("kl", "KL")), "The loss's level means little."),
  Panel(
    "Supervised loss beside RL",
    "nats per token",
    (("sft_loss", "demonstrations"),),
    "Parallel averaging.",
  ),
  Panel(
    "Batches drawn a step",
    "batches",
    (("refill/batches", "batches"),),
    "Dynamic sampling: groups whose rewards agree give way to fresh prompts.",
  ),
  Panel("Throughput", "tokens per second", (("tokens_per_s", "generated"),), ""),
)
MAIN_CURVES = ("Solve rate in training", "Entropy against its target", "FADE's α and δ", "Masses")


def _curves(run: Run, panel: Panel) -> list[tuple[str, str]]:
  """(key, label) of the panel's curves that the run has numbers for, `*` filled in."""
  present = sorted({key for row in run.rows for key in row}, key=_natural)
  curves = []
  for key, label in panel.curves:
    pattern = re.escape(key).replace(r"\*", "([^/]+)")
    for name in present:
      match = re.fullmatch(pattern, name)
      if match and run.series(name)[0].size:
        curves.append((name, label.replace("*", match[1]) if "*" in key else label))
  return curves


def _natural(key: str) -> list[tuple[int, str]]:
  """Sorts pass@8 before pass@64."""
  return [(int(part or 0), text) for text, part in re.findall(r"(\D+)(\d*)", key)]


def _smooth(values: np.ndarray) -> np.ndarray:
  """Centred moving mean over a thirtieth of the curve, the window cut at its ends."""
  half = max(1, len(values) // 60)
  sums = np.concatenate([[0.0], np.cumsum(values)])
  at = np.arange(len(values))
  low, high = np.maximum(at - half, 0), np.minimum(at + half + 1, len(values))
  return (sums[high] - sums[low]) / (high - low)


def draw_panel(axes: Axes, panel: Panel, runs: Sequence[Run]) -> bool:
  """Draws a panel; returns whether any run had something to draw.

  One run: a colour a curve. Several: a colour a run, a line style a curve.
  """
  drawn: list[np.ndarray] = []
  one = len(runs) == 1
  labels: list[str] = []
  for r, run in enumerate(runs):
    for key, label in _curves(run, panel):
      steps, values = run.series(key)
      drawn.append(values)
      labels += [label] if label not in labels else []
      c = labels.index(label)
      dashed = one and key == "target_entropy"
      _draw_curve(
        axes,
        steps,
        values,
        marker="o" if key.startswith("eval/") or len(steps) == 1 else None,
        color=COLOURS[(c if one else r) % len(COLOURS)],
        linestyle="dashed" if dashed else STYLES[0 if one else c % len(STYLES)],
        label=label if one else None,
      )
  if not drawn:
    return False
  if not one:
    _add_keys(axes, [run.name for run in runs], labels)
  if panel.log and all((values > 0).any() for values in drawn):
    axes.set_yscale("log")
  if panel.share:
    top = max(values.max() for values in drawn)
    axes.set_ylim(-0.02, min(1.03, max(0.1, top * 1.1)))
  _finish(axes, panel.unit)
  return True


def _draw_curve(
  axes: Axes, steps: np.ndarray, values: np.ndarray, *, color: str, marker: str | None, **line: Any
) -> None:
  """Draws a curve; a long one as its moving mean over its raw values or their range."""
  if len(values) > SMOOTH_ABOVE and marker is None:
    every = -(-len(values) // POINTS)
    if every == 1:
      axes.plot(steps, values, color=color, alpha=0.25, linewidth=0.8)
    else:
      starts = np.arange(0, len(values), every)
      low, high = np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)
      axes.fill_between(steps[starts], low, high, color=color, alpha=0.2, linewidth=0)
    steps, values = steps[::every], _smooth(values)[::every]
  axes.plot(steps, values, color=color, marker=marker, markersize=4, **line)


def _add_keys(axes: Axes, runs: Sequence[str], labels: Sequence[str]) -> None:
  """Legend entries of several runs: colours for runs, line styles for curves."""
  for r, name in enumerate(runs):
    axes.plot([], [], color=COLOURS[r % len(COLOURS)], label=name)
  if len(labels) > 1:
    for c, label in enumerate(labels):
      ink = matplotlib.rcParams["text.color"]
      axes.plot([], [], color=ink, linestyle=STYLES[c % len(STYLES)], linewidth=1.2, label=label)


def draw_phases(axes: Axes, run: Run) -> str | None:
  """Stacks the seconds of each phase of a step; returns a note, None with nothing to draw."""
  rows = [row for row in run.rows if row["step"] > 0]
  steps = np.array([row["step"] for row in rows], float)
  phases = [phase for phase in PHASES if any(row.get(f"time/{phase}") for row in rows)]
  if not phases:
    return None
  seconds = np.array([[row.get(f"time/{phase}") or 0.0 for row in rows] for phase in phases])
  if len(rows) > SMOOTH_ABOVE:
    starts = np.arange(0, len(rows), -(-len(rows) // POINTS))
    counts = np.diff(np.append(starts, len(rows)))
    means = np.add.reduceat(seconds, starts, axis=1) / counts
    axes.stackplot(steps[starts], means, labels=phases, colors=COLOURS)
  else:
    base = np.cumsum(seconds, axis=0) - seconds
    for i, phase in enumerate(phases):
      axes.bar(steps, seconds[i], bottom=base[i], width=0.85, color=COLOURS[i], label=phase)
  note = ""
  totals = seconds.sum(axis=0)
  if len(totals) > 2 and totals[0] > 2 * totals[1:].max():
    axes.set_ylim(0, 1.15 * totals[1:].max())
    note = f"The first step, which compiles, took {totals[0]:.1f} s and runs off the scale."
  _finish(axes, "seconds")
  return note


def _finish(axes: Axes, unit: str) -> None:
  axes.set_xlabel("step")
  axes.set_ylabel(unit)
  axes.xaxis.set_major_locator(MaxNLocator(integer=True))
  axes.grid(alpha=0.18)
  axes.spines[["top", "right"]].set_visible(False)
  if axes.get_legend_handles_labels()[1]:
    axes.legend(frameon=False, fontsize=8.5)


def style(ink: str) -> Any:  # matplotlib types the keys one by one
  """matplotlib settings of every picture, with text and axes in one colour."""
  coloured = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
  return dict.fromkeys((*coloured, "grid.color"), ink) | {
    "svg.fonttype": "none",
    "font.size": 10,
    "lines.linewidth": 1.8,
    "axes.titlesize": 11,
    "axes.facecolor": "none",
    "axes.axisbelow": True,
  }


def inline_svg(draw: Callable[[Axes], Any], salt: str) -> tuple[Markup, Any]:
  """One plot as an <svg> element in the page's own text colour.

  Args:
    draw: draws on the axes.
    salt: keeps the ids of this picture apart from those of the page's others.

  Returns:
    The element, and what `draw` returned.
  """
  with matplotlib.rc_context(style(INK) | {"svg.hashsalt": salt}):
    figure = Figure(figsize=(5.6, 3.1), layout="constrained")
    result = draw(figure.add_subplot())
    buffer = io.StringIO()
    no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(buffer, format="svg", transparent=True, metadata=no_metadata)
  svg = buffer.getvalue()
  opening, rest = svg[svg.index("<svg") :].split(">", 1)
  opening = re.sub(r'\s(xmlns(:\w+)?|width|height)="[^"]*"', "", opening)
  rest = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{salt}-", rest)
  return Markup(f"{opening}>{rest}".replace(INK, "currentColor")), result


def picture(runs: Sequence[Run], out: Path) -> Path:
  """Writes the four main curves as one PNG of under 100 kB; returns its path."""
  panels = {panel.title: panel for panel in PANELS}
  with matplotlib.rc_context(style("#24292f")):
    figure = Figure(figsize=(9.6, 5.8), layout="constrained")
    for axes, title in zip(figure.subplots(2, 2).flat, MAIN_CURVES, strict=True):
      if not draw_panel(axes, panels[title], runs):
        axes.text(0.5, 0.5, "not recorded", ha="center", transform=axes.transAxes)
      axes.set_title(title, loc="left")
    return save_png(figure, out)


def save_png(figure: Figure, out: Path) -> Path:
  """Writes a figure in a palette of 64 colours, a third of the size; returns its path."""
  out.parent.mkdir(parents=True, exist_ok=True)
  buffer = io.BytesIO()
  figure.savefig(buffer, format="png", dpi=100, facecolor="white")
  Image.open(buffer).convert("RGB").quantize(64).save(out, optimize=True)
  return out
