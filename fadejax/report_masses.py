"""One picture that tells policy weights apart: where they push, and which way.

  python -m fadejax.report --masses=grpo,dr_grpo,power:alpha=2,fade:alpha=3:delta=0.5 \\
    --out=masses.png [--group=8]
  python -m fadejax.report --masses=all --out=sheet.png

Draws m_S(p) and m_F(p), the share of the push that goes to successes (the sign axis), and where
along p the push lies (the difficulty axis): solid in the population, dotted as expected in groups
of G, with the estimator's own bias. `all` is a sheet with a plot for every weight.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fadejax.algorithm import masses
from fadejax.algorithm.weights import WEIGHTS
from fadejax.report_figures import COLOURS, save_png, style

P = np.linspace(0.0, 1.0, 201)
# Settings of the sheet, for weights that need some. `confidence` is a policy's, not a setting.
SHEET: dict[str, dict[str, Any]] = {
  "power": {"alpha": 2.0},
  "asym": {"delta": 0.5},
  "power_asym": {"alpha": 2.0, "delta": 0.5},
  "fade": {"alpha": 3.0, "delta": 0.5},
  "pass_at_k_training": {"k": 4},
  "pkpo": {"k": 4},
  "maxpo": {"k": 4},
  "max_at_k": {"k": 4},
  "codapo": {"confidence": 0.7},
}


@dataclasses.dataclass(frozen=True)
class Method:
  """A weight with its settings."""

  name: str
  settings: dict[str, Any]

  @property
  def label(self) -> str:
    """Such as "power, alpha = 2"."""
    shown = (
      f"{key} = {value}" if isinstance(value, str) else f"{key} = {value:g}"
      for key, value in self.settings.items()
    )
    return ", ".join([self.name, *shown])

  def population(self, group: int) -> tuple[np.ndarray, np.ndarray] | None:
    """(m_S, m_F) over P as G → ∞; None where there is no closed form."""
    if self.name not in masses.CLOSED_FORMS:
      return None
    settings = dict(self.settings)
    if self.name == "pass_at_k_loo":
      settings["k"] = group
    if self.name == "pkpo" and settings.get("baseline", "loo_minus_one") != "loo_minus_one":
      return None
    m_s, m_f = masses.closed_form(self.name, P, **settings)
    return np.asarray(m_s), np.asarray(m_f)

  def in_groups(self, group: int) -> tuple[np.ndarray, np.ndarray]:
    """(m_S, m_F) over P, expected in groups of G; of `pkpo` times G / k, as its closed form."""
    scale = group / self.settings["k"] if self.name == "pkpo" else 1.0
    m_s, m_f = masses.finite_g(self.name, P, group, **self.settings)
    return scale * m_s, scale * m_f


def parse(text: str) -> Method:
  """`name:setting=value:…` as a Method.

  Raises:
    ValueError: an unknown weight or setting, a value that is no number, or a missing one.
  """
  name, *pairs = text.strip().split(":")
  if name not in WEIGHTS:
    raise ValueError(f"--masses: no weight is called {name!r}; there are {', '.join(WEIGHTS)}")
  parameters = inspect.signature(WEIGHTS[name]).parameters
  own = [p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY]
  settings: dict[str, Any] = {}
  for pair in pairs:
    key, equals, value = pair.partition("=")
    if not equals or key not in own:
      takes = f"it takes {', '.join(own)}" if own else "it takes none"
      raise ValueError(f"--masses: {text!r}: {pair!r} is no setting of {name}; {takes}")
    settings[key] = _value(key, value)
  for key in own:
    if parameters[key].default is inspect.Parameter.empty and key not in settings:
      raise ValueError(f"--masses: {text!r}: {name} needs {key}, as in {name}:{key}=…")
  return Method(name, settings)


def _value(key: str, text: str) -> Any:
  if key == "baseline":
    return text
  try:
    return int(text) if key in ("k", "ddof") else float(text)
  except ValueError as error:
    raise ValueError(f"--masses: {key}={text!r} is no number") from error


def _share(m_s: np.ndarray, m_f: np.ndarray) -> np.ndarray:
  """Successes' share of the push; NaN where there is none, as at p = 0."""
  total = m_s + m_f
  return np.divide(m_s, total, out=np.full_like(total, np.nan), where=total > 1e-12)


def _density(m_s: np.ndarray, m_f: np.ndarray) -> np.ndarray:
  """The push as a density over p: it integrates to 1."""
  total = m_s + m_f
  area = np.trapezoid(total, P)
  return total / area if area > 0 else np.full_like(total, np.nan)


PANELS = (
  ("m_S: the push on successes", "mass", lambda m_s, m_f: m_s),
  ("m_F: the push against failures", "mass", lambda m_s, m_f: m_f),
  ("Sign: successes' share of the push", "m_S / (m_S + m_F)", _share),
  ("Difficulty: where the push lies", "density over p", _density),
)


def draw(methods: Sequence[Method], group: int) -> Figure:
  """Four plots over p, a colour a method; solid: population, dotted: groups of G."""
  with matplotlib.rc_context(style("#24292f")):
    figure = Figure(figsize=(10, 7.2), layout="constrained")
    plots = figure.subplots(2, 2)
    for axes, (title, unit, quantity) in zip(plots.flat, PANELS, strict=True):
      for i, method in enumerate(methods):
        colour = COLOURS[i % len(COLOURS)]
        whole = method.population(group)
        if whole is not None:
          # Curves that agree lie on each other: the later ones are thinner.
          width = max(1.4, 4.0 - 0.8 * i) if quantity is _share else 1.8
          axes.plot(P, quantity(*whole), color=colour, linewidth=width, label=method.label)
        label = None if whole is not None else f"{method.label} (groups of {group})"
        axes.plot(
          P, quantity(*method.in_groups(group)), color=colour, linestyle="dotted", label=label
        )
      axes.set_title(title, loc="left")
      axes.set_ylabel(unit)
      _finish(axes)
    handles, labels = plots.flat[0].get_legend_handles_labels()
    columns = min(len(labels), 4)
    figure.legend(handles, labels, loc="outside upper center", ncols=columns, frameon=False)
    plots.flat[2].set_ylim(-0.03, 1.03)
    figure.supxlabel(
      f"solve rate p  (hard ← → easy)      solid: population, dotted: groups of {group}",
      fontsize=10,
    )
  return figure


def sheet(group: int) -> Figure:
  """A small plot for every weight of the table: m_S and m_F."""
  names = list(WEIGHTS)
  rows = -(-len(names) // 4)
  with matplotlib.rc_context(style("#24292f")):
    figure = Figure(figsize=(11, 2.1 * rows), layout="constrained")
    plots = figure.subplots(rows, 4).flat
    for axes, name in zip(plots, names, strict=False):
      method = Method(name, SHEET.get(name, {}))
      whole, grouped = method.population(group), method.in_groups(group)
      for i, (label, line) in enumerate((("m_S", "solid"), ("m_F", (0, (5, 5))))):
        if whole is not None:  # m_F in dashes, so that m_S shows through where they agree
          axes.plot(P, whole[i], color=COLOURS[i], label=label, linestyle=line, linewidth=1.6)
        axes.plot(P, grouped[i], color=COLOURS[i], linestyle="dotted", linewidth=1.6)
      axes.set_title(method.label, loc="left", fontsize=9)
      axes.tick_params(labelsize=7)
      _finish(axes)
    plots[0].legend(frameon=False, fontsize=8)
    for axes in list(plots)[len(names) :]:
      axes.set_visible(False)
    figure.supxlabel(
      f"solve rate p      m_S solid, m_F dashed: population; dotted: groups of {group}", fontsize=9
    )
  return figure


def _finish(axes: Axes) -> None:
  axes.grid(alpha=0.18)
  axes.spines[["top", "right"]].set_visible(False)
  axes.set_xlim(0, 1)


def write(text: str, out: Path, group: int) -> Path:
  """Writes the picture of `--masses=text`; the suffix of `out` says how (.png, .svg, .pdf).

  Raises:
    ValueError: a weight, setting or group that does not exist, or an unknown suffix.
  """
  if group < 2:
    raise ValueError(f"--group={group}: at least 2")
  suffixes = (".png", ".svg", ".pdf")
  if out.suffix not in suffixes:
    raise ValueError(f"--out={out}: the picture of --masses wants one of {', '.join(suffixes)}")
  figure = sheet(group) if text == "all" else draw([parse(t) for t in text.split(",")], group)
  out.parent.mkdir(parents=True, exist_ok=True)
  if out.suffix == ".png":
    return save_png(figure, out)
  figure.savefig(out, facecolor="white")
  return out
