"""The secret that MLflow and the receiver share: from the environment, or from a file that only its owner may read."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from onnx_ops.adapters.private import read_private
from onnx_ops.errors import NotFoundError, UserError

VARIABLE = "ONNX_OPS_WEBHOOK_SECRET"
_SHORTEST = 16


def read_secret(path: Path, environ: Mapping[str, str]) -> str:
    """The secret; the environment's counts before the file's.

    Raises:
        NotFoundError: there is none.
        RefusedError: others than its owner may read the file.
        UserError: it is too short to be one.
    """
    if VARIABLE in environ:
        return _checked(environ[VARIABLE], VARIABLE)
    try:
        remedy = f"Delete it, and run `onnx-ops webhooks install` for a new one; or chmod 600 {path}."
        return _checked(read_private(path, "the webhook secret", remedy=remedy), str(path))
    except FileNotFoundError as error:
        raise NotFoundError(
            "there is no webhook secret",
            where=str(path),
            remedy=f"`onnx-ops webhooks install --url URL` makes one; or set {VARIABLE}.",
        ) from error


def make_secret(path: Path, environ: Mapping[str, str]) -> str:
    """The secret; a new one is written to the file if there is none yet. Two that do so at once get the same.

    Raises:
        RefusedError: others than its owner may read the file.
        UserError: it is too short to be one.
    """
    if VARIABLE not in environ and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
            stream.write(secrets.token_urlsafe(32) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        try:
            os.link(aside, path)
        except FileExistsError:
            pass
        finally:
            aside.unlink()
    return read_secret(path, environ)


def _checked(secret: str, where: str) -> str:
    if len(secret) < _SHORTEST:
        raise UserError(
            f"the webhook secret is shorter than {_SHORTEST} characters",
            where=where,
            remedy="For a good one: python -c 'import secrets; print(secrets.token_urlsafe(32))'",
        )
    return secret
