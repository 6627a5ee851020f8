"""Export: the trained model as ONNX at a pinned opset and IR version, with the source's own answers beside it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from onnx_ops import codec
from onnx_ops.analysis.parity import REAL
from onnx_ops.analysis.probes import batch_inputs, edge_inputs, nonfinite_inputs
from onnx_ops.domain.artifact import Digest, Manifest
from onnx_ops.domain.pipeline import Export, Stage
from onnx_ops.domain.release import Lineage
from onnx_ops.graph.inspect import info
from onnx_ops.graph.metadata import write_lineage
from onnx_ops.ports import Exporter, ExportRequest, Ports, Tensors
from onnx_ops.stages.files import MODEL, TRAINED, checkout, get_dataset, put_document, put_folder, scratch
from onnx_ops.stages.reference import ReferenceGroup, put_reference
from onnx_ops.stages.train import importable

MODEL_FILE = "model.onnx"


def execute(stage: Stage, key: Digest, inputs: Mapping[str, Manifest], ports: Ports) -> Manifest:
    """The stage's key is the release: the digest of data, training and export."""
    settings: Mapping[str, Any] = stage.settings
    section = codec.from_json(settings["section"], Export, where=stage.id)
    exporter = ports.exporter(section.framework)
    dataset = get_dataset(ports.store, inputs[f"data/{settings['data']}"]).head(settings["limit"])
    lineage = Lineage(
        pipeline=settings["pipeline"],
        release=key,
        git_sha=ports.git_sha(),
        data={name.removeprefix("data/"): m.digest() for name, m in inputs.items() if name.startswith("data/")},
    )
    with scratch() as folder, importable(ports.root):
        model = exporter.load(checkout(ports.store, inputs["train"], TRAINED, folder / "trained"))
        exported = folder / "onnx"
        exported.mkdir()
        path = exported / MODEL_FILE
        exporter.export(model, ExportRequest(section=section, samples=dataset.inputs, path=path))
        write_lineage(path, _properties(lineage))
        return Manifest(
            files={
                **put_folder(ports.store, exported, MODEL),
                "info.json": put_document(ports.store, info(path)),
                "lineage.json": put_document(ports.store, lineage),
                "reference.npz": put_reference(ports.store, _answers(exporter, model, dataset.inputs)),
            }
        )


def _properties(lineage: Lineage) -> dict[str, str]:
    properties = {"onnx-ops.pipeline": lineage.pipeline, "onnx-ops.release": lineage.release}
    if lineage.git_sha:
        properties["onnx-ops.git.sha"] = lineage.git_sha
    return properties | {f"onnx-ops.data.{name}": digest for name, digest in lineage.data.items()}


def _answers(exporter: Exporter, model: object, samples: Tensors) -> list[ReferenceGroup]:
    """The source's answers wherever it has some: one that refuses NaN, or an empty batch, has none to compare with."""
    asked = {**edge_inputs(samples), **batch_inputs(samples)}
    with contextlib.suppress(ValueError):  # no input is of floats
        asked["nonfinite"] = nonfinite_inputs(samples)
    answers = [_answer(exporter, model, REAL, samples)]
    for name, tensors in asked.items():
        with contextlib.suppress(ValueError):
            answers.append(_answer(exporter, model, name, tensors))
    return [answer for answer in answers if answer.single is not None or answer.double is not None]


def _answer(exporter: Exporter, model: object, name: str, tensors: Tensors) -> ReferenceGroup:
    return ReferenceGroup(
        name=name,
        inputs=tensors,
        single=exporter.reference(model, tensors, "float32"),
        double=exporter.reference(model, tensors, "float64"),
    )
