from __future__ import annotations

import pytest

from fadejax.verify import check_problem, gym

reasoning = pytest.importorskip("reasoning_gym")


def _entry(numbers, answer, direction="ascending"):
  metadata = {"original_numbers": [str(n) for n in numbers], "direction": direction}
  return {"question": "", "answer": str(answer), "metadata": metadata}


def _score(dataset, text, entry):
  return gym.reasoning_gym(text, {"dataset": dataset, "entry": entry})


def test_sorting_true_values_against_a_rounded_key():
  """Handed case C59 (reasoning-gym issue 377)."""
  truth = ["-1.5", "2.75", "3.25"]
  for key in (truth, ["-1.5", "2.8", "3.2"]):
    entry = _entry([3.25, -1.5, 2.75], key)
    for text in (str(truth), "[-1.5, 2.75, 3.25]", f"<answer>{truth}</answer>", "-1.5, 2.75, 3.25"):
      assert _score("number_sorting", text, entry).reward == 1, text
    for text in (
      "['-1.5', '2.8', '3.2']",
      "['2.75', '-1.5', '3.25']",
      "[-1.5, 2.75]",
      "['-1.5', '2.75', '4.0']",
      "[]",
      "['a']",
      "[-1.5, 2.75, 3.25",
      "[nan, 1, 2]",
    ):
      assert _score("number_sorting", text, entry).reward == 0, text


@pytest.mark.parametrize("name", gym.TESTED)
def test_the_named_data_sets(name):
  """The stored answer scores 1 in a tag and bare; a wrong one is no success; silence is none."""
  dataset = reasoning.create_dataset(name, size=3, seed=7)
  for entry in dataset:
    answer = entry["metadata"]["expression"] if name == "countdown" else entry["answer"]
    assert _score(name, f"so\n<answer>{answer}</answer>", entry).reward == 1
    assert _score(name, answer, entry).reward == 1
    assert _score(name, "<answer>-98765</answer>", entry).reward < 0.5
    assert _score(name, f"<answer>{answer}1</answer>", entry).reward < 0.5
    assert _score(name, "", entry).status == "no_answer"


def test_substring_credit_is_withheld():
  """The default scorer gives len(key) / len(answer): "42" would score 0.5 for the key "4"."""
  entry = reasoning.create_dataset("gcd", size=1, seed=1)[0] | {"answer": "4"}
  assert reasoning.create_dataset("gcd", size=1).score_answer("42", entry) == 0.5
  assert _score("gcd", "42", entry).reward == 0


def test_text_that_a_scorer_would_evaluate_never_runs(tmp_path):
  mark = tmp_path / "ran"
  attack = f"open({str(mark)!r}, 'w').close() or ['x']"
  symbolic = f"x.__class__.__mro__[-1] if open({str(mark)!r}, 'w') else x"
  for name in gym.LITERAL_ONLY + gym.SYMBOLIC:
    entry = reasoning.create_dataset(name, size=1, seed=1)[0]
    for text in (attack, symbolic, "__import__('os').getpid()", "x.evalf()", "lambda: 1"):
      assert _score(name, text, entry).reward == 0
    assert _score(name, entry["answer"], entry).reward == 1
  assert not mark.exists()


def test_algebra_still_passes_its_guard():
  entry = reasoning.create_dataset("polynomial_multiplication", size=1, seed=1)[0]
  import sympy

  terms = sympy.sympify(entry["answer"]).args
  swapped = " + ".join(f"({term})" for term in reversed(terms))
  assert swapped != entry["answer"]
  assert _score("polynomial_multiplication", swapped, entry).reward == 1


def test_a_raising_scorer_is_a_zero_with_the_reason(monkeypatch):
  class Raises:
    def score_answer(self, answer, entry):
      raise IndexError("no such row")

  monkeypatch.setattr(gym, "_dataset", lambda name: Raises())
  verdict = _score("gcd", "5", {"answer": "4"})
  assert (verdict.reward, verdict.status) == (0, "ok") and "no such row" in verdict.detail


def test_an_unnamed_data_set_warns_and_an_unknown_one_is_refused():
  entry = reasoning.create_dataset("lcm", size=1, seed=1)[0]
  problem = {"verifier": "reasoning_gym", "dataset": "lcm", "entry": entry}
  with pytest.warns(UserWarning, match="lcm"):
    assert check_problem(problem) == ""
  assert _score("lcm", "7.5", entry).reward == 0
  with pytest.raises(ValueError, match="no data set 'nonsense'"):
    _score("nonsense", "7", entry)


def test_a_missing_package_names_the_extra(monkeypatch):
  monkeypatch.setattr(gym.importlib.util, "find_spec", lambda name: None)
  assert "fadejax[puzzles]" in gym.available()
  with pytest.raises(ValueError, match="puzzles"):
    _score("gcd", "5", {"answer": "4"})
