"""Artifacts and the digests that name them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NewType

from onnx_ops.domain.row_axes import find_fixed_batch

Digest = NewType("Digest", str)
"""`sha256:` and 64 lower-case hexadecimal digits."""

MODEL_FILE = "model.onnx"
"""Name of the model in the folder of a version's files."""

CUSTOM_OPS = "custom_ops"
"""Folder of operator libraries among a version's files.

A library has the name `custom_ops/TARGET/DIGEST.so`.
"""

_PREFIX = "sha256:"
_BLOCK = 1 << 20


def digest_bytes(data: bytes) -> Digest:
    """Return the digest of bytes."""
    return Digest(_PREFIX + hashlib.sha256(data).hexdigest())


def digest_file(path: Path) -> Digest:
    """Return the digest of a file's content, read in blocks.

    Raises:
        OSError: the file cannot be read.
    """
    state = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            state.update(block)
    return Digest(_PREFIX + state.hexdigest())


def canonical_json(value: object) -> bytes:
    """Encode a value as JSON bytes with sorted keys and without white space.

    Raises:
        ValueError: the value contains NaN, an infinity, or a string that UTF-8 cannot encode.
        TypeError: the value contains an object that JSON cannot represent.
    """
    text = json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return text.encode("utf-8")


def digest_json(value: object) -> Digest:
    """Return the digest of the canonical JSON of a value."""
    return digest_bytes(canonical_json(value))


def is_digest(text: str) -> bool:
    """Return whether a string is a well-formed digest."""
    body = text.removeprefix(_PREFIX)
    return (
        text.startswith(_PREFIX) and len(body) == 64 and all(c in "0123456789abcdef" for c in body)
    )


def hex_digits(digest: Digest) -> str:
    """Return the 64 hexadecimal digits, for file names."""
    return digest.removeprefix(_PREFIX)


def short_digest(digest: Digest) -> str:
    """Return the first twelve hexadecimal digits, for display."""
    return hex_digits(digest)[:12]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredObject:
    """One object in a store.

    `digest` is the digest of the object's content, or of a model folder's manifest; None for a
    partial file that a killed writer left. `at` is the time of the last put, in seconds since the
    epoch by the storage's clock.
    """

    name: str
    digest: Digest | None
    size_bytes: int
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Digests of a set of files, by file name.

    The set is the result of a stage, the files of a model, or the content of a version.
    """

    files: Mapping[str, Digest]

    def digest(self) -> Digest:
        """Return the digest of all file names and their digests."""
        return digest_json(dict(self.files))

    def __getitem__(self, name: str) -> Digest:
        return self.files[name]

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self.files))

    def subset(self, prefix: str) -> Manifest:
        """Return the files below `prefix`, by names without the prefix."""
        return Manifest(
            files={n.removeprefix(prefix): d for n, d in self.files.items() if n.startswith(prefix)}
        )


def digest_folder(folder: Path) -> Manifest:
    """Return the digests of all files below a folder by their relative POSIX names."""
    files = {
        p.relative_to(folder).as_posix(): digest_file(p)
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }
    return Manifest(files=files)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One input or output of a model.

    A dimension is a number, or the name of a symbolic dimension (`?` if it has no name).
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Metadata of an ONNX file. `size_bytes` includes external data."""

    ir_version: int
    opsets: Mapping[str, int]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    nodes: int
    size_bytes: int

    @property
    def fixed_batch(self) -> int:
        """The number of rows that a request must have; 0 if any number is accepted."""
        return find_fixed_batch({spec.name: spec.shape for spec in self.inputs})
