"""safetensors in and out: model.safetensors, or several files with an index. Imports no jax.

Reading opens every file and takes nothing out of it; a part of a tensor is read when it is
asked for. Writing takes one tensor at a time, so memory holds one.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # its import tells NumPy of bfloat16, which safetensors needs
import numpy as np
from safetensors import SafetensorError, safe_open

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
FILE_BYTES = 5_000_000_000  # of tensors in one file, unless a single one is larger

# dtype by our name -> (NumPy dtype, safetensors name)
DTYPES: dict[str, tuple[Any, str]] = {
  "float32": (np.float32, "F32"),
  "bfloat16": (ml_dtypes.bfloat16, "BF16"),
  "float16": (np.float16, "F16"),
}
FLOATS = ("F64", "F32", "F16", "BF16")  # what is read

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Tensor:
  """One tensor of a checkpoint, still on disk."""

  file: str
  shape: Shape
  dtype: str  # safetensors' name
  view: Any  # view[a:b, c:d] reads that part, and no other, as a NumPy array


def open_tensors(directory: Path) -> tuple[dict[str, Tensor], list[str]]:
  """All tensors of a checkpoint by name, and where index and files disagree, a line each.

  Raises:
    FileNotFoundError: neither model.safetensors nor an index.
    ValueError: an index or files that are damaged, or files that the index names and that are
      not there; lists them all.
  """
  placed = _read_index(directory)
  tensors, misfits, broken = {}, [], []
  for file in sorted(set(placed.values())) if placed is not None else [WEIGHTS]:
    try:
      handle = safe_open(directory / file, framework="numpy")
    except FileNotFoundError:
      broken.append(f"{directory / file} is missing: {INDEX} names it")
      continue
    except SafetensorError as error:
      broken.append(f"{directory / file} is damaged: {error}")
      continue
    for name in handle.keys():  # noqa: SIM118 (a handle cannot be iterated over)
      if placed is not None and placed.get(name) != file:
        misfits.append(f"{name} is in {file}, where {INDEX} does not place it")
        continue
      view = handle.get_slice(name)
      tensors[name] = Tensor(file, tuple(view.get_shape()), view.get_dtype(), view)
  if broken:
    raise ValueError("\n".join(broken))
  misfits += [
    f"{name} is not in {file}, where {INDEX} places it"
    for name, file in (placed or {}).items()
    if name not in tensors
  ]
  return tensors, misfits


def _read_index(directory: Path) -> dict[str, str] | None:
  """Tensor name -> file, by the index; None where there is one file and no index."""
  path = directory / INDEX
  if path.exists():
    try:
      placed = json.loads(path.read_text())["weight_map"]
      return {str(name): str(file) for name, file in placed.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
      raise ValueError(f"{path} is damaged: no weight_map of names and files ({error})") from error
  if (directory / WEIGHTS).exists():
    return None
  raise FileNotFoundError(f"{directory} has no {WEIGHTS} and no {INDEX}")


def write_tensors(
  directory: Path,
  shapes: Mapping[str, Shape],
  arrays: Iterable[np.ndarray],
  dtype: str = "float32",
  file_bytes: int = FILE_BYTES,
) -> list[str]:
  """Writes a checkpoint's tensors, one file or several with an index, in place of any there.

  Args:
    directory: must exist.
    shapes: tensor name -> shape, in the order of `arrays`.
    arrays: the tensors; consumed one by one and cast to `dtype`.
    dtype: a key of DTYPES.
    file_bytes: a file ends before the tensor that would take it over this.

  Returns:
    Names of the files, without the index.

  Raises:
    ValueError: an array of another shape than announced.
  """
  for old in [WEIGHTS, INDEX, *(p.name for p in directory.glob("model-*-of-*.safetensors"))]:
    (directory / old).unlink(missing_ok=True)
  size = {name: int(np.prod(s)) * np.dtype(DTYPES[dtype][0]).itemsize for name, s in shapes.items()}
  groups = _groups(size, file_bytes)
  files = [WEIGHTS]
  if len(groups) > 1:
    files = [f"model-{i + 1:05}-of-{len(groups):05}.safetensors" for i in range(len(groups))]
  left = iter(arrays)
  for file, names in zip(files, groups, strict=True):
    _write_file(directory / file, {name: shapes[name] for name in names}, left, dtype)
  if len(groups) > 1:
    index = {
      "metadata": {"total_size": sum(size.values())},
      "weight_map": {n: file for file, names in zip(files, groups, strict=True) for n in names},
    }
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")
  return files


def _groups(size: Mapping[str, int], limit: int) -> list[list[str]]:
  """Names in their order, cut where the next would take the sum over the limit."""
  groups: list[list[str]] = [[]]
  held = 0
  for name, n in size.items():
    if groups[-1] and held + n > limit:
      groups.append([])
      held = 0
    groups[-1].append(name)
    held += n
  return groups


def _write_file(
  path: Path, shapes: Mapping[str, Shape], arrays: Iterator[np.ndarray], dtype: str
) -> None:
  """One file, written beside its place and renamed, so that it is whole or absent."""
  numpy_dtype, name = DTYPES[dtype]
  header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # what transformers expects
  end = 0
  for key, shape in shapes.items():
    begin, end = end, end + int(np.prod(shape)) * np.dtype(numpy_dtype).itemsize
    header[key] = {"dtype": name, "shape": list(shape), "data_offsets": [begin, end]}
  text = json.dumps(header).encode()
  text += b" " * (-len(text) % 8)  # the data begins 8-byte aligned
  partial = path.with_name(path.name + ".partial")
  with partial.open("wb") as file:
    file.write(len(text).to_bytes(8, "little") + text)
    for key, shape in shapes.items():
      array = next(arrays)
      if array.shape != shape:
        raise ValueError(f"{key}: shape {array.shape}, expected {shape}")
      file.write(np.ascontiguousarray(array, dtype=numpy_dtype).view(np.uint8).data)
  os.replace(partial, path)
