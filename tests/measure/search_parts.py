"""A model with one fragile node, and a search context with computed times.

The times follow from the content of the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from onnx_ops.app.context import build_context
from onnx_ops.config.settings import load_settings
from onnx_ops.domain.arithmetic import Arithmetic
from onnx_ops.domain.gate import ACCURACY
from onnx_ops.domain.pipeline import Calibrate, Quantize
from onnx_ops.domain.quantization import Budget
from onnx_ops.domain.target import Target
from onnx_ops.measure.variants.trials import SearchContext
from onnx_ops.ports import (
    Context,
    Dataset,
    PairedBenchmarkSamples,
    PairedBenchmarkSchedule,
    RunSamples,
    Tensors,
)
from tests.support.graphs import write_graph

LAYERS = ("first", "second", "third", "head")
WIDTH, CLASSES = 32, 4
LOUD = 1000.0
"""Factor by which the first input is larger than the others.

The input contains no information. In 8 bits, its range leaves no steps for the others.
"""

SLOW = "cpu-slow"
"""The target that has no fast products in int8."""


def write_fragile(path: Path, *, tuning: int = 200) -> dict[str, Path]:
    """Write a perceptron whose node `first` cannot be quantized.

    Return the files of rows for calibration, tuning and scoring.
    """
    rng = np.random.default_rng(3)
    sizes = [16, WIDTH, WIDTH, WIDTH, CLASSES]
    weights: dict[str, Any] = {}
    nodes: list[str] = []
    last = "x"
    for place, name in enumerate(LAYERS):
        weight = rng.normal(size=(sizes[place], sizes[place + 1])) / np.sqrt(sizes[place])
        if name == "first":
            weight[0] = 0.0
        weights[f"{name}_w"] = weight.astype(np.float32)
        made = "scores" if name == "head" else f"{name}_out"
        nodes.append(f"[{name}] {made} = MatMul({last}, {name}_w)")
        last = f"{name}_act"
        nodes += [] if name == "head" else [f"[{name}_relu] {last} = Relu({made})"]
    text = f"(float[batch,16] x) => (float[batch,{CLASSES}] scores) {{ {' '.join(nodes)} }}"
    write_graph(path, text, **weights)
    files = {}
    for name, count in (("train", 64), ("tune", tuning), ("test", 300)):
        x = rng.normal(size=(count, 16)).astype(np.float32)
        x[:, 0] *= LOUD
        values, *layers, head = x, *weights.values()
        for weight in layers:
            values = np.maximum(values @ weight, 0)
        files[name] = path.with_name(f"{name}.npz")
        np.savez(files[name], x=x, label=(values @ head).argmax(axis=1))
    return files


def write_words(path: Path) -> None:
    """Write a classifier of words and rows for tuning.

    Most of its weights are a table.
    """
    rng = np.random.default_rng(3)
    table = rng.normal(size=(500, WIDTH)).astype(np.float32)
    head = rng.normal(size=(WIDTH, CLASSES)).astype(np.float32)
    text = f"""(int64[batch,5] x) => (float[batch,{CLASSES}] scores) {{ [table] rows = Gather(table_w, x)
        [mean] mean = ReduceMean<keepdims = 0>(rows, axes) [head] scores = MatMul(mean, head_w) }}"""  # noqa: E501
    write_graph(path, text, axes=np.array([1]), table_w=table, head_w=head)
    for name in ("train", "tune"):
        x = rng.integers(0, len(table), (200, 5))
        labels = (table[x].mean(axis=1) @ head).argmax(axis=1)
        np.savez(path.with_name(f"{name}.npz"), x=x, label=labels)


class Steady:
    """ONNX Runtime with a simulated clock.

    A product in int8 takes half the time of one in float, and more time on SLOW.
    """

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def benchmark(
        self,
        models: Sequence[Path],
        target: Target,
        feed: Tensors,
        schedule: PairedBenchmarkSchedule,
    ) -> PairedBenchmarkSamples:
        times = np.empty((schedule.rounds, schedule.blocks, len(models), schedule.runs))
        times[:] = np.array([_time(model, target) for model in models])[:, np.newaxis]
        return PairedBenchmarkSamples(
            nanoseconds=times, preempted=np.zeros(times.shape, dtype=bool)
        )

    def sample(
        self, model: Path, target: Target, feed: Tensors, *, runs: int, warmup: int
    ) -> RunSamples:
        return RunSamples(
            nanoseconds=np.full(runs, _time(model, target)), preempted=np.zeros(runs, dtype=bool)
        )


def _time(path: Path, target: Target) -> float:
    """Return the time: 1000 per float product, 500 (on SLOW 1200) per product in int8.

    MatMulNBits saves 100.
    """
    names = [node.op_type for node in onnx.load(path).graph.node]
    integers = sum(name in ("MatMulInteger", "DynamicQuantizeMatMul") for name in names)
    gain = -200.0 if target.name == SLOW else 500.0
    return 1000.0 * len(LAYERS) - gain * integers - 100.0 * ("MatMulNBits" in names)


def fragile_ground(
    folder: Path, *, budget: Budget | None = None, calibrated: bool = False
) -> SearchContext:
    """Return a search context below `folder`.

    `write_fragile` or `write_words` has written the files in `source` there.
    """
    settings = load_settings(folder, {})
    context: Context = build_context(settings)
    steady = Steady(context.runtime("onnxruntime"))
    object.__setattr__(context, "runtime", lambda _: steady)
    arrays = {name: dict(np.load(folder / f"source/{name}.npz")) for name in ("train", "tune")}
    tune = arrays["tune"]
    return SearchContext(
        project=context,
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
