"""Open a project for a dry run, in which nothing is written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from onnx_ops.adapters.store import ModelFolders
from onnx_ops.app.context import build_context
from onnx_ops.config.settings import load_settings
from onnx_ops.release.dry_run import DryRun
from onnx_ops.scratch import Scratch


@contextmanager
def open_dry_run(start: Path | None = None) -> Iterator[DryRun]:
    """Yield a dry run of the project that contains a folder.

    Downloads go to a temporary folder, which is removed at the end. The default folder is the
    working directory.

    Raises:
        UserError: the settings file is invalid.
    """
    settings = load_settings(start)
    with Scratch() as folder:
        context = build_context(settings, scratch=folder)
        yield DryRun(context, ModelFolders(folder / "models"))
