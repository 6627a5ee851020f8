"""The inner side: runs in the environment of the framework, and imports no more than that brings.

Everything that this module imports is the standard library or needs only `annotated-types`, `cattrs`, numpy and onnx.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import queue
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from onnx_ops import codec
from onnx_ops.domain.pipeline import Export
from onnx_ops.errors import OnnxOpsError, StageFailure
from onnx_ops.ports.models import Dataset, Exporter, ExportRequest
from onnx_ops.stages.usercode import call_training


class Inside:
    """One exporter and at most one loaded model."""

    def __init__(self) -> None:
        self._exporter: Any = None
        self._model: object = None

    def start(self, exporter: str, root: str) -> None:
        module, _, name = exporter.partition(":")
        sys.path.insert(0, root)
        made: Exporter = getattr(importlib.import_module(module), name)()
        self._exporter = made

    def train(self, run: str, data: Mapping[str, str], parameters: Mapping[str, Any], folder: str) -> None:
        sets = {name: _dataset(path) for name, path in data.items()}
        self._exporter.save(call_training(run, sets, parameters), Path(folder))

    def load(self, folder: str) -> None:
        self._model = self._exporter.load(Path(folder))

    def export(self, section: Any, samples: str, path: str) -> None:
        asked = codec.from_json(section, Export, where="export")
        self._exporter.export(self._model, ExportRequest(section=asked, samples=_arrays(samples), path=Path(path)))

    def answer(self, inputs: str, precision: str, outputs: str) -> bool:
        answers = self._exporter.reference(self._model, _arrays(inputs), precision)
        if answers is not None:
            np.savez(outputs, **answers)
        return answers is not None


def main() -> None:
    """Arguments: the folder of visible packages, the file descriptor for answers, bytes of memory."""
    faulthandler.enable(all_threads=False)
    limit = int(sys.argv[3])
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    requests: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(requests,), daemon=True).start()
    inside = Inside()
    with os.fdopen(int(sys.argv[2]), "w", encoding="utf-8") as answers:
        while True:
            answers.write(json.dumps(_answer(inside, json.loads(requests.get()), limit)) + "\n")
            answers.flush()


def _listen(requests: queue.SimpleQueue[str]) -> None:
    """Whoever asks holds the other end of standard input; when that is gone, nobody waits for an answer."""
    for line in sys.stdin:
        requests.put(line)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _answer(inside: Inside, request: dict[str, Any], limit: int) -> dict[str, Any]:
    work: Callable[..., Any] = getattr(inside, request.pop("do"))
    timeout = request.pop("timeout")
    if timeout is not None:
        # A thread of C: it speaks and ends the process even where a converter never gives the interpreter back.
        faulthandler.dump_traceback_later(timeout, exit=True)
    try:
        return {"done": work(**request)}
    except OnnxOpsError as error:
        return {"error": error.as_document()}
    except MemoryError:
        traceback.print_exc()
        return {"error": _no_memory(limit).as_document()}
    except ValueError as error:
        if work.__name__ == "answer":
            return {"refused": str(error)}
        return {"error": _unexpected(error).as_document()}
    except Exception as error:  # a framework raises whatever its parts raise
        return {"error": _unexpected(error).as_document()}
    finally:
        faulthandler.cancel_dump_traceback_later()


def _no_memory(limit: int) -> StageFailure:
    return StageFailure(
        f"it needs more memory than its limit of {limit / 1e9:.1f} GB",
        where="export",
        remedy="Raise `env.memory` if the machine has more.",
    )


def _unexpected(error: Exception) -> StageFailure:
    lines = "".join(traceback.format_exception(error)).splitlines()
    return StageFailure(f"{type(error).__name__}: {str(error)[:300]}", where="export", why="\n".join(lines[-15:]))


def _arrays(path: str) -> dict[str, Any]:
    with np.load(path, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


def _dataset(path: str) -> Dataset:
    arrays = _arrays(path)
    inputs = {name.removeprefix("input/"): array for name, array in arrays.items() if name.startswith("input/")}
    return Dataset(inputs=inputs, label=arrays.get("label"))
