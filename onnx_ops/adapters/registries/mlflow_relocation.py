"""Artifact locations of a project that was moved, renamed or copied.

MLflow stores absolute locations in its database. Without their relocation, a moved project would
read and write evidence at the old location.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

from onnx_ops.errors import ServiceUnavailableError

_log = logging.getLogger(__name__)

TIMEOUT_S = 30.0
"""Seconds to wait for the lock of another process."""

_LOCATIONS = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
)
"""Tables and columns of MLflow that contain locations."""


def relocate_artifacts(database: Path, root: Path) -> tuple[str, ...]:
    """Move locations below former roots to the current root; return the former roots.

    A location of an experiment ends with the experiment's name. Its parent folder is a former root
    if the current root has a folder with this name. Only a database of MLflow that can be opened is
    changed.

    Raises:
        ServiceUnavailableError: the database cannot be changed, or another process has locked it.
    """
    if not database.is_file():
        return ()
    with closing(sqlite3.connect(database, timeout=TIMEOUT_S, isolation_level=None)) as connection:
        try:
            former = _list_former_roots(connection, root)
        except sqlite3.Error as error:
            if error.sqlite_errorcode == sqlite3.SQLITE_BUSY:
                raise _make_error(database, error) from error
            return ()
        if former:
            _change(connection, former, root, database)
    return former


def _make_error(database: Path, error: sqlite3.Error) -> ServiceUnavailableError:
    return ServiceUnavailableError(
        "the database cannot be changed, so it can have the artifact locations from before the "
        "project was moved",
        where=str(database),
        why=str(error),
        remedy="Stop other processes that use the database, make the database and its folder "
        "writable, and try again.",
    )


def _change(
    connection: sqlite3.Connection, former: Iterable[str], root: Path, database: Path
) -> None:
    try:
        connection.execute("BEGIN IMMEDIATE")
        for old in former:
            for table, column in _LOCATIONS:
                connection.execute(
                    f"UPDATE {table} SET {column} = ? || substr({column}, ?) "  # noqa: S608 (names from above)
                    f"WHERE substr({column}, 1, ?) = ?",
                    (str(root), len(old) + 1, len(old) + 1, f"{old}/"),
                )
        connection.execute("COMMIT")
    except sqlite3.Error as error:
        raise _make_error(database, error) from error
    _log.info(
        "the artifact locations are now below %s; before, they were below %s",
        root,
        ", ".join(former),
    )


def _list_former_roots(connection: sqlite3.Connection, root: Path) -> tuple[str, ...]:
    """Return the former roots of experiments whose folders are below the current root."""
    tables = connection.execute(
        "SELECT count(*) FROM sqlite_master WHERE name = 'experiments'"
    ).fetchone()
    if not tables[0]:
        return ()
    former = set()
    for name, location in connection.execute("SELECT name, artifact_location FROM experiments"):
        folder = f"/{quote(str(name))}"
        old = str(location).removesuffix(folder)
        if (
            old not in (str(location), str(root))
            and old.startswith("/")
            and (root / folder[1:]).is_dir()
        ):
            former.add(old)
    return tuple(sorted(former))
