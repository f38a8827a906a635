"""Decides which file each tensor of a checkpoint is read from, and computes a checkpoint's fingerprint.

``load_spec`` and the loader call ``weight_files``, which reads only the headers of files.
``model.safetensors.index.json``, if there is one, decides for the names in it; tensors of these names in
other files are ignored (old weights beside new ones, a backup, the shards of another split). Any other name,
such as those of an MTP layer in a file of its own, may be in one file only. ``load_spec`` also calls
``fingerprint_of``. Both functions raise CheckpointError.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from hisparse_pd.base.vocabulary import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SUFFIX = ".safetensors"
MAX_JSON_BYTES = 100_000_000
"""Most bytes of an index or a file's header; the format has this limit for headers."""
_LENGTH_BYTES = 8
"""Bytes of a header's length, with which a file begins."""
_NUM_SAMPLES = 64
SAMPLE_BYTES = 64 << 10
"""Number and size of the pieces of a file that its fingerprint covers."""


@dataclass(frozen=True)
class TensorPlace:
    """The form and place of a tensor in its file. ``dtype_name``: safetensors' name of the dtype."""

    dtype_name: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class WeightFile:
    """A file and the tensors, by name, that are read from it."""

    path: Path
    tensors: dict[str, TensorPlace]


def weight_files(path: Path) -> list[WeightFile]:
    """Return the files of the checkpoint in directory ``path`` from which tensors are read."""
    files = sorted(file for file in path.glob(f"*{SUFFIX}") if file.is_file())
    if not files:
        raise CheckpointError(
            f"--model-path {path}: there is no *{SUFFIX} file in it; a link whose target is gone is none"
        )
    headers = {file.name: _read_header(file) for file in files}
    indexed = _read_index(path)
    _check_index(path, indexed, headers)
    file_of = dict(indexed)
    for file_name, header in headers.items():
        for name in header:
            if file_of.setdefault(name, file_name) != file_name and name not in indexed:
                raise CheckpointError(_stored_twice(path, name, file_of[name], file_name))
    chosen = [
        WeightFile(file, {name: place for name, place in header.items() if file_of[name] == file.name})
        for file, header in zip(files, headers.values(), strict=True)
    ]
    return [file for file in chosen if file.tensors]


def fingerprint_of(config: dict[str, Any], files: list[WeightFile]) -> str:
    """Return a hash of ``config`` and of the tensors that are read: names, dtypes, shapes and bytes.

    In a file of more than 4 MiB only evenly spaced samples are hashed: a real checkpoint has hundreds of
    gigabytes.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    for file in files:
        forms = {name: (place.dtype_name, place.shape) for name, place in file.tensors.items()}
        digest.update(json.dumps([file.path.name, forms], sort_keys=True).encode())
        try:
            with file.path.open("rb") as stream:
                for sample in _samples(stream, list(file.tensors.values())):
                    digest.update(sample)
        except OSError as error:
            raise CheckpointError(f"{file.path}: the file cannot be read: {error}") from error
    return digest.hexdigest()


def _samples(stream: BinaryIO, places: list[TensorPlace]) -> Iterator[bytes]:
    """Yield ``_NUM_SAMPLES`` evenly spaced pieces of the tensors' bytes, the first and the last among them.

    Pieces are spaced as if the tensors were adjacent; one that crosses tensors' ends is yielded in several.
    """
    places.sort(key=lambda place: place.offset)
    rest = max(0, sum(place.num_bytes for place in places) - SAMPLE_BYTES)
    starts = sorted({rest * number // (_NUM_SAMPLES - 1) for number in range(_NUM_SAMPLES)})
    before = 0  # bytes of the tensors before this one
    for place in places:
        # Pieces that reach into this tensor: they end behind its first byte and begin before its end.
        first = bisect_right(starts, before - SAMPLE_BYTES)
        for start in starts[first : bisect_left(starts, before + place.num_bytes)]:
            begin, end = max(start - before, 0), min(start + SAMPLE_BYTES - before, place.num_bytes)
            stream.seek(place.offset + begin)
            yield stream.read(end - begin)
        before += place.num_bytes


def _read_index(path: Path) -> dict[str, str]:
    """Return the file of each tensor by the index; empty without an index."""
    index_file = path / INDEX_NAME
    if not index_file.exists() and not index_file.is_symlink():
        return {}
    try:
        num_bytes = index_file.stat().st_size
        if num_bytes > MAX_JSON_BYTES:
            raise CheckpointError(
                f"{index_file}: the index has {num_bytes} bytes; {MAX_JSON_BYTES} are the most"
            )
        index = json.loads(index_file.read_bytes(), object_pairs_hook=_once_each)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{index_file}: the index cannot be read: {error}") from error
    file_of = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(file_of, dict):
        raise CheckpointError(f"{index_file}: expected an object with a weight_map of tensor names to files")
    for name, file_name in file_of.items():
        if not isinstance(file_name, str) or not _is_plain(file_name):
            raise CheckpointError(
                f"{index_file}: weight_map has {file_name!r:.200} for {name!r:.200}; expected the name of a "
                f"*{SUFFIX} file in the same directory"
            )
    return file_of


def _is_plain(file_name: str) -> bool:
    """Whether a name is that of a file of weights in the checkpoint's own directory."""
    return file_name.endswith(SUFFIX) and not set(file_name) & set("/\\\0")


def _check_index(path: Path, file_of: dict[str, str], headers: dict[str, dict[str, TensorPlace]]) -> None:
    """Raise CheckpointError unless each tensor of the index is in the file that the index names."""
    for name, file_name in file_of.items():
        if file_name not in headers:
            num_missing = len(set(file_of.values()) - headers.keys())
            raise CheckpointError(
                f"--model-path {path}: {num_missing} weight files of {INDEX_NAME} are missing, first "
                f"{file_name!r:.200}, which has {name!r:.200}; copy the whole checkpoint"
            )
        if name not in headers[file_name]:
            raise CheckpointError(
                f"{path / file_name}: there is no {name!r:.200} in it, where {INDEX_NAME} says that it is; "
                "the index and the file are of different checkpoints: copy the whole of one"
            )


def _stored_twice(path: Path, name: str, one: str, other: str) -> str:
    return (
        f"--model-path {path}: the tensor {name!r:.200} is in {one} and in {other}, and no {INDEX_NAME} says "
        "which counts; move the file that is not this model's out of the directory"
    )


def _read_header(file: Path) -> dict[str, TensorPlace]:
    """Return the form and place of each tensor of a safetensors file."""
    try:
        num_bytes = file.stat().st_size
        with file.open("rb") as stream:
            header_bytes = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            if header_bytes > min(MAX_JSON_BYTES, num_bytes - _LENGTH_BYTES):
                raise ValueError(f"a header of {header_bytes} bytes in a file of {num_bytes}; truncated?")
            header = json.loads(stream.read(header_bytes), object_pairs_hook=_once_each)
        if not isinstance(header, dict):
            raise ValueError(f"its header is no object but {type(header).__name__}")
        header.pop("__metadata__", None)
        return {name: _place(entry, _LENGTH_BYTES + header_bytes) for name, entry in header.items()}
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{file}: the file cannot be read: {error}") from error


def _place(entry: Any, data_offset: int) -> TensorPlace:
    """Convert an entry of a header. Raises ValueError, TypeError or KeyError if it is malformed."""
    (begin, end), shape, dtype_name = entry["data_offsets"], entry["shape"], entry["dtype"]
    if not isinstance(dtype_name, str) or any(type(number) is not int for number in (begin, end, *shape)):
        raise ValueError(f"its header has {entry!r:.200} for a tensor")
    if not 0 <= begin <= end:
        raise ValueError(f"its header has data_offsets {[begin, end]}")
    return TensorPlace(dtype_name, tuple(shape), data_offset + begin, end - begin)


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Convert a JSON object. Raises ValueError for a key that comes twice: JSON does not say which one
    counts."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in found if keys.count(key) > 1)
        raise ValueError(f"{twice!r:.200} is in one object twice")
    return found
