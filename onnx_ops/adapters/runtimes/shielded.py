"""ONNX Runtime in a process of its own: a model that takes it down is told as an error, and nobody else goes with it.

An operator may divide by zero or read past its input where its inputs are made up (STFT of ONNX Runtime 1.31 with a
frame step of 0, for one). No `except` catches a signal.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path

from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.domain.target import Target
from onnx_ops.errors import MeasurementFailure, OnnxOpsError
from onnx_ops.ports import Runtime
from onnx_ops.ports.models import Array, Tensors

_Answers = tuple[Mapping[str, Array], ...]


class ShieldedRuntime(OnnxRuntime):
    """Runs each call of `run` in a process of its own."""

    def run(self, model: Path, target: Target, batches: tuple[Tensors, ...]) -> _Answers:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["onnxruntime", __name__])
        mine, other = context.Pipe(duplex=False)
        process = context.Process(target=_run, args=(other, model, target, batches), daemon=True)
        process.start()
        other.close()
        try:
            told: _Answers | OnnxOpsError = mine.recv()
        except EOFError:
            process.join()
            raise MeasurementFailure(
                "ONNX Runtime crashed", where=model.name, why=_ending(process.exitcode or 0)
            ) from None
        finally:
            mine.close()
            process.join()
        if isinstance(told, OnnxOpsError):
            raise told
        return told


def shielded(runtime: Runtime) -> Runtime:
    """The same runtime, shielded where it runs models in this process."""
    return ShieldedRuntime() if type(runtime) is OnnxRuntime else runtime


def _run(pipe: Connection, model: Path, target: Target, batches: tuple[Tensors, ...]) -> None:
    try:
        pipe.send(OnnxRuntime().run(model, target, batches))
    except OnnxOpsError as error:
        pipe.send(error)


def _ending(code: int) -> str:
    return f"its process was ended by {signal.Signals(-code).name}" if code < 0 else f"its process ended with {code}"
