"""ONNX Runtime in a process of its own: a model that takes it down or hangs is told as an error.

An operator may divide by zero or read past its input where its inputs are made up (STFT of ONNX Runtime 1.31 with a
frame step of 0, for one).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from onnx_ops.adapters.isolation.shield import PATIENCE_S, Fallen, shielded
from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.adapters.runtimes.ort_format import loaded_file
from onnx_ops.adapters.runtimes.targeted import TargetedRuntime
from onnx_ops.domain.target import Target
from onnx_ops.errors import MeasurementError
from onnx_ops.ports import Runtime
from onnx_ops.ports.data import Array, Tensors

_Answers = tuple[Mapping[str, Array], ...]


class ShieldedRuntime(OnnxRuntime):
    """Runs each call of `run` in a process of its own.

    Args:
        timeout: seconds that one call may take.
        memory: bytes that its process may use, by default what the machine has.
    """

    def __init__(self, timeout: float = PATIENCE_S, memory: int | None = None) -> None:
        super().__init__()
        self._timeout = timeout
        self._memory = memory

    def run(self, model: Path, target: Target, batches: tuple[Tensors, ...]) -> _Answers:
        loaded = loaded_file(model, target)  # a shielded process starts no other
        try:
            return shielded(_run, loaded, target, batches, timeout=self._timeout, memory=self._memory)
        except Fallen as fallen:
            what = "ONNX Runtime hangs" if fallen.late else "ONNX Runtime crashed"
            remedy = (
                "Give it more time: --timeout." if fallen.late else "Export the model with other operators or shapes."
            )
            raise MeasurementError(what, where=model.name, why=fallen.how, remedy=remedy) from None


def shielded_runtime(runtime: Runtime, timeout: float | None = None) -> Runtime:
    """The same runtime, shielded where it runs models in this process; `timeout` in seconds of one call."""
    shield = ShieldedRuntime(timeout or PATIENCE_S)
    if isinstance(runtime, TargetedRuntime) and type(runtime.here) is OnnxRuntime:
        return replace(runtime, here=shield)
    return shield if type(runtime) is OnnxRuntime else runtime


def _run(model: Path, target: Target, batches: tuple[Tensors, ...]) -> _Answers:
    return OnnxRuntime().run(model, target, batches)
