"""The secret that MLflow and the receiver share."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path

from onnx_ops.adapters.files import create_file, read_private
from onnx_ops.errors import NotFoundError, UserError

VARIABLE = "ONNX_OPS_WEBHOOK_SECRET"
_SHORTEST = 16


def read_secret(path: Path, environ: Mapping[str, str]) -> str:
    """Return the secret from the environment, else from the file."""
    secret, where = environ.get(VARIABLE), VARIABLE
    if secret is None:
        remedy = f"Delete it, and run `onnx-ops webhooks install` for a new one; or chmod 600 {path}."
        try:
            secret, where = read_private(path, "the webhook secret", remedy=remedy), str(path)
        except FileNotFoundError as error:
            remedy = f"`onnx-ops webhooks install --url URL` creates one; or set {VARIABLE}."
            raise NotFoundError("there is no webhook secret", where=str(path), remedy=remedy) from error
    if len(secret) < _SHORTEST:
        remedy = "Generate one: python -c 'import secrets; print(secrets.token_urlsafe(32))'"
        raise UserError(f"the webhook secret is shorter than {_SHORTEST} characters", where=where, remedy=remedy)
    return secret


def make_secret(path: Path, environ: Mapping[str, str]) -> str:
    """Return the secret; create the file, once for all processes, if needed."""
    if VARIABLE not in environ and not path.exists():
        create_file(path, f"{secrets.token_urlsafe(32)}\n".encode())
    return read_secret(path, environ)
