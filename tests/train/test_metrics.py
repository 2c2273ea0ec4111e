"""The writers: rows, cutting back, TensorBoard from the rows, wandb offline."""

from __future__ import annotations

import json
import math
import re
import struct
from pathlib import Path

import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import masked_crc32c

from fadejax.train import metrics

ROOT = Path(__file__).resolve().parents[2]


def row(step: int) -> dict:
  return {"step": step, "solve_rate": step / 10, "alpha": 3.0, "verdict/ok": 1.0}


def read(path: Path) -> list[dict]:
  return [json.loads(line) for line in path.read_text().splitlines()]


def read_events(workdir: Path) -> list[tuple[int, dict[str, float]]]:
  """(step, values) of each event with a summary, read as TFRecords with both checksums checked."""
  (path,) = (workdir / "tensorboard").iterdir()
  data = path.read_bytes()
  found, at = [], 0
  while at < len(data):
    header = data[at : at + 8]
    (length,) = struct.unpack("<Q", header)
    assert data[at + 8 : at + 12] == struct.pack("<I", masked_crc32c(header))
    body = data[at + 12 : at + 12 + length]
    assert data[at + 12 + length : at + 16 + length] == struct.pack("<I", masked_crc32c(body))
    event = Event.FromString(body)
    if event.summary.value:
      found.append((event.step, {v.tag: v.simple_value for v in event.summary.value}))
    at += 16 + length
  return found


def test_rows_are_on_disk_before_close(tmp_path):
  writers = metrics.open_writers(tmp_path, {})
  writers.row(row(1))
  writers.samples([{"step": 1, "completion": "α ≥ 1\n", "reward": None}])
  assert read(tmp_path / "metrics.jsonl") == [row(1)]
  assert read(tmp_path / "samples.jsonl") == [{"step": 1, "completion": "α ≥ 1\n", "reward": None}]
  assert [step for step, _ in read_events(tmp_path)] == [1]
  writers.close()


def test_a_value_that_is_not_finite_is_null_and_counted(tmp_path):
  with metrics.open_writers(tmp_path, {}) as writers:
    writers.row({"step": 1, "kl": math.nan, "grad_norm": math.inf, "loss": 0.5})
    writers.row({"step": 2, "loss": 0.25})
  text = (tmp_path / "metrics.jsonl").read_text()
  assert "NaN" not in text and "Infinity" not in text
  first, second = read(tmp_path / "metrics.jsonl")
  assert first == {"step": 1, "kl": None, "grad_norm": None, "loss": 0.5, "non_finite": 2}
  assert "non_finite" not in second
  assert read_events(tmp_path)[0] == (1, {"loss": 0.5, "non_finite": 2.0})


def test_numpy_numbers_are_plain_and_arrays_are_refused(tmp_path):
  with metrics.open_writers(tmp_path, {}) as writers:
    writers.row({"step": np.int32(1), "loss": np.float32(0.5), "tokens": np.int64(7)})
    with pytest.raises(TypeError, match="row/loss"):
      writers.row({"step": 2, "loss": np.zeros(2)})
    writers.row({"step": 2, "loss": 0.0})
  assert read(tmp_path / "metrics.jsonl")[0] == {"step": 1, "loss": 0.5, "tokens": 7}
  assert len(read(tmp_path / "metrics.jsonl")) == 2


def test_no_step_is_written_twice(tmp_path):
  with metrics.open_writers(tmp_path, {}) as writers:
    writers.row(row(0))
    writers.row(row(1))
    with pytest.raises(ValueError, match="step 1 cannot follow"):
      writers.row(row(1))


def test_a_sample_without_a_step_is_refused(tmp_path):
  with (
    metrics.open_writers(tmp_path, {}) as writers,
    pytest.raises(ValueError, match="needs 'step'"),
  ):
    writers.samples([{"completion": "7"}])


def test_resuming_cuts_back_and_equals_an_uninterrupted_run(tmp_path):
  whole, resumed = tmp_path / "whole", tmp_path / "resumed"
  with metrics.open_writers(whole, {}) as writers:
    for step in range(7):
      writers.row(row(step))
      writers.samples([{"step": step, "completion": str(step)}])
  with metrics.open_writers(resumed, {}) as writers:
    for step in range(6):
      writers.row(row(step))
      writers.samples([{"step": step, "completion": str(step)}])
  with metrics.open_writers(resumed, {}, resume_step=3) as writers:
    assert writers.last_step == 3
    assert writers.dropped == {"metrics.jsonl": 2, "samples.jsonl": 2}
    assert [step for step, _ in read_events(resumed)] == [0, 1, 2, 3]
    for step in range(4, 7):
      writers.row(row(step))
      writers.samples([{"step": step, "completion": str(step)}])
  for name in ("metrics.jsonl", "samples.jsonl"):
    assert (whole / name).read_bytes() == (resumed / name).read_bytes()
  assert read_events(whole) == read_events(resumed)
  assert len(read_events(whole)) == 7
  assert read_events(whole)[2][1] == pytest.approx(
    {"solve_rate": 0.2, "alpha": 3.0, "verdict/ok": 1.0}, rel=1e-6
  )


@pytest.mark.parametrize("torn", ['{"step": 3, "lo', '{"step": 3, "lo\n', "{}\n", "\0\0\0", "7"])
def test_a_torn_last_line_is_dropped_and_counted(tmp_path, torn):
  path = tmp_path / "metrics.jsonl"
  path.write_text("".join(json.dumps(row(s)) + "\n" for s in (1, 2)) + torn)
  assert metrics.cut_back(tmp_path, 2) == {"metrics.jsonl": 1, "samples.jsonl": 0}
  assert read(path) == [row(1), row(2)]
  assert path.read_text().endswith("\n")


def test_a_last_line_that_lacks_only_its_end_is_kept(tmp_path):
  (tmp_path / "metrics.jsonl").write_text(json.dumps(row(1)))
  with metrics.open_writers(tmp_path, {}, resume_step=1) as writers:
    writers.row(row(2))
  assert read(tmp_path / "metrics.jsonl") == [row(1), row(2)]


def test_damage_in_the_middle_names_file_and_line_and_changes_nothing(tmp_path):
  text = f"{json.dumps(row(1))}\n{{broken\n{json.dumps(row(3))}\n"
  (tmp_path / "samples.jsonl").write_text(text)
  (tmp_path / "metrics.jsonl").write_text(json.dumps(row(9)) + "\n")
  with pytest.raises(ValueError, match=r"samples\.jsonl, line 2"):
    metrics.cut_back(tmp_path, 1)
  assert (tmp_path / "samples.jsonl").read_text() == text
  assert read(tmp_path / "metrics.jsonl") == [row(9)]


def test_starting_afresh_drops_rows_that_no_checkpoint_covers(tmp_path):
  with metrics.open_writers(tmp_path, {}) as writers:
    writers.row(row(0))
    writers.row(row(1))
  with metrics.open_writers(tmp_path, {}) as writers:
    assert writers.dropped["metrics.jsonl"] == 2
    writers.row(row(0))
  assert read(tmp_path / "metrics.jsonl") == [row(0)]
  # Somebody may have deleted the checkpoints of a long run: its rows are not lost.
  assert read(tmp_path / "metrics.jsonl.old") == [row(0), row(1)]
  assert [step for step, _ in read_events(tmp_path)] == [0]


def test_tensorboard_can_be_left_out(tmp_path):
  with metrics.open_writers(tmp_path, {}, tensorboard=False) as writers:
    writers.row(row(1))
  assert not (tmp_path / "tensorboard").exists()


def test_wandb_offline_keeps_its_run_over_a_resume(tmp_path):
  config = {"fade": {"beta": 0.2}}
  with metrics.open_writers(tmp_path, config, wandb_mode="offline") as writers:
    first = writers.wandb_run.id
    writers.row({"step": 1, "loss": 0.5, "kl": math.nan})
  with metrics.open_writers(tmp_path, config, resume_step=1, wandb_mode="offline") as writers:
    assert writers.wandb_run.id == first
    assert writers.wandb_run.config["fade"] == {"beta": 0.2}
    writers.row({"step": 2, "loss": 0.25})
  assert (tmp_path / "wandb_run_id.txt").read_text().strip() == first
  assert list((tmp_path / "wandb").glob(f"offline-run-*-{first}/run-{first}.wandb"))


def test_an_unknown_wandb_mode_is_refused(tmp_path):
  with pytest.raises(ValueError, match="'offline'"):
    metrics.open_writers(tmp_path, {}, wandb_mode="offlin")


def test_docs_list_the_known_metrics_with_their_units():
  text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
  listed = re.findall(r"^\| `([^`]+)` \| ([^|]+) \|", text, flags=re.MULTILINE)
  assert len(listed) == len(dict(listed))
  assert dict(listed) == metrics.KNOWN_METRICS


def test_time_fields_are_known():
  times = {key for key in metrics.KNOWN_METRICS if key.startswith("time/")}
  assert set(metrics.TIME_FIELDS) == times | {"tokens_per_s"}


def test_unknown_keys_are_found():
  known = ["step", "verdict/no_answer", "solve_rate/add", "eval/pass@64", "eval/add/pass@8"]
  unknown = ["sovle_rate", "time/", "verdict/a/b", "evaluation"]
  assert metrics.unknown_keys(dict.fromkeys(known + unknown, 0)) == sorted(unknown)
