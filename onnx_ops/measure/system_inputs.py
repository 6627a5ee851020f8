"""Raw inputs of a system: files of a folder, or the rows of a table."""

from __future__ import annotations

import csv
import json
import wave
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnx_ops.domain.artifact import Digest, digest_file, digest_json
from onnx_ops.errors import NotFoundError, UserError
from onnx_ops.statistics.step_values import Form

_TABLES = (".jsonl", ".csv", ".txt")
_LOSSY = (".jpg", ".jpeg", ".webp", ".avif", ".heic", ".mp3", ".ogg", ".opus", ".m4a", ".aac")
_TEXTS = (".txt", ".json", ".jsonl", ".csv", ".md", ".html", ".xml", ".npy", ".npz")
_SIGNATURES: Mapping[str, tuple[bytes, ...]] = {
    ".png": (b"\x89PNG\r\n\x1a\n",),
    ".jpg": (b"\xff\xd8\xff",),
    ".jpeg": (b"\xff\xd8\xff",),
    ".gif": (b"GIF8",),
    ".bmp": (b"BM",),
    ".webp": (b"RIFF",),
    ".wav": (b"RIFF", b"RIFX", b"RF64"),
}
"""First bytes of files by the end of their names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RawInput:
    """One raw input: its name in messages, what `predict` gets, and how it is decoded.

    `value` is the path of a file, the mapping of a CSV row, the JSON value of a line, or a line of
    text. `path` is the file, if the input is a file.
    """

    name: str
    value: Any
    form: Form
    path: Path | None = None


def list_raw_inputs(
    place: Path, limit: int, *, where: str = "--files"
) -> tuple[list[RawInput], int]:
    """Return up to `limit` raw inputs, spread evenly over all, and the number of all.

    `where` is the option or key that names the place, for errors.

    Raises:
        NotFoundError: there is no such folder or file.
        UserError: there are no inputs, or a file is empty, cut off, or of another format or
            encoding.
    """
    if not place.exists():
        raise NotFoundError("no such folder or file", where=f"{where} {place}")
    inputs = list(_list_files(place) if place.is_dir() else _read_rows(place, where))
    if not inputs:
        remedy = "Name a folder with raw inputs, or a .jsonl, .csv or .txt file with rows."
        raise UserError("there are no inputs", where=f"{where} {place}", remedy=remedy)
    count = min(limit, len(inputs))
    chosen = [inputs[index * len(inputs) // count] for index in range(count)]
    for raw in chosen:
        _check_file(raw)
    return chosen, len(inputs)


def digest_raw_inputs(place: Path, limit: int, *, where: str) -> Digest:
    """Return the digest of the raw inputs that `list_raw_inputs` returns.

    For a table, it is the digest of all rows, whatever the limit is.

    Raises:
        NotFoundError: there is no such folder or file.
        UserError: the inputs cannot be read.
    """
    inputs, total = list_raw_inputs(place, limit, where=where)
    if place.is_file():
        return digest_json([total, digest_file(place)])
    files = [raw.path for raw in inputs if raw.path is not None]
    named = [[path.relative_to(place).as_posix(), digest_file(path)] for path in files]
    return digest_json([total, named])


def _list_files(folder: Path) -> Iterator[RawInput]:
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        if path.is_file() and not any(part.startswith(".") for part in inside.parts):
            suffix = path.suffix.lower()
            form: Form = (
                "decoded" if suffix in _LOSSY else "same" if suffix in _TEXTS else "resampled"
            )
            yield RawInput(name=str(path), value=str(path), form=form, path=path)


def _read_rows(place: Path, where: str) -> Iterator[RawInput]:
    suffix = place.suffix.lower()
    if suffix not in _TABLES:
        remedy = f"Name a folder, or a file that ends in {', '.join(_TABLES)}."
        raise UserError(f"{place.name} is not a table of rows", where=where, remedy=remedy)
    try:
        text = place.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError("the file is not UTF-8", where=str(place), why=str(error)) from error
    if suffix == ".csv":
        reader = csv.DictReader(text.splitlines())
        for row in reader:
            yield RawInput(name=f"{place}:{reader.line_num}", value=dict(row), form="same")
        return
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            value: Any = line if suffix == ".txt" else _parse_line(place, number, line)
            yield RawInput(name=f"{place}:{number}", value=value, form="same")


def _parse_line(place: Path, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        where = f"{place}:{number}:{error.colno}"
        raise UserError("the line is not JSON", where=where, why=error.msg) from error


def _check_file(raw: RawInput) -> None:
    """Raise UserError if a file is empty, of another format, or a cut-off WAV file.

    The format is checked by the first bytes, for the names of `_SIGNATURES`.
    """
    if raw.path is None:
        return
    with raw.path.open("rb") as stream:
        first = stream.read(16)
    remedy = "Replace the file, or remove it from the folder."
    if not first:
        raise UserError("the file is empty", where=raw.name, remedy=remedy)
    suffix = raw.path.suffix.lower()
    signatures = _SIGNATURES.get(suffix)
    if signatures is not None and not first.startswith(signatures):
        raise UserError(f"the file is not a {suffix[1:]} file", where=raw.name, remedy=remedy)
    if suffix == ".wav" and first.startswith(b"RIFF"):
        _check_sound(raw.path, remedy)


_SOUND_HEADER_BYTES = 44
"""Least size of the headers of a WAV file: RIFF, the format, and the samples."""


def _check_sound(path: Path, remedy: str) -> None:
    """Raise UserError if a WAV file ends before its samples.

    Only codings that the module `wave` can read are checked.
    """
    try:
        with wave.open(str(path), "rb") as sound:
            expected = sound.getnframes() * sound.getnchannels() * sound.getsampwidth()
    except EOFError as error:
        raise UserError("the file is cut off", where=str(path), remedy=remedy) from error
    except wave.Error:
        return
    if path.stat().st_size < expected + _SOUND_HEADER_BYTES:
        raise UserError("the file is cut off", where=str(path), remedy=remedy)


def find_rate_change(inputs: list[RawInput]) -> str:
    """Return a note if WAV files have several sample rates; empty otherwise."""
    rates: dict[int, str] = {}
    for raw in inputs:
        if raw.path is not None and raw.path.suffix.lower() == ".wav":
            try:
                with wave.open(str(raw.path), "rb") as sound:
                    rates.setdefault(sound.getframerate(), raw.path.name)
            except (wave.Error, EOFError):
                continue
    if len(rates) < 2:
        return ""
    shown = ", ".join(f"{rate} Hz ({name})" for rate, name in sorted(rates.items()))
    return f"the files have several sample rates: {shown}"
