"""Text to ids and back: Hugging Face tokenizers, chat templates, and one id a character.

Control tokens (beginning, end of turn, …) come from the chat template only. Their spelling
inside a user's text, a data set's text or a system prompt is encoded as the characters it is.
Control tokens are the added tokens that tokenizer.json marks special; others, such as Qwen3's
<think>, are text that happens to have an id.
"""

from __future__ import annotations

import difflib
import functools
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.sandbox
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

Message = Mapping[str, Any]
Prompt = str | Sequence[Message]

# Names that every chat template may use; anything else comes from `template_args`.
TEMPLATE_NAMES = frozenset(
  "messages add_generation_prompt tools documents bos_token eos_token pad_token unk_token "
  "raise_exception strftime_now range dict namespace lipsum cycler joiner".split()
)
SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")
PRIVATE_USE = range(0xE000, 0xF900)  # code points that stand in for control strings
ROLES = ("system", "developer", "user", "assistant", "tool")
# What a Hugging Face directory may hold of a tokenizer; `Tokenizer.save` copies what was there.
FILES = (
  "tokenizer.json tokenizer_config.json generation_config.json special_tokens_map.json "
  "added_tokens.json chat_template.jinja vocab.json merges.txt tokenizer.model"
).split()
# In tokenizer_config.json: a character without an id is an error, not the unknown token.
STRICT = "refuse_unknown"


class Tokenizer:
  """One model's text encoding; immutable, and safe to use from several threads.

  Attributes:
    vocab_size: largest id + 1.
    stop_ids: ids that end a completion: the tokenizer's own eos first (the one to train on in
      supervised learning), then those of generation_config.json and of config.json.
    pad_id: fills the tail of a row; masks come from lengths, so it may equal a stop id.
    bos_id: the beginning-of-sequence id, None where there is none.
    chat_template: Jinja source, None for a tokenizer without one.
  """

  def __init__(
    self, files: Mapping[str, bytes], model: Mapping[str, Any], where: str = "tokenizer"
  ):
    """Use `load` or `characters`.

    Args:
      files: name -> content of those of FILES that there are.
      model: config.json, for its token ids; it may lack them.
      where: the directory, for error messages.

    Raises:
      ValueError: a malformed file, no stop token, or a special token that is not in the
        vocabulary.
    """
    self._files, self._where = dict(files), where
    self._settings = _json_object(files, "tokenizer_config.json", where)
    self._generation = _json_object(files, "generation_config.json", where)
    self.chat_template = _chat_template(files, self._settings, where)
    self._tokens = {name: _token_text(self._settings.get(name)) for name in SPECIAL_NAMES}
    # Two of them, since one that is switched back and forth could not serve several threads.
    self._backend = backend = _backend(files["tokenizer.json"], where)
    self._literal = _backend(files["tokenizer.json"], where)
    self._literal.encode_special_tokens = True
    added = backend.get_added_tokens_decoder()
    # Longest first: where one spelling begins with another, the longer one is the token.
    control = {token.content for token in added.values() if token.special and token.content}
    self._control = re.compile(
      "|".join(re.escape(text) for text in sorted(control, key=len, reverse=True)) or r"(?!)"
    )
    self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
    candidates = lambda name: [  # noqa: E731
      *self._id(name),
      *_ids(self._generation, f"{name}_id"),
      *_ids(model, f"{name}_id"),
    ]
    self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys(candidates("eos_token")))
    if not self.stop_ids:
      raise ValueError(
        f"{where}: no stop token; set eos_token in tokenizer_config.json or eos_token_id in "
        "generation_config.json"
      )
    self.pad_id: int = [*candidates("pad_token"), *self.stop_ids][0]
    self.bos_id: int | None = next(iter(candidates("bos_token")), None)
    self._adds_bos = self._says_add_bos()
    self._refused = set(self._id("unk_token")) if self._settings.get(STRICT) else set()

  def _says_add_bos(self) -> bool:
    """add_bos_token where tokenizer_config.json has it, else what tokenizer.json itself adds."""
    says = self._settings.get("add_bos_token")
    if says and self.bos_id is None:
      raise ValueError(
        f"{self._where}: tokenizer_config.json has add_bos_token but no bos_token; give it one"
      )
    return self.bos_id in self._backend.encode("").ids[:1] if says is None else bool(says)

  def _id(self, name: str) -> list[int]:
    """The id of a special token of tokenizer_config.json; empty where it has none."""
    text = self._tokens[name]
    if text is None:
      return []
    token_id = self._backend.token_to_id(text)
    if token_id is None:
      raise ValueError(f"{self._where}: {name} {text!r} is not in the vocabulary")
    return [token_id]

  @functools.cached_property
  def _template(self) -> tuple[jinja2.Template, set[str]]:
    """The compiled chat template, and the names it reads from outside."""
    assert self.chat_template is not None
    environment = _environment()
    # transformers' {% generation %} only marks what the assistant wrote.
    source = re.sub(r"(\{%[-+]?\s*)generation(\s*[-+]?%\})", r"\1if true\2", self.chat_template)
    source = re.sub(r"(\{%[-+]?\s*)endgeneration(\s*[-+]?%\})", r"\1endif\2", source)
    try:
      names = jinja2.meta.find_undeclared_variables(environment.parse(source))
      return environment.from_string(source), names - TEMPLATE_NAMES
    except jinja2.TemplateSyntaxError as error:
      raise ValueError(f"{self._where}: chat template, line {error.lineno}: {error}") from error

  def encode(self, text: str) -> list[int]:
    """Ids of plain text; control-token spellings in it stay text, and no BOS is added.

    Raises:
      ValueError: a character that the alphabet of `characters` lacks.
    """
    return self._ids_of(self._literal, text)

  def _ids_of(self, backend: tokenizers.Tokenizer, text: str) -> list[int]:
    encoding = backend.encode(text, add_special_tokens=False)
    unknown = next((i for i, token in enumerate(encoding.ids) if token in self._refused), None)
    if unknown is not None:
      begin, end = encoding.offsets[unknown]
      raise ValueError(
        f"{self._where}: no id for the character {text[begin:end]!r}, at position {begin} of "
        f"{text!r:.80}"
      )
    return encoding.ids

  def decode(self, ids: Sequence[int]) -> str:
    """Text of ids, special ones left out."""
    return self._backend.decode(list(ids), skip_special_tokens=True)

  def encode_prompt(
    self,
    prompt: Prompt,
    *,
    system_prompt: str | None = None,
    raw: bool = False,
    template_args: Mapping[str, Any] | None = None,
  ) -> list[int]:
    """Ids of a prompt, up to where the completion starts.

    Where the tokenizer adds a BOS there is exactly one, whether or not the template writes
    it; a tokenizer that adds none gets what the template writes.

    Args:
      prompt: text, or chat messages {"role", "content"}. Text is one user message where the
        tokenizer has a chat template and `raw` is False, else it is taken as it is.
      system_prompt: a system message put first unless `prompt` brings its own; "" is an
        empty one; None leaves it to the template, which may have a default.
      raw: no template (base models).
      template_args: further names for the template, such as enable_thinking.

    Raises:
      ValueError: messages without a template, malformed messages, an argument that the
        template does not read, a template that fails, or as `encode`.
    """
    pieces = self._pieces(prompt, system_prompt, raw, template_args)
    ids: list[int] = []
    for text, is_control in pieces:
      ids += self._ids_of(self._backend if is_control else self._literal, text)
    if self._adds_bos and self.bos_id is not None:
      start = next((i for i, token in enumerate(ids) if token != self.bos_id), len(ids))
      ids = [self.bos_id, *ids[start:]]
    return ids

  def render(
    self,
    prompt: Prompt,
    *,
    system_prompt: str | None = None,
    raw: bool = False,
    template_args: Mapping[str, Any] | None = None,
  ) -> str:
    """The text that `encode_prompt` encodes (same arguments), for people to read."""
    return "".join(text for text, _ in self._pieces(prompt, system_prompt, raw, template_args))

  def _pieces(
    self,
    prompt: Prompt,
    system_prompt: str | None,
    raw: bool,
    template_args: Mapping[str, Any] | None,
  ) -> list[tuple[str, bool]]:
    """The prompt as (text, whether control-token spellings in it are control tokens)."""
    args = dict(template_args or {})
    if raw or (self.chat_template is None and isinstance(prompt, str)):
      if not isinstance(prompt, str):
        raise ValueError("raw_prompt wants prompts that are text, got chat messages")
      if system_prompt is not None or args:
        raise ValueError(
          "system_prompt and template_args need a chat template: "
          + ("raw_prompt is set" if raw else f"{self._where} has none")
        )
      return [(prompt, False)]
    if self.chat_template is None:
      raise ValueError(
        f"{self._where}: no chat template (chat_template in tokenizer_config.json, or "
        "chat_template.jinja), but the prompt is chat messages; use text prompts or add one"
      )
    messages = _messages(prompt, system_prompt)
    stand_ins = self._stand_ins(messages)
    clean = [{**m, "content": _replace(m["content"], stand_ins)} for m in messages]
    rendered = self._render(clean, args)
    back = {char: text for text, char in stand_ins.items()}
    if not back:
      return [(rendered, True)]
    parts = re.split(f"([{''.join(back)}])", rendered)
    return [(back.get(part, part), part not in back) for part in parts if part]

  def _stand_ins(self, messages: Sequence[Message]) -> dict[str, str]:
    """Control-token spellings inside the contents -> private-use characters that they lack.

    They hide a spelling from the tokenizer while the template sees the rest of the content
    as it is, so that what a template does to contents (strip, split) still works.
    """
    contents = "".join(m["content"] for m in messages)
    found = sorted(set(self._control.findall(contents)))
    used = set(contents) | set(self.chat_template or "")
    free = [chr(point) for point in PRIVATE_USE if chr(point) not in used] if found else []
    if len(free) < len(found):
      raise ValueError("prompt: holds control-token spellings and too many private-use characters")
    return dict(zip(found, free, strict=False))

  def _render(self, messages: Sequence[Message], args: Mapping[str, Any]) -> str:
    template, names = self._template
    for name in args:
      if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it reads {sorted(names) or 'none'}"
        raise ValueError(f"template_args: the chat template does not read {name!r}; {hint}")
    special = {name: text for name, text in self._tokens.items() if text is not None}
    try:
      return template.render(
        messages=messages, add_generation_prompt=True, tools=None, documents=None, **special, **args
      )
    except (jinja2.TemplateError, TypeError) as error:
      raise ValueError(f"{self._where}: the chat template failed: {error}") from error

  def save(self, path: str | os.PathLike[str]) -> None:
    """Writes the tokenizer files that there were, as they were, into a directory made if need be.

    Only generation_config.json is written anew, with all stop ids, the padding id and the BOS
    in it: `load` gives the same tokenizer back without the model's config.json.
    """
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    stops = list(self.stop_ids)
    generation = {
      **self._generation,
      "eos_token_id": stops[0] if len(stops) == 1 else stops,
      "pad_token_id": self.pad_id,
      **({} if self.bos_id is None else {"bos_token_id": self.bos_id}),
    }
    for name, content in (
      self._files | {"generation_config.json": _json_bytes(generation)}
    ).items():
      (directory / name).write_bytes(content)


def _token_text(token: Any) -> str | None:
  """A special token's text; older files hold {"content": …}."""
  return token["content"] if isinstance(token, Mapping) else token


def _ids(config: Mapping[str, Any], name: str) -> list[int]:
  """A field that holds an id, a list of ids, or nothing."""
  value = config.get(name)
  values = value if isinstance(value, list) else [value]
  return [v for v in values if isinstance(v, int) and v >= 0]


def _messages(prompt: Prompt, system_prompt: str | None) -> list[dict[str, str]]:
  """Checked chat messages, the system prompt first where there is one to add."""
  if isinstance(prompt, str):
    prompt = [{"role": "user", "content": prompt}]
  fault = message_fault(prompt)
  if fault:
    raise ValueError(f"prompt: {fault}")
  messages = [{"role": m["role"], "content": m["content"]} for m in prompt]
  if system_prompt is not None and messages[0]["role"] != "system":
    messages.insert(0, {"role": "system", "content": system_prompt})
  return messages


def message_fault(messages: Any) -> str:
  """Why these are not chat messages that can be rendered, or "" when they are."""
  if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
    return f"expected a list of chat messages, got {messages!r:.80}"
  for i, message in enumerate(messages):
    if not isinstance(message, Mapping):
      return f"message {i} is not an object with role and content: {message!r:.80}"
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:  # a template would write it out, whatever it is
      return f"message {i}: role {role!r:.80} is not one of {', '.join(ROLES)}"
    if not isinstance(content, str):
      return f"message {i}: content is not text: {content!r:.80}"
    extra = [k for k, v in message.items() if k not in ("role", "content") and v is not None]
    if extra:
      return f"message {i}: fields {extra} are not supported, only role and content"
  return ""


def _replace(text: str, table: Mapping[str, str]) -> str:
  """Replaces each key by its value in one pass, the longest key first."""
  if not table:
    return text
  keys = sorted(table, key=len, reverse=True)
  return re.sub("|".join(map(re.escape, keys)), lambda match: table[match[0]], text)


def _environment() -> jinja2.Environment:
  """The sandbox that chat templates are written for, as transformers sets it up."""

  def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)

  def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)

  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
  )
  environment.filters["tojson"] = tojson
  strftime_now: Callable[[str], str] = lambda form: datetime.now().strftime(form)  # noqa: E731
  environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
  return environment


def _json_object(files: Mapping[str, bytes], name: str, where: str) -> dict[str, Any]:
  """A file that holds a JSON object, {} where it is absent."""
  try:
    value = json.loads(files.get(name, b"{}"))
  except ValueError as error:
    raise ValueError(f"{where}/{name}: not JSON: {error}") from error
  if not isinstance(value, dict):
    raise ValueError(f"{where}/{name}: expected a JSON object")
  return value


def _json_bytes(value: Mapping[str, Any]) -> bytes:
  return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _backend(content: bytes, where: str) -> tokenizers.Tokenizer:
  """tokenizer.json, without the truncation and padding that may be stored in it."""
  try:
    backend = tokenizers.Tokenizer.from_str(content.decode())
  except Exception as error:  # the library raises bare Exception
    raise ValueError(f"{where}/tokenizer.json: not a tokenizer: {error}") from error
  backend.no_truncation()
  backend.no_padding()
  return backend


def _chat_template(
  files: Mapping[str, bytes], settings: Mapping[str, Any], where: str
) -> str | None:
  """chat_template.jinja, else the (default) template of tokenizer_config.json."""
  if "chat_template.jinja" in files:
    return files["chat_template.jinja"].decode()
  template = settings.get("chat_template")
  if isinstance(template, list):  # [{"name", "template"}, …]
    by_name = {entry["name"]: entry["template"] for entry in template}
    if "default" not in by_name:
      raise ValueError(
        f"{where}/tokenizer_config.json: chat templates {sorted(by_name)} and no 'default'"
      )
    template = by_name["default"]
  return template


def load(path: str | os.PathLike[str]) -> Tokenizer:
  """The tokenizer of a Hugging Face directory.

  Reads tokenizer.json; where they are there tokenizer_config.json, generation_config.json,
  config.json (stop and padding ids) and chat_template.jinja.

  Raises:
    ValueError: a file is missing or malformed; names it and says what to do.
  """
  directory = Path(path).expanduser()
  files = {name: (directory / name).read_bytes() for name in FILES if (directory / name).is_file()}
  if "tokenizer.json" not in files:
    hint = "has no tokenizer.json" if directory.is_dir() else "is not a directory"
    if "tokenizer.model" in files:
      hint += " (tokenizer.model alone is not supported: save the fast tokenizer beside it)"
    raise ValueError(f"{directory} {hint}; python -m fadejax.convert makes a model directory")
  config = directory / "config.json"
  model = {"config.json": config.read_bytes()} if config.is_file() else {}
  return Tokenizer(files, _json_object(model, "config.json", str(directory)), str(directory))


def characters(alphabet: str) -> Tokenizer:
  """One id a character: 0 pad, 1 end, 2 unknown, then `alphabet` in its order.

  An ordinary tokenizer.json, so that it saves, loads and exports like any other. To encode a
  character that the alphabet lacks is an error, here and after `load`; no text becomes the
  unknown id.

  Raises:
    ValueError: an empty alphabet, or a character twice.
  """
  if not alphabet or len(set(alphabet)) != len(alphabet):
    raise ValueError(f"alphabet {alphabet!r}: wants at least one character, none of them twice")
  special = ["<pad>", "<eos>", "<unk>"]
  vocabulary = {token: i for i, token in enumerate([*special, *alphabet])}
  backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
  backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
  backend.decoder = decoders.Fuse()
  backend.add_special_tokens([tokenizers.AddedToken(t, special=True) for t in special])
  settings = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "clean_up_tokenization_spaces": False,
    STRICT: True,
    **dict(zip(("pad_token", "eos_token", "unk_token"), special, strict=True)),
  }
  files = {
    "tokenizer.json": backend.to_str(pretty=True).encode(),
    "tokenizer_config.json": _json_bytes(settings),
  }
  return Tokenizer(files, {}, where=f"character tokenizer of {alphabet!r:.80}")
