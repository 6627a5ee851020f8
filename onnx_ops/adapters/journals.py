"""A journal in one file: a line for each document, behind its digest."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from onnx_ops.adapters.objects import fsync_folder


class FileJournal:
    """Fulfils `ports.Journal`. One writer at a time; nothing is written before the first `append`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> tuple[Any, ...]:
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return ()
        found: list[Any] = []
        sound = 0
        for line in data.splitlines(keepends=True):
            digest, _, text = line.rstrip(b"\n").partition(b" ")
            if not line.endswith(b"\n") or _digest(text) != digest:
                break
            found.append(json.loads(text))
            sound += len(line)
        if sound < len(data):
            with self._path.open("r+b") as stream:
                stream.truncate(sound)
                os.fsync(stream.fileno())
        return tuple(found)

    def append(self, document: Any) -> None:
        text = json.dumps(document, sort_keys=True).encode("utf-8")
        fresh = not self._path.exists()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as stream:
            stream.write(_digest(text) + b" " + text + b"\n")
            stream.flush()
            os.fsync(stream.fileno())
        if fresh:
            fsync_folder(self._path.parent)

    def clear(self) -> None:
        self._path.unlink(missing_ok=True)


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest().encode("ascii")
