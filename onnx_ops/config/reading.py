"""The way every file goes: text, version, overrides, environment, types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from onnx_ops.config.document import Document, Finding
from onnx_ops.config.environment import substitute
from onnx_ops.config.overrides import apply_overrides
from onnx_ops.config.text import read_file
from onnx_ops.errors import ConfigError

NEWEST_SCHEMA = 1
"""The newest version of the file formats that this release reads; a file without `schema` has version 1."""


def read_document(path: Path, *, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> Document:
    """Read a file and apply overrides and environment variables.

    Without `environ` no variable is known, so every `${env:NAME}` is a problem.

    Raises:
        NotFoundError, UserError: there is no such file, or it cannot be read.
        ConfigError: it is not YAML, is empty or of a newer version.
    """
    document = read_file(path)
    if document.value is None:
        raise ConfigError((document.problem(Finding(loc=(), message="the file is empty")),))
    apply_overrides(document, overrides)
    version = document.at(("schema",))
    if isinstance(version, int) and version > NEWEST_SCHEMA:
        message = f"this file needs a newer onnx-ops: it has schema {version}, this release reads up to {NEWEST_SCHEMA}"
        raise ConfigError((document.problem(Finding(loc=("schema",), message=message)),))
    substitute(document, environ or {})
    return document
