"""Calls into libraries that print, log and raise whatever their parts raise."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
from collections.abc import Iterator
from pathlib import Path

from onnx_ops.errors import OnnxOpsError, StageFailure
from onnx_ops.graph.inspect import info

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


def check_interface(source: Path, derived: Path, tool: str, where: str) -> None:
    """Clients and gates go by names, types and free dimensions.

    Raises:
        StageFailure: the tool changed one.
    """
    before, after = info(source), info(derived)
    for side, old, new in (("inputs", before.inputs, after.inputs), ("outputs", before.outputs, after.outputs)):
        if old != new:
            raise StageFailure(
                f"{tool} changed the model's {side}",
                where=where,
                why=f"they were {list(map(str, old))} and became {list(map(str, new))}"[:400],
                remedy="Leave this variant out of `quantize`.",
            )
