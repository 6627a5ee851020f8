"""The durable home of the published table."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

from onnx_ops.errors import CorruptStateError
from onnx_ops.protocol.table import Table, decode, encode

_log = logging.getLogger(__name__)

CURRENT = "table.json"
PREVIOUS = "table.previous.json"


def write_durably(path: Path, data: bytes) -> None:
    """Replace the file so that a reader, or a machine that lost power, sees the old content or the new.

    Raises:
        OSError: it could not be written; the old content stands.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".tmp-")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class TableFile:
    """Two files in a folder: the table that was published last, and the one before it."""

    def __init__(self, folder: Path) -> None:
        self._current = folder / CURRENT
        self._previous = folder / PREVIOUS

    def read(self) -> Table | None:
        """The last good table; None if there is none. What is torn or foreign is logged and left where it is."""
        for path in (self._current, self._previous):
            try:
                table = self._load(path)
            except CorruptStateError as error:
                _log.warning("table refused: %s", error)
                continue
            if table is not None:
                return table
        return None

    def write(self, table: Table) -> None:
        """Publish a table; on return it survives a power cut.

        Raises:
            OSError: it could not be written; `read` gives the table of before.
        """
        self._keep_current()
        write_durably(self._current, encode(table))

    def _keep_current(self) -> None:
        try:
            good = self._load(self._current)
        except CorruptStateError:
            return
        if good is not None:
            write_durably(self._previous, encode(good))

    @staticmethod
    def _load(path: Path) -> Table | None:
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        return decode(data, where=str(path))
