"""Cold starts: a fresh process builds a session, answers requests, and tells what that took."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from onnx_ops import codec
from onnx_ops.adapters.runtimes.arrays import put_arrays
from onnx_ops.adapters.runtimes.onnxruntime_session import check_machine
from onnx_ops.adapters.runtimes.ort_format import loaded_file
from onnx_ops.domain.target import Target
from onnx_ops.errors import MeasurementError, from_document
from onnx_ops.ports.data import Tensors
from onnx_ops.scratch import Scratch

CHILD = "onnx_ops.adapters.runtimes.onnxruntime_child"
PATIENCE_S = 600.0
"""A process that takes longer hangs."""

_LAST_LINES = 15


@contextmanager
def stored_feed(feed: Tensors) -> Iterator[Path]:
    """One request as a file, for processes that have none of this one's memory."""
    with Scratch() as folder:
        yield put_arrays(feed, folder / "feed.npz")


def start(model: Path, target: Target, feed: Path, requests: int) -> tuple[int, int, int]:
    """Load a model in a fresh process.

    Args:
        model: ONNX file.
        target: how to run it.
        feed: one request, as `stored_feed` writes it.
        requests: inferences before the peak of memory is read, the first included; at least 1.

    Returns:
        Nanoseconds to build the session and of the first inference, and peak bytes (-1 where they cannot be known),
        as in `ports.StartSamples`.

    Raises:
        MeasurementError: the machine lacks something, or the process crashed, hung or could not run the model.
    """
    check_machine(target)
    loaded = loaded_file(model, target)
    request = {"model": str(loaded), "target": codec.to_json(target), "feed": str(feed), "requests": requests}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", CHILD],
            input=json.dumps(request) + "\n",
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise MeasurementError(
            f"a fresh process did not answer within {PATIENCE_S:g} s and was stopped", where=model.name
        ) from error
    answer = _last_document(done.stdout)
    if "error" in answer:
        raise from_document(answer["error"])
    if done.returncode or not answer:
        raise MeasurementError(
            f"a fresh process that loads the model ended with {_ending(done.returncode)}",
            where=model.name,
            why="\n".join(done.stderr.splitlines()[-_LAST_LINES:]) or "it printed nothing",
        )
    return answer["load_ns"], answer["first_ns"], answer["peak_bytes"]


def _last_document(text: str) -> dict[str, Any]:
    lines = text.splitlines()
    try:
        document = json.loads(lines[-1]) if lines else {}
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def _ending(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
