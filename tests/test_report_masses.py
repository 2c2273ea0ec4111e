"""The picture of --masses: what is drawn is what the masses say, and mistakes are named."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fadejax import report_masses
from fadejax.algorithm import masses
from fadejax.algorithm.weights import WEIGHTS

DOCS = Path(__file__).resolve().parent.parent / "docs"


def test_curves_are_the_masses():
  methods = [report_masses.parse("power:alpha=2"), report_masses.parse("asym:delta=0.5")]
  figure = report_masses.draw(methods, 4)
  m_s, m_f, sign, difficulty = (axes.get_lines() for axes in figure.axes)
  assert len(m_s) == len(sign) == 4  # population and groups of 4, of two methods
  for i, method in enumerate(methods):
    whole = masses.closed_form(method.name, report_masses.P, **method.settings)
    small = masses.finite_g(method.name, report_masses.P, 4, **method.settings)
    for lines, which in ((m_s, 0), (m_f, 1)):
      np.testing.assert_allclose(lines[2 * i].get_ydata(), whole[which])
      np.testing.assert_allclose(lines[2 * i + 1].get_ydata(), small[which])
    share = sign[2 * i].get_ydata()
    np.testing.assert_allclose(share[1:-1], 0.5 if method.name == "power" else 1 / 3)
    density = difficulty[2 * i].get_ydata()
    assert np.trapezoid(density, report_masses.P) == pytest.approx(1.0)
  peak = report_masses.P[np.argmax(difficulty[0].get_ydata())]
  assert peak == pytest.approx(1 / 3, abs=0.005)


def test_the_sheet_has_every_weight():
  figure = report_masses.sheet(8)
  titles = [axes.get_title(loc="left").split(",")[0] for axes in figure.axes if axes.get_visible()]
  assert titles == list(WEIGHTS)


def test_pictures_are_written(tmp_path):
  out = report_masses.write("grpo,pkpo:k=3:baseline=loo,pass_at_k_loo", tmp_path / "a" / "m.png", 8)
  assert Image.open(out).size[0] > 500
  assert b"<svg" in report_masses.write("dr_grpo", tmp_path / "m.svg", 8).read_bytes()


@pytest.mark.parametrize(
  ("text", "out", "group", "message"),
  [
    ("grp", "m.png", 8, "no weight is called 'grp'"),
    ("power", "m.png", 8, "power needs alpha"),
    ("power:alpha", "m.png", 8, "'alpha' is no setting of power; it takes alpha"),
    ("power:alpha=two", "m.png", 8, "alpha='two' is no number"),
    ("grpo:k=2", "m.png", 8, "it takes ddof, eps"),
    ("rloo:k=2", "m.png", 8, "it takes none"),
    ("power:alpha=-1", "m.png", 8, "alpha must be a number in"),
    ("maxpo:k=8", "m.png", 8, r"k of maxpo must be .* in \[1, 7\]"),
    ("grpo", "m.html", 8, r"wants one of \.png"),
    ("grpo", "m.png", 1, "--group=1: at least 2"),
  ],
)
def test_mistakes_are_named(tmp_path, text, out, group, message):
  with pytest.raises(ValueError, match=message):
    report_masses.write(text, tmp_path / out, group)


def test_docs_have_a_row_for_every_weight_with_its_settings():
  text = (DOCS / "policy_weights.md").read_text().split("## The table")[1].split("\n## ")[0]
  rows = dict(re.findall(r"^\| `(\w+)` \|([^|]*)\|", text, re.MULTILINE))
  for name, weight in WEIGHTS.items():
    own = {p.name for p in inspect.signature(weight).parameters.values()} - {"rewards"}
    expected = set() if name == "fade" else own - {"confidence"}
    assert set(re.findall(r"`(\w+)`", rows[name])) - {"fade"} == expected, name
