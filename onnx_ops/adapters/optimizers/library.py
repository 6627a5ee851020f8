"""Calls into libraries that print, log and raise whatever their parts raise."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
from collections.abc import Iterator

from onnx_ops.errors import OnnxOpsError, StageFailure

_DEFAULT_SEVERITY, _ERRORS_ONLY = 2, 3


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Nothing is printed; root logger and levels are afterwards as they were."""
    ort = importlib.import_module("onnxruntime")
    root = logging.getLogger()
    handlers, level, disabled = list(root.handlers), root.level, root.manager.disable
    ort.set_default_logger_severity(_ERRORS_ONLY)
    logging.disable(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(disabled)
        root.handlers[:] = handlers
        root.setLevel(level)
        ort.set_default_logger_severity(_DEFAULT_SEVERITY)


@contextlib.contextmanager
def told(what: str, variant: str, remedy: str) -> Iterator[None]:
    """A failure of the library is one of the stage.

    Raises:
        StageFailure: whatever the library raised, in one line.
    """
    try:
        yield
    except OnnxOpsError:
        raise
    except Exception as error:
        raise StageFailure(
            what, where=f"variant {variant}", why=f"{type(error).__name__}: {first_line(error)}", remedy=remedy
        ) from error


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
