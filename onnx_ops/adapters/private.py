"""Secrets in files that only their owner may read."""

from __future__ import annotations

import os
from pathlib import Path

from onnx_ops.errors import RefusedError


def read_private(path: Path, what: str, *, remedy: str = "") -> str:
    """The text of the file, without white space around it.

    Args:
        path: the file.
        what: what it holds, as in "the webhook secret".
        remedy: what to do where others may read it; `chmod` by default.

    Raises:
        FileNotFoundError: there is no such file.
        RefusedError: others than its owner may read it.
    """
    with path.open("rb") as stream:
        mode = os.fstat(stream.fileno()).st_mode & 0o777
        if mode & 0o077:
            raise RefusedError(
                f"{what} may be read by others than its owner",
                where=str(path),
                why=f"its mode is {mode:04o}",
                remedy=remedy or f"Renew it if others may have seen it, and: chmod 600 {path}",
            )
        return stream.read().decode("utf-8", "replace").strip()
