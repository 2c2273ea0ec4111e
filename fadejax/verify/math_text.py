r"""Where the answer of a mathematical completion is, and its text in one spelling.

The rules are those of docs/verifiers.md: only what follows the thinking part counts, the last
box wins, boxes that are merely listed ("\boxed{1}, \boxed{2}") are one answer with several
parts, and without a box an answer phrase, the last formula or a closing number is read whole.
Every function is linear in its input or looks at a bounded piece of it.
"""

from __future__ import annotations

import re

from fadejax.verify.verdict import after_thinking

ANSWER_LIMIT = 2000  # characters of an answer that are parsed
SCAN_LIMIT = 20_000  # characters in which a box must close
LISTED_BOXES = 16

BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=[{0-9A-Za-z\\])")
BETWEEN_BOXES = re.compile(
  r"[\s$.,;*&]*(?:(?:and|or)[\s$,]*)?(?:\\(?:[\],()\[;: ]|quad|qquad)\s*)*"
)
PHRASE = re.compile(r"(?i)####|answer\W{0,4}(?:is|are|[:=])[\s*:]*")
FORMULA = re.compile(r"\$\$(.+?)\$\$|\$([^$]+?)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
# Nothing but a number in some spelling, and at most a unit: at the end or the start of prose.
CLOSING = re.compile(r"[-+]?[$]?[0-9.][0-9.,/%:^()*+\-= ]{0,80}(?: [A-Za-z]{2,12})?$")
OPENING = re.compile(r"[-+]?[$]?[0-9.][0-9.,/%:^()*+\-= ]{0,80}(?=\s+[A-Za-z]|$)")


class TooLongError(ValueError):
  """An answer over the length that is read."""


def candidates(completion: str) -> list[str]:
  """What may be the answer, best first: the first that parses is it; empty means no answer.

  Raises:
    TooLongError: the answer is longer than `ANSWER_LIMIT`.
  """
  text = after_thinking(completion)
  if text is None:
    return []
  boxed = _boxes(text)
  if boxed is not None:
    found = [", ".join(boxed)] if all(part.strip() for part in boxed) else []
  elif "<answer>" in text:
    found = [text.rpartition("<answer>")[2].partition("</answer>")[0].strip()]
  else:
    found = _unboxed(text)
  if any(len(part) > ANSWER_LIMIT for part in found):
    raise TooLongError(f"an answer of over {ANSWER_LIMIT} characters")
  return [part for part in found if part.strip()]


def _boxes(text: str) -> list[str] | None:
  """Contents of the last box and of those listed right before it; None when there is no box.

  A last box that never closes is an empty answer: [""].
  """
  starts = [match.span() for match in BOX.finditer(text)][-LISTED_BOXES:]
  if not starts:
    return None
  last = _content(text, starts[-1][1])
  if last is None:
    return [""]
  content, end = last
  first, found = starts[-1][0], [content]
  for start, inside in reversed(starts[:-1]):
    before = _content(text, inside)
    if before is None:
      break
    if before[1] >= end:  # it encloses the ones found so far
      first, end, found = start, before[1], [before[0]]
    elif BETWEEN_BOXES.fullmatch(text, before[1], first):
      first = start
      if before[0].strip() not in (part.strip() for part in found):
        found.insert(0, before[0])
    else:
      break
  return found


def _content(text: str, at: int) -> tuple[str, int] | None:
  """What a box at `at` holds and where it ends; None when its brace never closes.

  Raises:
    TooLongError: it does not close within `SCAN_LIMIT` characters.
  """
  if text[at] != "{":
    match = re.compile(r"\\[A-Za-z]+|[0-9.,]*[0-9]|[A-Za-z]").match(text, at)
    return (match.group(), match.end()) if match else None
  depth = 0
  for match in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, at, at + SCAN_LIMIT):
    depth += {"{": 1, "}": -1}.get(match.group(), 0)
    if depth == 0:
      return text[at + 1 : match.start()], match.end()
  if len(text) > at + SCAN_LIMIT:
    raise TooLongError(f"a box of over {SCAN_LIMIT} characters")
  return None


def _unboxed(text: str) -> list[str]:
  text = text[-SCAN_LIMIT:]
  phrases = list(PHRASE.finditer(text))
  if phrases:
    rest = text[phrases[-1].end() :].strip().strip("*").strip()
    line = _sentence(rest.partition("\n")[0])
    found = [line.replace("$", "")] if "\\$" not in line else [line]
    formula = FORMULA.search(line)
    if formula is not None:
      return [*found, _inside(formula)]
    opening = OPENING.match(line)
    return [*found, opening.group()] if opening else found
  formulas = list(FORMULA.finditer(text))
  if formulas:
    return [_inside(formulas[-1])]
  lines = [line for line in text.splitlines() if line.strip()]
  if not lines:
    return []
  line = _sentence(lines[-1])
  found = [line] if len(lines) == 1 and len(line) <= 100 else []
  tail = line[-80:]
  closing = CLOSING.search(tail)
  if closing and re.fullmatch(r"[\s=:$]?", tail[max(0, closing.start() - 1) : closing.start()]):
    found.append(closing.group())
  return found


def _inside(formula: re.Match[str]) -> str:
  return next(group for group in formula.groups() if group is not None).strip()


def _sentence(line: str) -> str:
  """The line without emphasis and its closing full stop."""
  line = line.strip().replace("**", "")
  return line.rstrip(" .;,!") if not line.endswith("\\!") else line


REPLACEMENTS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
  (re.compile(pattern), by)
  for pattern, by in (
    (r"\\?\$|[€£]", ""),
    # Separators of thousands that can be nothing else.
    (r"(?<=[0-9])(?:\{,\}|(?<!\\)\\[, ]|,?\\!)(?=[0-9]{3}(?![0-9]))", ""),
    (r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|limits)(?![A-Za-z])\.?", ""),
    (r"(?<!\\)\\[,;:! ]|~|\\q?quad(?![A-Za-z])", " "),
    (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
    (r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
    (r"\\(?:leq|leqslant|le)(?![A-Za-z])|≤|<=", r"\\le "),
    (r"\\(?:geq|geqslant|ge)(?![A-Za-z])|≥|>=", r"\\ge "),
    (r"\\(?:neq|ne)(?![A-Za-z])|≠", r"\\ne "),
    (r"\\lt(?![A-Za-z])", "<"),
    (r"\\gt(?![A-Za-z])", ">"),
    (r"\*\*", "^"),
    (r"\\(?:cdot|times|ast)(?![A-Za-z])|[×·⋅]", "*"),
    (r"\\div(?![A-Za-z])|÷", "/"),
    (r"[−–—]", "-"),
    (r"\^\s*\{?\s*(?:\\circ|°)\s*\}?|\\degree(?![A-Za-z])|°|\\circ(?![A-Za-z])", r"\\degree "),
    (r"\\%", "%"),
    (r"\\(?:cup|bigcup)(?![A-Za-z])|∪", r"\\cup "),
    (r"\\pm(?![A-Za-z])|±|\+/-", r"\\pm "),
    (r"\\in(?![A-Za-z])|∈", r"\\in "),
    (r"\\infin(?:ty)?(?![A-Za-z])|∞", r"\\infty "),
    (r"π", r"\\pi "),
    (r"√", r"\\sqrt"),
    (r"\\(?:backslash|setminus)(?![A-Za-z])", r"\\setminus "),
    (r"\\(?:varnothing|emptyset)(?![A-Za-z])|∅", r"\\emptyset "),
    (r"\\(?:approx|simeq|thickapprox)(?![A-Za-z])|≈", r"\\approx "),
    (r"\\lbrace(?![A-Za-z])", r"\\{"),
    (r"\\rbrace(?![A-Za-z])", r"\\}"),
    (r"\\[lr]vert(?![A-Za-z])|\\mid(?![A-Za-z])", "|"),
    (r"\\mathbb\s*\{?\s*R\s*\}?|ℝ", r"\\reals "),
    (r"\u00a0|\u202f|\u2009", " "),
  )
)


def normalise(text: str) -> str:
  """One spelling for commands, signs and spaces that mean the same."""
  for pattern, by in REPLACEMENTS:
    text = pattern.sub(by, text)
  return text.strip().rstrip(".;,").strip()


def canonical(text: str) -> str:
  """Normalised text with white space only where it separates letters or digits.

  Texts with the same canonical form are the same formula.
  """
  text = re.sub(r"([_^])\s*\{\s*([0-9A-Za-z])\s*\}", r"\1\2", normalise(text))
  return re.sub(r"(?<![0-9A-Za-z])\s+|\s+(?![0-9A-Za-z])", "", re.sub(r"\s+", " ", text))
