r"""A strict parser of mathematical answers, LaTeX or plain, into a small tree.

It reads the whole text or raises: nothing is skipped, so no number inside a formula that is
not understood can pass for the answer. Nodes are tuples, the first entry names the kind:

  ("num", Fraction) ("sym", name) ("const", "pi" | "e" | "i" | "inf")
  ("add" | "mul", a, ...) ("neg", a) ("inv", a) ("pow", a, b) ("fact", a) ("pm", sign, a)
  ("func", name, a, ...) ("pct", a) ("unit", a, name) ("based", digits, base)
  ("tuple", open, close, items) ("set", items) ("list", items, joined_by_and)
  ("matrix", kind, rows) ("rel", operands, operators) ("union" | "minus", a, b)
  ("colon", items) ("reals",) ("text", words)
"""

from __future__ import annotations

import re
from fractions import Fraction

from fadejax.verify.math_scan import NUMBER, MathSyntaxError, Node, Scanner, walk
from fadejax.verify.math_text import ANSWER_LIMIT, normalise
from fadejax.verify.math_words import (
  ANSWER_WORDS,
  FUNCTIONS,
  GREEK,
  JOINERS,
  PERCENT,
  SCALES,
  WORDS,
  is_prose,
  text_form,
  unit_name,
)

ITEM_LIMIT = 64

RELATIONS = {
  "=": "=",
  "<": "<",
  ">": ">",
  r"\le": "<=",
  r"\ge": ">=",
  r"\ne": "!=",
  r"\in": "in",
  r"\approx": "~",
}


def parse(text: str) -> Node:
  """The tree of a whole answer.

  Raises:
    MathSyntaxError: it is not of the grammar, too long, or too deeply nested.
  """
  if len(text) > ANSWER_LIMIT:
    raise MathSyntaxError(f"longer than {ANSWER_LIMIT} characters")
  source = normalise(text)
  wrapped = WORDS.fullmatch(source)
  inside = wrapped.group(1).strip() if wrapped else source
  if inside.lower() in ANSWER_WORDS or (wrapped and re.fullmatch(r"[A-Za-z][A-Za-z\s'-]+", inside)):
    return ("text", text_form(inside))
  try:
    if is_prose(inside):
      raise MathSyntaxError("prose")
    return _Parser(inside).whole()
  except MathSyntaxError:
    if not wrapped or not text_form(inside):
      raise
    return ("text", text_form(inside))


class _Parser:
  """Recursive descent over a scanner: what a digit or a bar means depends on where it is."""

  def __init__(self, text: str):
    self.scan = Scanner(text)
    self.brackets = self.bars = 0  # open ones around this place

  # Lists, relations, sets.

  def whole(self) -> Node:
    if not self.scan.text.strip():
      raise MathSyntaxError("empty")
    node = self.listed()
    if self.scan.peek():
      self.scan.fail("unexpected")
    return node

  def joiner(self) -> str:
    """A comma, semicolon, "and" or "or" between items; consumed."""
    comma = self.scan.take(",", ";")
    match = self.scan.wrapped()
    if match and (found := re.fullmatch(r"[\s,]*(and|or)[\s,]*", match.group(1))):
      self.scan.at = match.end()
      return found.group(1)
    if (word := self.scan.word()) in JOINERS:
      self.scan.at += len(word)
      return word
    return "or" if self.scan.take(r"\lor", r"\vee") else comma

  def listed(self) -> Node:
    items, conjunction = [self.relation()], False
    while joined := self.joiner():
      conjunction |= joined == "and"
      items.append(self.relation())
      if len(items) > ITEM_LIMIT:
        self.scan.fail("too many items")
    return items[0] if len(items) == 1 else ("list", tuple(items), conjunction)

  def relation(self) -> Node:
    operands, operators = [self.collection()], []
    while sign := self.scan.take(*RELATIONS):
      if RELATIONS[sign] == "~":
        # "sqrt(2) = x ~ 1.41": the exact part is the answer.
        self.collection()
        if self.scan.peek() in RELATIONS:
          self.scan.fail("after an approximation")
        break
      operators.append(RELATIONS[sign])
      operands.append(self.collection())
    return operands[0] if not operators else ("rel", tuple(operands), tuple(operators))

  def collection(self) -> Node:
    node = self.colons()
    while sign := self.scan.take(r"\cup", r"\setminus"):
      node = ("union" if sign == r"\cup" else "minus", node, self.colons())
    return node

  def colons(self) -> Node:
    items = [self.measured()]
    while self.scan.take(":"):
      items.append(self.measured())
    return items[0] if len(items) == 1 else ("colon", tuple(items))

  def measured(self) -> Node:
    """A sum and the scale words, percent sign in words, or unit after it."""
    node = self.sum()
    numeric = not any(part[0] == "sym" for part in walk(node))
    while (found := self.scan.unit(numeric)) is not None:
      words, self.scan.at = found
      while words:
        first, _, rest = words.strip().partition(" ")
        scale = SCALES.get(first.lower().removesuffix("s"))
        if scale is not None:
          node = ("mul", node, ("num", Fraction(scale)))
        elif words.strip().lower() in PERCENT and node[0] != "pct":
          node, rest = ("pct", node), ""
        elif node[0] == "unit":
          node, rest = ("unit", node[1], f"{node[2]} {unit_name(words)}"), ""
        else:
          node, rest = ("unit", node, unit_name(words)), ""
        words = rest
    return node

  # Sums, products, powers.

  def sum(self) -> Node:
    self.scan.enter()
    terms: list[Node] = []
    sign = self.scan.take("+", "-", r"\pm", r"\mp")
    while sign or not terms:
      term = self.product()
      if sign == "-":
        term = ("neg", term)
      elif sign in (r"\pm", r"\mp"):
        term = ("pm", 1 if sign == r"\pm" else -1, term)
      terms.append(term)
      sign = self.scan.take("+", "-", r"\pm", r"\mp")
    self.scan.depth -= 1
    return terms[0] if len(terms) == 1 else ("add", *terms)

  def product(self) -> Node:
    factors, divided = [self.signed()], False
    while True:
      sign = self.scan.take("*", "/")
      if sign:
        factor = self.signed()
        factors.append(("inv", factor) if sign == "/" else factor)
        divided = sign == "/"
      elif self.juxtaposed():
        if divided:
          self.scan.fail("a/b c can be read in two ways")
        factors.append(self.power())
      else:
        return factors[0] if len(factors) == 1 else ("mul", *factors)

  def signed(self) -> Node:
    """A factor after `*` or `/` may carry a sign: 3*-2."""
    if self.scan.take("-"):
      return ("neg", self.power())
    return self.power()

  def juxtaposed(self) -> bool:
    """Whether a factor follows without a sign; a number never does ("2 9/4" is malformed)."""
    token = self.scan.peek()
    if not token or token.isdigit() or token in ".{[":
      return False
    if self.scan.wrapped():
      return self._is_constant_word() is not None
    if token.isascii() and token.isalpha():
      return self.scan.word() not in JOINERS and self.scan.unit() is None
    starts = (r"\frac", r"\sqrt", r"\pi", r"\binom", r"\lfloor", r"\lceil", "(", "|")
    if token == "|":
      return self.bars == 0  # inside bars the next one closes
    return token in starts or token[1:] in FUNCTIONS or token[1:] in GREEK

  def _is_constant_word(self) -> str | None:
    match = self.scan.wrapped()
    inside = match.group(1).strip() if match else ""
    return inside if inside in ("e", "i") or inside in FUNCTIONS else None

  def power(self) -> Node:
    node = self.postfix(self.atom())
    if self.scan.take("^"):
      if node[0] == "based":
        self.scan.fail("a power of a number with a base")
      node = self.postfix(("pow", node, self.exponent()))
      if self.scan.peek() == "^":
        self.scan.fail("a double power")
    return node

  def exponent(self) -> Node:
    """Of `^`: a group, or a signed number, symbol or command; 2^3^4 is a tower."""
    if self.scan.peek() == "{":
      return self.group()
    self.scan.enter()
    sign = self.scan.take("-")
    if self.scan.peek().isdigit():
      # Digits only: in x^2\\frac{1}{2} the exponent is 2, not a mixed number.
      match = NUMBER.match(self.scan.text, self.scan.at)
      assert match is not None
      self.scan.at = match.end()
      node: Node = ("num", Fraction(match.group().rstrip(".")))
    else:
      node = self.atom()
    if self.scan.take("^"):
      node = ("pow", node, self.exponent())
    self.scan.depth -= 1
    return ("neg", node) if sign else node

  def postfix(self, node: Node) -> Node:
    kinds = {"!": "fact", "%": "pct", r"\degree": "unit"}
    while token := self.scan.take(*kinds):
      if node[0] == kinds[token]:
        self.scan.fail(f"a second {token}")
      node = (kinds[token], node, "degree") if token == r"\degree" else (kinds[token], node)
    return node

  def group(self) -> Node:
    """A braced argument."""
    self.scan.need("{")
    node = self.sum()
    self.scan.need("}")
    return node

  def argument(self) -> Node:
    r"""Of \frac or \sqrt: a group, a digit, a letter or a command."""
    self.scan.spaces()
    if self.scan.peek() == "{":
      return self.group()
    if self.scan.at < len(self.scan.text) and self.scan.text[self.scan.at].isdigit():
      self.scan.at += 1
      return ("num", Fraction(int(self.scan.text[self.scan.at - 1])))
    if self.scan.peek().isalpha():
      self.scan.at += 1
      return self.letter(self.scan.text[self.scan.at - 1])
    return self.atom()

  # Atoms.

  def atom(self) -> Node:
    token = self.scan.peek()
    if not token:
      self.scan.fail("ends too early")
    self.scan.enter()
    if token.isdigit() or token == ".":
      node = self.scan.number(grouped=self.brackets == 0)
    elif token in ("(", "[", "]"):
      node = self.bracketed(token)
    elif token == r"\{":
      node = self.braced()
    elif token == "{":
      node = self.group()
    elif token == "|":
      node = self.absolute()
    elif token[0] == "\\":
      node = self.command(token)
    elif token.isascii() and token.isalpha():
      node = self.letters()
    else:
      self.scan.fail("unexpected")
    self.scan.depth -= 1
    return node

  def absolute(self) -> Node:
    self.scan.need("|")
    self.bars += 1
    node = ("func", "abs", self.sum())
    self.bars -= 1
    self.scan.need("|")
    return node

  def bracketed(self, opening: str) -> Node:
    """A group in parentheses, a tuple, or an interval with any pair of brackets."""
    self.scan.need(opening)
    self.brackets += 1
    items = [self.relation()]
    while self.scan.take(",", ";"):
      items.append(self.relation())
      if len(items) > ITEM_LIMIT:
        self.scan.fail("too many items")
    closing = self.scan.take(")", "]", "[")
    if not closing:
      self.scan.fail("expected a closing bracket")
    self.brackets -= 1
    if len(items) == 1:
      if (opening, closing) not in (("(", ")"), ("[", "]")):
        self.scan.fail("brackets do not match")
      return items[0]
    if opening == "]":
      opening = "("
    if closing == "[":
      closing = ")"
    return ("tuple", opening, closing, tuple(items))

  def braced(self) -> Node:
    self.scan.need(r"\{")
    self.brackets += 1
    items: list[Node] = []
    while not self.scan.take(r"\}"):
      items.append(self.relation())
      if not self.scan.take(",", ";") and self.scan.peek() != r"\}":
        self.scan.fail("expected a comma or the end of the set")
      if len(items) > ITEM_LIMIT:
        self.scan.fail("too many items")
    self.brackets -= 1
    return ("set", tuple(items))

  def letters(self) -> Node:
    """A function name, a constant's name, or up to three letters that multiply."""
    word = self.scan.word()
    if word in FUNCTIONS:
      self.scan.at += len(word)
      return self.function(word)
    if word in ("pi", "infinity", "inf", "oo"):
      self.scan.at += len(word)
      return ("const", "pi" if word == "pi" else "inf")
    if word in GREEK and len(word) > 2:
      self.scan.at += len(word)
      return ("sym", word)
    if len(word) > 3:
      self.scan.fail("words")
    self.scan.at += 1
    return self.letter(word[0])

  def letter(self, name: str) -> Node:
    """One letter with its subscript and primes; e and i are the constants."""
    match = re.compile(r"_(?:\{([0-9A-Za-z, ]{1,12})\}|([0-9A-Za-z]))").match(
      self.scan.text, self.scan.at
    )
    if match:
      self.scan.at = match.end()
      name = f"{name}_{(match.group(1) or match.group(2)).replace(' ', '')}"
    while self.scan.text.startswith("'", self.scan.at):
      self.scan.at += 1
      name += "'"
    return ("const", name) if name in ("e", "i") else ("sym", name)

  def command(self, token: str) -> Node:
    name = token[1:]
    constant = {"pi": "pi", "infty": "inf"}.get(name)
    if self.scan.wrapped():
      return self.wrapped_atom()
    self.scan.at += len(token)
    if constant:
      return ("const", constant)
    if name == "frac":
      top = self.argument()
      return ("mul", top, ("inv", self.argument()))
    if name == "binom":
      return ("func", "binom", self.argument(), self.argument())
    if name == "emptyset":
      return ("set", ())
    if name == "reals":
      return ("reals",)
    if name in ("lfloor", "lceil"):
      node = self.sum()
      self.scan.need(r"\rfloor" if name == "lfloor" else r"\rceil")
      return ("func", name[1:], node)
    if name == "begin":
      return self.matrix()
    if name in FUNCTIONS:
      return self.function(name)
    if name in GREEK:
      return self.letter(name)
    self.scan.at -= len(token)
    self.scan.fail("unknown command")

  def wrapped_atom(self) -> Node:
    match = self.scan.wrapped()
    assert match is not None
    inside = match.group(1).strip()
    self.scan.at = match.end()
    if inside in FUNCTIONS:
      return self.function(inside)
    if re.fullmatch(r"[A-Za-z]", inside):
      return self.letter(inside)
    if NUMBER.fullmatch(inside):
      return ("num", Fraction(inside.rstrip(".")))
    self.scan.fail("words")

  def matrix(self) -> Node:
    kinds = {
      "pmatrix": "m",
      "bmatrix": "m",
      "matrix": "m",
      "array": "m",
      "smallmatrix": "m",
      "vmatrix": "det",
      "Bmatrix": "m",
    }
    match = re.compile(r"\{([A-Za-z]+)\}(?:\{[lcr|]*\})?").match(self.scan.text, self.scan.at)
    if match is None or match.group(1) not in kinds:
      self.scan.fail("unknown environment")
    self.scan.at = match.end()
    self.brackets += 1
    rows: list[tuple[Node, ...]] = []
    while not self.scan.text.startswith(r"\end", self.scan.at):
      row = [self.measured()]
      while self.scan.take("&"):
        row.append(self.measured())
      rows.append(tuple(row))
      if not self.scan.take("\\\\") and self.scan.peek() != r"\end":
        self.scan.fail("expected a row's end")
      self.scan.spaces()
      if len(rows) > ITEM_LIMIT or len(row) > ITEM_LIMIT:
        self.scan.fail("too many items")
    self.scan.need(r"\end")
    self.scan.spaces()
    end = "{" + match.group(1) + "}"
    if not self.scan.text.startswith(end, self.scan.at):
      self.scan.fail("environments do not match")
    self.scan.at += len(end)
    self.brackets -= 1
    return ("matrix", kinds[match.group(1)], tuple(rows))

  def function(self, name: str) -> Node:
    """The arguments of a named function; the power of sin^2 x goes outside."""
    if name == "sqrt":
      return self.root()
    power: Node | None = None
    base: tuple[Node, ...] = ()
    if name == "log" and self.scan.take("_"):
      base = (self.argument(),)
    if self.scan.take("^"):
      power = self.exponent()
    if self.scan.peek() == "(":
      argument = self.bracketed("(")
    elif self.scan.peek() == "{":
      argument = self.group()
    else:
      argument = self.power()
      while self.juxtaposed() and self.scan.peek()[1:] not in FUNCTIONS and self.scan.peek() != "(":
        argument = ("mul", argument, self.power())
    if power == ("neg", ("num", Fraction(1))) and f"arc{name}" in FUNCTIONS:
      return ("func", f"arc{name}", argument)
    node = ("func", name, argument, *base)
    return node if power is None else ("pow", node, power)

  def root(self) -> Node:
    r"""\sqrt[n]{a}, \sqrt a, \sqrt(a), sqrt(a)."""
    degree: Node = ("num", Fraction(2))
    if self.scan.take("["):
      degree = self.sum()
      self.scan.need("]")
    if self.scan.peek() == "(":
      inside = self.bracketed("(")
    elif re.compile(r"\s*[0-9]{2}").match(self.scan.text, self.scan.at):
      self.scan.fail("a root of several digits without braces")
    else:
      inside = self.argument()
    return ("pow", inside, ("inv", degree))
