from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

ROWS = [
  {"id": "a", "verifier": "integer", "answer": 7, "completion": "7"},
  {
    "id": "b",
    "verifier": "countdown",
    "numbers": [3, 5, 7],
    "target": 22,
    "completions": ["3*5+7", "3*5", "no idea"],
  },
  {"id": "c", "answer": "\\frac{1}{2}", "completion": "\\boxed{0.5}"},
  {"id": "d", "answer": "see the figure", "completion": "\\boxed{0.5}"},
]


def _run(tmp_path, lines, *flags):
  source = tmp_path / "in.jsonl"
  source.write_text("\n".join(lines) + "\n")
  environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
  command = [
    sys.executable,
    "-m",
    "fadejax.verify",
    f"--input={source}",
    f"--output={tmp_path / 'out.jsonl'}",
    *flags,
  ]
  return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


def test_grades_a_file(tmp_path):
  lines = [json.dumps(row) for row in ROWS]
  done = _run(tmp_path, [lines[0], "", *lines[1:]], "--verifier=math", "--workers=1")
  assert done.returncode == 0, done.stderr
  rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
  found = [(r["row"], r["id"], r["completion"], r["reward"], r["status"]) for r in rows]
  assert found == [
    (1, "a", 0, 1.0, "ok"),
    (3, "b", 0, 1.0, "ok"),
    (3, "b", 1, 0.0, "ok"),
    (3, "b", 2, 0.0, "no_answer"),
    (4, "c", 0, 1.0, "ok"),
    (5, "d", 0, None, "grader_error"),
  ]
  assert "6 completions graded" in done.stdout and "mean reward 0.6000 over 5" in done.stdout
  assert "1 problem row(s)" in done.stdout


@pytest.mark.parametrize(
  ("line", "reason"),
  [
    ("{", "not JSON"),
    ("[1]", "expected an object"),
    ('{"verifier": 3, "completion": "7"}', "'verifier' is not text"),
    ('{"verifier": "codes", "completion": "7"}', "unknown verifier 'codes'"),
    ('{"verifier": "integer", "answer": 7}', "'completion'"),
    ('{"verifier": "integer", "answer": 7, "completions": "7"}', "must be text"),
  ],
)
def test_malformed_rows_name_file_and_line(tmp_path, line, reason):
  done = _run(tmp_path, [json.dumps(ROWS[0]), line])
  assert done.returncode == 2
  assert "in.jsonl, line 2" in done.stderr and reason in done.stderr
  assert not (tmp_path / "out.jsonl").exists()


def test_help_is_no_failure():
  command = [sys.executable, "-m", "fadejax.verify"]
  asked = subprocess.run([*command, "--help"], capture_output=True, text=True)
  assert asked.returncode == 0 and "--input" in asked.stdout
  assert subprocess.run([*command, "--inputs=x"], capture_output=True).returncode == 1


def test_no_jax_in_the_room():
  code = (
    "import sys, fadejax.verify.math_answer, fadejax.verify.gym, fadejax.verify.worker, "
    "fadejax.verify.__main__; bad = {'jax', 'sympy', 'math_verify', 'reasoning_gym', 'numpy'}"
    "; sys.exit(str(bad & set(sys.modules)) if bad & set(sys.modules) else 0)"
  )
  environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
  done = subprocess.run(
    [sys.executable, "-c", code], env=environment, capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr


def test_golds_are_checked_against_their_own_tests(tmp_path):
  rows = [
    {"id": "m", "prompt": "?", "answer": r"\frac{1}{2}"},
    {"id": "i", "prompt": "?", "answer": 42, "verifier": "integer"},
    {"id": "c", "numbers": [2, 3], "target": 6, "solution": "2*3", "verifier": "countdown"},
    {"id": "w", "numbers": [2, 3], "target": 7, "solution": "2*3", "verifier": "countdown"},
    {"id": "p", "prompt": "?", "answer": "see the figure"},
    {"id": "n", "prompt": "?", "pattern": "a+", "verifier": "regex"},
  ]  # fmt: skip
  path = tmp_path / "problems.jsonl"
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  done = subprocess.run(
    [sys.executable, "-m", "fadejax.verify", "--check-golds", f"--input={path}",
     f"--output={tmp_path / 'out.jsonl'}"],
    capture_output=True, text=True,
  )  # fmt: skip
  assert done.returncode == 1, done.stderr
  assert "1 of 6 rows hold no gold" in done.stdout and "2 of 5 golds fail:" in done.stdout
  assert "line 4, id w: ok" in done.stdout and "line 5, id p: grader_error" in done.stdout
  assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 5
