"""A model with one fragile node, and a ground for searches on which times follow from what a file holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from onnx_ops.app.context import build_ports
from onnx_ops.config.settings import load_settings
from onnx_ops.domain.gate import ACCURACY
from onnx_ops.domain.pipeline import Calibrate, Quantize
from onnx_ops.domain.quantization import Arithmetic, Budget
from onnx_ops.domain.target import Target
from onnx_ops.measure.search import SearchContext
from onnx_ops.ports import Dataset, PairedBenchmarkSamples, PairedBenchmarkSchedule, Ports, RunSamples, Tensors

LAYERS = ("first", "second", "third", "head")
WIDTH, CLASSES = 32, 4
LOUD = 1000.0
"""The first input carries nothing and is this much louder than the others: in 8 bits they are gone."""

SLOW = "cpu-slow"
"""The target that has no fast products in int8."""


def write_fragile(path: Path, *, tuning: int = 200) -> dict[str, Path]:
    """A perceptron whose node `first` cannot be quantized, rows to calibrate, to tune and to score on."""
    rng = np.random.default_rng(3)
    sizes = [16, WIDTH, WIDTH, WIDTH, CLASSES]
    stored, nodes, last = [], [], "x"
    for place, name in enumerate(LAYERS):
        weights = rng.normal(size=(sizes[place], sizes[place + 1])) / np.sqrt(sizes[place])
        if name == "first":
            weights[0] = 0.0
        stored.append(numpy_helper.from_array(weights.astype(np.float32), f"{name}.w"))
        made = "scores" if name == "head" else f"{name}.out"
        nodes.append(helper.make_node("MatMul", [last, f"{name}.w"], [made], name=name))
        last = made
        if name != "head":
            last = f"{name}.act"
            nodes.append(helper.make_node("Relu", [made], [last], name=f"{name}.relu"))
    graph = helper.make_graph(
        nodes,
        "fragile",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 16])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["batch", CLASSES])],
        stored,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.save(model, path)
    files = {}
    for name, count in (("train", 64), ("tune", tuning), ("test", 300)):
        x = rng.normal(size=(count, 16)).astype(np.float32)
        x[:, 0] *= LOUD
        values = x
        for tensor in stored[:-1]:
            values = np.maximum(values @ numpy_helper.to_array(tensor), 0)
        labels = (values @ numpy_helper.to_array(stored[-1])).argmax(axis=1)
        files[name] = path.with_name(f"{name}.npz")
        np.savez(files[name], x=x, label=labels)
    return files


def write_words(path: Path) -> None:
    """A classifier of words, most of whose weights are a table, and rows to tune by."""
    rng = np.random.default_rng(3)
    table = rng.normal(size=(500, WIDTH)).astype(np.float32)
    head = rng.normal(size=(WIDTH, CLASSES)).astype(np.float32)
    graph = helper.make_graph(
        [
            helper.make_node("Gather", ["table.w", "x"], ["rows"], name="table"),
            helper.make_node("ReduceMean", ["rows", "axes"], ["mean"], name="mean", keepdims=0),
            helper.make_node("MatMul", ["mean", "head.w"], ["scores"], name="head"),
        ],
        "words",
        [helper.make_tensor_value_info("x", TensorProto.INT64, ["batch", 5])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["batch", CLASSES])],
        [
            numpy_helper.from_array(table, "table.w"),
            numpy_helper.from_array(head, "head.w"),
            numpy_helper.from_array(np.array([1]), "axes"),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.save(model, path)
    for name in ("train", "tune"):
        x = rng.integers(0, len(table), (200, 5))
        labels = (table[x].mean(axis=1) @ head).argmax(axis=1)
        np.savez(path.with_name(f"{name}.npz"), x=x, label=labels)


class Steady:
    """ONNX Runtime with a clock of its own: a product in int8 takes half the time of one in float, on SLOW more."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def race(
        self, models: Sequence[Path], target: Target, feed: Tensors, schedule: PairedBenchmarkSchedule
    ) -> PairedBenchmarkSamples:
        times = np.empty((schedule.rounds, schedule.blocks, len(models), schedule.runs))
        times[:] = np.array([_time(model, target) for model in models])[:, np.newaxis]
        return PairedBenchmarkSamples(nanoseconds=times, preempted=np.zeros(times.shape, dtype=bool))

    def sample(self, model: Path, target: Target, feed: Tensors, *, runs: int, warmup: int) -> RunSamples:
        return RunSamples(nanoseconds=np.full(runs, _time(model, target)), preempted=np.zeros(runs, dtype=bool))


def _time(path: Path, target: Target) -> float:
    """1000 for each product in float, 500 for others; 1200 on the slow target."""
    names = [node.op_type for node in onnx.load(path).graph.node]
    integers = sum(name in ("MatMulInteger", "DynamicQuantizeMatMul") for name in names)
    gain = -200.0 if target.name == SLOW else 500.0
    return 1000.0 * len(LAYERS) - gain * integers - 100.0 * ("MatMulNBits" in names)


def fragile_ground(folder: Path, *, budget: Budget | None = None, calibrated: bool = False) -> SearchContext:
    """A ground below `folder`, which holds what `write_fragile` wrote to `source/model.onnx`."""
    settings = load_settings(folder, {})
    ports: Ports = build_ports(settings)
    steady = Steady(ports.runtime("onnxruntime"))
    object.__setattr__(ports, "runtime", lambda _: steady)
    arrays = {name: dict(np.load(folder / f"source/{name}.npz")) for name in ("train", "tune")}
    tune = arrays["tune"]
    return SearchContext(
        ports=ports,
        section=Quantize(name="best", method="auto", calibrate=Calibrate() if calibrated else None),
        source=folder / "source/model.onnx",
        folder=folder / "trials",
        targets=(Target(name="cpu-1t"),),
        machines=(Arithmetic(family="x86", saturates=True),),
        tuning_data=Dataset(inputs={"x": tune["x"]}, label=tune["label"]),
        calibration={"x": arrays["train"]["x"]} if calibrated else None,
        metric=ACCURACY,
        lower=False,
        batch=1,
        budget=budget or Budget(metric_drop=0.1),
        seed=0,
    )
