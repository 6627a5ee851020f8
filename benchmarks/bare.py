"""Run the calls of the digits pipeline as a bare script.

The calls and the data are those of a whole run. There is no plan, store, ledger or orchestrator.
`overhead.py` runs this script. To run it alone:

    python -m benchmarks.bare FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from benchmarks.digits_job import CALIBRATION_ROWS, SCORED, TRAINING, feed, publication
from examples.digits_mlp import train
from onnx_ops.adapters.data.sklearn import SklearnSource
from onnx_ops.adapters.endpoints.local import LocalEndpoints
from onnx_ops.adapters.exporters.sklearn import SklearnExporter
from onnx_ops.adapters.optimizers.onnxruntime import DynamicQuantizer, StaticQuantizer
from onnx_ops.adapters.registries.mlflow import MlflowRegistry
from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.domain.artifact import digest_folder
from onnx_ops.domain.endpoint import Deployment, EndpointConfig
from onnx_ops.domain.pipeline import Calibrate, Export, Quantize
from onnx_ops.domain.rollout import build_split_state
from onnx_ops.domain.target import Target
from onnx_ops.onnx_graph.compatibility import check_model
from onnx_ops.ports import Dataset, ExportRequest, OptimizeRequest, PairedBenchmarkSchedule
from onnx_ops.statistics.probes import learn_domains, make_batch_inputs, make_range_inputs

TARGET = Target(name="cpu-1t")


def main(folder: Path) -> None:
    source = SklearnSource()
    sets = {}
    for name, section in (("train", TRAINING), ("test", SCORED)):
        arrays = source.load(section, folder)
        sets[name] = Dataset(inputs={"x": arrays["data"]}, label=arrays["target"])
    exporter, runtime = SklearnExporter(), OnnxRuntime()
    model = train({"train": sets["train"]})
    samples = sets["test"].inputs
    export = folder / "fp32" / "model.onnx"
    export.parent.mkdir()
    exporter.export(
        model, ExportRequest(section=Export(framework="sklearn"), samples=samples, path=export)
    )
    check_model(export)
    groups = [
        samples,
        make_range_inputs(samples, learn_domains(samples)),
        *make_batch_inputs(samples).values(),
    ]
    for answer, group in zip(runtime.run(export, TARGET, tuple(groups)), groups, strict=True):
        wanted = exporter.reference(model, group, "float64") or {}
        exporter.reference(model, group, "float32")
        if not np.allclose(answer["probabilities"], wanted["probabilities"], atol=1e-4):
            raise SystemExit("the export is not the same function")
    variants = {"fp32": export}
    calibration = {"x": sets["train"].inputs["x"][:CALIBRATION_ROWS]}
    for name, optimizer, rows in (
        ("int8-dynamic", DynamicQuantizer(), None),
        ("int8-static", StaticQuantizer(), calibration),
    ):
        variants[name] = folder / name / "model.onnx"
        variants[name].parent.mkdir()
        quantize = Quantize(
            name=name, method=name.removeprefix("int8-"), calibrate=Calibrate() if rows else None
        )
        optimizer.optimize(
            OptimizeRequest(section=quantize, source=export, path=variants[name], calibration=rows)
        )
    for name, path in variants.items():
        runtime.facts(path, TARGET)
        runtime.run(path, TARGET, (samples,))
        runtime.sample(path, TARGET, feed(samples), runs=800, warmup=50)
        if name != "fp32":
            runtime.benchmark(
                (export, export, path), TARGET, feed(samples), PairedBenchmarkSchedule(rounds=5)
            )
    registry = MlflowRegistry(
        f"sqlite:///{folder / 'mlflow.db'}", artifact_root=str(folder / "mlartifacts")
    )
    versions = registry.publish(publication(variants))
    registry.set_alias("digits-mlp", "champion-cpu-1t", versions["fp32"])
    deploy(folder, export, versions["fp32"])


def deploy(folder: Path, export: Path, version: str) -> None:
    manifest = digest_folder(export.parent).digest()
    deployment = Deployment(
        name=f"v{version}",
        model="digits-mlp",
        version=version,
        variant="fp32",
        release=manifest,
        manifest=manifest,
        location=str(export.parent),
    )
    config = EndpointConfig(
        endpoint="digits",
        provider="local",
        model="digits-mlp",
        target="cpu-1t",
        target_digest=TARGET.digest(),
        pipeline="bare",
    )
    endpoints = LocalEndpoints(folder / "endpoints")
    endpoints.apply(config, build_split_state(None, deployment, 100), generation=1)
    if endpoints.observe(config) is None:
        raise SystemExit("the endpoint does not answer")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
