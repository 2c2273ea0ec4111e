"""The report page of synthetic runs: what it must hold, and what it must not."""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from fadejax import report, report_figures

ATTACK = '<script>alert("1")</script></pre>'


def make_run(folder: Path, steps: int = 6, **extra) -> Path:
  folder.mkdir(parents=True)
  rows = [{"step": 0, "eval/pass@1": 0.0625, "eval/pass@8": 0.25, "eval/greedy": 0.125}]
  for step in range(1, steps + 1):
    rows.append(
      {
        "step": step,
        "solve_rate": step / steps,
        "entropy": 2.0 - step / steps,
        "target_entropy": 1.0,
        "alpha": 3.0,
        "delta": 0.5,
        "m_s": 0.1,
        "m_f": 0.2,
        "length_mean": 5.0,
        "truncated_share": 0.1,
        "clip_share": 0.0,
        "grad_norm": 2.0,
        "tokens": 500,
        "tokens_per_s": 250.0,
        "time/rollout": 2.0,
        "time/update": 3.0,
        "time/step": 5.0,
        **extra,
      }
    )
  rows[-1] |= {"eval/pass@1": 0.75, "eval/pass@8": 0.875, "eval/greedy": 0.8125}
  (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  samples = [
    {
      "step": step,
      "prompt": [{"role": "user", "content": "What is 2 + 2?"}],
      "completion": f"{ATTACK} at {step}",
      "reward": 1.0,
      "status": "ok",
      "detail": "<b>4</b>",
      "length": 5,
      "truncated": step == 1,
    }
    for step in (1, 3, steps)
  ]
  (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
  (folder / "config.json").write_text(json.dumps({"fade": {"beta": 0.2}, "name": "<i>x</i>"}))
  return folder


class Page(HTMLParser):
  """Tags with attributes, and the text, of a page."""

  def __init__(self, path: Path):
    super().__init__()
    self.tags: list[tuple[str, dict]] = []
    self.open: list[str] = []
    self.text = ""
    self.source = path.read_text(encoding="utf-8")
    self.feed(self.source)

  def handle_starttag(self, tag, attrs):
    self.tags.append((tag, dict(attrs)))

  def handle_data(self, data):
    self.text += data

  def titles(self) -> list[str]:
    return re.findall(r"<figure><h3>(.*?)</h3>", self.source)


def test_the_page_of_one_run(tmp_path):
  run = make_run(tmp_path / "demo")
  out = report.write_report([run])
  assert out == run / "report.html"
  page = Page(out)
  for title in (
    "Solve rate in training",
    "Evaluation",
    "Entropy against its target",
    "FADE&#39;s α and δ",
    "Masses",
    "Completion length",
    "Truncated share",
    "Gradient norm",
    "Clip share",
    "Time by phase",
  ):
    assert title in page.titles()
  assert len([tag for tag, _ in page.tags if tag == "svg"]) == len(page.titles())
  absent = re.search(r"Not recorded: (.*)", page.text)[1]
  for title in ("Verdicts", "Solve rate by task", "Sampler–trainer gap", "Batches drawn a step"):
    assert title in absent
  cells = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page.source))
  assert "pass@1 0.062 0.750 +0.688" in cells
  assert "greedy accuracy 0.125 0.812 +0.688" in cells
  assert "demo 6 30s 3,000 250" in cells
  assert '"beta": 0.2' in page.text
  assert "user: What is 2 + 2?" in page.text
  assert "Early, step 1" in page.text and "Late, step 6" in page.text
  assert f"{ATTACK} at 1" in page.text and f"{ATTACK} at 6" in page.text


def test_nothing_from_a_run_becomes_markup(tmp_path):
  page = Page(report.write_report([make_run(tmp_path / "a<b>c&d")]))
  tags = {tag for tag, _ in page.tags}
  assert not tags & {"script", "b", "i", "iframe", "object", "embed"}
  assert ATTACK not in page.source and "&lt;script&gt;" in page.source
  assert "<b>4</b>" in page.text and "<i>x</i>" in page.text and "a<b>c&d" in page.text


def test_the_page_fetches_nothing_and_its_ids_are_unique(tmp_path):
  page = Page(report.write_report([make_run(tmp_path / "demo")]))
  assert not {tag for tag, _ in page.tags} & {"link", "img", "script", "iframe", "base"}
  assert "http:" not in page.source and "https:" not in page.source and "@import" not in page.source
  ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
  assert len(ids) == len(set(ids)) > 0
  references = [
    reference
    for _, attrs in page.tags
    for name, value in attrs.items()
    for reference in re.findall(r"url\(#([^)]+)\)", value or "")
    + ([value[1:]] if name.endswith("href") else [])
  ]
  assert references and set(references) <= set(ids)
  assert report_figures.INK not in page.source and "currentColor" in page.source


def test_several_runs_overlay(tmp_path):
  first = make_run(tmp_path / "fade" / "seed_0")
  second = make_run(tmp_path / "mean" / "seed_0", invalid_groups=1)
  out = report.write_report([first, second], tmp_path / "new" / "both.html")
  page = Page(out)
  assert "fade/seed_0 · mean/seed_0" in page.text
  legend = re.findall(r"<text[^>]*>([^<]+)</text>", page.source)
  assert {"fade/seed_0", "mean/seed_0", "m_S, successes", "m_F, failures"} <= set(legend)
  assert "Time by phase: fade/seed_0" in page.titles()
  assert "mean/seed_0: Groups left out of the loss" in page.text
  assert "grader errors): 6." in page.text


def test_rows_of_an_older_run_are_tolerated(tmp_path):
  run = tmp_path / "old"
  run.mkdir()
  rows = '{"step": 1, "solve_rate": 0.5}\n{"step": 2, "solve_rate": null, "new": "x"}\n{"step": 3'
  (run / "metrics.jsonl").write_text(rows)
  page = Page(report.write_report([run]))
  assert page.titles() == ["Solve rate in training"]
  assert "holds no evaluation" in page.text and "holds no samples" in page.text
  assert "holds no config.json" in page.text
  assert "The last line of metrics.jsonl was cut short" in page.text


def test_damaged_and_missing_files_are_named(tmp_path):
  with pytest.raises(ValueError, match=r"nowhere/metrics\.jsonl: no such file"):
    report.write_report([tmp_path / "nowhere"])
  run = make_run(tmp_path / "run")
  with pytest.raises(ValueError, match="named twice"):
    report.write_report([run, tmp_path / "run" / ".." / "run"])
  (run / "config.json").write_text("{")
  with pytest.raises(ValueError, match=r"config\.json: not JSON"):
    report.write_report([run])
  (run / "metrics.jsonl").write_text("")
  with pytest.raises(ValueError, match="no rows yet"):
    report.write_report([run])
  (run / "metrics.jsonl").write_text('{"step": 1}\nx\n{"step": 2}\n')
  with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2"):
    report.write_report([run])


def test_the_picture_is_small(tmp_path):
  runs = [make_run(tmp_path / name, steps=300) for name in ("a", "b", "c")]
  data = report.write_picture(runs, tmp_path / "docs" / "curves.png").read_bytes()
  assert data[:8] == b"\x89PNG\r\n\x1a\n" and len(data) < 100_000
  assert struct.unpack(">II", data[16:24]) == (960, 580)


def test_smoothing_keeps_lines_and_the_mean_at_the_ends():
  straight = np.arange(200.0)
  smooth = report_figures._smooth(straight)  # window of 3 on either side
  np.testing.assert_allclose(smooth[3:-3], straight[3:-3])
  np.testing.assert_allclose(smooth[0], (0 + 1 + 2 + 3) / 4)
  np.testing.assert_allclose(smooth[-1], (196 + 197 + 198 + 199) / 4)


def test_a_long_curve_keeps_its_spikes():
  values = np.zeros(5000)
  values[1234] = 7.0
  rows = [{"step": i, "grad_norm": value} for i, value in enumerate(values)]
  run = report_figures.Run("long", rows, [], None, [])
  panel = report_figures.Panel("", "", (("grad_norm", "norm"),), "")
  axes = Figure().add_subplot()
  assert report_figures.draw_panel(axes, panel, [run])
  (band,) = axes.collections
  assert band.get_paths()[0].vertices[:, 1].max() == 7.0
  assert len(axes.lines[0].get_xdata()) == 1000


def test_curves_are_ordered_by_number():
  row = {"step": 1, "eval/pass@64": 1.0, "eval/pass@8": 1.0, "eval/pass@1": 1.0, "eval/a/pass@1": 1}
  run = report_figures.Run("r", [row], [], None, [])
  panel = next(panel for panel in report_figures.PANELS if panel.title == "Evaluation")
  labels = [label for _, label in report_figures._curves(run, panel)]
  assert labels == ["pass@1", "pass@8", "pass@64"]


def test_the_command(tmp_path):
  run = make_run(tmp_path / "demo")
  command = [sys.executable, "-m", "fadejax.report"]
  png = tmp_path / "curves.png"
  done = subprocess.run([*command, str(run), f"--png={png}"], capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  assert done.stdout.splitlines() == [str(run / "report.html"), str(png)]
  failed = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True)
  assert failed.returncode == 1
  assert failed.stderr.startswith("fadejax.report: ") and "no such file" in failed.stderr
  assert subprocess.run(command, capture_output=True).returncode == 1
  assert subprocess.run([*command, "--help"], capture_output=True).returncode == 0
