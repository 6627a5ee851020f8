"""The variants that every tool makes of a model.

The tools are the search, ONNX Runtime's defaults, and other tools' presets.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.variant_models import Model
from benchmarks.variant_peers import PRESETS, Preset, Work, interpreter
from onnx_ops.adapters.files import FileJournal
from onnx_ops.app.context import build_context
from onnx_ops.config.settings import load_settings
from onnx_ops.domain.gate import ACCURACY
from onnx_ops.domain.pipeline import Calibrate, Quantize
from onnx_ops.domain.quantization import Budget
from onnx_ops.domain.target import Target
from onnx_ops.errors import OnnxOpsError
from onnx_ops.measure.variants.search import search
from onnx_ops.measure.variants.trials import SearchContext
from onnx_ops.ports import Dataset
from onnx_ops.tools.quantize import list_machines

DROP = 0.01
MINUTES = {"cnn": 1.0, "minilm": 5.0, "encoder": 5.0, "encoder-outliers": 5.0}
COSINE = 0.993
"""Cosine that a variant of the embedder must keep."""

TARGET = Target(name="cpu-1t")


def ours(model: Model, scratch: Path) -> None:
    """Run the search, given only the budget."""
    context = build_context(load_settings())
    folder = scratch / model.name / "ours"
    (folder / "source").mkdir(parents=True)
    source = folder / "source" / "model.onnx"
    source.write_bytes(model.path.read_bytes())
    section = Quantize(
        name="auto", method="auto", calibrate=Calibrate(samples=len(model.calibration))
    )
    ground = SearchContext(
        project=context,
        section=section,
        source=source,
        folder=folder / "trials",
        targets=(TARGET,),
        machines=list_machines(context, (TARGET,)),
        tuning_data=Dataset(inputs={model.feed: model.tune[0]}, label=model.tune[1]),
        calibration={model.feed: model.calibration},
        metric=model.metric,
        lower=False,
        batch=1,
        budget=Budget(
            metric_drop=DROP if model.metric is ACCURACY else 1 - COSINE,
            max_minutes=MINUTES[model.name],
        ),
        seed=0,
    )
    begun, busy = time.perf_counter(), time.process_time()
    found = search(
        ground,
        FileJournal(folder / "journal"),
        lambda line: print(f"  {model.name}: {line}", file=sys.stderr),
    )
    model.search = (
        f"{len(found.record.trials)} models, {len(found.record.sensitivities)} nodes probed, "
        f"{time.perf_counter() - begun:.0f} s, {time.process_time() - busy:.0f} CPU-seconds; "
        f"{found.record.stopped}"
    )
    for role, (path, trial) in found.models.items():
        kept = f", {len(trial.excluded)} in float" if trial.excluded else ""
        model.variants[f"ours: auto-{role} ({trial.recipe}{kept})"] = path
    if "fast" not in found.models:
        model.failures["ours: auto-fast"] = next(
            s.reason for s in found.record.slots if s.role == "fast"
        )


def ort_defaults(model: Model, scratch: Path) -> None:
    from onnxruntime.quantization import (
        CalibrationDataReader,
        QuantFormat,
        QuantType,
        quantize_dynamic,
        quantize_static,
    )

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.rows = iter(np.array_split(model.calibration, len(model.calibration) // 8))

        def get_next(self) -> Any:
            return next(({model.feed: rows} for rows in self.rows), None)

    folder, source = scratch / model.name, prepared(model, scratch)
    attempt(model, "ORT quantize_dynamic, default", folder / "dynamic.onnx",
            lambda path: quantize_dynamic(str(source), str(path)))  # fmt: skip
    attempt(model, "ORT quantize_static, default (S8S8)", folder / "static.onnx",
            lambda path: quantize_static(str(source), str(path), Reader()))  # fmt: skip
    attempt(model, "ORT quantize_dynamic, per channel", folder / "dynamic-channels.onnx",
            lambda path: quantize_dynamic(str(source), str(path), per_channel=True))  # fmt: skip
    for form in QuantFormat:

        def channels(path: Path, form: QuantFormat = form) -> None:
            quantize_static(
                str(source), str(path), Reader(), quant_format=form, per_channel=True,
                activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8,
            )  # fmt: skip

        attempt(
            model,
            f"ORT quantize_static, U8S8 per channel, {form.name}",
            folder / f"{form.name}.onnx",
            channels,
        )


def prepared(model: Model, scratch: Path) -> Path:
    """Return the export after ORT's own preparation.

    The shapes that torch 2.13 wrote are removed, since the quantizers of ORT 1.31 fail with them:
    their shape inference finds other shapes.
    """
    import onnx
    from onnxruntime.quantization.shape_inference import quant_pre_process

    path = scratch / model.name / "prepared.onnx"
    if not path.exists():
        quant_pre_process(str(model.path), str(path), skip_symbolic_shape=True)
        loaded = onnx.load(path)
        del loaded.graph.value_info[:]
        onnx.save(loaded, path)
    return path


def others(model: Model, scratch: Path, folder: Path | None) -> None:
    """Run the presets of Olive and Optimum.

    A preset that fails because of torch's shapes is tried again after ORT's preparation.
    """
    for tool in dict.fromkeys(preset.tool for preset in PRESETS):
        presets = [preset for preset in PRESETS if preset.tool == tool]
        if folder is None:
            model.failures[f"{tool}, {len(presets)} presets"] = "not run: --peers was not given"
            continue
        try:
            python = interpreter(tool, folder)
        except OnnxOpsError as error:
            model.failures[f"{tool}, {len(presets)} presets"] = (
                f"cannot be installed: {describe(error)}"
            )
            continue
        again = tried(model, scratch, python, presets, "")
        tried(model, scratch, python, again, ", after quant_pre_process")


def tried(
    model: Model, scratch: Path, python: Path, presets: Sequence[Preset], suffix: str
) -> list[Preset]:
    """Run presets, four at a time.

    Return those that fail because of the shapes that torch wrote.
    """
    source = prepared(model, scratch) if suffix else model.path
    with ThreadPoolExecutor(4) as pool:
        running: dict[str, tuple[Preset, Path, Future[None]]] = {}
        for preset in presets:
            name = f"{preset.tool} {preset.name}{suffix}"
            place = Path(tempfile.mkdtemp(dir=scratch))
            work = Work(
                python=python, source=source, feed=model.feed, rows=model.calibration, folder=place,
                out=place / "taken.onnx",
            )  # fmt: skip
            running[name] = preset, work.out, pool.submit(preset.make, work)
    for name, (_, out, future) in running.items():

        def finish(_: Path, future: Future[None] = future) -> None:
            future.result()

        attempt(model, name, out, finish)
    return [
        preset
        for name, (preset, *_) in running.items()
        if "ShapeInference" in model.failures.get(name, "")
    ]


def attempt(model: Model, name: str, path: Path, make_it: Callable[[Path], object]) -> None:
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            make_it(path)
            session(path).run(None, {model.feed: model.test[0][:1]})
        model.variants[name] = path
    except Exception as error:  # The quantizers of other projects raise many types of errors.
        model.failures[name] = describe(error)


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160].replace('|', '/')}"


def session(path: Path) -> Any:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
