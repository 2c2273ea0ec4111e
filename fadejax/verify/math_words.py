"""Names in mathematical answers: functions, Greek letters, units, words that stand for numbers."""

from __future__ import annotations

import re

FUNCTIONS = frozenset(
  "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log exp sqrt abs".split()
)
GREEK = frozenset(
  "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi "
  "rho sigma tau phi varphi chi psi omega Gamma Delta Theta Lambda Sigma Phi Psi Omega ell".split()
)
WORDS = re.compile(
  r"\\(?:text|mbox|textbf|textit|textrm|textsf|mathrm|mathbf|mathit|operatorname"
  r"|boldsymbol|bm|mathsf)\*?\s*\{([^{}]*)\}"
)
COMMANDS = re.compile(r"\\(?:begin|end)\{[A-Za-z]*\}|\\[A-Za-z]+")
UNITS = frozenset(
  "mm cm dm km mi ft yd kg mg lb lbs oz ml mL cl hr hrs min mins sec secs ms mph kph kmh Hz kHz "
  "kW kJ kcal rad deg degree degrees unit units dollar dollars cent cents inch inches foot feet "
  "mile miles meter meters metre metres centimeter centimeters hour hours minute minutes second "
  "seconds day days week weeks month months year years square cubic".split()
)
SCALES = {
  "dozen": 12,
  "hundred": 100,
  "thousand": 10**3,
  "million": 10**6,
  "billion": 10**9,
  "trillion": 10**12,
}
PERCENT = frozenset({"percent", "percentage", "pct", "per cent"})
ALIASES = {
  "centimeter": "cm",
  "centimetre": "cm",
  "meter": "m",
  "metre": "m",
  "kilometer": "km",
  "kilometre": "km",
  "millimeter": "mm",
  "inch": "in",
  "inche": "in",
  "feet": "ft",
  "foot": "ft",
  "hour": "h",
  "hr": "h",
  "minute": "min",
  "second": "s",
  "sec": "s",
  "pound": "lb",
  "gram": "g",
  "kilogram": "kg",
  "deg": "degree",
  "mile": "mi",
  "yard": "yd",
  "liter": "l",
  "litre": "l",
}
JOINERS = ("and", "or")
# Words after a number that say more than what is counted.
NOT_UNITS = frozenset(
  "and or not if when where for with is are no only but to than squared cubed factorial times plus "
  "minus over divided choose half halves third thirds fourth fourths quarter quarters fifth fifths "
  "sixth sixths eighth eighths tenth tenths hundredth hundredths root log mod modulo base per each "
  "except wrong incorrect".split()
)
# Whole answers that are words, though their letters could be read as a product.
ANSWER_WORDS = frozenset("yes no true false odd even none positive negative".split())


def unit_name(words: str) -> str:
  """One spelling of a unit: "square centimeters" and "cm^2" are both "cm^2"."""
  words = re.sub(r"\s+", " ", words.replace("\\", "").replace("{", "").replace("}", "").strip())
  power = ""
  for word, sign in (("square ", "^2"), ("sq ", "^2"), ("sq. ", "^2"), ("cubic ", "^3")):
    if words.lower().startswith(word):
      words, power = words[len(word) :], sign
  base, caret, exponent = words.rstrip(".").partition("^")
  base = base.strip()
  if len(base) > 3 or base.lower() in ("lbs", "hrs"):
    base = base.lower().removesuffix("s")
  base = ALIASES.get(base, base)
  return base + (caret + exponent.strip() if caret else power)


def text_form(text: str) -> str:
  r"""Words for comparison: no commands, case, punctuation at the ends or double spaces."""
  text = WORDS.sub(r" \1 ", text)
  text = re.sub(r"[\\{}$~]", " ", text)
  return re.sub(r"\s+", " ", text).strip(" .,;:!?()\"'").lower()


def is_prose(source: str) -> bool:
  """Several words in a row outside commands: their letters are no product."""
  bare = COMMANDS.sub(" ", WORDS.sub(" ", source))
  known = FUNCTIONS | GREEK | UNITS | PERCENT | set(SCALES) | set(JOINERS)
  return sum(word not in known for word in re.findall(r"[A-Za-z]{3,}", bare)) > 1
