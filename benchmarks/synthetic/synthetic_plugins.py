"""A framework, an optimizer and a runtime that cost next to nothing.

What a run takes with them is the overhead of onnx-ops. They are installed by putting this folder on
the path. The model is one matrix product, computed by numpy. Times are simulated.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from onnx_ops.adapters.runtimes.onnxruntime_session import fingerprint_target
from onnx_ops.domain.execution import RuntimeFacts
from onnx_ops.domain.target import HardwareFingerprint, Target
from onnx_ops.errors import MeasurementError
from onnx_ops.ports import (
    Exporter,
    ExportRequest,
    LoadSamples,
    LoadSchedule,
    Optimizer,
    OptimizeRequest,
    PairedBenchmarkSamples,
    PairedBenchmarkSchedule,
    RunSamples,
    Runtime,
    StartSamples,
    StartSchedule,
)
from onnx_ops.ports.data import Array, Tensors

FEATURES, CLASSES = 8, 3


def train(data: Mapping[str, Any], seed: int = 0) -> Any:
    """Return a model: weights (FEATURES, CLASSES), float32."""
    del data
    return np.random.default_rng(seed).standard_normal((FEATURES, CLASSES)).astype(np.float32)


class SyntheticExporter(Exporter):
    tools = ("onnx",)

    def save(self, model: Any, folder: Path) -> None:
        np.save(folder / "weights.npy", model)

    def load(self, folder: Path) -> object:
        return np.load(folder / "weights.npy")

    def export(self, model: Any, request: ExportRequest) -> None:
        graph = helper.make_graph(
            [helper.make_node("MatMul", ["x", "weight"], ["scores"], name="product")],
            "synthetic",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", FEATURES])],
            [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["batch", CLASSES])],
            [numpy_helper.from_array(model, "weight")],
        )
        section = request.section
        opset = [helper.make_opsetid("", section.opset)]
        proto = helper.make_model(graph, ir_version=section.ir_version, opset_imports=opset)
        request.path.write_bytes(proto.SerializeToString())

    def reference(
        self, model: Any, inputs: Tensors, precision: Literal["float32", "float64"]
    ) -> Mapping[str, Array] | None:
        return {"scores": _product(inputs["x"].astype(precision), model.astype(precision))}


class SyntheticOptimizer(Optimizer):
    """An optimizer that copies the model under another name."""

    tools = ("onnx",)
    quantized = False
    needs_calibration = False

    def optimize(self, request: OptimizeRequest) -> tuple[str, ...]:
        shutil.copyfile(request.source, request.path)
        return ("A copy.",)


class SyntheticRuntime(Runtime):
    """A runtime whose times are simulated.

    In a paired benchmark, the last model takes nine tenths of the time of the others. A little
    noise is added, which is the same in every run.
    """

    tools = ("numpy",)

    def fingerprint(self, target: Target) -> HardwareFingerprint:
        return fingerprint_target(target)

    def facts(self, model: Path, target: Target) -> RuntimeFacts:
        asked = tuple(provider.name for provider in target.providers)
        return RuntimeFacts(
            runtime=target.runtime,
            version="1.0",
            asked=asked,
            used=asked,
            nodes={asked[0]: 1},
            clock_resolution_ns=50.0,
        )

    def run(
        self, model: Path, target: Target, batches: tuple[Tensors, ...]
    ) -> tuple[Mapping[str, Array], ...]:
        del target
        try:
            weight = numpy_helper.to_array(onnx.load(model).graph.initializer[0])
            return tuple({"scores": _product(batch["x"], weight)} for batch in batches)
        except (KeyError, IndexError, ValueError) as error:
            raise MeasurementError("it does not run", where=str(model), why=str(error)) from error

    def sample(
        self, model: Path, target: Target, feed: Tensors, *, runs: int, warmup: int
    ) -> RunSamples:
        del model, target, feed, warmup
        return RunSamples(nanoseconds=_times((runs,), 0), preempted=np.zeros(runs, dtype=bool))

    def benchmark(
        self,
        models: Sequence[Path],
        target: Target,
        feed: Tensors,
        schedule: PairedBenchmarkSchedule,
    ) -> PairedBenchmarkSamples:
        del target, feed
        shape = (schedule.rounds, schedule.blocks, len(models), schedule.runs)
        cost = np.ones((1, 1, len(models), 1))
        cost[:, :, -1] = 0.9
        times = (_times(shape, schedule.seed) * cost).astype(np.int64)
        return PairedBenchmarkSamples(nanoseconds=times, preempted=np.zeros(shape, dtype=bool))

    def under_load(
        self, models: Sequence[Path], target: Target, feed: Tensors, schedule: LoadSchedule
    ) -> LoadSamples:
        del target, feed
        shape = (schedule.rounds, schedule.windows, len(models))
        return LoadSamples(nanoseconds=_times(shape, schedule.seed), requests=schedule.requests)

    def starts(
        self, models: Sequence[Path], target: Target, feed: Tensors, schedule: StartSchedule
    ) -> StartSamples:
        del target, feed
        load, first, peak = (
            _times((schedule.rounds, len(models)), schedule.seed + part) for part in range(3)
        )
        return StartSamples(load_ns=load, first_ns=first, peak_bytes=peak)


def _product(rows: npt.NDArray[Any], weight: npt.NDArray[Any]) -> Array:
    """Multiply row by row, so that an answer does not depend on neighbouring rows."""
    with np.errstate(all="ignore"):
        product: Array = np.einsum("bf,fc->bc", rows, weight)
    return product


def _times(shape: tuple[int, ...], seed: int) -> npt.NDArray[np.int64]:
    draw = np.random.default_rng(seed % (1 << 32))
    return (1e5 * np.exp(0.002 * draw.standard_normal(shape))).astype(np.int64)
